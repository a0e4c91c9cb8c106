package store_test

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"tidings/internal/msg"
	"tidings/internal/testdb"
	"tidings/store"
)

// Every outcome moves its task to the one place where it belongs.
func TestSettle(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	fill(t, s, 8)
	tasks := claim(t, s, 8)
	next := s.Now().Add(time.Hour)
	failure := &store.Attempt{Outcome: "temporary", Code: "450", Text: "try later"}
	outcomes := []store.Outcome{
		{Task: tasks[0], State: msg.Success, Provider: "smtp", ProviderMsgID: "p-1", Latency: 12 * time.Millisecond, Finished: s.Now()},
		{Task: tasks[1], State: msg.Failed, Provider: "smtp", Error: "no such user", Finished: s.Now(), Attempt: &store.Attempt{Outcome: "permanent", Code: "550", Text: "no such user"}},
		{Task: tasks[2], State: msg.Expired, Error: "expired", Uncounted: true, Finished: s.Now()},
		{Task: tasks[3], State: msg.Dead, Provider: "smtp", Error: "try later", Finished: s.Now(), Attempt: failure},
		{Task: tasks[4], State: msg.Ready, Next: next, Provider: "smtp", Error: "try later", Finished: s.Now(), Attempt: failure},
		{Task: tasks[5], State: msg.Unknown, Next: next, Provider: "smtp", Error: "no answer", Finished: s.Now(), Attempt: &store.Attempt{Outcome: "unknown", Text: "no answer"}},
		{Task: tasks[6], State: msg.Ready, Next: next, Uncounted: true},
		{Task: tasks[7], State: msg.Skipped, Uncounted: true, Error: "degraded", Finished: s.Now()},
	}
	for i, verdict := range settle(t, s, outcomes...) {
		if verdict != store.Done {
			t.Errorf("outcome %d: %v", i, verdict)
		}
	}
	db := raw(t, dsn)
	for i, where := range []string{
		"t_msg_record WHERE msg_id = ? AND status = 3 AND attempt = 1 AND provider_msg_id = 'p-1' AND latency_ms = 12 AND owner = ''",
		"t_msg_record WHERE msg_id = ? AND status = 4 AND last_error = 'no such user'",
		"t_msg_record WHERE msg_id = ? AND status = 6 AND attempt = 0",
		"t_msg_dead WHERE msg_id = ? AND status = 5 AND attempt = 1 AND last_error = 'try later'",
		"t_msg_queue_middle WHERE msg_id = ? AND status = 0 AND attempt = 1 AND owner = '' AND last_error = 'try later' AND next_time > UTC_TIMESTAMP(3) + INTERVAL 50 MINUTE",
		"t_msg_queue_middle WHERE msg_id = ? AND status = 2 AND attempt = 1 AND owner = ''",
		"t_msg_queue_middle WHERE msg_id = ? AND status = 0 AND attempt = 0 AND owner = ''",
		"t_msg_record WHERE msg_id = ? AND status = 8",
	} {
		if n := count(t, db, "SELECT COUNT(*) FROM "+where, tasks[i].MsgID); n != 1 {
			t.Errorf("outcome %d is not in %s", i, where)
		}
		if n := count(t, db, "SELECT COUNT(*) FROM v_task WHERE msg_id = ?", tasks[i].MsgID); n != 1 {
			t.Errorf("task %d is in %d places", i, n)
		}
	}
	if n := count(t, db, "SELECT COUNT(*) FROM t_msg_attempt"); n != 4 {
		t.Errorf("%d attempts", n)
	}
	if n := count(t, db, "SELECT COUNT(*) FROM v_attempt"); n != 5 {
		t.Errorf("v_attempt has %d rows: the successful attempt is one of them", n)
	}
}

// A stolen row inside a batch of 500 is left alone; the other 499 settle.
func TestStolenRow(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	fill(t, s, 500)
	tasks := claim(t, s, 500)
	db := raw(t, dsn)
	run(t, db, "UPDATE t_msg_queue_middle SET owner = 'thief' WHERE msg_id = ?", tasks[250].MsgID)
	outcomes := make([]store.Outcome, len(tasks))
	for i := range tasks {
		outcomes[i] = success(s, tasks[i])
	}
	for i, verdict := range settle(t, s, outcomes...) {
		if want := map[bool]store.Settled{true: store.Lost, false: store.Done}[i == 250]; verdict != want {
			t.Fatalf("outcome %d: %v, want %v", i, verdict, want)
		}
	}
	if n := count(t, db, "SELECT COUNT(*) FROM t_msg_record"); n != 499 {
		t.Fatalf("%d records", n)
	}
	if n := count(t, db, "SELECT COUNT(*) FROM t_msg_queue_middle WHERE owner = 'thief' AND status = 1"); n != 1 {
		t.Fatal("the thief's row was changed")
	}
}

