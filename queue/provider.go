package queue

import (
	"context"
	"errors"
	"log/slog"
	"sync"
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
	breakerProbes  = 3                // attempts that find out whether the provider is back
	mostBusy       = 10 * time.Minute // that a provider may ask for
)

// DefaultBreakerOpen is how long a provider that fails is left alone, unless its limits say otherwise.
const DefaultBreakerOpen = 10 * time.Second

// gate is a provider as this process finds it: whether it may be asked now, and how often. It is safe for concurrent use.
type gate struct {
	Provider
	slots    int
	reserved int           // of the slots, for high alone
	bucket   *rate.Limiter // nil: any number
	breaker  *gobreaker.TwoStepCircuitBreaker[any]
	log      *slog.Logger
	users    []*pump // of the channels that it serves

	mu         sync.Mutex
	inFlight   int
	others     int       // of those, the attempts that are not high's
	paused     bool      // by hand
	busyUntil  time.Time // it asked for it
	sharedBusy time.Time // as the table said last
	downSince  time.Time // since when the breaker has not been closed; zero: it is
}

// reserveShare: high has a tenth of the slots to itself, and at least one.
const reserveShare = 10

var (
	errAttempt  = errors.New("the attempt failed")
	errExcluded = errors.New("says nothing of the provider")
)

func newGate(p Provider, slots int, log *slog.Logger) *gate {
	g := &gate{Provider: p, slots: slots, log: log}
	if p.Limits.Concurrency > 0 {
		g.slots = p.Limits.Concurrency
	}
	if most := p.Traits().Concurrency; most > 0 {
		g.slots = min(g.slots, most) // more would wait inside the provider, on their send timeout
	}
	if g.slots > 1 {
		g.reserved = (g.slots + reserveShare - 1) / reserveShare
	}
	if p.Limits.Rate > 0 {
		g.bucket = rate.NewLimiter(0, 1)
		g.share(1)
	}
	open := p.Limits.BreakerOpen
	if open == 0 {
		open = DefaultBreakerOpen
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

// changed tells the pumps that the gate may have opened.
func (g *gate) changed() {
	for _, p := range g.users {
		p.poke()
	}
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
	state, probes := g.breaker.State(), g.probes()
	g.mu.Lock()
	defer g.mu.Unlock()
	s := status{usable: true, down: g.downSince}
	switch {
	case g.paused:
		s.usable = false
	case now.Before(g.busyUntil):
		s.usable, s.wait = false, g.busyUntil.Sub(now)
	case state == gobreaker.StateOpen, state == gobreaker.StateHalfOpen && probes <= 0:
		s.usable = false
	}
	return s
}

// probes is how many attempts a half-open breaker still lets through.
func (g *gate) probes() int {
	c := g.breaker.Counts()
	return breakerProbes - int(c.Requests-c.TotalExclusions)
}

// places is how many attempts may run beside those that do.
func (g *gate) places(high bool) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.placesLocked(high)
}

func (g *gate) placesLocked(high bool) int {
	if n := g.slots - g.inFlight; high {
		return n
	}
	return min(g.slots-g.inFlight, g.slots-g.reserved-g.others)
}

// ownPlaces is how many of the places that are high's alone are free.
func (g *gate) ownPlaces() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.reserved - (g.inFlight - g.others)
}

// room is how many attempts may begin now.
func (g *gate) room(high bool) int {
	n := g.places(high)
	if g.breaker.State() == gobreaker.StateHalfOpen {
		n = min(n, g.probes())
	}
	if g.bucket != nil {
		n = min(n, int(g.bucket.Tokens()))
	}
	return max(n, 0)
}

// refill is when room will come by itself; 0: when an attempt ends.
func (g *gate) refill() time.Duration {
	if g.bucket == nil || g.bucket.Limit() == 0 || g.places(true) <= 0 {
		return 0
	}
	need := min(float64(g.bucket.Burst()), max(1, float64(g.bucket.Limit())*gatherWait.Seconds()))
	missing := need - g.bucket.Tokens()
	return max(time.Duration(missing/float64(g.bucket.Limit())*float64(time.Second)), time.Millisecond)
}

// take takes places and tokens for attempts, as many as there are, up to n. Tokens are spent: ask for those only that will be made.
func (g *gate) take(n int, high bool) int {
	g.mu.Lock()
	n = max(0, min(n, g.placesLocked(high)))
	g.inFlight += n
	if !high {
		g.others += n
	}
	g.mu.Unlock()
	got := n
	for g.bucket != nil && got > 0 && !g.bucket.AllowN(time.Now(), got) {
		got = min(got-1, int(g.bucket.Tokens()))
	}
	got = max(got, 0)
	g.release(n-got, high)
	return got
}

// release gives places back that were not used.
func (g *gate) release(n int, high bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.inFlight -= n
	if !high {
		g.others -= n
	}
}

// give gives places back after attempts, which others may wait for.
func (g *gate) give(n int, high bool) {
	g.release(n, high)
	if len(g.users) > 1 {
		g.changed()
	}
}

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
		if g.breaker.State() == gobreaker.StateHalfOpen { // there may be room for another probe
			g.changed()
		}
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
	if !until.After(g.busyUntil.Add(sameInstant)) {
		return false
	}
	g.busyUntil = until
	time.AfterFunc(time.Until(until)+time.Millisecond, g.changed)
	return true
}

// sameInstant: instants that come from the database differ by so much when they are the same.
const sameInstant = 50 * time.Millisecond

// set obeys what people and other processes have set. A rest that the table no longer has, or has shortened, is over.
func (g *gate) set(paused bool, busyUntil time.Time) {
	g.mu.Lock()
	opened := g.paused && !paused
	g.paused = paused
	if busyUntil.Before(g.sharedBusy.Add(-sameInstant)) {
		g.busyUntil, opened = busyUntil, true
	}
	g.sharedBusy = busyUntil
	g.mu.Unlock()
	if !busyUntil.IsZero() {
		g.busy(busyUntil)
	}
	if opened {
		g.changed()
	}
}
