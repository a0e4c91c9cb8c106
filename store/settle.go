package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jmoiron/sqlx"

	"tidings/internal/msg"
)

// Outcome is what becomes of a claimed task.
type Outcome struct {
	Task  Task      // by its key, lane and owner: what else its row holds goes with it
	State msg.State // Ready: again at Next; Unknown: wait until Next; Dead: a dead letter; else the task has ended
	Next  time.Time // for Ready and Unknown
	// Uncounted takes the claim's attempt back: the provider was not asked, or was busy.
	Uncounted bool
	// AlreadyRecorded drops the task: its record exists. State is ignored.
	AlreadyRecorded bool
	Error           string // the row's last_error: what went wrong, without addresses or content
	Provider        string
	ProviderMsgID   string
	Latency         time.Duration // of the provider's answer
	Finished        time.Time     // by Store.Now
	Attempt         *Attempt      // for the attempt log; nil: none (success, or nothing was tried)
	Alarm           string        // for Dead: which alarm tells of it, AlarmNow or AlarmDaily; empty: none
}

// Attempt is a try that did not end in success.
type Attempt struct {
	Outcome string // temporary, permanent or unknown
	Code    string
	Text    string
}

func (o *Outcome) attempts() int {
	if o.Uncounted && o.Task.Attempt > 0 {
		return o.Task.Attempt - 1
	}
	return o.Task.Attempt
}

// isRecorded tells whether the task goes to the record.
func (o *Outcome) isRecorded() bool { return o.State.Ended() && !o.AlreadyRecorded }

func (o *Outcome) staysInQueue() bool {
	return !o.AlreadyRecorded && (o.State == msg.Ready || o.State == msg.Unknown)
}

// Settled is what Settle did with an outcome; 0: nothing.
type Settled uint8

// The verdicts.
const (
	Done    Settled = iota + 1 // written
	Lost                       // the row is gone or somebody else's: left alone
	Blocked                    // somebody holds the row's lock: settle it again later
)

// No statement waits for a row that is none of its business. On a small table the optimizer would rather walk all of it than
// look keys up, FORCE INDEX or not, and a DELETE locks what it walks over. So the walk is left to an inner SELECT that skips
// locked rows, and the DELETE reaches its rows by joining from there.
const (
	sqlLockOwned = "SELECT /* tidings:settle-lock */ msg_id, channel, owner FROM %s FORCE INDEX (PRIMARY) WHERE %s FOR UPDATE SKIP LOCKED"
	sqlPeekOwned = "SELECT /* tidings:settle-peek */ msg_id, channel, owner FROM %s FORCE INDEX (PRIMARY) WHERE %s"
	sqlDelete    = "DELETE /* tidings:settle-delete */ task FROM (SELECT msg_id, channel FROM %[1]s FORCE INDEX (PRIMARY) WHERE %[2]s LIMIT %[3]d FOR UPDATE SKIP LOCKED) AS mine " +
		"STRAIGHT_JOIN %[1]s AS task FORCE INDEX (PRIMARY) ON task.msg_id = mine.msg_id AND task.channel = mine.channel"
	// A task leaves its queue by a copy within the server: sending and parsing what its row holds a second time took as long as
	// writing it. n is a row's place among the ids, which picks what differs from row to row.
	sqlMove = "INSERT /* tidings:settle-move */ INTO %[1]s (%[2]s) SELECT %[3]s FROM (SELECT msg_id, channel, INTERVAL(msg_id, %[4]s) AS n " +
		"FROM %[5]s FORCE INDEX (PRIMARY) WHERE %[6]s LIMIT %[7]d FOR UPDATE SKIP LOCKED) AS mine " +
		"STRAIGHT_JOIN %[5]s AS task FORCE INDEX (PRIMARY) ON task.msg_id = mine.msg_id AND task.channel = mine.channel"
	recordColumns = taskColumns + ", modify_time, finish_time, provider_msg_id, latency_ms"
	deadColumns   = taskColumns + ", modify_time"
	sqlAttempts   = "INSERT /* tidings:settle-attempts */ INTO t_msg_attempt (msg_id, channel, attempt, outcome, provider, code, text, latency_ms, node, create_time) VALUES "
	// A dead letter that was copied back to the queue by hand and died again finds its earlier row.
	sqlDeadAgain = " ON DUPLICATE KEY UPDATE attempt = VALUES(attempt), attempt_limit = VALUES(attempt_limit), provider = VALUES(provider), " +
		"last_error = VALUES(last_error), modify_time = VALUES(modify_time)"
	sqlPutBack = "UPDATE /* tidings:settle-put-back */ (%[2]s) AS new STRAIGHT_JOIN %[1]s AS task FORCE INDEX (PRIMARY) " +
		"ON task.msg_id = new.msg_id AND task.channel = new.channel SET task.status = new.status, task.attempt = new.attempt, task.owner = '', " +
		"task.next_time = new.next_time, task.provider = new.provider, task.last_error = new.last_error, task.modify_time = UTC_TIMESTAMP(3)"
	sqlPutBackFirst = "SELECT ? AS msg_id, ? AS channel, ? AS status, ? AS attempt, ? AS next_time, ? AS provider, ? AS last_error"
	sqlPutBackNext  = " UNION ALL SELECT ?, ?, ?, ?, ?, ?, ?"
)

