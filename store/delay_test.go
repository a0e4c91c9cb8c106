package store_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"tidings/internal/msg"
	"tidings/internal/testdb"
	"tidings/store"
)

// ringOf opens a store whose ring has been made.
func ringOf(t testing.TB, cfg store.Config) (*store.Store, *sql.DB) {
	t.Helper()
	if cfg.DSN == "" {
		cfg.DSN = testdb.New(t)
	}
	s := testdb.Open(t, cfg)
	if err := s.Lay(context.Background()); err != nil {
		t.Fatal(err)
	}
	tend(t, s)
	db := raw(t, cfg.DSN)
	settled(t, db, s)
	return s, db
}

// settled lets the time pass that new slots are left to become known.
func settled(t testing.TB, db *sql.DB, s *store.Store) {
	t.Helper()
	run(t, db, "UPDATE t_delay_slot SET modify_time = modify_time - INTERVAL 1 MINUTE WHERE state IN ('ready', 'closing')")
	tend(t, s)
}

func tend(t testing.TB, s *store.Store) (moved int) {
	t.Helper()
	moved, err := tendWith(context.Background(), s)
	if err != nil {
		t.Fatalf("tend: %v", err)
	}
	return moved
}

// tendWith moves tasks and turns the ring.
func tendWith(ctx context.Context, s *store.Store) (moved int, err error) {
	done, err := s.Tend(ctx)
	if err == nil && done.Turn != nil {
		err = done.Turn(ctx)
	}
	return done.Moved, err
}

// scheduled is a message that is due then.
func scheduled(s *store.Store, requestID string, in time.Duration) *store.Message {
	m := message(requestID)
	m.SendAt = s.Now().Add(in).Truncate(time.Millisecond)
	m.Expire = m.SendAt.Add(time.Hour)
	return m
}

func placeOf(t testing.TB, db *sql.DB, id uint64) (place string) {
	t.Helper()
	err := db.QueryRow("SELECT place FROM v_task WHERE msg_id = ?", id).Scan(&place)
	if err != nil {
		t.Fatalf("message %d: %v", id, err)
	}
	return place
}

// pass lets time pass for scheduled tasks: they become due so much earlier.
func pass(t testing.TB, db *sql.DB, table string, by time.Duration) {
	t.Helper()
	run(t, db, fmt.Sprintf("UPDATE %s SET due_time = due_time - INTERVAL %d SECOND, next_time = due_time WHERE status = 0", table, int(by.Seconds())))
}

// end lets a slot's span end, and its grace, too.
func end(t testing.TB, db *sql.DB, slot int) {
	t.Helper()
	run(t, db, "UPDATE t_delay_slot SET state = 'closing', modify_time = UTC_TIMESTAMP(3) - INTERVAL 1 MINUTE, lease_end = '1000-01-01' WHERE slot = ?", slot)
}

func tables(t testing.TB, db *sql.DB, slot int) (names []string) {
	t.Helper()
	rows, err := db.Query("SELECT table_name FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name LIKE ? ORDER BY table_name", fmt.Sprintf(`t\_msg\_delay\_%d\_%%`, slot))
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var name string
		if err := rows.Scan(&name); err != nil {
			t.Fatal(err)
		}
		names = append(names, name)
	}
	return names
}

func TestScheduledGoesWhereItBelongs(t *testing.T) {
	t.Parallel()
	s, db := ringOf(t, store.Config{})
	for _, c := range []struct {
		name   string
		in     time.Duration
		place  string
		status string
	}{
		{"in the past", -time.Minute, "t_msg_queue_middle", "dispatched"},
		{"within the lead", 50 * time.Second, "t_msg_queue_middle", "scheduled"},
		{"in the ring", 24 * time.Hour, "t_msg_delay_2_0", "scheduled"},
		{"in the ring's last slot", 72 * time.Hour, "t_msg_delay_4_0", "scheduled"},
		{"after the ring", 97 * time.Hour, "t_msg_delay_far", "scheduled"},
		{"in ten years", 87600 * time.Hour, "t_msg_delay_far", "scheduled"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := scheduled(s, "", c.in)
			id := enqueue(t, s, m).MsgID
			if got := placeOf(t, db, id); got != c.place {
				t.Errorf("in %s, want %s", got, c.place)
			}
			view, err := s.Message(context.Background(), id)
			if err != nil || view.Status != c.status || !view.Tasks[0].Due.Equal(m.SendAt) {
				t.Errorf("%+v %v, want %s due %v", view, err, c.status, m.SendAt)
			}
			var status string
			if err := db.QueryRow("SELECT status FROM v_message WHERE msg_id = ?", id).Scan(&status); err != nil || status != c.status {
				t.Errorf("v_message says %s %v, want %s", status, err, c.status)
			}
		})
	}
	if got := claim(t, s, 10); len(got) != 1 {
		t.Errorf("claimed %d tasks, want the one from the past", len(got))
	}
}

