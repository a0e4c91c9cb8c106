package queue_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"tidings/internal/msg"
	"tidings/internal/policy"
	"tidings/queue"
	"tidings/sender"
	"tidings/store"
)

// scripted is a provider that keeps its own log of what it was asked.
type scripted struct {
	send   func(context.Context, *sender.Message) sender.Verdict
	traits sender.Traits

	mu       sync.Mutex
	calls    []call
	inFlight atomic.Int64
	most     atomic.Int64
}

type call struct {
	key     string
	at      time.Time
	attempt int
	kind    sender.Kind
}

func (p *scripted) Send(ctx context.Context, m *sender.Message) sender.Verdict {
	at := time.Now()
	if n := p.inFlight.Add(1); n > p.most.Load() {
		p.most.Store(n)
	}
	defer p.inFlight.Add(-1)
	v := p.send(ctx, m)
	p.mu.Lock()
	p.calls = append(p.calls, call{m.Key, at, m.Attempt, v.Kind})
	p.mu.Unlock()
	return v
}

func (p *scripted) Traits() sender.Traits { return p.traits }

func (p *scripted) Close() error { return nil }

func (p *scripted) log() []call {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.calls)
}

// delivered tells how often each key succeeded.
func (p *scripted) delivered() map[string]int {
	n := map[string]int{}
	for _, c := range p.log() {
		if c.kind == sender.Success {
			n[c.key]++
		}
	}
	return n
}

func success(context.Context, *sender.Message) sender.Verdict {
	return sender.Verdict{Kind: sender.Success}
}

func chain(c msg.Channel, providers ...queue.Provider) option {
	return func(_ *store.Config, qc *queue.Config) {
		qc.Channels = append(qc.Channels[:0:0], append(qc.Channels, queue.Channel{Channel: c, Providers: providers, Slots: 50})...)
	}
}

// only serves nothing but what options add.
func only(_ *store.Config, qc *queue.Config) { qc.Channels = nil }

func of(category msg.Category, lane msg.Lane, c msg.Channel) func(*store.Message) {
	return func(m *store.Message) {
		m.Category, m.Lane, m.Tasks = category, lane, []store.NewTask{{Channel: c, Receiver: "x", AttemptLimit: policy.Defaults()[category].Attempts}}
	}
}

// Provider A becomes slow. Its attempts stay at its cap, verification goes to B within a second of the breaker's opening, and
// another channel does not notice.
func TestSlowProvider(t *testing.T) {
	t.Parallel()
	var slow atomic.Bool
	a := &scripted{send: func(ctx context.Context, _ *sender.Message) sender.Verdict {
		wait := 10 * time.Millisecond
		if slow.Load() {
			wait = 10 * time.Second
		}
		select {
		case <-time.After(wait):
			return sender.Verdict{Kind: sender.Success}
		case <-ctx.Done():
			return sender.Verdict{Kind: sender.Unknown, Text: "no answer"}
		}
	}}
	second, other := &scripted{send: success}, &scripted{send: success}
	b := setup(t, &script{}, only,
		chain(msg.SMS, queue.Provider{Name: "a", Provider: a, Limits: queue.Limits{Concurrency: 20, Slow: 200 * time.Millisecond}}, queue.Provider{Name: "b", Provider: second}),
		chain(msg.Email, queue.Provider{Name: "mail", Provider: other}),
		func(sc *store.Config, qc *queue.Config) { qc.SendTimeout, qc.SettleBudget = 3*time.Second, time.Second })
	b.send(t, 100, of(msg.Verification, msg.High, msg.SMS))
	b.await(t, 100, "t_msg_record WHERE status = 3 AND provider = 'a'")
	slow.Store(true)
	b.send(t, 200, of(msg.Verification, msg.High, msg.SMS))
	opened := time.Time{}
	b.await(t, 1, "t_provider_state WHERE provider = 'a' AND breaker = 'open'")
	opened = time.Now()
	id := b.send(t, 1, of(msg.Verification, msg.High, msg.SMS))[0]
	b.await(t, 1, "t_msg_record WHERE status = 3 AND provider = 'b' AND msg_id = ?", id)
	if took := time.Since(opened); took > time.Second && !raceEnabled {
		t.Errorf("verification went through b %v after the breaker opened", took)
	}
	began := time.Now()
	b.send(t, 500, of(msg.Notification, msg.Middle, msg.Email))
	b.await(t, 500, "t_msg_record WHERE provider = 'mail'")
	if took := time.Since(began); took > 5*time.Second && !raceEnabled {
		t.Errorf("another channel took %v for 500", took)
	}
	if n := a.most.Load(); n > 20 {
		t.Errorf("a had %d attempts at a time, its cap is 20", n)
	}
}

