package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"tidings/internal/localdb"
)

// diary is what clients of scheduled messages were told.
type diary struct {
	mu        sync.Mutex
	accepted  map[string]bool // message id
	cancelled map[string]bool // ids whose cancellation was confirmed
}

// Rotation under fire: slots of ten seconds, writers at full speed, three processes that all move tasks and turn the ring, while
// processes and the database are killed and one is stopped and woken. Every message that a client was told of has one end: sent, never
// before it was due, or cancelled, and then not sent; tables are truncated all the while.
//
// CRASH_ROTATION_SECONDS sets how long.
func TestRotationUnderFire(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	db := startDB(t)
	config := "mysql: {dsn: \"" + db.DSN("tidings") + "\"}\nqueue: {lease: 3s, send_timeout: 1s, settle_budget: 1s}\n" +
		"delay: {slot: 10s, slots: 3, shards: 2, lead: 2s}\nlog: {level: error}\n"
	var dirs, addresses [3]string
	var processes [3]*process
	for i := range processes {
		dirs[i], addresses[i] = worldDir(t), freeAddress(t)
		processes[i] = startTidings(t, dirs[i], addresses[i], config)
	}
	d := &diary{accepted: map[string]bool{}, cancelled: map[string]bool{}}
	stop := make(chan struct{})
	var clients sync.WaitGroup
	for client := range 12 {
		clients.Go(func() { d.write(t, client, addresses, stop) })
	}
	// What was sent shortly before a process or the database was hurt may be sent twice; and a process that is woken in the middle of a
	// send, after its lease, finishes it, though another has sent the message meanwhile.
	var hurt, woken []time.Time
	until := time.Now().Add(time.Duration(rounds(t, "CRASH_ROTATION_SECONDS", 25)) * time.Second)
	for round := 0; time.Now().Before(until); round++ {
		time.Sleep(time.Second + time.Duration(random.Int64N(int64(2*time.Second))))
		hurt = append(hurt, time.Now())
		victim := random.IntN(len(processes))
		switch round % 4 {
		case 0, 2:
			processes[victim].stop(t, syscall.SIGKILL)
			processes[victim] = startTidings(t, dirs[victim], addresses[victim], config)
		case 1: // longer than its lease, and than a slot
			processes[victim].cmd.Process.Signal(syscall.SIGSTOP)
			time.Sleep(12 * time.Second)
			woken = append(woken, time.Now())
			processes[victim].cmd.Process.Signal(syscall.SIGCONT)
		case 3:
			killDatabase(t, db)
		}
	}
	close(stop)
	clients.Wait()
	d.check(t, db, dirs[:], hurt, woken)
}

// write sends messages that are due within a slot, in the ring, or after it, and cancels or reschedules some.
func (d *diary) write(t *testing.T, client int, addresses [3]string, stop <-chan struct{}) {
	random := rand.New(rand.NewPCG(uint64(client), 1))
	for n := 0; ; n++ {
		body := fmt.Sprintf(`{"channels":["log"],"to":"x","text":"hi","request_id":"%d-%d","delay":"%dms"}`, client, n, random.IntN(40_000))
		for {
			select {
			case <-stop:
				return
			default:
			}
			url := "http://" + addresses[random.IntN(len(addresses))]
			status, answer, _ := post(url, body)
			if status == 202 || status == 200 {
				d.told(answer["msg_id"].(string), url, random)
				break
			}
			if status != 0 && status != 503 {
				t.Errorf("%d %v", status, answer)
				return
			}
			time.Sleep(20 * time.Millisecond)
		}
	}
}

func (d *diary) told(id, url string, random *rand.Rand) {
	d.mu.Lock()
	d.accepted[id] = true
	d.mu.Unlock()
	switch random.IntN(20) {
	case 0:
		if status, answer := change(url, id, "cancel", ""); status == 200 && answer["status"] == "cancelled" {
			d.mu.Lock()
			d.cancelled[id] = true
			d.mu.Unlock()
		}
	case 1:
		change(url, id, "reschedule", fmt.Sprintf(`{"delay":"%dms"}`, random.IntN(40_000)))
	}
}

func change(url, id, what, body string) (status int, answer map[string]any) {
	res, err := patient.Post(url+"/api/messages/"+id+"/"+what, "application/json", strings.NewReader(body))
	if err != nil {
		return 0, nil
	}
	defer res.Body.Close()
	json.NewDecoder(res.Body).Decode(&answer)
	return res.StatusCode, answer
}

