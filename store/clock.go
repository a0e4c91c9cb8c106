package store

import (
	"sync/atomic"
	"time"
)

// clock is the database's time as this process knows it: an answer of the database plus the monotonic time since. It is
// never ahead of the database's, because the answer is taken to be as old as its arrival, and it does not care what happens
// to the process's wall clock.
type clock struct{ base atomic.Pointer[clockBase] }

type clockBase struct {
	server time.Time
	local  time.Time // carries the monotonic reading
}

func (c *clock) set(server time.Time) {
	c.base.Store(&clockBase{server: server.UTC(), local: time.Now()})
}

// Now is the database's time, UTC, to within a round trip.
func (s *Store) Now() time.Time {
	base := s.clock.base.Load()
	if base == nil {
		return time.Time{}
	}
	return base.server.Add(time.Since(base.local))
}