// Settle writes the outcomes of claimed tasks, and tells for each what became of it. A row whose owner has changed is not
// touched. With an error, the outcomes with a verdict of 0 were not written, and may be settled again; the others stand. A
// lock that somebody holds on one row holds up that row only.
func (s *Store) Settle(ctx context.Context, outcomes []Outcome) (verdicts []Settled, failed error) {
	verdicts = make([]Settled, len(outcomes))
	order := make([]int, len(outcomes))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int {
		x, y := &outcomes[a].Task, &outcomes[b].Task
		return cmp.Or(cmp.Compare(x.Lane, y.Lane), cmp.Compare(x.MsgID, y.MsgID), cmp.Compare(x.Channel, y.Channel))
	})
	var ended, others []int
	for _, i := range order {
		if outcomes[i].isRecorded() {
			ended = append(ended, i)
		} else {
			others = append(others, i)
		}
	}
	if len(ended) > 0 {
		if err := s.settleEnded(ctx, outcomes, ended); err == nil {
			for _, i := range ended {
				verdicts[i] = Done
			}
		} else if isLost(err) || ctx.Err() != nil {
			return verdicts, fmt.Errorf("settle: %w", public(err))
		} else { // not all rows are ours and free, or one cannot be written: row by row it shows which
			others = order
		}
	}
	for _, lane := range msg.Lanes {
		var own []int
		for _, i := range others {
			if outcomes[i].Task.Lane == lane {
				own = append(own, i)
			}
		}
		if len(own) == 0 {
			continue
		}
		if err := s.settleLane(ctx, lane, outcomes, own, verdicts); err != nil {
			failed = errors.Join(failed, fmt.Errorf("settle %s: %w", lane, public(err)))
		}
	}
	return verdicts, failed
}

// settleEnded moves tasks that have ended to the record, all lanes in one packet, if every row is ours and nobody has it
// locked. Else nothing is written.
func (s *Store) settleEnded(ctx context.Context, outcomes []Outcome, own []int) error {
	sum, owing := statsOf(outcomes, own), s.figures.owing()
	err := s.again(ctx, func() error {
		var p packet
		var attempts []int
		for _, part := range byPlace(outcomes, own) {
			query, args := moveStatement(toRecord, outcomes, part)
			p.add(query, args...)
			p.expect(len(part))
			p.add(deleteStatement(outcomes, part))
			p.expect(len(part))
		}
		for _, i := range own {
			if outcomes[i].Attempt != nil {
				attempts = append(attempts, i)
			}
		}
		if len(attempts) > 0 {
			p.addRows(s.attemptRows(outcomes, attempts))
		}
		if !owing {
			p.addRows(sum.rows(s.Node())...)
		}
		return s.run(ctx, &p)
	})
	switch {
	case err == nil && owing:
		s.owe(sum)
	case isLockWait(err): // all else is passed over where it is locked
		s.owe(newStats())
	}
	return err
}

