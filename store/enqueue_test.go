package store_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"tidings/internal/msg"
	"tidings/internal/testdb"
	"tidings/store"
)

func TestEnqueueWritesTaskAndKey(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	var woken atomic.Int32
	s := testdb.Open(t, store.Config{DSN: dsn, Wake: func(l msg.Lane, c msg.Channel, _ time.Time) {
		if l == msg.Middle && c == msg.Log {
			woken.Add(1)
		}
	}})
	got := enqueue(t, s, message("order-1"))
	db := raw(t, dsn)
	if n := count(t, db, `SELECT COUNT(*) FROM t_msg_queue_middle WHERE msg_id = ? AND channel = 31 AND status = 0 AND owner = '' AND attempt = 0
		AND attempt_limit = 5 AND request_id = 'order-1' AND due_time = next_time AND JSON_VALUE(content, '$.text') = 'hello'
		AND due_time BETWEEN UTC_TIMESTAMP(3) - INTERVAL 5 SECOND AND UTC_TIMESTAMP(3)`, got.MsgID); n != 1 {
		t.Fatal("the task is not in its table as it should be")
	}
	if n := count(t, db, "SELECT COUNT(*) FROM t_idempotency WHERE source_id = 'default' AND request_hash = UNHEX(SHA2('order-1', 256)) AND msg_id = ?", got.MsgID); n != 1 {
		t.Fatal("no key")
	}
	if woken.Load() != 1 {
		t.Fatalf("woken %d times", woken.Load())
	}
}

func TestIdempotency(t *testing.T) {
	t.Parallel()
	s := testdb.Open(t, store.Config{})
	first := enqueue(t, s, message("order-1"))
	again := enqueue(t, s, message("order-1"))
	if again != (store.Accepted{MsgID: first.MsgID, Duplicate: true}) {
		t.Fatalf("the same again: %+v, first %+v", again, first)
	}
	other := message("order-1")
	other.BodyHash = sha256.Sum256([]byte("another body"))
	if _, err := s.Enqueue(context.Background(), other); !errors.Is(err, store.ErrConflict) {
		t.Fatalf("another body: %v", err)
	}
	elsewhere := message("order-1")
	elsewhere.SourceID = "billing"
	if got := enqueue(t, s, elsewhere); got.Duplicate {
		t.Fatal("another source's key is not the same key")
	}
	for range 2 {
		if got := enqueue(t, s, message("")); got.Duplicate {
			t.Fatal("messages without a key are never duplicates")
		}
	}
}

// Keys that MySQL's collations would take for equal are different keys.
func TestKeysAreBytes(t *testing.T) {
	t.Parallel()
	s := testdb.Open(t, store.Config{})
	for _, key := range []string{"key", "Key", "kéy", "key ", " key", "key\t", "ке́y", strings.Repeat("k", 255), strings.Repeat("k", 254)} {
		if got := enqueue(t, s, message(key)); got.Duplicate {
			t.Errorf("%q was taken for another key", key)
		}
	}
}

// Two stores, as two processes would have them; each round is one key from 20 callers at once.
func TestOneKeyFromManyCallers(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	stores := []*store.Store{testdb.Open(t, store.Config{DSN: dsn}), testdb.Open(t, store.Config{DSN: dsn})}
	const rounds, callers = 30, 20
	for round := range rounds {
		var (
			wg  sync.WaitGroup
			ids sync.Map
			new atomic.Int32
		)
		for caller := range callers {
			wg.Go(func() {
				got, err := stores[caller%2].Enqueue(context.Background(), message(fmt.Sprint("round-", round)))
				if err != nil {
					t.Error(err)
					return
				}
				ids.Store(got.MsgID, true)
				if !got.Duplicate {
					new.Add(1)
				}
			})
		}
		wg.Wait()
		different := 0
		ids.Range(func(any, any) bool { different++; return true })
		if different != 1 || new.Load() != 1 {
			t.Fatalf("round %d: %d ids, %d accepted as new", round, different, new.Load())
		}
	}
	if n := count(t, raw(t, dsn), "SELECT COUNT(*) FROM t_msg_queue_middle WHERE msg_id > 0"); n != rounds {
		t.Fatalf("%d messages", n)
	}
}

// A batch with new, known, repeated, conflicting and impossible messages: each gets its own answer.
func TestBatchAnswersEach(t *testing.T) {
	t.Parallel()
	s := testdb.Open(t, store.Config{})
	known := enqueue(t, s, message("known"))
	conflict := message("known")
	conflict.BodyHash = sha256.Sum256([]byte("x"))
	bad := message("bad")
	bad.Tasks = []store.NewTask{{Channel: msg.Log, Receiver: strings.Repeat("x", 513)}} // too long for its column
	inside := message("twice")
	inside.BodyHash = sha256.Sum256([]byte("y"))
	batch := []store.Message{*message("a"), *message("known"), *conflict, *message("twice"), *message("twice"), *inside, *bad, *message("b")}
	got, errs := s.EnqueueBatch(context.Background(), batch)
	if errs[0] != nil || errs[7] != nil || got[0].Duplicate || got[7].Duplicate {
		t.Errorf("new ones: %v %v", errs[0], errs[7])
	}
	if errs[1] != nil || got[1] != (store.Accepted{MsgID: known.MsgID, Duplicate: true}) {
		t.Errorf("known: %+v %v", got[1], errs[1])
	}
	if !errors.Is(errs[2], store.ErrConflict) || !errors.Is(errs[5], store.ErrConflict) {
		t.Errorf("conflicts: %v, %v", errs[2], errs[5])
	}
	if errs[3] != nil || errs[4] != nil || got[3].MsgID != got[4].MsgID || !got[4].Duplicate {
		t.Errorf("repeated: %+v %+v, %v %v", got[3], got[4], errs[3], errs[4])
	}
	if errs[6] == nil {
		t.Error("the impossible one was accepted")
	}
}

