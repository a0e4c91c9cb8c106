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

// bury makes n dead letters, and gives each its reason.
func bury(t testing.TB, s *store.Store, n int, change func(i int, m *store.Message), reason func(i int) string) []store.Task {
	t.Helper()
	for i := range n {
		m := message(fmt.Sprintf("bury-%d-%d", s.Now().UnixNano(), i))
		if change != nil {
			change(i, m)
		}
		enqueue(t, s, m)
	}
	tasks := claim(t, s, n)
	if len(tasks) != n {
		t.Fatalf("claimed %d of %d", len(tasks), n)
	}
	slices.SortFunc(tasks, func(a, b store.Task) int { return int(int64(a.MsgID) - int64(b.MsgID)) })
	var outcomes []store.Outcome
	for i, task := range tasks {
		outcomes = append(outcomes, store.Outcome{
			Task: task, State: msg.Dead, Provider: "relay", Error: reason(i), Finished: s.Now(), Alarm: store.AlarmDaily,
			Attempt: &store.Attempt{Outcome: "temporary", Code: "421", Text: reason(i)},
		})
	}
	for i, verdict := range settle(t, s, outcomes...) {
		if verdict != store.Done {
			t.Fatalf("dead letter %d: %v", i, verdict)
		}
	}
	return tasks
}

func sameReason(i int) string { return "421 try later" }

// again gives a requeued task five attempts and an hour.
func again(context.Context, *store.Task) (int, time.Duration) { return 5, time.Hour }

// A requeued dead letter is in its lane, with the key and the attempts that it had, and five more; the audit says who did it.
func TestRequeueOne(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	db := raw(t, dsn)
	task := bury(t, s, 1, nil, sameReason)[0]
	run(t, db, "UPDATE t_msg_dead SET expire_time = '2020-01-01'")
	ctx := context.Background()
	d, err := s.Dead(ctx, task.MsgID, msg.Log)
	if err != nil || d.LastError != "421 try later" || len(d.Attempts) != 1 || d.Died.IsZero() || d.Content != nil {
		t.Fatalf("%+v %v", d, err)
	}
	if err := s.HandleDead(ctx, task.MsgID, msg.Log, store.Handling{By: "ann", Policy: again}); err != nil {
		t.Fatal(err)
	}
	if n := count(t, db, `SELECT COUNT(*) FROM t_msg_queue_middle WHERE msg_id = ? AND status = 0 AND attempt = 1 AND attempt_limit = 6 AND owner = ''
		AND expire_time > UTC_TIMESTAMP(3) + INTERVAL 59 MINUTE AND last_error = '421 try later' AND content IS NOT NULL`, task.MsgID); n != 1 {
		t.Error("the task is not in its lane as it should be")
	}
	if n := count(t, db, "SELECT COUNT(*) FROM t_msg_dead"); n != 0 {
		t.Error("the dead letter is still there")
	}
	if n := count(t, db, "SELECT COUNT(*) FROM t_audit WHERE source_id = 'ann' AND action = 'dead.requeue' AND object = ?", task.Key()); n != 1 {
		t.Error("the audit does not say so")
	}
	if again := claim(t, s, 1); len(again) != 1 || again[0].Key() != task.Key() || again[0].Attempt != 2 {
		t.Errorf("claimed %+v", again)
	}
	if err := s.HandleDead(ctx, task.MsgID, msg.Log, store.Handling{By: "ann", Policy: again}); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("a second time: %v", err)
	}
}

