package store

import "context"

const (
	sqlPurgeKeys = "DELETE /* tidings:purge-keys */ FROM t_idempotency WHERE expire_time < UTC_TIMESTAMP(3) ORDER BY expire_time LIMIT ?"
	purgeRows    = 1000
)

// PurgeKeys forgets keys whose time is over, in batches small enough that nobody waits for their locks, and tells how many.
func (s *Store) PurgeKeys(ctx context.Context) (purged int64, err error) {
	for {
		var n int64
		err := s.again(ctx, func() error {
			res, err := s.db.ExecContext(ctx, sqlPurgeKeys, purgeRows)
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