// A message of several tasks is in their tables whole or not at all.
func TestRejectedLeavesNothing(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	m := message("half")
	m.Tasks = []store.NewTask{{Channel: msg.Log, Receiver: "fine"}, {Channel: msg.Email, Receiver: strings.Repeat("x", 513)}}
	if _, err := s.Enqueue(context.Background(), m); err == nil {
		t.Fatal("accepted")
	}
	db := raw(t, dsn)
	if tasks, keys := count(t, db, "SELECT COUNT(*) FROM t_msg_queue_middle WHERE msg_id > 0"), count(t, db, "SELECT COUNT(*) FROM t_idempotency"); tasks+keys != 0 {
		t.Fatalf("%d tasks and %d keys are left of a rejected message", tasks, keys)
	}
}

func TestPurgeKeys(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	first := enqueue(t, s, message("old"))
	enqueue(t, s, message("young"))
	run(t, raw(t, dsn), "UPDATE t_idempotency SET expire_time = UTC_TIMESTAMP(3) - INTERVAL 1 SECOND WHERE msg_id = ?", first.MsgID)
	if n, err := s.PurgeKeys(context.Background()); n != 1 || err != nil {
		t.Fatalf("purged %d: %v", n, err)
	}
	if _, err := s.MessageByRequest(context.Background(), "default", "old"); !errors.Is(err, store.ErrNotFound) {
		t.Fatalf("the old key: %v", err)
	}
	if _, err := s.MessageByRequest(context.Background(), "default", "young"); err != nil {
		t.Fatalf("the young key: %v", err)
	}
}

// A lock that somebody holds for long must end in an answer, not in a hang; and in one message once it is free.
func TestAcceptBehindALock(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn, Timeout: 3 * time.Second})
	dba, err := raw(t, dsn).Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer dba.Rollback()
	run(t, dba, "INSERT INTO t_idempotency VALUES ('default', UNHEX(SHA2('held', 256)), 1, UNHEX(SHA2('x', 256)), UTC_TIMESTAMP(3))")
	if _, err := s.Enqueue(context.Background(), message("held")); !errors.Is(err, store.ErrBusy) && !errors.Is(err, store.ErrUnavailable) {
		t.Fatalf("behind a lock: %v", err)
	}
	dba.Rollback()
	first := enqueue(t, s, message("held"))
	if second := enqueue(t, s, message("held")); second.MsgID != first.MsgID {
		t.Fatalf("two messages: %d and %d", first.MsgID, second.MsgID)
	}
}

func BenchmarkEnqueueBatch500(b *testing.B) {
	s := testdb.Open(b, store.Config{})
	batch := make([]store.Message, 500)
	for i := range batch {
		batch[i] = *message("")
	}
	b.ResetTimer()
	for range b.N {
		if _, errs := s.EnqueueBatch(context.Background(), batch); errs[0] != nil {
			b.Fatal(errs[0])
		}
	}
	b.ReportMetric(float64(500*b.N)/b.Elapsed().Seconds(), "messages/s")
}

// A key that somebody holds locked holds up those who ask for it, and nobody else.
func TestHeldKeyHoldsUpNobodyElse(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn, Timeout: 4 * time.Second})
	dba, err := raw(t, dsn).Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer dba.Rollback()
	run(t, dba, "INSERT INTO t_idempotency VALUES ('default', UNHEX(SHA2('held', 256)), 1, UNHEX(SHA2('x', 256)), UTC_TIMESTAMP(3))")
	stop := make(chan struct{})
	var held, others sync.WaitGroup
	for range 2 {
		held.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					if _, err := s.Enqueue(context.Background(), message("held")); err == nil {
						t.Error("accepted under a key that is not decided")
					}
				}
			}
		})
	}
	var refused atomic.Int32
	for caller := range 20 {
		others.Go(func() {
			for i := range 20 {
				if _, err := s.Enqueue(context.Background(), message(fmt.Sprint(caller, "-", i))); err != nil {
					refused.Add(1)
				}
			}
		})
	}
	others.Wait()
	close(stop)
	held.Wait()
	if n := refused.Load(); n != 0 {
		t.Fatalf("%d messages were refused for somebody else's key", n)
	}
}

// The database was away for as many tries as there are, and when it is back the key is there: an earlier try had been carried out. That is
// an answer, not an error.
func TestKnownAfterManyTries(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s, other := testdb.Open(t, store.Config{DSN: dsn}), testdb.Open(t, store.Config{DSN: dsn})
	tries := 0
	var first store.Accepted
	s.Sabotage(func(statements []string) []string {
		switch tries++; {
		case tries <= 10:
			return append([]string{"SIGNAL SQLSTATE '08S01' SET MYSQL_ERRNO = 1053"}, statements...) // the server shuts down
		case tries == 11:
			first = enqueue(t, other, message("r"))
		}
		return statements
	})
	got, err := s.Enqueue(context.Background(), message("r"))
	if err != nil || !got.Duplicate || got.MsgID != first.MsgID || tries != 11 {
		t.Errorf("%+v %v after %d tries, want message %d", got, err, tries, first.MsgID)
	}
}
