package store

import (
	"context"
	"time"
)

// Duties are what one process does for all: values of t_duty.duty.
const (
	DutySubmit    = "submit"    // requests from t_msg_submit
	DutyRetention = "retention" // what is too old leaves
)

const (
	sqlTakeDuty = `UPDATE /* tidings:duty-take */ t_duty SET owner = ?, lease_end = UTC_TIMESTAMP(3) + INTERVAL ? MICROSECOND
		WHERE duty = ? AND (lease_end <= UTC_TIMESTAMP(3) OR owner = ?)`
	sqlLeaveDuty = `UPDATE /* tidings:duty-leave */ t_duty SET owner = '', lease_end = UTC_TIMESTAMP(3), last_error = ?,
		done_time = IF(? = '', UTC_TIMESTAMP(3), done_time) WHERE duty = ? AND owner = ?`
)

// TakeDuty makes the owner the one who does a duty, or lets it stay so, for a time. False: another process does it. An owner is NewOwner's.
func (s *Store) TakeDuty(ctx context.Context, duty, owner string, lease time.Duration) (bool, error) {
	n, err := affected(s.db.ExecContext(ctx, sqlTakeDuty, owner, lease.Microseconds(), duty, owner))
	return n > 0, public(err)
}

// LeaveDuty lets others do a duty. failed is why it could not be done; empty: it could.
func (s *Store) LeaveDuty(ctx context.Context, duty, owner, failed string) error {
	failed = clip(failed, 512)
	_, err := s.db.ExecContext(ctx, sqlLeaveDuty, failed, failed, duty, owner)
	return public(err)
}
