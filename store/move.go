package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jmoiron/sqlx"

	"tidings/internal/msg"
)

// delayKey names a task in a delay table.
type delayKey struct {
	MsgID   uint64      `db:"msg_id"`
	Channel msg.Channel `db:"channel"`
	Due     time.Time   `db:"due_time"`
}

const (
	// The look reads the index alone: entries that are dead, but kept for somebody's old snapshot, are walked once for so many keys.
	sqlDelayLook = `SELECT /* tidings:delay-look */ msg_id, channel, due_time FROM %s FORCE INDEX (idx_due)
		WHERE status = 0 AND due_time <= ? ORDER BY due_time, msg_id LIMIT ?`
	// due_time is asked once more: the task may have been rescheduled since, and come back to this very table.
	sqlDelayMark = `UPDATE /* tidings:delay-mark */ (SELECT msg_id, channel FROM %[1]s FORCE INDEX (PRIMARY)
			WHERE (%[2]s) AND status = 0 AND due_time <= ? LIMIT %[3]d FOR UPDATE SKIP LOCKED) AS free
		STRAIGHT_JOIN %[1]s AS task FORCE INDEX (PRIMARY) ON task.msg_id = free.msg_id AND task.channel = free.channel
		SET task.status = 9, task.owner = ?, task.modify_time = UTC_TIMESTAMP(3)`
	sqlDelayLanes = `SELECT /* tidings:delay-lanes */ priority, channel, MIN(due_time) AS due_time FROM %s FORCE INDEX (PRIMARY)
		WHERE (%s) AND owner = ? AND status = 9 GROUP BY priority, channel`
	sqlDelayToQueue = `INSERT /* tidings:delay-to-queue */ INTO %s (` + recordedTaskColumns + `) SELECT ` + movedTaskColumns + ` FROM %s FORCE INDEX (PRIMARY)
		WHERE (%s) AND owner = ? AND status = 9 AND priority = ?`
	// A task that is moved away and back finds its own tombstone, and takes its place.
	sqlDelayToRing = `REPLACE /* tidings:delay-to-ring */ INTO %s (` + recordedTaskColumns + `) SELECT ` + movedTaskColumns + ` FROM %s FORCE INDEX (PRIMARY)
		WHERE (%s) AND owner = ? AND status = 9`
	sqlDelayLeave = `DELETE /* tidings:delay-leave */ task FROM (SELECT msg_id, channel FROM %[1]s FORCE INDEX (PRIMARY)
			WHERE (%[2]s) AND owner = ? AND status = 9 LIMIT %[3]d FOR UPDATE SKIP LOCKED) AS mine
		STRAIGHT_JOIN %[1]s AS task FORCE INDEX (PRIMARY) ON task.msg_id = mine.msg_id AND task.channel = mine.channel`

	recordedTaskColumns = taskColumns + ", modify_time"
	movedTaskColumns    = `msg_id, channel, source_id, request_id, batch_id, category, priority, receiver, template_id, template_version,
	params, content, 0, attempt, attempt_limit, '', due_time, due_time, expire_time, provider, last_error, create_time, UTC_TIMESTAMP(3)`

	lookKeys = 20_000 // of one look: 24 bytes each
	farKeys  = 2_000  // that one pass moves from far ahead into the ring: there is time
	moveRows = 500    // of one transaction
)

// Tend looks after the delay tables once: what is due within the lead is moved to its queue table, what the ring has room for is
// moved into it, and slots whose time is over are emptied and opened for the next span. Any number of processes may do it at
// once. It tells how many tasks were moved, and how long looking for them took. After an error of one table the others are looked
// after all the same.
func (s *Store) Tend(ctx context.Context) (moved int, looked time.Duration, err error) {
	if err := s.ring.refresh(ctx); err != nil {
		return 0, 0, public(err)
	}
	r, _ := s.ring.get(ctx)
	began := time.Now()
	first, err := s.firstDue(ctx, r)
	if number(err) == erNoSuchTable {
		return 0, 0, public(s.mend(ctx))
	}
	if err != nil {
		return 0, 0, public(err)
	}
	looked = time.Since(began)
	due := s.Now().Add(s.cfg.Delay.Lead)
	for i, table := range r.tables {
		if !first[i].IsZero() && !first[i].After(due) {
			n, failed := s.moveFrom(ctx, table, due, lookKeys)
			moved, err = moved+n, errors.Join(err, failed)
		}
	}
	if far := first[0]; !far.IsZero() && far.Before(r.end) {
		n, failed := s.moveFrom(ctx, farTable, r.end.Add(-time.Millisecond), farKeys)
		moved, err = moved+n, errors.Join(err, failed)
	}
	return moved, looked, public(errors.Join(err, s.turn(ctx, r, first)))
}

