package queue

import (
	"time"

	"tidings/internal/msg"
)

// ChannelHealth is how this process finds a channel.
type ChannelHealth struct {
	Channel   string           `json:"channel"`
	Degraded  bool             `json:"degraded"`
	Slots     int              `json:"slots"`
	Free      int              `json:"free_slots"`
	Providers []ProviderHealth `json:"providers"`
}

// ProviderHealth is how this process finds a provider.
type ProviderHealth struct {
	Provider  string     `json:"provider"`
	Usable    bool       `json:"usable"`
	Paused    bool       `json:"paused"`
	Breaker   string     `json:"breaker"`
	DownSince *time.Time `json:"down_since,omitempty"`
	BusyUntil *time.Time `json:"busy_until,omitempty"`
	InFlight  int        `json:"in_flight"`
	Slots     int        `json:"slots"`
	Rate      float64    `json:"rate,omitempty"` // of this process, a second
}

// LaneHealth is how a lane is steered.
type LaneHealth struct {
	Lane   string `json:"lane"`
	Weight int    `json:"weight"`
	Paused bool   `json:"paused"`
}

// Health is how this process finds lanes, channels and providers.
type Health struct {
	Lanes    []LaneHealth    `json:"lanes"`
	Channels []ChannelHealth `json:"channels"`
}

// Health tells how this process finds what it works with. Times are the database's.
func (e *Engine) Health() Health {
	var h Health
	lanes := e.lanes.Load()
	for _, l := range msg.Lanes {
		h.Lanes = append(h.Lanes, LaneHealth{l.String(), lanes.weights[l], lanes.paused[l]})
	}
	now := time.Now()
	for _, c := range msg.Channels {
		p := e.pumps[c]
		if p == nil {
			continue
		}
		down, since := degradedSince(p.chain(now))
		channel := ChannelHealth{Channel: c.String(), Slots: p.total, Degraded: down && now.Sub(since) >= e.cfg.DegradeAfter}
		p.mu.Lock()
		channel.Free = p.free
		p.mu.Unlock()
		for _, g := range p.gates {
			channel.Providers = append(channel.Providers, g.health(e, now))
		}
		h.Channels = append(h.Channels, channel)
	}
	return h
}

func (g *gate) health(e *Engine, now time.Time) ProviderHealth {
	h := ProviderHealth{Provider: g.Name, Usable: g.status(now).usable, Breaker: g.breaker.State().String(), Slots: g.slots}
	if g.bucket != nil {
		h.Rate = float64(g.bucket.Limit())
	}
	at := func(local time.Time) *time.Time {
		t := e.store.Now().Add(local.Sub(now)).Truncate(time.Millisecond)
		return &t
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	h.Paused, h.InFlight = g.paused, g.inFlight
	if !g.downSince.IsZero() {
		h.DownSince = at(g.downSince)
	}
	if g.busyUntil.After(now) {
		h.BusyUntil = at(g.busyUntil)
	}
	return h
}