// One that has more time than the policy gives keeps it; one that dies again between the look and the lock is left alone.
func TestRequeueCarefully(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	db := raw(t, dsn)
	tasks := bury(t, s, 2, nil, sameReason)
	run(t, db, "UPDATE t_msg_dead SET expire_time = UTC_TIMESTAMP(3) + INTERVAL 30 DAY WHERE msg_id = ?", tasks[0].MsgID)
	if err := s.HandleDead(context.Background(), tasks[0].MsgID, msg.Log, store.Handling{By: "ann", Policy: again}); err != nil {
		t.Fatal(err)
	}
	if n := count(t, db, "SELECT COUNT(*) FROM t_msg_queue_middle WHERE msg_id = ? AND expire_time > UTC_TIMESTAMP(3) + INTERVAL 29 DAY", tasks[0].MsgID); n != 1 {
		t.Error("its time was cut short")
	}
	got, err := s.HandleAllDead(context.Background(), store.DeadFilter{Until: s.Now().Add(time.Millisecond)}, store.Handling{By: "ann", Policy: func(ctx context.Context, task *store.Task) (int, time.Duration) {
		run(t, db, "UPDATE t_msg_dead SET modify_time = modify_time + INTERVAL 1 HOUR") // it dies again
		return again(ctx, task)
	}})
	if err != nil || got.Tasks != 0 {
		t.Errorf("%+v %v", got, err)
	}
	if n := count(t, db, "SELECT COUNT(*) FROM t_msg_dead"); n != 1 {
		t.Errorf("%d dead letters", n)
	}
}

// A discarded dead letter has failed, without what a sensitive message said, and counts as ended.
func TestDiscard(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	db := raw(t, dsn)
	tasks := bury(t, s, 2, func(i int, m *store.Message) {
		if i == 0 {
			m.Category = msg.Verification
		}
	}, sameReason)
	for _, task := range tasks {
		if err := s.HandleDead(context.Background(), task.MsgID, msg.Log, store.Handling{By: "ann", Discard: true, Reason: "too late"}); err != nil {
			t.Fatal(err)
		}
	}
	for i, content := range []string{"IS NULL", "IS NOT NULL"} {
		if n := count(t, db, "SELECT COUNT(*) FROM t_msg_record WHERE msg_id = ? AND status = 4 AND last_error = 'discarded by ann: too late' AND content "+content, tasks[i].MsgID); n != 1 {
			t.Errorf("task %d is not recorded as discarded, content %s", i, content)
		}
	}
	if n := count(t, db, "SELECT SUM(tasks) FROM t_stat_hour WHERE outcome = 'failed'"); n != 2 {
		t.Errorf("the figures say %d", n)
	}
	if n := count(t, db, "SELECT COUNT(*) FROM t_audit WHERE source_id = 'ann' AND action = 'dead.discard'"); n != 2 {
		t.Errorf("%d audit rows", n)
	}
}

// A filter means what it says.
func TestDeadFilter(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	db := raw(t, dsn)
	tasks := bury(t, s, 4, func(i int, m *store.Message) {
		m.SourceID = []string{"shop", "shop", "bank", "bank"}[i]
		m.Category = []msg.Category{msg.Marketing, msg.Notification, msg.Verification, msg.Notification}[i]
		m.TemplateID = []string{"", "welcome", "", ""}[i]
	}, func(i int) string { return []string{"421 Try Later", "550 mailbox full", "timeout", "100 % lost"}[i] })
	for i, task := range tasks { // they died a minute after each other
		run(t, db, fmt.Sprintf("UPDATE t_msg_dead SET modify_time = '2026-11-30 12:0%d:00' WHERE msg_id = %d", i, task.MsgID))
	}
	minute := func(n int) time.Time { return time.Date(2026, 11, 30, 12, n, 0, 0, time.UTC) }
	for _, c := range []struct {
		name string
		f    store.DeadFilter
		want []int
	}{
		{"all", store.DeadFilter{}, []int{3, 2, 1, 0}},
		{"source", store.DeadFilter{SourceID: "shop"}, []int{1, 0}},
		{"category", store.DeadFilter{Category: "notification"}, []int{3, 1}},
		{"template", store.DeadFilter{TemplateID: "welcome"}, []int{1}},
		{"channel", store.DeadFilter{Channel: msg.Log}, []int{3, 2, 1, 0}},
		{"another channel", store.DeadFilter{Channel: msg.Email}, nil},
		{"reason, in any case", store.DeadFilter{Reason: "try later"}, []int{0}},
		{"reason, no pattern", store.DeadFilter{Reason: "%"}, []int{3}},
		{"since", store.DeadFilter{Since: minute(2)}, []int{3, 2}},
		{"until", store.DeadFilter{Until: minute(2)}, []int{1, 0}},
		{"several", store.DeadFilter{SourceID: "bank", Since: minute(1), Until: minute(3)}, []int{2}},
	} {
		var got []int
		cursor := store.DeadCursor{}
		for { // one by one, to see that pages fit together
			page, err := s.DeadLetters(context.Background(), c.f, cursor, 1)
			if err != nil {
				t.Fatal(err)
			}
			if len(page) == 0 {
				break
			}
			cursor = store.DeadCursor{Died: page[0].Died, MsgID: page[0].MsgID, Channel: page[0].Channel}
			got = append(got, slices.IndexFunc(tasks, func(task store.Task) bool { return task.MsgID == page[0].MsgID }))
		}
		counts, err := s.CountDead(context.Background(), c.f)
		if err != nil || !slices.Equal(got, c.want) || counts[msg.Log] != len(c.want) || counts[msg.Email] != 0 {
			t.Errorf("%s: %v, want %v; counted %v, %v", c.name, got, c.want, counts, err)
		}
	}
}