// firstDue tells for each table when its first task is due; zero: it has none.
func (s *Store) firstDue(ctx context.Context, r *ring) ([]time.Time, error) {
	var parts []string
	for i, table := range r.tables {
		parts = append(parts, fmt.Sprintf("SELECT %d AS n, MIN(due_time) AS due FROM %s FORCE INDEX (idx_due) WHERE status = 0", i, table))
	}
	rows, err := s.db.QueryContext(ctx, strings.Replace(strings.Join(parts, " UNION ALL "), "SELECT ", "SELECT /* tidings:delay-survey */ ", 1))
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	first := make([]time.Time, len(r.tables))
	for rows.Next() {
		var (
			n   int
			due sql.NullTime
		)
		if err := rows.Scan(&n, &due); err != nil {
			return nil, err
		}
		first[n] = due.Time
	}
	return first, rows.Err()
}

// moveFrom moves the tasks of a table that are due by then to where they belong, the soonest first. Of far away ones it moves as
// many as one look finds.
func (s *Store) moveFrom(ctx context.Context, table string, until time.Time, limit int) (moved int, err error) {
	for ctx.Err() == nil {
		var keys []delayKey
		if err := s.db.SelectContext(ctx, &keys, fmt.Sprintf(sqlDelayLook, table), until, limit); err != nil {
			return moved, err
		}
		n, err := s.moveKeys(ctx, table, keys)
		moved += n
		if err != nil || n == 0 || len(keys) < limit || limit < lookKeys {
			return moved, err
		}
	}
	return moved, ctx.Err()
}

// moveKeys moves tasks of a table to where they belong. Those that somebody has locked, or that belong where they are, stay.
func (s *Store) moveKeys(ctx context.Context, from string, keys []delayKey) (moved int, failed error) {
	r, _ := s.ring.get(ctx)
	now, turn := s.Now(), s.turns.Add(1)
	groups := map[string][]delayKey{}
	for _, k := range keys {
		if to := s.destined(r, k.Due, now, turn); to != from {
			groups[to] = append(groups[to], k)
		}
	}
	for _, to := range slices.Sorted(maps.Keys(groups)) {
		for part := range slices.Chunk(groups[to], moveRows) {
			n, err := s.moveSome(ctx, from, to, part)
			moved += n
			if failed = errors.Join(failed, err); ctx.Err() != nil || isLost(err) {
				return moved, failed
			}
		}
	}
	return moved, failed
}

// moveSome moves tasks in one transaction. One bad row must not hold up the others: what the server refuses is cut in two until
// the bad row stands alone.
func (s *Store) moveSome(ctx context.Context, from, to string, keys []delayKey) (moved int, err error) {
	var lanes []movedLane
	err = s.tx(ctx, func(tx *sqlx.Tx) (err error) {
		moved, lanes, err = s.moveIn(ctx, tx, from, to, keys)
		return err
	})
	switch {
	case err == nil:
		for _, l := range lanes {
			if lane, err := msg.ParseLane(l.Priority); err == nil {
				s.cfg.Wake(lane, l.Channel, l.Due)
			}
		}
		return moved, nil
	case isLost(err) || mustStartAgain(err) || number(err) == erNoSuchTable || ctx.Err() != nil:
		return 0, err
	case len(keys) == 1 && isDuplicate(err): // only a copy made by hand can be
		s.log.Warn("dropped a scheduled copy of a task that stands in its queue", "msg_id", keys[0].MsgID, "channel", keys[0].Channel)
		return 0, s.dropCopy(ctx, from, keys)
	case len(keys) == 1:
		return 0, err
	}
	half := len(keys) / 2
	first, err1 := s.moveSome(ctx, from, to, keys[:half])
	second, err2 := s.moveSome(ctx, from, to, keys[half:])
	return first + second, errors.Join(err1, err2)
}

