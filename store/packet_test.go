package store_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"tidings/internal/msg"
	"tidings/internal/testdb"
	"tidings/store"
)

// consistent checks what must hold whatever fails: a task has its key and a key its task, and no task stands in two tables.
func consistent(t *testing.T, db *sql.DB) {
	t.Helper()
	for what, query := range map[string]string{
		"tasks without a key": "SELECT COUNT(*) FROM v_task AS t LEFT JOIN t_idempotency AS k ON k.msg_id = t.msg_id WHERE k.msg_id IS NULL AND t.request_id <> ''",
		"keys without a task": "SELECT COUNT(*) FROM t_idempotency AS k LEFT JOIN v_task AS t ON k.msg_id = t.msg_id WHERE t.msg_id IS NULL",
		"tasks in two tables": "SELECT COUNT(*) FROM (SELECT msg_id FROM v_task GROUP BY msg_id, channel HAVING COUNT(*) > 1) AS twice",
	} {
		if n := count(t, db, query); n != 0 {
			t.Errorf("%d %s", n, what)
		}
	}
	// The server's list of transactions is a copy that is made anew every 100 ms, so one look may show what is over.
	const open = `SELECT COUNT(*) FROM information_schema.innodb_trx AS x JOIN information_schema.processlist AS p
		ON p.id = x.trx_mysql_thread_id WHERE p.db = DATABASE() AND p.command = 'Sleep'`
	for deadline := time.Now().Add(2 * time.Second); count(t, db, open) != 0; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Error("a transaction was left open")
			return
		}
	}
}

// An error is injected before and after every statement of both packets, and the connection is used again at once.
func TestPacketFailsAnywhere(t *testing.T) {
	t.Parallel()
	for _, fault := range []string{"SELECT * FROM no_such_table", "SELECT 1 FROM t_node WHERE (SELECT 1 UNION SELECT 2) = 1", "SIGNAL SQLSTATE '45000'"} {
		dsn := testdb.New(t)
		s := testdb.Open(t, store.Config{DSN: dsn})
		db := raw(t, dsn)
		for at := range 12 {
			failed := false
			sabotage := func(statements []string) []string {
				if failed || at > len(statements) {
					return statements
				}
				failed = true
				return slices.Insert(slices.Clone(statements), at, fault)
			}
			batch := []store.Message{*message(""), *message(fmt.Sprint("key-", at)), *message("")}
			batch[1].Lane, batch[2].Lane = msg.High, msg.Low
			s.Sabotage(sabotage)
			s.EnqueueBatch(context.Background(), batch)
			consistent(t, db)
			s.Sabotage(nil)
			for i := range 3 { // the same connection is used at once
				enqueue(t, s, message(fmt.Sprint("after-", at, "-", i)))
			}
			consistent(t, db)

			var tasks []store.Task
			for _, lane := range msg.Lanes {
				got, err := s.Claim(context.Background(), lane, msg.Log, 100, time.Time{})
				if err != nil {
					t.Fatal(err)
				}
				tasks = append(tasks, got.Tasks...)
			}
			outcomes := make([]store.Outcome, len(tasks))
			for i := range tasks {
				outcomes[i] = success(s, tasks[i])
			}
			failed = false
			s.Sabotage(sabotage)
			s.Settle(context.Background(), outcomes)
			consistent(t, db)
			s.Sabotage(nil)
			enqueue(t, s, message(fmt.Sprint("last-", at)))
			settle(t, s, outcomes...)
			consistent(t, db)
		}
		if n := count(t, db, "SELECT COUNT(*) FROM t_msg_record"); n == 0 {
			t.Error("nothing was settled")
		}
	}
}

// slots is what an engine would be: it grants, and remembers what it got.
type slots struct {
	mu      sync.Mutex
	free    int
	tasks   []store.Task
	granted int
}

func (s *slots) reserve(_ msg.Lane, _ msg.Channel, n int) store.Reservation {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n = min(n, s.free); n == 0 {
		return nil
	}
	s.free -= n
	s.granted += n
	return &grant{s, n}
}

type grant struct {
	s *slots
	n int
}

func (g *grant) Granted() int { return g.n }

func (g *grant) Start(tasks []store.Task) {
	g.s.mu.Lock()
	defer g.s.mu.Unlock()
	g.s.tasks = append(g.s.tasks, tasks...)
	g.s.free += g.n - len(tasks)
}

