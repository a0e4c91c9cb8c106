package store_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"tidings/internal/msg"
	"tidings/internal/testdb"
	"tidings/store"
)

func TestCancel(t *testing.T) {
	t.Parallel()
	s, db := ringOf(t, store.Config{})
	ctx := context.Background()
	claimIt := func(t *testing.T, id uint64) store.Task {
		for _, task := range claim(t, s, 100) {
			if task.MsgID == id {
				return task
			}
		}
		t.Fatal("not claimed")
		return store.Task{}
	}
	for _, c := range []struct {
		name      string
		in        time.Duration
		prepare   func(*testing.T, uint64)
		cancelled int
		err       error
		status    string
	}{
		{name: "in the ring", in: 24 * time.Hour, cancelled: 1, status: "cancelled"},
		{name: "far ahead", in: 200 * time.Hour, cancelled: 1, status: "cancelled"},
		{name: "within the lead", in: 50 * time.Second, cancelled: 1, status: "cancelled"},
		{name: "ready", in: -time.Second, cancelled: 1, status: "cancelled"},
		{name: "twice", in: 24 * time.Hour, status: "cancelled", prepare: func(t *testing.T, id uint64) {
			if n, _, err := s.Cancel(ctx, id, "shop"); n != 1 || err != nil {
				t.Errorf("%d %v", n, err)
			}
		}},
		{name: "being sent", in: -time.Second, err: store.ErrSending, status: "sending", prepare: func(t *testing.T, id uint64) { claimIt(t, id) }},
		{name: "sent", in: -time.Second, err: store.ErrEnded, status: "success", prepare: func(t *testing.T, id uint64) {
			settle(t, s, success(s, claimIt(t, id)))
		}},
		{name: "waiting to be tried again", in: -time.Second, cancelled: 1, status: "cancelled", prepare: func(t *testing.T, id uint64) {
			settle(t, s, store.Outcome{Task: claimIt(t, id), State: msg.Ready, Next: s.Now().Add(time.Hour), Finished: s.Now()})
		}},
		{name: "outcome unknown", in: -time.Second, err: store.ErrSending, status: "sending", prepare: func(t *testing.T, id uint64) {
			settle(t, s, store.Outcome{Task: claimIt(t, id), State: msg.Unknown, Next: s.Now().Add(time.Hour), Finished: s.Now()})
		}},
		{name: "dead", in: -time.Second, err: store.ErrEnded, status: "failed", prepare: func(t *testing.T, id uint64) {
			settle(t, s, store.Outcome{Task: claimIt(t, id), State: msg.Dead, Finished: s.Now()})
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			id := enqueue(t, s, scheduled(s, "", c.in)).MsgID
			if c.prepare != nil {
				c.prepare(t, id)
			}
			n, m, err := s.Cancel(ctx, id, "shop")
			if n != c.cancelled || !errors.Is(err, c.err) || m.Status != c.status {
				t.Errorf("%d tasks, %v, %v; want %d, %s, %v", n, m, err, c.cancelled, c.status, c.err)
			}
			if n := count(t, db, "SELECT COUNT(*) FROM v_task WHERE msg_id = ?", id); n != 1 {
				t.Errorf("%d rows", n)
			}
			if c.status == "cancelled" {
				var reason string
				if err := db.QueryRow("SELECT last_error FROM t_msg_record WHERE msg_id = ? AND status = 7", id).Scan(&reason); err != nil || reason != "cancelled by shop" {
					t.Errorf("%q %v", reason, err)
				}
			}
		})
	}
	if _, _, err := s.Cancel(ctx, 12345, "shop"); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("an unknown message: %v", err)
	}
}

// After a cancel, the same key answers with the cancelled message, and a new key is a new message for the same receiver.
func TestSubscribeAgain(t *testing.T) {
	t.Parallel()
	s, _ := ringOf(t, store.Config{})
	first := enqueue(t, s, scheduled(s, "subscribe-1", 24*time.Hour))
	if _, _, err := s.Cancel(context.Background(), first.MsgID, "shop"); err != nil {
		t.Fatal(err)
	}
	if again := enqueue(t, s, scheduled(s, "subscribe-1", 24*time.Hour)); again.MsgID != first.MsgID || !again.Duplicate {
		t.Errorf("%+v", again)
	}
	second := enqueue(t, s, scheduled(s, "subscribe-2", 24*time.Hour))
	m, err := s.Message(context.Background(), second.MsgID)
	if second.Duplicate || err != nil || m.Status != "scheduled" {
		t.Errorf("%+v %v %v", second, m, err)
	}
}

