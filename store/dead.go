package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jmoiron/sqlx"

	"tidings/internal/msg"
)

// ErrQueued says that a dead letter's task stands in its queue table, too: somebody has copied it there by hand.
var ErrQueued = errors.New("the task stands in its queue table as well")

// DeadFilter says which dead letters are meant. Zero fields mean any.
type DeadFilter struct {
	SourceID   string
	Channel    msg.Channel
	Category   string
	TemplateID string
	Reason     string    // a part of last_error, in any case
	Since      time.Time // died at or after
	Until      time.Time // died before
}

// DeadCursor is a place in the order in which tasks died.
type DeadCursor struct {
	Died    time.Time
	MsgID   uint64
	Channel msg.Channel
}

// DeadLetter is a task that waits for a person. Content and params stay where they are.
type DeadLetter struct {
	Task
	Died     time.Time
	Attempts []AttemptView // of DeadLetter only: those that did not end in success, oldest first
}

const (
	sqlDead       = `SELECT /* tidings:dead */ ` + deadView + ` FROM t_msg_dead WHERE msg_id = ? AND channel = ?`
	sqlListOfDead = `SELECT /* tidings:dead-list */ ` + deadView + ` FROM t_msg_dead FORCE INDEX (idx_died) WHERE %s
		AND (modify_time < ? OR (modify_time = ? AND (msg_id < ? OR (msg_id = ? AND channel < ?)))) ORDER BY modify_time DESC, msg_id DESC, channel DESC LIMIT ?`
	sqlDeadKeys = `SELECT /* tidings:dead-keys */ ` + deadKey + `, modify_time AS due_time FROM t_msg_dead FORCE INDEX (idx_died) WHERE %s
		AND (modify_time > ? OR (modify_time = ? AND (msg_id > ? OR (msg_id = ? AND channel > ?)))) ORDER BY modify_time, msg_id, channel LIMIT ?`
	sqlCountDead = `SELECT /* tidings:dead-count */ channel, COUNT(*) AS tasks FROM t_msg_dead WHERE %s GROUP BY channel`
	sqlOneDead   = `SELECT /* tidings:dead-one */ ` + deadKey + `, modify_time AS due_time FROM t_msg_dead WHERE msg_id = ? AND channel = ?`
	sqlLockDead  = `SELECT /* tidings:dead-lock */ ` + deadKey + `, modify_time AS due_time FROM t_msg_dead FORCE INDEX (PRIMARY) WHERE %s FOR UPDATE SKIP LOCKED`
	sqlRevive    = `INSERT /* tidings:dead-requeue */ INTO %[1]s (` + recordedTaskColumns + `) SELECT msg_id, channel, source_id, request_id, batch_id, category, priority,
		receiver, template_id, template_version, params, content, 0, attempt, attempt + ?, '', due_time, UTC_TIMESTAMP(3), GREATEST(expire_time, ?), provider, last_error,
		create_time, UTC_TIMESTAMP(3) FROM t_msg_dead FORCE INDEX (PRIMARY) WHERE %[2]s`
	sqlLeaveDead = `DELETE /* tidings:dead-leave */ task FROM (SELECT msg_id, channel FROM t_msg_dead FORCE INDEX (PRIMARY)
			WHERE %[1]s LIMIT %[2]d FOR UPDATE SKIP LOCKED) AS mine
		STRAIGHT_JOIN t_msg_dead AS task FORCE INDEX (PRIMARY) ON task.msg_id = mine.msg_id AND task.channel = mine.channel`
	deadKey  = "msg_id, channel, source_id, template_id, category, provider, template_version, priority"
	deadView = `msg_id, channel, source_id, request_id, batch_id, category, priority, receiver, template_id, template_version,
		NULL AS params, NULL AS content, status, attempt, attempt_limit, owner, due_time, next_time, expire_time, provider, last_error, create_time, modify_time`
)

// where is the filter as SQL. A template's or source's dead letters are found by going through all: there are not many, or there is
// something else to do first.
func (f *DeadFilter) where() (string, []any) {
	w, args := "modify_time >= ? AND modify_time < ?", []any{earliest(f.Since), latest(f.Until)}
	add := func(condition string, value any) { w, args = w+" AND "+condition, append(args, value) }
	if f.SourceID != "" {
		add("source_id = ?", f.SourceID)
	}
	if f.Channel != 0 {
		add("channel = ?", f.Channel)
	}
	if f.Category != "" {
		add("category = ?", f.Category)
	}
	if f.TemplateID != "" {
		add("template_id = ?", f.TemplateID)
	}
	if f.Reason != "" {
		add("LOCATE(LOWER(?), LOWER(last_error)) > 0", f.Reason)
	}
	return w, args
}

