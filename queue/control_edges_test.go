package queue_test

import (
	"context"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"tidings/internal/catalog"
	"tidings/internal/msg"
	"tidings/internal/policy"
	"tidings/internal/testdb"
	"tidings/queue"
	"tidings/sender"
	"tidings/store"
)

func hang(ctx context.Context, _ *sender.Message) sender.Verdict {
	<-ctx.Done()
	return sender.Verdict{Kind: sender.Unknown, Text: "no answer"}
}

// once fails the first attempt of each message.
func once(_ context.Context, m *sender.Message) sender.Verdict {
	if m.Attempt == 1 {
		return sender.Verdict{Kind: sender.Temporary, Text: "no"}
	}
	return sender.Verdict{Kind: sender.Success}
}

func within(t *testing.T, what string, most time.Duration, do func()) {
	t.Helper()
	began := time.Now()
	do()
	if took := time.Since(began); took > most {
		t.Errorf("%s took %v, want %v at most", what, took, most)
	}
}

// Probes that are told to come back say nothing of the provider: others are let through after them.
func TestProbesOfABusyProvider(t *testing.T) {
	t.Parallel()
	var mode atomic.Int64
	p := &scripted{send: func(context.Context, *sender.Message) sender.Verdict {
		switch mode.Load() {
		case 0:
			return sender.Verdict{Kind: sender.Temporary, Text: "no"}
		case 1:
			return sender.Verdict{Kind: sender.Busy, Text: "429", RetryAfter: time.Second}
		}
		return sender.Verdict{Kind: sender.Success}
	}}
	b := setup(t, &script{}, only, chain(msg.SMS, queue.Provider{Name: "a", Provider: p, Limits: queue.Limits{BreakerOpen: time.Second}}))
	b.send(t, 20, of(msg.Notification, msg.Middle, msg.SMS))
	b.await(t, 1, "t_provider_state WHERE provider = 'a' AND breaker = 'open'")
	mode.Store(1)
	time.Sleep(3 * time.Second)
	mode.Store(2)
	b.await(t, 0, "t_msg_queue_middle WHERE msg_id > 0")
	b.await(t, 1, "t_provider_state WHERE provider = 'a' AND breaker = 'closed'")
}

// While probes hang, verification goes to the next provider.
func TestProbesThatHang(t *testing.T) {
	t.Parallel()
	a, second := &scripted{send: hang}, &scripted{send: success}
	b := setup(t, &script{}, only, chain(msg.SMS,
		queue.Provider{Name: "a", Provider: a, Limits: queue.Limits{Concurrency: 20, Timeout: 6 * time.Second, BreakerOpen: time.Second}},
		queue.Provider{Name: "b", Provider: second}))
	b.send(t, 18, of(msg.Verification, msg.High, msg.SMS))
	b.await(t, 1, "t_provider_state WHERE provider = 'a' AND breaker = 'open'")
	time.Sleep(1200 * time.Millisecond)
	b.send(t, 3, of(msg.Verification, msg.High, msg.SMS)) // the probes
	time.Sleep(300 * time.Millisecond)
	within(t, "verification", 3*time.Second, func() {
		id := b.send(t, 1, of(msg.Verification, msg.High, msg.SMS))[0]
		b.await(t, 1, "t_msg_record WHERE status = 3 AND provider = 'b' AND msg_id = ?", id)
	})
}

// High has slots of its own at each provider of a chain.
func TestReservedSlotsOfAChain(t *testing.T) {
	t.Parallel()
	p := &scripted{send: func(ctx context.Context, m *sender.Message) sender.Verdict {
		if m.Category == msg.Marketing {
			select {
			case <-time.After(6 * time.Second):
			case <-ctx.Done():
			}
		}
		return sender.Verdict{Kind: sender.Success}
	}}
	b := setup(t, &script{}, only, chain(msg.SMS, queue.Provider{Name: "a", Provider: p, Limits: queue.Limits{Concurrency: 20}}, queue.Provider{Name: "b", Provider: &scripted{send: success}}))
	b.send(t, 100, of(msg.Marketing, msg.Low, msg.SMS))
	b.await(t, 18, "t_msg_queue_low WHERE status = 1")
	within(t, "high", 2*time.Second, func() {
		b.send(t, 1, of(msg.Verification, msg.High, msg.SMS))
		b.await(t, 1, "t_msg_record WHERE priority = 'high' AND status = 3")
	})
}