// Of a cancel and a claim, or a cancel and a move, at the same time exactly one wins.
func TestCancelAgainstClaims(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s, db := ringOf(t, store.Config{DSN: dsn})
	const n = 300
	ids := make([]uint64, n)
	for i := range ids {
		in := 24 * time.Hour
		if i%2 == 0 {
			in = -time.Second
		}
		ids[i] = enqueue(t, s, scheduled(s, "", in)).MsgID
	}
	pass(t, db, "t_msg_delay_2_0", 24*time.Hour)
	cancelled, sent := map[uint64]bool{}, map[uint64]bool{}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			tend(t, s)
			for _, task := range claim(t, s, 7) {
				if sent[task.MsgID] {
					t.Errorf("%d was claimed twice", task.MsgID)
				}
				sent[task.MsgID] = true
				settle(t, s, success(s, task))
			}
		}
	})
	for _, i := range rand.Perm(n) {
		k, _, err := s.Cancel(context.Background(), ids[i], "shop")
		switch {
		case err == nil && k == 1:
			cancelled[ids[i]] = true
		case errors.Is(err, store.ErrSending), errors.Is(err, store.ErrEnded):
		default:
			t.Errorf("%d %v", k, err)
		}
	}
	close(stop)
	wg.Wait()
	for _, id := range ids {
		status := text(t, db, "SELECT status FROM v_task WHERE msg_id = ?", id)
		if cancelled[id] == sent[id] || (cancelled[id] && status != "cancelled") || (sent[id] && status != "success") {
			t.Errorf("%d: cancelled %v, sent %v, status %s", id, cancelled[id], sent[id], status)
		}
	}
	if len(cancelled) == 0 || len(sent) == 0 {
		t.Errorf("%d cancelled, %d sent: no race", len(cancelled), len(sent))
	}
}

func TestReschedule(t *testing.T) {
	t.Parallel()
	s, db := ringOf(t, store.Config{})
	ctx := context.Background()
	id := enqueue(t, s, scheduled(s, "", 24*time.Hour)).MsgID
	for _, c := range []struct {
		to    time.Duration
		place string
	}{
		{24*time.Hour + time.Second, "t_msg_delay_2_0"},
		{48 * time.Hour, "t_msg_delay_3_0"},
		{24 * time.Hour, "t_msg_delay_2_0"}, // back, to its own tombstone
		{200 * time.Hour, "t_msg_delay_far"},
		{201 * time.Hour, "t_msg_delay_far"},
		{48 * time.Hour, "t_msg_delay_3_0"},
		{30 * time.Second, "t_msg_queue_middle"},
		{40 * time.Second, "t_msg_queue_middle"},
		{24 * time.Hour, "t_msg_delay_2_0"},
		{-time.Second, "t_msg_queue_middle"},
	} {
		due := s.Now().Add(c.to).Truncate(time.Millisecond)
		m, err := s.Reschedule(ctx, id, due, time.Time{})
		if err != nil {
			t.Fatalf("to %v: %v", c.to, err)
		}
		if task := m.Tasks[0]; !task.Due.Equal(due) || !task.Expire.Equal(due.Add(time.Hour)) || len(m.Tasks) != 1 {
			t.Errorf("to %v: %+v", c.to, m)
		}
		if got := placeOf(t, db, id); got != c.place {
			t.Errorf("to %v: in %s, want %s", c.to, got, c.place)
		}
	}
	expire := s.Now().Add(time.Minute).Truncate(time.Millisecond)
	if m, err := s.Reschedule(ctx, id, s.Now(), expire); err != nil || !m.Tasks[0].Expire.Equal(expire) {
		t.Errorf("%v %v", m, err)
	}
	task := claim(t, s, 1)[0]
	if _, err := s.Reschedule(ctx, id, s.Now().Add(time.Hour), time.Time{}); !errors.Is(err, store.ErrSending) {
		t.Errorf("while it is being sent: %v", err)
	}
	settle(t, s, success(s, task))
	if _, err := s.Reschedule(ctx, id, s.Now().Add(time.Hour), time.Time{}); !errors.Is(err, store.ErrEnded) {
		t.Errorf("when it has been sent: %v", err)
	}
	if _, err := s.Reschedule(ctx, 12345, s.Now(), time.Time{}); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("an unknown message: %v", err)
	}
}