// byPlace divides outcomes, sorted by lane and id, by the place that their tasks stand in.
func byPlace(outcomes []Outcome, own []int) (parts [][]int) {
	for _, lane := range msg.Lanes {
		byChannel := map[msg.Channel][]int{}
		for _, i := range own {
			if t := &outcomes[i].Task; t.Lane == lane {
				byChannel[t.Channel] = append(byChannel[t.Channel], i)
			}
		}
		for _, c := range msg.Channels {
			if part := byChannel[c]; len(part) > 0 {
				parts = append(parts, part)
			}
		}
	}
	return parts
}

func deleteStatement(outcomes []Outcome, part []int) string {
	return fmt.Sprintf(sqlDelete, queueTable(outcomes[part[0]].Task.Lane), whereOwned(outcomes, part), len(part))
}

// destination is a table that tasks leave their queue for.
type destination bool

const (
	toRecord destination = true
	toDead   destination = false
)

// moveStatement copies tasks of one place, as far as they are ours and nobody has them locked.
func moveStatement(to destination, outcomes []Outcome, part []int) (string, []any) {
	lane := outcomes[part[0]].Task.Lane
	p := picker{outcomes: outcomes, part: part}
	table, columns, end := "t_msg_dead", deadColumns, sqlDeadAgain
	p.sql("task.msg_id, task.channel, task.source_id, task.request_id, task.batch_id, task.category, '" + lane.String() + "', task.receiver, " +
		"task.template_id, task.template_version, ")
	if to == toRecord {
		p.sql(blanked("task", "params") + ", " + blanked("task", "content") + ", ")
	} else { // it may be sent again
		p.sql("task.params, task.content, ")
	}
	p.number(func(o *Outcome) int { return int(o.State) })
	p.sql(", ")
	p.number((*Outcome).attempts)
	p.sql(", task.attempt_limit, '', task.due_time, UTC_TIMESTAMP(3), task.expire_time, ")
	p.value(func(o *Outcome) any { return clip(o.Provider, 64) })
	p.sql(", ")
	p.value(func(o *Outcome) any { return clip(o.Error, 512) })
	p.sql(", task.create_time, UTC_TIMESTAMP(3)")
	if to == toRecord {
		table, columns, end = "t_msg_record", recordColumns, ""
		p.sql(", ")
		p.value(func(o *Outcome) any { return o.Finished.Truncate(time.Millisecond) }) // MySQL would round it
		p.sql(", ")
		p.value(func(o *Outcome) any { return clip(o.ProviderMsgID, 255) })
		p.sql(", ")
		p.number(func(o *Outcome) int { return int(o.Latency.Milliseconds()) })
	}
	ids := make([]uint64, len(part))
	for k, i := range part {
		ids[k] = outcomes[i].Task.MsgID
	}
	return fmt.Sprintf(sqlMove, table, columns, p.b.String(), joinIDs(ids), queueTable(lane), whereOwned(outcomes, part), len(part)) + end, p.args
}

// picker writes expressions that give each row of a part its value: one value where all rows share it, else a choice by n.
type picker struct {
	outcomes []Outcome
	part     []int
	b        strings.Builder
	args     []any
}

func (p *picker) sql(text string) { p.b.WriteString(text) }

func (p *picker) number(of func(*Outcome) int) {
	p.pick(func(o *Outcome) any { return of(o) }, func(v any) { p.b.WriteString(strconv.Itoa(v.(int))) })
}

