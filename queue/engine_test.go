package queue_test

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"tidings/internal/msg"
	"tidings/internal/policy"
	"tidings/internal/testdb"
	"tidings/queue"
	"tidings/sender"
	"tidings/store"
)

func TestMain(m *testing.M) { os.Exit(testdb.Main(m)) }

// script is a provider that does what a test says, and remembers what it was asked.
type script struct {
	send   func(context.Context, *sender.Message) sender.Verdict
	traits sender.Traits
	judged bool // its failures open its breaker
	mu     sync.Mutex
	sends  map[string]int // by key
	total  atomic.Int64
}

func (p *script) Send(ctx context.Context, m *sender.Message) sender.Verdict {
	p.mu.Lock()
	if p.sends == nil {
		p.sends = map[string]int{}
	}
	p.sends[m.Key]++
	p.mu.Unlock()
	p.total.Add(1)
	if p.send == nil {
		return sender.Verdict{Kind: sender.Success}
	}
	return p.send(ctx, m)
}

func (p *script) Traits() sender.Traits { return p.traits }

func (p *script) Close() error { return nil }

func (p *script) twice() (keys []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for key, n := range p.sends {
		if n > 1 {
			keys = append(keys, key)
		}
	}
	return keys
}

// bundle is a database, a store, an engine and what it sends to.
type bundle struct {
	dsn      string
	db       *sql.DB
	store    *store.Store
	engine   *queue.Engine
	provider *script
}

type option func(*store.Config, *queue.Config)

func setup(t testing.TB, provider *script, options ...option) *bundle {
	t.Helper()
	b := &bundle{provider: provider}
	provider.traits.Destinations = !provider.judged
	sc := store.Config{
		Wake:    func(l msg.Lane, c msg.Channel, due time.Time) { b.engine.Wake(l, c, due) },
		Reserve: func(l msg.Lane, c msg.Channel, n int) store.Reservation { return b.engine.Reserve(l, c, n) },
	}
	qc := queue.Config{
		Policies: quick(), Survey: 50 * time.Millisecond,
		Channels: []queue.Channel{{Channel: msg.Log, Providers: []queue.Provider{{Name: "script", Provider: provider}}}},
	}
	for _, o := range options {
		o(&sc, &qc)
	}
	if sc.DSN == "" {
		sc.DSN = testdb.New(t)
	}
	b.dsn = sc.DSN
	b.store = testdb.Open(t, sc)
	cfg, err := mysql.ParseDSN(b.dsn)
	if err != nil {
		t.Fatal(err)
	}
	cfg.ParseTime, cfg.InterpolateParams = true, true
	cfg.Params = map[string]string{"time_zone": "'+00:00'"}
	if b.db, err = sql.Open("mysql", cfg.FormatDSN()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.db.Close() })
	qc.Store = b.store
	if b.engine, err = queue.New(qc); err != nil {
		t.Fatal(err)
	}
	b.engine.Start()
	t.Cleanup(b.stop)
	return b
}

func (b *bundle) stop() {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	b.engine.Stop(ctx)
}

func shortLease(sc *store.Config, qc *queue.Config) {
	sc.Lease, qc.SendTimeout, qc.SettleBudget = 2*time.Second, 500*time.Millisecond, 500*time.Millisecond
}

// quick are the default policies with waits that a test can wait for.
func quick() *policy.Set {
	set := policy.Defaults()
	for i := range set {
		for j := range set[i].Retry {
			set[i].Retry[j] = 20 * time.Millisecond
		}
		set[i].UnknownWait = 50 * time.Millisecond
	}
	return set
}

func (b *bundle) send(t testing.TB, n int, edit ...func(*store.Message)) []uint64 {
	t.Helper()
	var ids []uint64
	for n > 0 {
		batch := make([]store.Message, min(n, 500))
		for i := range batch {
			batch[i] = store.Message{
				SourceID: "default", BodyHash: sha256.Sum256(nil), Category: msg.Notification, Lane: msg.Middle,
				Content: []byte(`{"text":"hello"}`), Expire: b.store.Now().Add(time.Hour),
				Tasks: []store.NewTask{{Channel: msg.Log, Receiver: "someone", AttemptLimit: 5}},
			}
			for _, e := range edit {
				e(&batch[i])
			}
		}
		got, errs := b.store.EnqueueBatch(context.Background(), batch)
		for i := range got {
			if errs[i] != nil {
				t.Fatal(errs[i])
			}
			ids = append(ids, got[i].MsgID)
		}
		n -= len(batch)
	}
	return ids
}

