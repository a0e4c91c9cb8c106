package queue

import (
	"fmt"
	"time"

	"tidings/internal/msg"
	"tidings/internal/policy"
	"tidings/store"
)

// route says what becomes of a claimed task before it is sent: which provider of the chain is asked, or that it waits, or ends
// unsent. It is pure.
type route struct {
	gate  int // the provider's place in the chain; -1: none
	state msg.State
	wait  time.Duration // for Ready: from now on
	why   string
}

const (
	leastDefer = time.Second
	mostDefer  = 30 * time.Second
)

// chooseRoute: a provider that is in order is asked, the first one if it is. While the first is not, the policy decides: ask the next, wait
// for the first, or, once none has been in order for degradeAfter, skip the message.
func chooseRoute(t *store.Task, p policy.Policy, chain []status, degradeAfter time.Duration, now, local time.Time) route {
	if !now.Before(t.Expire) {
		return route{gate: -1, state: msg.Expired, why: "the time to send it was over before an attempt was made"}
	}
	if chain[0].usable {
		return route{gate: 0}
	}
	if p.Degrade == policy.Switch {
		for i := 1; i < len(chain); i++ {
			if chain[i].usable {
				return route{gate: i}
			}
		}
	}
	if down, since := degradedSince(chain); p.Degrade == policy.Skip && down && local.Sub(since) >= degradeAfter {
		return route{gate: -1, state: msg.Skipped, why: fmt.Sprintf("skipped: no provider of %s had been in order for %v", t.Channel, degradeAfter)}
	}
	// The longer it has waited, the more seldom it is looked at.
	wait := min(max(chain[0].wait, now.Sub(t.Due)/4, leastDefer), mostDefer)
	return route{gate: -1, state: msg.Ready, wait: wait + time.Duration(spread(t)*float64(wait)/5)}
}

// degradedSince tells whether every provider's breaker is open, and since when the last one has been.
func degradedSince(chain []status) (down bool, since time.Time) {
	for _, s := range chain {
		if s.down.IsZero() {
			return false, time.Time{}
		}
		if s.down.After(since) {
			since = s.down
		}
	}
	return true, since
}

// unsent ends a claimed task without an attempt, or puts it back for later.
func unsent(t *store.Task, r route, now time.Time) store.Outcome {
	o := store.Outcome{Task: *t, State: r.state, Uncounted: true, Finished: now, Error: r.why, Provider: t.Provider}
	if r.state == msg.Ready {
		o.Error = t.LastError
		if o.Next = now.Add(r.wait); o.Next.After(t.Expire) { // to be ended then
			o.Next = t.Expire
		}
	}
	return o
}
