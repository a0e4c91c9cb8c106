package batch

import (
	"context"
	"slices"
	"sync"
	"testing"
	"testing/synctest"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// While one flush is held, what arrives must gather into the next one, within the limits.
func TestGathersWhileFlushing(t *testing.T) {
	t.Parallel()
	var (
		started = make(chan struct{})
		release = make(chan struct{})
		once    sync.Once
		batches [][]int
	)
	b := New(Limits{Items: 3, Bytes: 100, Parallel: 1, QueueSize: 10}, func(int) int { return 1 }, func(items []int) {
		batches = append(batches, slices.Clone(items))
		once.Do(func() { close(started); <-release })
	})
	ctx := context.Background()
	b.Add(ctx, 1)
	<-started
	for i := 2; i <= 6; i++ {
		if !b.Add(ctx, i) {
			t.Fatalf("item %d refused", i)
		}
	}
	close(release)
	b.Close()
	want := [][]int{{1}, {2, 3, 4}, {5, 6}}
	if !slices.EqualFunc(batches, want, slices.Equal[[]int]) {
		t.Fatalf("batches %v, want %v", batches, want)
	}
	if b.Add(ctx, 7) {
		t.Fatal("a closed batcher took an item")
	}
}

// An item over the byte limit goes alone, and none is lost or moved before another.
func TestBytes(t *testing.T) {
	t.Parallel()
	var (
		started = make(chan struct{})
		release = make(chan struct{})
		once    sync.Once
		batches [][]int
	)
	b := New(Limits{Items: 10, Bytes: 10, Parallel: 1, QueueSize: 10}, func(n int) int { return n }, func(items []int) {
		batches = append(batches, slices.Clone(items))
		once.Do(func() { close(started); <-release })
	})
	ctx := context.Background()
	b.Add(ctx, 1)
	<-started
	for _, n := range []int{4, 5, 50, 3, 7, 1} {
		b.Add(ctx, n)
	}
	close(release)
	b.Close()
	want := [][]int{{1}, {4, 5}, {50}, {3, 7}, {1}}
	if !slices.EqualFunc(batches, want, slices.Equal[[]int]) {
		t.Fatalf("batches %v, want %v", batches, want)
	}
}

func TestFullQueueHonoursContext(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	started := make(chan struct{}, 10)
	b := New(Limits{Items: 1, Bytes: 10, Parallel: 1, QueueSize: 1}, func(int) int { return 1 }, func([]int) {
		started <- struct{}{}
		<-release
	})
	b.Add(context.Background(), 1)
	<-started
	b.Add(context.Background(), 2)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if b.Add(ctx, 3) {
		t.Fatal("a full queue took an item")
	}
	close(release)
	b.Close()
}

// A helper flushes whole batches while the flush before is held, and leaves small ones alone.
func TestHelper(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		var helped [][]int
		b := New(Limits{Items: 3, Bytes: 100, Parallel: 1, Helpers: 1, QueueSize: 10}, func(int) int { return 1 }, func(items []int) {
			if items[0] == 1 {
				<-release
				return
			}
			helped = append(helped, slices.Clone(items))
		})
		ctx := context.Background()
		b.Add(ctx, 1)
		synctest.Wait()
		for i := 2; i <= 5; i++ {
			b.Add(ctx, i)
		}
		synctest.Wait()
		if !slices.EqualFunc(helped, [][]int{{2, 3, 4}}, slices.Equal[[]int]) || b.Len() != 1 {
			t.Fatalf("helped with %v, %d wait", helped, b.Len())
		}
		close(release)
		b.Close()
		if !slices.EqualFunc(helped, [][]int{{2, 3, 4}, {5}}, slices.Equal[[]int]) {
			t.Fatalf("then %v", helped)
		}
	})
}
