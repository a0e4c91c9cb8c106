package store

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jmoiron/sqlx"

	"tidings/internal/msg"
)

// Errors of Cancel and Reschedule: why nothing was changed.
var (
	ErrSending = errors.New("the message is being sent now")
	ErrEnded   = errors.New("the message has been sent, or has ended otherwise")
)

// Both change only rows that are ready, and lock them before they do: a task that is claimed at the same moment is either claimed or
// changed. What a statement touches is reached by joins from the locked rows, for the reason that settling has.
const (
	sqlLockReady = `SELECT /* tidings:cancel-lock */ msg_id, channel, due_time, source_id, template_id, category, provider FROM %s FORCE INDEX (PRIMARY)
		WHERE (%s) AND status = 0 AND attempt <= ? FOR UPDATE SKIP LOCKED`
	// Params and content as the record keeps them, the table, its rows.
	sqlEnd = `INSERT /* tidings:end-record */ INTO t_msg_record (` + recordColumns + `) SELECT msg_id, channel, source_id, request_id, batch_id,
		category, priority, receiver, template_id, template_version, %[1]s, %[2]s, ?, attempt, attempt_limit, '', due_time, UTC_TIMESTAMP(3), expire_time,
		provider, ?, create_time, UTC_TIMESTAMP(3), ?, '', 0 FROM %[3]s AS task FORCE INDEX (PRIMARY) WHERE %[4]s`
	sqlLeaveReady = `DELETE /* tidings:cancel-delete */ task FROM (SELECT msg_id, channel FROM %[1]s FORCE INDEX (PRIMARY)
			WHERE (%[2]s) AND status = 0 LIMIT %[3]d FOR UPDATE SKIP LOCKED) AS mine
		STRAIGHT_JOIN %[1]s AS task FORCE INDEX (PRIMARY) ON task.msg_id = mine.msg_id AND task.channel = mine.channel`
	sqlTombstone = `UPDATE /* tidings:cancel-mark */ (SELECT msg_id, channel FROM %[1]s FORCE INDEX (PRIMARY)
			WHERE (%[2]s) AND status = 0 LIMIT %[3]d FOR UPDATE SKIP LOCKED) AS mine
		STRAIGHT_JOIN %[1]s AS task FORCE INDEX (PRIMARY) ON task.msg_id = mine.msg_id AND task.channel = mine.channel
		SET task.status = 9, task.owner = ?, task.params = NULL, task.content = NULL, task.modify_time = UTC_TIMESTAMP(3)`
	// INSERT into a queue table, REPLACE into a delay table, where a tombstone of the task may stand.
	sqlPutAt = `%[1]s /* tidings:reschedule-put */ INTO %[2]s (` + recordedTaskColumns + `) SELECT msg_id, channel, source_id, request_id, batch_id, category, priority,
		receiver, template_id, template_version, params, content, 0, attempt, attempt_limit, '', ?, ?, ?, provider, last_error, create_time, UTC_TIMESTAMP(3)
		FROM %[3]s FORCE INDEX (PRIMARY) WHERE (%[4]s) AND status = 0`
	sqlMoveTime = `UPDATE /* tidings:reschedule-here */ (SELECT msg_id, channel FROM %[1]s FORCE INDEX (PRIMARY)
			WHERE (%[2]s) AND status = 0 LIMIT %[3]d FOR UPDATE SKIP LOCKED) AS mine
		STRAIGHT_JOIN %[1]s AS task FORCE INDEX (PRIMARY) ON task.msg_id = mine.msg_id AND task.channel = mine.channel
		SET task.due_time = ?, task.next_time = ?, task.expire_time = ?, task.modify_time = UTC_TIMESTAMP(3)`
	sqlKeepKey = `UPDATE /* tidings:reschedule-key */ t_idempotency SET expire_time = GREATEST(expire_time, ?) WHERE source_id = ? AND request_hash = ?`

	// sqlCampaignReady finds a campaign's tasks that are ready, by ranges of the primary key.
	sqlCampaignReady = `SELECT /* tidings:cancel-batch */ msg_id, channel, due_time FROM %s FORCE INDEX (PRIMARY)
		WHERE msg_id > ? AND msg_id <= ? AND batch_id = ? AND source_id = ? AND status = 0 ORDER BY msg_id, channel LIMIT ?`

	anyAttempt  = 1 << 15
	cancelRows  = 500
	cancelTries = 20
)

