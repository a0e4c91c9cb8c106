package store

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"tidings/internal/msg"
	"tidings/internal/window"
)

// ErrLimited says that a limit is used up: errors.As with *LimitError tells which, and until when.
var ErrLimited = errors.New("a limit is used up")

// LimitError is why a message is refused for now.
type LimitError struct {
	Kind    string // global, source or recipient
	Channel msg.Channel
	Limit   window.Limit
	Wait    time.Duration // until one more is allowed
}

func (e *LimitError) Error() string {
	return fmt.Sprintf("%s limit of %d in %v on %s is used up", e.Kind, e.Limit.Num, e.Limit.Unit, e.Channel)
}

// Is makes it an ErrLimited.
func (e *LimitError) Is(target error) bool { return target == ErrLimited }

// The kinds of limits.
const (
	KindGlobal    = "global"
	KindSource    = "source"
	KindRecipient = "recipient"
)

// counter is something that is counted against a limit.
type counter struct {
	hash    [sha256.Size]byte
	kind    string
	source  string
	channel msg.Channel
	limit   window.Limit
}

func newCounter(kind, source string, channel msg.Channel, what string, limit window.Limit) counter {
	c := counter{kind: kind, source: source, channel: channel, limit: limit}
	c.hash = sha256.Sum256(fmt.Appendf(nil, "%s\x00%s\x00%d\x00%s\x00%d", kind, source, channel, what, limit.Unit.Milliseconds()))
	return c
}

// counters are what a message is counted against, one entry for each task.
func (s *Store) counters(quotas quotaSet, p *pending) (all []counter) {
	for _, t := range p.Tasks {
		for _, q := range quotas.byChannel[quotaKey{"", t.Channel}] {
			all = append(all, newCounter(KindGlobal, "", t.Channel, "", q.limit()))
		}
		for _, q := range quotas.byChannel[quotaKey{p.SourceID, t.Channel}] {
			all = append(all, newCounter(KindSource, p.SourceID, t.Channel, "", q.limit()))
		}
		for _, l := range t.Frequency {
			all = append(all, newCounter(KindRecipient, p.SourceID, t.Channel, p.Category.String()+"\x00"+t.Recipient, l))
		}
	}
	return all
}

// count is a counter's row.
type count struct {
	counter
	window  window.Window
	version uint64
	used    bool
}

// next is the version that the row gets. A new row begins with the time, so that it is not taken for one that was purged.
func (c *count) next(at time.Time) uint64 {
	if c.version == 0 {
		return uint64(at.UnixNano())
	}
	return c.version + 1
}

// charge is what the messages of a packet use up.
type charge struct {
	counts map[[sha256.Size]byte]*count
	at     time.Time     // when the messages count as accepted
	slack  time.Duration // how much later than now that is: the server makes sure that it is not later still
}

const (
	sqlCounts = `SELECT /* tidings:limit-counts */ limit_hash, state, version FROM t_limit_count WHERE limit_hash IN (%s)`
	// Each row is changed if its version is the one that was read, and left alone else: the number of changes tells.
	sqlCharge    = `INSERT /* tidings:charge */ INTO t_limit_count (limit_hash, kind, source_id, channel, state, version, expire_time) VALUES `
	sqlChargeEnd = ` ON DUPLICATE KEY UPDATE state = IF(version + 1 = VALUES(version), VALUES(state), state),
		expire_time = IF(version + 1 = VALUES(version), VALUES(expire_time), expire_time), version = IF(version + 1 = VALUES(version), VALUES(version), version)`
	// A statement that waited for a lock has an old idea of now. The messages must not count as accepted before they are.
	sqlInTime = `SET /* tidings:charge-in-time */ @tidings_ok = IF(UTC_TIMESTAMP(3) <= ?, 1, (SELECT 1 UNION SELECT 2))`

	mostSlack      = 100 * time.Millisecond
	casMisses      = 3 // before the rows are locked
	mostChargeRows = 200
)

// limiter keeps what this process knows of limits.
type limiter struct {
	// charging is held, by channel, while a packet charges what many packets charge: in one process they need not race.
	charging [32]*semaphore.Weighted
	mu       sync.Mutex
	shared   map[[sha256.Size]byte]count // as this process wrote them last
	quotas   mirror[quotaSet]
}

// begin waits until no other packet of this process charges what a packet is about to charge.
func (l *limiter) begin(ctx context.Context, counted map[*pending][]counter) (end func(), err error) {
	var channels []msg.Channel
	for _, counters := range counted {
		for _, c := range counters {
			if c.kind != KindRecipient && !slices.Contains(channels, c.channel) {
				channels = append(channels, c.channel)
			}
		}
	}
	slices.Sort(channels) // the order in which all take them
	taken := 0
	end = func() {
		for _, c := range channels[:taken] {
			l.charging[c].Release(1)
		}
	}
	for _, c := range channels {
		if l.charging[c].Acquire(ctx, 1) != nil {
			end()
			return nil, ErrBusy
		}
		taken++
	}
	return end, nil
}

