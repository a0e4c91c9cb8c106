package store

import (
	"context"
	"time"
)

const (
	sqlPurgeKeys = "DELETE /* tidings:purge-keys */ FROM t_idempotency WHERE expire_time < UTC_TIMESTAMP(3) ORDER BY expire_time LIMIT ?"
	// A second later than need be: a packet under way may be about to change the row.
	sqlPurgeCounts = "DELETE /* tidings:purge-counts */ FROM t_limit_count WHERE expire_time < UTC_TIMESTAMP(3) - INTERVAL 1 SECOND ORDER BY expire_time LIMIT ?"
	purgeRows      = 1000
)

// PurgeKeys forgets keys whose time is over, and tells how many.
func (s *Store) PurgeKeys(ctx context.Context) (purged int64, err error) {
	s.held.Range(func(key, until any) bool {
		if time.Now().After(until.(time.Time)) {
			s.held.Delete(key)
		}
		return true
	})
	return s.purge(ctx, sqlPurgeKeys)
}

// PurgeCounts forgets what limits no longer need to know, and tells how much.
func (s *Store) PurgeCounts(ctx context.Context) (purged int64, err error) {
	return s.purge(ctx, sqlPurgeCounts)
}

// purge deletes in batches small enough that nobody waits for their locks.
func (s *Store) purge(ctx context.Context, query string, args ...any) (purged int64, err error) {
	for {
		var n int64
		err := s.again(ctx, func() error {
			res, err := s.db.ExecContext(ctx, query, append(args, purgeRows)...)
			if err != nil {
				return err
			}
			n, err = res.RowsAffected()
			return err
		})
		purged += n
		if err != nil || n < purgeRows {
			return purged, public(err)
		}
	}
}
