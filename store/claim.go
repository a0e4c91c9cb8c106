package store

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"tidings/internal/msg"
)

// The look reads what is due without a lock, so it waits for nobody. The claim is one statement that touches primary keys
// only, in ascending order, as settling does. Its inner SELECT skips rows that anyone else holds: a DBA's open transaction
// costs the claim that row and no time. LIMIT keeps the optimizer from merging the inner SELECT into the UPDATE, which would
// drop its SKIP LOCKED. next_time <= the newest one looked at keeps away from rows that another node has claimed, sent and
// put back for later since the look: their next_time lies after it.
const (
	// FORCE INDEX is what makes it a range scan: by itself MariaDB reads all entries of channel and status by reference (EXPLAIN:
	// ref, key_len 2), and passes those before the checkpoint one by one.
	sqlLook = `SELECT /* tidings:look */ ` + taskColumns + ` FROM %s FORCE INDEX (idx_ready)
		WHERE channel = ? AND status = 0 AND next_time <= UTC_TIMESTAMP(3) AND next_time >= ? ORDER BY next_time LIMIT ?`
	sqlClaim = `UPDATE /* tidings:claim */ (SELECT msg_id, channel FROM %[1]s FORCE INDEX (PRIMARY)
			WHERE msg_id IN (%[2]s) AND channel = ? AND status = 0 AND next_time <= ? ORDER BY msg_id LIMIT ? FOR UPDATE SKIP LOCKED) AS free
		STRAIGHT_JOIN %[1]s AS task ON task.msg_id = free.msg_id AND task.channel = free.channel
		SET task.status = 1, task.owner = ?, task.attempt = task.attempt + 1,
			task.next_time = UTC_TIMESTAMP(3) + INTERVAL ? MICROSECOND, task.modify_time = UTC_TIMESTAMP(3)`
	sqlLookOverdue = `SELECT /* tidings:look-overdue */ ` + taskColumns + ` FROM %s FORCE INDEX (idx_ready)
		WHERE channel = ? AND status = ? AND next_time <= UTC_TIMESTAMP(3) ORDER BY next_time LIMIT ?`
	sqlRecover = `UPDATE /* tidings:recover */ (SELECT msg_id, channel FROM %[1]s FORCE INDEX (PRIMARY)
			WHERE msg_id IN (%[2]s) AND channel = ? AND status = ? AND next_time <= ? ORDER BY msg_id LIMIT ? FOR UPDATE SKIP LOCKED) AS free
		STRAIGHT_JOIN %[1]s AS task ON task.msg_id = free.msg_id AND task.channel = free.channel
		SET task.status = 1, task.owner = ?, task.next_time = UTC_TIMESTAMP(3) + INTERVAL ? MICROSECOND, task.modify_time = UTC_TIMESTAMP(3)`
	sqlLookExpired = `SELECT /* tidings:look-expired */ msg_id, source_id, template_id, category, attempt, next_time, expire_time, provider FROM %s FORCE INDEX (idx_ready)
		WHERE channel = ? AND status = 0 AND next_time <= UTC_TIMESTAMP(3) AND next_time >= ? AND (next_time > ? OR msg_id > ?) ORDER BY next_time, msg_id LIMIT ?`
	sqlNextDue = `SELECT /* tidings:next-due */ next_time FROM %s FORCE INDEX (idx_ready)
		WHERE channel = ? AND status = 0 AND next_time > UTC_TIMESTAMP(3) ORDER BY next_time LIMIT 1`
	sqlMine = `SELECT /* tidings:mine */ ` + taskColumns + ` FROM %s WHERE msg_id IN (%s) AND channel = ? AND owner = ? ORDER BY msg_id`
	// The bounds on finish_time leave the partitions of the messages' own days; without them every day ever kept is searched.
	sqlRecorded = `SELECT /* tidings:recorded */ msg_id FROM t_msg_record WHERE msg_id IN (%s) AND channel = ? AND finish_time >= ?`
)

// lookBytes bounds what one look brings into memory. It ends after the row that reaches it.
const lookBytes = 8 << 20

// Claimed is what a claim took.
type Claimed struct {
	Tasks []Task
	// Recorded are tasks that have a record (only a hand-made copy can). They are claimed, and not to be sent.
	Recorded []Task
	// Newest is the latest next_time that was looked at; zero: nothing was there.
	Newest time.Time
}