func (d *diary) check(t *testing.T, db *localdb.Server, dirs []string, hurt, woken []time.Time) {
	t.Helper()
	view := openDB(t, db)
	await(t, "an end for every message", 2*time.Minute, func() bool {
		var n int
		err := view.QueryRow("SELECT COUNT(*) FROM v_task WHERE status IN ('ready', 'sending', 'unknown')").Scan(&n)
		return err == nil && n == 0
	})
	times := map[string][]time.Time{}
	for _, s := range sends(t, dirs...) {
		id := strings.TrimSuffix(s.Key, "-log")
		times[id] = append(times[id], s.Time)
	}
	rows, err := view.Query("SELECT msg_id, COUNT(*), MIN(status), MIN(due_time) FROM v_task GROUP BY msg_id")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	found, early, twice := map[string]bool{}, 0, 0
	for rows.Next() {
		var (
			id, status string
			n          int
			due        time.Time
		)
		if err := rows.Scan(&id, &n, &status, &due); err != nil {
			t.Fatal(err)
		}
		found[id] = true
		sent := times[id] // of several processes
		slices.SortFunc(sent, time.Time.Compare)
		switch {
		case n != 1 || (status != "success" && status != "cancelled"):
			t.Errorf("%s has %d rows, status %s", id, n, status)
		case status == "success" && (len(sent) == 0 || d.cancelled[id]), status == "cancelled" && len(sent) > 0:
			t.Errorf("%s: status %s, %d sends, cancelled as we were told: %v", id, status, len(sent), d.cancelled[id])
		case len(sent) > 0 && sent[0].Before(due):
			early++
			t.Errorf("%s was sent at %v, due %v", id, sent[0], due)
		case len(sent) > 1:
			twice++
			if !shortlyBefore(sent[0], hurt, time.Second) && !shortlyAfter(sent[1:], woken) {
				t.Errorf("%s was sent at %v, far from any kill", id, sent)
			}
		}
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	for id := range d.accepted {
		if !found[id] {
			t.Errorf("%s was accepted and is nowhere", id)
		}
	}
	var turns int
	if err := view.QueryRow("SELECT SUM(generation - 1) FROM t_delay_slot WHERE truncate_time IS NOT NULL").Scan(&turns); err != nil || turns < 3 {
		t.Errorf("slots were truncated %d times (%v), want at least 3", turns, err)
	}
	t.Logf("%d kills and stops, %d accepted, %d cancelled, early %d, sent twice %d, slots truncated %d times", len(hurt), len(d.accepted), len(d.cancelled), early, twice, turns)
	if len(d.accepted) < 1000 {
		t.Errorf("only %d messages were accepted: the test shows little", len(d.accepted))
	}
}

func shortlyAfter(sends, woken []time.Time) bool {
	for _, at := range woken {
		if slices.ContainsFunc(sends, func(sent time.Time) bool { d := sent.Sub(at); return d >= 0 && d <= time.Second }) {
			return true
		}
	}
	return false
}

// The database is away when 10,000 messages become due. Afterwards they are sent, those that have expired are not, and none is sent twice.
func TestDueWhileDatabaseAway(t *testing.T) {
	t.Parallel()
	dbDir, dir := worldDir(t), worldDir(t)
	start := func() *localdb.Server {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		db, err := localdb.Start(ctx, localdb.Config{Dir: dbDir, BufferPool: "64M", RedoLog: "32M"})
		if err != nil {
			t.Fatal(err)
		}
		return db
	}
	db := start()
	defer func() { db.Stop() }()
	p := startTidings(t, dir, freeAddress(t), "mysql: {dsn: \""+db.DSN("tidings")+"\"}\nqueue: {lease: 5s, send_timeout: 2s, settle_budget: 1s}\ndelay: {slot: 10s, lead: 2s}\nlog: {level: error}\n")
	due := time.Now().Add(12 * time.Second)
	const n, expired = 10_000, 1000
	for from := 0; from < n; from += 1000 {
		var items []string
		for i := range 1000 {
			ttl := "1h"
			if i < expired*1000/n {
				ttl = "1s"
			}
			items = append(items, fmt.Sprintf(`{"channels":["log"],"to":"x","text":"hi","send_at":%d,"ttl":"%s"}`, due.UnixMilli(), ttl))
		}
		res, err := http.Post(p.url+"/api/messages/batch", "application/json", strings.NewReader("["+strings.Join(items, ",")+"]"))
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		if res.StatusCode != 200 {
			t.Fatal(res.Status)
		}
	}
	if left := time.Until(due); left < 3*time.Second {
		t.Fatalf("accepting took too long: %v are left", left)
	}
	db.Stop()
	time.Sleep(time.Until(due.Add(3 * time.Second)))
	db = start()
	view := openDB(t, db)
	ends := func(status int) (k int) {
		if view.QueryRow("SELECT COUNT(*) FROM t_msg_record WHERE status = ?", status).Scan(&k) == sql.ErrNoRows {
			return 0
		}
		return k
	}
	await(t, "an end for all", time.Minute, func() bool { return ends(3)+ends(6) == n })
	if got := ends(6); got != expired {
		t.Errorf("%d expired, want %d", got, expired)
	}
	seen := map[string]bool{}
	for _, s := range sends(t, dir) {
		if seen[s.Key] {
			t.Errorf("%s was sent twice", s.Key)
		}
		seen[s.Key] = true
		if s.Time.Before(due.Truncate(time.Millisecond)) {
			t.Errorf("%s was sent at %v, due %v", s.Key, s.Time, due)
		}
	}
	if len(seen) != n-expired {
		t.Errorf("%d were sent, want %d", len(seen), n-expired)
	}
}
