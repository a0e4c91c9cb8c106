package store

import (
	"context"
	"time"
)

// Sabotage lets a test change the statements of every packet before they are sent.
func (s *Store) Sabotage(change func([]string) []string) { s.sabotage = change }

// Owing tells whether figures are left out of their transactions.
func (s *Store) Owing() bool { return s.figures.owing() }

// AgeCopies makes the copies of sources, quotas and delay slots older.
func (s *Store) AgeCopies(by time.Duration) {
	s.callers.mu.Lock()
	s.callers.loaded = s.callers.loaded.Add(-by)
	s.callers.mu.Unlock()
	s.limits.quotas.mu.Lock()
	s.limits.quotas.loaded = s.limits.quotas.loaded.Add(-by)
	s.limits.quotas.mu.Unlock()
	s.ring.mu.Lock()
	s.ring.loaded = s.ring.loaded.Add(-by)
	s.ring.mu.Unlock()
}

// Texts of statements whose cost is tested.
const (
	SQLDelayLook = sqlDelayLook
	SQLDelayMark = sqlDelayMark
	SQLLook      = sqlLook
	SQLNextDue   = sqlNextDue
)

// LockWaits tells how long each idle session that changes tables would wait for a reader, in seconds.
func (s *Store) LockWaits(ctx context.Context) (waits []int, err error) {
	for range s.ddl.Stats().OpenConnections {
		conn, err := s.ddl.Conn(ctx)
		if err != nil {
			return nil, err
		}
		defer conn.Close()
		var wait int
		if err := conn.QueryRowContext(ctx, "SELECT @@lock_wait_timeout").Scan(&wait); err != nil {
			return nil, err
		}
		waits = append(waits, wait)
	}
	return waits, nil
}
