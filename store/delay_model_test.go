package store_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"tidings/internal/testdb"
	"tidings/store"
)

// world is what the model knows: every accepted message, its due time by a clock that the test turns, and what became of it.
type world struct {
	t      *rapid.T
	stores []*store.Store
	db     *sql.DB
	turned time.Duration // how far the clock was turned on
	due    map[uint64]time.Time
	order  []uint64
	ended  map[uint64]string
}

func (w *world) now() time.Time { return w.stores[0].Now().Add(w.turned) }

func (w *world) check(err error) {
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) any(label string) *store.Store {
	return w.stores[rapid.IntRange(0, len(w.stores)-1).Draw(w.t, label)]
}

// anyDue draws a due time: in the past, within the lead, in the ring, after it.
func (w *world) anyDue() time.Duration {
	return time.Duration(rapid.OneOf(rapid.IntRange(-3, 12), rapid.IntRange(0, 60), rapid.IntRange(0, 400)).Draw(w.t, "due in")) * time.Second
}

func (w *world) accept() {
	s, in := w.any("store"), w.anyDue()
	m := scheduled(s, "", in)
	m.Expire = m.SendAt.Add(1000 * time.Hour)
	got, err := s.Enqueue(context.Background(), m)
	w.check(err)
	w.due[got.MsgID] = m.SendAt.Add(w.turned)
	w.order = append(w.order, got.MsgID)
}

func (w *world) pick() (uint64, bool) {
	if len(w.order) == 0 {
		return 0, false
	}
	return rapid.SampledFrom(w.order).Draw(w.t, "message"), true
}

func (w *world) cancel() {
	id, ok := w.pick()
	if !ok {
		return
	}
	n, _, err := w.any("store").Cancel(context.Background(), id, "model")
	switch {
	case w.ended[id] == "sent":
		if !errors.Is(err, store.ErrEnded) {
			w.t.Fatalf("cancel of a sent message: %d %v", n, err)
		}
	case err != nil, (n == 1) == (w.ended[id] == "cancelled"):
		w.t.Fatalf("cancel: %d %v, it was %q", n, err, w.ended[id])
	default:
		w.ended[id] = "cancelled"
	}
}

func (w *world) reschedule() {
	id, ok := w.pick()
	if !ok {
		return
	}
	s := w.any("store")
	due := s.Now().Add(w.anyDue()).Truncate(time.Millisecond)
	_, err := s.Reschedule(context.Background(), id, due, time.Time{})
	if w.ended[id] != "" {
		if !errors.Is(err, store.ErrEnded) {
			w.t.Fatalf("reschedule of a message that was %s: %v", w.ended[id], err)
		}
		return
	}
	w.check(err)
	w.due[id] = due.Add(w.turned)
}

func (w *world) tend() {
	_, err := tendWith(context.Background(), w.any("store"))
	w.check(err)
}

// newLayout is a process that starts with another layout, or the same.
func (w *world) newLayout() {
	w.check(w.any("store").Lay(context.Background()))
	w.tend()
}

// turn turns the clock on: all that the tables know of time comes nearer.
func (w *world) turn() {
	by := time.Duration(rapid.OneOf(rapid.IntRange(1, 5), rapid.IntRange(1, 60)).Draw(w.t, "seconds")) * time.Second
	w.turned += by
	ago := fmt.Sprintf("INTERVAL %d SECOND", int(by.Seconds()))
	rows, err := w.db.Query("SELECT table_name FROM information_schema.tables WHERE table_schema = DATABASE() AND table_type = 'BASE TABLE' AND" +
		" (table_name LIKE 't\\_msg\\_delay\\_%' OR table_name LIKE 't\\_msg\\_queue\\_%')")
	w.check(err)
	var statements []string
	for rows.Next() {
		var table string
		w.check(rows.Scan(&table))
		statements = append(statements, fmt.Sprintf("UPDATE %s SET due_time = due_time - %s, next_time = next_time - %[2]s WHERE msg_id > 0", table, ago))
	}
	w.check(errors.Join(rows.Err(), rows.Close()))
	statements = append(statements, fmt.Sprintf("UPDATE t_delay_slot SET from_time = from_time - %s, to_time = to_time - %[1]s, "+
		"modify_time = modify_time - %[1]s, lease_end = lease_end - %[1]s WHERE slot > 0", ago))
	_, err = w.db.Exec(strings.Join(statements, "; "))
	w.check(err)
	for _, s := range w.stores {
		s.AgeCopies(by)
	}
}

