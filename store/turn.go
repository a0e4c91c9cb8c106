package store

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// The ring turns by steps that may each be the last before a crash, and that any process may carry on or repeat, however
// late it wakes up. What makes that safe is that names of tables are made once: a slot's number is never used again, and of a slot's
// tables only grow makes any, before the slot is in use. …_t<n> is the empty twin that takes over when generation n ends, …_g<n> is
// generation n's table after that. The swap consumes …_t<n>, so it happens once; nothing inserts into …_g<n>; so once that is proven to
// hold no task, it may be truncated by anybody, any number of times.
const (
	sqlTakeRing = `UPDATE /* tidings:ring-take */ t_delay_slot SET lease_end = UTC_TIMESTAMP(3) + INTERVAL 10 SECOND
		WHERE slot = 0 AND lease_end <= UTC_TIMESTAMP(3)`
	sqlRenewRing   = `UPDATE /* tidings:ring-renew */ t_delay_slot SET lease_end = UTC_TIMESTAMP(3) + INTERVAL 10 SECOND WHERE slot = 0`
	sqlReleaseRing = `UPDATE /* tidings:ring-release */ t_delay_slot SET lease_end = UTC_TIMESTAMP(3) WHERE slot = 0`
	sqlRelayRing   = `UPDATE /* tidings:ring-layout */ t_delay_slot SET state = 'closing', modify_time = UTC_TIMESTAMP(3)
		WHERE state IN ('ready', 'open') AND (shards <> ? OR TIMESTAMPDIFF(MICROSECOND, from_time, to_time) <> ?)`
	sqlCloseSlots = `UPDATE /* tidings:slot-close */ t_delay_slot SET state = 'closing', modify_time = UTC_TIMESTAMP(3)
		WHERE state IN ('ready', 'open') AND to_time <= UTC_TIMESTAMP(3)`
	// Whoever made them is stopped. Nobody carries on: a statement of theirs that comes late would meet a slot in use.
	sqlAbandonSlots = `UPDATE /* tidings:slot-abandon */ t_delay_slot SET state = 'retired', modify_time = UTC_TIMESTAMP(3)
		WHERE state = 'new' AND modify_time <= UTC_TIMESTAMP(3) - INTERVAL 1 MINUTE`
	sqlOpenSlots = `UPDATE /* tidings:slot-open */ t_delay_slot SET state = 'open', modify_time = UTC_TIMESTAMP(3)
		WHERE state = 'ready' AND modify_time <= UTC_TIMESTAMP(3) - INTERVAL 2 SECOND`
	sqlNextSlot = `SELECT /* tidings:slot-next */ MAX(slot) + 1 FROM t_delay_slot`
	sqlNewSlot  = `INSERT /* tidings:slot-new */ INTO t_delay_slot (slot, shards, state, generation, from_time, to_time, lease_end, create_time, modify_time)
		VALUES (?, ?, 'new', 1, ?, ?, '1000-01-01', UTC_TIMESTAMP(3), UTC_TIMESTAMP(3))`
	sqlSlotReady  = `UPDATE /* tidings:slot-ready */ t_delay_slot SET state = 'ready', modify_time = UTC_TIMESTAMP(3) WHERE slot = ? AND state = 'new'`
	sqlReopenSlot = `UPDATE /* tidings:slot-reopen */ t_delay_slot SET state = 'open', generation = generation + 1, from_time = ?, to_time = ?,
		truncate_time = UTC_TIMESTAMP(3), modify_time = UTC_TIMESTAMP(3) WHERE slot = ? AND generation = ? AND state = 'closing'`
	sqlRetireSlot = `UPDATE /* tidings:slot-retire */ t_delay_slot SET state = 'retired', modify_time = UTC_TIMESTAMP(3)
		WHERE slot = ? AND generation = ? AND state IN ('ready', 'open', 'closing')`
	sqlSlotBusy = `UPDATE /* tidings:slot-busy */ t_delay_slot SET lease_end = UTC_TIMESTAMP(3) + INTERVAL 1 MINUTE WHERE slot = ?`

	sqlDelayTables = `SELECT /* tidings:delay-tables */ table_name FROM information_schema.tables
		WHERE table_schema = DATABASE() AND table_type = 'BASE TABLE' AND table_name LIKE 't\_msg\_delay\_%'`
	sqlViewText    = `SELECT /* tidings:delay-view-text */ view_definition FROM information_schema.views WHERE table_schema = DATABASE() AND table_name = 'v_delay'`
	sqlMakeTable   = "CREATE /* tidings:delay-create */ TABLE IF NOT EXISTS %s LIKE " + farTable
	sqlSwapTables  = "RENAME /* tidings:delay-swap */ TABLE %[1]s TO %[2]s, %[3]s TO %[1]s"
	sqlRenameTable = "RENAME /* tidings:delay-rename */ TABLE %s TO %s"
	sqlTruncate    = "TRUNCATE /* tidings:delay-truncate */ TABLE %s"
	sqlDropTable   = "DROP /* tidings:delay-drop */ TABLE IF EXISTS %s"

	// slotGrace is how long all processes have to learn of a change: their copies are a second old at most. Who does not know yet that a
	// slot is closed, and puts a task there, costs the moving of a straggler; who does not know of a new one would miss its tasks.
	slotGrace  = 2 * time.Second
	sweepEvery = time.Minute
	mostTables = 2000 // more only if processes with different layouts start in turn
)

