package id

import (
	"errors"
	"sync"
	"testing"
	"time"
)

func at(ms int64) time.Time { return Epoch.Add(time.Duration(ms) * time.Millisecond) }

func TestLayout(t *testing.T) {
	t.Parallel()
	g := NewGenerator(func() time.Time { return at(1000) })
	g.Take(5, at(900), at(2000))
	got, err := g.Next()
	if err != nil {
		t.Fatal(err)
	}
	if want := uint64(1000<<22 | 5<<12); got != want {
		t.Fatalf("id %d, want %d", got, want)
	}
	if !Time(got).Equal(at(1000)) || Node(got) != 5 {
		t.Fatalf("time %v node %d", Time(got), Node(got))
	}
}

func TestNoLeaseNoID(t *testing.T) {
	t.Parallel()
	now := at(1000)
	g := NewGenerator(func() time.Time { return now })
	if _, err := g.Next(); !errors.Is(err, ErrNoLease) {
		t.Fatalf("without a lease: %v", err)
	}
	g.Take(1, at(1000), at(1001))
	if _, err := g.Next(); err != nil {
		t.Fatal(err)
	}
	now = at(1001)
	if _, err := g.Next(); !errors.Is(err, ErrNoLease) {
		t.Fatalf("at the lease's end: %v", err)
	}
	g.Extend(at(3000))
	if _, err := g.Next(); err != nil {
		t.Fatalf("extended: %v", err)
	}
	if end := g.Drop(); !end.Equal(at(1002)) {
		t.Fatalf("dropped at %v", end)
	}
	if _, err := g.Next(); !errors.Is(err, ErrNoLease) {
		t.Fatalf("dropped: %v", err)
	}
}

// A clock that steps back an hour, or stands still, must neither repeat an id nor leave the lease.
func TestClockStepsBack(t *testing.T) {
	t.Parallel()
	now := at(10_000_000)
	g := NewGenerator(func() time.Time { return now })
	g.Take(1, now, at(10_000_002))
	seen := map[uint64]bool{}
	var made int
	for i := 0; ; i++ {
		if i == 100 {
			now = at(10_000_000 - 3_600_000)
		}
		got, err := g.Next()
		if err != nil {
			break
		}
		if seen[got] {
			t.Fatalf("id %d twice", got)
		}
		seen[got] = true
		made++
	}
	if made != 2*4096-1 && made != 2*4096 {
		t.Fatalf("%d ids out of two milliseconds", made)
	}
}

// The next holder of a number starts at or after the old lease's end, so its ids lie above all of the old one's.
func TestNextHolderStartsAfter(t *testing.T) {
	t.Parallel()
	slow := NewGenerator(func() time.Time { return at(1500) })
	slow.Take(7, at(1000), at(2000))
	next := NewGenerator(func() time.Time { return at(1500) }) // its clock is behind, its lease is not
	next.Take(7, at(2000), at(3000))
	old, err := slow.Next()
	if err != nil {
		t.Fatal(err)
	}
	young, err := next.Next()
	if err != nil {
		t.Fatal(err)
	}
	if young <= old {
		t.Fatalf("new holder's id %d is not above the old one's %d", young, old)
	}
}

func TestConcurrent(t *testing.T) {
	t.Parallel()
	g := NewGenerator(time.Now)
	g.Take(3, time.Now(), time.Now().Add(time.Hour))
	var (
		wg   sync.WaitGroup
		mu   sync.Mutex
		seen = map[uint64]bool{}
	)
	for range 8 {
		wg.Go(func() {
			for range 10_000 {
				got, err := g.Next()
				mu.Lock()
				if err != nil || seen[got] {
					t.Errorf("id %d, err %v", got, err)
				}
				seen[got] = true
				mu.Unlock()
			}
		})
	}
	wg.Wait()
}