// Claim takes up to limit due tasks of a lane and channel, oldest first, under an owner of its own and for one lease. The
// attempt that the caller is about to make is counted already. from leaves out what was due before it: while somebody holds
// an old snapshot, InnoDB keeps index entries of tasks long gone, and a look from the beginning walks them all. Zero leaves
// nothing out.
func (s *Store) Claim(ctx context.Context, lane msg.Lane, channel msg.Channel, limit int, from time.Time) (Claimed, error) {
	l := look{lane: lane, channel: channel, from: from, rows: limit}
	c, passed, err := s.claimOnce(ctx, l, limit)
	if err != nil || len(passed) == 0 {
		return c, public(err)
	}
	// The oldest rows were not to be had. Others behind them may be, however few slots there are to look with.
	l.rows, l.skip = 2*limit+100, passed
	more, _, err := s.claimOnce(ctx, l, limit-len(c.Tasks)-len(c.Recorded))
	c.Tasks, c.Recorded = append(c.Tasks, more.Tasks...), append(c.Recorded, more.Recorded...)
	if more.Newest.After(c.Newest) {
		c.Newest = more.Newest
	}
	if len(c.Tasks)+len(c.Recorded) > 0 {
		err = nil // what was claimed must be worked on; the next claim meets the same trouble
	}
	return c, public(err)
}

// look says which rows to look at.
type look struct {
	lane    msg.Lane
	channel msg.Channel
	from    time.Time
	rows    int
	skip    []uint64
}

// claimOnce looks at rows and claims up to limit of them. passed are ids that were looked at in vain.
func (s *Store) claimOnce(ctx context.Context, l look, limit int) (c Claimed, passed []uint64, err error) {
	seen, err := s.read(ctx, fmt.Sprintf(sqlLook, queueTable(l.lane)), l.lane, lookBytes, l.channel, earliest(l.from), l.rows)
	if err != nil {
		return c, nil, err
	}
	seen = slices.DeleteFunc(seen, func(t Task) bool { return slices.Contains(l.skip, t.MsgID) })
	if len(seen) == 0 {
		return c, nil, nil
	}
	done, err := s.recorded(ctx, l.channel, seen)
	if err != nil {
		return c, nil, err
	}
	c.Newest = seen[len(seen)-1].Next
	tasks, err := s.take(ctx, l.lane, l.channel, seen, limit, func(owner, ids string) (string, []any) {
		return fmt.Sprintf(sqlClaim, queueTable(l.lane), ids), []any{l.channel, c.Newest, limit, owner, s.cfg.Lease.Microseconds()}
	}, func(t *Task) { t.Attempt++ })
	if err != nil {
		return c, nil, err
	}
	if len(tasks) < min(len(seen), limit) {
		for i := range seen {
			passed = append(passed, seen[i].MsgID)
		}
	}
	for _, t := range tasks {
		if slices.Contains(done, t.MsgID) {
			c.Recorded = append(c.Recorded, t)
		} else {
			c.Tasks = append(c.Tasks, t)
		}
	}
	return c, passed, nil
}

// earliest makes a bound of it that a DATETIME can hold: a hand-made next_time may lie in any year.
func earliest(from time.Time) time.Time {
	if from.IsZero() {
		return time.Date(1000, 1, 1, 0, 0, 0, 0, time.UTC)
	}
	return from
}

// Recover takes up to limit tasks whose lease (status Sending) or wait (Unknown) is over, but for those that skip names.
// Nobody knows how their last attempt ended; it is not counted again. Each task keeps the status that it was found in.
func (s *Store) Recover(ctx context.Context, lane msg.Lane, channel msg.Channel, status msg.State, limit int, skip func(*Task) bool) ([]Task, error) {
	seen, err := s.read(ctx, fmt.Sprintf(sqlLookOverdue, queueTable(lane)), lane, lookBytes, channel, status, limit)
	if err != nil {
		return nil, public(err)
	}
	seen = slices.DeleteFunc(seen, func(t Task) bool { return skip(&t) })
	if len(seen) == 0 {
		return nil, nil
	}
	newest := seen[len(seen)-1].Next
	tasks, err := s.take(ctx, lane, channel, seen, limit, func(owner, ids string) (string, []any) {
		return fmt.Sprintf(sqlRecover, queueTable(lane), ids), []any{channel, status, newest, limit, owner, s.cfg.Lease.Microseconds()}
	}, func(*Task) {})
	for i := range tasks {
		tasks[i].Status = status
	}
	return tasks, public(err)
}

