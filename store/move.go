package store

import (
	"cmp"
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

// delayKey names a task in a delay table, and says what decides where it belongs.
type delayKey struct {
	MsgID    uint64      `db:"msg_id"`
	Channel  msg.Channel `db:"channel"`
	Due      time.Time   `db:"due_time"`
	Priority string      `db:"priority"`
}

const (
	// The look goes through the index once for many keys: entries that are dead, but kept for somebody's old snapshot, are walked
	// each time.
	sqlDelayLook = `SELECT /* tidings:delay-look */ msg_id, channel, due_time, priority FROM %s FORCE INDEX (idx_due)
		WHERE status = 0 AND due_time <= ? AND due_time >= ? AND (due_time > ? OR msg_id > ?) ORDER BY due_time, msg_id LIMIT ?`
	// due_time is asked once more: the task may have been rescheduled since, and come back to this very table.
	sqlDelayMark = `UPDATE /* tidings:delay-mark */ (SELECT msg_id, channel FROM %[1]s FORCE INDEX (PRIMARY)
			WHERE (%[2]s) AND status = 0 AND due_time <= ? LIMIT %[3]d FOR UPDATE SKIP LOCKED) AS free
		STRAIGHT_JOIN %[1]s AS task FORCE INDEX (PRIMARY) ON task.msg_id = free.msg_id AND task.channel = free.channel
		SET task.status = 9, task.owner = ?, task.modify_time = UTC_TIMESTAMP(3)`
	sqlDelayMarked = "SET /* tidings:delay-marked */ @tidings_moved = ROW_COUNT()"
	// INSERT into a queue table, where no row of the task may be; REPLACE into a delay table, where its own tombstone may stand when it
	// was moved away and back.
	sqlDelayPut = `%[1]s /* tidings:delay-put */ INTO %[2]s (` + recordedTaskColumns + `) SELECT ` + movedTaskColumns + ` FROM %[3]s FORCE INDEX (PRIMARY)
		WHERE (%[4]s) AND owner = ? AND status = 9`
	sqlDelayLeave = `DELETE /* tidings:delay-leave */ task FROM (SELECT msg_id, channel FROM %[1]s FORCE INDEX (PRIMARY)
			WHERE (%[2]s) AND owner = ? AND status = 9 LIMIT %[3]d FOR UPDATE SKIP LOCKED) AS mine
		STRAIGHT_JOIN %[1]s AS task FORCE INDEX (PRIMARY) ON task.msg_id = mine.msg_id AND task.channel = mine.channel`
	// A tombstone stays for as long as its table: what a sensitive message said must not. Which are is not asked of t_msg_template:
	// an UPDATE would wait for locks there.
	sqlDelayBlank = `UPDATE /* tidings:delay-blank */ (SELECT msg_id, channel FROM %[1]s FORCE INDEX (PRIMARY)
			WHERE (%[2]s) AND owner = ? AND status = 9 LIMIT %[3]d FOR UPDATE SKIP LOCKED) AS mine
		STRAIGHT_JOIN %[1]s AS task FORCE INDEX (PRIMARY) ON task.msg_id = mine.msg_id AND task.channel = mine.channel
		SET task.params = NULL, task.content = NULL WHERE task.category = 'verification' OR task.template_id <> ''`
	// One that replaces a tombstone counts twice.
	sqlDelayGuard = "SET /* tidings:delay-guard */ @tidings_ok = IF(ROW_COUNT() >= @tidings_moved, 1, (SELECT 1 UNION SELECT 2))"
	sqlDelayMoved = "SELECT /* tidings:delay-moved */ @tidings_moved"

	recordedTaskColumns = taskColumns + ", modify_time"
	movedTaskColumns    = `msg_id, channel, source_id, request_id, batch_id, category, priority, receiver, template_id, template_version,
	params, content, 0, attempt, attempt_limit, '', due_time, due_time, expire_time, provider, last_error, create_time, UTC_TIMESTAMP(3)`

	lookKeys = 20_000 // of one look
	farKeys  = 2_000  // that one pass moves from far ahead into the ring: there is time
	moveRows = 500    // of one transaction
)

// Tended is what Tend did.
type Tended struct {
	Moved  int           // tasks
	Looked time.Duration // that finding them took
	// Turn carries the ring of tables on; nil: it need not be. It may take seconds, and one at a time is enough.
	Turn func(context.Context) error
}

// Tend moves what is due within the lead from the delay tables to its queue table, and what the ring has room for into the ring. Any
// number of processes may do it at once. A table that somebody has locked holds up its own tasks only.
func (s *Store) Tend(ctx context.Context) (done Tended, err error) {
	stale := s.ring.refresh(ctx) // an old copy is good enough to move by
	r, _ := s.ring.get(ctx)
	began := time.Now()
	first, err := s.firstDue(ctx, r)
	if number(err) == erNoSuchTable {
		return done, public(s.mend(ctx))
	}
	if err != nil {
		return done, public(err)
	}
	done.Looked = time.Since(began)
	s.noteEarliest(first)
	due := s.Now().Add(s.cfg.Delay.Lead)
	for i, table := range r.tables {
		if !first[i].IsZero() && !first[i].After(due) {
			n, failed := s.moveFrom(ctx, table, due, lookKeys)
			done.Moved, err = done.Moved+n, errors.Join(err, failed)
		}
	}
	if far := first[0]; !far.IsZero() && far.Before(r.end) {
		n, failed := s.moveFrom(ctx, farTable, r.end.Add(-time.Millisecond), farKeys)
		done.Moved, err = done.Moved+n, errors.Join(err, failed)
	}
	if stale == nil {
		done.Turn = s.turnDue(r, first)
	}
	return done, public(errors.Join(stale, err))
}

// noteEarliest remembers when the first task is due that is known of.
func (s *Store) noteEarliest(first []time.Time) {
	var earliest *time.Time
	for i := range first {
		if f := first[i]; !f.IsZero() && f != unknownDue && (earliest == nil || f.Before(*earliest)) {
			earliest = &f
		}
	}
	s.earliest.Store(earliest)
}

// firstDue tells for each table when its first task is due; zero: it has none. Of a table that is locked nothing is known: unknownDue.
func (s *Store) firstDue(ctx context.Context, r *ring) ([]time.Time, error) {
	first := make([]time.Time, len(r.tables))
	err := s.surveyDelay(ctx, r.tables, first)
	if !isLockWait(err) {
		return first, err
	}
	for i := range r.tables {
		err := s.surveyDelay(ctx, r.tables[i:i+1], first[i:i+1])
		if isLockWait(err) {
			first[i] = unknownDue
		} else if err != nil {
			return nil, err
		}
	}
	return first, nil
}

var unknownDue = time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC)