// A provider fails for a while with many messages waiting. Afterwards they leave at its rate, without a burst, each once; what has
// expired ends; second and later attempts stay under their rate, over two processes.
func TestOutage(t *testing.T) {
	t.Parallel()
	var out atomic.Bool
	out.Store(true)
	p := &scripted{send: func(context.Context, *sender.Message) sender.Verdict {
		if out.Load() {
			return sender.Verdict{Kind: sender.Temporary, Code: "503", Text: "answered 503"}
		}
		return sender.Verdict{Kind: sender.Success}
	}}
	const perSecond, retries = 400, 100
	limits := queue.Limits{Rate: perSecond, BreakerOpen: 300 * time.Millisecond}
	steer := func(_ *store.Config, qc *queue.Config) { qc.Retries = retries }
	b := setup(t, &script{}, only, chain(msg.SMS, queue.Provider{Name: "a", Provider: p, Limits: limits}), steer)
	second := setup(t, &script{}, only, chain(msg.SMS, queue.Provider{Name: "a", Provider: p, Limits: limits}), steer,
		func(sc *store.Config, _ *queue.Config) { sc.DSN = b.dsn })
	_ = second
	expires := func(m *store.Message) { m.Expire = b.store.Now().Add(2 * time.Second) }
	b.send(t, 2500, of(msg.Notification, msg.Middle, msg.SMS))
	b.send(t, 300, of(msg.Notification, msg.Low, msg.SMS), expires)
	time.Sleep(3 * time.Second)
	out.Store(false)
	back := time.Now()
	b.await(t, 0, "v_task WHERE status IN ('ready', 'sending', 'unknown')")
	took := time.Since(back)
	if n := b.count(t, "t_msg_record WHERE status = 3") + b.count(t, "t_msg_dead"); n != 2500 {
		t.Errorf("%d were sent or died, want 2,500", n)
	}
	if n := b.count(t, "t_msg_record WHERE status = 6"); n != 300 {
		t.Errorf("%d expired, want 300", n)
	}
	if dead := b.count(t, "t_msg_dead"); dead > 100 {
		t.Errorf("%d dead letters: the breaker should have kept attempts from being used up", dead)
	}
	bySecond, later := map[int]int{}, map[int]int{}
	var first time.Time
	for _, c := range p.log() {
		if first.IsZero() {
			first = c.at
		}
		if c.attempt > 1 {
			later[int(c.at.Sub(first)/time.Second)]++
		}
		if c.kind == sender.Success {
			bySecond[int(c.at.Sub(back)/time.Second)]++
		}
	}
	for key, n := range p.delivered() {
		if n > 1 {
			t.Errorf("%s was sent %d times", key, n)
		}
	}
	mean, most := 2500/took.Seconds(), 0
	for _, n := range bySecond {
		most = max(most, n)
	}
	if float64(most) > 1.5*mean || most > perSecond*6/5 {
		t.Errorf("the busiest second had %d, the mean is %.0f, the rate %d", most, mean, perSecond)
	}
	for second, n := range later {
		if n > retries {
			t.Errorf("second %d had %d later attempts, at most %d may be", second, n, retries)
		}
	}
}

