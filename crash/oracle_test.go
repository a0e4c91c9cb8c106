package crash

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

var channelNames = map[int]string{1: "email", 6: "webhook", 31: "log"}

// The states of t_msg_record and t_msg_dead, see schema.sql.
const (
	success   = 3
	failed    = 4
	dead      = 5
	expired   = 6
	cancelled = 7
	skipped   = 8
)

// watcher looks at the waiting tasks again and again: none may be in two tables at once, and none may come back once it has ended.
type watcher struct {
	rig            *rig
	seen           map[string]liveTask // by key, as it was seen last
	left           map[string]bool     // no longer there at the last look: what a commit shows may be lost until it is on the disk
	gone           map[string]bool     // nor at the one before, and the server was up in between
	done           sync.WaitGroup
	stop           context.CancelFunc
	looks, illegal int
}

type liveTask struct {
	place           string
	status, attempt int
}

func (r *rig) watch() *watcher {
	w := &watcher{rig: r, seen: map[string]liveTask{}, left: map[string]bool{}, gone: map[string]bool{}}
	ctx, cancel := context.WithCancel(context.Background())
	w.stop = cancel
	w.done.Go(func() {
		for ctx.Err() == nil {
			w.look()
			select {
			case <-time.After(200 * time.Millisecond):
			case <-ctx.Done():
			}
		}
	})
	return w
}

// statusNumber is the number of a status in a view.
const statusNumber = "FIELD(status, 'ready', 'sending', 'unknown', 'success', 'failed', 'dead', 'expired', 'cancelled', 'skipped') - 1"

func (w *watcher) look() {
	rows, err := w.rig.view.Query("SELECT msg_id, channel, place, " + statusNumber + ", attempt FROM v_task WHERE place NOT IN ('t_msg_record', 't_msg_dead')")
	if err != nil { // the database is away
		w.left = map[string]bool{}
		return
	}
	defer rows.Close()
	now := map[string]liveTask{}
	for rows.Next() {
		var (
			id, channel string
			l           liveTask
		)
		if rows.Scan(&id, &channel, &l.place, &l.status, &l.attempt) != nil {
			return
		}
		key := id + "-" + channel
		if other, ok := now[key]; ok {
			w.fault("%s stands in %s and in %s", key, l.place, other.place)
		}
		now[key] = l
	}
	if rows.Err() != nil {
		w.left = map[string]bool{}
		return
	}
	w.looks++
	for key := range w.left {
		if _, ok := now[key]; !ok {
			w.gone[key] = true
		}
	}
	w.left = map[string]bool{}
	for key, l := range now {
		if w.gone[key] {
			w.fault("%s had ended, and is in %s again", key, l.place)
			delete(w.gone, key)
		}
		if before, ok := w.seen[key]; ok && l.attempt < before.attempt-1 {
			w.fault("%s had %d attempts, and has %d", key, before.attempt, l.attempt)
		}
	}
	for key := range w.seen {
		if _, ok := now[key]; !ok {
			w.left[key] = true
		}
	}
	w.seen = now
}

func (w *watcher) fault(format string, args ...any) {
	if w.illegal++; w.illegal < 20 {
		w.rig.t.Errorf(format, args...)
	}
}

func (w *watcher) end() {
	w.stop()
	w.done.Wait()
}

// verdict is the oracle's.
type verdict struct {
	accepted, tasks                               int
	lost, ghosts, early, inTwo, badTwice, unsent  int
	twice, dead, cancelled, failed, expired, cuts int
	keyless, taskless, wrongEnd, figures, doubled int
	looks, illegal                                int
}

func (v verdict) bad() bool {
	return v.lost+v.ghosts+v.early+v.inTwo+v.badTwice+v.unsent+v.keyless+v.taskless+v.wrongEnd+v.figures+v.doubled+v.illegal > 0
}