// ErrTableBusy says that somebody reads a table that is to be changed: another time.
var ErrTableBusy = errors.New("somebody reads the table")

// Lay gives the ring this process's layout: slots with another are closed, emptied as their tasks become due, and dropped. To be
// called once, before Tend.
func (s *Store) Lay(ctx context.Context) error {
	n, err := affected(s.db.ExecContext(ctx, sqlRelayRing, s.cfg.Delay.Shards, s.cfg.Delay.Slot.Microseconds()))
	if n > 0 {
		s.log.Info("the layout of the delay tables has changed: slots with the old one are emptied and dropped", "slots", n)
	}
	return public(err)
}

// turnDue tells whether there is anything to do for the ring. first tells when the first task of each table is due.
func (s *Store) turnDue(r *ring, first []time.Time) func(context.Context) error {
	drained := map[uint16]bool{}
	for i := range r.slots {
		sl := &r.slots[i]
		drained[sl.Number] = !slices.ContainsFunc(sl.tables(), func(table string) bool {
			at := slices.Index(r.tables, table)
			return at >= 0 && !first[at].IsZero()
		})
	}
	now := s.Now()
	last := s.turned.Load()
	due := last == nil || time.Since(last.when) > sweepEvery || !slices.Equal(last.tables, r.tables) || r.ahead(s.cfg.Delay) < s.cfg.Delay.Slots
	for i := range r.slots {
		sl := &r.slots[i]
		age := now.Sub(sl.Modified)
		due = due || ((sl.State == slotOpen || sl.State == slotReady) && !sl.To.After(now)) || (sl.State == slotNew && age > time.Minute) ||
			(sl.State == slotReady && age > slotGrace) || sl.mayRotate(now, drained)
	}
	if !due {
		return nil
	}
	return func(ctx context.Context) error {
		n, err := affected(s.db.ExecContext(ctx, sqlTakeRing))
		if err != nil || n == 0 {
			return public(err)
		}
		err = s.turn(ctx, drained)
		_, failed := s.db.ExecContext(context.WithoutCancel(ctx), sqlReleaseRing)
		return public(errors.Join(err, failed))
	}
}

// turned is when this process has looked after the ring last, and the tables that it had then.
type turned struct {
	when   time.Time
	tables []string
}

// ahead counts the slots that take tasks, or will.
func (r *ring) ahead(d DelayConfig) (n int) {
	for i := range r.slots {
		switch sl := &r.slots[i]; sl.State {
		case slotOpen, slotReady, slotNew:
			n++
		case slotClosing:
			if sl.fits(d) {
				n++
			}
		}
	}
	return n
}

// fits tells whether a slot has the layout that is wanted.
func (sl *Slot) fits(d DelayConfig) bool {
	return sl.Shards == d.Shards && sl.To.Sub(sl.From) == d.Slot
}