// take claims up to limit of the looked-at tasks by one statement, and drops those that were not to be had. changed does to a
// task in memory what the statement does to its row. It leaves seen as it was, but for the order.
func (s *Store) take(ctx context.Context, lane msg.Lane, channel msg.Channel, seen []Task, limit int,
	claim func(owner, ids string) (string, []any), changed func(*Task),
) (tasks []Task, err error) {
	slices.SortFunc(seen, func(a, b Task) int { return cmp.Compare(a.MsgID, b.MsgID) })
	owner, ids, started := s.NewOwner(), idList(seen), time.Now()
	query, args := claim(owner, ids)
	var taken int64
	err = s.again(ctx, func() error {
		res, err := s.db.ExecContext(ctx, query, args...)
		if err != nil {
			return err
		}
		taken, err = res.RowsAffected()
		return err
	})
	switch {
	case err == nil && int(taken) == len(seen):
		tasks = slices.Clone(seen)
		for i := range tasks {
			changed(&tasks[i])
			tasks[i].Status, tasks[i].Owner = msg.Sending, owner
		}
	case err == nil && taken == 0:
		return nil, nil
	case err == nil || isLost(err): // others were faster, or the answer did not arrive: the owner tells which are ours
		if tasks, err = s.mine(ctx, lane, channel, ids, owner); err != nil {
			return nil, err
		}
	default:
		return nil, err
	}
	for i := range tasks {
		tasks[i].LeaseEnd = started.Add(s.cfg.Lease)
	}
	return tasks, nil
}

// mine reads back what a claim took. It waits for a lost database: rows that are ours and that nobody knows of would count
// as attempts of unknown outcome when their lease ends.
func (s *Store) mine(ctx context.Context, lane msg.Lane, channel msg.Channel, ids, owner string) ([]Task, error) {
	query := fmt.Sprintf(sqlMine, queueTable(lane), ids)
	for giveUp := time.Now().Add(s.cfg.Lease / 2); ; {
		tasks, err := s.read(ctx, query, lane, math.MaxInt, channel, owner)
		if err == nil || !isLost(err) || time.Now().After(giveUp) || ctx.Err() != nil {
			return tasks, err
		}
		pause(ctx, 100*time.Millisecond)
	}
}

func (s *Store) read(ctx context.Context, query string, lane msg.Lane, mostBytes int, args ...any) ([]Task, error) {
	rows, err := s.db.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var tasks []Task
	for bytes := 0; bytes < mostBytes && rows.Next(); {
		var t Task
		if err := scanTask(rows, &t); err != nil {
			return nil, err
		}
		t.Lane = lane // the table decides: a row moved by hand may still say otherwise
		tasks = append(tasks, t)
		bytes += t.bytes()
	}
	return tasks, rows.Err()
}

// freshFor is how young a task is of which nobody can have made a copy by hand.
const freshFor = 5 * time.Second

// recorded finds the tasks that have a record. Only a hand-made copy can, so a task that was accepted a moment ago and never
// tried is not asked about: in the usual case this costs nothing.
func (s *Store) recorded(ctx context.Context, channel msg.Channel, tasks []Task) (ids []uint64, err error) {
	fresh := s.Now().Add(-freshFor)
	tasks = slices.DeleteFunc(slices.Clone(tasks), func(t Task) bool { return t.Attempt == 0 && t.Created.After(fresh) })
	if len(tasks) == 0 {
		return nil, nil
	}
	// From the due time on: between it and the acceptance of a scheduled task there may be years of partitions.
	oldest := slices.MinFunc(tasks, func(a, b Task) int { return a.Due.Compare(b.Due) }).Due
	err = s.db.SelectContext(ctx, &ids, fmt.Sprintf(sqlRecorded, idList(tasks)), channel, oldest.Add(-clockSlack))
	return ids, err
}

// expireRows is how many due tasks a call of ClaimExpired goes through.
const expireRows = 5000