// What has expired ends at once: it takes no tokens, neither the provider's nor those of later attempts.
func TestExpiredTakesNoTokens(t *testing.T) {
	t.Parallel()
	p := &scripted{send: success}
	b := setup(t, &script{}, only, chain(msg.SMS, queue.Provider{Name: "a", Provider: p, Limits: queue.Limits{Rate: 10, Burst: 1}}))
	b.send(t, 150, of(msg.Verification, msg.High, msg.SMS), func(m *store.Message) { m.Expire = b.store.Now().Add(time.Second) })
	time.Sleep(1500 * time.Millisecond)
	within(t, "a message behind expired ones", 3*time.Second, func() {
		id := b.send(t, 1, of(msg.Verification, msg.High, msg.SMS))[0]
		b.await(t, 1, "t_msg_record WHERE status = 3 AND msg_id = ?", id)
	})
	failing := &scripted{traits: sender.Traits{Destinations: true}, send: func(context.Context, *sender.Message) sender.Verdict {
		return sender.Verdict{Kind: sender.Temporary, Text: "no"}
	}}
	c := setup(t, &script{}, only, chain(msg.SMS, queue.Provider{Name: "a", Provider: failing}), func(_ *store.Config, qc *queue.Config) { qc.Retries = 2 })
	c.send(t, 200, of(msg.Verification, msg.High, msg.SMS), func(m *store.Message) { m.Expire = c.store.Now().Add(2 * time.Second) })
	within(t, "the end of tasks whose retries have no tokens", 5*time.Second, func() { c.await(t, 0, "t_msg_queue_high WHERE msg_id > 0") })
}