// Cancel ends a message's tasks that wait, and tells how many it ended, with the message as it stands then. Tasks that are being
// sent, or have ended, stay as they are. ErrSending or ErrEnded: none waited; ErrNotFound. by is noted in the record: who did it.
func (s *Store) Cancel(ctx context.Context, msgID uint64, by string) (cancelled int, m *MessageView, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	for try := range cancelTries {
		if m, err = s.Message(ctx, msgID); err != nil {
			return cancelled, nil, err
		}
		waiting := m.waiting(anyAttempt)
		if len(waiting) == 0 {
			break
		}
		for table, keys := range waiting {
			n, err := s.cancelAt(ctx, table, keys, by)
			if cancelled += n; err != nil && number(err) != erNoSuchTable {
				return cancelled, nil, public(err)
			}
		}
		if try > 0 { // somebody has a lock, or moves the task
			pause(ctx, time.Duration(try)*5*time.Millisecond)
		}
	}
	if len(m.waiting(anyAttempt)) > 0 {
		return cancelled, m, ErrBusy
	}
	if cancelled > 0 || slices.ContainsFunc(m.Tasks, func(t TaskView) bool { return t.Status == msg.Cancelled }) {
		return cancelled, m, nil
	}
	return 0, m, m.whyNot()
}

// waiting finds the tasks that are ready and have had so many attempts at most, by the table that they stand in.
func (m *MessageView) waiting(mostAttempts int) map[string][]delayKey {
	found := map[string][]delayKey{}
	for i := range m.Tasks {
		if t := &m.Tasks[i]; t.Status == msg.Ready && t.Attempt <= mostAttempts {
			found[t.Place] = append(found[t.Place], delayKey{MsgID: t.MsgID, Channel: t.Channel, Due: t.Due})
		}
	}
	return found
}

func (m *MessageView) whyNot() error {
	if m.Status == "sending" {
		return ErrSending
	}
	return ErrEnded
}

// cancelAt moves tasks of a table to the record as cancelled, as far as they are ready and nobody has them locked.
func (s *Store) cancelAt(ctx context.Context, table string, keys []delayKey, by string) (n int, err error) {
	err = s.tx(ctx, func(tx *sqlx.Tx) error {
		n = 0
		ours, err := lockReady(ctx, tx, table, keys, anyAttempt)
		if err != nil || len(ours) == 0 {
			return err
		}
		keys := keysOf(ours)
		counts, err := s.end(ctx, tx, table, ours, msg.Cancelled, "cancelled by "+by)
		if err != nil {
			return err
		}
		if err := s.leave(ctx, tx, table, whereDelayKeys(keys), len(keys)); err != nil {
			return err
		}
		if err := insertRows(ctx, tx, counts...); err != nil {
			return err
		}
		n = len(ours)
		return nil
	})
	return n, err
}

// lockedTask is a task whose row is locked, with what it is counted by.
type lockedTask struct {
	delayKey
	SourceID   string `db:"source_id"`
	TemplateID string `db:"template_id"`
	Category   string `db:"category"`
	Provider   string `db:"provider"`
}

func lockReady(ctx context.Context, tx *sqlx.Tx, table string, keys []delayKey, mostAttempts int) (ours []lockedTask, err error) {
	err = tx.SelectContext(ctx, &ours, fmt.Sprintf(sqlLockReady, table, whereDelayKeys(keys)), mostAttempts)
	return ours, err
}

func keysOf(tasks []lockedTask) []delayKey {
	keys := make([]delayKey, len(tasks))
	for i := range tasks {
		keys[i] = tasks[i].delayKey
	}
	return keys
}

