package store

import (
	"context"
	"fmt"
	"time"

	"tidings/internal/msg"
)

// The alarms that tell of dead letters: the values of t_alarm.level.
const (
	AlarmNow   = "now"   // at once
	AlarmDaily = "daily" // in the digest
)

const (
	sqlAlarms    = "INSERT /* tidings:settle-alarms */ INTO t_alarm (level, msg_id, channel, create_time) VALUES "
	sqlAlarmsEnd = " ON DUPLICATE KEY UPDATE create_time = VALUES(create_time)" // it died again before anybody was told

	sqlAlarmLevels = `SELECT /* tidings:alarm-levels */ level, told_time, lease_end > UTC_TIMESTAMP(3) AS taken,
		EXISTS (SELECT 1 FROM t_alarm WHERE t_alarm.level = t_alarm_level.level) AS untold FROM t_alarm_level`
	sqlTakeAlarm = `UPDATE /* tidings:alarm-take */ t_alarm_level SET owner = ?, lease_end = UTC_TIMESTAMP(3) + INTERVAL ? MICROSECOND
		WHERE level = ? AND lease_end <= UTC_TIMESTAMP(3)`
	// A letter that somebody has handled by now is not told of.
	sqlUntold = `SELECT /* tidings:alarm-untold */ a.msg_id, a.channel, a.create_time, COALESCE(d.category, '') AS category, COALESCE(d.provider, '') AS provider,
		COALESCE(d.last_error, '') AS last_error FROM t_alarm AS a FORCE INDEX (PRIMARY) LEFT JOIN t_msg_dead AS d ON d.msg_id = a.msg_id AND d.channel = a.channel
		WHERE a.level = ? AND (a.msg_id > ? OR (a.msg_id = ? AND a.channel > ?)) ORDER BY a.msg_id, a.channel LIMIT ?`
	sqlTold = `DELETE /* tidings:alarm-told */ FROM t_alarm WHERE level = ? AND (%s) AND create_time <= ?`
	// told_time stays when nothing was told.
	sqlLeaveAlarm = `UPDATE /* tidings:alarm-leave */ t_alarm_level SET owner = '', lease_end = UTC_TIMESTAMP(3), last_error = ?,
		told_time = IF(?, UTC_TIMESTAMP(3), told_time) WHERE level = ? AND owner = ?`
)

// AlarmLevel is how one of the alarms stands: a row of t_alarm_level.
type AlarmLevel struct {
	Level  string     `db:"level"`
	Told   *time.Time `db:"told_time"`
	Taken  bool       `db:"taken"`  // a process is about to tell
	Untold bool       `db:"untold"` // there are dead letters to tell of
}

// Untold is a dead letter that people are to be told of.
type Untold struct {
	MsgID    uint64      `db:"msg_id"`
	Channel  msg.Channel `db:"channel"`
	Died     time.Time   `db:"create_time"`
	Category string      `db:"category"` // empty: it has been handled meanwhile
	Provider string      `db:"provider"`
	Reason   string      `db:"last_error"`
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

// Untold lists what people are to be told of at a level, by id, after a letter; nil: from the beginning.
func (s *Store) Untold(ctx context.Context, level string, after *Untold, limit int) (letters []Untold, err error) {
	if after == nil {
		after = &Untold{}
	}
	err = s.db.SelectContext(ctx, &letters, sqlUntold, level, after.MsgID, after.MsgID, after.Channel, limit)
	return letters, public(err)
}

// Told strikes letters off that people have been told of. One that has died again meanwhile stays.
func (s *Store) Told(ctx context.Context, level string, letters []Untold) error {
	if len(letters) == 0 {
		return nil
	}
	keys, newest := make([]delayKey, len(letters)), letters[0].Died
	for i, l := range letters {
		if keys[i] = (delayKey{MsgID: l.MsgID, Channel: l.Channel}); l.Died.After(newest) {
			newest = l.Died
		}
	}
	return public(s.again(ctx, func() error {
		_, err := s.db.ExecContext(ctx, fmt.Sprintf(sqlTold, whereDelayKeys(keys)), level, newest)
		return err
	}))
}

// LeaveAlarm lets others tell people again. failed is why they were not told; told says that they were.
func (s *Store) LeaveAlarm(ctx context.Context, level, owner string, told bool, failed string) error {
	_, err := s.db.ExecContext(ctx, sqlLeaveAlarm, clip(failed, 512), told, level, owner)
	return public(err)
}
