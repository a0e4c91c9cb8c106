package store_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"tidings/internal/testdb"
	"tidings/internal/window"
	"tidings/store"
)

// submitted makes messages of the rows that are to be taken.
func submitted(t *testing.T, s *store.Store) (messages []store.Message) {
	t.Helper()
	page, err := s.Submitted(context.Background(), store.SubmitPlace{})
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range page.List {
		m := message(fmt.Sprintf("submit-%d", row.ID))
		m.SubmitID = row.ID
		messages = append(messages, *m)
	}
	return messages
}

const submitOne = `INSERT INTO t_msg_submit (source_id, channels, receiver, content) VALUES ('default', 'log', 'ann', '{"text": "hi"}')`

func TestSubmittedPages(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s, db := testdb.Open(t, store.Config{DSN: dsn}), raw(t, dsn)
	run(t, db, "INSERT INTO t_msg_submit (source_id, channels, receiver, content) SELECT 'default', 'log', 'ann', JSON_OBJECT('text', REPEAT('x', IF(seq = 5, 1100000, IF(seq < 5, 400000, 10)))) FROM seq_1_to_450")
	run(t, db, submitOne+", ('default', 'log', 'later', NULL)")
	run(t, db, "UPDATE t_msg_submit SET next_time = UTC_TIMESTAMP(3) + INTERVAL 1 HOUR WHERE receiver = 'later'")
	var sizes []int
	seen, large := map[uint64]bool{}, 0
	for place := (store.SubmitPlace{}); ; {
		page, err := s.Submitted(context.Background(), place)
		if err != nil {
			t.Fatal(err)
		}
		for i := range page.List {
			seen[page.List[i].ID] = true
		}
		large += len(page.TooLarge)
		sizes = append(sizes, len(page.List))
		if !page.More {
			break
		}
		place = page.Last
	}
	if len(seen) != 450 || large != 1 || fmt.Sprint(sizes) != "[2 199 200 49]" {
		t.Errorf("read %d rows and %d too large, in pages of %v", len(seen), large, sizes)
	}
}

// A message and the row that it comes from are one: whatever fails in the packet, neither is there without the other.
func TestTakenWithItsMessage(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s, db := testdb.Open(t, store.Config{DSN: dsn}), raw(t, dsn)
	for broken := range 6 {
		run(t, db, submitOne+", ('default', 'log', 'bob', NULL)")
		s.Sabotage(func(statements []string) []string {
			if broken >= len(statements) || !strings.Contains(statements[0], "submit-take") {
				return statements
			}
			s.Sabotage(nil)
			return append(append(append([]string{}, statements[:broken]...), "SELECT no_such_column FROM t_node"), statements[broken:]...)
		})
		_, errs := s.EnqueueBatch(context.Background(), submitted(t, s))
		s.Sabotage(nil)
		halves := count(t, db, "SELECT COUNT(*) FROM t_msg_submit AS s LEFT JOIN t_msg_queue_middle AS q ON q.msg_id = s.msg_id WHERE (s.status = 'accepted') <> (q.msg_id IS NOT NULL)")
		if orphans := count(t, db, "SELECT COUNT(*) FROM t_msg_queue_middle WHERE msg_id > 0 AND msg_id NOT IN (SELECT msg_id FROM t_msg_submit WHERE msg_id IS NOT NULL)"); halves != 0 || orphans != 0 {
			t.Fatalf("broken at %d: %d rows without their message or the other way round, %d messages without a row; %v", broken, halves, orphans, errs)
		}
	}
}

// Whoever takes a row second is told, and accepts nothing; the others of its batch are accepted.
func TestTakenByAnother(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s, db := testdb.Open(t, store.Config{DSN: dsn}), raw(t, dsn)
	run(t, db, submitOne+", ('default', 'log', 'bob', NULL), ('default', 'log', 'cy', NULL)")
	messages := submitted(t, s)
	run(t, db, "UPDATE t_msg_submit SET status = 'rejected' WHERE receiver = 'bob'")
	got, errs := s.EnqueueBatch(context.Background(), messages)
	if errs[0] != nil || !errors.Is(errs[1], store.ErrTaken) || errs[2] != nil {
		t.Fatalf("%+v %v", got, errs)
	}
	if n := count(t, db, "SELECT COUNT(*) FROM t_msg_queue_middle AS q JOIN t_msg_submit AS s ON s.msg_id = q.msg_id AND s.status = 'accepted' AND s.content IS NULL"); n != 2 {
		t.Errorf("%d were accepted", n)
	}
	again, errs := s.EnqueueBatch(context.Background(), messages[:1])
	if !errors.Is(errs[0], store.ErrTaken) {
		t.Errorf("taken twice: %+v %v", again, errs)
	}
}

