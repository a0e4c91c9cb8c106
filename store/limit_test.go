package store_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"tidings/internal/id"
	"tidings/internal/msg"
	"tidings/internal/testdb"
	"tidings/internal/window"
	"tidings/store"
)

// worst is the most messages that any span of a length holds, by their create_time.
func worst(t *testing.T, dsn string, unit time.Duration) (most, all int) {
	t.Helper()
	rows, err := raw(t, dsn).Query("SELECT create_time FROM v_task ORDER BY create_time")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	var times []time.Time
	for rows.Next() {
		var at time.Time
		if err := rows.Scan(&at); err != nil {
			t.Fatal(err)
		}
		times = append(times, at)
	}
	first := 0
	for i := range times {
		for times[i].Sub(times[first]) > unit {
			first++
		}
		most = max(most, i-first+1)
	}
	return most, len(times)
}

func quota(t *testing.T, s *store.Store, source string, num int, unit time.Duration) {
	t.Helper()
	if err := s.CreateQuota(context.Background(), "test", &store.Quota{SourceID: source, Channel: msg.Log, Num: num, UnitMS: unit.Milliseconds()}); err != nil {
		t.Fatal(err)
	}
}

// Bursts from many callers of two processes, with somebody locking the counts' rows again and again: never more than the quota in any
// window, be it counted one by one or by parts, and not many fewer.
func TestQuotaUnderFire(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		num  int
		unit time.Duration
		lock bool
	}{{10, 2 * time.Second, false}, {10, 2 * time.Second, true}, {400, time.Second, false}} {
		t.Run(fmt.Sprint(tt.num, tt.lock), func(t *testing.T) {
			t.Parallel()
			dsn := testdb.New(t)
			first := testdb.Open(t, store.Config{DSN: dsn})
			quota(t, first, "default", tt.num, tt.unit)
			quota(t, first, "", 10*tt.num, tt.unit) // which the other one keeps from being reached
			second := testdb.Open(t, store.Config{DSN: dsn})
			const windows = 4
			end := time.Now().Add(windows * tt.unit)
			var callers sync.WaitGroup
			for _, s := range []*store.Store{first, second} {
				for range 8 {
					callers.Go(func() {
						for time.Now().Before(end) {
							_, err := s.Enqueue(context.Background(), message(""))
							var limit *store.LimitError
							switch {
							case errors.As(err, &limit):
								if limit.Wait <= 0 || limit.Limit.Num != tt.num {
									t.Errorf("%+v", limit)
								}
								time.Sleep(min(limit.Wait, 20*time.Millisecond)) // a burst at every edge
							case err != nil && !(tt.lock && errors.Is(err, store.ErrBusy)):
								t.Error(err)
							}
						}
					})
				}
			}
			if tt.lock {
				callers.Go(func() {
					db := raw(t, dsn)
					for time.Now().Before(end) {
						tx, err := db.Begin()
						if err != nil {
							t.Error(err)
							return
						}
						tx.Exec("SELECT * FROM t_limit_count FOR UPDATE")
						time.Sleep(150 * time.Millisecond)
						tx.Rollback()
						time.Sleep(150 * time.Millisecond)
					}
				})
			}
			callers.Wait()
			most, all := worst(t, dsn, tt.unit)
			if most > tt.num {
				t.Errorf("%d in one window", most)
			}
			if least := (windows - 1) * tt.num * 9 / 10; all < least { // the last window may not have been filled
				t.Errorf("%d accepted in %d windows of %d", all, windows, tt.num)
			}
		})
	}
}

