package store_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"tidings/internal/msg"
	"tidings/internal/testdb"
	"tidings/store"
)

func TestControl(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	other := testdb.Open(t, store.Config{DSN: dsn})
	db, ctx := raw(t, dsn), context.Background()
	c, err := s.Control(ctx)
	if err != nil || c.Nodes != 2 || len(c.Providers) != 0 {
		t.Fatalf("%+v %v", c, err)
	}
	for l, want := range store.DefaultWeights {
		if row := c.Lanes[l]; row.Weight != want || row.Paused || row.Name != msg.Lane(l).String() {
			t.Errorf("%+v", row)
		}
	}
	if _, err := s.SetLane(ctx, "ops", msg.Low, func(row *store.LaneControl) { row.Paused, row.Reason, row.Weight = true, "too much", 5 }); err != nil {
		t.Fatal(err)
	}
	for _, weight := range []int{0, -1, 1001} {
		if _, err := s.SetLane(ctx, "ops", msg.High, func(row *store.LaneControl) { row.Weight = weight }); !errors.Is(err, store.ErrWeight) {
			t.Errorf("weight %d: %v", weight, err)
		}
	}
	run(t, db, "DELETE FROM t_lane WHERE lane = 'middle'") // by hand: the default holds
	until := s.Now().Add(time.Minute).Truncate(time.Millisecond)
	for _, step := range []error{
		s.PauseProvider(ctx, "ops", "relay", "moving", true), s.BusyProvider(ctx, "relay", until), s.BusyProvider(ctx, "relay", until.Add(-time.Second)),
		s.NoteBreaker(ctx, "relay", "open"), other.NoteBreaker(ctx, "relay", "half-open"), other.NoteBreaker(ctx, "relay", "half-open"),
	} {
		if step != nil {
			t.Fatal(step)
		}
	}
	if c, err = other.Control(ctx); err != nil || len(c.Providers) != 3 {
		t.Fatalf("%+v %v", c, err)
	}
	if row := c.Lanes[msg.Low]; !row.Paused || row.Weight != 5 || row.Reason != "too much" || row.By != "ops" {
		t.Errorf("%+v", row)
	}
	if row := c.Lanes[msg.Middle]; row.Weight != 20 {
		t.Errorf("%+v", row)
	}
	for _, row := range c.Providers {
		switch row.Node {
		case store.AllNodes:
			if !row.Paused || row.BusyUntil == nil || !row.BusyUntil.Equal(until) {
				t.Errorf("%+v", row)
			}
		case s.Node():
			if row.Breaker != "open" {
				t.Errorf("%+v", row)
			}
		case other.Node():
			if row.Breaker != "half-open" {
				t.Errorf("%+v", row)
			}
		}
	}
	if n := count(t, db, "SELECT COUNT(*) FROM t_audit WHERE source_id = 'ops' AND action IN ('lane.set', 'provider.pause')"); n != 2 {
		t.Errorf("%d audit rows, want 2", n)
	}
}

// In a lane that stands, what has expired is found wherever it is, and nothing else is touched.
func TestClaimExpired(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	db, ctx := raw(t, dsn), context.Background()
	want := map[uint64]bool{}
	var batch []store.Message
	for i := range 1500 {
		m := *message("")
		if i%2 == 0 {
			m.Expire = s.Now().Add(-time.Second)
		}
		batch = append(batch, m)
	}
	accepted, errs := s.EnqueueBatch(ctx, batch)
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	for i := 0; i < 1500; i += 2 {
		want[accepted[i].MsgID] = true
	}
	run(t, db, "UPDATE t_msg_queue_middle SET next_time = next_time - INTERVAL (1500 - msg_id % 1500) SECOND WHERE msg_id > 0")
	var from store.DueCursor
	got := 0
	for range 10 {
		tasks, next, err := s.ClaimExpired(ctx, msg.Middle, msg.Log, from)
		if err != nil {
			t.Fatal(err)
		}
		for _, task := range tasks {
			if !want[task.MsgID] {
				t.Errorf("%d has not expired, or was taken before", task.MsgID)
			}
			delete(want, task.MsgID)
			got++
		}
		if from = next; from.MsgID == 0 && len(want) == 0 {
			break
		}
	}
	if len(want) > 0 || got != 750 {
		t.Errorf("%d were found, %d left", got, len(want))
	}
	if n := count(t, db, "SELECT COUNT(*) FROM t_msg_queue_middle WHERE status = 0 AND msg_id > 0"); n != 750 {
		t.Errorf("%d tasks wait, want 750", n)
	}
}

// Thousands that are due at one instant and have not expired do not hide one that has.
func TestClaimExpiredBehindTies(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	db, ctx := raw(t, dsn), context.Background()
	var batch []store.Message
	for range 6000 {
		batch = append(batch, *message(""))
	}
	if _, errs := s.EnqueueBatch(ctx, batch); errors.Join(errs...) != nil {
		t.Fatal(errs)
	}
	run(t, db, "UPDATE t_msg_queue_middle SET next_time = UTC_TIMESTAMP(3) - INTERVAL 10 SECOND, expire_time = UTC_TIMESTAMP(3) + INTERVAL 1 HOUR WHERE msg_id > 0")
	id := enqueue(t, s, message("")).MsgID
	run(t, db, "UPDATE t_msg_queue_middle SET next_time = UTC_TIMESTAMP(3) - INTERVAL 5 SECOND, expire_time = UTC_TIMESTAMP(3) - INTERVAL 1 SECOND WHERE msg_id = ?", id)
	var from store.DueCursor
	for range 5 {
		tasks, next, err := s.ClaimExpired(ctx, msg.Middle, msg.Log, from)
		if err != nil {
			t.Fatal(err)
		}
		if len(tasks) == 1 && tasks[0].MsgID == id {
			return
		}
		from = next
	}
	t.Error("it was not found")
}