// mayRotate tells whether a slot is closed, has been for long enough, and is empty.
func (sl *Slot) mayRotate(now time.Time, drained map[uint16]bool) bool {
	return sl.State == slotClosing && drained[sl.Number] && !sl.LeaseEnd.After(now) && now.Sub(sl.Modified) >= slotGrace
}

// turn does all that there is to do. What fails is tried again by the next; the other steps are done all the same.
func (s *Store) turn(ctx context.Context, drained map[uint16]bool) error {
	for _, query := range []string{sqlCloseSlots, sqlAbandonSlots, sqlOpenSlots} {
		if _, err := s.db.ExecContext(ctx, query); err != nil {
			return err
		}
	}
	r, err := s.loadRing(ctx)
	if err != nil {
		return err
	}
	now, ahead, failed := s.Now(), r.ahead(s.cfg.Delay), error(nil)
	for i := range r.slots {
		sl := &r.slots[i]
		if !sl.mayRotate(now, drained) {
			continue
		}
		if sl.fits(s.cfg.Delay) && ahead <= s.cfg.Delay.Slots {
			failed = errors.Join(failed, s.unlessBusy(ctx, sl, s.rotate(ctx, sl)))
			continue
		}
		if sl.fits(s.cfg.Delay) {
			ahead--
		}
		failed = errors.Join(failed, s.retire(ctx, sl))
	}
	failed = errors.Join(failed, s.grow(ctx, r, s.cfg.Delay.Slots-ahead))
	if r, err = s.loadRing(ctx); err != nil {
		return errors.Join(failed, err)
	}
	s.turned.Store(&turned{time.Now(), r.tables})
	if err := s.view(ctx, r); err != nil { // it must not name tables that are gone
		return errors.Join(failed, err, s.ring.refresh(ctx))
	}
	return errors.Join(failed, s.sweep(ctx, r), s.ring.refresh(ctx))
}

func (s *Store) retire(ctx context.Context, sl *Slot) error {
	_, err := s.db.ExecContext(ctx, sqlRetireSlot, sl.Number, sl.Generation)
	return err
}

// mend retires slots that lack a table: dropped by hand, or by a server that crashed between the halves of a swap. What their other
// tables hold is moved, and new slots are made. The tables themselves are not made again: a name is made once.
func (s *Store) mend(ctx context.Context) error {
	r, err := s.loadRing(ctx)
	if err != nil {
		return err
	}
	have, err := s.delayTables(ctx)
	if err != nil {
		return err
	}
	for i := range r.slots {
		sl := &r.slots[i]
		for _, table := range sl.tables() {
			if !have[table] {
				s.log.Warn("a delay table is gone: its slot is retired", "table", table)
				err = errors.Join(err, s.retire(ctx, sl))
			}
		}
	}
	return errors.Join(err, s.ring.refresh(ctx))
}

// unlessBusy leaves a slot alone for a minute when somebody reads its tables: each try makes others wait for up to a second.
func (s *Store) unlessBusy(ctx context.Context, sl *Slot, err error) error {
	if n := number(err); n == erNoSuchTable || n == erTableExists { // another process has done the step
		return nil
	}
	if !errors.Is(err, ErrTableBusy) {
		return err
	}
	s.log.Info("a delay table is being read by somebody: it is turned over in a minute", "slot", sl.Number, "generation", sl.Generation)
	_, err = s.db.ExecContext(ctx, sqlSlotBusy, sl.Number)
	return err
}

// nextSpan is the span that the next slot takes: after all others, and not in the past.
func (s *Store) nextSpan(r *ring) (from, to time.Time) {
	from = s.Now().Truncate(s.cfg.Delay.Slot)
	if r.planned.After(from) {
		from = r.planned
	}
	r.planned = from.Add(s.cfg.Delay.Slot)
	return from, r.planned
}

