package store_test

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"tidings/internal/msg"
	"tidings/internal/testdb"
	"tidings/store"
)

func fill(t testing.TB, s *store.Store, n int) []uint64 {
	t.Helper()
	batch := make([]store.Message, n)
	for i := range batch {
		batch[i] = *message("")
	}
	got, errs := s.EnqueueBatch(context.Background(), batch)
	ids := make([]uint64, n)
	for i := range got {
		if errs[i] != nil {
			t.Fatal(errs[i])
		}
		ids[i] = got[i].MsgID
	}
	return ids
}

func TestClaim(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	if tasks := claim(t, s, 10); len(tasks) != 0 {
		t.Fatalf("%d tasks out of an empty queue", len(tasks))
	}
	fill(t, s, 5)
	tasks := claim(t, s, 3)
	if len(tasks) != 3 {
		t.Fatalf("%d tasks", len(tasks))
	}
	for _, task := range tasks {
		if task.Attempt != 1 || task.Status != msg.Sending || task.Owner == "" || task.Lane != msg.Middle || string(task.Content) != `{"text":"hello"}` {
			t.Fatalf("task %+v", task)
		}
		if left := time.Until(task.LeaseEnd); left < 50*time.Second || left > time.Minute {
			t.Fatalf("lease ends in %v", left)
		}
	}
	if n := count(t, raw(t, dsn), `SELECT COUNT(*) FROM t_msg_queue_middle WHERE status = 1 AND owner = ? AND attempt = 1
		AND next_time > UTC_TIMESTAMP(3) + INTERVAL 50 SECOND AND due_time <= UTC_TIMESTAMP(3)`, tasks[0].Owner); n != 3 {
		t.Fatalf("%d rows are claimed", n)
	}
	if rest := claim(t, s, 10); len(rest) != 2 || rest[0].Owner == tasks[0].Owner {
		t.Fatalf("the second claim: %+v", rest)
	}
}

// A task that is not due yet stays where it is.
func TestClaimWaitsForNextTime(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	fill(t, s, 2)
	db := raw(t, dsn)
	run(t, db, "UPDATE t_msg_queue_middle SET next_time = UTC_TIMESTAMP(3) + INTERVAL 1 HOUR WHERE msg_id > 0 ORDER BY msg_id LIMIT 1")
	if tasks := claim(t, s, 10); len(tasks) != 1 {
		t.Fatalf("%d tasks", len(tasks))
	}
}

// Many claimers at once: every task goes to one of them.
func TestClaimersShare(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	a, b := testdb.Open(t, store.Config{DSN: dsn}), testdb.Open(t, store.Config{DSN: dsn})
	const n = 2000
	for range n / 500 {
		fill(t, a, 500)
	}
	var (
		wg    sync.WaitGroup
		mu    sync.Mutex
		owner = map[uint64]string{}
	)
	for i, s := range []*store.Store{a, b, a, b} {
		wg.Go(func() {
			for range 1000 {
				claimed, err := s.Claim(context.Background(), msg.Middle, msg.Log, 30+i, time.Time{})
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				for _, task := range claimed.Tasks {
					if owner[task.MsgID] != "" {
						t.Errorf("task %d went to %s and %s", task.MsgID, owner[task.MsgID], task.Owner)
					}
					owner[task.MsgID] = task.Owner
				}
				done := len(owner) == n
				mu.Unlock()
				if done {
					return
				}
			}
		})
	}
	wg.Wait()
	if len(owner) != n {
		t.Fatalf("%d of %d tasks were claimed", len(owner), n)
	}
}

// A DBA's open transaction on a row costs that row only, at once: nothing waits for it.
func TestClaimPassesLockedRows(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	ids := fill(t, s, 10)
	dba, err := raw(t, dsn).Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer dba.Rollback()
	run(t, dba, "UPDATE t_msg_queue_middle SET last_error = 'looking into it' WHERE msg_id IN (?, ?)", ids[0], ids[5])
	started := time.Now()
	if tasks := claim(t, s, 10); len(tasks) != 8 {
		t.Fatalf("%d tasks claimed around two locked rows", len(tasks))
	}
	if waited := time.Since(started); waited > time.Second {
		t.Fatalf("the claim waited %v", waited)
	}
	fill(t, s, 1)
	if tasks := claim(t, s, 1); len(tasks) != 1 { // with one slot to look with, and locked rows at the head
		t.Fatalf("%d tasks claimed behind two locked rows", len(tasks))
	}
	dba.Rollback()
	if tasks := claim(t, s, 10); len(tasks) != 2 {
		t.Fatalf("%d tasks after the locks were gone", len(tasks))
	}
}

