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
// and a row that somebody has locked is tried again. When its queue is full, workers wait, and so pumps claim no more.
type settler struct {
	engine  *Engine
	batches *batch.Batcher[store.Outcome]
	blocked atomic.Int64 // outcomes set aside because of somebody's lock
	aside   sync.WaitGroup
	hard    context.Context // ends when what is unwritten is left behind
	giveUp  context.CancelFunc
}

const (
	settleRows     = 500
	settleBytes    = 1 << 20
	settleParallel = 2
	settleQueue    = 1000
	settleCall     = 10 * time.Second
	blockedWait    = 500 * time.Millisecond
)

func newSettler(e *Engine) *settler {
	s := &settler{engine: e}
	s.hard, s.giveUp = context.WithCancel(context.Background())
	size := func(o store.Outcome) int { return taskBytes(&o.Task) }
	s.batches = batch.New(batch.Limits{Items: settleRows, Bytes: settleBytes, Parallel: settleParallel, QueueSize: settleQueue}, size, s.flush)
	return s
}

func taskBytes(t *store.Task) int { return len(t.Content) + len(t.Params) + 512 }

// finish hands an outcome over. It blocks while the settler is behind.
func (e *Engine) finish(o store.Outcome) {
	if !e.settler.batches.Add(e.settler.hard, o) {
		e.log.Error("an outcome is left unwritten: its task comes back when its lease ends", "msg_id", o.Task.MsgID, "channel", o.Task.Channel)
	}
}

// flush writes one batch, however long that takes.
func (s *settler) flush(outcomes []store.Outcome) {
	e := s.engine
	for wait := 50 * time.Millisecond; len(outcomes) > 0; wait = min(2*wait, time.Second) {
		ctx, cancel := context.WithTimeout(s.hard, settleCall)
		verdicts, err := e.store.Settle(ctx, outcomes)
		cancel()
		outcomes = s.judge(outcomes, verdicts)
		if err == nil {
			return
		}
		e.note(err)
		if s.hard.Err() != nil {
			e.log.Error("outcomes are left unwritten: their tasks come back when their leases end", "tasks", len(outcomes), "err", err)
			return
		}
		e.log.Warn("cannot settle, trying again", "tasks", len(outcomes), "err", err)
		select {
		case <-time.After(wait):
		case <-s.hard.Done():
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
			e.release(o)
			if o.State == msg.Ready && !o.AlreadyRecorded {
				if p := e.pumps[o.Task.Channel]; p != nil {
					p.lookAt(o.Task.Lane, e.localTime(o.Next))
				}
			}
		case store.Lost:
			e.release(o)
			e.log.Warn("a task was no longer ours when its attempt ended: left alone", "msg_id", o.Task.MsgID, "channel", o.Task.Channel, "state", o.State)
		case store.Blocked:
			s.setAside(*o)
		default:
			left = append(left, *o)
		}
	}
	return left
}

// setAside tries an outcome again in a while. Meanwhile it is nobody's burden.
func (s *settler) setAside(o store.Outcome) {
	s.blocked.Add(1)
	s.aside.Go(func() {
		defer s.blocked.Add(-1)
		select {
		case <-time.After(blockedWait):
		case <-s.hard.Done():
		}
		s.engine.finish(o)
	})
}

// close writes what waits, and gives up after a time that a dead database would otherwise make endless.
func (s *settler) close(budget time.Duration) {
	timer := time.AfterFunc(budget, s.giveUp)
	defer timer.Stop()
	for s.blocked.Load() > 0 && s.hard.Err() == nil {
		select {
		case <-time.After(20 * time.Millisecond):
		case <-s.hard.Done():
		}
	}
	s.batches.Close()
	s.giveUp()
	s.aside.Wait()
}

// note remembers that the database was away.
func (e *Engine) note(err error) {
	if errors.Is(err, store.ErrUnavailable) {
		e.databaseOut.Store(true)
	}
}

func (e *Engine) hold(tasks []store.Task) {
	for i := range tasks {
		e.held.Add(int64(taskBytes(&tasks[i])))
	}
}

func (e *Engine) release(o *store.Outcome) { e.held.Add(-int64(taskBytes(&o.Task))) }

// localTime is an instant of the database's clock by this process's monotonic one.
func (e *Engine) localTime(t time.Time) time.Time { return time.Now().Add(t.Sub(e.store.Now())) }