func (s *Store) surveyDelay(ctx context.Context, tables []string, first []time.Time) error {
	var parts []string
	for i, table := range tables {
		parts = append(parts, fmt.Sprintf("SELECT %d AS n, MIN(due_time) AS due FROM %s FORCE INDEX (idx_due) WHERE status = 0", i, table))
	}
	rows, err := s.moves.QueryContext(ctx, strings.Replace(strings.Join(parts, " UNION ALL "), "SELECT ", "SELECT /* tidings:delay-survey */ ", 1))
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var (
			n   int
			due sql.NullTime
		)
		if err := rows.Scan(&n, &due); err != nil {
			return err
		}
		first[n] = due.Time
	}
	return rows.Err()
}

// moveFrom moves the tasks of a table that are due by then to where they belong, the soonest first; of less than lookKeys, as many as
// one look finds.
func (s *Store) moveFrom(ctx context.Context, table string, until time.Time, limit int) (moved int, err error) {
	var after delayKey
	for ctx.Err() == nil {
		keys, err := s.lookDelayed(ctx, table, until, after, limit)
		if err != nil {
			return moved, err
		}
		n, err := s.moveKeys(ctx, table, keys)
		moved += n
		if err != nil || len(keys) < limit || limit < lookKeys {
			return moved, err
		}
		if after = (delayKey{}); n == 0 { // somebody has them all locked: others may be behind them
			after = keys[len(keys)-1]
		}
	}
	return moved, ctx.Err()
}

func (s *Store) lookDelayed(ctx context.Context, table string, until time.Time, after delayKey, limit int) (keys []delayKey, err error) {
	from := earliest(after.Due)
	err = sqlx.NewDb(s.moves, "mysql").SelectContext(ctx, &keys, fmt.Sprintf(sqlDelayLook, table), until, from, from, after.MsgID, limit)
	return keys, err
}

// target is a table that tasks move to, and for a queue table its lane. The zero value: nowhere.
type target struct{ table, priority string }

