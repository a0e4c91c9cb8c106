package queue

import (
	"context"
	"time"
)

// mover brings scheduled tasks from the delay tables to their queue tables a little before they are due, and turns the ring of those
// tables beside that. That it runs on every node at once costs little, and lets none be missed.
func (e *Engine) mover(ctx context.Context) {
	turning := make(chan struct{}, 1)
	for laid := false; ctx.Err() == nil; {
		if !laid {
			err := e.store.Lay(ctx)
			if laid = err == nil; !laid && ctx.Err() == nil {
				e.log.Warn("cannot lay out the delay tables", "err", err)
			}
		}
		began := time.Now()
		done, err := e.store.Tend(ctx)
		if err != nil && ctx.Err() == nil {
			e.log.Warn("cannot move scheduled tasks", "err", err)
		}
		if done.Moved > 0 {
			e.log.Debug("moved scheduled tasks", "tasks", done.Moved, "ms", time.Since(began).Milliseconds())
		}
		if done.Turn != nil && laid {
			select {
			case turning <- struct{}{}:
				e.loops.Go(func() {
					defer func() { <-turning }()
					if err := done.Turn(ctx); err != nil && ctx.Err() == nil {
						e.log.Warn("cannot turn the delay tables", "err", err)
					}
				})
			default: // the turn before is under way
			}
		}
		// A look walks the entries that an old snapshot keeps: it takes no more than a fiftieth of the time, as far as the lead allows.
		select {
		case <-time.After(min(max(e.cfg.Survey, restAfter(done.Looked)), e.store.Lead()/3)):
		case <-ctx.Done():
		}
	}
}