func (p *picker) value(of func(*Outcome) any) {
	p.pick(of, func(v any) {
		p.b.WriteByte('?')
		p.args = append(p.args, v)
	})
}

func (p *picker) pick(of func(*Outcome) any, write func(any)) {
	first := of(&p.outcomes[p.part[0]])
	if !slices.ContainsFunc(p.part, func(i int) bool { return of(&p.outcomes[i]) != first }) {
		write(first)
		return
	}
	p.sql("ELT(mine.n")
	for _, i := range p.part {
		p.sql(", ")
		write(of(&p.outcomes[i]))
	}
	p.sql(")")
}

// whereOwned names rows by primary key and owner, a list of ids for each claim.
func whereOwned(outcomes []Outcome, own []int) string {
	type claim struct {
		channel msg.Channel
		owner   string
	}
	var order []claim
	ids := map[claim][]uint64{}
	for _, i := range own {
		t := &outcomes[i].Task
		c := claim{t.Channel, t.Owner}
		if ids[c] == nil {
			order = append(order, c)
		}
		ids[c] = append(ids[c], t.MsgID)
	}
	var parts []string
	for _, c := range order { // an owner is made of digits and dots, by us
		parts = append(parts, fmt.Sprintf("(channel = %d AND owner = '%s' AND msg_id IN (%s))", c.channel, c.owner, joinIDs(ids[c])))
	}
	return strings.Join(parts, " OR ")
}