func TestSubmissionsAreAnswered(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s, db := testdb.Open(t, store.Config{DSN: dsn}), raw(t, dsn)
	ctx := context.Background()
	run(t, db, submitOne+", ('default', 'log', 'bob', NULL), ('default', 'log', 'cy', NULL)")
	for i, do := range []func(id uint64) error{
		func(id uint64) error { return s.RejectSubmission(ctx, id, "no") },
		func(id uint64) error { return s.PostponeSubmission(ctx, id, "wait", time.Hour) },
		func(id uint64) error { return s.KnownSubmission(ctx, id, 77) },
	} {
		if err := do(uint64(i + 1)); err != nil {
			t.Fatal(err)
		}
	}
	const want = "rejected no, new wait, accepted  77"
	if got := text(t, db, "SELECT GROUP_CONCAT(CONCAT_WS(' ', status, error, msg_id) ORDER BY submit_id SEPARATOR ', ') FROM t_msg_submit"); got != want {
		t.Errorf("%s, want %s", got, want)
	}
	// What is not new any more is changed by nobody who comes late.
	for _, do := range []func() error{
		func() error { return s.RejectSubmission(ctx, 3, "late") },
		func() error { return s.PostponeSubmission(ctx, 3, "late", time.Hour) },
		func() error { return s.KnownSubmission(ctx, 1, 78) },
	} {
		if err := do(); err != nil {
			t.Fatal(err)
		}
	}
	if got := text(t, db, "SELECT GROUP_CONCAT(CONCAT_WS(' ', status, error, msg_id) ORDER BY submit_id SEPARATOR ', ') FROM t_msg_submit"); got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if left := submitted(t, s); len(left) != 0 {
		t.Errorf("%d are to be taken", len(left))
	}
	run(t, db, "UPDATE t_msg_submit SET next_time = UTC_TIMESTAMP(3) - INTERVAL 2 DAY")
	if n, err := s.PurgeSubmitted(ctx, 72*time.Hour); n != 0 || err != nil {
		t.Errorf("purged %d %v: they are not old enough", n, err)
	}
	if n, err := s.PurgeSubmitted(ctx, 24*time.Hour); n != 2 || err != nil || count(t, db, "SELECT COUNT(*) FROM t_msg_submit") != 1 {
		t.Errorf("purged %d %v: what is new stays, whatever its age", n, err)
	}
}

// Limits refuse a submission without refusing those beside it, and what is refused stays new.
func TestSubmissionsWithLimits(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s, db := testdb.Open(t, store.Config{DSN: dsn}), raw(t, dsn)
	run(t, db, submitOne+", ('default', 'log', 'bob', NULL), ('default', 'log', 'cy', NULL)")
	messages := submitted(t, s)
	for i := range messages[:2] {
		messages[i].Tasks[0].Frequency, messages[i].Tasks[0].Recipient = []window.Limit{{Num: 1, Unit: time.Hour}}, "same"
	}
	_, errs := s.EnqueueBatch(context.Background(), messages)
	refused := 0
	for _, err := range errs {
		if errors.Is(err, store.ErrLimited) {
			refused++
		} else if err != nil {
			t.Error(err)
		}
	}
	if n := count(t, db, "SELECT COUNT(*) FROM t_msg_submit WHERE status = 'new'"); refused != 1 || n != 1 {
		t.Errorf("%d refused, %d new: %v", refused, n, errs)
	}
}

func TestDuty(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s, db := testdb.Open(t, store.Config{DSN: dsn}), raw(t, dsn)
	ctx := context.Background()
	lease := time.Minute
	take := func(owner string) bool {
		t.Helper()
		lease += time.Millisecond // an update that changes nothing takes nothing
		mine, err := s.TakeDuty(ctx, store.DutySubmit, owner, lease)
		if err != nil {
			t.Fatal(err)
		}
		return mine
	}
	a, b := s.NewOwner(), s.NewOwner()
	for range 2 {
		if !take(a) || take(b) {
			t.Error("a duty is one's, and stays so")
		}
	}
	if err := s.LeaveDuty(ctx, store.DutySubmit, b, ""); err != nil || take(b) {
		t.Errorf("somebody else left it: %v", err)
	}
	if err := s.LeaveDuty(ctx, store.DutySubmit, a, "no time"); err != nil || !take(b) {
		t.Errorf("left, and not to be had: %v", err)
	}
	if got := text(t, db, "SELECT CONCAT(last_error, IF(done_time IS NULL, ' never', ' done')) FROM t_duty WHERE duty = 'submit'"); got != "no time never" {
		t.Error(got)
	}
	run(t, db, "UPDATE t_duty SET lease_end = UTC_TIMESTAMP(3) - INTERVAL 1 SECOND")
	if !take(a) {
		t.Error("its lease has ended")
	}
	if err := s.LeaveDuty(ctx, store.DutySubmit, a, ""); err != nil || text(t, db, "SELECT CONCAT(last_error, done_time IS NULL) FROM t_duty WHERE duty = 'submit'") != "0" {
		t.Errorf("done: %v", err)
	}
}

func TestMaySend(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	ctx := context.Background()
	may := func(source string, want bool) {
		t.Helper()
		if got, err := s.MaySend(ctx, source); got != want || err != nil {
			t.Errorf("%s: %v %v, want %v", source, got, err, want)
		}
	}
	may("default", true)
	may("shop", false)
	if err := s.CreateSource(ctx, "test", store.Source{ID: "shop", Role: store.RoleSender}); err != nil {
		t.Fatal(err)
	}
	may("default", false)
	may("shop", true)
	off := false
	if err := s.UpdateSource(ctx, "test", "shop", store.SourceChange{Enabled: &off}); err != nil {
		t.Fatal(err)
	}
	may("shop", false)
}