// send claims what is due, and settles it.
func (w *world) send() {
	s := w.any("store")
	claimed, err := s.Claim(context.Background(), 1, 31, 100, time.Time{})
	w.check(err)
	var outcomes []store.Outcome
	for _, task := range claimed.Tasks {
		if due := w.due[task.MsgID]; w.ended[task.MsgID] != "" || w.now().Before(due.Add(-time.Millisecond)) {
			w.t.Fatalf("%d is claimed at %v, due %v, %q before", task.MsgID, w.now(), due, w.ended[task.MsgID])
		}
		w.ended[task.MsgID] = "sent"
		outcomes = append(outcomes, success(s, task))
	}
	verdicts, err := s.Settle(context.Background(), outcomes)
	w.check(err)
	for _, v := range verdicts {
		if v != store.Done {
			w.t.Fatalf("settled: %v", verdicts)
		}
	}
}

// everywhere tells that each accepted task stands in exactly one place, in the state that the model has for it.
func (w *world) everywhere(*rapid.T) {
	rows, err := w.db.Query("SELECT msg_id, COUNT(*), MIN(status), MIN(place) FROM v_task GROUP BY msg_id")
	w.check(err)
	defer rows.Close()
	seen := 0
	for rows.Next() {
		var (
			id            uint64
			n             int
			status, place string
		)
		w.check(rows.Scan(&id, &n, &status, &place))
		if want := map[string]string{"": "ready", "sent": "success", "cancelled": "cancelled"}[w.ended[id]]; n != 1 || status != want {
			w.t.Fatalf("%d: %d rows, status %s in %s; the model has %q", id, n, status, place, w.ended[id])
		}
		seen++
	}
	w.check(rows.Err())
	if seen != len(w.order) {
		w.t.Fatalf("%d of %d tasks are somewhere", seen, len(w.order))
	}
}

// Any order of accepts, cancels, reschedules, clock steps, turns of the ring, changes of its layout and sends leaves each task in one
// place, and gives it one end: none before its time, none twice, none after its cancellation.
func TestDelayModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(r *rapid.T) {
		dsn := testdb.New(t)
		w := &world{t: r, due: map[uint64]time.Time{}, ended: map[uint64]string{}}
		for _, layout := range []store.DelayConfig{
			{Slot: 20 * time.Second, Slots: 3, Shards: 1, Lead: 2 * time.Second}, {Slot: 30 * time.Second, Slots: 2, Shards: 3, Lead: 5 * time.Second},
		} {
			s, err := store.Open(context.Background(), store.Config{DSN: dsn, Delay: layout, Observe: testdb.Observe})
			w.check(err)
			defer s.Close()
			w.stores = append(w.stores, s)
		}
		var err error
		w.db, err = sql.Open("mysql", strings.Replace(dsn, "?", "?", 1)+separator(dsn)+"multiStatements=true&time_zone=%27%2B00%3A00%27")
		w.check(err)
		defer w.db.Close()
		r.Repeat(map[string]func(*rapid.T){
			"accept": func(r *rapid.T) { w.t = r; w.accept() }, "accept2": func(r *rapid.T) { w.t = r; w.accept() },
			"cancel": func(r *rapid.T) { w.t = r; w.cancel() }, "reschedule": func(r *rapid.T) { w.t = r; w.reschedule() },
			"tend": func(r *rapid.T) { w.t = r; w.tend() }, "turn": func(r *rapid.T) { w.t = r; w.turn() },
			"layout": func(r *rapid.T) { w.t = r; w.newLayout() }, "send": func(r *rapid.T) { w.t = r; w.send() }, "": w.everywhere,
		})
		w.t = r
		for range 100 {
			if w.left() == 0 {
				break
			}
			w.turn()
			w.tend()
			w.send()
		}
		w.everywhere(r)
		if n := w.left(); n > 0 {
			r.Fatalf("%d tasks never ended", n)
		}
	})
}

func (w *world) left() int { return len(w.order) - len(w.ended) }

func separator(dsn string) string {
	if strings.Contains(dsn, "?") {
		return "&"
	}
	return "?"
}