func (v verdict) String() string {
	return fmt.Sprintf("accepted %d (%d tasks): lost %d, ghosts %d, early %d, in two tables %d, recorded and not sent %d, ended otherwise than sent %d, keys without task %d, tasks without key %d, illegal moves %d in %d looks, figures off %d, attempts written twice %d; "+
		"sent twice %d, of which far from a fault %d; dead %d, failed %d, cancelled %d, expired %d; commits cut off %d",
		v.accepted, v.tasks, v.lost, v.ghosts, v.early, v.inTwo, v.unsent, v.wrongEnd, v.taskless, v.keyless, v.illegal, v.looks, v.figures, v.doubled, v.twice, v.badTwice, v.dead, v.failed, v.cancelled, v.expired, v.cuts)
}

// near tells whether something that a provider took may be unknown to us: it was taken during a fault, or less than a second before.
func (r *rig) near(at time.Time) bool {
	return slices.ContainsFunc(r.faults, func(s span) bool { return at.After(s.start.Add(-time.Second)) && at.Before(s.end.Add(time.Second)) })
}

// judge waits until nothing is live any more, and compares.
func (r *rig) judge(l *ledger) (v verdict) {
	t := r.t
	t.Helper()
	report := func(count *int, format string, args ...any) {
		if *count++; *count <= 5 {
			t.Errorf(format, args...)
		}
	}
	for deadline := time.Now().Add(3 * time.Minute); ; time.Sleep(200 * time.Millisecond) {
		var live int
		err := r.view.QueryRow("SELECT COUNT(*) FROM v_task WHERE status IN ('ready', 'sending', 'unknown')").Scan(&live)
		if err == nil && live == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Errorf("%d tasks are still live (%v)", live, err)
			r.tellLive()
			break
		}
	}
	for _, n := range r.nodes { // so that what the log channel printed is complete
		n.stop(t, 15)
		path := filepath.Join(n.dir, "sent")
		if _, err := os.Stat(path); err == nil {
			r.world.printed(t, path)
		}
	}
	v.accepted, v.cuts = len(l.all), int(r.proxy.cuts.Load())
	type row struct {
		status, attempt int
		due             time.Time
		request         string
	}
	rows, err := r.view.Query("SELECT msg_id, channel, " + statusNumber + ", attempt, due_time, request_id FROM v_task")
	if err != nil {
		t.Fatal(err)
	}
	tasks, messages, requests := map[string]row{}, map[string]bool{}, map[string]string{}
	for rows.Next() {
		var (
			id, channel string
			x           row
		)
		if err := rows.Scan(&id, &channel, &x.status, &x.attempt, &x.due, &x.request); err != nil {
			t.Fatal(err)
		}
		key := id + "-" + channel
		if _, ok := tasks[key]; ok {
			report(&v.inTwo, "%s is there twice", key)
		}
		if other, ok := requests[x.request]; ok && other != id {
			report(&v.inTwo, "request %s is messages %s and %s", x.request, other, id)
		}
		tasks[key], messages[id], requests[x.request] = x, true, id
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	rows.Close()
	v.tasks = len(tasks)
	keys, err := r.view.Query("SELECT msg_id FROM t_idempotency")
	if err != nil {
		t.Fatal(err)
	}
	keyed := map[string]bool{}
	for keys.Next() {
		var id string
		if err := keys.Scan(&id); err != nil {
			t.Fatal(err)
		}
		if keyed[id] = true; !messages[id] {
			report(&v.taskless, "a key stands for message %s, which is nowhere", id)
		}
	}
	keys.Close()
	for id := range messages {
		if !keyed[id] {
			report(&v.keyless, "message %s has no key", id)
		}
	}
	for id, a := range l.all {
		for _, channel := range a.channels {
			if _, ok := tasks[id+"-"+channel]; !ok {
				report(&v.lost, "%s was accepted, and is nowhere", id+"-"+channel)
			}
		}
	}
	for key, x := range tasks {
		seen := r.world.seen[key]
		taken := slices.DeleteFunc(slices.Clone(seen), func(d delivery) bool { return d.verdict != "taken" && d.verdict != "hung" })
		sure := slices.DeleteFunc(slices.Clone(seen), func(d delivery) bool { return d.verdict != "taken" })
		switch x.status {
		case success:
			if len(taken) == 0 {
				report(&v.unsent, "%s is recorded as sent, and was not", key)
			}
		case cancelled:
			v.cancelled++
			if len(seen) > 0 && x.attempt == 0 {
				report(&v.ghosts, "%s is cancelled without an attempt, and was sent", key)
			}
		case dead:
			v.dead++
		case failed:
			v.failed++
		case expired:
			v.expired++
		}
		if x.status != success && x.status != cancelled && len(sure) > 0 && !r.near(sure[0].at) {
			report(&v.wrongEnd, "%s was taken at %v, and ended as %d", key, sure[0].at, x.status)
		}
		if len(sure) > 1 {
			slices.SortFunc(sure, func(a, b delivery) int { return a.at.Compare(b.at) })
			if v.twice++; !r.near(sure[0].at) {
				report(&v.badTwice, "%s was taken %d times, first at %v, far from any fault", key, len(sure), sure[0].at)
			}
		}
		for _, d := range seen {
			if r.clock.latest(d.at).Before(x.due) {
				report(&v.early, "%s was sent at %v by the database's clock, due %v", key, r.clock.latest(d.at), x.due)
			}
		}
	}
	for key := range r.world.seen {
		if _, ok := tasks[key]; !ok {
			report(&v.ghosts, "%s was sent, and is nowhere", key)
		}
	}
	// An attempt has one end: who writes another has lost the task to somebody, and was not stopped by its owner.
	attempts, err := r.view.Query("SELECT msg_id, channel, attempt, COUNT(*), MIN(node), MAX(node) FROM t_msg_attempt GROUP BY msg_id, channel, attempt HAVING COUNT(*) > 1")
	if err != nil {
		t.Fatal(err)
	}
	for attempts.Next() {
		var (
			id                            string
			channel, attempt, n, one, two int
		)
		if err := attempts.Scan(&id, &channel, &attempt, &n, &one, &two); err != nil {
			t.Fatal(err)
		}
		report(&v.doubled, "attempt %d of %s-%s was written %d times, by nodes %d and %d", attempt, id, channelNames[channel], n, one, two)
	}
	attempts.Close()
	var figures, records int
	if err := r.view.QueryRow("SELECT (SELECT COALESCE(SUM(tasks), 0) FROM t_stat_hour), (SELECT COUNT(*) FROM t_msg_record)").Scan(&figures, &records); err != nil {
		t.Fatal(err)
	}
	if figures != records {
		report(&v.figures, "t_stat_hour has %d tasks, t_msg_record %d", figures, records)
	}
	return v
}