// Before a ring is there, everything waits in t_msg_delay_far; one that is made meanwhile takes what belongs there.
func TestFarMovesIntoTheRing(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	db := raw(t, dsn)
	near, next, far := enqueue(t, s, scheduled(s, "", 2*time.Minute)), enqueue(t, s, scheduled(s, "", 24*time.Hour)), enqueue(t, s, scheduled(s, "", 200*time.Hour))
	pass(t, db, "t_msg_delay_far", 100*time.Second) // near is due in 20 s
	if moved := tend(t, s); moved != 1 {
		t.Errorf("moved %d, want 1 to its queue", moved)
	}
	settled(t, db, s)
	if moved := tend(t, s); moved != 1 {
		t.Errorf("moved %d, want 1 into the ring", moved)
	}
	for id, want := range map[uint64]string{near.MsgID: "t_msg_queue_middle", next.MsgID: "t_msg_delay_2_0", far.MsgID: "t_msg_delay_far"} {
		if got := placeOf(t, db, id); got != want {
			t.Errorf("in %s, want %s", got, want)
		}
	}
	if n := count(t, db, "SELECT COUNT(*) FROM t_msg_delay_far"); n != 1 {
		t.Errorf("%d rows are left in t_msg_delay_far, want 1: it has no tombstones", n)
	}
	var due, nextTime time.Time
	if err := db.QueryRow("SELECT due_time, next_time FROM t_msg_queue_middle WHERE msg_id = ?", near.MsgID).Scan(&due, &nextTime); err != nil || !due.Equal(nextTime) {
		t.Errorf("due %v, claimed from %v (%v)", due, nextTime, err)
	}
}

func TestShardsTakeTurns(t *testing.T) {
	t.Parallel()
	s, db := ringOf(t, store.Config{Delay: store.DelayConfig{Shards: 4}})
	for range 40 {
		enqueue(t, s, scheduled(s, "", 24*time.Hour))
	}
	for shard := range 4 {
		if n := count(t, db, fmt.Sprintf("SELECT COUNT(*) FROM t_msg_delay_2_%d", shard)); n != 10 {
			t.Errorf("shard %d has %d rows, want 10", shard, n)
		}
	}
}