func (g *grant) Release() {
	g.s.mu.Lock()
	defer g.s.mu.Unlock()
	g.s.free += g.n
}

// What is handed over is exactly what stands in the tables, claimed; the rest is queued; and no slot leaks.
func TestHandOff(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	engine := &slots{free: 7}
	s := testdb.Open(t, store.Config{DSN: dsn, Reserve: engine.reserve})
	first := enqueue(t, s, message("known"))
	batch := []store.Message{*message("known")}
	for range 9 {
		batch = append(batch, *message(""))
	}
	got, errs := s.EnqueueBatch(context.Background(), batch)
	for i, err := range errs {
		if err != nil {
			t.Fatal(i, err)
		}
	}
	if got[0].MsgID != first.MsgID || !got[0].Duplicate {
		t.Fatalf("the known key: %+v", got[0])
	}
	if engine.free != 0 || len(engine.tasks) != 7 {
		t.Fatalf("%d slots free, %d tasks handed over", engine.free, len(engine.tasks))
	}
	db := raw(t, dsn)
	for i := range engine.tasks {
		task := &engine.tasks[i]
		if n := count(t, db, `SELECT COUNT(*) FROM t_msg_queue_middle WHERE msg_id = ? AND channel = ? AND status = 1 AND attempt = 1 AND owner = ?
			AND due_time = ? AND next_time = ? AND create_time = ? AND content = ? AND receiver = ? AND next_time > UTC_TIMESTAMP(3) + INTERVAL 50 SECOND`,
			task.MsgID, task.Channel, task.Owner, task.Due, task.Next, task.Created, string(task.Content), task.Receiver); n != 1 {
			t.Errorf("task %d is not as its row", task.MsgID)
		}
	}
	if n := count(t, db, "SELECT COUNT(*) FROM t_msg_queue_middle WHERE msg_id > 0 AND status = 0 AND owner = '' AND attempt = 0"); n != 3 {
		t.Fatalf("%d tasks are queued", n)
	}
	outcomes := make([]store.Outcome, len(engine.tasks))
	for i := range engine.tasks {
		outcomes[i] = success(s, engine.tasks[i])
	}
	for i, verdict := range settle(t, s, outcomes...) {
		if verdict != store.Done {
			t.Errorf("outcome %d: %v", i, verdict)
		}
	}
	consistent(t, db)
}

// Slots come back on every way out: rejected rows, known keys, a packet that fails.
func TestHandOffLeaksNoSlot(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	engine := &slots{free: 100}
	s := testdb.Open(t, store.Config{DSN: dsn, Reserve: engine.reserve})
	bad := message("")
	bad.Tasks[0].Receiver = string(make([]byte, 600))
	enqueue(t, s, message("known"))
	s.EnqueueBatch(context.Background(), []store.Message{*message("known"), *bad, *message(""), *bad})
	for at := range 5 {
		failed := false
		s.Sabotage(func(statements []string) []string {
			if failed {
				return statements
			}
			failed = true
			return slices.Insert(slices.Clone(statements), min(at, len(statements)), "SIGNAL SQLSTATE '45000'")
		})
		s.EnqueueBatch(context.Background(), []store.Message{*message(""), *message("")})
	}
	s.Sabotage(nil)
	engine.mu.Lock()
	defer engine.mu.Unlock()
	if engine.free+len(engine.tasks) != 100 {
		t.Fatalf("%d slots free and %d in use of 100", engine.free, len(engine.tasks))
	}
	if n := count(t, raw(t, dsn), "SELECT COUNT(*) FROM t_msg_queue_middle WHERE status = 1"); n != len(engine.tasks) {
		t.Fatalf("%d rows are claimed, %d tasks were handed over", n, len(engine.tasks))
	}
}