// All tasks of a message move together, or none does.
func TestRescheduleOverChannels(t *testing.T) {
	t.Parallel()
	s, db := ringOf(t, store.Config{})
	m := scheduled(s, "r", 24*time.Hour)
	m.Tasks = append(m.Tasks, store.NewTask{Channel: msg.Email, Receiver: "ann@example.com", AttemptLimit: 3})
	m.Skipped = []store.SkippedTask{{Channel: msg.SMS, Reason: "no address"}}
	id := enqueue(t, s, m).MsgID
	got, err := s.Reschedule(context.Background(), id, s.Now().Add(48*time.Hour), time.Time{})
	if err != nil || got.Status != "scheduled" {
		t.Fatal(got, err)
	}
	if n := count(t, db, "SELECT COUNT(*) FROM v_task WHERE msg_id = ? AND place = 't_msg_delay_3_0'", id); n != 2 {
		t.Errorf("%d tasks moved, want 2", n)
	}
	tx, err := db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	run(t, tx, "UPDATE t_msg_delay_3_0 SET provider = 'held' WHERE msg_id = ? AND channel = 1", id)
	if _, err := s.Reschedule(context.Background(), id, s.Now().Add(24*time.Hour), time.Time{}); !errors.Is(err, store.ErrBusy) {
		t.Errorf("with a task locked: %v", err)
	}
	if n, _, err := s.Cancel(context.Background(), id, "shop"); !errors.Is(err, store.ErrBusy) || n != 1 {
		t.Errorf("with a task locked: %d %v", n, err)
	}
	tx.Rollback()
	if n, m, err := s.Cancel(context.Background(), id, "shop"); n != 1 || err != nil || m.Status != "cancelled" {
		t.Errorf("%d %v %v", n, m, err)
	}
}

func TestCancelBatch(t *testing.T) {
	t.Parallel()
	s, db := ringOf(t, store.Config{})
	ctx := context.Background()
	var messages []store.Message
	for i := range 1700 {
		m := scheduled(s, fmt.Sprint(i), []time.Duration{-time.Second, 24 * time.Hour, 200 * time.Hour, 30 * time.Second}[i%4])
		m.BatchID = "spring"
		if i%17 == 0 {
			m.BatchID = "autumn"
		}
		if i%5 == 0 {
			m.Tasks = append(m.Tasks, store.NewTask{Channel: msg.Email, Receiver: "ann@example.com", AttemptLimit: 3})
		}
		messages = append(messages, *m)
	}
	if _, errs := s.EnqueueBatch(ctx, messages); errors.Join(errs...) != nil {
		t.Fatal(errs)
	}
	total := count(t, db, "SELECT COUNT(*) FROM v_task WHERE batch_id = 'spring'")
	running := claim(t, s, 20)
	own := len(slices.DeleteFunc(running, func(t store.Task) bool { return t.BatchID != "spring" }))
	n, err := s.CancelBatch(ctx, "default", "spring", "shop")
	if err != nil || n != total-own {
		t.Errorf("cancelled %d of %d with %d being sent: %v", n, total, own, err)
	}
	if n := count(t, db, "SELECT COUNT(*) FROM v_task WHERE batch_id = 'autumn' AND status = 'cancelled'"); n != 0 {
		t.Errorf("%d tasks of another batch were cancelled", n)
	}
	_, counts, err := s.Campaign(ctx, "default", "spring")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range counts {
		if c.Status != msg.Cancelled && c.Status != msg.Sending {
			t.Errorf("%+v", c)
		}
	}
	if n, err := s.CancelBatch(ctx, "default", "spring", "shop"); n != 0 || err != nil {
		t.Errorf("again: %d %v", n, err)
	}
	if _, err := s.CancelBatch(ctx, "default", "none", "shop"); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("an unknown batch: %v", err)
	}
}