func latest(until time.Time) time.Time {
	if until.IsZero() {
		return time.Date(sentinelYear, 1, 1, 0, 0, 0, 0, time.UTC)
	}
	return until
}

// Dead finds one dead letter with its attempts. ErrNotFound.
func (s *Store) Dead(ctx context.Context, msgID uint64, channel msg.Channel) (*DeadLetter, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	found, err := s.deadLetters(ctx, sqlDead, msgID, channel)
	if err == nil && len(found) == 0 {
		err = fmt.Errorf("dead letter %s: %w", msg.TaskKey(msgID, channel), ErrNotFound)
	}
	if err != nil {
		return nil, public(err)
	}
	d := &found[0]
	err = s.db.SelectContext(ctx, &d.Attempts, sqlMessageAttempts, msgID, began(msgID))
	d.Attempts = slices.DeleteFunc(d.Attempts, func(a AttemptView) bool { return a.Channel != channel })
	return d, public(err)
}

// DeadLetters lists dead letters, those that died last first, from before a place on; zero: from the beginning.
func (s *Store) DeadLetters(ctx context.Context, f DeadFilter, before DeadCursor, limit int) ([]DeadLetter, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	where, args := f.where()
	at := latest(before.Died)
	found, err := s.deadLetters(ctx, fmt.Sprintf(sqlListOfDead, where), append(args, at, at, before.MsgID, before.MsgID, before.Channel, limit)...)
	return found, public(err)
}

func (s *Store) deadLetters(ctx context.Context, query string, args ...any) (found []DeadLetter, err error) {
	rows, err := s.db.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var d DeadLetter
		if err := scanTask(rows, &d.Task, &d.Died); err != nil {
			return nil, err
		}
		found = append(found, d)
	}
	return found, rows.Err()
}

// CountDead counts dead letters by channel.
func (s *Store) CountDead(ctx context.Context, f DeadFilter) (map[msg.Channel]int, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	where, args := f.where()
	var rows []struct {
		Channel msg.Channel `db:"channel"`
		Tasks   int         `db:"tasks"`
	}
	err := s.db.SelectContext(ctx, &rows, fmt.Sprintf(sqlCountDead, where), args...)
	counts := map[msg.Channel]int{}
	for _, r := range rows {
		counts[r.Channel] = r.Tasks
	}
	return counts, public(err)
}

// Handling says what is to become of dead letters, and who says so.
type Handling struct {
	By string
	// Policy gives a requeued task's further attempts, and how long from now on it is sent at least.
	Policy func(context.Context, *Task) (attempts int, expiry time.Duration)
	// Discard ends them as failed instead, with Reason.
	Discard bool
	Reason  string
	// Ready, when set, is asked before each transaction whether its tasks could be sent now.
	Ready func(context.Context, Route) error
	Rate  int // of many: so many a second
}

// Route is what decides how a task goes out.
type Route struct {
	Channel  msg.Channel
	Category string
	Lane     string
}

// Handled is what became of dead letters.
type Handled struct {
	Tasks int  // requeued or discarded
	Left  int  // not, for their tasks stand in their queue tables as well
	Done  bool // whether none is left that the filter means
}

const (
	handleRows = 36 // of one transaction: the audit names each of them in its 1,024 characters
	// DefaultRequeueRate and MostRequeueRate bound how many dead letters are requeued a second.
	DefaultRequeueRate = 100
	MostRequeueRate    = 10_000
)

// HandleDead requeues or discards one dead letter. ErrNotFound, ErrQueued.
func (s *Store) HandleDead(ctx context.Context, msgID uint64, channel msg.Channel, h Handling) error {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	for try := range cancelTries {
		var dead []deadTask
		if err := s.db.SelectContext(ctx, &dead, sqlOneDead, msgID, channel); err != nil {
			return public(err)
		}
		if len(dead) == 0 {
			return fmt.Errorf("dead letter %s: %w", msg.TaskKey(msgID, channel), ErrNotFound)
		}
		if err := h.inOrder(ctx, dead); err != nil {
			return err
		}
		if n, err := s.handle(ctx, dead, h); n > 0 || err != nil {
			if isDuplicate(err) {
				err = ErrQueued
			}
			return public(err)
		}
		pause(ctx, time.Duration(try)*5*time.Millisecond) // somebody has it locked
	}
	return ErrBusy
}

