package queue

import (
	"context"
	"time"

	"tidings/internal/msg"
	"tidings/sender"
	"tidings/store"
)

// scout looks at all lanes by one statement a second, and wakes the pumps for what they do not know of. It also recovers
// tasks whose lease or wait has ended, but not while owners of such tasks may still hold outcomes that they could not write:
// for one lease after the database was away, or was started.
func (e *Engine) scout(ctx context.Context) {
	lease := e.store.Lease()
	recoverFrom, uptimeKnown := time.Now().Add(lease), false
	for {
		if !uptimeKnown {
			if up, err := e.store.Uptime(ctx); err == nil {
				recoverFrom, uptimeKnown = time.Now().Add(max(0, lease-up)), true
			}
		}
		answered, took := e.survey(ctx, !time.Now().Before(recoverFrom))
		if e.databaseOut.Swap(false) || !answered {
			recoverFrom = time.Now().Add(lease)
		}
		// A survey walks the entries that an old snapshot keeps, too: it takes no more than a fiftieth of the time.
		select {
		case <-time.After(max(e.cfg.Survey, restAfter(took))):
		case <-ctx.Done():
			return
		}
	}
}

// survey reads what waits and acts on it. It tells whether the database answered, and how long that took it.
func (e *Engine) survey(ctx context.Context, mayRecover bool) (answered bool, took time.Duration) {
	call, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	began := time.Now()
	waiting, err := e.store.Survey(call)
	if err != nil {
		if ctx.Err() == nil {
			e.log.Warn("cannot look at the queue", "err", err)
		}
		return false, 0
	}
	took = time.Since(began)
	now := e.store.Now()
	for _, w := range waiting {
		p := e.pumps[w.Channel]
		if p == nil {
			continue // nobody here serves the channel: another node may
		}
		switch {
		case w.Status == msg.Ready:
			p.lookAt(w.Lane, e.localTime(w.Next))
			if !w.Next.After(now) && p.stands(w.Lane) {
				e.expire(call, p, w.Lane)
			}
		case mayRecover && !w.Next.After(now):
			e.recover(call, p, w)
		}
	}
	return true, took
}

// recover takes tasks over from whoever held them, or waited for word of them, and decides what becomes of them.
func (e *Engine) recover(ctx context.Context, p *pump, w store.Waiting) {
	for {
		tasks, err := e.store.Recover(ctx, w.Lane, w.Channel, w.Status, claimRows, e.holds)
		if err != nil {
			e.log.Warn("cannot recover tasks", "channel", w.Channel, "lane", w.Lane, "err", err)
			return
		}
		e.hold(tasks)
		e.cfg.Metrics.Recovered(len(tasks))
		for i := range tasks {
			t := &tasks[i]
			r := result{Provider: t.Provider, Traits: p.traits()}
			r.Text = "the process that was sending it ended or stood still: nobody knows whether it was sent"
			if w.Status == msg.Unknown {
				r.Text = t.LastError
			}
			o := decide(t, r, e.policy(t), e.store.Now())
			e.log.Warn("recovered a task", "msg_id", t.MsgID, "channel", t.Channel, "attempt", t.Attempt, "from", w.Status, "state", o.State)
			e.finish(o)
		}
		if len(tasks) < claimRows {
			return
		}
	}
}

// traits are what may be expected of whichever provider a task went to.
func (p *pump) traits() sender.Traits {
	t := sender.Traits{Repeatable: true}
	for _, g := range p.gates {
		t.Repeatable = t.Repeatable && g.Traits().Repeatable
		t.Receipts = t.Receipts || g.Traits().Receipts
	}
	return t
}

// stands tells whether nothing of a lane is claimed: it is paused, or no provider may be asked.
func (p *pump) stands(lane msg.Lane) bool {
	w, _, _ := p.wayNow(time.Now())
	return w == wayClosed || p.engine.lanes.Load().paused[lane]
}

// expire ends tasks that wait in a lane that stands, when their time is over. Each call goes through a bounded number of them.
func (e *Engine) expire(ctx context.Context, p *pump, lane msg.Lane) {
	tasks, next, err := e.store.ClaimExpired(ctx, lane, p.channel.Channel, p.expiry[lane])
	if err != nil {
		e.log.Warn("cannot end expired tasks", "channel", p.channel.Channel, "lane", lane, "err", err)
		return
	}
	p.expiry[lane] = next
	e.hold(tasks)
	for i := range tasks {
		e.finish(expired(&tasks[i], e.store.Now(), "the time to send it was over before an attempt was made"))
	}
}