// end records locked tasks of a table as ended by a person, and returns the figures to add at the end of the transaction. They are
// still to leave their table.
func (s *Store) end(ctx context.Context, tx *sqlx.Tx, table string, ours []lockedTask, to msg.State, why string) (counts []rows, err error) {
	now := s.Now().Truncate(time.Millisecond)
	query := fmt.Sprintf(sqlEnd, blanked("task", "params"), blanked("task", "content"), table, whereDelayKeys(keysOf(ours)))
	res, err := tx.ExecContext(ctx, query, to, clip(why, 512), now)
	if err := changed(res, err, len(ours)); err != nil {
		return nil, err
	}
	sum := newStats()
	for _, o := range ours {
		category, err := msg.ParseCategory(o.Category)
		if err != nil {
			return nil, err
		}
		sum.add(&Task{SourceID: o.SourceID, TemplateID: o.TemplateID, Channel: o.Channel, Category: category}, to, o.Provider, now, 0)
	}
	return sum.rows(s.Node()), nil
}

// leave takes locked tasks out of a table: rows of the ring become tombstones, which go with their table.
func (s *Store) leave(ctx context.Context, tx *sqlx.Tx, table, where string, n int) error {
	query, args := sqlLeaveReady, []any(nil)
	if strings.HasPrefix(table, "t_msg_delay_") && table != farTable {
		query, args = sqlTombstone, []any{s.NewOwner()}
	}
	res, err := tx.ExecContext(ctx, fmt.Sprintf(query, table, where, n), args...)
	return changed(res, err, n)
}

// CancelBatch ends the tasks of a campaign that wait, until none does or ctx ends; it tells how many it ended. What is accepted
// for the campaign later is sent. ErrNotFound.
func (s *Store) CancelBatch(ctx context.Context, source, batchID, by string) (cancelled int, err error) {
	c, _, err := s.Campaign(ctx, source, batchID)
	if err != nil {
		return 0, err
	}
	for ctx.Err() == nil { // tasks move from table to table in one direction, unless they are rescheduled: then another round finds them
		n, held, err := s.cancelRound(ctx, c, by)
		cancelled += n
		if err != nil {
			return cancelled, public(err)
		}
		if n == 0 && held == 0 {
			return cancelled, nil
		}
		if n == 0 {
			pause(ctx, 100*time.Millisecond)
		}
	}
	return cancelled, fmt.Errorf("%w: %w", ErrBusy, ctx.Err())
}

// cancelRound goes through all tables once. held tasks were ready, and locked by somebody.
func (s *Store) cancelRound(ctx context.Context, c Campaign, by string) (cancelled, held int, err error) {
	if err := s.ring.refresh(ctx); err != nil {
		return 0, 0, err
	}
	err = s.onRing(ctx, func(r *ring) error {
		held = 0
		tables := slices.Clone(r.tables) // what is far first, then the ring, then the lanes: the way that tasks go
		for _, l := range msg.Lanes {
			tables = append(tables, queueTable(l))
		}
		for _, table := range tables {
			for after := c.First - 1; ctx.Err() == nil; {
				var keys []delayKey
				if err := s.db.SelectContext(ctx, &keys, fmt.Sprintf(sqlCampaignReady, table), after, c.Last, c.BatchID, c.SourceID, cancelRows); err != nil {
					return err
				}
				if len(keys) == 0 {
					break
				}
				n, err := s.cancelAt(ctx, table, keys, by)
				cancelled, held = cancelled+n, held+len(keys)-n
				if err != nil {
					return err
				}
				after = keys[len(keys)-1].MsgID // should it have more channels, the next round finds them
			}
		}
		return nil
	})
	return cancelled, held, err
}

