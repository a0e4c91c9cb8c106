// Package window counts events in a sliding window, exactly where few are allowed, and a little on the strict side where many
// are: never more than the limit in any window, wherever it begins.
package window

import (
	"encoding/binary"
	"errors"
	"slices"
	"time"
)

// Limit is so many events in any span of time.
type Limit struct {
	Num  int
	Unit time.Duration
}

// Exact is the highest limit that is counted event by event. Above it a window is divided into parts, and only the parts'
// counts are kept: a window that begins inside a part is taken to hold all of it, so that at most one in parts+1 is refused
// too early (2.4 %).
const (
	Exact = 50
	parts = 40
)

// Window is what is known of the past. Its zero value knows of nothing. It is not safe for concurrent use.
type Window struct {
	times  []int64           // Unix ms of the last events, oldest first, where they are counted one by one
	part   int64             // the newest part, counted from 1970
	counts [parts + 2]uint32 // of the newest part and those before it; one more than a window has, as events may be noted a little ahead
}

// Free tells how many events are allowed at an instant, and, if none, when the next one is.
func (w *Window) Free(l Limit, now time.Time) (n int, next time.Time) {
	ms := now.UnixMilli()
	if l.Num <= 0 {
		return 0, now.Add(l.Unit)
	}
	if l.Num <= Exact {
		w.dropUntil(ms - l.Unit.Milliseconds())
		if n = l.Num - len(w.times); n > 0 {
			return n, now
		}
		// Where the limit was lowered, more than one has to leave.
		return 0, time.UnixMilli(w.times[len(w.times)-l.Num] + l.Unit.Milliseconds() + 1)
	}
	w.turn(l, ms)
	used, kept := 0, partsOf(l)
	ahead := int(max(0, w.part-ms/partOf(l))) // the newest part lies so far ahead of now, and so the window begins in an earlier one
	inside := min(len(w.counts), kept+1+ahead)
	for _, c := range w.counts[:inside] {
		used += int(c)
	}
	if n = l.Num - used; n > 0 {
		return n, now
	}
	for i := inside - 1; i >= 0; i-- { // the oldest parts leave first
		if used -= int(w.counts[i]); used < l.Num {
			return 0, time.UnixMilli((w.part - int64(i) + int64(kept) + 1) * partOf(l))
		}
	}
	return 0, now.Add(l.Unit)
}

// Add notes n events at an instant.
func (w *Window) Add(l Limit, now time.Time, n int) {
	ms := now.UnixMilli()
	if l.Num <= Exact {
		for range n {
			w.times = append(w.times, ms)
		}
		slices.Sort(w.times) // another node's clock may be a little behind
		return
	}
	w.turn(l, ms)
	w.counts[min(parts+1, max(0, w.part-ms/partOf(l)))] += uint32(n)
}

// Over is when nothing of the window matters any more.
func (w *Window) Over(l Limit) time.Time {
	if l.Num <= Exact {
		if len(w.times) == 0 {
			return time.Time{}
		}
		return time.UnixMilli(w.times[len(w.times)-1]).Add(l.Unit + time.Millisecond)
	}
	return time.UnixMilli((w.part + parts + 1) * partOf(l))
}

// partOf is the length of a part in ms, rounded up so that all parts together cover the unit.
func partOf(l Limit) int64 { return max(1, (l.Unit.Milliseconds()+parts-1)/parts) }

// partsOf is how many parts cover the unit: 40, or as many as it has milliseconds.
func partsOf(l Limit) int { return int((l.Unit.Milliseconds() + partOf(l) - 1) / partOf(l)) }

func (w *Window) dropUntil(ms int64) {
	for len(w.times) > 0 && w.times[0] < ms { // an event that is a whole unit old to the millisecond still counts
		w.times = w.times[1:]
	}
}

// turn moves the parts on to an instant. An instant before the newest part (a clock that was set back) belongs to its own part
// as far as that is kept.
func (w *Window) turn(l Limit, ms int64) {
	part := ms / partOf(l)
	steps := part - w.part
	if steps <= 0 {
		return
	}
	var moved [parts + 2]uint32
	if steps < int64(len(moved)) {
		copy(moved[steps:], w.counts[:])
	}
	w.counts, w.part = moved, part
}

var errState = errors.New("window: this is no state")

// Bytes is the state for a table. At most 8+8*Exact bytes.
func (w *Window) Bytes(l Limit) []byte {
	if l.Num <= Exact {
		b := make([]byte, 0, 1+8*len(w.times))
		b = append(b, 't')
		for _, t := range w.times {
			b = binary.BigEndian.AppendUint64(b, uint64(t))
		}
		return b
	}
	b := binary.BigEndian.AppendUint64([]byte{'p'}, uint64(w.part))
	for _, c := range w.counts {
		b = binary.BigEndian.AppendUint32(b, c)
	}
	return b
}

// Parse reads what Bytes has written, for a limit of the same unit.
func Parse(b []byte, l Limit) (w Window, err error) {
	if len(b) == 0 {
		return w, nil
	}
	kind, b := b[0], b[1:]
	switch {
	case kind == 't' && len(b)%8 == 0:
		for ; len(b) > 0; b = b[8:] {
			w.times = append(w.times, int64(binary.BigEndian.Uint64(b)))
		}
	case kind == 'p' && len(b) == 8+4*len(w.counts):
		w.part = int64(binary.BigEndian.Uint64(b))
		for i := range w.counts {
			w.counts[i] = binary.BigEndian.Uint32(b[8+4*i:])
		}
	default:
		return w, errState
	}
	w.Convert(l)
	return w, nil
}

// Convert makes the window's form the one that a limit is counted in, after the limit has changed. What was counted in parts is
// taken to have happened at their ends.
func (w *Window) Convert(l Limit) {
	switch {
	case l.Num > Exact && len(w.times) > 0:
		times := w.times
		w.times = nil
		for _, t := range times {
			w.Add(l, time.UnixMilli(t), 1)
		}
	case l.Num <= Exact && w.part != 0:
		for i, c := range w.counts {
			end := (w.part-int64(i)+1)*partOf(l) - 1
			for range min(int(c), Exact-len(w.times)) {
				w.times = append(w.times, end)
			}
		}
		slices.Sort(w.times)
		w.part, w.counts = 0, [parts + 2]uint32{}
	}
}

// Clone is a copy that may be changed by itself.
func (w *Window) Clone() Window {
	c := *w
	c.times = slices.Clone(w.times)
	return c
}