// Two requeue the same dead letters at once, and each is requeued once; those that died after the call are left.
func TestRequeueAll(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	db := raw(t, dsn)
	bury(t, s, 300, nil, sameReason)
	until := s.Now().Add(time.Millisecond)
	run(t, db, "UPDATE t_msg_dead SET modify_time = UTC_TIMESTAMP(3) + INTERVAL 1 HOUR ORDER BY msg_id LIMIT 1")
	var (
		wg  sync.WaitGroup
		all [2]store.Handled
		err [2]error
	)
	for i := range all {
		wg.Go(func() {
			all[i], err[i] = s.HandleAllDead(context.Background(), store.DeadFilter{Until: until}, store.Handling{By: "ann", Policy: again, Rate: 2000})
		})
	}
	wg.Wait()
	if n := all[0].Tasks + all[1].Tasks; n != 299 || err[0] != nil || err[1] != nil || !all[0].Done || !all[1].Done {
		t.Errorf("%+v %v", all, err)
	}
	if n := count(t, db, "SELECT COUNT(*) FROM t_msg_queue_middle WHERE status = 0 AND msg_id > 0"); n != 299 {
		t.Errorf("%d in the lane", n)
	}
	if n := count(t, db, "SELECT COUNT(*) FROM t_msg_dead"); n != 1 {
		t.Errorf("%d dead letters left", n)
	}
}

// The rate holds, and a caller that goes away stops it; what is done is done.
func TestRequeueRate(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	bury(t, s, 100, nil, sameReason)
	ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
	defer cancel()
	got, err := s.HandleAllDead(ctx, store.DeadFilter{}, store.Handling{By: "ann", Policy: again, Rate: 50})
	if err != nil || got.Done || got.Tasks < 10 || got.Tasks > 30 {
		t.Errorf("%+v %v, want some 25 in half a second", got, err)
	}
	if n := count(t, raw(t, dsn), "SELECT COUNT(*) FROM t_msg_dead"); n != 100-got.Tasks {
		t.Errorf("%d dead letters left", n)
	}
}

// A channel that is out of order stops it.
func TestRequeueStops(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	bury(t, s, 40, nil, sameReason)
	down, asked := errors.New("down"), 0
	got, err := s.HandleAllDead(context.Background(), store.DeadFilter{}, store.Handling{By: "ann", Policy: again, Rate: 100, Ready: func(context.Context, store.Route) error {
		if asked++; asked > 2 {
			return down
		}
		return nil
	}})
	if !errors.Is(err, down) || got.Done || got.Tasks != 20 {
		t.Errorf("%+v %v, want 20 and stopped", got, err)
	}
}