// grow makes slots, with their tables and twins.
func (s *Store) grow(ctx context.Context, r *ring, n int) error {
	if n <= 0 || len(r.tables) > mostTables {
		return nil
	}
	var made []uint16
	for range n {
		var number uint16
		if err := s.db.GetContext(ctx, &number, sqlNextSlot); err != nil {
			return err
		}
		from, to := s.nextSpan(r)
		if _, err := s.db.ExecContext(ctx, sqlNewSlot, number, s.cfg.Delay.Shards, from, to); err != nil {
			return err
		}
		sl := Slot{Number: number, Generation: 1}
		for shard := range s.cfg.Delay.Shards {
			for _, table := range []string{sl.table(shard), sl.twin(shard, 1)} {
				if _, err := s.ddl.ExecContext(ctx, fmt.Sprintf(sqlMakeTable, table)); err != nil {
					return err
				}
			}
			if err := s.renewRing(ctx); err != nil {
				return err
			}
		}
		made = append(made, number)
	}
	for _, number := range made {
		if _, err := s.db.ExecContext(ctx, sqlSlotReady, number); err != nil {
			return err
		}
	}
	s.log.Info("made delay tables", "slots", len(made), "shards", s.cfg.Delay.Shards, "until", r.planned)
	return nil
}

func (s *Store) renewRing(ctx context.Context) error {
	_, err := s.db.ExecContext(ctx, sqlRenewRing)
	return err
}

func (sl *Slot) twin(shard, generation int) string {
	return fmt.Sprintf("%s_t%d", sl.table(shard), generation)
}

func (sl *Slot) old(shard int) string { return fmt.Sprintf("%s_g%d", sl.table(shard), sl.Generation) }

// rotate empties a slot's tables and opens it for the next span.
func (s *Store) rotate(ctx context.Context, sl *Slot) error {
	have, err := s.delayTables(ctx)
	if err != nil {
		return err
	}
	for shard := range sl.Shards {
		if err := s.rotateTable(ctx, sl, shard, have); err != nil {
			return err
		}
		if err := s.renewRing(ctx); err != nil {
			return err
		}
	}
	r, err := s.loadRing(ctx)
	if err != nil {
		return err
	}
	from, to := s.nextSpan(r)
	n, err := affected(s.db.ExecContext(ctx, sqlReopenSlot, from, to, sl.Number, sl.Generation))
	if n > 0 {
		s.log.Info("turned a slot of delay tables over", "slot", sl.Number, "generation", sl.Generation+1, "from", from, "to", to)
	}
	return err
}

// rotateTable does the steps that are left for one table: swap, proof, truncation, twin. A step that fails because another
// process has done it is one that the next pass finds done.
func (s *Store) rotateTable(ctx context.Context, sl *Slot, shard int, have map[string]bool) error {
	current, twin, old, next := sl.table(shard), sl.twin(shard, sl.Generation), sl.old(shard), sl.twin(shard, sl.Generation+1)
	switch {
	case have[old]:
	case have[next]:
		return nil
	case !have[twin]: // gone by somebody's hand
		s.log.Warn("a twin of a delay table is gone: the slot is retired", "table", twin)
		return s.retire(ctx, sl)
	default:
		if err := s.alter(ctx, fmt.Sprintf(sqlSwapTables, current, old, twin)); err != nil {
			return err
		}
	}
	if err := s.prove(ctx, old); err != nil {
		return err
	}
	if err := s.alter(ctx, fmt.Sprintf(sqlTruncate, old)); err != nil {
		return err
	}
	return s.alter(ctx, fmt.Sprintf(sqlRenameTable, old, next))
}

// alter changes tables, or gives up after a second: while it waits for somebody's long read to end, everybody else waits behind it.
func (s *Store) alter(ctx context.Context, statement string) error {
	_, err := s.ddl.ExecContext(ctx, statement)
	if isLockWait(err) {
		return errors.Join(ErrTableBusy, err)
	}
	return err
}

