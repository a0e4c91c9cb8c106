package store

import (
	"context"
	"fmt"
	"strings"
	"time"

	"tidings/internal/msg"
)

// DelayConfig lays out the ring of delay tables. Zero values mean the defaults named.
type DelayConfig struct {
	Slot   time.Duration // the span of due times that a slot takes; default 24 h
	Slots  int           // slots in the ring; default 4
	Shards int           // tables of a slot, filled in turn; default 1
	Lead   time.Duration // tasks are in their queue tables this long before they are due; default 60 s
}

func (d *DelayConfig) setDefaults() {
	setDefault(&d.Slot, 24*time.Hour)
	setDefault(&d.Slots, 4)
	setDefault(&d.Shards, 1)
	setDefault(&d.Lead, time.Minute)
}

// Slot is a row of the catalogue: a part of the ring, and the due times that it takes.
type Slot struct {
	Number     uint16     `db:"slot"`
	Shards     int        `db:"shards"`
	State      string     `db:"state"`
	Generation int        `db:"generation"`
	From       time.Time  `db:"from_time"`
	To         time.Time  `db:"to_time"`
	LeaseEnd   time.Time  `db:"lease_end"`
	Truncated  *time.Time `db:"truncate_time"`
	Modified   time.Time  `db:"modify_time"`
}

// States of slots.
const (
	slotFar     = "far"
	slotNew     = "new"
	slotReady   = "ready"
	slotOpen    = "open"
	slotClosing = "closing"
	slotRetired = "retired"
)

const farTable = "t_msg_delay_far"

func (sl *Slot) table(shard int) string { return fmt.Sprintf("t_msg_delay_%d_%d", sl.Number, shard) }

// Tables are those of the slot that may hold tasks.
func (sl *Slot) Tables() []string {
	if sl.State == slotFar {
		return []string{farTable}
	}
	return sl.tables()
}

func (sl *Slot) tables() (names []string) {
	if sl.State != slotReady && sl.State != slotOpen && sl.State != slotClosing {
		return nil
	}
	for shard := range sl.Shards {
		names = append(names, sl.table(shard))
	}
	return names
}

// ring is a copy of the catalogue, with what follows from it. A copy may be old: a task that is put into a table whose slot has
// closed meanwhile is found there, for the mover looks into every table, and a table that is gone refuses it.
type ring struct {
	slots     []Slot
	tables    []string  // all delay tables that may hold tasks; the first is t_msg_delay_far
	messages  string    // the statement that reads messages wherever their tasks are
	campaigns string    // and that which counts a campaign's
	end       time.Time // of the spans that take tasks
	planned   time.Time // of those and the ones that are about to
}

const sqlSlots = `SELECT /* tidings:delay-slots */ slot, shards, state, generation, from_time, to_time, lease_end, truncate_time, modify_time
	FROM t_delay_slot ORDER BY from_time, slot`

func (s *Store) loadRing(ctx context.Context) (*ring, error) {
	r := &ring{}
	if err := s.db.SelectContext(ctx, &r.slots, sqlSlots); err != nil {
		return nil, err
	}
	r.tables = []string{farTable}
	for i := range r.slots {
		sl := &r.slots[i]
		r.tables = append(r.tables, sl.tables()...)
		if sl.State == slotOpen && sl.To.After(r.end) {
			r.end = sl.To
		}
		if (sl.State == slotOpen || sl.State == slotReady || sl.State == slotNew) && sl.To.After(r.planned) {
			r.planned = sl.To
		}
	}
	r.messages, r.campaigns = messagesStatement(r.tables), campaignStatement(r.tables)
	return r, nil
}

// table is where a task that is due then waits; turn chooses among the shards.
func (r *ring) table(due time.Time, turn uint64) string {
	for i := range r.slots {
		if sl := &r.slots[i]; sl.State == slotOpen && sl.Shards > 0 && !due.Before(sl.From) && due.Before(sl.To) {
			return sl.table(int(turn % uint64(sl.Shards)))
		}
	}
	return farTable
}

// onRing runs fn with the ring as it is, again if a table is gone: the ring has been turned since the copy was made.
func (s *Store) onRing(ctx context.Context, fn func(*ring) error) error {
	for try := 1; ; try++ {
		r, _ := s.ring.get(ctx)
		err := fn(r)
		if number(err) != erNoSuchTable || try == retries {
			return err
		}
		pause(ctx, time.Duration(try-1)*10*time.Millisecond)
		if err := s.ring.refresh(ctx); err != nil {
			return err
		}
	}
}

// destined says where a task that is due then belongs: a delay table, or "" for its queue table.
func (s *Store) destined(r *ring, due, now time.Time, turn uint64) string {
	if !due.After(now.Add(s.cfg.Delay.Lead)) {
		return ""
	}
	return r.table(due, turn)
}

// Scheduled is what waits in one delay table.
type Scheduled struct {
	Table string
	Tasks int64
	Next  time.Time // zero: nothing waits
}

// DelayStatus is how the scheduled sends stand.
type DelayStatus struct {
	Now    time.Time
	Slots  []Slot
	Tables []Scheduled // of every slot that is in use
	Hours  []DueHour
}

