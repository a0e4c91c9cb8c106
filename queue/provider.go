package queue

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sony/gobreaker/v2"
	"golang.org/x/time/rate"

	"tidings/sender"
)

// Limits are what a provider may be asked for. Zero values mean the defaults named.
type Limits struct {
	Rate        float64       `mapstructure:"rate"`         // attempts a second, of all processes together; default: any number
	Burst       int           `mapstructure:"burst"`        // attempts that may come at once; default: a tenth of Rate
	Concurrency int           `mapstructure:"concurrency"`  // attempts at a time, of this process; default: the channel's slots
	Timeout     time.Duration `mapstructure:"timeout"`      // of one attempt; default: the engine's
	Slow        time.Duration `mapstructure:"slow"`         // an attempt that takes longer counts as a failure of the provider; default: none does
	BreakerOpen time.Duration `mapstructure:"breaker_open"` // how long a provider that fails is left alone; default 10 s
}

// Provider is a provider of a channel, and its limits.
type Provider struct {
	Name string
	sender.Provider
	Limits Limits
}

// The breaker opens when half of the attempts within the window failed, and there were so many at least: a message that fails again and
// again by itself does not stop others.
const (
	breakerLeast   = 10
	breakerWindow  = 10 * time.Second
	breakerBuckets = 10
	breakerProbes  = 3 // attempts that find out whether the provider is back
	breakerOpen    = 10 * time.Second
	mostBusy       = 10 * time.Minute // that a provider may ask for
)

// gate is a provider as this process finds it: whether it may be asked now, and how often. It is safe for concurrent use.
type gate struct {
	Provider
	slots   int
	bucket  *rate.Limiter // nil: any number
	breaker *gobreaker.TwoStepCircuitBreaker[any]
	changed func() // tells the pump that the gate may have opened
	note    func(state string)
	log     *slog.Logger

	inFlight atomic.Int64

	mu        sync.Mutex
	paused    bool      // by hand
	busyUntil time.Time // it asked for it
	downSince time.Time // since when the breaker has not been closed; zero: it is
}

var (
	errAttempt  = errors.New("the attempt failed")
	errExcluded = errors.New("says nothing of the provider")
)

func newGate(p Provider, slots int, log *slog.Logger, changed func(), note func(state string)) *gate {
	g := &gate{Provider: p, slots: slots, log: log, changed: changed, note: note}
	if p.Limits.Concurrency > 0 {
		g.slots = p.Limits.Concurrency
	}
	if most := p.Traits().Concurrency; most > 0 {
		g.slots = min(g.slots, most) // more would wait inside the provider, on their send timeout
	}
	if p.Limits.Rate > 0 {
		g.bucket = rate.NewLimiter(0, 1)
		g.share(1)
	}
	open := p.Limits.BreakerOpen
	if open == 0 {
		open = breakerOpen
	}
	g.breaker = gobreaker.NewTwoStepCircuitBreaker[any](gobreaker.Settings{
		Name: p.Name, MaxRequests: breakerProbes, Interval: breakerWindow, BucketPeriod: breakerWindow / breakerBuckets, Timeout: open,
		ReadyToTrip: func(c gobreaker.Counts) bool {
			judged := c.TotalSuccesses + c.TotalFailures
			return judged >= breakerLeast && 2*c.TotalFailures >= judged
		},
		IsExcluded:    func(err error) bool { return errors.Is(err, errExcluded) },
		OnStateChange: func(_ string, from, to gobreaker.State) { g.turned(from, to, open) },
	})
	return g
}

// turned is called with the breaker's lock held: it must not ask the breaker.
func (g *gate) turned(from, to gobreaker.State, open time.Duration) {
	g.mu.Lock()
	switch {
	case to == gobreaker.StateClosed:
		g.downSince = time.Time{}
	case from == gobreaker.StateClosed:
		g.downSince = time.Now()
	}
	g.mu.Unlock()
	level, text := slog.LevelWarn, "a provider fails: it is left alone for a while"
	switch to {
	case gobreaker.StateClosed:
		level, text = slog.LevelInfo, "a provider is in order again"
	case gobreaker.StateHalfOpen:
		level, text = slog.LevelInfo, "a provider is tried again"
	}
	g.log.Log(context.Background(), level, text, "provider", g.Name)
	if to == gobreaker.StateOpen {
		time.AfterFunc(open+time.Millisecond, g.changed)
	} else {
		go g.changed()
	}
	g.note(to.String())
}