// 429 with Retry-After: the provider is left alone for that long, no attempt is counted, others flow.
func TestBusyProvider(t *testing.T) {
	t.Parallel()
	var asked atomic.Int64
	p := &scripted{send: func(context.Context, *sender.Message) sender.Verdict {
		if asked.Add(1) == 1 {
			return sender.Verdict{Kind: sender.Busy, Code: "429", Text: "answered 429", RetryAfter: 3 * time.Second}
		}
		return sender.Verdict{Kind: sender.Success}
	}}
	other := &scripted{send: success}
	limits := queue.Limits{Concurrency: 1}
	b := setup(t, &script{}, only, chain(msg.SMS, queue.Provider{Name: "a", Provider: p, Limits: limits}), chain(msg.Email, queue.Provider{Name: "mail", Provider: other}))
	// Another process, which learns of it from the table.
	second := setup(t, &script{}, only, chain(msg.SMS, queue.Provider{Name: "a", Provider: p, Limits: limits}), func(sc *store.Config, _ *queue.Config) { sc.DSN = b.dsn })
	_ = second
	b.send(t, 1, of(msg.Notification, msg.Middle, msg.SMS))
	b.await(t, 1, "t_provider_state WHERE node = 65535 AND busy_until > UTC_TIMESTAMP(3)")
	time.Sleep(time.Second) // everybody obeys within a second
	before := asked.Load()
	b.send(t, 20, of(msg.Notification, msg.Middle, msg.SMS))
	b.send(t, 100, of(msg.Notification, msg.Middle, msg.Email))
	b.await(t, 100, "t_msg_record WHERE provider = 'mail'")
	b.await(t, 21, "t_msg_record WHERE provider = 'a' AND attempt = 1 AND status = 3")
	log := p.log()
	for _, c := range log[before:] {
		if since := c.at.Sub(log[0].at); since < 3*time.Second {
			t.Errorf("it was asked again after %v", since)
		}
	}
	if n := b.count(t, "t_msg_attempt"); n != 0 {
		t.Errorf("%d attempt rows", n)
	}
}

// Thousands that fail stand before one that does not: it leaves soon all the same.
func TestFailingHead(t *testing.T) {
	t.Parallel()
	p := &scripted{traits: sender.Traits{Destinations: true}, send: func(_ context.Context, m *sender.Message) sender.Verdict {
		if m.Receiver == "good" {
			return sender.Verdict{Kind: sender.Success}
		}
		return sender.Verdict{Kind: sender.Temporary, Text: "no"}
	}}
	b := setup(t, &script{}, only, chain(msg.Webhook, queue.Provider{Name: "hooks", Provider: p}),
		func(_ *store.Config, qc *queue.Config) { qc.Policies = policy.Defaults() })
	b.send(t, 5000, of(msg.Notification, msg.Middle, msg.Webhook))
	began := time.Now()
	id := b.send(t, 1, of(msg.Notification, msg.Middle, msg.Webhook), func(m *store.Message) { m.Tasks[0].Receiver = "good" })[0]
	b.await(t, 1, "t_msg_record WHERE status = 3 AND msg_id = ?", id)
	if took := time.Since(began); took > 2*time.Second && !raceEnabled {
		t.Errorf("it left after %v", took)
	}
}

// A provider that takes the message and never answers: each category does what its policy says, with the same key.
func TestSilentProvider(t *testing.T) {
	t.Parallel()
	p := &scripted{send: func(ctx context.Context, m *sender.Message) sender.Verdict {
		if m.Attempt > 1 {
			return sender.Verdict{Kind: sender.Success}
		}
		<-ctx.Done()
		return sender.Verdict{Kind: sender.Unknown, Text: "no answer: time is over"}
	}}
	b := setup(t, &script{}, only, chain(msg.SMS, queue.Provider{Name: "a", Provider: p, Limits: queue.Limits{Timeout: 200 * time.Millisecond}}))
	ids := map[msg.Category]uint64{}
	for _, c := range msg.Categories {
		ids[c] = b.send(t, 1, of(c, msg.Middle, msg.SMS))[0]
	}
	b.await(t, 1, "t_msg_record WHERE status = 3 AND attempt = 2 AND msg_id = ?", ids[msg.Verification])
	b.await(t, 1, "t_msg_record WHERE status = 3 AND attempt = 2 AND msg_id = ?", ids[msg.Notification])
	b.await(t, 1, "t_msg_dead WHERE attempt = 1 AND last_error LIKE 'outcome unknown%' AND msg_id = ?", ids[msg.Marketing])
	if n := b.count(t, "t_msg_attempt WHERE outcome = 'unknown' AND text = 'no answer: time is over'"); n != 3 {
		t.Errorf("%d attempt rows, want 3", n)
	}
	keys := map[string]int{}
	for _, c := range p.log() {
		keys[c.key]++
	}
	for category, id := range ids {
		want := 2
		if category == msg.Marketing {
			want = 1
		}
		if got := keys[msg.TaskKey(id, msg.SMS)]; got != want || len(keys) != 3 {
			t.Errorf("%s was asked %d times under its key, want %d: %v", category, got, want, keys)
		}
	}
}