func (b *bundle) count(t testing.TB, query string, args ...any) (n int) {
	t.Helper()
	if err := b.db.QueryRow("SELECT COUNT(*) FROM "+query, args...).Scan(&n); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return n
}

// await polls until a count is reached.
func (b *bundle) await(t testing.TB, want int, query string, args ...any) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for {
		got := b.count(t, query, args...)
		if got == want {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %d, want %d", query, got, want)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func claimedOnly(sc *store.Config, _ *queue.Config) { sc.Reserve = nil }

func TestDelivers(t *testing.T) {
	t.Parallel()
	t.Run("handed over", func(t *testing.T) { t.Parallel(); delivers(t, 700) })
	t.Run("claimed", func(t *testing.T) { t.Parallel(); delivers(t, 700, claimedOnly) })
	t.Run("one slot", func(t *testing.T) {
		t.Parallel()
		delivers(t, 100, func(_ *store.Config, qc *queue.Config) { qc.Channels[0].Slots = 1 })
	})
}

func delivers(t *testing.T, each int, options ...option) {
	b := setup(t, &script{}, options...)
	for _, lane := range msg.Lanes {
		b.send(t, each, func(m *store.Message) { m.Lane = lane })
	}
	all := each * len(msg.Lanes)
	b.await(t, all, "t_msg_record WHERE status = 3 AND attempt = 1 AND provider = 'script'")
	if again := b.provider.twice(); len(again) > 0 || int(b.provider.total.Load()) != all {
		t.Fatalf("%d sends, twice: %v", b.provider.total.Load(), again)
	}
	if n := b.count(t, "v_task WHERE status <> 'success'"); n != 0 {
		t.Fatalf("%d tasks are left", n)
	}
}

func TestRetriesUntilSuccess(t *testing.T) {
	t.Parallel()
	b := setup(t, &script{send: func(_ context.Context, m *sender.Message) sender.Verdict {
		if m.Attempt < 3 {
			return sender.Verdict{Kind: sender.Temporary, Code: "450", Text: "try later"}
		}
		return sender.Verdict{Kind: sender.Success, ProviderMsgID: "id"}
	}})
	id := b.send(t, 1)[0]
	b.await(t, 1, "t_msg_record WHERE status = 3 AND attempt = 3 AND last_error = '' AND provider_msg_id = 'id'")
	if n := b.count(t, "t_msg_attempt WHERE msg_id = ? AND outcome = 'temporary' AND code = '450'", id); n != 2 {
		t.Fatalf("%d attempt rows", n)
	}
}

func TestDeadLetter(t *testing.T) {
	t.Parallel()
	b := setup(t, &script{send: func(context.Context, *sender.Message) sender.Verdict {
		return sender.Verdict{Kind: sender.Temporary, Text: "no luck"}
	}})
	b.send(t, 3)
	b.await(t, 3, "t_msg_dead WHERE status = 5 AND attempt = 5 AND last_error = 'no luck'")
	if n := b.count(t, "t_msg_attempt"); n != 15 {
		t.Fatalf("%d attempt rows", n)
	}
}

func TestPermanent(t *testing.T) {
	t.Parallel()
	b := setup(t, &script{send: func(context.Context, *sender.Message) sender.Verdict {
		return sender.Verdict{Kind: sender.Permanent, Code: "550", Text: "no such user"}
	}})
	b.send(t, 1)
	b.await(t, 1, "t_msg_record WHERE status = 4 AND attempt = 1 AND last_error = 'no such user'")
}

func TestExpiredIsNotSent(t *testing.T) {
	t.Parallel()
	b := setup(t, &script{})
	b.send(t, 2, func(m *store.Message) { m.Expire = b.store.Now().Add(-time.Second) })
	b.await(t, 2, "t_msg_record WHERE status = 6 AND attempt = 0")
	if n := b.provider.total.Load(); n != 0 {
		t.Fatalf("%d sends", n)
	}
}

// Busy costs no attempt, however often it is said.
func TestBusyCostsNothing(t *testing.T) {
	t.Parallel()
	var calls atomic.Int32
	b := setup(t, &script{send: func(context.Context, *sender.Message) sender.Verdict {
		if calls.Add(1) <= 2 {
			return sender.Verdict{Kind: sender.Busy, Text: "rate limit"}
		}
		return sender.Verdict{Kind: sender.Success}
	}})
	b.send(t, 1)
	b.await(t, 1, "t_msg_record WHERE status = 3 AND attempt = 1")
	if n := b.count(t, "t_msg_attempt"); n != 0 {
		t.Fatalf("%d attempt rows", n)
	}
}

// A provider that panics has perhaps sent. What follows is the category's choice; the process lives on.
func TestPanic(t *testing.T) {
	t.Parallel()
	b := setup(t, &script{send: func(_ context.Context, m *sender.Message) sender.Verdict {
		if m.Attempt == 1 {
			panic("a bug")
		}
		return sender.Verdict{Kind: sender.Success}
	}})
	b.send(t, 1)
	b.send(t, 1, func(m *store.Message) { m.Category = msg.Marketing })
	b.await(t, 1, "t_msg_record WHERE status = 3 AND category = 'notification' AND attempt = 2")
	b.await(t, 1, "t_msg_dead WHERE category = 'marketing' AND attempt = 1 AND last_error LIKE 'outcome unknown%'")
}

// A provider with receipts is given time to send one; then the task is asked again.
func TestUnknownWaits(t *testing.T) {
	t.Parallel()
	b := setup(t, &script{traits: sender.Traits{Receipts: true}, send: func(_ context.Context, m *sender.Message) sender.Verdict {
		if m.Attempt == 1 {
			return sender.Verdict{Kind: sender.Unknown, Text: "no answer"}
		}
		return sender.Verdict{Kind: sender.Success}
	}}, func(sc *store.Config, qc *queue.Config) {
		shortLease(sc, qc)
		qc.Policies[msg.Notification].UnknownWait = 300 * time.Millisecond
	})
	b.send(t, 1)
	b.await(t, 1, "t_msg_queue_middle WHERE status = 2 AND attempt = 1 AND owner = ''")
	b.await(t, 1, "t_msg_record WHERE status = 3 AND attempt = 2")
	if n := b.count(t, "t_msg_attempt WHERE outcome = 'unknown'"); n != 1 {
		t.Fatalf("%d attempt rows", n)
	}
}

// Tasks of a process that died come back when their lease ends, and go through decide as outcomes unknown.
func TestRecoversTheDead(t *testing.T) {
	t.Parallel()
	b := setup(t, &script{traits: sender.Traits{Repeatable: true}}, shortLease)
	b.stop()
	ids := b.send(t, 10)
	if claimed, err := b.store.Claim(context.Background(), msg.Middle, msg.Log, 10, time.Time{}); err != nil || len(claimed.Tasks) != 10 {
		t.Fatalf("%d tasks, %v", len(claimed.Tasks), err)
	}
	other := setup(t, &script{traits: sender.Traits{Repeatable: true}}, shortLease, func(sc *store.Config, _ *queue.Config) { sc.DSN = b.dsn })
	other.await(t, 10, "t_msg_record WHERE status = 3 AND attempt = 2")
	if n := other.count(t, "t_msg_attempt WHERE outcome = 'unknown' AND attempt = 1"); n != 10 {
		t.Fatalf("%d attempt rows for %d tasks", n, len(ids))
	}
}

// With hand-off and two engines, each sends what it accepts, and nothing is sent twice.
func TestTwoEnginesHandOver(t *testing.T) {
	t.Parallel()
	a := setup(t, &script{})
	b := setup(t, &script{}, func(sc *store.Config, _ *queue.Config) { sc.DSN = a.dsn })
	var wg sync.WaitGroup
	for _, x := range []*bundle{a, b} {
		wg.Go(func() {
			for range 10 {
				x.send(t, 150) // more than there are slots
			}
		})
	}
	wg.Wait()
	a.await(t, 3000, "t_msg_record WHERE status = 3")
	if sent := a.provider.total.Load() + b.provider.total.Load(); sent != 3000 {
		t.Fatalf("%d sends", sent)
	}
}

// Two engines on one database share the work; nothing is sent twice.
func TestTwoEngines(t *testing.T) {
	t.Parallel()
	slow := func(context.Context, *sender.Message) sender.Verdict {
		time.Sleep(time.Millisecond)
		return sender.Verdict{Kind: sender.Success}
	}
	a := setup(t, &script{send: slow})
	b := setup(t, &script{send: slow}, func(sc *store.Config, _ *queue.Config) { sc.DSN = a.dsn })
	a.send(t, 3000)
	a.await(t, 3000, "t_msg_record WHERE status = 3")
	if sent := a.provider.total.Load() + b.provider.total.Load(); sent != 3000 {
		t.Fatalf("%d sends", sent)
	}
	if b.provider.total.Load() == 0 {
		t.Fatal("the second engine did nothing")
	}
}

// Stopping waits for sends that need less than the grace, and gives back what was not begun.
func TestStopLetsSendsFinish(t *testing.T) {
	t.Parallel()
	var begun sync.WaitGroup
	begun.Add(90) // of 100 slots: a tenth is high's
	b := setup(t, &script{send: func(ctx context.Context, _ *sender.Message) sender.Verdict {
		begun.Done()
		select {
		case <-time.After(300 * time.Millisecond):
			return sender.Verdict{Kind: sender.Success}
		case <-ctx.Done():
			return sender.Verdict{Kind: sender.Unknown}
		}
	}})
	b.send(t, 150)
	begun.Wait()
	b.stop()
	if sent, waiting := b.count(t, "t_msg_record WHERE status = 3"), b.count(t, "t_msg_queue_middle WHERE msg_id > 0 AND status = 0 AND owner = '' AND attempt = 0"); sent != 90 || waiting != 60 {
		t.Fatalf("%d sent, %d waiting", sent, waiting)
	}
}

// When the grace is over, sends are cancelled; their outcomes are written all the same.
func TestStopCancelsAfterGrace(t *testing.T) {
	t.Parallel()
	begun := make(chan struct{}, 1)
	b := setup(t, &script{send: func(ctx context.Context, _ *sender.Message) sender.Verdict {
		begun <- struct{}{}
		<-ctx.Done()
		return sender.Verdict{Kind: sender.Unknown, Text: "cancelled"}
	}})
	b.send(t, 1)
	<-begun
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	b.engine.Stop(ctx)
	if n := b.count(t, "t_msg_queue_middle WHERE status = 0 AND attempt = 1 AND last_error = 'cancelled'"); n != 1 {
		t.Fatal("the cancelled attempt's outcome was not written")
	}
}

// A row that somebody has locked while it is being sent settles when the lock is gone; others do not wait for it.
func TestSettlesAroundALock(t *testing.T) {
	t.Parallel()
	var hold sync.Mutex
	hold.Lock()
	b := setup(t, &script{send: func(context.Context, *sender.Message) sender.Verdict {
		hold.Lock()
		defer hold.Unlock()
		return sender.Verdict{Kind: sender.Success}
	}})
	ids := b.send(t, 20)
	b.await(t, 20, "t_msg_queue_middle WHERE status = 1")
	dba, err := b.db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := dba.Exec("SELECT * FROM t_msg_queue_middle WHERE msg_id = ? FOR UPDATE", ids[7]); err != nil {
		t.Fatal(err)
	}
	hold.Unlock()
	b.await(t, 19, "t_msg_record")
	dba.Rollback()
	b.await(t, 20, "t_msg_record")
	if again := b.provider.twice(); len(again) > 0 {
		t.Fatalf("sent twice: %v", again)
	}
}

// A broken content column, as a hand edit could leave it, ends that task and no other.
func TestBrokenContent(t *testing.T) {
	t.Parallel()
	b := setup(t, &script{})
	b.send(t, 1, func(m *store.Message) { m.Content = []byte(`"not an object"`) })
	b.send(t, 5)
	b.await(t, 5, "t_msg_record WHERE status = 3")
	b.await(t, 1, "t_msg_record WHERE status = 4 AND last_error LIKE '%content%'")
}

// A task that was copied back from the record by hand is dropped, not sent again.
func TestRecordedIsDropped(t *testing.T) {
	t.Parallel()
	b := setup(t, &script{})
	ids := b.send(t, 3)
	b.await(t, 3, "t_msg_record")
	if _, err := b.db.Exec(`INSERT INTO t_msg_queue_middle SELECT msg_id, channel, source_id, request_id, batch_id, category, priority, receiver, template_id,
		template_version, params, content, 0, attempt, attempt_limit, '', due_time, due_time, expire_time, '', '', create_time, modify_time
		FROM t_msg_record WHERE msg_id = ?`, ids[1]); err != nil {
		t.Fatal(err)
	}
	b.send(t, 3)
	b.await(t, 6, "t_msg_record")
	b.await(t, 0, "t_msg_queue_middle WHERE msg_id > 0")
	if n := b.provider.total.Load(); n != 6 {
		t.Fatalf("%d sends", n)
	}
}

func TestLeaseMustOutlastSend(t *testing.T) {
	t.Parallel()
	s := testdb.Open(t, store.Config{Lease: 10 * time.Second})
	if _, err := queue.New(queue.Config{Store: s, SendTimeout: 8 * time.Second, SettleBudget: 2 * time.Second}); err == nil {
		t.Fatal("a lease that may end during a send was accepted")
	}
}

// A lock that a DBA holds on a row past its lease must not make this process take its own task for a lost one.
func TestLockPastTheLease(t *testing.T) {
	t.Parallel()
	begun, end := make(chan struct{}), make(chan struct{})
	b := setup(t, &script{send: func(context.Context, *sender.Message) sender.Verdict {
		close(begun)
		<-end
		return sender.Verdict{Kind: sender.Success}
	}}, shortLease)
	b.send(t, 1, func(m *store.Message) { m.Category = msg.Marketing })
	<-begun
	dba, err := b.db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := dba.Exec("SELECT * FROM t_msg_queue_middle WHERE msg_id > 0 FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	close(end)
	time.Sleep(3 * time.Second) // the lease takes two
	dba.Rollback()
	b.await(t, 1, "t_msg_record WHERE status = 3 AND attempt = 1")
	if n := b.count(t, "t_msg_attempt"); n != 0 {
		t.Fatal("the task was recovered while its outcome was known")
	}
}

// Stopping waits, within the settle budget, for a lock that holds an outcome up.
func TestStopWaitsForALock(t *testing.T) {
	t.Parallel()
	begun, end := make(chan struct{}), make(chan struct{})
	b := setup(t, &script{send: func(context.Context, *sender.Message) sender.Verdict {
		close(begun)
		<-end
		return sender.Verdict{Kind: sender.Success}
	}})
	b.send(t, 1)
	<-begun
	dba, err := b.db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := dba.Exec("SELECT * FROM t_msg_queue_middle WHERE msg_id > 0 FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(time.Second, func() { dba.Rollback() })
	close(end)
	b.stop()
	if n := b.count(t, "t_msg_record WHERE status = 3"); n != 1 {
		t.Fatal("stopped without the outcome")
	}
}

// Outcomes that cannot be written at all hold up neither the others nor the end of the process.
func TestUnwritableOutcomes(t *testing.T) {
	t.Parallel()
	b := setup(t, &script{send: func(_ context.Context, m *sender.Message) sender.Verdict {
		if m.Receiver == "broken" {
			return sender.Verdict{Kind: sender.Permanent, Text: "broken"}
		}
		return sender.Verdict{Kind: sender.Success}
	}}, func(_ *store.Config, qc *queue.Config) { qc.SettleBudget = time.Second })
	if _, err := b.db.Exec("ALTER TABLE t_msg_record ADD CONSTRAINT c_broken CHECK (receiver <> 'broken')"); err != nil {
		t.Fatal(err)
	}
	b.send(t, 3, func(m *store.Message) { m.Tasks[0].Receiver = "broken" })
	b.send(t, 1500)
	b.send(t, 2, func(m *store.Message) { m.Tasks[0].Receiver, m.Lane = "broken", msg.High })
	b.await(t, 1500, "t_msg_record WHERE status = 3")
	began := time.Now()
	b.stop()
	if took := time.Since(began); took > 10*time.Second {
		t.Fatalf("stopping took %v", took)
	}
	if n := b.count(t, "v_task WHERE receiver = 'broken' AND status = 'sending'"); n != 5 {
		t.Fatalf("%d of 5 broken tasks are still claimed", n)
	}
}
