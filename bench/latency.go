package bench

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"tidings/sender"
)

// latency sends messages at a fixed pace, whatever the answers take, and measures from the instant at which each was to be
// sent: a system that stalls cannot hide by making its callers wait. Its messages carry their number.
func (r *rig) latency(ctx context.Context, n int) (results []Result, err error) {
	r.handOff = true
	full, err := r.post(ctx, n, 64)
	if err != nil {
		return nil, err
	}
	for _, pace := range []struct {
		name string
		rate float64
	}{
		{"latency-1000", 1000}, {"latency-25", full.PerSecond / 4}, {"latency-50", full.PerSecond / 2}, {"latency-75", full.PerSecond * 3 / 4},
	} {
		result, err := r.paced(ctx, n, pace.rate)
		if err != nil {
			return nil, err
		}
		result.Scenario = pace.name
		results = append(results, result)
	}
	return results, nil
}

func (r *rig) paced(ctx context.Context, n int, rate float64) (Result, error) {
	if err := r.start(n); err != nil {
		return Result{}, err
	}
	var started time.Time
	intended := func(i int) time.Time { return started.Add(time.Duration(float64(i) / rate * float64(time.Second))) }
	handed := make([]time.Duration, n)
	answered := make([]time.Duration, n)
	r.sink.note = func(m *sender.Message) {
		number, _, _ := strings.Cut(m.Text, " ")
		if i, err := strconv.Atoi(number); err == nil && i < n {
			handed[i] = time.Since(intended(i))
		}
	}
	address, stop, err := r.serve()
	if err != nil {
		return Result{}, err
	}
	defer stop()
	var next atomic.Int64
	started = time.Now().Add(100 * time.Millisecond)
	err = parallel(256, 256, func(int, int) error {
		c, err := dial(address)
		if err != nil {
			return err
		}
		defer c.Close()
		for {
			i := int(next.Add(1) - 1)
			if i >= n {
				return nil
			}
			time.Sleep(time.Until(intended(i)))
			if err := c.post(r.request(strconv.Itoa(i) + " " + r.text)); err != nil {
				return err
			}
			answered[i] = time.Since(intended(i))
			r.accepted.Add(1)
		}
	})
	took := time.Since(started)
	if err != nil {
		return Result{}, err
	}
	if err := r.finish(ctx, n); err != nil {
		return Result{}, err
	}
	answers := spread(Result{}, answered)
	result := spread(Result{Messages: n, Seconds: took.Seconds(), PerSecond: float64(n) / took.Seconds()}, handed)
	result.Note = fmt.Sprintf("answered: p50 %s, p99 %s", show(answers.P50), show(answers.P99))
	return result, r.check(ctx, n)
}
