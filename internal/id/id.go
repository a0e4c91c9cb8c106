// Package id makes message ids: snowflakes of 41 bits of milliseconds since Epoch, 10 bits of node number and 12 bits of
// sequence. They are unique over all nodes and all time as long as a node number's leases do not overlap, whatever the
// process's clock does: an id's millisecond comes from the database's clock and lies inside the lease, and the next
// holder of the number starts after the lease's end.
package id

import (
	"errors"
	"sync"
	"time"
)

// Epoch is the instant that the milliseconds of an id count from.
var Epoch = time.Date(2025, 1, 1, 0, 0, 0, 0, time.UTC)

// MaxNode is the highest node number.
const MaxNode = 1<<10 - 1

const (
	sequenceBits = 12
	sequenceMask = 1<<sequenceBits - 1
	timeShift    = 10 + sequenceBits
)

// ErrNoLease says that the node number's lease is over or was never taken, so that no id may be made.
var ErrNoLease = errors.New("no lease on a node number")

// Generator makes ids for one node number at a time. It is safe for concurrent use.
type Generator struct {
	now func() time.Time // the database's clock as this process knows it

	mu   sync.Mutex
	node uint64
	last uint64 // milliseconds and sequence of the newest id: ms<<12 | sequence
	end  uint64 // the lease's end: ids stay below this millisecond
}

// NewGenerator returns a generator without a lease. now tells the database's time; it may step in either direction.
func NewGenerator(now func() time.Time) *Generator { return &Generator{now: now} }

// Take starts a lease on a node number. start is the database's time at which the lease began: no id of an earlier holder
// reaches it.
func (g *Generator) Take(node uint16, start, end time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.node = uint64(node)
	g.last = uint64(millis(start)) << sequenceBits
	g.end = uint64(millis(end))
}

// Extend moves the lease's end.
func (g *Generator) Extend(end time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.end = uint64(millis(end))
}

// Drop ends the lease, and returns the first instant that no id of it reaches.
func (g *Generator) Drop() time.Time {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.end = 0
	return Epoch.Add(time.Duration(g.last>>sequenceBits+1) * time.Millisecond)
}

// Next makes an id. A clock that stands or steps back is answered by counting on from the newest id, ahead of the clock
// if need be, but never past the lease's end.
func (g *Generator) Next() (uint64, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	next := g.last + 1
	if now := millis(g.now()); now > 0 {
		next = max(next, uint64(now)<<sequenceBits)
	}
	if next>>sequenceBits >= g.end {
		return 0, ErrNoLease
	}
	g.last = next
	return next>>sequenceBits<<timeShift | g.node<<sequenceBits | next&sequenceMask, nil
}

// Time tells when an id was made, to the millisecond, by the database's clock.
func Time(id uint64) time.Time { return Epoch.Add(time.Duration(id>>timeShift) * time.Millisecond) }

// Node tells which node number made an id.
func Node(id uint64) uint16 { return uint16(id >> sequenceBits & MaxNode) }

func millis(t time.Time) int64 { return t.Sub(Epoch).Milliseconds() }

// First is the lowest id that an instant can have. Instants before Epoch have 0.
func First(t time.Time) uint64 { return uint64(max(millis(t), 0)) << timeShift }
