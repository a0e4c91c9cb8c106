package window

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"pgregory.net/rapid"
)

var start = time.UnixMilli(1_800_000_000_000)

// worst is the most events that any span of the limit's length holds.
func worst(times []time.Time, unit time.Duration) (most int) {
	first := 0
	for i := range times {
		for times[i].Sub(times[first]) > unit {
			first++
		}
		most = max(most, i-first+1)
	}
	return most
}

// Bursts on both sides of every edge: never more than the limit in any window, and at most 5 % fewer under steady demand.
func TestNeverMore(t *testing.T) {
	t.Parallel()
	for _, l := range []Limit{{1, time.Minute}, {10, time.Minute}, {50, time.Second}, {51, time.Second}, {5000, time.Second}, {1000, 24 * time.Hour}, {100, 50 * time.Millisecond}} {
		t.Run(fmt.Sprint(l), func(t *testing.T) {
			t.Parallel()
			var w Window
			var accepted []time.Time
			step := max(l.Unit/time.Duration(200*min(l.Num, 50)), time.Millisecond)
			end := start.Add(10 * l.Unit)
			for now := start; now.Before(end); now = now.Add(step) {
				n, next := w.Free(l, now)
				if n == 0 && !next.After(now) {
					t.Fatalf("nothing is free at %v, and the next is free at %v", now, next)
				}
				take := min(n, 1+l.Num/50)
				w.Add(l, now, take)
				for range take {
					accepted = append(accepted, now)
				}
				state := w.Bytes(l)
				if len(state) > 512 {
					t.Fatalf("a state of %d bytes", len(state))
				}
				var err error
				if w, err = Parse(state, l); err != nil {
					t.Fatal(err)
				}
			}
			if got := worst(accepted, l.Unit); got > l.Num {
				t.Errorf("%d in one window", got)
			}
			if want := 10 * l.Num * 95 / 100; len(accepted) < want {
				t.Errorf("%d accepted in ten windows, want at least %d", len(accepted), want)
			}
		})
	}
}

// When a limit says that the next is free, it is.
func TestNext(t *testing.T) {
	t.Parallel()
	for _, l := range []Limit{{3, time.Minute}, {100, time.Minute}} {
		var w Window
		now := start
		for range 1000 {
			n, next := w.Free(l, now)
			if n == 0 {
				now = next
				if n, _ = w.Free(l, now); n == 0 {
					t.Fatalf("%v: nothing is free at the instant that was named", l)
				}
			}
			w.Add(l, now, 1)
			now = now.Add(rand.N(10 * time.Millisecond))
		}
	}
}

func TestProperties(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		l := Limit{rapid.IntRange(1, 200).Draw(t, "num"), time.Duration(rapid.IntRange(1, 5000).Draw(t, "unit")) * time.Millisecond}
		var w Window
		var accepted []time.Time
		now := start
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.IntRange(0, int(l.Unit.Milliseconds())).Draw(t, "wait")) * time.Millisecond)
			n, _ := w.Free(l, now)
			take := min(n, rapid.IntRange(0, 100).Draw(t, "take"))
			w.Add(l, now, take)
			for range take {
				accepted = append(accepted, now)
			}
		}
		if got := worst(accepted, l.Unit); got > l.Num {
			t.Fatalf("%d of %d in one window", got, l.Num)
		}
	})
}

// Events that are noted a little ahead of the clock, by more or less, make nothing free.
func TestAhead(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		l := Limit{rapid.IntRange(51, 300).Draw(t, "num"), 10 * time.Second}
		var w Window
		var accepted []time.Time
		now := start
		for range rapid.IntRange(1, 100).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.IntRange(0, 3000).Draw(t, "wait")) * time.Millisecond)
			n, _ := w.Free(l, now)
			take := min(n, rapid.IntRange(0, 150).Draw(t, "take"))
			at := now.Add(time.Duration(rapid.IntRange(0, 100).Draw(t, "ahead")) * time.Millisecond)
			for range take { // one by one, as a batch does it
				if free, _ := w.Free(l, now); free == 0 {
					break
				}
				w.Add(l, at, 1)
				accepted = append(accepted, now)
			}
		}
		if got := worst(accepted, l.Unit); got > l.Num {
			t.Fatalf("%d of %d in one window", got, l.Num)
		}
	})
}

// A limit that is changed keeps what was counted, also where it is counted in another way from then on.
func TestChanged(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ from, to, free int }{{60, 50, 0}, {50, 60, 10}, {200, 10, 0}, {10, 0, 0}} {
		var w Window
		from, to := Limit{tt.from, time.Hour}, Limit{tt.to, time.Hour}
		for range tt.from {
			w.Add(from, start, 1)
		}
		again, err := Parse(w.Bytes(from), to)
		if err != nil {
			t.Fatal(err)
		}
		if n, _ := again.Free(to, start.Add(time.Minute)); n != tt.free {
			t.Errorf("%+v: %d free", tt, n)
		}
		if n, _ := again.Free(to, start.Add(2*time.Hour)); n != tt.to {
			t.Errorf("%+v: %d free two hours later", tt, n)
		}
	}
}

func TestLowered(t *testing.T) {
	t.Parallel()
	var w Window
	w.Add(Limit{10, time.Minute}, start, 10)
	if n, next := w.Free(Limit{2, time.Minute}, start); n != 0 || !next.After(start.Add(time.Minute)) {
		t.Fatalf("%d free, next %v", n, next)
	}
	if _, err := Parse([]byte("nonsense"), Limit{1, time.Second}); err == nil {
		t.Fatal("nonsense was read")
	}
}
