package queue

import (
	"context"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"tidings/internal/msg"
	"tidings/store"
)

// collector tells what waits, and how providers and lanes are, when Prometheus asks. What it takes from the database is kept for a
// while, so that the number of those who ask does not matter.
type collector struct {
	engine *Engine

	mu      sync.Mutex
	backlog store.Backlog
	known   bool // backlog could be read
	up      bool // the database answers
	next    time.Time
}

const (
	backlogFresh = 5 * time.Second
	backlogCall  = 3 * time.Second
)

var (
	descMessages = desc("tidings_queue_messages", "Tasks by state: ready (may be sent now), waiting (ready, and not due), sending, unknown; counted up to 10,000 each.", "lane", "channel", "state")
	descAge      = desc("tidings_queue_oldest_age_seconds", "How long the first task of a lane and channel could have been sent; 0: none can.", "lane", "channel")
	descDead     = desc("tidings_dead_messages", "Dead letters; counted up to 10,000 each.", "channel", "category")
	descLag      = desc("tidings_schedule_lag_seconds", "How long the first scheduled message that is still in a delay table has been due; 0: none is.")
	descBreaker  = desc("tidings_breaker_state", "How this process finds a provider: 0 in order, 1 tried again, 2 failing and not asked.", "provider")
	descUsable   = desc("tidings_provider_usable", "Whether this process may ask a provider now: it is not paused, not busy, and its breaker not open.", "provider")
	descPaused   = desc("tidings_lane_paused", "Whether a lane is paused.", "lane")
	descDatabase = desc("tidings_database_up", "Whether the database answered when it was last asked.")
)

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, labels, nil)
}

// Describe names the figures.
func (c *collector) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descMessages, descAge, descDead, descLag, descBreaker, descUsable, descPaused, descDatabase} {
		to <- d
	}
}

// Collect tells the figures.
func (c *collector) Collect(to chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		to <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	for name, g := range c.engine.gates {
		gauge(descBreaker, float64(g.breaker.State()), name)
		gauge(descUsable, truth(g.status(time.Now()).usable), name)
	}
	lanes := c.engine.lanes.Load()
	for _, l := range msg.Lanes {
		gauge(descPaused, truth(lanes.paused[l]), l.String())
	}
	gauge(descLag, c.engine.store.ScheduleLag().Seconds())
	backlog, known, up := c.read()
	gauge(descDatabase, truth(up))
	if known {
		c.waiting(&backlog, gauge)
	}
}

// waiting tells what waits, on the channels that are served here with zeros where there is nothing.
func (c *collector) waiting(b *store.Backlog, gauge func(*prometheus.Desc, float64, ...string)) {
	type series struct {
		lane    msg.Lane
		channel msg.Channel
		state   string
	}
	depth, age := map[series]int{}, map[series]time.Duration{}
	for channel := range c.engine.pumps {
		for _, l := range msg.Lanes {
			for _, state := range store.BacklogStates {
				depth[series{l, channel, state}] = 0
			}
			age[series{lane: l, channel: channel}] = 0
		}
	}
	for _, d := range b.Depths {
		depth[series{d.Lane, d.Channel, d.State}] = d.Tasks
	}
	now := c.engine.store.Now()
	for _, w := range b.Oldest {
		age[series{lane: w.Lane, channel: w.Channel}] = now.Sub(w.Next)
	}
	for s, n := range depth {
		gauge(descMessages, float64(n), s.lane.String(), s.channel.String(), s.state)
	}
	for s, d := range age {
		gauge(descAge, max(0, d.Seconds()), s.lane.String(), s.channel.String())
	}
	dead := map[series]int{}
	for channel := range c.engine.pumps {
		for _, category := range msg.Categories {
			dead[series{channel: channel, state: category.String()}] = 0
		}
	}
	for _, d := range b.Dead {
		dead[series{channel: d.Channel, state: d.Category}] = d.Tasks
	}
	for s, n := range dead {
		gauge(descDead, float64(n), s.channel.String(), s.state)
	}
}

// read asks the database, unless it did a moment ago. Counting walks the entries that an old snapshot keeps: it takes no more than a
// fiftieth of the time.
func (c *collector) read() (b store.Backlog, known, up bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	began := time.Now()
	if began.Before(c.next) {
		return c.backlog, c.known, c.up
	}
	ctx, cancel := context.WithTimeout(c.engine.sends, backlogCall)
	defer cancel()
	backlog, err := c.engine.store.Backlog(ctx)
	c.backlog, c.known = backlog, err == nil
	c.next = time.Now().Add(max(backlogFresh, restAfter(time.Since(began))))
	c.up = err == nil
	if err != nil {
		ping, stop := context.WithTimeout(c.engine.sends, time.Second)
		defer stop()
		c.up = c.engine.store.Ping(ping) == nil // counting may just take too long
		if c.engine.sends.Err() == nil {
			c.engine.log.Warn("cannot count what waits", "err", err)
		}
	}
	return c.backlog, c.known, c.up
}

func truth(v bool) float64 {
	if v {
		return 1
	}
	return 0
}