// charged decides which messages of a batch their limits allow, answers the others, and notes what those use up. q reads the
// counts: under locks where the connection's transaction is to keep them.
func (s *Store) charged(ctx context.Context, batch []*pending, perMessage map[*pending][]counter, q queryer, lock bool) ([]*pending, *charge, error) {
	ch, err := s.readCounts(ctx, perMessage, q, lock)
	if err != nil {
		return nil, nil, err
	}
	now := s.Now()
	ch.at = now.Add(ch.slack)
	refused := map[*pending]*LimitError{}
	inOrder := slices.SortedFunc(slices.Values(batch), func(a, b *pending) int { return cmp.Compare(a.id, b.id) }) // first come, first served
	for _, p := range inOrder {
		if why := ch.take(perMessage[p], now); why != nil {
			refused[p] = why
			continue
		}
		// The id's time, which create_time is, is to be the one that counts: the message may have waited since it came.
		if err := s.renewID(p); err != nil {
			return nil, nil, err
		}
	}
	if len(refused) == 0 {
		return batch, ch, nil
	}
	allowed := slices.DeleteFunc(slices.Clone(batch), func(p *pending) bool { return refused[p] != nil })
	// A repetition costs nothing, so it is not refused either.
	var asked []*pending
	for p := range refused {
		asked = append(asked, p)
	}
	known, err := s.keys(ctx, asked)
	if err != nil {
		return nil, nil, err
	}
	for p, why := range refused {
		if first, ok := known[keyName{p.SourceID, p.key}]; ok {
			if first.msgID == p.id {
				s.wake([]*pending{p})
			}
			p.answerWith(first)
		} else {
			p.finish(Accepted{}, why)
		}
	}
	return allowed, ch, nil
}

// Allowed tells whether a message's limits allow it now, without charging them: nil, or an ErrLimited.
func (s *Store) Allowed(ctx context.Context, m *Message) error {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	p := &pending{Message: *m}
	counters := s.counters(s.currentQuotas(ctx), p)
	ch, err := s.readCounts(ctx, map[*pending][]counter{p: counters}, s.db, false)
	if err != nil {
		return public(err)
	}
	if why := ch.take(counters, s.Now()); why != nil {
		return why
	}
	return nil
}

// renewID gives a message an id of now, unless the one that it has may stand in the tables.
func (s *Store) renewID(p *pending) (err error) {
	if p.mayBeStored {
		return nil
	}
	if p.id, err = s.ids.Next(); err == nil {
		p.key = requestKey(p.RequestID, p.id)
	}
	return err
}

type queryer interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

func (s *Store) readCounts(ctx context.Context, perMessage map[*pending][]counter, q queryer, lock bool) (*charge, error) {
	ch := &charge{counts: map[[sha256.Size]byte]*count{}, slack: mostSlack}
	var unread [][sha256.Size]byte
	for _, counters := range perMessage {
		for _, c := range counters {
			if ch.counts[c.hash] != nil {
				continue
			}
			ch.slack = min(ch.slack, max(c.limit.Unit/100, 2*time.Millisecond))
			row := &count{counter: c}
			if kept, ok := s.limits.kept(c); ok && !lock {
				row.version = kept.version
				row.window = kept.window.Clone()
				row.window.Convert(c.limit)
			} else {
				unread = append(unread, c.hash)
			}
			ch.counts[c.hash] = row
		}
	}
	slices.SortFunc(unread, func(a, b [sha256.Size]byte) int { return bytes.Compare(a[:], b[:]) })
	for part := range slices.Chunk(unread, mostChargeRows) {
		if err := readCountRows(ctx, q, ch, part, lock); err != nil {
			return nil, err
		}
	}
	return ch, nil
}

func readCountRows(ctx context.Context, q queryer, ch *charge, hashes [][sha256.Size]byte, lock bool) error {
	var b strings.Builder
	values(&b, "?", len(hashes))
	query := fmt.Sprintf(sqlCounts, b.String())
	if lock {
		query += " ORDER BY limit_hash FOR UPDATE"
	}
	args := make([]any, len(hashes))
	for i := range hashes {
		args[i] = hashes[i][:]
	}
	rows, err := q.QueryContext(ctx, query, args...)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var (
			hash, state []byte
			version     uint64
		)
		if err := rows.Scan(&hash, &state, &version); err != nil {
			return err
		}
		row := ch.counts[[sha256.Size]byte(hash)]
		row.version = version
		if row.window, err = window.Parse(state, row.limit); err != nil {
			return fmt.Errorf("t_limit_count: %w", err)
		}
	}
	return rows.Err()
}