// DueHour is how many scheduled tasks are due in an hour, by UTC.
type DueHour struct {
	Hour  time.Time `db:"due_hour"`
	Tasks int64     `db:"tasks"`
}

const (
	sqlHours = `SELECT /* tidings:delay-hours */ due_hour, tasks FROM v_scheduled_by_hour ORDER BY due_hour LIMIT ?`
	mostHour = 10_000
)

// DelayStatus tells how the ring stands. It counts every scheduled task: with millions of them it takes seconds.
func (s *Store) DelayStatus(ctx context.Context) (status DelayStatus, err error) {
	err = s.onRing(ctx, func(r *ring) error {
		status = DelayStatus{Now: s.Now(), Slots: r.slots}
		var parts []string
		for i, table := range r.tables {
			parts = append(parts, fmt.Sprintf("SELECT %d AS n, COUNT(*) AS tasks, MIN(due_time) AS due FROM %s WHERE status = 0", i, table))
		}
		var rows []struct {
			N     int        `db:"n"`
			Tasks int64      `db:"tasks"`
			Due   *time.Time `db:"due"`
		}
		query := strings.Replace(strings.Join(parts, " UNION ALL "), "SELECT ", "SELECT /* tidings:delay-counts */ ", 1)
		if err := s.db.SelectContext(ctx, &rows, query); err != nil {
			return err
		}
		status.Tables = make([]Scheduled, len(r.tables))
		for _, row := range rows {
			status.Tables[row.N] = Scheduled{Table: r.tables[row.N], Tasks: row.Tasks}
			if row.Due != nil {
				status.Tables[row.N].Next = *row.Due
			}
		}
		return s.db.SelectContext(ctx, &status.Hours, sqlHours, mostHour)
	})
	return status, public(err)
}

// Views say channels and states in words.
const (
	channelWord = `IF(channel = 31, 'log', ELT(channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom'))`
	statusWord  = `ELT(status + 1, 'ready', 'sending', 'unknown', 'success', 'failed', 'dead', 'expired', 'cancelled', 'skipped')`
	viewColumns = `msg_id, ` + channelWord + ` AS channel, source_id, request_id, batch_id, category, priority, receiver, template_id, template_version, ` +
		statusWord + ` AS status, attempt, attempt_limit, owner, due_time, next_time, expire_time, provider, last_error, create_time, modify_time`
	viewOfBatch = `SELECT b.source_id, b.batch_id, b.create_time, t.status, COUNT(*) AS tasks FROM t_batch AS b STRAIGHT_JOIN %s AS t ON t.msg_id BETWEEN b.first_msg_id AND b.last_msg_id ` +
		`AND t.batch_id = b.batch_id AND t.source_id = b.source_id%s GROUP BY b.source_id, b.batch_id, b.create_time, t.status`
)

// delayViews are the statements that make the views of the delay tables anew, and that which counts batches there and elsewhere. v_delay is
// the last: by it is seen whether they are as they should be.
func delayViews(tables []string) []string {
	var tasks, hours, batches []string
	for _, l := range msg.Lanes {
		batches = append(batches, fmt.Sprintf(viewOfBatch, queueTable(l), ""))
	}
	for _, table := range tables {
		tasks = append(tasks, fmt.Sprintf("SELECT '%[1]s' AS place, %[2]s FROM %[1]s WHERE status = 0", table, viewColumns))
		hours = append(hours, fmt.Sprintf("SELECT FROM_DAYS(TO_DAYS(due_time)) + INTERVAL HOUR(due_time) HOUR AS due_hour, COUNT(*) AS tasks FROM %s WHERE status = 0 GROUP BY due_hour", table))
		batches = append(batches, fmt.Sprintf(viewOfBatch, table, " AND t.status = 0"))
	}
	batches = append(batches, fmt.Sprintf(viewOfBatch, "t_msg_dead", ""), fmt.Sprintf(viewOfBatch, "t_msg_record", ""))
	sums := ""
	for state := range msg.Moved {
		sums += fmt.Sprintf(", SUM(IF(status = %d, tasks, 0)) AS `%s`", state, state)
	}
	return []string{
		"CREATE /* tidings:delay-view-hours */ OR REPLACE SQL SECURITY INVOKER VIEW v_scheduled_by_hour AS SELECT due_hour, SUM(tasks) AS tasks FROM (" +
			strings.Join(hours, " UNION ALL ") + ") AS counted GROUP BY due_hour", // grouped as text it takes three times as long
		"CREATE /* tidings:delay-view-batches */ OR REPLACE SQL SECURITY INVOKER VIEW v_batch AS SELECT source_id, batch_id, create_time, SUM(tasks) AS tasks" + sums + " FROM (" +
			strings.Join(batches, " UNION ALL ") + ") AS counted GROUP BY source_id, batch_id, create_time",
		"CREATE /* tidings:delay-view */ OR REPLACE SQL SECURITY INVOKER VIEW v_delay AS " + strings.Join(tasks, " UNION ALL "),
	}
}