// A DBA who reads ready rows FOR UPDATE in REPEATABLE READ locks the gaps between them, too. Claims move rows out of those
// gaps, so they go on, for other rows and other channels.
func TestClaimPassesLockedGaps(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	mail := message("")
	mail.Tasks[0].Channel = msg.Email
	enqueue(t, s, mail)
	ids := fill(t, s, 10)
	db := raw(t, dsn)
	run(t, db, "UPDATE t_msg_queue_middle SET next_time = FROM_UNIXTIME(1700000000 + channel) WHERE msg_id > 0")
	for _, tt := range []struct {
		name, query string
		args        []any
		log         int // rows of the log channel that can still be claimed
	}{
		{"a range of keys", "SELECT msg_id FROM t_msg_queue_middle WHERE msg_id BETWEEN ? AND ? FOR UPDATE", []any{ids[2], ids[6]}, 4},
		{"a gap of the index", "SELECT msg_id FROM t_msg_queue_middle WHERE channel = 31 AND status = 0 AND next_time < FROM_UNIXTIME(1600000000) FOR UPDATE", nil, 9},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dba, err := db.BeginTx(context.Background(), &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
			if err != nil {
				t.Fatal(err)
			}
			defer dba.Rollback()
			rows, err := dba.Query(tt.query, tt.args...)
			if err != nil {
				t.Fatal(err)
			}
			rows.Close()
			started := time.Now()
			if tasks := claim(t, s, 20); len(tasks) < tt.log {
				t.Errorf("%d tasks claimed around the lock, want at least %d", len(tasks), tt.log)
			}
			mails, err := s.Claim(context.Background(), msg.Middle, msg.Email, 10, time.Time{})
			if err != nil || len(mails.Tasks) != 1 {
				t.Errorf("the other channel: %d tasks, %v", len(mails.Tasks), err)
			}
			if waited := time.Since(started); waited > time.Second {
				t.Errorf("the claims waited %v", waited)
			}
			dba.Rollback()
			run(t, db, "UPDATE t_msg_queue_middle SET status = 0, owner = '', next_time = FROM_UNIXTIME(1700000000 + channel) WHERE msg_id > 0")
		})
	}
}

// What a DBA does by hand is taken up: a row released, and a row moved to another lane.
func TestHandEdits(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	fill(t, s, 1)
	old := claim(t, s, 1)
	db := raw(t, dsn)
	run(t, db, "UPDATE t_msg_queue_middle SET status = 0, owner = '', next_time = UTC_TIMESTAMP(3) WHERE msg_id = ?", old[0].MsgID)
	again := claim(t, s, 1)
	if len(again) != 1 || again[0].Attempt != 2 {
		t.Fatalf("released by hand: %+v", again)
	}
	if got := settle(t, s, success(s, old[0])); got[0] != store.Lost {
		t.Fatalf("the earlier claim settled: %v", got)
	}
	if got := settle(t, s, success(s, again[0])); got[0] != store.Done {
		t.Fatalf("the later claim: %v", got)
	}
	fill(t, s, 1)
	run(t, db, `START TRANSACTION; INSERT INTO t_msg_queue_high SELECT * FROM t_msg_queue_middle WHERE msg_id > 0;
		DELETE FROM t_msg_queue_middle WHERE msg_id > 0; COMMIT`)
	claimed, err := s.Claim(context.Background(), msg.High, msg.Log, 10, time.Time{})
	moved := claimed.Tasks
	if err != nil || len(moved) != 1 || moved[0].Lane != msg.High {
		t.Fatalf("moved by hand: %+v, %v", moved, err)
	}
	if got := settle(t, s, success(s, moved[0])); got[0] != store.Done {
		t.Fatalf("settle the moved one: %v", got)
	}
}