// A row that somebody has locked holds up itself only, and is told from one that was lost. The sizes matter: on a small
// table the optimizer likes to walk over rows that nobody asked for, and meets the lock.
func TestSettleAroundALock(t *testing.T) {
	t.Parallel()
	for _, n := range []int{2, 3, 20, 400} {
		for _, state := range []msg.State{msg.Success, msg.Ready, msg.Dead} {
			t.Run(fmt.Sprint(n, " ", state), func(t *testing.T) {
				t.Parallel()
				dsn := testdb.New(t)
				s := testdb.Open(t, store.Config{DSN: dsn})
				fill(t, s, n)
				tasks := claim(t, s, n)
				dba, err := raw(t, dsn).Begin()
				if err != nil {
					t.Fatal(err)
				}
				defer dba.Rollback()
				run(t, dba, "UPDATE t_msg_queue_middle SET last_error = 'mine' WHERE msg_id = ?", tasks[1].MsgID)
				outcomes := make([]store.Outcome, n)
				for i := range tasks {
					outcomes[i] = store.Outcome{Task: tasks[i], State: state, Next: s.Now().Add(time.Hour), Finished: s.Now()}
				}
				started := time.Now()
				for i, verdict := range settle(t, s, outcomes...) {
					if want := map[bool]store.Settled{true: store.Blocked, false: store.Done}[i == 1]; verdict != want {
						t.Fatalf("outcome %d: %v, want %v", i, verdict, want)
					}
				}
				if waited := time.Since(started); waited > 1500*time.Millisecond { // a lock wait takes 2 s
					t.Fatalf("settling waited %v", waited)
				}
				dba.Rollback()
				if got := settle(t, s, outcomes[1]); got[0] != store.Done {
					t.Fatalf("after the lock: %v", got)
				}
			})
		}
	}
}

// What providers say is made to fit; a row that cannot be written at all does not keep the others from it.
func TestSettleBadRow(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	fill(t, s, 5)
	tasks := claim(t, s, 5)
	outcomes := make([]store.Outcome, len(tasks))
	for i := range tasks {
		outcomes[i] = success(s, tasks[i])
	}
	outcomes[1].ProviderMsgID = strings.Repeat("漢", 300) + "\xff"
	outcomes[2].Error = "bad \xff\xfe bytes 😀" + strings.Repeat("é", 600)
	outcomes[3].Latency = -time.Second // no server takes this into an unsigned column
	verdicts, err := s.Settle(context.Background(), outcomes)
	if err == nil {
		t.Fatal("the impossible row was written")
	}
	for i, verdict := range verdicts {
		if want := map[bool]store.Settled{true: 0, false: store.Done}[i == 3]; verdict != want {
			t.Errorf("outcome %d: %v, want %v", i, verdict, want)
		}
	}
	if n := count(t, raw(t, dsn), "SELECT COUNT(*) FROM t_msg_record"); n != 4 {
		t.Fatalf("%d records", n)
	}
}

// The status that the API derives and the one that the view derives are the same for every mix of two tasks' states.
func TestStatusAgreesWithView(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	db := raw(t, dsn)
	place := func(msgID uint64, channel int, state msg.State, attempt int, due string) {
		common := fmt.Sprintf("%d, %d, 'default', '', '', 'notification', 'middle', 'x', '', 0, NULL, NULL, %d, %d, 5, '', %s, %s, %s, '', '', UTC_TIMESTAMP(3), UTC_TIMESTAMP(3)",
			msgID, channel, state, attempt, due, due, due)
		switch {
		case state == msg.Dead:
			run(t, db, "INSERT INTO t_msg_dead VALUES ("+common+")")
		case state.Ended():
			run(t, db, "INSERT INTO t_msg_record VALUES ("+common+", UTC_TIMESTAMP(3), '', 0)")
		default:
			run(t, db, "INSERT INTO t_msg_queue_middle VALUES ("+common+")")
		}
	}
	states := []msg.State{msg.Ready, msg.Sending, msg.Unknown, msg.Success, msg.Failed, msg.Dead, msg.Expired, msg.Cancelled, msg.Skipped}
	id := uint64(1)
	for _, due := range []string{"UTC_TIMESTAMP(3) - INTERVAL 1 HOUR", "UTC_TIMESTAMP(3) + INTERVAL 1 HOUR"} {
		for _, attempt := range []int{0, 1} {
			for _, a := range states {
				for _, b := range states {
					place(id, 1, a, attempt, due)
					place(id, 2, b, attempt, due)
					m, err := s.Message(context.Background(), id)
					if err != nil {
						t.Fatal(err)
					}
					var inView string
					if err := db.QueryRow("SELECT status FROM v_message WHERE msg_id = ?", id).Scan(&inView); err != nil {
						t.Fatal(err)
					}
					if m.Status != inView {
						t.Errorf("%v and %v, attempt %d: API %s, view %s", a, b, attempt, m.Status, inView)
					}
					id++
				}
			}
		}
	}
}