// Several movers at once: each task arrives once. A row that a DBA has locked waits, and holds up nobody.
func TestManyMovers(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s, db := ringOf(t, store.Config{DSN: dsn})
	var batch []store.Message
	for range 2500 {
		batch = append(batch, *scheduled(s, "", 24*time.Hour))
	}
	accepted, errs := s.EnqueueBatch(context.Background(), batch)
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	pass(t, db, "t_msg_delay_2_0", 24*time.Hour)
	tx, err := db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	locked := accepted[1234].MsgID
	run(t, tx, "UPDATE t_msg_delay_2_0 SET provider = 'held' WHERE msg_id = ?", locked)
	var wg sync.WaitGroup
	total := make([]int, 3)
	for i := range total {
		other := testdb.Open(t, store.Config{DSN: dsn})
		wg.Go(func() {
			n, err := tendWith(context.Background(), other)
			if err != nil {
				t.Errorf("tend: %v", err)
			}
			total[i] = n
		})
	}
	wg.Wait()
	if sum := total[0] + total[1] + total[2]; sum != 2499 {
		t.Errorf("moved %v, want 2,499 in all", total)
	}
	if got := placeOf(t, db, locked); got != "t_msg_delay_2_0" {
		t.Errorf("the locked row is in %s", got)
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	if moved := tend(t, s); moved != 1 {
		t.Errorf("moved %d after the lock, want 1", moved)
	}
	if n := count(t, db, "SELECT COUNT(DISTINCT msg_id) FROM t_msg_queue_middle WHERE msg_id > 0 AND status = 0"); n != 2500 {
		t.Errorf("%d tasks arrived, want 2,500", n)
	}
	if n := count(t, db, "SELECT COUNT(*) FROM v_task"); n != 2500 {
		t.Errorf("v_task has %d rows, want 2,500: tombstones are no tasks", n)
	}
}

// A copy by hand of a task that stands in its queue is dropped; the others of its batch move.
func TestMoverDropsCopies(t *testing.T) {
	t.Parallel()
	s, db := ringOf(t, store.Config{})
	first, second := enqueue(t, s, scheduled(s, "", 24*time.Hour)), enqueue(t, s, scheduled(s, "", 24*time.Hour))
	pass(t, db, "t_msg_delay_2_0", 24*time.Hour)
	run(t, db, "INSERT INTO t_msg_queue_middle SELECT * FROM t_msg_delay_2_0 WHERE msg_id = ?", first.MsgID)
	if moved := tend(t, s); moved != 1 {
		t.Errorf("moved %d, want 1", moved)
	}
	for _, id := range []uint64{first.MsgID, second.MsgID} {
		if got := placeOf(t, db, id); got != "t_msg_queue_middle" {
			t.Errorf("in %s", got)
		}
	}
}

func TestRotation(t *testing.T) {
	t.Parallel()
	s, db := ringOf(t, store.Config{Delay: store.DelayConfig{Shards: 2}})
	gone, late := enqueue(t, s, scheduled(s, "", 24*time.Hour)), enqueue(t, s, scheduled(s, "", 24*time.Hour))
	for shard := range 2 {
		run(t, db, fmt.Sprintf("UPDATE t_msg_delay_2_%d SET due_time = UTC_TIMESTAMP(3) + INTERVAL 5 SECOND WHERE msg_id = ?", shard), gone.MsgID)
	}
	tend(t, s)
	end(t, db, 2)
	tend(t, s)
	if generation := count(t, db, "SELECT generation FROM t_delay_slot WHERE slot = 2"); generation != 1 {
		t.Fatalf("a slot with a task in it was turned over")
	}
	for shard := range 2 {
		pass(t, db, fmt.Sprintf("t_msg_delay_2_%d", shard), 24*time.Hour)
	}
	tend(t, s) // moves it
	tend(t, s)
	want := []string{"t_msg_delay_2_0", "t_msg_delay_2_0_t2", "t_msg_delay_2_1", "t_msg_delay_2_1_t2"}
	if got := tables(t, db, 2); !slices.Equal(got, want) {
		t.Errorf("tables %v, want %v", got, want)
	}
	if n := count(t, db, "SELECT COUNT(*) FROM t_delay_slot WHERE slot = 2 AND state = 'open' AND generation = 2 AND truncate_time > UTC_TIMESTAMP(3) - INTERVAL 1 MINUTE"+
		" AND from_time = (SELECT to_time FROM t_delay_slot WHERE slot = 4) AND TIMESTAMPDIFF(HOUR, from_time, to_time) = 24"); n != 1 {
		t.Error("the slot is not open for the next span")
	}
	for _, table := range want {
		if n := count(t, db, "SELECT COUNT(*) FROM "+table); n != 0 {
			t.Errorf("%s has %d rows", table, n)
		}
	}
	for _, id := range []uint64{gone.MsgID, late.MsgID} {
		if got := placeOf(t, db, id); got != "t_msg_queue_middle" {
			t.Errorf("in %s", got)
		}
	}
}

// ddl are the statements of a turn, in their order.
var ddl = []string{"delay-swap", "delay-look", "delay-truncate", "delay-rename", "slot-reopen", "ring-release"}

func stepIn(statement string) string {
	for _, name := range ddl {
		if strings.Contains(statement, "/* tidings:"+name+" */") {
			return name
		}
	}
	return ""
}

// A process that dies between any two steps leaves what the next pass of another finishes.
func TestRotationAfterCrash(t *testing.T) {
	t.Parallel()
	for _, step := range ddl {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			dsn := testdb.New(t)
			other, db := ringOf(t, store.Config{DSN: dsn})
			ctx, die := context.WithCancel(context.Background())
			doomed := testdb.Open(t, store.Config{DSN: dsn, Observe: func(statement string) {
				if stepIn(statement) == step {
					die()
				}
			}})
			end(t, db, 1)
			_, err := tendWith(ctx, doomed)
			if step != "ring-release" && err == nil {
				t.Fatal("nothing was cut off")
			}
			run(t, db, "UPDATE t_delay_slot SET lease_end = '1000-01-01' WHERE slot = 0") // ten seconds later
			tend(t, other)
			if n := count(t, db, "SELECT COUNT(*) FROM t_delay_slot WHERE slot = 1 AND state = 'open' AND generation = 2"); n != 1 {
				t.Error("the slot was not turned over")
			}
			if got, want := tables(t, db, 1), []string{"t_msg_delay_1_0", "t_msg_delay_1_0_t2"}; !slices.Equal(got, want) {
				t.Errorf("tables %v, want %v", got, want)
			}
		})
	}
}

// A process that is stopped before any step, and woken when the ring has come round twice, does no harm: not even when two are.
func TestRotationByTheStalled(t *testing.T) {
	t.Parallel()
	for _, step := range ddl {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			dsn := testdb.New(t)
			other, db := ringOf(t, store.Config{DSN: dsn})
			end(t, db, 1)
			woken := make(chan struct{})
			var done sync.WaitGroup
			for range 2 {
				var once sync.Once
				stopped := make(chan struct{})
				stalled := testdb.Open(t, store.Config{DSN: dsn, Observe: func(statement string) {
					if stepIn(statement) == step {
						once.Do(func() { close(stopped); <-woken })
					}
				}})
				run(t, db, "UPDATE t_delay_slot SET lease_end = '1000-01-01' WHERE slot = 0")
				done.Go(func() {
					if _, err := tendWith(context.Background(), stalled); err != nil {
						t.Errorf("the stalled one: %v", err)
					}
				})
				select { // the next must not find the ring taken by one that has only begun
				case <-stopped:
				case <-time.After(time.Minute):
					close(woken)
					t.Fatal("it does not come to the step")
				}
				if step == "slot-reopen" || step == "ring-release" {
					break // the first holds no more than a row's update back: the second finds nothing to do
				}
			}
			var ids []uint64
			for range 2 { // two times round, with a task in the slot's table each time
				run(t, db, "UPDATE t_delay_slot SET lease_end = '1000-01-01' WHERE slot = 0")
				end(t, db, 1)
				tend(t, other)
				run(t, db, "UPDATE t_delay_slot SET state = 'open', from_time = UTC_TIMESTAMP(3) - INTERVAL 1 HOUR, to_time = from_time + INTERVAL 24 HOUR WHERE slot = 1")
				tend(t, other)
				id := enqueue(t, other, scheduled(other, "", 2*time.Hour)).MsgID
				if got := placeOf(t, db, id); got != "t_msg_delay_1_0" {
					t.Fatalf("in %s", got)
				}
				ids = append(ids, id)
				if len(ids) == 1 {
					pass(t, db, "t_msg_delay_1_0", 2*time.Hour)
					tend(t, other)
				}
			}
			close(woken)
			done.Wait()
			run(t, db, "UPDATE t_delay_slot SET lease_end = '1000-01-01' WHERE slot = 0")
			tend(t, other)
			for i, want := range []string{"t_msg_queue_middle", "t_msg_delay_1_0"} {
				if got := placeOf(t, db, ids[i]); got != want {
					t.Errorf("task %d is in %s, want %s", i, got, want)
				}
			}
		})
	}
}

