package main

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"tidings/internal/localdb"
)

// rounds is how often the crash test kills something: a few times in `make test`, more with the variable set.
func rounds(t *testing.T, name string, fallback int) int {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return fallback
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return n
}

// ledger is what clients were told: every message id that was answered with 202 or 200.
type ledger struct {
	mu       sync.Mutex
	accepted map[string]string // request id → message id
}

// load posts from several clients until stop is closed. A client that gets no good answer sends the same request again, as
// clients do.
func (l *ledger) load(t *testing.T, url string, clients int, stop <-chan struct{}) *sync.WaitGroup {
	var wg sync.WaitGroup
	for client := range clients {
		wg.Go(func() {
			for n := 0; ; n++ {
				request := fmt.Sprintf("%d-%d", client, n)
				body := fmt.Sprintf(`{"channels":["log"],"to":"x","text":"hi","request_id":"%s"}`, request)
				for {
					select {
					case <-stop:
						return
					default:
					}
					status, answer, _ := post(url, body)
					if status == 202 || status == 200 {
						l.mu.Lock()
						l.accepted[request] = answer["msg_id"].(string)
						l.mu.Unlock()
						break
					}
					if status != 0 && status != 503 {
						t.Errorf("%d %v", status, answer)
						return
					}
					time.Sleep(20 * time.Millisecond)
				}
			}
		})
	}
	return &wg
}

// The process is killed at random moments under load, then the database. Every message that a client was told of ends in
// exactly one table, sent; and what was sent twice was first sent within a second before a kill.
//
// CRASH_PROCESS_KILLS and CRASH_DATABASE_KILLS set how often, CRASH_SEED repeats a run.
func TestKills(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	if text := os.Getenv("CRASH_SEED"); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("CRASH_SEED=%d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	db := startDB(t)
	dir, address := worldDir(t), freeAddress(t)
	config := "mysql: {dsn: \"" + db.DSN("tidings") + "\"}\nqueue: {lease: 3s, send_timeout: 1s, settle_budget: 1s}\n" +
		"providers: {log: {type: log, delay: 5ms}}\nlog: {level: error}\n"
	p := startTidings(t, dir, address, config)
	l := &ledger{accepted: map[string]string{}}
	stop := make(chan struct{})
	clients := l.load(t, p.url, 16, stop)
	var kills []time.Time
	for range rounds(t, "CRASH_PROCESS_KILLS", 3) {
		time.Sleep(300*time.Millisecond + time.Duration(random.Int64N(int64(1500*time.Millisecond))))
		kills = append(kills, time.Now())
		p.stop(t, syscall.SIGKILL)
		p = startTidings(t, dir, address, config)
	}
	for range rounds(t, "CRASH_DATABASE_KILLS", 1) {
		time.Sleep(500*time.Millisecond + time.Duration(random.Int64N(int64(2*time.Second))))
		kills = append(kills, time.Now())
		killDatabase(t, db)
	}
	time.Sleep(time.Second)
	close(stop)
	clients.Wait()
	check(t, db, l, dir, kills)
}

// killDatabase kills the server and waits for the next one.
func killDatabase(t *testing.T, db *localdb.Server) {
	t.Helper()
	pid := db.PID()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	await(t, "the database to come back", 30*time.Second, func() bool { return db.PID() != 0 && db.PID() != pid })
}

// check compares what clients were told with what the tables and the log channel say.
func check(t *testing.T, db *localdb.Server, l *ledger, dir string, kills []time.Time) {
	t.Helper()
	view := openDB(t, db)
	await(t, "an empty queue", 2*time.Minute, func() bool {
		var n int
		err := view.QueryRow("SELECT COUNT(*) FROM v_task WHERE status IN ('ready', 'sending', 'unknown')").Scan(&n)
		return err == nil && n == 0
	})
	times := map[string][]time.Time{}
	for _, s := range sends(t, dir) {
		times[s.Key] = append(times[s.Key], s.Time)
	}
	rows, err := view.Query("SELECT msg_id, COUNT(*), MIN(status), MAX(status) FROM v_task GROUP BY msg_id")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	found := map[string]bool{}
	for rows.Next() {
		var (
			id, least, most string
			n               int
		)
		if err := rows.Scan(&id, &n, &least, &most); err != nil {
			t.Fatal(err)
		}
		if n != 1 || least != "success" || most != "success" {
			t.Errorf("message %s: %d rows, status %s to %s", id, n, least, most)
		}
		found[id] = true
		if len(times[id+"-log"]) == 0 {
			t.Errorf("message %s is recorded and was never sent", id)
		}
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	lost, twice := 0, 0
	for request, id := range l.accepted {
		if !found[id] {
			lost++
			t.Errorf("request %s was accepted as %s and is nowhere", request, id)
		}
	}
	for key, at := range times {
		if len(at) == 1 {
			continue
		}
		twice++
		if !shortlyBefore(at[0], kills, time.Second) {
			t.Errorf("%s was sent %d times, first at %v, far from any kill", key, len(at), at[0])
		}
	}
	var figures, records int
	if err := view.QueryRow("SELECT (SELECT COALESCE(SUM(tasks), 0) FROM t_stat_hour), (SELECT COUNT(*) FROM t_msg_record)").Scan(&figures, &records); err != nil {
		t.Fatal(err)
	}
	if figures != records {
		t.Errorf("t_stat_hour has %d tasks, t_msg_record %d", figures, records)
	}
	t.Logf("%d kills, %d accepted, lost %d, sent twice %d", len(kills), len(l.accepted), lost, twice)
	if len(l.accepted) < 20*len(kills) {
		t.Errorf("only %d messages were accepted: the test shows little", len(l.accepted))
	}
}

func shortlyBefore(at time.Time, kills []time.Time, most time.Duration) bool {
	for _, kill := range kills {
		if d := kill.Sub(at); d > -50*time.Millisecond && d <= most {
			return true
		}
	}
	return false
}