// A task that stands in the record as well (a hand-made copy) is dropped from the queue and never sent again.
func TestClaimFindsRecorded(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	ids := fill(t, s, 10)
	db := raw(t, dsn)
	run(t, db, `INSERT INTO t_msg_record SELECT q.*, UTC_TIMESTAMP(3), '', 0 FROM t_msg_queue_middle AS q WHERE msg_id = ?`, ids[3])
	run(t, db, `UPDATE t_msg_record SET status = 3`)
	run(t, db, `UPDATE t_msg_queue_middle SET create_time = create_time - INTERVAL 10 SECOND WHERE msg_id > 0`)
	claimed, err := s.Claim(context.Background(), msg.Middle, msg.Log, 10, time.Time{})
	tasks, recorded := claimed.Tasks, claimed.Recorded
	if err != nil || len(tasks) != 9 || len(recorded) != 1 || recorded[0].MsgID != ids[3] {
		t.Fatalf("%d tasks, %d recorded, %v", len(tasks), len(recorded), err)
	}
	outcomes := []store.Outcome{{Task: recorded[0], AlreadyRecorded: true}}
	for _, task := range tasks {
		outcomes = append(outcomes, success(s, task))
	}
	for i, verdict := range settle(t, s, outcomes...) {
		if verdict != store.Done {
			t.Errorf("outcome %d: %v", i, verdict)
		}
	}
	if queue, records := count(t, db, "SELECT COUNT(*) FROM t_msg_queue_middle WHERE msg_id > 0"), count(t, db, "SELECT COUNT(*) FROM t_msg_record"); queue != 0 || records != 10 {
		t.Fatalf("%d rows in the queue, %d records", queue, records)
	}
}

func none(*store.Task) bool { return false }

func TestRecover(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	fill(t, s, 3)
	tasks := claim(t, s, 3)
	got, err := s.Recover(context.Background(), msg.Middle, msg.Log, msg.Sending, 10, none)
	if err != nil || len(got) != 0 {
		t.Fatalf("living leases were recovered: %d, %v", len(got), err)
	}
	db := raw(t, dsn)
	run(t, db, "UPDATE t_msg_queue_middle SET next_time = UTC_TIMESTAMP(3) - INTERVAL 1 SECOND WHERE msg_id = ?", tasks[1].MsgID)
	got, err = s.Recover(context.Background(), msg.Middle, msg.Log, msg.Sending, 10, none)
	if err != nil || len(got) != 1 || got[0].MsgID != tasks[1].MsgID || got[0].Attempt != 1 || got[0].Status != msg.Sending || got[0].Owner == tasks[1].Owner {
		t.Fatalf("recovered %+v, %v", got, err)
	}
	verdicts := settle(t, s, success(s, tasks[1]), success(s, tasks[0]))
	if verdicts[0] != store.Lost || verdicts[1] != store.Done {
		t.Fatalf("the late ack and the good one: %v", verdicts)
	}
}

func TestSurvey(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	if w, err := s.Survey(context.Background()); err != nil || len(w) != 0 {
		t.Fatalf("an empty queue: %v, %v", w, err)
	}
	fill(t, s, 3)
	claim(t, s, 1)
	high := message("")
	high.Lane, high.Tasks[0].Channel = msg.High, msg.SMS
	enqueue(t, s, high)
	w, err := s.Survey(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]bool{}
	for _, x := range w {
		got[fmt.Sprint(x.Lane, " ", x.Channel, " ", x.Status)] = true
	}
	if len(w) != 3 || !got["high sms ready"] || !got["middle log ready"] || !got["middle log sending"] {
		t.Fatalf("survey %v", w)
	}
	if _, err := s.Uptime(context.Background()); err != nil {
		t.Fatal(err)
	}
}

// A look from a later instant leaves the earlier rows out.
func TestClaimFrom(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	ids := fill(t, s, 3)
	run(t, raw(t, dsn), "UPDATE t_msg_queue_middle SET next_time = next_time - INTERVAL 1 MINUTE WHERE msg_id = ?", ids[0])
	late, err := s.Claim(context.Background(), msg.Middle, msg.Log, 10, s.Now().Add(-30*time.Second))
	if err != nil || len(late.Tasks) != 2 || late.Newest.IsZero() {
		t.Fatalf("%+v, %v", late, err)
	}
	early, err := s.Claim(context.Background(), msg.Middle, msg.Log, 10, time.Time{})
	if err != nil || len(early.Tasks) != 1 || early.Tasks[0].MsgID != ids[0] || !early.Newest.Before(late.Newest) {
		t.Fatalf("%+v, %v", early, err)
	}
	if none, err := s.Claim(context.Background(), msg.Middle, msg.Log, 10, time.Time{}); err != nil || !none.Newest.IsZero() {
		t.Fatalf("%+v, %v", none, err)
	}
}