// A dead letter whose task was copied to its queue by hand, and one that somebody has locked, do not hold up the others.
func TestRequeueLeavesOut(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	db := raw(t, dsn)
	tasks := bury(t, s, 20, nil, sameReason)
	run(t, db, "INSERT INTO t_msg_queue_middle SELECT * FROM t_msg_dead WHERE msg_id = ?", tasks[3].MsgID)
	dba, err := db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer dba.Rollback()
	run(t, dba, "SELECT 1 FROM t_msg_dead WHERE msg_id = ? FOR UPDATE", tasks[7].MsgID)
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	h := store.Handling{By: "ann", Policy: again, Rate: store.MostRequeueRate}
	done := make(chan store.Handled)
	go func() {
		got, err := s.HandleAllDead(ctx, store.DeadFilter{}, h)
		if err != nil {
			t.Error(err)
		}
		done <- got
	}()
	deadline := time.Now().Add(3 * time.Second)
	for count(t, db, "SELECT COUNT(*) FROM t_msg_dead") > 2 && time.Now().Before(deadline) {
		time.Sleep(5 * time.Millisecond)
	}
	dba.Rollback()
	if got := <-done; got.Tasks != 19 || got.Left != 1 || !got.Done {
		t.Errorf("%+v, want 19 requeued, 1 left", got)
	}
	if err := s.HandleDead(context.Background(), tasks[3].MsgID, msg.Log, h); !errors.Is(err, store.ErrQueued) {
		t.Errorf("the copied one: %v", err)
	}
}

// Alarms: a dead letter is to be told of until it has been; handled ones are not told of; one that dies again is told of again.
func TestAlarmTables(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	db := raw(t, dsn)
	ctx := context.Background()
	tasks := bury(t, s, 5, nil, sameReason)
	levels, err := s.AlarmLevels(ctx)
	if err != nil || len(levels) != 2 {
		t.Fatalf("%+v %v", levels, err)
	}
	for _, l := range levels {
		if (l.Oldest != nil) != (l.Level == store.AlarmDaily) || l.Taken || (l.Told == nil) != (l.Level == store.AlarmNow) {
			t.Errorf("%+v", l)
		}
	}
	owner, err := s.TakeAlarm(ctx, store.AlarmDaily, time.Minute)
	if err != nil || owner == "" {
		t.Fatal(owner, err)
	}
	if other, err := s.TakeAlarm(ctx, store.AlarmDaily, time.Minute); err != nil || other != "" {
		t.Errorf("taken twice: %q %v", other, err)
	}
	if err := s.HandleDead(ctx, tasks[4].MsgID, msg.Log, store.Handling{By: "ann", Discard: true}); err != nil {
		t.Fatal(err)
	}
	first, err := s.Untold(ctx, store.AlarmDaily, store.AlarmKey{}, 2)
	if err != nil || len(first) != 2 || first[0].MsgID != tasks[0].MsgID || first[0].Reason != "421 try later" || first[0].Category != "notification" {
		t.Fatalf("%+v %v", first, err)
	}
	rest, err := s.Untold(ctx, store.AlarmDaily, first[1].AlarmKey, 10)
	if err != nil || len(rest) != 3 || rest[2].Category != "" {
		t.Fatalf("%+v %v", rest, err)
	}
	// The first one is requeued and dies again, while its alarm is under way.
	if err := s.HandleDead(ctx, tasks[0].MsgID, msg.Log, store.Handling{By: "ann", Policy: again}); err != nil {
		t.Fatal(err)
	}
	revived := claim(t, s, 1)
	settle(t, s, store.Outcome{Task: revived[0], State: msg.Dead, Error: "again", Finished: s.Now(), Alarm: store.AlarmDaily})
	if err := s.Told(ctx, store.AlarmDaily, []store.AlarmKey{first[0].AlarmKey, first[1].AlarmKey}); err != nil {
		t.Fatal(err)
	}
	if err := s.LeaveAlarm(ctx, store.AlarmDaily, owner, true, "", 0); err != nil {
		t.Fatal(err)
	}
	left, err := s.Untold(ctx, store.AlarmDaily, store.AlarmKey{}, 10)
	if err != nil || len(left) != 4 || left[3].MsgID != tasks[0].MsgID || left[3].Reason != "again" {
		t.Errorf("%+v %v, want three and the one that died again", left, err)
	}
	if n := count(t, db, "SELECT COUNT(*) FROM t_alarm_level WHERE level = 'daily' AND told_time > UTC_TIMESTAMP(3) - INTERVAL 10 SECOND AND owner = '' AND lease_end <= UTC_TIMESTAMP(3)"); n != 1 {
		t.Error("the level does not say that people were told")
	}
	if owner, err = s.TakeAlarm(ctx, store.AlarmDaily, time.Minute); err != nil || owner == "" {
		t.Fatal(owner, err)
	}
	if err := s.LeaveAlarm(ctx, store.AlarmDaily, owner, false, "no answer", time.Minute); err != nil {
		t.Fatal(err)
	}
	if n := count(t, db, "SELECT COUNT(*) FROM t_alarm_level WHERE level = 'daily' AND last_error = 'no answer' AND lease_end > UTC_TIMESTAMP(3) + INTERVAL 50 SECOND"); n != 1 {
		t.Error("after a failure there is no rest")
	}
}

