package store

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"time"
)

// The ring turns by steps that may each be the last before a crash, and that any process may carry on or repeat, however
// late it wakes up. What makes that safe is that names of tables are used once: …_t<n> is the empty twin that takes over when
// generation n ends, …_g<n> is generation n's table after that. The swap consumes …_t<n>, so it happens once; nothing inserts
// into …_g<n>; so once that is proven to hold no task, it may be truncated by anybody, any number of times.
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
	sqlNextSlot = `SELECT /* tidings:slot-next */ MAX(slot) + 1 FROM t_delay_slot`
	sqlNewSlot  = `INSERT /* tidings:slot-new */ INTO t_delay_slot (slot, shards, state, generation, from_time, to_time, lease_end, create_time, modify_time)
		VALUES (?, ?, 'new', 1, ?, ?, '1000-01-01', UTC_TIMESTAMP(3), UTC_TIMESTAMP(3))`
	sqlSlotReady = `UPDATE /* tidings:slot-ready */ t_delay_slot SET state = 'ready', modify_time = UTC_TIMESTAMP(3) WHERE slot = ? AND state = 'new'`
	sqlOpenSlots = `UPDATE /* tidings:slot-open */ t_delay_slot SET state = 'open', modify_time = UTC_TIMESTAMP(3)
		WHERE state = 'ready' AND modify_time <= UTC_TIMESTAMP(3) - INTERVAL ? MICROSECOND`
	sqlReopenSlot = `UPDATE /* tidings:slot-reopen */ t_delay_slot SET state = 'open', generation = generation + 1, from_time = ?, to_time = ?,
		truncate_time = UTC_TIMESTAMP(3), modify_time = UTC_TIMESTAMP(3) WHERE slot = ? AND generation = ? AND state = 'closing'`
	sqlRetireSlot = `UPDATE /* tidings:slot-retire */ t_delay_slot SET state = 'retired', modify_time = UTC_TIMESTAMP(3)
		WHERE slot = ? AND generation = ? AND state = 'closing'`
	sqlSlotGone = `UPDATE /* tidings:slot-gone */ t_delay_slot SET shards = 0, modify_time = UTC_TIMESTAMP(3) WHERE slot = ? AND state = 'retired'`
	sqlSlotBusy = `UPDATE /* tidings:slot-busy */ t_delay_slot SET lease_end = UTC_TIMESTAMP(3) + INTERVAL 1 MINUTE WHERE slot = ?`

	sqlDelayTables = `SELECT /* tidings:delay-tables */ table_name FROM information_schema.tables
		WHERE table_schema = DATABASE() AND table_type = 'BASE TABLE' AND table_name LIKE 't\_msg\_delay\_%'`
	sqlMakeTable   = "CREATE /* tidings:delay-create */ TABLE IF NOT EXISTS %s LIKE " + farTable
	sqlSwapTables  = "RENAME /* tidings:delay-swap */ TABLE %[1]s TO %[2]s, %[3]s TO %[1]s"
	sqlRenameTable = "RENAME /* tidings:delay-rename */ TABLE %s TO %s"
	sqlTruncate    = "TRUNCATE /* tidings:delay-truncate */ TABLE %s"
	sqlDropTable   = "DROP /* tidings:delay-drop */ TABLE IF EXISTS %s"

	// slotGrace is how long all processes have to learn of a change: their copies are a second old at most. Who does not know yet that a
	// slot is closed, and puts a task there, costs the moving of a straggler; who does not know of a new one would miss its tasks.
	slotGrace = 2 * time.Second
	maxSlots   = 1000 // rows of the catalogue that are in use; more only if processes with different layouts start in turn
)

// errBusy says that somebody reads a table that is to be changed.
var errBusy = errors.New("somebody reads the table")

// Lay gives the ring this process's layout: slots with another are closed, emptied as their tasks become due, and dropped. To be
// called once, before Tend.
func (s *Store) Lay(ctx context.Context) error {
	n, err := affected(s.db.ExecContext(ctx, sqlRelayRing, s.cfg.Delay.Shards, s.cfg.Delay.Slot.Microseconds()))
	if n > 0 {
		s.log.Info("the layout of the delay tables has changed: slots with the old one are emptied and dropped", "slots", n)
	}
	s.viewed.Store(nil) // whatever happened to the views meanwhile
	return public(err)
}

