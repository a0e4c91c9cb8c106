package queue

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"tidings/internal/batch"
	"tidings/internal/msg"
	"tidings/store"
)

// settler writes outcomes in batches. It never gives an outcome up while the process lives: a lost database is waited for,
// and a row that somebody has locked, or that cannot be written, is tried again by itself. When its queue is full, workers
// wait, and so pumps claim no more.
type settler struct {
	engine  *Engine
	batches *batch.Batcher[store.Outcome]
	open    atomic.Int64 // outcomes handed over and not written yet
	aside   sync.WaitGroup
	hard    context.Context // ends when what is unwritten is left behind
	giveUp  context.CancelFunc
}

const (
	settleRows    = 500
	settleBytes   = 1 << 20
	settleHelpers = 1 // small batches in parallel cost a tenth of the throughput of single POSTs
	settleQueue   = 4000
	settleCall    = 10 * time.Second
	blockedWait   = 100 * time.Millisecond // before a locked row is tried again; short, because others recover it when its lease ends
	brokenWait    = 5 * time.Second        // before a row that cannot be written is tried again
)

func newSettler(e *Engine) *settler {
	s := &settler{engine: e}
	s.hard, s.giveUp = context.WithCancel(context.Background())
	size := func(o store.Outcome) int { return taskBytes(&o.Task) }
	s.batches = batch.New(batch.Limits{Items: settleRows, Bytes: settleBytes, Parallel: 1, Helpers: settleHelpers, QueueSize: settleQueue}, size, s.flush)
	return s
}

func taskBytes(t *store.Task) int { return len(t.Content) + len(t.Params) + 512 }

// finish hands an outcome over. It blocks while the settler is behind.
func (e *Engine) finish(o store.Outcome) {
	e.logDecided(&o)
	if e.cfg.Alarm == nil { // nobody would strike it off
		o.Alarm = ""
	}
	e.settler.open.Add(1)
	e.settler.add(o)
}

func (s *settler) add(o store.Outcome) {
	if !s.batches.Add(s.hard, o) {
		s.leave(o)
	}
}

// leave gives an outcome up: the process ends.
func (s *settler) leave(o store.Outcome) {
	s.open.Add(-1)
	s.engine.log.Error("an outcome is left unwritten: its task comes back when its lease ends", "msg_id", o.Task.MsgID, "channel", o.Task.Channel)
}

// flush writes one batch, however long the database is away.
func (s *settler) flush(outcomes []store.Outcome) {
	e := s.engine
	for wait := 50 * time.Millisecond; ; wait = min(2*wait, time.Second) {
		ctx, cancel := context.WithTimeout(s.hard, settleCall)
		e.cfg.Metrics.Settled(len(outcomes))
		verdicts, err := e.store.Settle(ctx, outcomes)
		cancel()
		outcomes = s.judge(outcomes, verdicts)
		if err == nil {
			return
		}
		e.note(err)
		e.log.Warn("cannot settle, trying again", "tasks", len(outcomes), "err", err)
		if !errors.Is(err, store.ErrUnavailable) { // these rows' own trouble: the next batch must not wait for it
			for _, o := range outcomes {
				s.setAside(o, brokenWait)
			}
			return
		}
		select {
		case <-time.After(wait):
		case <-s.hard.Done():
			for _, o := range outcomes {
				s.leave(o)
			}
			return
		}
	}
}

// judge follows up on what Settle did, and returns the outcomes that it did nothing with.
func (s *settler) judge(outcomes []store.Outcome, verdicts []store.Settled) (left []store.Outcome) {
	e := s.engine
	for i, verdict := range verdicts {
		o := &outcomes[i]
		switch verdict {
		case store.Done:
			s.done(o)
			if p := e.pumps[o.Task.Channel]; p != nil && o.State == msg.Ready && !o.AlreadyRecorded {
				p.lookAt(o.Task.Lane, e.localTime(o.Next))
			}
		case store.Lost:
			s.done(o)
			e.cfg.Metrics.Lost()
			e.log.Warn("a task was no longer ours when its attempt ended: left alone", "msg_id", o.Task.MsgID, "channel", o.Task.Channel, "state", o.State)
		case store.Blocked:
			s.setAside(*o, blockedWait)
		default:
			left = append(left, *o)
		}
	}
	return left
}

func (s *settler) done(o *store.Outcome) {
	s.engine.release(&o.Task)
	s.open.Add(-1)
}

// setAside tries an outcome again in a while. Meanwhile it is nobody's burden.
func (s *settler) setAside(o store.Outcome, wait time.Duration) {
	s.aside.Go(func() {
		select {
		case <-time.After(wait):
		case <-s.hard.Done():
		}
		s.add(o)
	})
}

// close writes what is open, and gives up after a time that a dead database would otherwise make endless. Nothing may be
// handed over any more.
func (s *settler) close(budget time.Duration) {
	timer := time.AfterFunc(budget, s.giveUp)
	defer timer.Stop()
	for s.open.Load() > 0 && s.hard.Err() == nil {
		select {
		case <-time.After(2 * time.Millisecond):
		case <-s.hard.Done():
		}
	}
	s.giveUp()
	s.batches.Close()
	s.aside.Wait()
}

// note remembers that the database was away.
func (e *Engine) note(err error) {
	if errors.Is(err, store.ErrUnavailable) {
		e.databaseOut.Store(true)
	}
}

// hold notes tasks that this process has claimed and not settled.
func (e *Engine) hold(tasks []store.Task) {
	for i := range tasks {
		e.heldBytes.Add(int64(taskBytes(&tasks[i])))
		e.held.Store(nameOf(&tasks[i]), true)
	}
}

func (e *Engine) release(t *store.Task) {
	e.heldBytes.Add(-int64(taskBytes(t)))
	e.held.Delete(nameOf(t))
}

// holds tells whether this process has a task in its hands, be its lease over or not: its outcome is known here, or will be.
func (e *Engine) holds(t *store.Task) bool {
	_, ok := e.held.Load(nameOf(t))
	return ok
}

// taskName is a claimed task: claimed again, it is another.
type taskName struct {
	msgID   uint64
	channel msg.Channel
	owner   string
}

func nameOf(t *store.Task) taskName { return taskName{t.MsgID, t.Channel, t.Owner} }

// localTime is an instant of the database's clock by this process's monotonic one.
func (e *Engine) localTime(t time.Time) time.Time { return time.Now().Add(t.Sub(e.store.Now())) }