// prove returns without an error when a table that nothing inserts into any more holds no task. A straggler, put there between the
// last look and the swap, is moved to where it belongs.
func (s *Store) prove(ctx context.Context, table string) error {
	for {
		keys, err := s.lookDelayed(ctx, table, unknownDue, delayKey{}, lookKeys)
		if isLockWait(err) {
			return errors.Join(ErrTableBusy, err)
		}
		if err != nil || len(keys) == 0 {
			return err
		}
		moved, err := s.moveKeys(ctx, table, keys)
		if err != nil {
			return err
		}
		if moved == 0 {
			return fmt.Errorf("%w: %d tasks in %s are locked", ErrTableBusy, len(keys), table)
		}
		s.log.Info("moved stragglers out of a delay table", "table", table, "tasks", moved)
	}
}

func (s *Store) delayTables(ctx context.Context) (map[string]bool, error) {
	var names []string
	err := s.db.SelectContext(ctx, &names, sqlDelayTables)
	have := map[string]bool{}
	for _, name := range names {
		have[name] = true
	}
	return have, err
}

var tableName = regexp.MustCompile(`t_msg_delay_\w+`)

// viewMark is in the text of v_delay as this version makes it, and not as the one before did, which may still run.
const viewMark = "'wecom'"

// view makes the views of the delay tables anew if they show others.
func (s *Store) view(ctx context.Context, r *ring) error {
	var text string // which only they see who may change it
	if err := s.ddl.QueryRowContext(ctx, sqlViewText).Scan(&text); err != nil {
		return err
	}
	shown := tableName.FindAllString(text, -1)
	want := slices.Sorted(slices.Values(r.tables))
	if slices.Sort(shown); slices.Equal(slices.Compact(shown), want) && strings.Contains(text, viewMark) {
		return nil
	}
	for _, statement := range delayViews(r.tables) {
		if err := s.alter(ctx, statement); err != nil {
			return err
		}
	}
	return nil
}

// parts of a delay table's name: slot, shard, and what it is beside a slot's table: _t a twin, _g a generation that is over, _x to be dropped.
var nameParts = regexp.MustCompile(`^t_msg_delay_(\d+)_(\d+)(?:_([tgx])(\d+))?$`)

// sweep drops tables that are not in use: those of retired slots, and what a process that stood still in the middle of a turn has left.
// Each is proven empty before, under a name that nothing inserts into.
func (s *Store) sweep(ctx context.Context, r *ring) error {
	have, err := s.delayTables(ctx)
	if err != nil {
		return err
	}
	slots := map[string]*Slot{}
	for i := range r.slots {
		slots[strconv.Itoa(int(r.slots[i].Number))] = &r.slots[i]
	}
	var failed error
	for table := range have {
		parts := nameParts.FindStringSubmatch(table)
		if parts == nil || slots[parts[1]] == nil || slots[parts[1]].State == slotNew {
			continue
		}
		sl, kind := slots[parts[1]], parts[3]
		generation, _ := strconv.Atoi(parts[4])
		switch {
		case sl.State == slotRetired:
		case kind == "" || (kind == "t" && generation >= sl.Generation): // in use, now or next
			continue
		case kind == "g" && generation == sl.Generation: // rotate's; but if the slot is not empty again, what is in here must not wait for that
			failed = errors.Join(failed, s.unlessBusy(ctx, sl, s.prove(ctx, table)))
			continue
		}
		failed = errors.Join(failed, s.unlessBusy(ctx, sl, s.drop(ctx, table, kind == "" && !sl.LeaseEnd.After(s.Now()))))
	}
	return failed
}

// drop drops a table; one that had been in use is given another name first. What it holds is moved before anything is waited for.
func (s *Store) drop(ctx context.Context, table string, used bool) error {
	if err := s.prove(ctx, table); err != nil {
		return err
	}
	if used {
		gone := table + "_x0"
		if err := s.alter(ctx, fmt.Sprintf(sqlRenameTable, table, gone)); err != nil {
			return err
		}
		if err := s.prove(ctx, gone); err != nil {
			return err
		}
		table = gone
	}
	if nameParts.FindStringSubmatch(table)[3] == "" { // somebody reads it: another time
		return nil
	}
	if err := s.alter(ctx, fmt.Sprintf(sqlDropTable, table)); err != nil {
		return err
	}
	s.log.Info("dropped a delay table", "table", table)
	return s.renewRing(ctx)
}