// turn carries the ring on if there is anything to do. first tells when the first task of each table is due, as of a moment ago.
func (s *Store) turn(ctx context.Context, r *ring, first []time.Time) error {
	drained := map[uint16]bool{}
	for i := range r.slots {
		sl := &r.slots[i]
		drained[sl.Number] = !slices.ContainsFunc(sl.tables(), func(table string) bool {
			at := slices.Index(r.tables, table)
			return at >= 0 && !first[at].IsZero()
		})
	}
	now := s.Now()
	missing := s.cfg.Delay.Slots - r.ahead(now, s.cfg.Delay)
	due := missing > 0 || !r.sameTables(s.viewed.Load())
	for i := range r.slots {
		sl := &r.slots[i]
		due = due || ((sl.State == slotOpen || sl.State == slotReady) && !sl.To.After(now)) || (sl.State == slotNew && now.Sub(sl.Modified) > time.Minute) ||
			(sl.State == slotReady && now.Sub(sl.Modified) > slotGrace) ||
			(sl.State == slotRetired && sl.Shards > 0 && !sl.LeaseEnd.After(now)) || sl.mayRotate(now, drained)
	}
	if !due {
		return nil
	}
	if n, err := affected(s.db.ExecContext(ctx, sqlTakeRing)); err != nil || n == 0 {
		return err
	}
	err := s.turnSteps(ctx, drained)
	_, failed := s.db.ExecContext(context.WithoutCancel(ctx), sqlReleaseRing)
	return errors.Join(err, failed)
}

// ahead counts the slots that take tasks, or will when they have been emptied.
func (r *ring) ahead(now time.Time, d DelayConfig) (n int) {
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

func (s *Store) turnSteps(ctx context.Context, drained map[uint16]bool) error {
	for _, query := range []string{sqlCloseSlots, sqlAbandonSlots} {
		if _, err := s.db.ExecContext(ctx, query); err != nil {
			return err
		}
	}
	if _, err := s.db.ExecContext(ctx, sqlOpenSlots, slotGrace.Microseconds()); err != nil {
		return err
	}
	r, err := s.loadRing(ctx)
	if err != nil {
		return err
	}
	now, ahead, failed := s.Now(), r.ahead(s.Now(), s.cfg.Delay), error(nil)
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
		_, err := s.db.ExecContext(ctx, sqlRetireSlot, sl.Number, sl.Generation)
		failed = errors.Join(failed, err)
	}
	failed = errors.Join(failed, s.grow(ctx, r, s.cfg.Delay.Slots-ahead))
	failed = errors.Join(failed, s.view(ctx))
	return errors.Join(failed, s.dropRetired(ctx), s.ring.refresh(ctx))
}

// mend makes tables that the catalogue names and that are gone: dropped by hand, or by a server that crashed between the halves of a
// swap.
func (s *Store) mend(ctx context.Context) error {
	r, err := s.loadRing(ctx)
	if err != nil {
		return err
	}
	have, err := s.delayTables(ctx)
	if err != nil {
		return err
	}
	for _, table := range r.tables[1:] {
		if have[table] {
			continue
		}
		if _, err := s.db.ExecContext(ctx, fmt.Sprintf(sqlMakeTable, table)); err != nil {
			return err
		}
		s.log.Warn("made a delay table that was gone", "table", table)
	}
	return nil
}