// The plans of the statements that run all the time: one index, no sort, and a look that reads no more than it returns.
func TestPlans(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	for range 4 {
		fill(t, s, 500)
	}
	db := raw(t, dsn)
	run(t, db, "ANALYZE TABLE t_msg_queue_middle")
	for _, tt := range []struct{ query, key, extra string }{
		{"SELECT msg_id FROM t_msg_queue_middle WHERE channel = 31 AND status = 0 AND next_time <= UTC_TIMESTAMP(3) ORDER BY next_time LIMIT 100", "idx_ready", "Using where; Using index"},
		{"SELECT * FROM t_msg_queue_middle WHERE channel = 31 AND status = 0 AND next_time <= UTC_TIMESTAMP(3) AND next_time >= '2025-01-01' ORDER BY next_time LIMIT 100", "idx_ready", "Using index condition"},
		{"SELECT channel, status, MIN(next_time) FROM t_msg_queue_middle GROUP BY channel, status", "idx_ready", "Using index for group-by"},
	} {
		var id, selectType, table, kind, possible, key, length, ref, rows, extra any
		if err := db.QueryRow("EXPLAIN "+tt.query).Scan(&id, &selectType, &table, &kind, &possible, &key, &length, &ref, &rows, &extra); err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprintf("%s", key); got != tt.key {
			t.Errorf("%s\nuses %s", tt.query, got)
		}
		if got := fmt.Sprintf("%s", extra); got != tt.extra {
			t.Errorf("%s\n%s, want %s", tt.query, got, tt.extra)
		}
	}
}

// Between look and claim a process may stand still while another one claims a row, fails and puts it back. The row is ready
// again, but it is not the row that was looked at: its attempts are others, and its time may not have come.
func TestClaimLeavesWhatChangedSinceTheLook(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	db := raw(t, dsn)
	var once sync.Once
	s, err := store.Open(context.Background(), store.Config{DSN: dsn, Observe: func(statement string) {
		testdb.Observe(statement)
		if strings.Contains(statement, "tidings:claim */") {
			once.Do(func() {
				run(t, db, "UPDATE t_msg_queue_middle SET attempt = 1, next_time = UTC_TIMESTAMP(3) WHERE msg_id > 0 ORDER BY msg_id LIMIT 1")
			})
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	ids := fill(t, s, 3)
	run(t, db, "UPDATE t_msg_queue_middle SET next_time = next_time - INTERVAL 1 SECOND WHERE msg_id > 0")
	c, err := s.Claim(context.Background(), msg.Middle, msg.Log, 3, time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range c.Tasks {
		if task.MsgID == ids[0] && task.Attempt != 2 {
			t.Fatalf("the changed row was claimed as it had been: attempt %d", task.Attempt)
		}
	}
	if len(c.Tasks) < 2 {
		t.Fatalf("%d tasks", len(c.Tasks))
	}
	if n := count(t, db, "SELECT COUNT(*) FROM t_msg_queue_middle WHERE msg_id = ? AND status = 1 AND attempt = 1", ids[0]); n != 0 {
		t.Fatal("an attempt got lost")
	}
}

// The checkpoint bounds what a look reads only if the index is read by range: by reference, everything before it is passed by
// one by one, which under an old snapshot are all entries ever made.
func TestLookReadsARange(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	var mu sync.Mutex
	var look string
	s := testdb.Open(t, store.Config{DSN: dsn, Observe: func(statement string) {
		mu.Lock()
		defer mu.Unlock()
		if strings.Contains(statement, "tidings:look */") {
			look = statement
		}
	}})
	for range 40 {
		fill(t, s, 500)
	}
	db := raw(t, dsn)
	run(t, db, "ANALYZE TABLE t_msg_queue_middle")
	if _, err := s.Claim(context.Background(), msg.Middle, msg.Log, 100, s.Now().Add(-time.Minute)); err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	defer mu.Unlock()
	var plan struct{ kind, key, length string }
	rows, err := db.Query("EXPLAIN "+look, msg.Log, s.Now().Add(-2*time.Hour), 500)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	columns, err := rows.Columns()
	if err != nil || !rows.Next() {
		t.Fatal(err)
	}
	values, into := make([]sql.NullString, len(columns)), make([]any, len(columns))
	for i := range values {
		into[i] = &values[i]
	}
	if err := rows.Scan(into...); err != nil {
		t.Fatal(err)
	}
	for i, name := range columns {
		switch name {
		case "type":
			plan.kind = values[i].String
		case "key":
			plan.key = values[i].String
		case "key_len":
			plan.length = values[i].String
		}
	}
	if plan != (struct{ kind, key, length string }{"range", "idx_ready", "9"}) {
		t.Fatalf("%+v", plan)
	}
}