// HandleAllDead requeues or discards the dead letters that a filter means, those that died first first, at a rate, until none is left or ctx
// ends. It may be called again after any failure: what is done is done. Those that die again meanwhile are left to the next call,
// if the filter has an Until; so give the same to all calls.
func (s *Store) HandleAllDead(ctx context.Context, f DeadFilter, h Handling) (all Handled, err error) {
	if f.Until.IsZero() {
		f.Until = s.Now()
	}
	rate := DefaultRequeueRate
	if h.Rate > 0 {
		rate = min(h.Rate, MostRequeueRate)
	}
	size := min(handleRows, max(1, rate/10))
	for ctx.Err() == nil {
		round, locked := Handled{}, 0
		for after := (DeadCursor{Died: earliest(f.Since)}); ctx.Err() == nil; {
			began := time.Now()
			dead, err := s.deadTasks(ctx, f, after, size)
			if err != nil || len(dead) == 0 {
				if err != nil && ctx.Err() == nil {
					return all, public(err)
				}
				break
			}
			if err := h.inOrder(ctx, dead); err != nil {
				return all, err
			}
			n, left, err := s.handleSome(context.WithoutCancel(ctx), dead, h)
			round.Tasks, round.Left, locked = round.Tasks+n, round.Left+left, locked+len(dead)-n-left
			all.Tasks += n
			if err != nil {
				return all, public(err)
			}
			last := dead[len(dead)-1]
			after = DeadCursor{last.Due, last.MsgID, last.Channel}
			if n > 0 {
				pause(ctx, time.Duration(n)*time.Second/time.Duration(rate)-time.Since(began))
			}
		}
		if all.Left = round.Left; ctx.Err() == nil && round.Tasks == 0 && locked == 0 {
			all.Done = true
			return all, nil
		}
		if round.Tasks == 0 {
			pause(ctx, 100*time.Millisecond)
		}
	}
	return all, nil
}