// Each recipient has a count of its own, by category and channel, in batches, too.
func TestFrequency(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	to := func(recipient, key string) store.Message {
		m := *message(key)
		m.Tasks = []store.NewTask{{Channel: msg.Log, Receiver: recipient, AttemptLimit: 5, Recipient: recipient, Frequency: []window.Limit{{Num: 2, Unit: time.Hour}}}}
		return m
	}
	_, errs := s.EnqueueBatch(context.Background(), []store.Message{to("ann", "1"), to("ann", "2"), to("ann", "3"), to("bob", "4"), to("ann", "5")})
	var got []bool
	for _, err := range errs {
		if err != nil && !errors.Is(err, store.ErrLimited) {
			t.Fatal(err)
		}
		got = append(got, err == nil)
	}
	if !slices.Equal(got, []bool{true, true, false, true, false}) {
		t.Fatalf("%v", got)
	}
	again := to("ann", "1")
	if accepted, err := s.Enqueue(context.Background(), &again); err != nil || !accepted.Duplicate {
		t.Fatalf("a repetition: %+v, %v", accepted, err)
	}
	over := to("ann", "6")
	_, err := s.Enqueue(context.Background(), &over)
	var limit *store.LimitError
	if !errors.As(err, &limit) || limit.Kind != store.KindRecipient || limit.Wait < 59*time.Minute {
		t.Fatalf("%v", err)
	}
	other := to("ann", "7")
	other.Category = msg.Marketing
	if _, err := s.Enqueue(context.Background(), &other); err != nil {
		t.Fatalf("another category: %v", err)
	}
	db := raw(t, dsn)
	run(t, db, "UPDATE t_limit_count SET expire_time = UTC_TIMESTAMP(3) - INTERVAL 1 DAY")
	if n, err := s.PurgeCounts(context.Background()); err != nil || n != 3 {
		t.Fatalf("purged %d, %v", n, err)
	}
	if _, err := s.Enqueue(context.Background(), &over); err != nil {
		t.Fatalf("after the counts are gone: %v", err)
	}
}

// A message is charged to all its limits, or to none, and a refused one to none.
func TestAllOrNothing(t *testing.T) {
	t.Parallel()
	s := testdb.Open(t, store.Config{})
	quota(t, s, "default", 5, time.Hour)
	m := message("")
	m.Tasks[0].Recipient, m.Tasks[0].Frequency = "ann", []window.Limit{{Num: 1, Unit: time.Hour}}
	enqueue(t, s, m)
	for range 10 {
		if _, err := s.Enqueue(context.Background(), m); !errors.Is(err, store.ErrLimited) {
			t.Fatal(err)
		}
	}
	bad := message("")
	bad.Tasks[0].Receiver = string(make([]byte, 600))
	if _, err := s.Enqueue(context.Background(), bad); err == nil || errors.Is(err, store.ErrLimited) {
		t.Fatal(err)
	}
	for i := range 4 {
		if _, err := s.Enqueue(context.Background(), message("")); err != nil {
			t.Fatalf("%d: %v", i, err)
		}
	}
	if _, err := s.Enqueue(context.Background(), message("")); !errors.Is(err, store.ErrLimited) {
		t.Fatal(err)
	}
}

// Somebody stands still inside a transaction that has charged a quota. What is charged to it waits no longer than for the lock, and
// what is not goes on; when the connection ends, all goes on.
func TestStoppedInCharge(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	quota(t, s, "default", 1000, time.Hour)
	enqueue(t, s, message(""))
	stopped, err := raw(t, dsn).Begin()
	if err != nil {
		t.Fatal(err)
	}
	run(t, stopped, "UPDATE t_limit_count SET version = version + 1")
	stop := make(chan struct{})
	var callers sync.WaitGroup
	for range 8 {
		callers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				began := time.Now()
				if _, err := s.Enqueue(context.Background(), message("")); err == nil {
					t.Error("accepted under the lock")
				}
				if took := time.Since(began); took > 6*time.Second {
					t.Errorf("waited %v", took)
				}
			}
		})
	}
	time.Sleep(200 * time.Millisecond)
	slow := 0
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		free := message("")
		free.Tasks[0].Channel, free.Lane = msg.Email, msg.Low // which is refused first where the intake is behind
		began := time.Now()
		if _, err := s.Enqueue(context.Background(), free); err != nil {
			t.Error(err)
		}
		if time.Since(began) > 900*time.Millisecond { // a lock wait takes a second; so may a machine that is busy with other tests
			slow++
		}
	}
	if slow > 1 {
		t.Errorf("a channel without a quota waited %d times", slow)
	}
	close(stop)
	callers.Wait()
	stopped.Rollback() // as when its process is killed
	if _, err := s.Enqueue(context.Background(), message("")); err != nil {
		t.Fatal(err)
	}
}