// Reschedule gives a message another due time, as long as it has not been tried. Its time to expire moves along, unless expire is
// set. ErrSending, ErrEnded, ErrNotFound as for Cancel.
func (s *Store) Reschedule(ctx context.Context, msgID uint64, due, expire time.Time) (*MessageView, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	for try := range cancelTries {
		m, err := s.Message(ctx, msgID)
		if err != nil {
			return nil, err
		}
		waiting := m.waiting(0)
		if slices.ContainsFunc(m.Tasks, func(t TaskView) bool { return t.Status != msg.Skipped && (t.Status != msg.Ready || t.Attempt > 0) }) {
			return m, m.whyNot()
		}
		if len(waiting) == 0 {
			return m, ErrEnded
		}
		done, err := s.rescheduleAll(ctx, m, waiting, due, expire)
		if err != nil && number(err) != erNoSuchTable {
			return nil, public(err)
		}
		if done {
			return s.Message(ctx, msgID)
		}
		if number(err) == erNoSuchTable {
			if err := s.ring.refresh(ctx); err != nil {
				return nil, public(err)
			}
		}
		if try > 0 {
			pause(ctx, time.Duration(try)*5*time.Millisecond)
		}
	}
	return nil, ErrBusy
}

// rescheduleAll moves a message's tasks in one transaction. Not done: one of them was not to be had.
func (s *Store) rescheduleAll(ctx context.Context, m *MessageView, waiting map[string][]delayKey, due, expire time.Time) (done bool, err error) {
	first := &m.Tasks[slices.IndexFunc(m.Tasks, func(t TaskView) bool { return t.Status == msg.Ready })]
	if expire.IsZero() {
		expire = due.Add(first.Expire.Sub(first.Due))
	}
	r, _ := s.ring.get(ctx)
	now := s.Now()
	to := s.destined(r, due, now, s.turns.Add(1))
	next := due
	if next.Before(now) {
		next = now
	}
	err = s.tx(ctx, func(tx *sqlx.Tx) error {
		done = false
		if first.RequestID != "" {
			key := sha256.Sum256([]byte(first.RequestID))
			if _, err := tx.ExecContext(ctx, sqlKeepKey, next.Add(s.cfg.IdempotencyTTL), first.SourceID, key[:]); err != nil {
				return err
			}
		}
		for _, from := range inLockOrder(waiting) {
			keys := waiting[from]
			ours, err := lockReady(ctx, tx, from, keys, 0)
			if err != nil {
				return err
			}
			if len(ours) < len(keys) {
				return errNotHad
			}
			if err := s.rescheduleAt(ctx, tx, from, to, keysOf(ours), first.Lane, due, next, expire); err != nil {
				return err
			}
		}
		done = true
		return nil
	})
	if errors.Is(err, errNotHad) {
		return false, nil
	}
	if done && err == nil && to == "" {
		for i := range m.Tasks {
			s.cfg.Wake(first.Lane, m.Tasks[i].Channel, next)
		}
	}
	return done && err == nil, err
}

var errNotHad = errors.New("a task has moved, or is locked")

// inLockOrder sorts tables as every transaction takes them: lanes from high to low, then the delay tables by name.
func inLockOrder(tables map[string][]delayKey) (names []string) {
	for _, l := range msg.Lanes {
		if _, ok := tables[queueTable(l)]; ok {
			names = append(names, queueTable(l))
		}
	}
	var others []string
	for name := range tables {
		if !slices.Contains(names, name) {
			others = append(others, name)
		}
	}
	slices.Sort(others)
	return append(names, others...)
}

func (s *Store) rescheduleAt(ctx context.Context, tx *sqlx.Tx, from, to string, ours []delayKey, lane msg.Lane, due, next, expire time.Time) error {
	where, verb := whereDelayKeys(ours), "REPLACE"
	if to == "" {
		to, verb = queueTable(lane), "INSERT"
	}
	if to == from {
		res, err := tx.ExecContext(ctx, fmt.Sprintf(sqlMoveTime, from, where, len(ours)), due, next, expire)
		_, err = affected(res, err) // the same time again changes nothing
		return err
	}
	n, err := affected(tx.ExecContext(ctx, fmt.Sprintf(sqlPutAt, verb, to, from, where), due, next, expire))
	if err != nil || n < len(ours) { // one that replaces a tombstone counts twice
		return fmt.Errorf("%d tasks arrived where %d are ours: %w", n, len(ours), err)
	}
	return s.leave(ctx, tx, from, where, len(ours))
}