// share divides the rate among so many processes.
func (g *gate) share(nodes int) {
	if g.bucket == nil {
		return
	}
	n := float64(max(nodes, 1))
	burst := float64(g.Limits.Burst)
	if burst == 0 {
		burst = g.Limits.Rate / 10
	}
	if limit := rate.Limit(g.Limits.Rate / n); g.bucket.Limit() != limit {
		g.bucket.SetLimit(limit)
		g.bucket.SetBurst(max(1, int(burst/n)))
	}
}

// status is what a gate allows.
type status struct {
	usable bool
	down   time.Time     // since when its breaker has not been closed; zero: it is
	wait   time.Duration // not usable: at least so long, as far as it is known
}

func (g *gate) status(now time.Time) status {
	state := g.breaker.State()
	g.mu.Lock()
	defer g.mu.Unlock()
	s := status{usable: true, down: g.downSince}
	switch {
	case g.paused:
		s.usable = false
	case now.Before(g.busyUntil):
		s.usable, s.wait = false, g.busyUntil.Sub(now)
	case state == gobreaker.StateOpen:
		s.usable = false
	}
	return s
}

// room is how many attempts may begin now.
func (g *gate) room(now time.Time) int {
	n := g.slots - int(g.inFlight.Load())
	if g.breaker.State() == gobreaker.StateHalfOpen {
		n = min(n, breakerProbes-int(g.breaker.Counts().Requests))
	}
	if g.bucket != nil {
		n = min(n, int(g.bucket.TokensAt(now)))
	}
	return max(n, 0)
}

// refill is when room will come by itself.
func (g *gate) refill(now time.Time) time.Duration {
	if g.bucket == nil || g.bucket.Limit() == 0 {
		return gatherWait
	}
	need := min(float64(g.bucket.Burst()), max(1, float64(g.bucket.Limit())*gatherWait.Seconds()))
	missing := need - g.bucket.TokensAt(now)
	return max(time.Duration(missing/float64(g.bucket.Limit())*float64(time.Second)), time.Millisecond)
}

// take takes places for attempts, as many as there are, up to n.
func (g *gate) take(n int, now time.Time) int {
	for n > 0 {
		had := g.inFlight.Load()
		if n = min(n, g.slots-int(had)); n <= 0 {
			return 0
		}
		if g.inFlight.CompareAndSwap(had, had+int64(n)) {
			break
		}
	}
	got := n
	for g.bucket != nil && got > 0 && !g.bucket.AllowN(now, got) {
		got = min(got-1, int(g.bucket.TokensAt(now)))
	}
	g.give(n - max(got, 0))
	return max(got, 0)
}

// give gives places back.
func (g *gate) give(n int) { g.inFlight.Add(-int64(n)) }

// attempt asks the breaker for one attempt. The function that it returns is told once how the attempt ended, or that it has taken too long.
func (g *gate) attempt() (done func(sender.Verdict), ok bool) {
	report, err := g.breaker.Allow()
	if err != nil {
		return nil, false
	}
	var once sync.Once
	tell := func(err error) { once.Do(func() { report(err) }) }
	var slow *time.Timer
	if g.Limits.Slow > 0 { // told while it still runs: a provider that hangs must not go on being asked until its timeout
		slow = time.AfterFunc(g.Limits.Slow, func() { tell(errAttempt) })
	}
	return func(v sender.Verdict) {
		if slow != nil {
			slow.Stop()
		}
		tell(g.judge(v))
	}, true
}

// judge tells what an attempt's end says of the provider.
func (g *gate) judge(v sender.Verdict) error {
	switch {
	case v.Kind == sender.Busy || (g.Traits().Destinations && v.Kind != sender.Success):
		return errExcluded
	case v.Kind == sender.Temporary || v.Kind == sender.Unknown:
		return errAttempt
	}
	return nil
}

// busy keeps the provider from being asked for a while. It tells whether that is news.
func (g *gate) busy(until time.Time) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !until.After(g.busyUntil) {
		return false
	}
	news := !time.Now().Before(g.busyUntil)
	g.busyUntil = until
	time.AfterFunc(time.Until(until)+time.Millisecond, g.changed)
	return news
}

// set obeys what people and other processes have set.
func (g *gate) set(paused bool, busyUntil time.Time) {
	g.mu.Lock()
	opened := g.paused && !paused
	g.paused = paused
	g.mu.Unlock()
	if !busyUntil.IsZero() {
		g.busy(busyUntil)
	}
	if opened {
		g.changed()
	}
}