func TestStatus(t *testing.T) {
	t.Parallel()
	now := time.Now()
	task := func(s msg.State, attempt int, due time.Time) store.TaskView {
		return store.TaskView{Task: store.Task{Status: s, Attempt: attempt, Due: due}}
	}
	past, future := now.Add(-time.Hour), now.Add(time.Hour)
	for _, tt := range []struct {
		want  string
		tasks []store.TaskView
	}{
		{"dispatched", []store.TaskView{task(msg.Ready, 0, past)}},
		{"scheduled", []store.TaskView{task(msg.Ready, 0, future)}},
		{"dispatched", []store.TaskView{task(msg.Ready, 0, future), task(msg.Ready, 0, past)}},
		{"sending", []store.TaskView{task(msg.Ready, 1, past)}},
		{"sending", []store.TaskView{task(msg.Sending, 1, past), task(msg.Success, 1, past)}},
		{"sending", []store.TaskView{task(msg.Unknown, 1, past)}},
		{"success", []store.TaskView{task(msg.Success, 1, past), task(msg.Skipped, 0, past)}},
		{"partial", []store.TaskView{task(msg.Success, 1, past), task(msg.Failed, 1, past)}},
		{"partial", []store.TaskView{task(msg.Success, 1, past), task(msg.Dead, 5, past)}},
		{"cancelled", []store.TaskView{task(msg.Cancelled, 0, past), task(msg.Skipped, 0, past)}},
		{"expired", []store.TaskView{task(msg.Expired, 0, past)}},
		{"skipped", []store.TaskView{task(msg.Skipped, 0, past)}},
		{"failed", []store.TaskView{task(msg.Dead, 5, past)}},
		{"failed", []store.TaskView{task(msg.Expired, 5, past), task(msg.Cancelled, 0, past)}},
	} {
		if got := store.Status(tt.tasks, now); got != tt.want {
			t.Errorf("%v: %s, want %s", tt.tasks, got, tt.want)
		}
	}
}

// The README's way to send a dead letter again: it keeps its key and its attempts, and gets more of them.
func TestRequeueByHand(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	fill(t, s, 1)
	task := claim(t, s, 1)[0]
	settle(t, s, store.Outcome{Task: task, State: msg.Dead, Finished: s.Now()})
	readme, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, snippet, ok := strings.Cut(string(readme), "START TRANSACTION;")
	if !ok {
		t.Fatal("the README has no such snippet")
	}
	snippet, _, _ = strings.Cut(snippet, "```")
	snippet = strings.ReplaceAll(strings.ReplaceAll(snippet, "253138251735207936", fmt.Sprint(task.MsgID)), "channel = 1", "channel = 31")
	run(t, raw(t, dsn), "START TRANSACTION;"+snippet)
	again := claim(t, s, 10)
	if len(again) != 1 || again[0].Key() != task.Key() || again[0].Attempt != 2 || again[0].AttemptLimit != 6 {
		t.Fatalf("%+v", again)
	}
	if got := settle(t, s, success(s, again[0])); got[0] != store.Done {
		t.Fatalf("settled %v", got)
	}
	if n := count(t, raw(t, dsn), "SELECT COUNT(*) FROM v_task WHERE msg_id = ? AND status = 'success'", task.MsgID); n != 1 {
		t.Fatal("the task has not ended in one place")
	}
}

// The copy to the record and the deletion guard each other: should one of them do less than it ought to, nothing is committed.
func TestSettleGuards(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"settle-move", "settle-delete"} {
		dsn := testdb.New(t)
		s := testdb.Open(t, store.Config{DSN: dsn})
		fill(t, s, 5)
		tasks := claim(t, s, 5)
		var outcomes []store.Outcome
		for i := range tasks {
			outcomes = append(outcomes, success(s, tasks[i]))
		}
		failed := false
		s.Sabotage(func(statements []string) []string {
			statements = slices.Clone(statements)
			for i := range statements {
				if !failed && strings.Contains(statements[i], name) {
					statements[i], failed = "DO "+strings.Repeat("?, ", strings.Count(statements[i], "?"))+"0", true
				}
			}
			return statements
		})
		for i, verdict := range settle(t, s, outcomes...) {
			if verdict != store.Done {
				t.Errorf("%s, outcome %d: %v", name, i, verdict)
			}
		}
		db := raw(t, dsn)
		consistent(t, db)
		if n := count(t, db, "SELECT COUNT(*) FROM t_msg_record WHERE status = 3"); n != 5 || !failed {
			t.Errorf("%s: %d records", name, n)
		}
	}
}