// An insert that stalls across a swap meets the table that took the old one's place, or none, and is accepted.
func TestInsertAcrossTheSwap(t *testing.T) {
	t.Parallel()
	for name, retire := range map[string]bool{"swapped": false, "dropped": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dsn := testdb.New(t)
			mover, db := ringOf(t, store.Config{DSN: dsn})
			stopped, woken := make(chan struct{}), make(chan struct{})
			var once sync.Once
			writer := testdb.Open(t, store.Config{DSN: dsn, Observe: func(statement string) {
				if strings.Contains(statement, "INTO t_msg_delay_2_0 ") {
					once.Do(func() { close(stopped); <-woken })
				}
			}})
			var got store.Accepted
			var done sync.WaitGroup
			done.Go(func() { got = enqueue(t, writer, scheduled(writer, "r", 24*time.Hour)) })
			<-stopped
			end(t, db, 2)
			if retire {
				run(t, db, "UPDATE t_delay_slot SET to_time = from_time + INTERVAL 1 HOUR WHERE slot = 2") // another layout
			}
			tend(t, mover)
			tend(t, mover)
			close(woken)
			done.Wait()
			if place := placeOf(t, db, got.MsgID); (place == "t_msg_delay_2_0") == retire {
				t.Errorf("in %s", place)
			}
			run(t, db, "UPDATE "+placeOf(t, db, got.MsgID)+" SET due_time = UTC_TIMESTAMP(3) WHERE status = 0")
			tend(t, mover)
			if place := placeOf(t, db, got.MsgID); place != "t_msg_queue_middle" {
				t.Errorf("in %s, want it in its queue", place)
			}
		})
	}
}

// A task that was put into a table after the last look at it, and before the swap, is moved, not truncated.
func TestStraggler(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	_, db := ringOf(t, store.Config{DSN: dsn})
	var (
		now, later store.Accepted
		once       sync.Once
		writer     = testdb.Open(t, store.Config{DSN: dsn})
	)
	mover := testdb.Open(t, store.Config{DSN: dsn, Observe: func(statement string) {
		if stepIn(statement) == "delay-swap" {
			once.Do(func() {
				now, later = enqueue(t, writer, scheduled(writer, "", 50*time.Second)), enqueue(t, writer, scheduled(writer, "", 48*time.Hour))
				run(t, db, "INSERT INTO t_msg_delay_1_0 SELECT * FROM t_msg_queue_middle WHERE msg_id = ?", now.MsgID)
				run(t, db, "DELETE FROM t_msg_queue_middle WHERE msg_id = ?", now.MsgID)
				run(t, db, "INSERT INTO t_msg_delay_1_0 SELECT * FROM t_msg_delay_3_0 WHERE msg_id = ?", later.MsgID)
				run(t, db, "DELETE FROM t_msg_delay_3_0 WHERE msg_id = ?", later.MsgID)
			})
		}
	}})
	end(t, db, 1)
	tend(t, mover)
	for id, want := range map[uint64]string{now.MsgID: "t_msg_queue_middle", later.MsgID: "t_msg_delay_3_0"} {
		if got := placeOf(t, db, id); got != want {
			t.Errorf("in %s, want %s", got, want)
		}
	}
	if n := count(t, db, "SELECT generation FROM t_delay_slot WHERE slot = 1"); n != 2 {
		t.Errorf("generation %d, want 2", n)
	}
}

