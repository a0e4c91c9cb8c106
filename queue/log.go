package queue

import (
	"log/slog"
	"time"

	"tidings/internal/msg"
	"tidings/sender"
	"tidings/store"
)

// A message is told of at three points, one line each: accepted (by the server), sent (what the provider answered), decided (what
// becomes of the task). All is quiet at the level info while all goes well. None of the lines has an address or content.

// logSent says what the provider answered.
func (p *pump) logSent(t *store.Task, r result) {
	level := slog.LevelWarn
	if r.Kind == sender.Success {
		level = slog.LevelDebug
	}
	log := p.engine.log
	if !log.Enabled(p.engine.sends, level) { // as a rule: the attributes alone took a tenth of the process's time
		return
	}
	log = log.With("msg_id", t.MsgID, "channel", t.Channel, "attempt", t.Attempt, "provider", r.Provider, "outcome", r.Kind,
		"latency", r.Latency.Round(time.Microsecond))
	if r.Kind != sender.Success {
		log = log.With("code", r.Code, "err", r.Text)
	}
	log.Log(p.engine.sends, level, "sent")
}

// logDecided says what becomes of a task.
func (e *Engine) logDecided(o *store.Outcome) {
	level := slog.LevelDebug
	switch o.State {
	case msg.Dead:
		level = slog.LevelError
	case msg.Failed, msg.Expired, msg.Skipped, msg.Unknown:
		level = slog.LevelWarn
	}
	if o.AlreadyRecorded || !e.log.Enabled(e.sends, level) {
		return
	}
	log := e.log.With("msg_id", o.Task.MsgID, "channel", o.Task.Channel, "attempt", o.Task.Attempt, "state", o.State)
	if o.Error != "" {
		log = log.With("err", o.Error)
	}
	if o.State == msg.Ready || o.State == msg.Unknown {
		log = log.With("next", o.Next)
	}
	log.Log(e.sends, level, "decided")
}