// No provider in order for a while: marketing is skipped with the reason, notification waits, and is sent when the provider is back.
func TestDegraded(t *testing.T) {
	t.Parallel()
	var out atomic.Bool
	out.Store(true)
	p := &scripted{send: func(context.Context, *sender.Message) sender.Verdict {
		if out.Load() {
			return sender.Verdict{Kind: sender.Temporary, Text: "no"}
		}
		return sender.Verdict{Kind: sender.Success}
	}}
	b := setup(t, &script{}, only, chain(msg.SMS, queue.Provider{Name: "a", Provider: p, Limits: queue.Limits{BreakerOpen: 10 * time.Second}}),
		func(_ *store.Config, qc *queue.Config) {
			qc.DegradeAfter = time.Second
			qc.Policies = policy.Defaults()
		})
	b.send(t, 15, of(msg.Verification, msg.High, msg.SMS)) // opens the breaker
	b.await(t, 1, "t_provider_state WHERE breaker = 'open'")
	b.send(t, 30, of(msg.Marketing, msg.Low, msg.SMS))
	notification := b.send(t, 20, of(msg.Notification, msg.Low, msg.SMS))
	b.await(t, 30, "t_msg_record WHERE category = 'marketing' AND status = 8 AND attempt = 0 AND last_error LIKE 'skipped: no provider of sms%'")
	if n := b.count(t, "t_msg_queue_low WHERE category = 'notification' AND msg_id > 0"); n != 20 {
		t.Errorf("%d notifications wait, want 20", n)
	}
	if !b.engine.Health().Channels[0].Degraded {
		t.Errorf("%+v", b.engine.Health())
	}
	out.Store(false)
	b.await(t, len(notification), "t_msg_record WHERE category = 'notification' AND status = 3")
}

// A provider that cannot be reached is asked once more at once, within the same attempt; one that the request has left for is not.
func TestFastRetry(t *testing.T) {
	t.Parallel()
	var asked atomic.Int64
	p := &scripted{send: func(_ context.Context, m *sender.Message) sender.Verdict {
		if asked.Add(1) == 1 {
			return sender.Verdict{Kind: sender.Temporary, Text: "cannot connect", Unsent: true}
		}
		if m.Receiver == "left" && m.Attempt == 1 {
			return sender.Verdict{Kind: sender.Temporary, Text: "answered 500"}
		}
		return sender.Verdict{Kind: sender.Success}
	}}
	b := setup(t, &script{}, only, chain(msg.SMS, queue.Provider{Name: "a", Provider: p}))
	b.send(t, 1, of(msg.Notification, msg.Middle, msg.SMS))
	b.await(t, 1, "t_msg_record WHERE status = 3 AND attempt = 1")
	if n := b.count(t, "t_msg_attempt"); n != 0 || asked.Load() != 2 {
		t.Errorf("%d attempt rows, asked %d times", n, asked.Load())
	}
	b.send(t, 1, of(msg.Notification, msg.Middle, msg.SMS), func(m *store.Message) { m.Tasks[0].Receiver = "left" })
	b.await(t, 1, "t_msg_record WHERE status = 3 AND attempt = 2")
	if n := asked.Load(); n != 4 {
		t.Errorf("asked %d times, want 4: once in each attempt that had left", n)
	}
}

// A paused lane sends nothing on any node within a second, what expires in it ends, the others go on; weights change as they are set.
func TestLanePause(t *testing.T) {
	t.Parallel()
	p := &scripted{send: success}
	b := setup(t, &script{}, only, chain(msg.SMS, queue.Provider{Name: "a", Provider: p}))
	second := setup(t, &script{}, only, chain(msg.SMS, queue.Provider{Name: "a", Provider: p}), func(sc *store.Config, _ *queue.Config) { sc.DSN = b.dsn })
	ctx := context.Background()
	if _, err := b.store.SetLane(ctx, "ops", msg.Low, func(row *store.LaneControl) { row.Paused = true }); err != nil {
		t.Fatal(err)
	}
	time.Sleep(time.Second)
	b.send(t, 40, of(msg.Marketing, msg.Low, msg.SMS))
	second.send(t, 40, of(msg.Marketing, msg.Low, msg.SMS))
	b.send(t, 10, of(msg.Marketing, msg.Low, msg.SMS), func(m *store.Message) { m.Expire = b.store.Now().Add(300 * time.Millisecond) })
	b.send(t, 40, of(msg.Notification, msg.Middle, msg.SMS))
	b.await(t, 40, "t_msg_record WHERE status = 3 AND priority = 'middle'")
	b.await(t, 10, "t_msg_record WHERE status = 6 AND attempt = 0")
	if n := b.count(t, "t_msg_queue_low WHERE status = 0 AND msg_id > 0"); n != 80 {
		t.Errorf("%d tasks wait in the paused lane, want 80", n)
	}
	if _, err := second.store.SetLane(ctx, "ops", msg.Low, func(row *store.LaneControl) { row.Paused = false; row.Weight = 3 }); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	b.await(t, 80, "t_msg_record WHERE status = 3 AND priority = 'low'")
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("the lane went on after %v", took)
	}
	if h := b.engine.Health().Lanes[msg.Low]; h.Weight != 3 || h.Paused {
		t.Errorf("%+v", h)
	}
}