// When limits cannot be read, every caller gets an answer all the same.
func TestLimitsUnreadable(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	quota(t, s, "default", 5, time.Hour)
	db := raw(t, dsn)
	run(t, db, "RENAME TABLE t_limit_count TO t_away")
	answered := make(chan []error)
	go func() {
		_, errs := s.EnqueueBatch(context.Background(), []store.Message{*message("a"), *message("b"), *message("a")})
		answered <- errs
	}()
	select {
	case errs := <-answered:
		for _, err := range errs {
			if err == nil {
				t.Error("accepted without being counted")
			}
		}
	case <-time.After(20 * time.Second):
		t.Fatal("no answer")
	}
	run(t, db, "RENAME TABLE t_away TO t_limit_count")
	enqueue(t, s, message("a"))
}

// A quota of nothing, as a person writes it into the table, closes the channel.
func TestQuotaOfNothing(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	run(t, raw(t, dsn), "INSERT INTO t_global_quota (channel, num, unit, create_time, modify_time) VALUES (31, 0, 60000, NOW(3), NOW(3))")
	s := testdb.Open(t, store.Config{DSN: dsn})
	if _, err := s.Enqueue(context.Background(), message("")); !errors.Is(err, store.ErrLimited) {
		t.Fatal(err)
	}
}

// After a long silence the copies of sources and quotas are old. The requests that come then at once all wait for new ones.
func TestCopiesAfterSilence(t *testing.T) {
	t.Parallel()
	s := testdb.Open(t, store.Config{})
	if err := s.CreateSource(context.Background(), "test", store.Source{ID: "shop", Role: store.RoleSender}); err != nil {
		t.Fatal(err)
	}
	key, _, err := s.CreateKey(context.Background(), "test", "shop")
	if err != nil {
		t.Fatal(err)
	}
	s.Caller(context.Background(), key)
	s.AgeCopies(time.Hour)
	var callers sync.WaitGroup
	for range 20 {
		callers.Go(func() {
			if src, _, err := s.Caller(context.Background(), key); err != nil || src.ID != "shop" {
				t.Errorf("%+v, %v", src, err)
			}
		})
	}
	callers.Wait()
}

// Quotas that are changed on one node, or by hand, hold on others within a second.
func TestQuotaOnAnotherNode(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	here, there := testdb.Open(t, store.Config{DSN: dsn}), testdb.Open(t, store.Config{DSN: dsn})
	enqueue(t, there, message(""))
	q := store.Quota{Channel: msg.Log, Num: 1, UnitMS: 3600_000}
	if err := here.CreateQuota(context.Background(), "test", &q); err != nil {
		t.Fatal(err)
	}
	within := func(what string, ok func(error) bool) { // a second
		t.Helper()
		for until := time.Now().Add(time.Second); ; {
			_, err := there.Enqueue(context.Background(), message(""))
			if ok(err) {
				return
			}
			if time.Now().After(until) {
				t.Fatalf("%s: %v", what, err)
			}
		}
	}
	within("the new quota", func(err error) bool { return errors.Is(err, store.ErrLimited) })
	q.Num = 1_000_000
	if err := here.UpdateQuota(context.Background(), "test", &q); err != nil {
		t.Fatal(err)
	}
	enqueue(t, here, message(""))
	if err := here.DeleteQuota(context.Background(), "test", &q); err != nil {
		t.Fatal(err)
	}
	if err := here.DeleteQuota(context.Background(), "test", &q); !errors.Is(err, store.ErrNotFound) {
		t.Fatal(err)
	}
	within("no quota", func(err error) bool { return err == nil })
	if list, err := here.Quotas(context.Background()); err != nil || len(list) != 0 {
		t.Fatalf("%v, %v", list, err)
	}
}