// unlessBusy leaves a slot alone for a minute when somebody reads its tables: each try makes others wait for up to a second.
func (s *Store) unlessBusy(ctx context.Context, sl *Slot, err error) error {
	if n := number(err); n == erNoSuchTable || n == erTableExists { // another process has done the step
		return nil
	}
	if !errors.Is(err, errBusy) {
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
	if n <= 0 || len(r.tables) > maxSlots {
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
				if _, err := s.db.ExecContext(ctx, fmt.Sprintf(sqlMakeTable, table)); err != nil {
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
// process has done it is one that the next pass finds done: their names tell.
func (s *Store) rotateTable(ctx context.Context, sl *Slot, shard int, have map[string]bool) error {
	current, twin, old, next := sl.table(shard), sl.twin(shard, sl.Generation), sl.old(shard), sl.twin(shard, sl.Generation+1)
	if have[next] && !have[old] {
		return nil
	}
	if !have[old] {
		if !have[twin] { // gone by somebody's hand
			if _, err := s.db.ExecContext(ctx, fmt.Sprintf(sqlMakeTable, twin)); err != nil {
				return err
			}
		}
		if err := s.alter(ctx, fmt.Sprintf(sqlSwapTables, current, old, twin)); err != nil {
			return err
		}
	} else if !have[current] && have[twin] { // a crash between the halves of the swap, on a server where it has two
		if err := s.alter(ctx, fmt.Sprintf(sqlRenameTable, twin, current)); err != nil {
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

// alter changes tables, or gives up after a second.
func (s *Store) alter(ctx context.Context, statement string) error {
	err := alterBriefly(ctx, s.db.DB, statement)
	if isLockWait(err) {
		return errors.Join(errBusy, err)
	}
	return err
}

// prove returns without an error when a table that nothing inserts into any more holds no task. A straggler, put there between the
// last look and the swap, is moved to where it belongs.
func (s *Store) prove(ctx context.Context, table string) error {
	for {
		var keys []delayKey
		if err := s.db.SelectContext(ctx, &keys, fmt.Sprintf(sqlDelayLook, table), lastDue, lookKeys); err != nil || len(keys) == 0 {
			return err
		}
		moved, err := s.moveKeys(ctx, table, keys)
		if err != nil {
			return err
		}
		if moved == 0 {
			return fmt.Errorf("%w: %d tasks in %s are locked", errBusy, len(keys), table)
		}
		s.log.Info("moved stragglers out of a delay table", "table", table, "tasks", moved)
	}
}

var lastDue = time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC)

func (s *Store) delayTables(ctx context.Context) (map[string]bool, error) {
	var names []string
	err := s.db.SelectContext(ctx, &names, sqlDelayTables)
	have := map[string]bool{}
	for _, name := range names {
		have[name] = true
	}
	return have, err
}

// view makes the views of the delay tables anew if the tables have changed.
func (s *Store) view(ctx context.Context) error {
	r, err := s.loadRing(ctx)
	if err != nil || r.sameTables(s.viewed.Load()) {
		return err
	}
	for _, statement := range delayViews(r.tables) {
		if err := s.alter(ctx, statement); err != nil {
			return err
		}
	}
	s.viewed.Store(r)
	return nil
}

var tableForm = regexp.MustCompile(`^t_msg_delay_(\d+)_\d+(_[a-z]\d+)?$`)

// dropRetired drops the tables of slots that are not used any more, each after the same proof: it is given a name that nothing inserts into.
func (s *Store) dropRetired(ctx context.Context) error {
	r, err := s.loadRing(ctx)
	if err != nil {
		return err
	}
	retired := map[string]*Slot{}
	for i := range r.slots {
		if sl := &r.slots[i]; sl.State == slotRetired && sl.Shards > 0 && !sl.LeaseEnd.After(s.Now()) {
			retired[strconv.Itoa(int(sl.Number))] = sl
		}
	}
	if len(retired) == 0 {
		return nil
	}
	have, err := s.delayTables(ctx)
	if err != nil {
		return err
	}
	var failed error
	for number, sl := range retired {
		err := s.dropSlot(ctx, number, have)
		if err == nil {
			_, err = s.db.ExecContext(ctx, sqlSlotGone, sl.Number)
			s.log.Info("dropped the delay tables of a slot", "slot", sl.Number)
		}
		failed = errors.Join(failed, s.unlessBusy(ctx, sl, err))
	}
	return failed
}

func (s *Store) dropSlot(ctx context.Context, number string, have map[string]bool) error {
	for table := range have {
		form := tableForm.FindStringSubmatch(table)
		if form == nil || form[1] != number {
			continue
		}
		if form[2] == "" { // in use until now
			if err := s.alter(ctx, fmt.Sprintf(sqlRenameTable, table, table+"_x0")); err != nil {
				return err
			}
			table += "_x0"
		}
		if err := s.prove(ctx, table); err != nil {
			return err
		}
		if err := s.alter(ctx, fmt.Sprintf(sqlDropTable, table)); err != nil {
			return err
		}
		if err := s.renewRing(ctx); err != nil {
			return err
		}
	}
	return nil
}
