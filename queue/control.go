package queue

import (
	"context"
	"time"

	"golang.org/x/time/rate"

	"tidings/internal/msg"
	"tidings/store"
)

// laneState is what t_lane says.
type laneState struct {
	weights [len(msg.Lanes)]int
	paused  [len(msg.Lanes)]bool
}

const controlEvery = 500 * time.Millisecond // everybody obeys within a second

// control obeys what people and other processes have set, and writes down how this one finds its providers.
func (e *Engine) control(ctx context.Context) {
	every := time.NewTicker(controlEvery)
	defer every.Stop()
	for {
		e.noteBreakers(ctx)
		select {
		case <-every.C:
			e.readControl(ctx)
		case <-ctx.Done():
			return
		}
	}
}

func (e *Engine) readControl(ctx context.Context) {
	call, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	c, err := e.store.Control(call)
	if err == nil {
		e.obey(&c)
	} else if ctx.Err() == nil {
		e.log.Warn("cannot read how lanes and providers are steered: they go on as before", "err", err)
	}
}

// noteBreakers writes down how this process finds its providers, where that has changed: for people to see.
func (e *Engine) noteBreakers(ctx context.Context) {
	for name, g := range e.gates {
		state := g.breaker.State().String()
		if e.written[name] == state {
			continue
		}
		call, cancel := context.WithTimeout(ctx, 5*time.Second)
		err := e.store.NoteBreaker(call, name, state)
		cancel()
		if err == nil {
			e.written[name] = state
		} else if ctx.Err() == nil {
			e.log.Warn("cannot write down how a provider is found", "provider", name, "err", err)
		}
	}
}

func (e *Engine) obey(c *store.Control) {
	var lanes laneState
	for l, row := range c.Lanes {
		lanes.weights[l], lanes.paused[l] = max(row.Weight, 1), row.Paused
	}
	if before := e.lanes.Swap(&lanes); *before != lanes {
		e.log.Info("lanes are steered anew", "weights", lanes.weights, "paused", lanes.paused)
		for _, p := range e.pumps {
			p.poke()
		}
	}
	e.shareRetries(c.Nodes)
	now := e.store.Now()
	for name, g := range e.gates {
		paused, busy := false, time.Time{}
		for i := range c.Providers {
			row := &c.Providers[i]
			if row.Provider != name || row.Node != store.AllNodes {
				continue
			}
			paused = row.Paused
			if row.BusyUntil != nil && row.BusyUntil.After(now) {
				busy = e.localTime(*row.BusyUntil)
			}
		}
		g.set(paused, busy)
		g.share(c.Nodes)
	}
}

// shareRetries divides the rate of second and later attempts among so many processes. A twentieth of it may come at once: in no
// second are there more than all of it.
func (e *Engine) shareRetries(nodes int) {
	share := e.cfg.Retries / float64(max(nodes, 1))
	burst := max(1, int(share/20))
	if limit := rate.Limit(max(share-float64(burst), share/2)); e.retries.Limit() != limit {
		e.retries.SetLimit(limit)
		e.retries.SetBurst(burst)
	}
}