func (h *Handling) inOrder(ctx context.Context, dead []deadTask) error {
	asked := map[Route]bool{}
	for i := range dead {
		r := Route{dead[i].Channel, dead[i].Category, dead[i].Lane}
		if h.Ready != nil && !asked[r] {
			asked[r] = true
			if err := h.Ready(ctx, r); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s *Store) deadTasks(ctx context.Context, f DeadFilter, after DeadCursor, limit int) (dead []deadTask, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	where, args := f.where()
	err = s.db.SelectContext(ctx, &dead, fmt.Sprintf(sqlDeadKeys, where), append(args, after.Died, after.Died, after.MsgID, after.MsgID, after.Channel, limit)...)
	return dead, err
}

// handleSome handles the dead letters that nobody has locked, in one transaction; where a task stands in its queue as well, it goes
// on without that.
func (s *Store) handleSome(ctx context.Context, dead []deadTask, h Handling) (done, left int, err error) {
	call, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	done, err = s.handle(call, dead, h)
	switch {
	case !isDuplicate(err):
		return done, 0, err
	case len(dead) == 1:
		s.log.Warn("a dead letter was left alone: its task stands in its queue table as well", "msg_id", dead[0].MsgID, "channel", dead[0].Channel)
		return 0, 1, nil
	}
	half := len(dead) / 2
	done1, left1, err1 := s.handleSome(ctx, dead[:half], h)
	done2, left2, err2 := s.handleSome(ctx, dead[half:], h)
	return done1 + done2, left1 + left2, errors.Join(err1, err2)
}

// deadTask is a dead letter, with what decides about its requeueing. Its Due is when it died.
type deadTask struct {
	lockedTask
	Version uint32 `db:"template_version"`
	Lane    string `db:"priority"`
}

func (d *deadTask) task() (t Task, err error) {
	t = Task{SourceID: d.SourceID, TemplateID: d.TemplateID, TemplateVersion: d.Version, Channel: d.Channel}
	if t.Lane, err = msg.ParseLane(d.Lane); err == nil {
		t.Category, err = msg.ParseCategory(d.Category)
	}
	return t, err
}

func keysOfDead(dead []deadTask) []delayKey {
	keys := make([]delayKey, len(dead))
	for i := range dead {
		keys[i] = dead[i].delayKey
	}
	return keys
}

// handle is one transaction. What is asked for policies is asked before it: in it, that would wait for a second connection.
func (s *Store) handle(ctx context.Context, seen []deadTask, h Handling) (done int, err error) {
	chances := map[deadTask]chance{}
	for i := range seen {
		if t, err := seen[i].task(); err != nil {
			return 0, err
		} else if !h.Discard {
			attempts, expiry := h.Policy(ctx, &t)
			chances[seen[i]] = chance{t.Lane, attempts, expiry}
		}
	}
	var wake map[place]bool
	err = s.tx(ctx, func(tx *sqlx.Tx) error {
		var dead []deadTask
		done, wake = 0, map[place]bool{}
		if err := tx.SelectContext(ctx, &dead, fmt.Sprintf(sqlLockDead, whereDelayKeys(keysOfDead(seen)))); err != nil || len(dead) == 0 {
			return err
		}
		if !h.Discard { // what has changed since, or died again, is left to the next look
			dead = slices.DeleteFunc(dead, func(d deadTask) bool { return chances[d] == chance{} })
			if len(dead) == 0 {
				return nil
			}
		}
		ours := make([]lockedTask, len(dead))
		for i := range dead {
			ours[i] = dead[i].lockedTask
		}
		action, counts := "dead.requeue", []rows(nil)
		if h.Discard {
			action = "dead.discard"
			if counts, err = s.end(ctx, tx, "t_msg_dead", ours, msg.Failed, "discarded by "+h.By+why(h.Reason)); err != nil {
				return err
			}
		} else if err := s.revive(ctx, tx, dead, chances, wake); err != nil {
			return err
		}
		where := whereDelayKeys(keysOf(ours))
		res, err := tx.ExecContext(ctx, fmt.Sprintf(sqlLeaveDead, where, len(ours)))
		if err := changed(res, err, len(ours)); err != nil {
			return err
		}
		if err := audit(ctx, tx, h.By, action, objects(ours), strings.TrimSpace(names(ours)+" "+h.Reason)); err != nil {
			return err
		}
		done = len(ours)
		return insertRows(ctx, tx, counts...)
	})
	if err != nil {
		return 0, err
	}
	for at := range wake {
		s.cfg.Wake(at.lane, at.channel, s.Now())
	}
	return done, nil
}

// chance is what requeued tasks get.
type chance struct {
	lane     msg.Lane
	attempts int
	expiry   time.Duration
}

// revive copies dead letters to their queue tables, each with its policy's attempts over again and its time to be sent in.
func (s *Store) revive(ctx context.Context, tx *sqlx.Tx, dead []deadTask, chances map[deadTask]chance, wake map[place]bool) error {
	groups := map[chance][]delayKey{}
	for i := range dead {
		c := chances[dead[i]]
		groups[c] = append(groups[c], dead[i].delayKey)
		wake[place{c.lane, dead[i].Channel}] = true
	}
	sorted := slices.SortedFunc(maps.Keys(groups), func(a, b chance) int {
		return cmp.Or(cmp.Compare(a.lane, b.lane), cmp.Compare(a.attempts, b.attempts), cmp.Compare(a.expiry, b.expiry))
	})
	for _, c := range sorted {
		query := fmt.Sprintf(sqlRevive, queueTable(c.lane), whereDelayKeys(groups[c]))
		res, err := tx.ExecContext(ctx, query, c.attempts, s.Now().Add(c.expiry))
		if err := changed(res, err, len(groups[c])); err != nil {
			return err
		}
	}
	return nil
}

func why(reason string) string {
	if reason == "" {
		return ""
	}
	return ": " + reason
}

// objects says for the audit what was handled.
func objects(ours []lockedTask) string {
	if len(ours) == 1 {
		return msg.TaskKey(ours[0].MsgID, ours[0].Channel)
	}
	return fmt.Sprintf("%d dead letters", len(ours))
}

// names lists the tasks for the audit.
func names(ours []lockedTask) string {
	if len(ours) == 1 {
		return ""
	}
	keys := make([]string, len(ours))
	for i, o := range ours {
		keys[i] = msg.TaskKey(o.MsgID, o.Channel)
	}
	return strings.Join(keys, " ")
}