// Somebody's long SELECT on a delay table keeps it from being turned over, and costs others a second, once a minute.
func TestLongSelectOnADelayTable(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	var swaps int
	s, db := ringOf(t, store.Config{DSN: dsn, Observe: func(statement string) {
		if stepIn(statement) == "delay-swap" {
			swaps++
		}
	}})
	writer := testdb.Open(t, store.Config{DSN: dsn})
	tx, err := db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	if _, err := tx.Exec("SELECT COUNT(*) FROM t_msg_delay_2_0"); err != nil { // the transaction keeps the table's metadata locked
		t.Fatal(err)
	}
	end(t, db, 2)
	id := enqueue(t, writer, scheduled(writer, "", 48*time.Hour)).MsgID
	var longest time.Duration
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
			}
			began := time.Now()
			if _, err := writer.Message(context.Background(), id); err != nil { // reads all tables
				t.Errorf("a read meanwhile: %v", err)
			}
			longest = max(longest, time.Since(began))
		}
	}()
	for range 5 {
		tend(t, s)
	}
	close(stop)
	<-stopped
	if swaps != 1 {
		t.Errorf("%d swaps were tried within a minute, want 1", swaps)
	}
	if longest > 2*time.Second {
		t.Errorf("a read waited %v, want about a second at most", longest)
	}
	if n := count(t, db, "SELECT COUNT(*) FROM t_delay_slot WHERE slot = 2 AND lease_end > UTC_TIMESTAMP(3) + INTERVAL 50 SECOND"); n != 1 {
		t.Error("the next try is not a minute away")
	}
	tx.Rollback()
	run(t, db, "UPDATE t_delay_slot SET lease_end = '1000-01-01' WHERE slot = 2")
	tend(t, s)
	if n := count(t, db, "SELECT generation FROM t_delay_slot WHERE slot = 2"); n != 2 {
		t.Errorf("generation %d, want 2", n)
	}
}

// Another layout: the old tables take nothing more, are emptied as their tasks become due, and dropped.
func TestLayoutChanges(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	before, db := ringOf(t, store.Config{DSN: dsn})
	id := enqueue(t, before, scheduled(before, "", 24*time.Hour)).MsgID
	after := testdb.Open(t, store.Config{DSN: dsn, Delay: store.DelayConfig{Slot: 12 * time.Hour, Slots: 3, Shards: 2}})
	if err := after.Lay(context.Background()); err != nil {
		t.Fatal(err)
	}
	tend(t, after)
	settled(t, db, after)
	if n := count(t, db, "SELECT COUNT(*) FROM t_delay_slot WHERE state = 'open' AND shards = 2 AND slot IN (5, 6, 7)"); n != 3 {
		t.Errorf("%d slots have the new layout, want 3", n)
	}
	if got := placeOf(t, db, enqueue(t, after, scheduled(after, "", 2*time.Hour)).MsgID); !strings.HasPrefix(got, "t_msg_delay_5_") && !strings.HasPrefix(got, "t_msg_delay_6_") {
		t.Errorf("in %s, want a new table", got)
	}
	for slot := 1; slot <= 4; slot++ {
		run(t, db, "UPDATE t_delay_slot SET modify_time = modify_time - INTERVAL 1 MINUTE WHERE slot = ?", slot)
	}
	tend(t, after)
	for slot, want := range map[int]int{1: 0, 2: 2, 3: 0, 4: 0} {
		if got := tables(t, db, slot); len(got) != want {
			t.Errorf("slot %d has the tables %v, want %d", slot, got, want)
		}
	}
	if got := placeOf(t, db, id); got != "t_msg_delay_2_0" {
		t.Errorf("in %s, want it to wait where it is", got)
	}
	pass(t, db, "t_msg_delay_2_0", 24*time.Hour)
	tend(t, after)
	tend(t, after)
	if got := tables(t, db, 2); len(got) != 0 {
		t.Errorf("tables %v, want none", got)
	}
	if got := placeOf(t, db, id); got != "t_msg_queue_middle" {
		t.Errorf("in %s", got)
	}
	if n := count(t, db, "SELECT COUNT(*) FROM t_delay_slot WHERE slot BETWEEN 1 AND 4 AND state = 'retired'"); n != 4 {
		t.Errorf("%d slots are retired, want 4", n)
	}
}

// Fewer slots: those that are too many are dropped when their time is over.
func TestFewerSlots(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	_, db := ringOf(t, store.Config{DSN: dsn})
	s := testdb.Open(t, store.Config{DSN: dsn, Delay: store.DelayConfig{Slots: 3}})
	if err := s.Lay(context.Background()); err != nil {
		t.Fatal(err)
	}
	end(t, db, 1)
	tend(t, s)
	if got := tables(t, db, 1); len(got) != 0 {
		t.Errorf("tables %v, want none", got)
	}
}

// A slot that lacks a table is retired: its other tables' tasks move, and another slot is made.
func TestMissingTables(t *testing.T) {
	t.Parallel()
	for name, lost := range map[string]string{"in use": "t_msg_delay_2_0", "twin": "t_msg_delay_2_0_t1"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, db := ringOf(t, store.Config{Delay: store.DelayConfig{Shards: 2}})
			for range 4 {
				enqueue(t, s, scheduled(s, "", 24*time.Hour))
			}
			run(t, db, "DROP TABLE "+lost)
			if name == "twin" { // missed when it is needed
				end(t, db, 2)
				for shard := range 2 {
					pass(t, db, fmt.Sprintf("t_msg_delay_2_%d", shard), 24*time.Hour)
				}
			}
			for range 3 {
				tend(t, s)
			}
			settled(t, db, s)
			tend(t, s)
			if got := tables(t, db, 2); len(got) != 0 {
				t.Errorf("tables %v, want none", got)
			}
			if got, want := tables(t, db, 5), []string{"t_msg_delay_5_0", "t_msg_delay_5_0_t1", "t_msg_delay_5_1", "t_msg_delay_5_1_t1"}; !slices.Equal(got, want) {
				t.Errorf("tables %v, want %v", got, want)
			}
			want := map[string]int{"in use": 2, "twin": 4}[name]
			if n := count(t, db, "SELECT COUNT(*) FROM v_task WHERE status = 'ready'"); n != want {
				t.Errorf("%d tasks are left, want %d", n, want)
			}
		})
	}
}

