package store

import (
	"context"
	"fmt"
	"strings"
	"time"

	"tidings/internal/msg"
)

// The alarms that tell of dead letters: the values of t_alarm.level.
const (
	AlarmNow   = "now"   // at once
	AlarmDaily = "daily" // in the digest
)

const (
	sqlAlarms = "INSERT /* tidings:settle-alarms */ INTO t_alarm (level, msg_id, channel, create_time) VALUES "

	sqlAlarmLevels = `SELECT /* tidings:alarm-levels */ level, told_time, lease_end > UTC_TIMESTAMP(3) AS taken,
		(SELECT MIN(create_time) FROM t_alarm WHERE t_alarm.level = t_alarm_level.level) AS oldest FROM t_alarm_level`
	sqlTakeAlarm = `UPDATE /* tidings:alarm-take */ t_alarm_level SET owner = ?, lease_end = UTC_TIMESTAMP(3) + INTERVAL ? MICROSECOND
		WHERE level = ? AND lease_end <= UTC_TIMESTAMP(3)`
	// A letter that somebody has handled by now is not told of.
	sqlUntold = `SELECT /* tidings:alarm-untold */ a.msg_id, a.channel, a.create_time, COALESCE(d.category, '') AS category, COALESCE(d.provider, '') AS provider,
		COALESCE(d.last_error, '') AS last_error FROM t_alarm AS a FORCE INDEX (PRIMARY) LEFT JOIN t_msg_dead AS d ON d.msg_id = a.msg_id AND d.channel = a.channel
		WHERE a.level = ? AND a.create_time >= ? AND (a.create_time > ? OR a.msg_id > ? OR (a.msg_id = ? AND a.channel > ?))
		ORDER BY a.create_time, a.msg_id, a.channel LIMIT ?`
	sqlTold = `DELETE /* tidings:alarm-told */ FROM t_alarm WHERE level = ? AND (create_time, msg_id, channel) IN (%s)`
	// told_time stays when nothing was told.
	sqlLeaveAlarm = `UPDATE /* tidings:alarm-leave */ t_alarm_level SET owner = '', lease_end = UTC_TIMESTAMP(3) + INTERVAL ? MICROSECOND, last_error = ?,
		told_time = IF(?, UTC_TIMESTAMP(3), told_time) WHERE level = ? AND owner = ?`
)

// AlarmLevel is how one of the alarms stands: a row of t_alarm_level.
type AlarmLevel struct {
	Level  string     `db:"level"`
	Told   *time.Time `db:"told_time"`
	Taken  bool       `db:"taken"`  // a process is about to tell, or has failed to a moment ago
	Oldest *time.Time `db:"oldest"` // when the first dead letter died that is to be told of; nil: there is none
}

// AlarmKey names a death: the row in t_alarm.
type AlarmKey struct {
	Died    time.Time   `db:"create_time"`
	MsgID   uint64      `db:"msg_id"`
	Channel msg.Channel `db:"channel"`
}

// Untold is a dead letter that people are to be told of.
type Untold struct {
	AlarmKey
	Category string `db:"category"` // empty: it has been handled meanwhile
	Provider string `db:"provider"`
	Reason   string `db:"last_error"`
}

// AlarmLevels tells how the alarms stand.
func (s *Store) AlarmLevels(ctx context.Context) (levels []AlarmLevel, err error) {
	err = s.db.SelectContext(ctx, &levels, sqlAlarmLevels)
	return levels, public(err)
}

// TakeAlarm makes the caller the one who tells people at a level, for a time. Empty: somebody else does.
func (s *Store) TakeAlarm(ctx context.Context, level string, lease time.Duration) (owner string, err error) {
	owner = s.NewOwner()
	n, err := affected(s.db.ExecContext(ctx, sqlTakeAlarm, owner, lease.Microseconds(), level))
	if err != nil || n == 0 {
		return "", public(err)
	}
	return owner, nil
}

// Untold lists what people are to be told of at a level, those that died first first, after a death; zero: from the beginning.
func (s *Store) Untold(ctx context.Context, level string, after AlarmKey, limit int) (letters []Untold, err error) {
	from := earliest(after.Died)
	err = s.db.SelectContext(ctx, &letters, sqlUntold, level, from, from, after.MsgID, after.MsgID, after.Channel, limit)
	return letters, public(err)
}

// Told strikes deaths off that people have been told of. One that has died again meanwhile has a row of its own.
func (s *Store) Told(ctx context.Context, level string, deaths []AlarmKey) error {
	if len(deaths) == 0 {
		return nil
	}
	var b strings.Builder
	values(&b, "(?,?,?)", len(deaths))
	args := []any{level}
	for _, d := range deaths {
		args = append(args, d.Died, d.MsgID, d.Channel)
	}
	return public(s.again(ctx, func() error {
		_, err := s.db.ExecContext(ctx, fmt.Sprintf(sqlTold, b.String()), args...)
		return err
	}))
}

// LeaveAlarm lets others tell people again, after a rest. failed is why they were not told; told says that they were.
func (s *Store) LeaveAlarm(ctx context.Context, level, owner string, told bool, failed string, rest time.Duration) error {
	_, err := s.db.ExecContext(ctx, sqlLeaveAlarm, rest.Microseconds(), clip(failed, 512), told, level, owner)
	return public(err)
}