// The list of scheduled messages is by due time, pages are exact, and what is cancelled or sent is not in it.
func TestListScheduled(t *testing.T) {
	t.Parallel()
	s, db := ringOf(t, store.Config{Delay: store.DelayConfig{Shards: 2}})
	ctx := context.Background()
	same := 24 * time.Hour
	at := s.Now()
	var want []uint64
	for _, in := range []time.Duration{30 * time.Second, 40 * time.Second, same, same, same, same, same, 48 * time.Hour, 200 * time.Hour} {
		m := scheduled(s, "", in)
		m.SendAt = at.Add(in).Truncate(time.Millisecond)
		want = append(want, enqueue(t, s, m).MsgID)
	}
	other := scheduled(s, "", same)
	other.SourceID = "other"
	enqueue(t, s, other)
	enqueue(t, s, message(""))
	gone := enqueue(t, s, scheduled(s, "", same)).MsgID
	if _, _, err := s.Cancel(ctx, gone, "shop"); err != nil {
		t.Fatal(err)
	}
	var got []uint64
	f := store.Filter{SourceID: "default", Limit: 2}
	for range 20 {
		page, err := s.Scheduled(ctx, f)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range page.Messages {
			got = append(got, m.MsgID)
		}
		if f.After = page.NextDue; f.After.MsgID == 0 {
			break
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %v\nwant %v", got, want)
	}
	for name, f := range map[string]store.Filter{"since": {Since: at.Add(time.Hour)}, "until": {Until: at.Add(-time.Hour)}} {
		f.Limit = 10
		if page, err := s.Scheduled(ctx, f); err != nil || len(page.Messages) > 0 {
			t.Errorf("%s: %d messages (%v), want none", name, len(page.Messages), err)
		}
	}
	if page, err := s.List(ctx, store.Filter{Limit: 100}); err != nil || len(page.Messages) != len(want)+3 {
		t.Errorf("the whole list has %d messages (%v), want %d", len(page.Messages), err, len(want)+3)
	}
	if page, err := s.List(ctx, store.Filter{Status: "cancelled", Limit: 100}); err != nil || len(page.Messages) != 1 || page.Messages[0].MsgID != gone {
		t.Errorf("cancelled: %v %v", page.Messages, err)
	}
	if n := count(t, db, "SELECT SUM(tasks) FROM v_scheduled_by_hour"); n != 8 {
		t.Errorf("v_scheduled_by_hour has %d tasks, want 8", n)
	}
	if n := count(t, db, "SELECT COUNT(*) FROM (SELECT CAST(DATE_FORMAT(due_time, '%Y-%m-%d %H:00') AS DATETIME) AS hour, COUNT(*) AS n FROM v_delay GROUP BY hour) AS asked LEFT JOIN v_scheduled_by_hour ON due_hour = hour AND tasks = n WHERE due_hour IS NULL"); n != 0 {
		t.Errorf("v_scheduled_by_hour counts otherwise in %d hours", n)
	}
}

// A message of which one channel has been sent: a cancel ends the others, again and again with the same answer; it cannot be rescheduled.
func TestPartlySent(t *testing.T) {
	t.Parallel()
	s, _ := ringOf(t, store.Config{})
	ctx := context.Background()
	m := message("r")
	m.Tasks = append(m.Tasks, store.NewTask{Channel: msg.Inbox, Receiver: "x", AttemptLimit: 5})
	id := enqueue(t, s, m).MsgID
	settle(t, s, success(s, claim(t, s, 10)[0]))
	if _, err := s.Reschedule(ctx, id, s.Now().Add(24*time.Hour), time.Time{}); !errors.Is(err, store.ErrEnded) {
		t.Errorf("rescheduled: %v", err)
	}
	for _, want := range []int{1, 0} {
		if n, m, err := s.Cancel(ctx, id, "shop"); n != want || err != nil || m.Status != "partial" {
			t.Errorf("%d %v %v, want %d", n, m, err, want)
		}
	}
}

// A campaign whose tasks move from far away into the ring while it is cancelled is cancelled as a whole.
func TestCancelBatchWhileItMoves(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s, db := ringOf(t, store.Config{DSN: dsn})
	m := scheduled(s, "", 200*time.Hour)
	m.BatchID = "b"
	enqueue(t, s, m)
	run(t, db, "UPDATE t_msg_delay_far SET due_time = UTC_TIMESTAMP(3) + INTERVAL 24 HOUR, next_time = due_time")
	var once sync.Once
	c := testdb.Open(t, store.Config{DSN: dsn, Observe: func(q string) {
		if strings.Contains(q, "tidings:cancel-batch") {
			once.Do(func() { tend(t, s) })
		}
	}})
	if n, err := c.CancelBatch(context.Background(), "default", "b", "shop"); n != 1 || err != nil {
		t.Errorf("cancelled %d: %v", n, err)
	}
}

// A process whose copy of the ring is older than the ring's tables finds what is in them.
func TestOldCopyOfTheRing(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	a := testdb.Open(t, store.Config{DSN: dsn})
	b, _ := ringOf(t, store.Config{DSN: dsn})
	m := scheduled(b, "", 24*time.Hour)
	m.BatchID = "b"
	id := enqueue(t, b, m).MsgID
	if _, err := a.Message(context.Background(), id); err != nil {
		t.Error(err)
	}
	if n, err := a.CancelBatch(context.Background(), "default", "b", "shop"); n != 1 || err != nil {
		t.Errorf("cancelled %d: %v", n, err)
	}
}
