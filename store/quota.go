package store

import (
	"context"
	"fmt"

	"github.com/jmoiron/sqlx"
)

const (
	sqlNewQuota    = `INSERT /* tidings:quota-new */ INTO %s (%schannel, num, unit, create_time, modify_time) VALUES (%s?, ?, ?, UTC_TIMESTAMP(3), UTC_TIMESTAMP(3))`
	sqlUpdateQuota = `UPDATE /* tidings:quota-update */ %s SET num = ?, modify_time = UTC_TIMESTAMP(3) + INTERVAL 1000 MICROSECOND WHERE id = ?`
	sqlDeleteQuota = `DELETE /* tidings:quota-delete */ FROM %s WHERE id = ?`
)

func (s *Store) changeQuota(ctx context.Context, by, action string, q *Quota, change func(*sqlx.Tx) error) error {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	defer s.limits.quotas.refresh(ctx)
	err := s.tx(ctx, func(tx *sqlx.Tx) error {
		if err := change(tx); err != nil {
			return err
		}
		object := fmt.Sprintf("%s/%d", quotaTable(q.SourceID), q.ID)
		return audit(ctx, tx, by, action, object, fmt.Sprintf("source %q, channel %s, %d in %d ms", q.SourceID, q.Channel, q.Num, q.UnitMS))
	})
	if isDuplicate(err) {
		return fmt.Errorf("quota: %w", ErrExists)
	}
	return public(err)
}

// CreateQuota stores a quota, and sets its ID. ErrExists when there is one of the same source, channel and unit.
func (s *Store) CreateQuota(ctx context.Context, by string, q *Quota) error {
	column, mark, args := "", "", []any{q.Channel, q.Num, q.UnitMS}
	if q.SourceID != "" {
		column, mark, args = "source_id, ", "?, ", append([]any{q.SourceID}, args...)
	}
	return s.changeQuota(ctx, by, "quota.create", q, func(tx *sqlx.Tx) error {
		res, err := tx.ExecContext(ctx, fmt.Sprintf(sqlNewQuota, quotaTable(q.SourceID), column, mark), args...)
		if err != nil {
			return err
		}
		id, err := res.LastInsertId()
		q.ID = uint64(id)
		return err
	})
}

// UpdateQuota changes a quota's number. ErrNotFound.
func (s *Store) UpdateQuota(ctx context.Context, by string, q *Quota) error {
	return s.changeQuota(ctx, by, "quota.update", q, func(tx *sqlx.Tx) error {
		return affectOne(tx.ExecContext(ctx, fmt.Sprintf(sqlUpdateQuota, quotaTable(q.SourceID)), q.Num, q.ID))
	})
}

// DeleteQuota removes a quota. ErrNotFound.
func (s *Store) DeleteQuota(ctx context.Context, by string, q *Quota) error {
	return s.changeQuota(ctx, by, "quota.delete", q, func(tx *sqlx.Tx) error {
		return affectOne(tx.ExecContext(ctx, fmt.Sprintf(sqlDeleteQuota, quotaTable(q.SourceID)), q.ID))
	})
}

func affectOne(res interface{ RowsAffected() (int64, error) }, err error) error {
	if err != nil {
		return err
	}
	if n, err := res.RowsAffected(); err != nil || n == 0 {
		return fmt.Errorf("quota %w (%v)", ErrNotFound, err)
	}
	return nil
}
