package queue

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/go-json-experiment/json"

	"tidings/internal/msg"
	"tidings/internal/policy"
	"tidings/internal/render"
	"tidings/sender"
	"tidings/store"
)

// policy is what a task is sent under.
func (e *Engine) policy(t *store.Task) policy.Policy {
	return e.cfg.Templates.Policy(e.sends, e.cfg.Policies, t)
}

// work makes one attempt at a task and hands the outcome to the settler.
func (p *pump) work(j *job) {
	e, t := p.engine, &j.Task
	now := e.store.Now()
	timeout := cmp.Or(j.via.Limits.Timeout, e.cfg.SendTimeout)
	switch {
	case !now.Before(t.Expire):
		e.finish(expired(t, now, "the time to send it was over before an attempt was made"))
		return
	case e.claims.Err() != nil || time.Until(t.LeaseEnd) < timeout+e.cfg.SettleBudget:
		// Stopping, or this process stood still so long that the lease may end during the send.
		e.finish(giveBack(t, now))
		return
	}
	own, started := e.policy(t), time.Now()
	m, failed := p.message(t)
	r := result{Provider: j.via.Name, Traits: j.via.Traits()}
	if own.Degrade == policy.Switch { // the next attempt may go to a provider that does not know this one's key
		r.Traits.Repeatable = p.traits().Repeatable
	}
	if failed != nil {
		r.Verdict = *failed
	} else {
		done, ok := j.via.attempt()
		if !ok { // it has failed too often since the task was claimed
			e.finish(unsent(t, route{state: msg.Ready, wait: leastDefer + time.Duration(spread(t)*float64(leastDefer)/5)}, now))
			return
		}
		ctx, cancel := context.WithTimeout(e.sends, timeout)
		r.Verdict = p.send(ctx, m, j.via)
		if r.Kind == sender.Temporary && r.Unsent && ctx.Err() == nil { // nothing has left: once more, at once
			r.Verdict = p.send(ctx, m, j.via)
		}
		cancel()
		done(r.Verdict)
		if r.Kind == sender.Busy && !r.Traits.Destinations {
			e.stayAway(j.via, r.RetryAfter)
			r.RetryAfter = leastBusyWait // the provider rests, not the task: another one may take it
		}
	}
	r.Latency = time.Since(started)
	o := decide(t, r, own, e.store.Now())
	if failed == nil {
		p.count(t, j.via, r, now, own)
		p.logSent(t, r)
	}
	e.finish(o)
}

// count adds an attempt to the figures. began is the database's time.
func (p *pump) count(t *store.Task, via *gate, r result, began time.Time, own policy.Policy) {
	p.counters[via].Ended(r.Kind.String(), r.Latency)
	requeued := t.AttemptLimit > own.Attempts // it has been a dead letter: how long that took says nothing of the queue
	if latency := p.latency[t.Lane]; latency != nil && r.Kind == sender.Success && !requeued {
		latency.Observe(max(0, began.Sub(t.Due).Seconds()))
	}
}

// stayAway keeps every process from asking a provider that is busy.
func (e *Engine) stayAway(g *gate, wait time.Duration) {
	wait = min(max(cmp.Or(wait, busyWait), leastBusyWait), mostBusy)
	if !g.busy(time.Now().Add(wait)) {
		return
	}
	e.log.Warn("a provider is busy", "provider", g.Name, "for", wait)
	until := e.store.Now().Add(wait)
	e.workers.Go(func() {
		ctx, cancel := context.WithTimeout(e.sends, 5*time.Second)
		defer cancel()
		if err := e.store.BusyProvider(ctx, g.Name, until); err != nil && e.sends.Err() == nil {
			e.log.Warn("cannot tell others that a provider is busy", "provider", g.Name, "err", err)
		}
	})
}

// send asks the provider. Where it was when it panicked nobody knows.
func (p *pump) send(ctx context.Context, m *sender.Message, via *gate) (v sender.Verdict) {
	defer func() {
		if r := recover(); r != nil {
			p.engine.log.Error("the provider panicked", "msg_id", m.MsgID, "channel", m.Channel, "provider", via.Name,
				"err", fmt.Sprint(r), "stack", string(debug.Stack()))
			v = sender.Verdict{Kind: sender.Unknown, Text: "the provider's code failed"}
		}
	}()
	return sender.Redact(via.Send(ctx, m), m)
}

// message renders a task, or tells why it cannot be.
func (p *pump) message(t *store.Task) (*sender.Message, *sender.Verdict) {
	permanent := func(text string) *sender.Verdict { return &sender.Verdict{Kind: sender.Permanent, Text: text} }
	m := &sender.Message{
		Key: t.Key(), MsgID: t.MsgID, Channel: t.Channel, Category: t.Category, Receiver: t.Receiver, Attempt: t.Attempt, Created: t.Created,
	}
	if t.Content != nil {
		var content store.Content
		if err := json.Unmarshal(t.Content, &content); err != nil {
			return nil, permanent("the content column is not a content object")
		}
		m.Subject, m.Text, m.HTML = content.Subject, content.Text, content.HTML
		for _, a := range content.Attachments {
			m.Attachments = append(m.Attachments, sender.Attachment(a))
		}
	}
	if t.TemplateID == "" {
		return m, nil
	}
	if p.engine.cfg.Templates == nil {
		return nil, permanent("there are no templates here")
	}
	version, err := p.engine.cfg.Templates.Version(p.engine.sends, t.SourceID, t.TemplateID, t.Channel, t.TemplateVersion)
	switch {
	case errors.Is(err, store.ErrNotFound):
		return nil, permanent(fmt.Sprintf("version %d of the template is not in t_msg_template", t.TemplateVersion))
	case errors.Is(err, store.ErrUnavailable) || errors.Is(err, store.ErrBusy):
		return nil, &sender.Verdict{Kind: sender.Busy, Text: "the template cannot be read", RetryAfter: time.Second}
	case err != nil:
		return nil, permanent(err.Error())
	}
	variables, err := render.Variables(t.Params)
	if err != nil {
		return nil, permanent(err.Error())
	}
	filled, err := version.Render(variables)
	if err != nil { // it could be filled at acceptance
		return nil, permanent(err.Error())
	}
	m.Subject, m.Text, m.HTML = filled.Subject, filled.Text, filled.HTML
	m.SignName, m.RelTemplateID = version.SignName, version.RelTemplateID
	return m, nil
}