// A provider that is paused by hand is not asked, and goes on when it is resumed.
func TestProviderPause(t *testing.T) {
	t.Parallel()
	p := &scripted{send: success}
	b := setup(t, &script{}, only, chain(msg.SMS, queue.Provider{Name: "a", Provider: p}))
	ctx := context.Background()
	if err := b.store.PauseProvider(ctx, "ops", "a", "moving", true); err != nil {
		t.Fatal(err)
	}
	time.Sleep(time.Second)
	b.send(t, 30, of(msg.Notification, msg.Middle, msg.SMS))
	b.send(t, 10, of(msg.Notification, msg.Middle, msg.SMS), func(m *store.Message) { m.Expire = b.store.Now().Add(300 * time.Millisecond) })
	b.await(t, 10, "t_msg_record WHERE status = 6")
	if n := len(p.log()); n != 0 {
		t.Errorf("asked %d times while paused", n)
	}
	if err := b.store.PauseProvider(ctx, "ops", "a", "", false); err != nil {
		t.Fatal(err)
	}
	b.await(t, 30, "t_msg_record WHERE status = 3")
}

// High has slots that nobody else gets: while slow sends of low hold all others, it leaves at once. And a stream of high does not starve low.
func TestReservedSlots(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	p := &scripted{send: func(ctx context.Context, m *sender.Message) sender.Verdict {
		if m.Category == msg.Marketing {
			select {
			case <-release:
			case <-ctx.Done():
			}
		}
		return sender.Verdict{Kind: sender.Success}
	}}
	b := setup(t, &script{}, only, chain(msg.SMS, queue.Provider{Name: "a", Provider: p, Limits: queue.Limits{Concurrency: 20}}))
	b.send(t, 100, of(msg.Marketing, msg.Low, msg.SMS))
	b.await(t, 18, "t_msg_queue_low WHERE status = 1")
	began := time.Now()
	b.send(t, 1, of(msg.Verification, msg.High, msg.SMS))
	b.await(t, 1, "t_msg_record WHERE priority = 'high' AND status = 3")
	if took := time.Since(began); took > time.Second {
		t.Errorf("high left after %v", took)
	}
	if n := p.inFlight.Load(); n != 18 {
		t.Errorf("%d slots are in use, want 18 of 20", n)
	}
	close(release)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
				b.send(t, 50, of(msg.Verification, msg.High, msg.SMS))
			}
		}
	}()
	b.await(t, 100, "t_msg_record WHERE priority = 'low' AND status = 3")
	close(stop)
	<-stopped
}

// Health tells what a process works with.
func TestHealthTells(t *testing.T) {
	t.Parallel()
	p := &scripted{send: success}
	b := setup(t, &script{}, only, chain(msg.SMS, queue.Provider{Name: "a", Provider: p, Limits: queue.Limits{Rate: 100, Concurrency: 7}}, queue.Provider{Name: "b", Provider: p}))
	time.Sleep(100 * time.Millisecond)
	h := b.engine.Health()
	if len(h.Lanes) != 3 || len(h.Channels) != 1 || h.Channels[0].Slots != 57 || len(h.Channels[0].Providers) != 2 {
		t.Fatalf("%+v", h)
	}
	if a := h.Channels[0].Providers[0]; !a.Usable || a.Breaker != "closed" || a.Slots != 7 || a.Rate != 100 || fmt.Sprint(a.Provider) != "a" {
		t.Errorf("%+v", a)
	}
}