// Who has rows of t_stat_hour locked, as a report in another isolation level does, holds up nothing but figures; they come right.
func TestLockedFigures(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	db := raw(t, dsn)
	fill(t, s, 8)
	tasks := claim(t, s, 8)
	settle(t, s, success(s, tasks[0]))
	dba, err := db.BeginTx(context.Background(), &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
	if err != nil {
		t.Fatal(err)
	}
	defer dba.Rollback()
	run(t, dba, "SELECT SUM(tasks) FROM t_stat_hour FOR UPDATE")
	for i, task := range tasks[1:7] { // the first may wait once
		began := time.Now()
		outcome := success(s, task)
		if i%2 == 1 { // the careful way
			settle(t, s, outcome, store.Outcome{Task: store.Task{MsgID: 1, Channel: msg.Log, Lane: msg.Middle, Owner: "x"}, State: msg.Failed, Finished: s.Now()})
		} else if verdict := settle(t, s, outcome)[0]; verdict != store.Done {
			t.Errorf("settled: %v", verdict)
		}
		if took := time.Since(began); took > 4*time.Second || (i > 0 && took > time.Second) {
			t.Errorf("task %d was settled after %v", i, took)
		}
	}
	m := message("skips one")
	m.Skipped = []store.SkippedTask{{Channel: msg.Email, Reason: "no address"}}
	enqueue(t, s, m)
	if n := count(t, db, "SELECT COUNT(*) FROM t_msg_record"); n != 8 {
		t.Errorf("%d tasks are recorded while the figures are locked", n)
	}
	if n := count(t, db, "SELECT COALESCE(SUM(tasks), 0) FROM t_stat_hour"); n != 1 {
		t.Errorf("%d tasks in the figures while they are locked", n)
	}
	dba.Rollback()
	deadline := time.Now().Add(10 * time.Second)
	for count(t, db, "SELECT SUM(tasks) FROM t_stat_hour") != 8 {
		if time.Now().After(deadline) {
			t.Fatalf("the figures have %d tasks", count(t, db, "SELECT SUM(tasks) FROM t_stat_hour"))
		}
		time.Sleep(20 * time.Millisecond)
	}
	for s.Owing() { // until it is seen that nothing is left to pay
		if time.Now().After(deadline.Add(5 * time.Second)) {
			t.Fatal("figures are owed for ever")
		}
		time.Sleep(20 * time.Millisecond)
	}
	settle(t, s, success(s, tasks[7]))
	if n := count(t, db, "SELECT SUM(tasks) FROM t_stat_hour"); n != 9 {
		t.Errorf("%d tasks in the figures: not in the transaction any more", n)
	}
}

// Who has a template's row locked does not hold up scheduled messages.
func TestMoveBesideLockedTemplate(t *testing.T) {
	t.Parallel()
	s, db := ringOf(t, store.Config{})
	v := store.Template{ID: "code", SourceID: "default", Channel: msg.Log, Content: "{{code}}", Status: store.TemplateNormal, Sensitive: true}
	if err := s.CreateTemplate(context.Background(), "ann", &v); err != nil {
		t.Fatal(err)
	}
	m := scheduled(s, "r", 2*time.Minute)
	m.TemplateID, m.Params, m.Content, m.Tasks[0].TemplateVersion = "code", []byte(`{"code":"1"}`), nil, 1
	id := enqueue(t, s, m).MsgID
	view, err := s.Message(context.Background(), id)
	if err != nil {
		t.Fatal(err)
	}
	pass(t, db, view.Tasks[0].Place, 3*time.Minute)
	dba, err := db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer dba.Rollback()
	run(t, dba, "SELECT * FROM t_msg_template FOR UPDATE")
	if n := tend(t, s); n != 1 {
		t.Errorf("%d were moved", n)
	}
}

// What waits is counted by state, and no further than is asked for.
func TestBacklog(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	db := raw(t, dsn)
	bury(t, s, 2, nil, sameReason)
	for i := range 5 {
		enqueue(t, s, message(fmt.Sprint(i)))
	}
	tasks := claim(t, s, 3)
	settle(t, s, store.Outcome{Task: tasks[0], State: msg.Ready, Next: s.Now().Add(time.Hour)}, store.Outcome{Task: tasks[1], State: msg.Unknown, Next: s.Now().Add(time.Hour)})
	run(t, db, "UPDATE t_msg_queue_middle SET next_time = UTC_TIMESTAMP(3) - INTERVAL 10 MINUTE WHERE status = 0 AND attempt = 0 AND msg_id > 0")
	b, err := s.Backlog(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]int{}
	for _, d := range b.Depths {
		got[d.Lane.String()+" "+d.Channel.String()+" "+d.State] = d.Tasks
	}
	want := map[string]int{"middle log ready": 2, "middle log waiting": 1, "middle log sending": 1, "middle log unknown": 1}
	for name, n := range want {
		if got[name] != n {
			t.Errorf("%s: %d, want %d", name, got[name], n)
		}
	}
	if len(b.Oldest) != 1 || s.Now().Sub(b.Oldest[0].Next) < 10*time.Minute || len(b.Dead) != 1 || b.Dead[0].Tasks != 2 || b.Dead[0].Category != "notification" {
		t.Errorf("%+v", b)
	}
	run(t, db, "UPDATE t_msg_queue_middle SET status = 77 WHERE status = 2")
	if _, err := s.Backlog(context.Background()); err != nil {
		t.Errorf("with a status that there is not: %v", err)
	}
	if n, err := s.Ahead(context.Background(), msg.Middle, msg.Log, s.Now(), 1); n != 1 || err != nil {
		t.Errorf("ahead: %d %v, want 1 at most", n, err)
	}
	nodes, err := s.Nodes(context.Background())
	if err != nil || len(nodes) != 1 || !nodes[0].Serves || nodes[0].PID == 0 {
		t.Errorf("%+v %v", nodes, err)
	}
}

// Whatever ends a task adds it to the figures, in the same transaction: they are the record's.
func TestStats(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	db := raw(t, dsn)
	ctx := context.Background()
	for i := range 8 {
		m := message(fmt.Sprint(i))
		m.TemplateID = []string{"", "welcome"}[i%2]
		if i == 6 {
			m.Skipped = []store.SkippedTask{{Channel: msg.Email, Reason: "no address"}}
		}
		enqueue(t, s, m)
	}
	enqueue(t, s, scheduled(s, "later", 100*time.Hour))
	tasks := claim(t, s, 8)
	settle(t, s,
		store.Outcome{Task: tasks[0], State: msg.Success, Latency: 30 * time.Millisecond, Finished: s.Now()},
		store.Outcome{Task: tasks[1], State: msg.Success, Latency: 50 * time.Millisecond, Finished: s.Now()},
		store.Outcome{Task: tasks[2], State: msg.Success, Latency: 10 * time.Millisecond, Finished: s.Now()})
	settle(t, s, // one by one: the careful way
		store.Outcome{Task: tasks[3], State: msg.Failed, Finished: s.Now()},
		store.Outcome{Task: tasks[4], State: msg.Ready, Next: s.Now().Add(time.Hour)},
		store.Outcome{Task: store.Task{MsgID: tasks[5].MsgID, Channel: msg.Log, Lane: msg.Middle, Owner: "somebody"}, State: msg.Expired, Finished: s.Now()})
	if _, _, err := s.Cancel(ctx, tasks[4].MsgID, "ann"); err != nil {
		t.Fatal(err)
	}
	later, err := s.MessageByRequest(ctx, "default", "later")
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.Cancel(ctx, later, "ann"); err != nil {
		t.Fatal(err)
	}
	run(t, db, "UPDATE t_msg_queue_middle SET status = 0, owner = '', next_time = UTC_TIMESTAMP(3), expire_time = UTC_TIMESTAMP(3) - INTERVAL 1 SECOND WHERE msg_id = ?", tasks[6].MsgID)
	expired, _, err := s.ClaimExpired(ctx, msg.Middle, msg.Log, store.DueCursor{})
	if err != nil || len(expired) != 1 {
		t.Fatalf("%+v %v", expired, err)
	}
	settle(t, s, store.Outcome{Task: expired[0], State: msg.Expired, Uncounted: true, Finished: s.Now()})
	const want = " email: map[skipped:1];  log: map[cancelled:2 expired:1 success:2]; welcome log: map[failed:1 success:1]"
	if got := sums(t, s, store.StatFilter{By: []string{"template_id", "channel"}}); got != want {
		t.Errorf("%s, want %s", got, want)
	}
	rows, figures := count(t, db, "SELECT COUNT(*) FROM t_msg_record"), count(t, db, "SELECT SUM(tasks) FROM t_stat_hour")
	if rows != 8 || figures != rows {
		t.Errorf("%d records, %d in the figures", rows, figures)
	}
	differ := count(t, db, `SELECT COUNT(*) FROM (SELECT 1 FROM (
		SELECT hour, source_id, template_id, channel, category, outcome, SUM(tasks) AS tasks, SUM(latency_ms) AS latency FROM t_stat_hour GROUP BY 1, 2, 3, 4, 5, 6
		UNION ALL SELECT DATE_FORMAT(finish_time, '%Y-%m-%d %H:00:00'), source_id, template_id, channel, category,
			ELT(status - 2, 'success', 'failed', '', 'expired', 'cancelled', 'skipped'), COUNT(*), SUM(latency_ms) FROM t_msg_record GROUP BY 1, 2, 3, 4, 5, 6
		) AS both_sides GROUP BY hour, source_id, template_id, channel, category, outcome, tasks, latency HAVING COUNT(*) <> 2) AS different`)
	if differ != 0 {
		t.Error("figures and record differ in a group")
	}
	groups, more, err := s.Stats(ctx, store.StatFilter{Since: s.Now().Add(-2 * time.Hour), Until: s.Now(), By: []string{"day", "source_id", "channel", "category"}, SourceID: "default", Channel: msg.Log, Category: "notification"})
	if err != nil || more || len(groups) != 1 {
		t.Fatalf("%+v %v %v", groups, more, err)
	}
	g := &groups[0]
	if g.Tasks() != 7 || g.Outcomes["success"] != 3 || g.Outcomes["cancelled"] != 2 || g.Reach() != 0.6 || g.LatencyMS() != 30 || g.SourceID != "default" || g.Day.IsZero() {
		t.Errorf("%+v reach %v latency %v", g, g.Reach(), g.LatencyMS())
	}
}

// What a sensitive message said is gone when it has ended, wherever it stood; other messages keep it.
func TestSensitive(t *testing.T) {
	t.Parallel()
	s, db := ringOf(t, store.Config{})
	ctx := context.Background()
	verification, notification := "verification", "notification"
	for _, v := range []store.Template{
		{ID: "secret", Sensitive: true, Category: &notification},
		{ID: "open", Category: &notification},
		{ID: "public-code", Category: &verification},
		{ID: "no-category"},
	} {
		v.SourceID, v.Channel, v.Content, v.Status = "default", msg.Log, "{{code}}", store.TemplateNormal
		if err := s.CreateTemplate(ctx, "ann", &v); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.UpdateTemplate(ctx, "ann", "default", "secret", msg.Log, func(v *store.Template) error { v.Sensitive = false; return nil }); err != nil { // messages have version 1
		t.Fatal(err)
	}
	cases := []struct {
		name, template string
		category       msg.Category
		blank          bool
	}{
		{"content of a verification", "", msg.Verification, true},
		{"content of a notification", "", msg.Notification, false},
		{"a template that says so", "secret", msg.Notification, true},
		{"a template that does not", "open", msg.Notification, false},
		{"a verification over a template that was not made for it", "open", msg.Verification, true},
		{"a verification over a template that is made for it, and says no", "public-code", msg.Verification, false},
		{"a verification over a template without category", "no-category", msg.Verification, true},
		{"a notification over a template without category", "no-category", msg.Notification, false},
		{"a verification over a template that is gone", "gone", msg.Verification, true},
	}
	for way, end := range map[string]func(id uint64){
		"sent": func(id uint64) {
			for _, task := range claim(t, s, 100) {
				settle(t, s, success(s, task))
			}
		},
		"failed, the careful way": func(id uint64) {
			for _, task := range claim(t, s, 100) {
				settle(t, s, store.Outcome{Task: task, State: msg.Failed, Finished: s.Now()}, store.Outcome{Task: store.Task{MsgID: 1, Channel: msg.Log, Lane: msg.Middle, Owner: "x"}, State: msg.Failed, Finished: s.Now()})
			}
		},
		"cancelled": func(id uint64) {
			if _, _, err := s.Cancel(ctx, id, "ann"); err != nil {
				t.Fatal(err)
			}
		},
	} {
		for _, scheduledFirst := range []bool{false, true} {
			for i, c := range cases {
				m := message(fmt.Sprintf("%s %v %d", way, scheduledFirst, i))
				m.Category, m.TemplateID = c.category, c.template
				if m.Content, m.Params = []byte(`{"text":"canary"}`), nil; c.template != "" {
					m.Content, m.Params, m.Tasks[0].TemplateVersion = nil, []byte(`{"code":"canary"}`), 1
				}
				if scheduledFirst {
					m.SendAt = s.Now().Add(2 * time.Minute)
				}
				id := enqueue(t, s, m).MsgID
				if scheduledFirst && way != "cancelled" {
					m, err := s.Message(ctx, id)
					if err != nil {
						t.Fatal(err)
					}
					pass(t, db, m.Tasks[0].Place, 3*time.Minute)
					if _, err := s.Tend(ctx); err != nil {
						t.Fatal(err)
					}
				}
				end(id)
				kept := count(t, db, "SELECT COUNT(*) FROM t_msg_record WHERE msg_id = ? AND (params IS NOT NULL OR content IS NOT NULL)", id)
				if n := count(t, db, "SELECT COUNT(*) FROM t_msg_record WHERE msg_id = ?", id); n != 1 || kept != map[bool]int{true: 0, false: 1}[c.blank] {
					t.Errorf("%s, scheduled %v, %s: %d records, %d keep what was said", way, scheduledFirst, c.name, n, kept)
				}
			}
		}
	}
	// A tombstone in a delay table has nothing of a sensitive message, either.
	var tables []string
	rows, err := db.Query("SELECT table_name FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name LIKE 't\\_msg\\_delay\\_%'")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var name string
		if err := rows.Scan(&name); err != nil {
			t.Fatal(err)
		}
		tables = append(tables, name)
	}
	tombstones := 0
	for _, table := range tables {
		tombstones += count(t, db, "SELECT COUNT(*) FROM "+table+" WHERE status = 9")
		if n := count(t, db, "SELECT COUNT(*) FROM "+table+" WHERE category = 'verification' AND template_id NOT LIKE 'public%' AND (params IS NOT NULL OR content IS NOT NULL)"); n != 0 {
			t.Errorf("%s keeps what %d verifications said", table, n)
		}
	}
	if tombstones == 0 {
		t.Errorf("there is no tombstone in %s: the test shows nothing", strings.Join(tables, ", "))
	}
}

// sums prints figures in a line.
func sums(t testing.TB, s *store.Store, f store.StatFilter) string {
	t.Helper()
	f.Since, f.Until = s.Now().Add(-2*time.Hour), s.Now()
	groups, _, err := s.Stats(context.Background(), f)
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for i := range groups {
		g := &groups[i]
		lines = append(lines, fmt.Sprintf("%s %s: %v", g.TemplateID, g.Channel, g.Outcomes))
	}
	return strings.Join(lines, "; ")
}
