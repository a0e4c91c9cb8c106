package bench

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"tidings/internal/msg"
	"tidings/queue"
	"tidings/sender"
)

// lanes measures how long high waits while low drains at its provider's rate: from the call that accepts a message to the provider. First
// without, then with the backlog.
func (r *rig) lanes(ctx context.Context, n int) (Result, error) {
	const rate, pace, count = 2000, 100, 2000
	r.ask = queue.Limits{Rate: rate}
	idle, err := r.high(ctx, count/2, pace)
	if err != nil {
		return Result{}, err
	}
	if err := parallel(4, n, func(from, to int) error {
		for ; from < to; from += 500 {
			batch := r.batch(min(500, to-from))
			for i := range batch {
				batch[i].Lane, batch[i].Category = msg.Low, msg.Marketing
			}
			if _, errs := r.store.EnqueueBatch(ctx, batch); errors.Join(errs...) != nil {
				return errors.Join(errs...)
			}
			r.accepted.Add(int64(len(batch)))
		}
		return nil
	}); err != nil {
		return Result{}, err
	}
	sent, began := r.sent.Load(), time.Now()
	busy, err := r.high(ctx, count, pace)
	if err != nil {
		return Result{}, err
	}
	took := time.Since(began).Seconds()
	drained := float64(r.sent.Load() - sent)
	result, before := spread(Result{Messages: count, Seconds: took, PerSecond: drained / took}, busy), spread(Result{}, idle)
	result.Note = fmt.Sprintf("high at %d/s while %d of low wait; without them p50 %s, p99 %s; the provider's rate is %d/s", pace, n, show(before.P50), show(before.P99), rate)
	return result, nil
}

// high sends messages of the lane high at a fixed pace, and tells how long each took to the provider.
func (r *rig) high(ctx context.Context, n, pace int) ([]time.Duration, error) {
	if err := r.start(n + 1<<30); err != nil {
		return nil, err
	}
	var (
		mu      sync.Mutex
		took    []time.Duration
		started = map[string]time.Time{}
		all     = make(chan struct{})
	)
	r.sink.note = func(m *sender.Message) {
		if m.Category != msg.Verification {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		if took = append(took, time.Since(started[m.Receiver])); len(took) == n {
			close(all)
		}
	}
	time.Sleep(2 * time.Second) // until the backlog drains evenly
	tick := time.NewTicker(time.Second / time.Duration(pace))
	defer tick.Stop()
	var calls sync.WaitGroup
	failed := make(chan error, n)
	for i := range n {
		<-tick.C
		m := r.batch(1)[0]
		m.Lane, m.Category, m.Tasks[0].Receiver = msg.High, msg.Verification, fmt.Sprint(i)
		mu.Lock()
		started[m.Tasks[0].Receiver] = time.Now()
		mu.Unlock()
		calls.Go(func() {
			if _, err := r.store.Enqueue(ctx, &m); err != nil {
				failed <- err
			}
		})
	}
	calls.Wait()
	select {
	case <-all:
	case err := <-failed:
		return nil, err
	case <-time.After(time.Minute):
		return nil, fmt.Errorf("%d of %d were sent", len(took), n)
	}
	stop, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	r.engine.Stop(stop)
	return took, nil
}