// A slot whose maker was stopped is given up, and what it makes later is never used.
func TestAbandonedSlot(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	db := raw(t, dsn)
	stopped, woken := make(chan struct{}), make(chan struct{})
	var once sync.Once
	maker := testdb.Open(t, store.Config{DSN: dsn, Observe: func(statement string) {
		if strings.Contains(statement, "/* tidings:delay-create */") {
			once.Do(func() { close(stopped); <-woken })
		}
	}})
	var done sync.WaitGroup
	done.Go(func() {
		if _, err := tendWith(context.Background(), maker); err != nil {
			t.Errorf("the maker: %v", err)
		}
	})
	<-stopped
	run(t, db, "UPDATE t_delay_slot SET lease_end = '1000-01-01', modify_time = UTC_TIMESTAMP(3) - INTERVAL 2 MINUTE")
	other := testdb.Open(t, store.Config{DSN: dsn})
	tend(t, other)
	settled(t, db, other)
	if n := count(t, db, "SELECT COUNT(*) FROM t_delay_slot WHERE state = 'open' AND slot BETWEEN 2 AND 5"); n != 4 {
		t.Errorf("%d slots are open, want 4 new ones", n)
	}
	close(woken)
	done.Wait()
	if n := count(t, db, "SELECT COUNT(*) FROM t_delay_slot WHERE slot = 1 AND state = 'retired'"); n != 1 {
		t.Error("the abandoned slot is in use")
	}
}

// What is due while nobody was there is moved at the next pass, whichever slot it was in, and the ring starts again from now.
func TestCatchUp(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s, db := ringOf(t, store.Config{DSN: dsn})
	for _, in := range []time.Duration{2 * time.Hour, 24 * time.Hour, 48 * time.Hour, 72 * time.Hour, 200 * time.Hour} {
		enqueue(t, s, scheduled(s, "", in))
	}
	const away = 8 * 24 * 3600
	run(t, db, fmt.Sprintf("UPDATE t_delay_slot SET from_time = from_time - INTERVAL %d SECOND, to_time = to_time - INTERVAL %[1]d SECOND WHERE slot > 0", away))
	for _, table := range []string{"t_msg_delay_1_0", "t_msg_delay_2_0", "t_msg_delay_3_0", "t_msg_delay_4_0", "t_msg_delay_far"} {
		pass(t, db, table, away*time.Second)
	}
	tend(t, s)
	if n := count(t, db, "SELECT COUNT(*) FROM t_msg_queue_middle WHERE msg_id > 0 AND next_time = due_time"); n != 4 {
		t.Errorf("%d tasks are in their queue, want 4", n)
	}
	run(t, db, "UPDATE t_delay_slot SET modify_time = modify_time - INTERVAL 1 MINUTE")
	tend(t, s)
	if n := count(t, db, "SELECT COUNT(*) FROM t_delay_slot WHERE state = 'open' AND generation = 2"); n != 4 {
		t.Errorf("%d slots are open again, want 4", n)
	}
	if n := count(t, db, "SELECT COUNT(*) FROM t_delay_slot WHERE state = 'open' AND from_time <= UTC_TIMESTAMP(3) AND to_time > UTC_TIMESTAMP(3)"); n != 1 {
		t.Errorf("%d slots take what is due now, want 1", n)
	}
	if got := claim(t, s, 10); len(got) != 4 {
		t.Errorf("claimed %d", len(got))
	}
}