func TestCampaign(t *testing.T) {
	t.Parallel()
	s := testdb.Open(t, store.Config{})
	var first store.Accepted
	for i := range 3 {
		m := message("")
		m.BatchID = "autumn"
		if got := enqueue(t, s, m); i == 0 {
			first = got
		}
		enqueue(t, s, message(""))
	}
	settle(t, s, success(s, claim(t, s, 1)[0]))
	c, counts, err := s.Campaign(context.Background(), "default", "autumn")
	if err != nil || c.First != first.MsgID || c.Last <= c.First || len(counts) != 2 || counts[0].Tasks+counts[1].Tasks != 3 {
		t.Fatalf("%+v %+v %v", c, counts, err)
	}
	if _, _, err := s.Campaign(context.Background(), "shop", "autumn"); !errors.Is(err, store.ErrNotFound) {
		t.Fatal(err)
	}
	if list, err := s.Campaigns(context.Background(), "", 1<<62, 10); err != nil || len(list) != 1 {
		t.Fatalf("%v, %v", list, err)
	}
}

// The database is slow: messages that can wait are refused, urgent ones are not, and all is well afterwards.
func TestOverload(t *testing.T) {
	t.Parallel()
	s := testdb.Open(t, store.Config{Timeout: 4 * time.Second})
	var once sync.Once
	slow := make(chan struct{})
	s.Sabotage(func(statements []string) []string {
		once.Do(func() {
			statements = append([]string{"DO SLEEP(3)"}, statements...)
			close(slow)
		})
		return statements
	})
	started := make(chan error)
	go func() {
		_, err := s.Enqueue(context.Background(), message(""))
		started <- err
	}()
	<-slow
	lane := func(l msg.Lane) error {
		m := message("")
		m.Lane = l
		_, err := s.Enqueue(context.Background(), m)
		return err
	}
	refused := map[msg.Lane]bool{}
	for end := time.Now().Add(2900 * time.Millisecond); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		for _, l := range msg.Lanes {
			err := lane(l)
			if errors.Is(err, store.ErrOverloaded) {
				refused[l] = true
			} else if err != nil {
				t.Errorf("%v: %v", l, err)
			}
			if l == msg.Middle && refused[msg.Middle] && !refused[msg.Low] {
				t.Error("middle was refused before low")
			}
		}
	}
	if err := <-started; err != nil {
		t.Error(err)
	}
	if !refused[msg.Low] || !refused[msg.Middle] || refused[msg.High] {
		t.Errorf("refused: %v", refused)
	}
	for _, l := range msg.Lanes {
		if err := lane(l); err != nil {
			t.Errorf("afterwards %v: %v", l, err)
		}
	}
}

// A packet that is held up before its charge is not charged to the time before: it is made anew, and the message's own time is
// that of the charge.
func TestChargeInTime(t *testing.T) {
	t.Parallel()
	s := testdb.Open(t, store.Config{})
	quota(t, s, "default", 5, 2*time.Second)
	packets := 0
	s.Sabotage(func(statements []string) []string {
		if packets++; packets == 1 {
			return append([]string{"DO SLEEP(0.3)"}, statements...)
		}
		return statements
	})
	began := time.Now()
	got := enqueue(t, s, message("held-up"))
	if packets != 2 {
		t.Fatalf("%d packets", packets)
	}
	if early := began.Add(300 * time.Millisecond).Sub(id.Time(got.MsgID)); early > 20*time.Millisecond { // the clocks differ by little
		t.Fatalf("the message counts as accepted %v before it was", early)
	}
}