// The provider rests, not the task: with a rest longer than its life it goes to the next one.
func TestBusyProviderOfAChain(t *testing.T) {
	t.Parallel()
	p := &scripted{send: func(context.Context, *sender.Message) sender.Verdict {
		return sender.Verdict{Kind: sender.Busy, Text: "429", RetryAfter: 10 * time.Minute}
	}}
	b := setup(t, &script{}, only, chain(msg.SMS, queue.Provider{Name: "a", Provider: p}, queue.Provider{Name: "b", Provider: &scripted{send: success}}))
	id := b.send(t, 1, of(msg.Verification, msg.High, msg.SMS), func(m *store.Message) { m.Expire = b.store.Now().Add(5 * time.Minute) })[0]
	b.await(t, 1, "t_msg_record WHERE status = 3 AND provider = 'b' AND msg_id = ?", id)
	// A rest that is taken back by hand is over.
	if err := b.store.PauseProvider(context.Background(), "ops", "a", "", false); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(3 * time.Second)
	for !b.engine.Health().Channels[0].Providers[0].Usable {
		if time.Now().After(deadline) {
			t.Fatalf("%+v", b.engine.Health().Channels[0].Providers[0])
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// A storm of retries in low puts off those of high by little.
func TestRetriesByLane(t *testing.T) {
	t.Parallel()
	p := &scripted{traits: sender.Traits{Destinations: true}, send: once}
	b := setup(t, &script{}, only, chain(msg.SMS, queue.Provider{Name: "a", Provider: p}), func(_ *store.Config, qc *queue.Config) { qc.Retries = 40 })
	b.send(t, 1000, of(msg.Marketing, msg.Low, msg.SMS))
	b.await(t, 1000, "t_msg_attempt")
	within(t, "twenty verifications with a retry each", 4*time.Second, func() {
		b.send(t, 20, of(msg.Verification, msg.High, msg.SMS))
		b.await(t, 20, "t_msg_record WHERE status = 3 AND priority = 'high'")
	})
}

// Retries of low alone have all of the rate, not low's share of it.
func TestRetriesOfOneLane(t *testing.T) {
	t.Parallel()
	p := &scripted{traits: sender.Traits{Destinations: true}, send: once}
	b := setup(t, &script{}, only, chain(msg.SMS, queue.Provider{Name: "a", Provider: p}), func(_ *store.Config, qc *queue.Config) { qc.Retries = 100 })
	b.send(t, 600, of(msg.Marketing, msg.Low, msg.SMS))
	within(t, "600 retries at 100 a second", 20*time.Second, func() { b.await(t, 600, "t_msg_record WHERE status = 3") })
}

// Tasks that only wait use up no retries of those that need not.
func TestSortingTakesNoRetries(t *testing.T) {
	t.Parallel()
	second := &scripted{traits: sender.Traits{Destinations: true}, send: once}
	b := setup(t, &script{}, only, chain(msg.SMS, queue.Provider{Name: "a", Provider: &scripted{send: success}}, queue.Provider{Name: "b", Provider: second}),
		func(_ *store.Config, qc *queue.Config) { qc.Retries = 100 })
	if err := b.store.PauseProvider(context.Background(), "ops", "a", "", true); err != nil {
		t.Fatal(err)
	}
	time.Sleep(time.Second)
	b.send(t, 1000, of(msg.Notification, msg.Middle, msg.SMS))
	if _, err := b.db.Exec("UPDATE t_msg_queue_middle SET attempt = 1 WHERE msg_id > 0"); err != nil {
		t.Fatal(err)
	}
	time.Sleep(2 * time.Second)
	within(t, "ten verifications with a retry each", 3*time.Second, func() {
		b.send(t, 10, of(msg.Verification, msg.High, msg.SMS))
		b.await(t, 10, "t_msg_record WHERE status = 3 AND priority = 'high'")
	})
}

// The second provider of a chain is asked at its own rate.
func TestRateOfTheSecondProvider(t *testing.T) {
	t.Parallel()
	second := &scripted{send: success}
	b := setup(t, &script{}, only, chain(msg.SMS, queue.Provider{Name: "a", Provider: &scripted{send: success}}, queue.Provider{Name: "b", Provider: second, Limits: queue.Limits{Rate: 100}}))
	if err := b.store.PauseProvider(context.Background(), "ops", "a", "", true); err != nil {
		t.Fatal(err)
	}
	time.Sleep(time.Second)
	b.send(t, 1000, of(msg.Verification, msg.High, msg.SMS))
	time.Sleep(5 * time.Second)
	if n := len(second.log()); n < 350 || n > 520 {
		t.Errorf("%d in five seconds at 100 a second", n)
	}
}

// A provider that serves two channels has its limits once.
func TestProviderOfTwoChannels(t *testing.T) {
	t.Parallel()
	p := &scripted{send: success}
	limits := queue.Limits{Rate: 20, Burst: 1, Concurrency: 3}
	b := setup(t, &script{}, only, chain(msg.SMS, queue.Provider{Name: "a", Provider: p, Limits: limits}), chain(msg.Email, queue.Provider{Name: "a", Provider: p, Limits: limits}))
	b.send(t, 200, of(msg.Notification, msg.Middle, msg.SMS))
	b.send(t, 200, of(msg.Notification, msg.Middle, msg.Email))
	n := len(p.log())
	time.Sleep(3 * time.Second)
	if got := len(p.log()) - n; got < 40 || got > 66 {
		t.Errorf("%d in three seconds at 20 a second", got)
	}
	if n := p.most.Load(); n > 3 {
		t.Errorf("%d at a time, at most 3 may be", n)
	}
}

// What may have been sent by one provider is not sent by another that cannot know, unless the policy says so.
func TestUnknownAtTheFirstOfAChain(t *testing.T) {
	t.Parallel()
	a := &scripted{traits: sender.Traits{Repeatable: true}, send: func(context.Context, *sender.Message) sender.Verdict {
		return sender.Verdict{Kind: sender.Unknown, Text: "no answer"}
	}}
	second := &scripted{send: success}
	b := setup(t, &script{}, only, chain(msg.SMS, queue.Provider{Name: "a", Provider: a, Limits: queue.Limits{BreakerOpen: 5 * time.Second}}, queue.Provider{Name: "b", Provider: second}),
		func(_ *store.Config, qc *queue.Config) {
			p := quick()
			p[msg.Marketing].Degrade, p[msg.Marketing].Unknown = policy.Switch, policy.BuryUnknown
			qc.Policies = p
		})
	b.send(t, 12, of(msg.Marketing, msg.Low, msg.SMS))
	b.await(t, 0, "t_msg_queue_low WHERE msg_id > 0")
	asked := map[string]bool{}
	for _, c := range a.log() {
		asked[c.key] = true
	}
	for _, c := range second.log() {
		if asked[c.key] {
			t.Errorf("%s went to b although a may have sent it", c.key)
		}
	}
}

// All slots but high's are held by sends that hang, and more wait: that costs no processor time, and is no reason to look again and again.
func TestHeldSlotsCostNothing(t *testing.T) { // not parallel: it measures the process
	for _, slots := range []int{1, 2, 4, 10} {
		b := setup(t, &script{}, only, chain(msg.SMS, queue.Provider{Name: "a", Provider: &scripted{send: hang}, Limits: queue.Limits{Concurrency: slots, Timeout: 5 * time.Second}}))
		b.send(t, 30, of(msg.Marketing, msg.Low, msg.SMS))
		time.Sleep(500 * time.Millisecond)
		before := cpuTime(t)
		time.Sleep(time.Second)
		if used := cpuTime(t) - before; used > 500*time.Millisecond {
			t.Errorf("with %d slots: %v of processor time in a second", slots, used)
		}
		b.stop()
	}
}

func cpuTime(t *testing.T) time.Duration {
	t.Helper()
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		t.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// A process that starts says how it finds its providers: what one before it with the same number said is not left standing.
func TestBreakersAreWrittenAtTheStart(t *testing.T) {
	t.Parallel()
	b := setup(t, &script{}, only)
	if err := b.store.NoteBreaker(context.Background(), "a", "open"); err != nil {
		t.Fatal(err)
	}
	e, err := queue.New(queue.Config{Store: b.store, Policies: policy.Defaults(), Channels: []queue.Channel{{Channel: msg.SMS, Providers: []queue.Provider{{Name: "a", Provider: &scripted{send: success}}}}}})
	if err != nil {
		t.Fatal(err)
	}
	e.Start()
	defer e.Stop(context.Background())
	b.await(t, 1, "t_provider_state WHERE provider = 'a' AND breaker = 'closed'")
}

// What is paused when a process starts is not sent in the moment before it learns of it.
func TestPausedAtTheStart(t *testing.T) {
	t.Parallel()
	b := setup(t, &script{}, only)
	ctx := context.Background()
	if _, err := b.store.SetLane(ctx, "ops", msg.Low, func(row *store.LaneControl) { row.Paused = true }); err != nil {
		t.Fatal(err)
	}
	if err := b.store.PauseProvider(ctx, "ops", "mail", "", true); err != nil {
		t.Fatal(err)
	}
	b.send(t, 50, of(msg.Marketing, msg.Low, msg.SMS))
	b.send(t, 50, of(msg.Notification, msg.Middle, msg.Email))
	b.send(t, 1, of(msg.Notification, msg.Middle, msg.SMS))
	p, mail := &scripted{send: success}, &scripted{send: success}
	setup(t, &script{}, only, chain(msg.SMS, queue.Provider{Name: "a", Provider: p}), chain(msg.Email, queue.Provider{Name: "mail", Provider: mail}),
		func(sc *store.Config, _ *queue.Config) { sc.DSN = b.dsn })
	b.await(t, 1, "t_msg_record WHERE priority = 'middle' AND status = 3")
	if n, m := len(p.log()), len(mail.log()); n != 1 || m != 0 {
		t.Errorf("%d and %d were sent, want 1 and 0", n, m)
	}
}

// A template's policy lies over its category's when its messages are sent: this one buries what may have been sent.
func TestTemplatePolicyIsObeyed(t *testing.T) {
	t.Parallel()
	p := &scripted{send: func(context.Context, *sender.Message) sender.Verdict {
		return sender.Verdict{Kind: sender.Unknown, Text: "no answer"}
	}}
	dsn := testdb.New(t)
	templates := catalog.New(testdb.Open(t, store.Config{DSN: dsn}))
	b := setup(t, &script{}, only, chain(msg.SMS, queue.Provider{Name: "a", Provider: p}),
		func(sc *store.Config, qc *queue.Config) { sc.DSN, qc.Templates = dsn, templates })
	own := `{"unknown":"dead_letter"}`
	template := &store.Template{SourceID: "default", ID: "code", Channel: msg.SMS, Content: "hi", Policy: &own, Status: store.TemplateNormal}
	if err := b.store.CreateTemplate(context.Background(), "ops", template); err != nil {
		t.Fatal(err)
	}
	b.send(t, 1, of(msg.Verification, msg.High, msg.SMS), func(m *store.Message) {
		m.Content, m.TemplateID, m.Tasks[0].TemplateVersion = nil, "code", 1
	})
	b.await(t, 1, "t_msg_dead WHERE attempt = 1 AND template_id = 'code'")
	if n := len(p.log()); n != 1 {
		t.Errorf("asked %d times, want once", n)
	}
}