// movedLane is a lane and channel that tasks were moved to, and when the first of them is due.
type movedLane struct {
	Priority string      `db:"priority"`
	Channel  msg.Channel `db:"channel"`
	Due      time.Time   `db:"due_time"`
}

func (s *Store) moveIn(ctx context.Context, tx *sqlx.Tx, from, to string, keys []delayKey) (moved int, lanes []movedLane, err error) {
	where, owner := whereDelayKeys(keys), s.NewOwner()
	last := slices.MaxFunc(keys, func(a, b delayKey) int { return a.Due.Compare(b.Due) }).Due
	marked, err := affected(tx.ExecContext(ctx, fmt.Sprintf(sqlDelayMark, from, where, len(keys)), last, owner))
	if err != nil || marked == 0 {
		return 0, nil, err
	}
	var arrived int
	if to == "" {
		if err := tx.SelectContext(ctx, &lanes, fmt.Sprintf(sqlDelayLanes, from, where), owner); err != nil {
			return 0, nil, err
		}
		for _, lane := range msg.Lanes {
			if !slices.ContainsFunc(lanes, func(l movedLane) bool { return l.Priority == lane.String() }) {
				continue
			}
			n, err := affected(tx.ExecContext(ctx, fmt.Sprintf(sqlDelayToQueue, queueTable(lane), from, where), owner, lane.String()))
			if err != nil {
				return 0, nil, err
			}
			arrived += n
		}
	} else {
		n, err := affected(tx.ExecContext(ctx, fmt.Sprintf(sqlDelayToRing, to, from, where), owner))
		if err != nil {
			return 0, nil, err
		}
		arrived = min(n, marked) // one that replaces a tombstone counts twice
	}
	if arrived != marked {
		return 0, nil, fmt.Errorf("%d tasks arrived where %d left: %w", arrived, marked, errMoved)
	}
	if from == farTable { // it is never truncated
		left, err := affected(tx.ExecContext(ctx, fmt.Sprintf(sqlDelayLeave, from, where, marked), owner))
		if err != nil || left != marked {
			return 0, nil, fmt.Errorf("%d tasks left where %d were to: %w", left, marked, errors.Join(errMoved, err))
		}
	}
	return marked, lanes, nil
}

var errMoved = errors.New("nothing was moved")

// dropCopy ends the copy of a task that stands elsewhere, too.
func (s *Store) dropCopy(ctx context.Context, from string, keys []delayKey) error {
	return s.tx(ctx, func(tx *sqlx.Tx) error {
		where, owner := whereDelayKeys(keys), s.NewOwner()
		marked, err := affected(tx.ExecContext(ctx, fmt.Sprintf(sqlDelayMark, from, where, len(keys)), keys[0].Due, owner))
		if err == nil && marked > 0 && from == farTable {
			_, err = tx.ExecContext(ctx, fmt.Sprintf(sqlDelayLeave, from, where, marked), owner)
		}
		return err
	})
}

func affected(res sql.Result, err error) (int, error) {
	if err != nil {
		return 0, err
	}
	n, err := res.RowsAffected()
	return int(n), err
}

// whereDelayKeys names rows by primary key, a list of ids for each channel.
func whereDelayKeys(keys []delayKey) string {
	byChannel := map[msg.Channel][]uint64{}
	for _, k := range keys {
		byChannel[k.Channel] = append(byChannel[k.Channel], k.MsgID)
	}
	var parts []string
	for _, c := range slices.Sorted(maps.Keys(byChannel)) {
		ids := byChannel[c]
		slices.Sort(ids)
		parts = append(parts, fmt.Sprintf("(channel = %d AND msg_id IN (%s))", c, joinIDs(ids)))
	}
	return strings.Join(parts, " OR ")
}
