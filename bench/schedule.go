package bench

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"tidings/sender"
)

// scheduleAll accepts messages in batches of 500 from four producers, each due when the function says.
func (r *rig) scheduleAll(ctx context.Context, n int, due func(i int) time.Time) error {
	return parallel(4, n, func(from, to int) error {
		for ; from < to; from += 500 {
			batch := r.batch(min(500, to-from))
			for i := range batch {
				batch[i].SendAt = due(from + i)
				batch[i].Expire = batch[i].SendAt.Add(time.Hour)
			}
			if _, errs := r.store.EnqueueBatch(ctx, batch); errors.Join(errs...) != nil {
				return errors.Join(errs...)
			}
			r.accepted.Add(int64(len(batch)))
		}
		return nil
	})
}

// dueAtOnce measures how late messages leave that are all due at the same instant.
func (r *rig) dueAtOnce(ctx context.Context, n int) (Result, error) {
	if err := r.start(n); err != nil {
		return Result{}, err
	}
	var mu sync.Mutex
	var lags []time.Duration
	accepting := time.Duration(n) * time.Second / 5000
	due := r.store.Now().Add(r.store.Lead() + accepting + 5*time.Second).Truncate(time.Second)
	r.sink.note = func(*sender.Message) {
		lag := r.store.Now().Sub(due)
		mu.Lock()
		lags = append(lags, lag)
		mu.Unlock()
	}
	started := time.Now()
	if err := r.scheduleAll(ctx, n, func(int) time.Time { return due }); err != nil {
		return Result{}, err
	}
	took := time.Since(started)
	most := 0
	for r.store.Now().Before(due) {
		most = max(most, residentMiB())
		time.Sleep(100 * time.Millisecond)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for r.sink.sent.Load() < int64(n) && ctx.Err() == nil {
			most = max(most, residentMiB())
			time.Sleep(100 * time.Millisecond)
		}
	}()
	began := time.Now()
	if err := r.finish(ctx, n); err != nil {
		return Result{}, err
	}
	<-done
	sent := time.Since(began)
	result := spread(Result{Messages: n, Seconds: sent.Seconds(), PerSecond: float64(n) / sent.Seconds()}, lags)
	if lags[0] < 0 {
		return result, fmt.Errorf("a message left %v before it was due", -lags[0])
	}
	result.Note = fmt.Sprintf("the first %s after it was due; accepted at %.0f/s; memory at most %d MiB", show(lags[0]), float64(n)/took.Seconds(), most)
	return result, r.check(ctx, n)
}

// scheduledBacklog measures how little it matters how much is scheduled: the rates of accepting and moving, and the time of a claim, with
// few tasks scheduled over the next five days, and with many.
func (r *rig) scheduledBacklog(ctx context.Context, n int) (Result, error) {
	if err := r.makeRing(ctx); err != nil {
		return Result{}, err
	}
	few := min(100_000, n/4)
	span := 5 * 24 * time.Hour
	at := r.store.Now().Add(time.Hour)
	over := func(n int) func(int) time.Time {
		return func(i int) time.Time { return at.Add(time.Duration(float64(span) * float64(i) / float64(n))) }
	}
	started := time.Now()
	if err := r.scheduleAll(ctx, few, over(few)); err != nil {
		return Result{}, err
	}
	first := float64(few) / time.Since(started).Seconds()
	if err := r.produce(ctx, 1000); err != nil { // to be claimed
		return Result{}, err
	}
	small, moveSmall, err := r.schedulingCosts(ctx)
	if err != nil {
		return Result{}, err
	}
	started = time.Now()
	if err := r.scheduleAll(ctx, n-few, over(n-few)); err != nil {
		return Result{}, err
	}
	took := time.Since(started)
	started = time.Now()
	if err := r.scheduleAll(ctx, few, over(few)); err != nil {
		return Result{}, err
	}
	last := float64(few) / time.Since(started).Seconds()
	large, moveLarge, err := r.schedulingCosts(ctx)
	if err != nil {
		return Result{}, err
	}
	result := spread(Result{Messages: n, Seconds: took.Seconds(), PerSecond: float64(n-few) / took.Seconds()}, large)
	before := spread(Result{}, small)
	result.Note = fmt.Sprintf("accepted; the first %d at %.0f/s, %d more at %.0f/s; claims of 100: p50 %s before; a pass that moves 1,000: %s before, %s now; memory %d MiB",
		few, first, few, last, show(before.P50), show(moveSmall), show(moveLarge), residentMiB())
	return result, nil
}

// makeRing makes the delay tables, as an engine does.
func (r *rig) makeRing(ctx context.Context) error {
	for range 4 { // new slots take tasks after two seconds
		done, err := r.store.Tend(ctx)
		if err == nil && done.Turn != nil {
			err = done.Turn(ctx)
		}
		if err != nil {
			return err
		}
		time.Sleep(time.Second)
	}
	return nil
}

// schedulingCosts measures claims of 100 tasks, and the mover's pass over 1,000 that come within the lead: the least of five.
func (r *rig) schedulingCosts(ctx context.Context) (claims []time.Duration, move time.Duration, err error) {
	if claims, err = r.claims(ctx); err != nil {
		return nil, 0, err
	}
	for range 5 {
		due := r.store.Now().Add(r.store.Lead() + 2*time.Second)
		if err := r.scheduleAll(ctx, 1000, func(int) time.Time { return due }); err != nil {
			return nil, 0, err
		}
		time.Sleep(due.Sub(r.store.Now()) - r.store.Lead() + 20*time.Millisecond)
		began := time.Now()
		done, err := r.store.Tend(ctx)
		took := time.Since(began)
		if err != nil || done.Moved < 1000 {
			return nil, 0, fmt.Errorf("moved %d of 1,000: %w", done.Moved, err)
		}
		if move == 0 || took < move {
			move = took
		}
	}
	return claims, move, nil
}
