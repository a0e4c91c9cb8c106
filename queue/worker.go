package queue

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"time"

	"github.com/go-json-experiment/json"

	"tidings/internal/msg"
	"tidings/internal/render"
	"tidings/sender"
	"tidings/store"
)

// work makes one attempt at a task and hands the outcome to the settler.
func (p *pump) work(t *store.Task) {
	e := p.engine
	policy := e.cfg.Policies.For(t.Category, t.Channel)
	now := e.store.Now()
	switch {
	case !now.Before(t.Expire):
		e.finish(expired(t, now, "the time to send it was over before an attempt was made"))
		return
	case e.claims.Err() != nil || time.Until(t.LeaseEnd) < e.cfg.SendTimeout+e.cfg.SettleBudget:
		// Stopping, or this process stood still so long that the lease may end during the send.
		e.finish(giveBack(t, now))
		return
	}
	started := time.Now()
	verdict := p.send(t)
	r := result{Verdict: verdict, Provider: p.channel.ProviderName, Traits: p.channel.Provider.Traits(), Latency: time.Since(started)}
	o := decide(t, r, policy, e.store.Now())
	p.log(t, r, o)
	e.finish(o)
}

// send renders the message and asks the provider, within the time that one attempt has.
func (p *pump) send(t *store.Task) (v sender.Verdict) {
	m, failed := p.message(t)
	if failed != nil {
		return *failed
	}
	ctx, cancel := context.WithTimeout(p.engine.sends, p.engine.cfg.SendTimeout)
	defer cancel()
	defer func() {
		if r := recover(); r != nil { // where it was when it panicked nobody knows
			p.engine.log.Error("the provider panicked", "msg_id", t.MsgID, "channel", t.Channel, "provider", p.channel.ProviderName,
				"err", fmt.Sprint(r), "stack", string(debug.Stack()))
			v = sender.Verdict{Kind: sender.Unknown, Text: "the provider's code failed"}
		}
	}()
	return p.channel.Provider.Send(ctx, m)
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

// log says how an attempt ended: one line, quiet while all is well.
func (p *pump) log(t *store.Task, r result, o store.Outcome) {
	level, text := slog.LevelWarn, "not sent"
	switch o.State {
	case msg.Success:
		level, text = slog.LevelDebug, "sent"
	case msg.Dead:
		level, text = slog.LevelError, "not sent: a dead letter"
	case msg.Ready, msg.Unknown:
		text = "not sent: again later"
	}
	log := p.engine.log
	if !log.Enabled(p.engine.sends, level) { // as a rule: the attributes alone took a tenth of the process's time
		return
	}
	log = log.With("msg_id", t.MsgID, "channel", t.Channel, "attempt", t.Attempt, "provider", r.Provider, "latency", r.Latency.Round(time.Microsecond))
	if o.State != msg.Success {
		log = log.With("outcome", r.Kind, "code", r.Code, "err", r.Text, "state", o.State)
	}
	if !o.Next.IsZero() {
		log = log.With("next", o.Next)
	}
	log.Log(p.engine.sends, level, text)
}