func TestDelayStatus(t *testing.T) {
	t.Parallel()
	s, _ := ringOf(t, store.Config{})
	soon := scheduled(s, "", 24*time.Hour)
	enqueue(t, s, soon)
	enqueue(t, s, scheduled(s, "", 24*time.Hour))
	enqueue(t, s, scheduled(s, "", 200*time.Hour))
	status, err := s.DelayStatus(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	var tasks int64
	for _, table := range status.Tables {
		tasks += table.Tasks
	}
	if len(status.Slots) != 5 || tasks != 3 || len(status.Hours) < 2 || !status.Hours[0].Hour.Equal(soon.SendAt.Truncate(time.Hour)) || status.Hours[0].Tasks < 1 {
		t.Errorf("%+v", status)
	}
}

// A scheduled message is its key's for as long as an immediate one, from the time that it is due.
func TestScheduledKeyLives(t *testing.T) {
	t.Parallel()
	s, db := ringOf(t, store.Config{})
	first := enqueue(t, s, scheduled(s, "r", 100*time.Hour))
	if n := count(t, db, "SELECT ROUND(TIMESTAMPDIFF(SECOND, UTC_TIMESTAMP(3), expire_time) / 3600) FROM t_idempotency"); n != 124 {
		t.Errorf("the key is kept for %d hours, want 100 and 24", n)
	}
	if again := enqueue(t, s, scheduled(s, "r", 100*time.Hour)); !again.Duplicate || again.MsgID != first.MsgID {
		t.Errorf("%+v", again)
	}
	if _, err := s.Reschedule(context.Background(), first.MsgID, s.Now().Add(200*time.Hour), time.Time{}); err != nil {
		t.Fatal(err)
	}
	if n := count(t, db, "SELECT ROUND(TIMESTAMPDIFF(SECOND, UTC_TIMESTAMP(3), expire_time) / 3600) FROM t_idempotency"); n != 224 {
		t.Errorf("the key is kept for %d hours after rescheduling, want 200 and 24", n)
	}
}

func TestScheduledIsNotHandedOff(t *testing.T) {
	t.Parallel()
	reserved := 0
	s, db := ringOf(t, store.Config{Reserve: func(msg.Lane, msg.Channel, int) store.Reservation { reserved++; return nil }})
	for _, in := range []time.Duration{30 * time.Second, 25 * time.Hour} {
		enqueue(t, s, scheduled(s, "", in))
	}
	if reserved != 0 {
		t.Error("slots were asked for")
	}
	if n := count(t, db, "SELECT COUNT(*) FROM v_task WHERE status = 'ready'"); n != 2 {
		t.Errorf("%d tasks are ready, want 2", n)
	}
}

// A table of a slot that is being dropped is not made again by one who stood still, and what was put into it is found.
func TestMendByTheStalled(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	other, db := ringOf(t, store.Config{DSN: dsn})
	inMend, inWrite, woken, written := make(chan struct{}), make(chan struct{}), make(chan struct{}), make(chan struct{})
	var once, once2 sync.Once
	stopped := testdb.Open(t, store.Config{DSN: dsn, Observe: func(q string) {
		if strings.Contains(q, "tidings:delay-tables") {
			once.Do(func() { close(inMend); <-woken })
		}
		if strings.Contains(q, "INTO t_msg_delay_2_0 ") {
			once2.Do(func() { close(inWrite); <-written })
		}
	}})
	var done, wrote sync.WaitGroup
	var got store.Accepted
	wrote.Go(func() { got = enqueue(t, stopped, scheduled(stopped, "r", 24*time.Hour)) })
	<-inWrite
	run(t, db, "DROP TABLE t_msg_delay_1_0") // as another process does between our copy of the ring and our look
	done.Go(func() { tendWith(context.Background(), stopped) })
	<-inMend
	tend(t, other)
	end(t, db, 2)
	run(t, db, "UPDATE t_delay_slot SET to_time = from_time + INTERVAL 1 HOUR WHERE slot = 2")
	tend(t, other)
	tend(t, other)
	close(woken)
	done.Wait()
	close(written)
	wrote.Wait()
	if m, err := other.Message(context.Background(), got.MsgID); err != nil || m.Status != "scheduled" {
		t.Errorf("%v %v", m, err)
	}
	if got := tables(t, db, 2); len(got) != 0 {
		t.Errorf("tables %v, want none", got)
	}
}

// A mover that stands still before its transaction holds nothing, for a transaction is one statement to it.
func TestMoverStandsStill(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	other, db := ringOf(t, store.Config{DSN: dsn})
	id := enqueue(t, other, scheduled(other, "", 24*time.Hour)).MsgID
	pass(t, db, "t_msg_delay_2_0", 24*time.Hour)
	in, woken := make(chan struct{}), make(chan struct{})
	var once sync.Once
	stopped := testdb.Open(t, store.Config{DSN: dsn, Observe: func(q string) {
		if strings.Contains(q, "tidings:delay-put") {
			once.Do(func() { close(in); <-woken })
		}
	}})
	var done sync.WaitGroup
	done.Go(func() { tendWith(context.Background(), stopped) })
	<-in
	tend(t, other)
	if got := placeOf(t, db, id); got != "t_msg_queue_middle" {
		t.Errorf("in %s while the other is stopped", got)
	}
	close(woken)
	done.Wait()
	if n := count(t, db, "SELECT COUNT(*) FROM v_task WHERE msg_id = ?", id); n != 1 {
		t.Errorf("%d tasks", n)
	}
}

// A DBA's lock on a delay table, or on rows or gaps of a lane, holds up the tasks there, and no others.
func TestMoverAndLocks(t *testing.T) {
	t.Parallel()
	s, db := ringOf(t, store.Config{})
	low, high := scheduled(s, "", 24*time.Hour), scheduled(s, "", 24*time.Hour)
	low.Lane, high.Lane = msg.Low, msg.High
	lowID, highID := enqueue(t, s, low).MsgID, enqueue(t, s, high).MsgID
	pass(t, db, "t_msg_delay_2_0", 24*time.Hour)
	conn, err := db.Conn(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.ExecContext(context.Background(), "LOCK TABLES t_msg_delay_4_0 WRITE"); err != nil {
		t.Fatal(err)
	}
	tx, err := db.BeginTx(context.Background(), &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	run(t, tx, "DELETE FROM t_msg_queue_low WHERE batch_id = 'b'") // locks gaps
	began := time.Now()
	tendWith(context.Background(), s)
	if took := time.Since(began); took > 6*time.Second {
		t.Errorf("a pass took %v", took)
	}
	if _, err := conn.ExecContext(context.Background(), "UNLOCK TABLES"); err != nil {
		t.Fatal(err)
	}
	for id, want := range map[uint64]string{highID: "t_msg_queue_high", lowID: "t_msg_delay_2_0"} {
		if got := placeOf(t, db, id); got != want {
			t.Errorf("in %s, want %s", got, want)
		}
	}
	tx.Rollback()
	tend(t, s)
	if got := placeOf(t, db, lowID); got != "t_msg_queue_low" {
		t.Errorf("in %s after the lock", got)
	}
}

// A task that came late into a table of a retired slot, which somebody reads meanwhile, is moved all the same.
func TestRetiredStraggler(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	mover, db := ringOf(t, store.Config{DSN: dsn})
	stopped, woken := make(chan struct{}), make(chan struct{})
	var once sync.Once
	writer := testdb.Open(t, store.Config{DSN: dsn, Observe: func(q string) {
		if strings.Contains(q, "INTO t_msg_delay_2_0 ") {
			once.Do(func() { close(stopped); <-woken })
		}
	}})
	var got store.Accepted
	var done sync.WaitGroup
	done.Go(func() { got = enqueue(t, writer, scheduled(writer, "r", 24*time.Hour)) })
	<-stopped
	tx, err := db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	if _, err := tx.Exec("SELECT COUNT(*) FROM t_msg_delay_2_0"); err != nil {
		t.Fatal(err)
	}
	end(t, db, 2)
	run(t, db, "UPDATE t_delay_slot SET to_time = from_time + INTERVAL 1 HOUR WHERE slot = 2")
	tend(t, mover) // retires the slot, and cannot drop its table
	close(woken)
	done.Wait()
	run(t, db, "UPDATE t_msg_delay_2_0 SET due_time = UTC_TIMESTAMP(3) WHERE status = 0")
	run(t, db, "UPDATE t_delay_slot SET state = 'closing', modify_time = UTC_TIMESTAMP(3) - INTERVAL 1 MINUTE WHERE slot = 1") // there is something to do
	tend(t, mover)
	if place := placeOf(t, db, got.MsgID); place != "t_msg_queue_middle" {
		t.Errorf("in %s", place)
	}
}

// While somebody has the views open, they are not tried again and again.
func TestViewsAreBusy(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	_, db := ringOf(t, store.Config{DSN: dsn})
	run(t, db, "CREATE OR REPLACE VIEW v_delay AS "+viewOf("t_msg_delay_far"))
	tx, err := db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	if _, err := tx.Exec("SELECT COUNT(*) FROM v_task"); err != nil {
		t.Fatal(err)
	}
	views := 0
	s := testdb.Open(t, store.Config{DSN: dsn, Observe: func(q string) {
		if strings.Contains(q, "tidings:delay-view */") {
			views++
		}
	}})
	for range 4 {
		tendWith(context.Background(), s)
	}
	if views != 1 {
		t.Errorf("%d tries, want 1 a minute", views)
	}
	tx.Rollback()
	tend(t, testdb.Open(t, store.Config{DSN: dsn}))
	id := enqueue(t, s, scheduled(s, "", 24*time.Hour)).MsgID
	if got := placeOf(t, db, id); got != "t_msg_delay_2_0" {
		t.Errorf("the view shows it in %s", got)
	}
}

func viewOf(table string) string {
	return "SELECT '" + table + "' AS place, msg_id, channel, source_id, request_id, batch_id, category, priority, receiver, template_id, template_version, status, attempt, " +
		"attempt_limit, owner, due_time, next_time, expire_time, provider, last_error, create_time, modify_time FROM " + table + " WHERE status <> 9"
}

// A task that was rescheduled to another time, and back into the table that a stalled mover had looked at, stays there until its new time.
func TestMoverAfterReschedule(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s, db := ringOf(t, store.Config{DSN: dsn})
	id := enqueue(t, s, scheduled(s, "", 24*time.Hour)).MsgID
	run(t, db, "UPDATE t_msg_delay_2_0 SET due_time = UTC_TIMESTAMP(3) + INTERVAL 10 SECOND, next_time = due_time")
	in, woken := make(chan struct{}), make(chan struct{})
	var once sync.Once
	stopped := testdb.Open(t, store.Config{DSN: dsn, Observe: func(q string) {
		if strings.Contains(q, "tidings:delay-put") {
			once.Do(func() { close(in); <-woken })
		}
	}})
	var done sync.WaitGroup
	done.Go(func() { tendWith(context.Background(), stopped) })
	<-in
	if _, err := s.Reschedule(context.Background(), id, s.Now().Add(24*time.Hour), time.Time{}); err != nil {
		t.Fatal(err)
	}
	close(woken)
	done.Wait()
	if got := placeOf(t, db, id); got != "t_msg_delay_2_0" {
		t.Errorf("in %s", got)
	}
}