// moveKeys moves tasks of a table to where they belong. Those that somebody has locked, or that belong where they are, stay. A lane
// whose table is locked holds up its own tasks only.
func (s *Store) moveKeys(ctx context.Context, from string, keys []delayKey) (moved int, failed error) {
	r, _ := s.ring.get(ctx)
	now, turn := s.Now(), s.turns.Add(1)
	groups := map[target][]delayKey{}
	for _, k := range keys {
		to := target{table: s.destined(r, k.Due, now, turn)}
		if to.table == "" {
			to = target{"t_msg_queue_" + k.Priority, k.Priority}
		}
		if to.table != from {
			groups[to] = append(groups[to], k)
		}
	}
	for _, to := range slices.SortedFunc(maps.Keys(groups), func(a, b target) int { return cmp.Compare(a.table, b.table) }) {
		for part := range slices.Chunk(groups[to], moveRows) {
			n, err := s.moveSome(ctx, from, to, part)
			moved += n
			if failed = errors.Join(failed, err); ctx.Err() != nil || isLost(err) {
				return moved, failed
			}
			if isLockWait(err) {
				break
			}
		}
	}
	return moved, failed
}

// moveSome moves tasks in one transaction. One bad row must not hold up the others: what the server refuses is cut in two until
// the bad row stands alone.
func (s *Store) moveSome(ctx context.Context, from string, to target, keys []delayKey) (moved int, err error) {
	err = s.again(ctx, func() (err error) {
		moved, err = s.moveAtOnce(ctx, from, to, keys)
		return err
	})
	switch {
	case err == nil:
		if to.priority != "" && moved > 0 {
			s.wakeFor(to.priority, keys)
		}
		return moved, nil
	case isLost(err) || mustStartAgain(err) || number(err) == erNoSuchTable || ctx.Err() != nil:
		return 0, err
	case len(keys) == 1 && isDuplicate(err): // only a copy made by hand can be
		s.log.Warn("dropped a scheduled copy of a task that stands in its queue", "msg_id", keys[0].MsgID, "channel", keys[0].Channel)
		_, err := s.moveAtOnce(ctx, from, target{}, keys)
		return 0, err
	case len(keys) == 1:
		return 0, err
	}
	half := len(keys) / 2
	first, err1 := s.moveSome(ctx, from, to, keys[:half])
	second, err2 := s.moveSome(ctx, from, to, keys[half:])
	return first + second, errors.Join(err1, err2)
}

// wakeFor tells the pumps when the first of the tasks is due on each channel.
func (s *Store) wakeFor(priority string, keys []delayKey) {
	lane, err := msg.ParseLane(priority)
	if err != nil {
		return
	}
	first := map[msg.Channel]time.Time{}
	for _, k := range keys {
		if due, ok := first[k.Channel]; !ok || k.Due.Before(due) {
			first[k.Channel] = k.Due
		}
	}
	for channel, due := range first {
		s.cfg.Wake(lane, channel, due)
	}
}

// moveAtOnce is one packet: a process that is stopped in the middle of several would keep the tasks locked, and unsent. No
// destination: the rows are dropped.
func (s *Store) moveAtOnce(ctx context.Context, from string, to target, keys []delayKey) (moved int, err error) {
	where, owner := whereDelayKeys(keys), s.NewOwner()
	last := slices.MaxFunc(keys, func(a, b delayKey) int { return a.Due.Compare(b.Due) }).Due
	var p packet
	p.add(fmt.Sprintf(sqlDelayMark, from, where, len(keys)), last, owner)
	p.add(sqlDelayMarked)
	if to.table != "" {
		verb := "REPLACE"
		if to.priority != "" {
			verb = "INSERT"
		}
		p.add(fmt.Sprintf(sqlDelayPut, verb, to.table, from, where), owner)
		p.add(sqlDelayGuard)
	}
	if from == farTable { // it is never truncated
		p.add(fmt.Sprintf(sqlDelayLeave, from, where, len(keys)), owner)
		p.add(sqlDelayGuard)
	} else {
		p.add(fmt.Sprintf(sqlDelayBlank, from, where, len(keys)), owner)
	}
	err = s.onPacketConn(ctx, s.moves, func(conn *sql.Conn) error {
		if _, err := conn.ExecContext(ctx, "BEGIN; "+s.text(&p)+"; COMMIT", p.args...); err != nil {
			return err
		}
		return conn.QueryRowContext(ctx, sqlDelayMoved).Scan(&moved)
	})
	return moved, err
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

func affected(res sql.Result, err error) (int, error) {
	if err != nil {
		return 0, err
	}
	n, err := res.RowsAffected()
	return int(n), err
}