// take counts a message against all its limits, or against none.
func (ch *charge) take(counters []counter, now time.Time) *LimitError {
	need := map[[sha256.Size]byte]int{}
	for _, c := range counters {
		need[c.hash]++
	}
	for _, c := range counters {
		free, next := ch.counts[c.hash].window.Free(c.limit, now)
		if free < need[c.hash] {
			return &LimitError{Kind: c.kind, Channel: c.channel, Limit: c.limit, Wait: max(next.Sub(now), time.Millisecond)}
		}
	}
	for hash, n := range need {
		row := ch.counts[hash]
		row.window.Add(row.limit, ch.at, n)
		row.used = true
	}
	return nil
}

// add puts the charge into a packet.
func (ch *charge) add(p *packet, locked bool) {
	var rows []*count
	for _, row := range ch.counts {
		if row.used {
			rows = append(rows, row)
		}
	}
	if len(rows) == 0 {
		return
	}
	slices.SortFunc(rows, func(a, b *count) int { return bytes.Compare(a.hash[:], b.hash[:]) })
	changes, args := 0, make([]any, 0, 7*len(rows))
	for _, row := range rows {
		changes += 2 // which is how an update counts
		if row.version == 0 {
			changes--
		}
		args = append(args, row.hash[:], row.kind, row.source, row.channel, row.window.Bytes(row.limit), row.next(ch.at), row.window.Over(row.limit))
	}
	var b strings.Builder
	b.WriteString(sqlCharge)
	values(&b, "(?,?,?,?,?,?,?)", len(rows))
	b.WriteString(sqlChargeEnd)
	p.add(b.String(), args...)
	p.expect(changes)
	if !locked {
		p.add(sqlInTime, ch.at)
	}
}

// kept is what this process wrote last of a counter that many packets charge.
func (l *limiter) kept(c counter) (count, bool) {
	if c.kind == KindRecipient { // read anew each time, without charging
		return count{}, false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	row, ok := l.shared[c.hash]
	return row, ok
}

// keep remembers what was written of counters that many packets charge; forget makes the next packet read them.
func (l *limiter) keep(ch *charge) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for hash, row := range ch.counts {
		if row.used && row.kind != KindRecipient {
			kept := *row
			kept.version = row.next(ch.at)
			l.shared[hash] = kept
		}
	}
}

func (l *limiter) forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.shared)
}

// Quota is a limit of a channel: of one source, or, without one, of all together.
type Quota struct {
	ID       uint64      `db:"id"`
	SourceID string      `db:"source_id"`
	Channel  msg.Channel `db:"channel"`
	Num      int         `db:"num"`
	UnitMS   int64       `db:"unit"`
	Created  time.Time   `db:"create_time"`
	Modified time.Time   `db:"modify_time"`
}

func (q *Quota) limit() window.Limit {
	return window.Limit{Num: q.Num, Unit: time.Duration(q.UnitMS) * time.Millisecond}
}

func quotaTable(source string) string {
	if source == "" {
		return "t_global_quota"
	}
	return "t_source_quota"
}

type quotaKey struct {
	source  string
	channel msg.Channel
}

type quotaSet struct{ byChannel map[quotaKey][]Quota }

// limits tells whether there is a quota for a source on a channel.
func (q quotaSet) limits(source string, channel msg.Channel) bool {
	return len(q.byChannel) > 0 && (len(q.byChannel[quotaKey{"", channel}]) > 0 || len(q.byChannel[quotaKey{source, channel}]) > 0)
}

const (
	sqlQuotas = `SELECT /* tidings:quotas */ id, '' AS source_id, channel, num, unit, create_time, modify_time FROM t_global_quota
		UNION ALL SELECT id, source_id, channel, num, unit, create_time, modify_time FROM t_source_quota ORDER BY source_id, channel, unit`
)

// Quotas lists all quotas: those of all callers together first.
func (s *Store) Quotas(ctx context.Context) (list []Quota, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	err = s.db.SelectContext(ctx, &list, sqlQuotas)
	return list, public(err)
}

// currentQuotas is what holds now. When the database does not answer, the last copy serves: what it limits cannot be accepted
// then anyway.
func (s *Store) currentQuotas(ctx context.Context) quotaSet {
	set, _ := s.limits.quotas.get(ctx)
	return set
}

func (s *Store) loadQuotas(ctx context.Context) (quotaSet, error) {
	list, err := s.Quotas(ctx)
	set := quotaSet{map[quotaKey][]Quota{}}
	for _, one := range list {
		k := quotaKey{one.SourceID, one.Channel}
		set.byChannel[k] = append(set.byChannel[k], one)
	}
	return set, err
}
