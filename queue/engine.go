// Package queue is the engine: a pump for each channel claims due tasks, workers send them, the pure function decide turns
// a provider's verdict into an outcome, and the settler writes outcomes in batches. The scout looks after everything that
// no pump knows of: tasks of other processes, leases that ran out, waits that are over.
package queue

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"tidings/internal/catalog"
	"tidings/internal/metrics"
	"tidings/internal/msg"
	"tidings/internal/policy"
	"tidings/store"
)

// Config is what an engine works with. Durations of zero mean the defaults named.
type Config struct {
	Store        *store.Store
	Channels     []Channel
	Policies     *policy.Set
	Templates    *catalog.Catalog // nil: tasks with templates cannot be sent
	Retries      float64          // second and later attempts a second, of all processes together; default 1,000
	DegradeAfter time.Duration    // without a provider in order a channel is degraded after so long; default 30 s
	SendTimeout  time.Duration    // for one attempt; default 30 s
	SettleBudget time.Duration    // what settling may take before the lease ends; default 10 s
	Survey       time.Duration    // the scout's period, and the mover's; default 1 s
	Alarm        *Alarm           // nil: dead letters are told of in the log only
	Log          *slog.Logger
	Metrics      *metrics.Metrics // nil: nothing is counted
}

// Channel is a channel and how it is served.
type Channel struct {
	Channel   msg.Channel
	Providers []Provider // the first is asked as long as it is in order
	Slots     int        // sends at the same time of each provider that has no limit of its own; default 100
}

// mostHeldBytes bounds the content that claimed tasks keep in memory. A claim may exceed it by what one look returns.
const mostHeldBytes = 64 << 20

// Engine moves tasks from the queue tables to their ends. Make it with New, run it with Start, end it with Stop.
type Engine struct {
	cfg       Config
	log       *slog.Logger
	store     *store.Store
	pumps     map[msg.Channel]*pump
	settler   *settler
	lanes     atomic.Pointer[laneState]
	retries   *rate.Limiter
	gates     map[string]*gate  // by the provider's name
	written   map[string]string // how the providers' breakers are, as the table says; control owns it
	heldBytes atomic.Int64      // of claimed tasks that are not settled
	held      sync.Map          // taskName → true: those tasks

	claims      context.Context // ends when no more tasks may be taken or started
	stopClaims  context.CancelFunc
	sends       context.Context // ends when running attempts are to be given up
	stopSends   context.CancelFunc
	handOff     sync.RWMutex // guards stopping against Reserve
	stopping    bool
	loops       sync.WaitGroup
	workers     sync.WaitGroup
	databaseOut atomic.Bool // a statement has failed for want of the database since the scout last looked
}

// New checks a configuration and returns an engine at rest.
func New(cfg Config) (*Engine, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Retries == 0 {
		cfg.Retries = 1000
	}
	if cfg.DegradeAfter == 0 {
		cfg.DegradeAfter = 30 * time.Second
	}
	if cfg.SendTimeout == 0 {
		cfg.SendTimeout = 30 * time.Second
	}
	if cfg.SettleBudget == 0 {
		cfg.SettleBudget = 10 * time.Second
	}
	if cfg.Survey == 0 {
		cfg.Survey = time.Second
	}
	if lease := cfg.Store.Lease(); lease <= cfg.SendTimeout+cfg.SettleBudget {
		return nil, fmt.Errorf("queue.lease (%v) must be longer than queue.send_timeout (%v) and queue.settle_budget (%v) together, "+
			"or tasks are sent twice", lease, cfg.SendTimeout, cfg.SettleBudget)
	}
	e := &Engine{cfg: cfg, log: cfg.Log, store: cfg.Store, pumps: map[msg.Channel]*pump{}}
	e.claims, e.stopClaims = context.WithCancel(context.Background())
	e.sends, e.stopSends = context.WithCancel(context.Background())
	e.settler = newSettler(e)
	e.gates, e.written = map[string]*gate{}, map[string]string{}
	e.lanes.Store(&laneState{weights: store.DefaultWeights})
	e.retries = rate.NewLimiter(0, 1)
	e.shareRetries(1)
	for _, c := range cfg.Channels {
		if c.Slots == 0 {
			c.Slots = 100
		}
		for _, p := range c.Providers {
			if lease := cfg.Store.Lease(); lease <= p.Limits.Timeout+cfg.SettleBudget {
				return nil, fmt.Errorf("queue.lease (%v) must be longer than providers.%s.timeout (%v) and queue.settle_budget (%v) together, "+
					"or tasks are sent twice", lease, p.Name, p.Limits.Timeout, cfg.SettleBudget)
			}
		}
		e.pumps[c.Channel] = newPump(e, c)
	}
	cfg.Metrics.Register(&collector{engine: e})
	return e, nil
}

// Start begins to claim and send, once it knows what is paused.
func (e *Engine) Start() {
	e.readControl(e.claims)
	for _, p := range e.pumps {
		e.loops.Go(func() { p.run(e.claims) })
	}
	e.loops.Go(func() { e.scout(e.claims) })
	e.loops.Go(func() { e.mover(e.claims) })
	e.loops.Go(func() { e.control(e.claims) })
	e.loops.Go(func() { e.upkeep(e.claims) })
	if e.cfg.Alarm != nil {
		e.loops.Go(func() { e.alarm(e.claims) })
	}
}

// Wake tells that a lane has tasks of a channel that are due at an instant of the database's clock. It never blocks.
func (e *Engine) Wake(lane msg.Lane, channel msg.Channel, due time.Time) {
	if p := e.pumps[channel]; p != nil {
		p.lookAt(lane, e.localTime(due))
	}
}

// Stop ends the engine in the direction in which data flows: nothing more is claimed, running attempts get until ctx ends
// and are cancelled then, tasks that were not begun go back, and every outcome is written. It returns when all of that is
// done; nothing is left behind but what the database did not take.
func (e *Engine) Stop(ctx context.Context) {
	e.handOff.Lock()
	e.stopping = true // nothing is handed over any more
	e.handOff.Unlock()
	e.stopClaims()
	done := make(chan struct{})
	go func() { e.loops.Wait(); e.workers.Wait(); close(done) }()
	select {
	case <-done:
	case <-ctx.Done():
		e.log.Warn("running attempts are given up: the time for stopping is over")
		e.stopSends()
		// Workers may wait for a settler that waits for the database.
		timer := time.AfterFunc(e.cfg.SettleBudget, e.settler.giveUp)
		<-done
		timer.Stop()
	}
	e.settler.close(e.cfg.SettleBudget)
	e.stopSends() // which also ends workers that wait for work
}

// upkeep does what is due now and then, whoever does it: partitions ahead, keys forgotten.
func (e *Engine) upkeep(ctx context.Context) {
	every := time.NewTicker(10 * time.Minute)
	defer every.Stop()
	for {
		if err := e.store.EnsurePartitions(ctx); err != nil && ctx.Err() == nil {
			e.log.Error("cannot make the coming days' partitions", "err", err)
		}
		if n, err := e.store.PurgeKeys(ctx); err != nil && ctx.Err() == nil {
			e.log.Warn("cannot forget old keys", "err", err)
		} else if n > 0 {
			e.log.Debug("forgot old keys", "keys", n)
		}
		if _, err := e.store.PurgeCounts(ctx); err != nil && ctx.Err() == nil {
			e.log.Warn("cannot forget old counts of limits", "err", err)
		}
		select {
		case <-every.C:
		case <-ctx.Done():
			return
		}
	}
}