// tellLive logs what the tasks are that do not end.
func (r *rig) tellLive() {
	rows, err := r.view.Query(`SELECT CONCAT_WS(' ', place, channel, status, 'attempts', MIN(attempt), 'to', MAX(attempt), 'tasks', COUNT(*), 'due', MIN(next_time), 'to', MAX(next_time), "by", UTC_TIMESTAMP(3),
		'such as', MIN(msg_id), MAX(last_error)) FROM v_task WHERE status IN ('ready', 'sending', 'unknown') GROUP BY place, channel, status`)
	if err != nil {
		r.t.Log(err)
		return
	}
	defer rows.Close()
	for rows.Next() {
		var line string
		if err := rows.Scan(&line); err != nil {
			r.t.Log(err)
		}
		r.t.Log(line)
	}
	for _, n := range r.nodes {
		if text, err := os.ReadFile(filepath.Join(n.dir, "log")); err == nil {
			r.t.Logf("node %s: …%s", n.address, text[max(0, len(text)-4000):])
		}
	}
}

// written reads the ledgers back from the disk: what the oracle knows is what clients could rely on.
func (r *rig) written() (ids int) {
	files, err := filepath.Glob(filepath.Join(r.dir, "ledger*"))
	if err != nil {
		r.t.Fatal(err)
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			r.t.Fatal(err)
		}
		ids += strings.Count(string(text), "accepted ")
	}
	return ids
}
