package queue

import (
	"context"
	"time"
)

// mover brings scheduled tasks from the delay tables to their queue tables a little before they are due, and turns the ring of those
// tables. That it runs on every node at once costs little, and lets none be missed.
func (e *Engine) mover(ctx context.Context) {
	laid := false
	for ctx.Err() == nil {
		began := time.Now()
		if !laid {
			err := e.store.Lay(ctx)
			if laid = err == nil; !laid && ctx.Err() == nil {
				e.log.Warn("cannot lay out the delay tables", "err", err)
			}
		}
		moved, looked, err := e.store.Tend(ctx)
		if err != nil && ctx.Err() == nil {
			e.log.Warn("cannot look after scheduled tasks", "err", err)
		}
		if moved > 0 {
			e.log.Debug("moved scheduled tasks to where they are sent from", "tasks", moved, "ms", time.Since(began).Milliseconds())
		}
		// A look walks the entries that an old snapshot keeps: it takes no more than a fiftieth of the time.
		select {
		case <-time.After(min(max(e.cfg.Survey, restAfter(looked)), e.store.Lead()/3)):
		case <-ctx.Done():
		}
	}
}