// ClaimExpired takes tasks that are due and whose time is over, among expireRows that lie behind a place in the order of next_time. It
// tells where to go on; zero: at the beginning.
func (s *Store) ClaimExpired(ctx context.Context, lane msg.Lane, channel msg.Channel, after DueCursor) (tasks []Task, next DueCursor, err error) {
	from := earliest(after.Due)
	rows, err := s.db.QueryContext(ctx, fmt.Sprintf(sqlLookExpired, queueTable(lane)), channel, from, from, after.MsgID, expireRows)
	if err != nil {
		return nil, after, public(err)
	}
	defer rows.Close()
	var seen []Task
	now, examined := s.Now(), 0
	for len(seen) < claimExpired && rows.Next() {
		t := Task{Lane: lane, Channel: channel}
		var category string
		err := rows.Scan(&t.MsgID, &t.SourceID, &t.TemplateID, &category, &t.Attempt, &t.Next, &t.Expire, &t.Provider)
		if err == nil {
			t.Category, err = msg.ParseCategory(category)
		}
		if err != nil {
			return nil, after, public(err)
		}
		examined++
		if next = (DueCursor{t.Next, t.MsgID}); !now.Before(t.Expire) {
			seen = append(seen, t)
		}
	}
	if err := errors.Join(rows.Err(), rows.Close()); err != nil {
		return nil, after, public(err)
	}
	if examined < expireRows && len(seen) < claimExpired {
		next = DueCursor{}
	}
	if len(seen) == 0 {
		return nil, next, nil
	}
	newest := seen[len(seen)-1].Next
	tasks, err = s.take(ctx, lane, channel, seen, len(seen), func(owner, ids string) (string, []any) {
		return fmt.Sprintf(sqlClaim, queueTable(lane), ids), []any{channel, newest, len(seen), owner, s.cfg.Lease.Microseconds()}
	}, func(t *Task) { t.Attempt++ })
	return tasks, next, public(err)
}

const claimExpired = 500 // of one claim

// NextDue tells when the next task of a lane and channel is due that is not yet; zero: there is none.
func (s *Store) NextDue(ctx context.Context, lane msg.Lane, channel msg.Channel) (next time.Time, err error) {
	err = s.db.GetContext(ctx, &next, fmt.Sprintf(sqlNextDue, queueTable(lane)), channel)
	if errors.Is(err, sql.ErrNoRows) || next.Year() == sentinelYear {
		return time.Time{}, nil
	}
	return next, public(err)
}

const sentinelYear = 9999 // of the rows that end the index ranges

// Waiting tells of one lane, channel and status when its earliest task is to be looked at.
type Waiting struct {
	Lane    msg.Lane    `db:"lane"`
	Channel msg.Channel `db:"channel"`
	Status  msg.State   `db:"status"`
	Next    time.Time   `db:"next_time"`
}

// sqlSurvey reads the first index entry of each lane, channel and status (a loose index scan), so its cost does not grow
// with the backlog. The rows that end the ranges lie in the year 9999.
var sqlSurvey = func() string {
	var parts []string
	for _, l := range msg.Lanes {
		parts = append(parts, fmt.Sprintf(
			"SELECT %d AS lane, channel, status, MIN(next_time) AS next_time FROM %s GROUP BY channel, status", l, queueTable(l)))
	}
	return "SELECT /* tidings:survey */ lane, channel, status, next_time FROM (" + strings.Join(parts, " UNION ALL ") + ") AS w WHERE next_time < '9000-01-01'"
}()

// Survey tells what waits in all lanes, in one statement: what is due, what will be, and whose lease or wait ends when.
func (s *Store) Survey(ctx context.Context) ([]Waiting, error) {
	var w []Waiting
	err := s.db.SelectContext(ctx, &w, sqlSurvey)
	return w, public(err)
}

// Uptime is how long the database server has been running.
func (s *Store) Uptime(ctx context.Context) (time.Duration, error) {
	var (
		name    string
		seconds int64
	)
	err := s.db.QueryRowContext(ctx, "SHOW /* tidings:uptime */ GLOBAL STATUS LIKE 'Uptime'").Scan(&name, &seconds)
	return time.Duration(seconds) * time.Second, public(err)
}