// settleLane writes the outcomes with the given indexes. One bad row must not hold up a batch, so a batch that the server
// refuses is cut in two until the bad row stands alone.
func (s *Store) settleLane(ctx context.Context, lane msg.Lane, outcomes []Outcome, own []int, verdicts []Settled) error {
	var held map[taskID]bool
	owing := s.figures.owing()
	err := s.tx(ctx, func(tx *sqlx.Tx) (err error) {
		// Locks the rows as far as nobody else has, and finds those that are still ours.
		if held, err = owned(ctx, tx, sqlLockOwned, lane, outcomes, own); err != nil {
			return err
		}
		return s.write(ctx, tx, lane, outcomes, own, held, owing)
	})
	switch {
	case err == nil && owing:
		s.owe(statsOf(outcomes, slices.DeleteFunc(slices.Clone(own), func(i int) bool { return !held[idOf(&outcomes[i].Task)] })))
	case isLockWait(err) && !owing:
		s.owe(newStats())
		return s.settleLane(ctx, lane, outcomes, own, verdicts)
	}
	if err != nil {
		if len(own) == 1 || isLost(err) || mustStartAgain(err) || ctx.Err() != nil {
			return err
		}
		err = s.settleLane(ctx, lane, outcomes, own[:len(own)/2], verdicts)
		if other := s.settleLane(ctx, lane, outcomes, own[len(own)/2:], verdicts); err == nil {
			err = other
		}
		return err
	}
	var missing []int
	for _, i := range own {
		if held[idOf(&outcomes[i].Task)] {
			verdicts[i] = Done
		} else {
			missing = append(missing, i)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	return s.judgeMissing(ctx, lane, outcomes, missing, verdicts)
}

// judgeMissing tells rows that are no longer ours from rows that are, but under somebody's lock.
func (s *Store) judgeMissing(ctx context.Context, lane msg.Lane, outcomes []Outcome, missing []int, verdicts []Settled) error {
	ours, err := owned(ctx, s.db, sqlPeekOwned, lane, outcomes, missing)
	if err != nil {
		return err
	}
	for _, i := range missing {
		verdicts[i] = Lost
		if ours[idOf(&outcomes[i].Task)] {
			verdicts[i] = Blocked
		}
	}
	return nil
}

// taskID names a claimed task: a row with another owner is another task.
type taskID struct {
	msgID   uint64
	channel msg.Channel
	owner   string
}

func idOf(t *Task) taskID { return taskID{t.MsgID, t.Channel, t.Owner} }

// owned finds the rows that are still ours, by a statement that locks them or not.
func owned(ctx context.Context, q sqlx.QueryerContext, query string, lane msg.Lane, outcomes []Outcome, own []int) (map[taskID]bool, error) {
	rows, err := q.QueryContext(ctx, fmt.Sprintf(query, queueTable(lane), whereKeys(outcomes, own)))
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	found := make(map[taskID]bool, len(own))
	for rows.Next() {
		var id taskID
		if err := rows.Scan(&id.msgID, &id.channel, &id.owner); err != nil {
			return nil, err
		}
		found[id] = true
	}
	if err := rows.Err(); err != nil {
		return nil, err
	}
	ours := make(map[taskID]bool, len(own))
	for _, i := range own {
		if id := idOf(&outcomes[i].Task); found[id] {
			ours[id] = true
		}
	}
	return ours, nil
}

// whereKeys names rows by primary key, a list of ids for each channel: both servers turn that into key look-ups.
func whereKeys(outcomes []Outcome, own []int) string {
	byChannel := map[msg.Channel][]Task{}
	for _, i := range own {
		t := &outcomes[i].Task
		byChannel[t.Channel] = append(byChannel[t.Channel], Task{MsgID: t.MsgID})
	}
	var parts []string
	for _, c := range msg.Channels {
		if tasks := byChannel[c]; len(tasks) > 0 {
			parts = append(parts, fmt.Sprintf("(channel = %d AND msg_id IN (%s))", c, idList(tasks)))
		}
	}
	return strings.Join(parts, " OR ")
}

// write does what the outcomes ask for to the rows that are locked and ours.
func (s *Store) write(ctx context.Context, tx *sqlx.Tx, lane msg.Lane, outcomes []Outcome, own []int, held map[taskID]bool, owing bool) error {
	var leaving, ended, dead, back, attempts, ours []int
	for _, i := range own {
		o := &outcomes[i]
		if !held[idOf(&o.Task)] {
			continue
		}
		ours = append(ours, i)
		switch {
		case o.staysInQueue():
			back = append(back, i)
		case o.AlreadyRecorded:
			leaving = append(leaving, i)
		case o.State == msg.Dead:
			leaving, dead = append(leaving, i), append(dead, i)
		default:
			leaving, ended = append(leaving, i), append(ended, i)
		}
		if o.Attempt != nil && !o.AlreadyRecorded {
			attempts = append(attempts, i)
		}
	}
	for _, step := range []func() error{
		func() error { return move(ctx, tx, toRecord, outcomes, ended) },
		func() error { return move(ctx, tx, toDead, outcomes, dead) },
		func() error { return deleteRows(ctx, tx, lane, outcomes, leaving) },
		func() error { return putBack(ctx, tx, lane, outcomes, back) },
		func() error { return insertRows(ctx, tx, s.attemptRows(outcomes, attempts)) },
		func() error { return insertRows(ctx, tx, alarmRows(outcomes, dead)) },
		func() error {
			if owing {
				return nil
			}
			return insertRows(ctx, tx, statsOf(outcomes, ours).rows(s.Node())...)
		},
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

func move(ctx context.Context, tx *sqlx.Tx, to destination, outcomes []Outcome, own []int) error {
	for _, part := range byPlace(outcomes, own) {
		query, args := moveStatement(to, outcomes, part)
		res, err := tx.ExecContext(ctx, query, args...)
		if err != nil {
			return err
		}
		// A dead letter that is there already counts twice.
		if n, err := res.RowsAffected(); err != nil || n < int64(len(part)) || (to == toRecord && n > int64(len(part))) {
			return fmt.Errorf("%d rows copied where %d are ours: %w", n, len(part), err)
		}
	}
	return nil
}

func deleteRows(ctx context.Context, tx *sqlx.Tx, lane msg.Lane, outcomes []Outcome, own []int) error {
	if len(own) == 0 {
		return nil
	}
	res, err := tx.ExecContext(ctx, fmt.Sprintf(sqlDelete, queueTable(lane), whereKeys(outcomes, own), len(own)))
	return changed(res, err, len(own))
}

func putBack(ctx context.Context, tx *sqlx.Tx, lane msg.Lane, outcomes []Outcome, own []int) error {
	if len(own) == 0 {
		return nil
	}
	args := make([]any, 0, 7*len(own))
	for _, i := range own {
		o := &outcomes[i]
		args = append(args, o.Task.MsgID, o.Task.Channel, o.State, o.attempts(), o.Next, clip(o.Provider, 64), clip(o.Error, 512))
	}
	rows := sqlPutBackFirst + strings.Repeat(sqlPutBackNext, len(own)-1)
	res, err := tx.ExecContext(ctx, fmt.Sprintf(sqlPutBack, queueTable(lane), rows), args...)
	return changed(res, err, len(own))
}

// changed checks a guard: the rows are locked, so another count means that this code is wrong, and nothing may be committed.
func changed(res interface{ RowsAffected() (int64, error) }, err error, want int) error {
	if err != nil {
		return err
	}
	if n, err := res.RowsAffected(); err != nil || n != int64(want) {
		return fmt.Errorf("%d rows changed where %d are ours: %w", n, want, err)
	}
	return nil
}

// rows are values for a multi-row INSERT.
type rows struct {
	query, group, end string
	n                 int
	args              []any
}

func (r rows) text() string {
	var b strings.Builder
	b.WriteString(r.query)
	values(&b, r.group, r.n)
	b.WriteString(r.end)
	return b.String()
}

func (p *packet) addRows(all ...rows) {
	for _, r := range all {
		p.add(r.text(), r.args...)
	}
}

func (s *Store) attemptRows(outcomes []Outcome, own []int) rows {
	r := rows{query: sqlAttempts, group: "(?,?,?,?,?,?,?,?,?,?)", n: len(own)}
	node := s.Node()
	for _, i := range own {
		o := &outcomes[i]
		r.args = append(r.args, o.Task.MsgID, o.Task.Channel, o.Task.Attempt, o.Attempt.Outcome, clip(o.Provider, 64), clip(o.Attempt.Code, 64),
			clip(o.Attempt.Text, 512), o.Latency.Milliseconds(), node, o.Finished)
	}
	return r
}

// statsOf counts tasks that are recorded, and failed attempts.
func statsOf(outcomes []Outcome, own []int) stats {
	sum := newStats()
	for _, i := range own {
		o := &outcomes[i]
		if o.isRecorded() {
			sum.add(&o.Task, o.State, o.Provider, o.Finished, o.Latency)
		}
		if o.Attempt != nil && !o.AlreadyRecorded {
			sum.addAttempt(o)
		}
	}
	return sum
}

// alarmRows are the dead letters that people are to be told of.
func alarmRows(outcomes []Outcome, dead []int) rows {
	r := rows{query: sqlAlarms, group: "(?,?,?,UTC_TIMESTAMP(3))"}
	for _, i := range dead {
		if o := &outcomes[i]; o.Alarm != "" {
			r.n++
			r.args = append(r.args, o.Alarm, o.Task.MsgID, o.Task.Channel)
		}
	}
	return r
}

func insertRows(ctx context.Context, tx *sqlx.Tx, all ...rows) error {
	for _, r := range all {
		if r.n == 0 {
			continue
		}
		if _, err := tx.ExecContext(ctx, r.text(), r.args...); err != nil {
			return err
		}
	}
	return nil
}

// clip makes a provider's text fit its column: valid UTF-8 of at most n characters. A row must never fail to settle over it.
func clip(text string, n int) string {
	text = strings.ToValidUTF8(text, "\uFFFD")
	if utf8.RuneCountInString(text) <= n {
		return text
	}
	return string([]rune(text)[:n-1]) + "…"
}
