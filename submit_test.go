package main

import (
	"database/sql"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// A thousand rows in transactions of services: half are rolled back, some stay open (SUBMIT_OPEN), and the processes that take them are
// killed in turn. What was committed is sent, each once but for kills; what was not is not; and nobody waits for an open transaction.
func TestSubmitUnderKills(t *testing.T) {
	t.Parallel()
	open, err := time.ParseDuration(os.Getenv("SUBMIT_OPEN"))
	if err != nil {
		open = 5 * time.Second
	}
	db := startDB(t)
	config := "mysql: {dsn: \"" + db.DSN("tidings") + "\"}\nqueue: {lease: 3s, send_timeout: 1s, settle_budget: 1s}\n" +
		"providers: {log: {type: log, delay: 5ms}}\nlog: {level: error}\n"
	dirs, addresses := []string{worldDir(t), worldDir(t)}, []string{freeAddress(t), freeAddress(t)}
	nodes := []*process{startTidings(t, dirs[0], addresses[0], config), startTidings(t, dirs[1], addresses[1], config)}
	view := openDB(t, db)
	const services, transactions = 20, 50
	committed := make([]map[string]bool, services)
	var working sync.WaitGroup
	for service := range services {
		committed[service] = map[string]bool{}
		working.Go(func() {
			random := rand.New(rand.NewPCG(uint64(service), 1))
			for n := range transactions {
				receiver := fmt.Sprintf("%d-%d", service, n)
				tx, err := view.Begin()
				if err != nil {
					t.Error(err)
					return
				}
				if _, err := tx.Exec(`INSERT INTO t_msg_submit (source_id, channels, receiver, content) VALUES ('default', 'log', ?, '{"text": "hi"}')`, receiver); err != nil {
					t.Error(err)
					return
				}
				if n == 10 && service < 6 { // some are open for long
					time.Sleep(open)
				}
				time.Sleep(time.Duration(random.IntN(int(open) / transactions)))
				if n%2 == 0 {
					err = tx.Commit()
					committed[service][receiver] = true
				} else {
					err = tx.Rollback()
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	done := make(chan struct{})
	go func() { working.Wait(); close(done) }()
	var kills []time.Time
	slowest, posts := time.Duration(0), 0
	for k, next := 0, time.Now().Add(time.Second); ; {
		select {
		case <-done:
		default:
			if time.Now().After(next) {
				node := k % 2
				kills = append(kills, time.Now())
				nodes[node].stop(t, syscall.SIGKILL)
				nodes[node] = startTidings(t, dirs[node], addresses[node], config)
				k, next = k+1, time.Now().Add(open/4)
			}
			began := time.Now()
			if status, answer, _ := post(nodes[0].url, `{"channels":["log"],"to":"by http","text":"hi"}`); status != http.StatusAccepted {
				t.Errorf("%d %v", status, answer)
			}
			slowest, posts = max(slowest, time.Since(began)), posts+1
			time.Sleep(10 * time.Millisecond)
			continue
		}
		break
	}
	await(t, "all to be taken and sent", time.Minute, func() bool {
		return count(t, view, "t_msg_submit WHERE status <> 'accepted'")+count(t, view, "v_task WHERE status <> 'success'") == 0
	})
	want := 0
	for service := range services {
		want += len(committed[service])
		for receiver := range committed[service] {
			if n := count(t, view, "t_msg_record WHERE receiver = ?", receiver); n != 1 {
				t.Errorf("%s was committed, and became %d messages", receiver, n)
			}
		}
	}
	got := count(t, view, "t_msg_record WHERE receiver <> 'by http'")
	if want != services*transactions/2 || got != want {
		t.Errorf("%d were committed, %d messages", want, got)
	}
	times := map[string][]time.Time{}
	for _, s := range sends(t, dirs...) {
		times[s.Key] = append(times[s.Key], s.Time)
	}
	twice := 0
	for key, at := range times {
		if len(at) > 1 {
			twice++
			if !shortlyBefore(at[0], kills, time.Second) {
				t.Errorf("%s was sent at %v, far from any kill", key, at)
			}
		}
	}
	// By HTTP they wait for no transaction of a service; taking over the duty of a killed process takes its lease.
	if slowest > 5*time.Second {
		t.Errorf("a POST took %v", slowest)
	}
	var longest float64
	if err := view.QueryRow(`SELECT COALESCE(MAX(TIMESTAMPDIFF(MICROSECOND, r.create_time, r.finish_time)) / 1e6, 0) FROM t_msg_record AS r WHERE r.receiver <> 'by http'`).Scan(&longest); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d committed of %d, transactions open for %v, %d kills: %d messages, %d sent twice; %d POSTs meanwhile, the slowest %v; from accepted to sent %.2f s at most",
		want, services*transactions, open, len(kills), got, twice, posts, slowest.Round(time.Millisecond), longest)
}

// views is how many views the server has made.
func views(t *testing.T, db *sql.DB) (n int) {
	t.Helper()
	var name string
	if err := db.QueryRow("SHOW GLOBAL STATUS LIKE 'Com_create_view'").Scan(&name, &n); err != nil {
		t.Fatal(err)
	}
	return n
}

// The program works with the rights of deploy/grants.sql and no others: the account of every day makes no table, and services cannot read.
func TestGrants(t *testing.T) {
	t.Parallel()
	db := startDB(t)
	dir, address := worldDir(t), freeAddress(t)
	root, err := openRoot(t, db.DSN(""))
	if err != nil {
		t.Fatal(err)
	}
	set(t, root, "CREATE DATABASE tidings CHARACTER SET utf8mb4 COLLATE utf8mb4_bin")
	grants, err := os.ReadFile("deploy/grants.sql")
	if err != nil {
		t.Fatal(err)
	}
	everyday, intake, _ := strings.Cut(string(grants), "-- Services that hand in")
	set(t, root, everyday) // the rights on columns of t_msg_submit need the table
	for _, role := range []string{"runtime", "migrator", "reader"} {
		set(t, root, "CREATE USER u_"+role+"@localhost IDENTIFIED BY 'secret'; GRANT tidings_"+role+" TO u_"+role+"@localhost; SET DEFAULT ROLE tidings_"+role+" FOR u_"+role+"@localhost")
	}
	account := func(role string) string { return strings.Replace(db.DSN("tidings"), "root@", "u_"+role+":secret@", 1) }
	config := "mysql: {dsn: \"" + account("runtime") + "\", migrator_dsn: \"" + account("migrator") + "\"}\nlog: {level: warn}\n" +
		"delay: {slot: 10s, slots: 2, lead: 1s}\nretention: {record: 1h}\narchive_dir: archive\n"
	p := startTidings(t, dir, address, config)
	set(t, root, "USE tidings; -- Services that hand in"+intake)
	set(t, root, "CREATE USER shop@localhost IDENTIFIED BY 'secret'; GRANT tidings_intake TO shop@localhost; SET DEFAULT ROLE tidings_intake FOR shop@localhost")
	view := openDB(t, db)
	status, answer, _ := post(p.url, `{"channels":["log"],"to":"x","text":"hi","delay":"12s"}`)
	if status != http.StatusAccepted {
		t.Fatalf("%d %v", status, answer)
	}
	shop, err := openRoot(t, strings.Replace(db.DSN("tidings"), "root@", "shop:secret@", 1))
	if err != nil {
		t.Fatal(err)
	}
	set(t, shop, `INSERT INTO t_msg_submit (source_id, channels, receiver, content) VALUES ('default', 'log', 'shop', '{"text": "hi"}')`)
	for _, refused := range []string{
		"SELECT * FROM t_msg_submit", "UPDATE t_msg_submit SET receiver = 'x'", "DELETE FROM t_msg_submit", "SELECT * FROM t_msg_record",
		"INSERT INTO t_msg_submit (source_id, channels, receiver, status) VALUES ('default', 'log', 'x', 'accepted')",
	} {
		if _, err := shop.Exec(refused); err == nil {
			t.Errorf("a service may %s", refused)
		}
	}
	everydayAccount, err := openRoot(t, account("runtime"))
	if err != nil {
		t.Fatal(err)
	}
	for _, refused := range []string{"DROP TABLE t_msg_queue_low", "TRUNCATE t_msg_delay_far", "ALTER TABLE t_msg_record DROP PARTITION p_future", "CREATE TABLE t_x (x INT)", "CREATE VIEW v_x AS SELECT 1"} {
		if _, err := everydayAccount.Exec(refused); err == nil {
			t.Errorf("the everyday account may %s", refused)
		}
	}
	reader, err := openRoot(t, account("reader"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"v_queue", "v_stuck", "v_message", "v_task", "v_attempt", "v_dead_by_reason", "v_duplicates", "v_provider_hour", "v_source_day", "v_scheduled_by_hour", "v_batch", "v_lanes", "v_nodes", "v_delay"} {
		if _, err := reader.Exec("SELECT * FROM " + name); err != nil {
			t.Errorf("a reader cannot see %s: %v", name, err)
		}
	}
	if _, err := reader.Exec("UPDATE t_lane SET paused = 1"); err == nil {
		t.Error("a reader may pause lanes")
	}
	await(t, "all to be sent", 40*time.Second, func() bool { return count(t, view, "t_msg_record WHERE status = 3") == 2 })
	made := views(t, root)
	await(t, "a slot to be turned over", 40*time.Second, func() bool { return count(t, view, "t_delay_slot WHERE truncate_time IS NOT NULL") > 0 })
	if again := views(t, root); again != made {
		t.Errorf("views were made anew %d times, with the same tables", again-made)
	}
	if out, _ := command(t, dir, "doctor"); strings.Contains(out, "rights to change tables") {
		t.Errorf("with both accounts:\n%s", out)
	}
	alone := worldDir(t)
	if err := os.WriteFile(filepath.Join(alone, "config.yaml"), []byte("mysql: {dsn: \""+account("runtime")+"\"}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := command(t, alone, "doctor"); err == nil || !strings.Contains(out, "WRONG  rights to change tables") {
		t.Errorf("with the everyday account alone: %v\n%s", err, out)
	}
	if text := p.log.String(); strings.Contains(text, "denied") {
		t.Errorf("rights are missing:\n%s", text)
	}
	if _, err := os.Stat(filepath.Join(dir, "archive")); err != nil {
		t.Error(err)
	}
}
