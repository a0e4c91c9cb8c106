package store

import (
	"context"
	"time"

	"github.com/jmoiron/sqlx"
)

const (
	sqlAudit     = `INSERT /* tidings:audit */ INTO t_audit (create_time, source_id, action, object, detail) VALUES (UTC_TIMESTAMP(3), ?, ?, ?, ?)`
	sqlListAudit = `SELECT /* tidings:audit-list */ id, create_time, source_id, action, object, detail FROM t_audit WHERE id < ? ORDER BY id DESC LIMIT ?`
)

// AuditEntry says who did what.
type AuditEntry struct {
	ID     uint64    `db:"id"`
	Time   time.Time `db:"create_time"`
	By     string    `db:"source_id"`
	Action string    `db:"action"`
	Object string    `db:"object"`
	Detail string    `db:"detail"`
}

// audit notes a change in the change's own transaction.
func audit(ctx context.Context, tx *sqlx.Tx, by, action, object, detail string) error {
	_, err := tx.ExecContext(ctx, sqlAudit, clip(by, 64), action, clip(object, 255), clip(detail, 1024))
	return err
}

// Audit lists changes, the latest first, with ids below before.
func (s *Store) Audit(ctx context.Context, before uint64, limit int) (entries []AuditEntry, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	err = s.db.SelectContext(ctx, &entries, sqlListAudit, before, limit)
	return entries, public(err)
}