// The connection breaks after the COMMIT was sent. The rows stand there, claimed; the caller gets its id; and the tasks are
// put back, not left to be taken for attempts of unknown outcome.
func TestHandOffAfterLostCommit(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	engine := &slots{free: 10}
	s := testdb.Open(t, store.Config{DSN: dsn, Reserve: engine.reserve})
	enqueue(t, s, message("")) // so that connections are open
	cut := false
	s.Sabotage(func(statements []string) []string {
		if cut {
			return statements
		}
		cut = true
		return append(slices.Clone(statements), "COMMIT", "KILL CONNECTION_ID()") // committed, and no answer
	})
	got := enqueue(t, s, message("lost"))
	s.Sabotage(nil)
	db := raw(t, dsn)
	deadline := time.Now().Add(10 * time.Second)
	for count(t, db, "SELECT COUNT(*) FROM t_msg_queue_middle WHERE msg_id = ? AND status = 0 AND owner = '' AND attempt = 0", got.MsgID) != 1 {
		if time.Now().After(deadline) {
			t.Fatal("the task is still claimed by nobody")
		}
		time.Sleep(20 * time.Millisecond)
	}
	if engine.free != 9 {
		t.Fatalf("%d slots are free", engine.free)
	}
	consistent(t, db)
}

// The connection breaks and nobody knows whether the packet was carried out. Without a caller's key the message is looked for:
// it is accepted if it is there; if not it is refused, and not inserted a second time, since the packet may still come.
func TestLostCommitWithoutKey(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name  string
		cut   []string
		err   error
		tasks int
	}{
		{"after the commit", []string{"COMMIT", "KILL CONNECTION_ID()"}, nil, 1},
		{"before the commit", []string{"KILL CONNECTION_ID()"}, store.ErrUnavailable, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			dsn := testdb.New(t)
			s := testdb.Open(t, store.Config{DSN: dsn})
			packets := 0
			s.Sabotage(func(statements []string) []string {
				packets++
				return append(slices.Clone(statements), tt.cut...)
			})
			got, err := s.Enqueue(context.Background(), message(""))
			if !errors.Is(err, tt.err) || packets != 1 {
				t.Fatalf("%v after %d packets", err, packets)
			}
			if n := count(t, raw(t, dsn), "SELECT COUNT(*) FROM v_task WHERE msg_id = ? OR ? = 0", got.MsgID, got.MsgID); n != tt.tasks {
				t.Fatalf("%d tasks", n)
			}
		})
	}
}

// The packet is carried out long after its caller had no answer. Its tasks are found then, and put back.
func TestHandOffAfterLateCommit(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	engine := &slots{free: 10}
	s := testdb.Open(t, store.Config{DSN: dsn, Reserve: engine.reserve, Timeout: 500 * time.Millisecond})
	enqueue(t, s, message(""))
	late := false
	s.Sabotage(func(statements []string) []string {
		if late {
			return statements
		}
		late = true
		return append(slices.Clone(statements), "DO SLEEP(2)") // and then COMMIT
	})
	if _, err := s.Enqueue(context.Background(), message("late")); err == nil {
		t.Fatal("answered before the commit")
	}
	db := raw(t, dsn)
	await := func(what, query string) {
		t.Helper()
		for deadline := time.Now().Add(15 * time.Second); count(t, db, query) != 1; time.Sleep(20 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal("waited in vain: ", what)
			}
		}
	}
	await("put back", "SELECT COUNT(*) FROM t_msg_queue_middle WHERE request_id = 'late' AND status = 0 AND owner = '' AND attempt = 0")
	consistent(t, db)
	if engine.free != 9 {
		t.Fatalf("%d slots are free", engine.free)
	}
}

// Many keys that somebody holds locked, asked for again and again, keep nobody else from being accepted.
func TestManyLockedKeys(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn, Timeout: 4 * time.Second})
	dba, err := raw(t, dsn).Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer dba.Rollback()
	const held = 30
	for i := range held {
		run(t, dba, fmt.Sprintf("INSERT INTO t_idempotency VALUES ('default', UNHEX(SHA2('held-%d', 256)), %d, UNHEX(SHA2('x', 256)), UTC_TIMESTAMP(3))", i, i+1))
	}
	stop := make(chan struct{})
	var callers sync.WaitGroup
	for i := range held {
		callers.Go(func() {
			for {
				select {
				case <-stop:
					return
				case <-time.After(10 * time.Millisecond):
					s.Enqueue(context.Background(), message(fmt.Sprint("held-", i)))
				}
			}
		})
	}
	refused := 0
	for i := range 50 {
		if _, err := s.Enqueue(context.Background(), message(fmt.Sprint("free-", i))); err != nil {
			refused++
		}
	}
	close(stop)
	callers.Wait()
	if refused > 0 {
		t.Fatalf("%d of 50 messages were refused for other keys' locks", refused)
	}
}
