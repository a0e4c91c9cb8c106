package store

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"tidings/internal/batch"
	"tidings/internal/id"
	"tidings/internal/msg"
	"tidings/internal/window"
)

// Message is a request that has been checked, ready to be accepted. Its tasks share everything but channel and receiver.
type Message struct {
	SourceID   string
	RequestID  string // the caller's key, unique for the source; empty: none
	BodyHash   [sha256.Size]byte
	BatchID    string
	Category   msg.Category
	Lane       msg.Lane
	TemplateID string
	Params     []byte        // JSON object of the template's variables; nil: none
	Content    []byte        // JSON of a Content; nil when the template says it all
	SendAt     time.Time     // not sent before it; zero: at once
	Expire     time.Time     // not sent after it
	Tasks      []NewTask     // at least one
	Skipped    []SkippedTask // channels that the message was asked to go over, and does not
	SubmitID   uint64        // the row of t_msg_submit that it comes from, which is marked as accepted with it; 0: none. Such messages need a RequestID
}

// NewTask is a message's part on one channel.
type NewTask struct {
	Channel         msg.Channel
	Receiver        string
	AttemptLimit    int
	TemplateVersion uint32
	// Frequency bounds how often the recipient hears of the source in the message's category; Recipient is the receiver in a form
	// that does not depend on how it is written.
	Frequency []window.Limit
	Recipient string
}

// SkippedTask is a task that ends with its message's acceptance: it is recorded as skipped, never queued.
type SkippedTask struct {
	Channel msg.Channel
	Reason  string
}

// Accepted is the answer to Enqueue.
type Accepted struct {
	MsgID     uint64
	Duplicate bool // the key was known, with the same body; MsgID is the first message's
}

// pending is a message whose caller waits.
type pending struct {
	Message
	id          uint64
	key         [sha256.Size]byte
	result      Accepted
	err         error
	done        chan struct{}
	size        int
	gone        atomic.Bool // the caller has given up: nothing needs to be accepted any more
	due         time.Time   // as it was inserted
	next        time.Time   // when it may be claimed: due, or now
	now         time.Time   // of the insertion
	lease       time.Time   // end of the claim that it is inserted under, if it is
	table       string      // the delay table that it waits in; empty: its queue table
	mayBeStored bool        // a packet with it had no answer
	owners      []string    // of each task: the claim that it is inserted under; empty: it is queued
}

// isDue tells whether the message may be sent at once.
func (p *pending) isDue() bool { return p.table == "" && !p.next.After(p.now) }

func (p *pending) finish(result Accepted, err error) {
	p.result, p.err = result, err
	close(p.done)
}

// Limits of a shared transaction.
const (
	enqueueRows     = 500
	enqueueParallel = 2
	enqueueQueue    = 4096
	enqueueBytes    = 64 << 20 // of messages whose callers wait
	maxBatchBytes   = 1 << 20
	// Messages that are accepted alone at the same time: those that met a lock in a batch, and of those whose key is known to
	// be held. Each may hold a packet connection for a lock wait.
	enqueueAlone = 24
	enqueueHeld  = 4
)

func (s *Store) startEnqueues() {
	limits := batch.Limits{Items: enqueueRows, Bytes: min(maxBatchBytes, s.packet/4), Parallel: enqueueParallel, QueueSize: enqueueQueue}
	open := func() *intake {
		way := &intake{}
		way.Batcher = batch.New(limits, func(p *pending) int { return p.size }, func(batch []*pending) {
			defer way.flushing.begin()()
			s.accept(batch)
		})
		return way
	}
	s.enqueues, s.scheduled = open(), open()
	limits.Parallel = 1
	for _, c := range msg.Channels {
		s.quoted[c] = open()
		s.limits.charging[c] = semaphore.NewWeighted(1)
	}
	s.aloneQuoted = semaphore.NewWeighted(enqueueHeld)
	s.waitingBytes = semaphore.NewWeighted(enqueueBytes)
	s.alone = semaphore.NewWeighted(enqueueAlone)
	s.heldAlone = semaphore.NewWeighted(enqueueHeld)
}

// Enqueue accepts a message: when it returns without an error, the message and its key are committed. Concurrent callers
// share transactions. Errors: ErrConflict, ErrLimited, ErrOverloaded, ErrUnavailable, ErrBusy, ErrTooLarge. After ErrUnavailable the message may have been
// accepted all the same; the same call with the same RequestID tells, and does not accept it twice.
func (s *Store) Enqueue(ctx context.Context, m *Message) (Accepted, error) {
	p, err := s.pend(m)
	if err != nil {
		return Accepted{}, err
	}
	way := s.intakeFor(ctx, p)
	if s.crowded(way, m.Lane) {
		return Accepted{}, ErrOverloaded
	}
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	size := int64(min(p.size, enqueueBytes))
	if s.waitingBytes.Acquire(ctx, size) != nil {
		return Accepted{}, fmt.Errorf("%w: too many messages wait to be accepted", ErrUnavailable)
	}
	defer s.waitingBytes.Release(size)
	if !way.Add(ctx, p) {
		return Accepted{}, fmt.Errorf("%w: too many messages wait to be accepted", ErrUnavailable)
	}
	select {
	case <-p.done:
		s.countAccepted(p)
		return p.result, p.err
	case <-ctx.Done():
		p.gone.Store(true)
		return Accepted{}, fmt.Errorf("%w: no commit in time", ErrUnavailable)
	}
}

// crowded tells whether a lane's messages are refused for now, so that more urgent ones get through: low is refused when half of
// the places are taken or a transaction has been under way for 0.3 of what callers wait, middle at three quarters and 0.6.
func (s *Store) crowded(way *intake, lane msg.Lane) bool {
	behind := way.flushing.longest()
	switch waiting := way.Len(); lane {
	case msg.Low:
		return waiting > enqueueQueue/2 || behind > s.cfg.Timeout*3/10
	case msg.Middle:
		return waiting > enqueueQueue*3/4 || behind > s.cfg.Timeout*6/10
	}
	return false
}

// running knows since when calls have been under way.
type running struct {
	mu    sync.Mutex
	since map[*time.Time]bool
}

func (r *running) begin() (end func()) {
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.since == nil {
		r.since = map[*time.Time]bool{}
	}
	r.since[&now] = true
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.since, &now)
	}
}

func (r *running) longest() (d time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for began := range r.since {
		d = max(d, time.Since(*began))
	}
	return d
}

// intake is where messages wait for their transactions.
type intake struct {
	*batch.Batcher[*pending]
	flushing running
}

// intakeFor is where a message waits. Those with a quota wait by channel: who holds a quota's row locked holds up what is charged
// on that channel, and nothing else.
func (s *Store) intakeFor(ctx context.Context, p *pending) *intake {
	quotas := s.currentQuotas(ctx)
	for _, t := range p.Tasks {
		if quotas.limits(p.SourceID, t.Channel) {
			return s.quoted[t.Channel]
		}
	}
	if p.SendAt.After(s.Now().Add(s.cfg.Delay.Lead)) {
		return s.scheduled
	}
	return s.enqueues
}

// EnqueueBatch accepts many messages in one transaction of its own, and answers for each.
func (s *Store) EnqueueBatch(ctx context.Context, messages []Message) ([]Accepted, []error) {
	all := make([]*pending, len(messages))
	results, errs := make([]Accepted, len(messages)), make([]error, len(messages))
	var work []*pending
	for i := range messages {
		p, err := s.pend(&messages[i])
		if err != nil {
			errs[i] = err
			continue
		}
		all[i] = p
		work = append(work, p)
	}
	// A caller that goes away must not cut a packet off: whether it was committed would be anybody's guess.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.cfg.Timeout)
	defer cancel()
	s.acceptAll(ctx, work, true)
	for i, p := range all {
		if p != nil {
			<-p.done
			s.countAccepted(p)
			results[i], errs[i] = p.result, p.err
		}
	}
	return results, errs
}

func (s *Store) countAccepted(p *pending) {
	if p.err == nil && !p.result.Duplicate {
		s.cfg.Metrics.Accepted(1)
	}
}

func (s *Store) pend(m *Message) (*pending, error) {
	msgID, err := s.ids.Next()
	if err != nil {
		return nil, public(err)
	}
	p := &pending{Message: *m, id: msgID, key: requestKey(m.RequestID, msgID), done: make(chan struct{})}
	p.size = (len(m.Tasks) + len(m.Skipped)) * (512 + len(m.Content) + len(m.Params) + len(m.RequestID))
	p.owners = make([]string, len(m.Tasks))
	return p, nil
}

// requestKey is the key's stored form: hashed, so that case, accents and trailing spaces count whatever the column's
// collation thinks of them. Without a key, which is not stored, the id stands in: 24 zero bytes lead it, as they do no hash.
func requestKey(requestID string, msgID uint64) (key [sha256.Size]byte) {
	if requestID != "" {
		return sha256.Sum256([]byte(requestID))
	}
	binary.BigEndian.PutUint64(key[sha256.Size-8:], msgID)
	return key
}

// accept is one flush of the shared batch. Messages whose caller has gone are left out, and those whose key somebody holds
// locked go alone, so that they hold up nobody else.
func (s *Store) accept(batch []*pending) {
	shared := make([]*pending, 0, len(batch))
	for _, p := range batch {
		switch {
		case p.gone.Load():
			p.finish(Accepted{}, ErrUnavailable)
		case s.isHeld(p):
			if !s.heldAlone.TryAcquire(1) {
				p.finish(Accepted{}, ErrBusy)
				continue
			}
			s.background.Go(func() {
				defer s.heldAlone.Release(1)
				s.acceptAlone(p)
			})
		default:
			shared = append(shared, p)
		}
	}
	if len(shared) > 0 {
		ctx, cancel := context.WithTimeout(context.Background(), s.cfg.Timeout)
		defer cancel()
		s.acceptAll(ctx, shared, true)
	}
}

// separate accepts the messages of a batch that met a lock, each alone, in the background: the next batch does not wait.
func (s *Store) separate(batch []*pending) {
	for _, p := range batch {
		s.background.Go(func() {
			ctx, cancel := context.WithTimeout(s.closing, s.cfg.Timeout)
			defer cancel()
			places := s.alone
			if way := s.intakeFor(ctx, p); way != s.enqueues && way != s.scheduled { // they may wait for each other
				places = s.aloneQuoted
			}
			if places.Acquire(ctx, 1) != nil {
				p.finish(Accepted{}, ErrBusy)
				return
			}
			defer places.Release(1)
			s.acceptAlone(p)
		})
	}
}

// acceptAlone accepts a message in a transaction of its own, and remembers whether its key is held.
func (s *Store) acceptAlone(p *pending) {
	ctx, cancel := context.WithTimeout(context.Background(), s.cfg.Timeout)
	defer cancel()
	s.acceptAll(ctx, []*pending{p}, false)
	name := keyName{p.SourceID, p.key}
	if errors.Is(p.err, ErrBusy) && p.RequestID != "" && len(s.counters(s.currentQuotas(ctx), p)) == 0 { // else it may be a limit's row
		s.held.Store(name, time.Now().Add(heldFor))
	} else {
		s.held.Delete(name)
	}
}

// heldFor is how long a key that was found locked is kept out of shared batches, from the last time that it was.
const heldFor = time.Minute

func (s *Store) isHeld(p *pending) bool {
	until, ok := s.held.Load(keyName{p.SourceID, p.key})
	if ok && time.Now().After(until.(time.Time)) {
		s.held.Delete(keyName{p.SourceID, p.key})
		return false
	}
	return ok
}

const optimisticRounds = 3

// acceptAll answers every message of the batch. It inserts all rows at once and hopes; a key that exists rolls everything
// back, is looked up and answered, and the others go on. After three such rounds each message goes alone, so that a storm
// on one key costs its neighbours no more. With handOff, tasks are given to free slots.
func (s *Store) acceptAll(ctx context.Context, batch []*pending, handOff bool) {
	batch = s.collapse(batch)
	misses, known := 0, 0
	for round := 0; len(batch) > 0; round++ {
		if round == optimisticRounds && len(batch) > 1 {
			for _, p := range batch {
				s.acceptAll(ctx, []*pending{p}, false)
			}
			return
		}
		started := time.Now()
		in := insertion{store: s, batch: batch, handOff: handOff, lock: misses >= casMisses}
		err := in.run(ctx)
		if batch = in.batch; len(batch) == 0 { // all were answered by their limits
			return
		}
		if err == nil {
			s.handOver(in.offers, batch, started)
		} else {
			s.withdraw(in.offers, batch, err)
			if mayBeCommitted(err) {
				for _, p := range batch {
					p.mayBeStored = true
				}
			}
		}
		switch {
		case err == nil:
			s.wake(batch)
			for _, p := range batch {
				p.finish(Accepted{MsgID: p.id}, nil)
			}
			return
		case isGuard(err) && misses < retries: // others charged the same limits meanwhile, or it took too long
			misses++
			round--
			batch = s.answerTaken(ctx, batch)
		case isDuplicate(err) && known < retries: // however often the database was away before
			known++
			batch = s.answerKnown(ctx, batch)
		case isLost(err) && ctx.Err() == nil && round < retries: // perhaps committed: ask, then try again
			pause(ctx, 50*time.Millisecond)
			if mayBeCommitted(err) {
				batch = s.answerKeyless(ctx, batch)
			}
			batch = s.answerKnown(ctx, batch)
		case number(err) == erNoSuchTable && round < retries: // the ring of delay tables has been turned meanwhile
			pause(ctx, time.Duration(round)*10*time.Millisecond)
			s.ring.refresh(ctx) // without an answer the next try fails as this one
		case len(batch) > 1 && isLockWait(err): // somebody holds one of the keys: the others must not wait for it
			s.separate(batch)
			return
		case len(batch) > 1 && !isLost(err) && !mustStartAgain(err) && ctx.Err() == nil: // one bad row: nor for that
			s.acceptAll(ctx, batch[:len(batch)/2], false)
			s.acceptAll(ctx, batch[len(batch)/2:], false)
			return
		default:
			s.refuse(batch, err)
			return
		}
	}
}

// refuse answers messages that could not be stored.
func (s *Store) refuse(batch []*pending, err error) {
	if number(err) == erNoSuchTable { // it has been swapped for longer than is waited: the next turn of the ring mends it
		s.log.Warn("a table that messages go into is not there", "err", err)
		err = errors.Join(ErrUnavailable, err)
	}
	for _, p := range batch {
		p.finish(Accepted{}, fmt.Errorf("accept: %w", public(err)))
	}
}

// collapse sorts a batch by key, the order in which rows are locked, and lets the first message of each key stand for
// those that follow it.
func (s *Store) collapse(batch []*pending) []*pending {
	batch = slices.Clone(batch)
	slices.SortStableFunc(batch, func(a, b *pending) int {
		return cmp.Or(cmp.Compare(a.SourceID, b.SourceID), bytes.Compare(a.key[:], b.key[:]))
	})
	kept := batch[:0]
	for _, p := range batch {
		if n := len(kept); n > 0 && kept[n-1].SourceID == p.SourceID && kept[n-1].key == p.key {
			go follow(p, kept[n-1])
			continue
		}
		kept = append(kept, p)
	}
	return kept
}

// follow answers a message as a repetition of one in the same batch.
func follow(p, first *pending) {
	<-first.done
	switch {
	case first.err != nil:
		p.finish(Accepted{}, first.err)
	case first.BodyHash != p.BodyHash:
		p.finish(Accepted{}, ErrConflict)
	default:
		p.finish(Accepted{MsgID: first.result.MsgID, Duplicate: true}, nil)
	}
}

// wake tells of the tasks that were queued.
func (s *Store) wake(batch []*pending) {
	first := map[place]time.Time{}
	for _, p := range batch {
		for i, t := range p.Tasks {
			at, ok := first[place{p.Lane, t.Channel}]
			if p.owners[i] == "" && p.table == "" && (!ok || p.next.Before(at)) {
				first[place{p.Lane, t.Channel}] = p.next
			}
		}
	}
	for at, due := range first {
		s.cfg.Wake(at.lane, at.channel, due)
	}
}

const (
	sqlInsertKeys    = "INSERT /* tidings:accept-keys */ INTO t_idempotency (source_id, request_hash, msg_id, body_hash, expire_time) VALUES "
	sqlInsertTasks   = "INSERT /* tidings:accept-tasks */ INTO %s (%s) VALUES "
	keyGroup         = "(?,?,?,?,UTC_TIMESTAMP(3) + INTERVAL ? SECOND)"
	sqlInsertSkipped = "INSERT /* tidings:accept-skipped */ INTO t_msg_record (msg_id, channel, source_id, request_id, batch_id, category, priority, receiver, " +
		"template_id, status, attempt_limit, due_time, next_time, expire_time, last_error, create_time, modify_time, finish_time) VALUES "
	sqlInsertBatches    = "INSERT /* tidings:accept-batches */ INTO t_batch (source_id, batch_id, first_msg_id, last_msg_id, create_time) VALUES "
	sqlInsertBatchesEnd = " ON DUPLICATE KEY UPDATE first_msg_id = LEAST(first_msg_id, VALUES(first_msg_id)), last_msg_id = GREATEST(last_msg_id, VALUES(last_msg_id))"
	sqlKeys             = "SELECT /* tidings:keys */ source_id, request_hash, msg_id, body_hash FROM t_idempotency WHERE "
)

// insertion is one try to accept a batch, in one transaction. Locks are taken in one order everywhere: submissions, keys by value, limits by
// hash, then the lanes' tables from high to low, each by message id, the record, and campaigns by name.
type insertion struct {
	store   *Store
	batch   []*pending // those that are not answered yet
	handOff bool
	lock    bool // the rows of limits are locked before they are read
	offers  map[place]*offer
	charge  *charge
	skipped stats // what the packet records
	owing   bool  // … and does not add to the figures
}

func (in *insertion) run(ctx context.Context) error {
	s := in.store
	counted, shared := in.counted(ctx)
	if shared {
		end, err := s.limits.begin(ctx, counted)
		if err != nil {
			return errors.Join(errNotSent, err)
		}
		defer end()
	}
	err := s.again(ctx, func() error {
		if in.lock {
			return s.runOn(ctx, func(ctx context.Context, q queryer) (*packet, error) { return in.packet(ctx, counted, q) })
		}
		p, err := in.packet(ctx, counted, s.db)
		if err != nil {
			return errors.Join(errNotSent, err)
		}
		if len(in.batch) == 0 {
			return nil
		}
		return s.run(ctx, p)
	})
	switch {
	case in.skipped.empty():
	case err == nil && in.owing:
		s.owe(in.skipped)
	case isLockWait(err) && !in.owing: // perhaps of the figures
		s.owe(newStats())
	}
	switch {
	case !shared || in.charge == nil:
	case err == nil:
		s.limits.keep(in.charge)
	default:
		s.limits.forget()
	}
	return err
}

// counted tells what each message is counted against, and whether any of it is what many packets charge.
func (in *insertion) counted(ctx context.Context) (counted map[*pending][]counter, shared bool) {
	quotas := in.store.currentQuotas(ctx)
	for _, p := range in.batch {
		counters := in.store.counters(quotas, p)
		if len(counters) == 0 {
			continue
		}
		if counted == nil {
			counted = map[*pending][]counter{}
		}
		counted[p] = counters
		shared = shared || slices.ContainsFunc(counters, func(c counter) bool { return c.kind != KindRecipient })
	}
	return counted, shared
}

// packet makes the transaction's statements. It answers the messages that their limits do not allow.
func (in *insertion) packet(ctx context.Context, counted map[*pending][]counter, q queryer) (*packet, error) {
	s := in.store
	for _, o := range in.offers { // of the try before
		o.Release()
	}
	in.offers = nil
	if len(counted) > 0 {
		allowed, ch, err := s.charged(ctx, in.batch, counted, q, in.lock)
		if err != nil {
			return nil, err
		}
		if in.batch, in.charge = allowed, ch; len(allowed) == 0 {
			return nil, nil
		}
	}
	now := s.Now().Truncate(time.Millisecond)
	in.schedule(ctx, now)
	if in.handOff {
		in.offers = s.offer(in.batch)
	}
	var p packet
	takeSubmitted(&p, in.batch)
	s.insertKeys(&p, in.batch)
	if in.charge != nil {
		in.charge.add(&p, in.lock)
	}
	insertTasks(&p, in.batch)
	insertSkipped(&p, in.batch)
	insertBatches(&p, in.batch)
	if in.skipped = countSkipped(in.batch); !in.skipped.empty() {
		if in.owing = s.figures.owing(); !in.owing {
			p.addRows(in.skipped.rows(s.Node())...)
		}
	}
	return &p, nil
}

// schedule says when each message is due and which table it goes into.
func (in *insertion) schedule(ctx context.Context, now time.Time) {
	s := in.store
	turn := s.turns.Add(1)
	for _, p := range in.batch {
		clear(p.owners)
		p.now, p.due, p.next, p.lease, p.table = now, now, now, now.Add(s.cfg.Lease), ""
		if p.SendAt.IsZero() {
			continue
		}
		if p.due = p.SendAt; p.due.After(now) {
			p.next = p.due
		}
		if p.due.After(now.Add(s.cfg.Delay.Lead)) {
			r, _ := s.ring.get(ctx)
			p.table = r.table(p.due, turn)
		}
	}
}

func (s *Store) insertKeys(p *packet, batch []*pending) {
	args := make([]any, 0, 5*len(batch))
	for _, m := range batch {
		if m.RequestID != "" {
			ttl := s.cfg.IdempotencyTTL + m.next.Sub(m.now)
			args = append(args, m.SourceID, m.key[:], m.id, m.BodyHash[:], int(ttl.Seconds()))
		}
	}
	if len(args) == 0 {
		return
	}
	var b strings.Builder
	b.WriteString(sqlInsertKeys)
	values(&b, keyGroup, len(args)/5)
	p.add(b.String(), args...)
}

// column is one of a task's, with its value for a message's i-th task. It is left out of a statement in which
// all rows have the default: parsing values costs the server about as much as storing them.
type column struct {
	name      string
	value     func(m *pending, i int) any
	isDefault func(m *pending, i int) bool // nil: never
}

func notClaimed(m *pending, i int) bool { return m.owners[i] == "" }

var newTaskColumns = []column{
	{"msg_id", func(m *pending, _ int) any { return m.id }, nil},
	{"channel", func(m *pending, i int) any { return m.Tasks[i].Channel }, nil},
	{"source_id", func(m *pending, _ int) any { return m.SourceID }, nil},
	{"request_id", func(m *pending, _ int) any { return m.RequestID }, func(m *pending, _ int) bool { return m.RequestID == "" }},
	{"batch_id", func(m *pending, _ int) any { return m.BatchID }, func(m *pending, _ int) bool { return m.BatchID == "" }},
	{"category", func(m *pending, _ int) any { return m.Category.String() }, nil},
	{"priority", func(m *pending, _ int) any { return m.Lane.String() }, nil},
	{"receiver", func(m *pending, i int) any { return m.Tasks[i].Receiver }, nil},
	{"template_id", func(m *pending, _ int) any { return m.TemplateID }, func(m *pending, _ int) bool { return m.TemplateID == "" }},
	{"template_version", func(m *pending, i int) any { return m.Tasks[i].TemplateVersion }, func(m *pending, _ int) bool { return m.TemplateID == "" }},
	{"params", func(m *pending, _ int) any { return jsonArg(m.Params) }, func(m *pending, _ int) bool { return m.Params == nil }},
	{"content", func(m *pending, _ int) any { return jsonArg(m.Content) }, func(m *pending, _ int) bool { return m.Content == nil }},
	{"status", func(m *pending, i int) any {
		if notClaimed(m, i) {
			return msg.Ready
		}
		return msg.Sending
	}, notClaimed},
	{"attempt", func(m *pending, i int) any {
		if notClaimed(m, i) {
			return 0
		}
		return 1
	}, notClaimed},
	{"attempt_limit", func(m *pending, i int) any { return m.Tasks[i].AttemptLimit }, nil},
	{"owner", func(m *pending, i int) any { return m.owners[i] }, notClaimed},
	{"due_time", func(m *pending, _ int) any { return m.due }, nil},
	{"next_time", func(m *pending, i int) any {
		if notClaimed(m, i) {
			return m.next
		}
		return m.lease
	}, nil},
	{"expire_time", func(m *pending, _ int) any { return m.Expire }, nil},
	// create_time is the id's own time, so that both sort alike: lists page by id over indexes that hold create_time.
	{"create_time", func(m *pending, _ int) any { return id.Time(m.id) }, nil},
	{"modify_time", func(m *pending, _ int) any { return m.now }, nil},
}

// insertTasks inserts into the lanes' tables, and then into the delay tables by name.
func insertTasks(p *packet, batch []*pending) {
	byTable := map[string][]*pending{}
	for _, m := range batch {
		if len(m.Tasks) > 0 {
			table := cmp.Or(m.table, queueTable(m.Lane))
			byTable[table] = append(byTable[table], m)
		}
	}
	for _, lane := range msg.Lanes {
		if own := byTable[queueTable(lane)]; len(own) > 0 {
			insertInto(p, queueTable(lane), own)
			delete(byTable, queueTable(lane))
		}
	}
	for _, table := range slices.Sorted(maps.Keys(byTable)) {
		insertInto(p, table, byTable[table])
	}
}

func insertInto(p *packet, table string, own []*pending) {
	rows := 0
	for _, m := range own {
		rows += len(m.Tasks)
	}
	slices.SortFunc(own, func(a, b *pending) int { return cmp.Compare(a.id, b.id) })
	var names []string
	columns := slices.DeleteFunc(slices.Clone(newTaskColumns), func(c column) bool { return c.isDefault != nil && allTasks(own, c.isDefault) })
	for _, c := range columns {
		names = append(names, c.name)
	}
	args := make([]any, 0, len(columns)*rows)
	for _, m := range own {
		for i := range m.Tasks {
			for _, c := range columns {
				args = append(args, c.value(m, i))
			}
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, sqlInsertTasks, table, strings.Join(names, ", "))
	values(&b, "("+strings.Repeat("?,", len(columns)-1)+"?)", rows)
	p.add(b.String(), args...)
}

// insertBatches notes between which ids the messages of campaigns lie.
func insertBatches(p *packet, batch []*pending) {
	type span struct{ first, last uint64 }
	spans := map[[2]string]span{}
	for _, m := range batch {
		if m.BatchID == "" {
			continue
		}
		k := [2]string{m.SourceID, m.BatchID}
		sp, ok := spans[k]
		if !ok {
			sp = span{m.id, m.id}
		}
		spans[k] = span{min(sp.first, m.id), max(sp.last, m.id)}
	}
	if len(spans) == 0 {
		return
	}
	args := make([]any, 0, 5*len(spans))
	for _, k := range slices.SortedFunc(maps.Keys(spans), func(a, b [2]string) int { return cmp.Or(cmp.Compare(a[0], b[0]), cmp.Compare(a[1], b[1])) }) {
		args = append(args, k[0], k[1], spans[k].first, spans[k].last)
	}
	var b strings.Builder
	b.WriteString(sqlInsertBatches)
	values(&b, "(?,?,?,?,UTC_TIMESTAMP(3))", len(spans))
	b.WriteString(sqlInsertBatchesEnd)
	p.add(b.String(), args...)
}

// insertSkipped records the tasks that are not to be sent.
func insertSkipped(p *packet, batch []*pending) {
	args, rows := []any{}, 0
	for _, m := range batch {
		for _, t := range m.Skipped {
			rows++
			args = append(args, m.id, t.Channel, m.SourceID, m.RequestID, m.BatchID, m.Category.String(), m.Lane.String(), m.TemplateID, msg.Skipped,
				m.due, m.next, m.Expire, clip(t.Reason, 512), id.Time(m.id), m.now, m.now)
		}
	}
	if rows > 0 {
		var b strings.Builder
		b.WriteString(sqlInsertSkipped)
		values(&b, "(?,?,?,?,?,?,?,'',?,?,0,?,?,?,?,?,?,?)", rows)
		p.add(b.String(), args...)
	}
}

// countSkipped counts the tasks that end with their acceptance.
func countSkipped(batch []*pending) stats {
	sum := newStats()
	for _, m := range batch {
		for _, t := range m.Skipped {
			sum.add(&Task{SourceID: m.SourceID, TemplateID: m.TemplateID, Channel: t.Channel, Category: m.Category}, msg.Skipped, "", m.now, 0)
		}
	}
	return sum
}

func allTasks(messages []*pending, hold func(*pending, int) bool) bool {
	for _, m := range messages {
		for i := range m.Tasks {
			if !hold(m, i) {
				return false
			}
		}
	}
	return true
}

// answerKnown answers the messages whose key is in the table, and returns the others. Our own id behind a key means that an
// earlier try was committed after all.
func (s *Store) answerKnown(ctx context.Context, batch []*pending) []*pending {
	known, err := s.keys(ctx, batch)
	if err != nil {
		if ctx.Err() == nil { // the next insert meets the same trouble and decides
			return batch
		}
		s.refuse(batch, err)
		return nil
	}
	rest := batch[:0]
	for _, p := range batch {
		if p.RequestID == "" {
			rest = append(rest, p)
			continue
		}
		first, ok := known[keyName{p.SourceID, p.key}]
		if !ok {
			rest = append(rest, p)
			continue
		}
		if first.msgID == p.id {
			s.wake([]*pending{p})
		}
		p.answerWith(first)
	}
	return rest
}

// Known finds the message that a message's key stands for, as Enqueue would; 0: there is none. ErrConflict when it was another.
func (s *Store) Known(ctx context.Context, m *Message) (msgID uint64, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	p := &pending{Message: *m, key: requestKey(m.RequestID, 0)}
	known, err := s.keys(ctx, []*pending{p})
	if err != nil {
		return 0, public(err)
	}
	row, ok := known[keyName{m.SourceID, p.key}]
	if ok && row.bodyHash != m.BodyHash {
		return 0, ErrConflict
	}
	return row.msgID, nil
}

// answerKeyless answers the messages without a caller's key after a packet of which nobody knows whether it was, or will
// be, carried out; it returns the others. Those that are found are accepted. The others are not inserted again: nothing
// would keep the first packet, should it come late, from inserting them a second time.
func (s *Store) answerKeyless(ctx context.Context, batch []*pending) (keyed []*pending) {
	var keyless []*pending
	for _, p := range batch {
		if p.RequestID == "" {
			keyless = append(keyless, p)
		} else {
			keyed = append(keyed, p)
		}
	}
	for wait := 50 * time.Millisecond; len(keyless) > 0 && wait < time.Second; wait *= 2 {
		found, err := s.stored(ctx, keyless)
		rest := keyless[:0]
		for _, p := range keyless {
			if found[p.id] {
				s.wake([]*pending{p})
				p.finish(Accepted{MsgID: p.id}, nil)
			} else {
				rest = append(rest, p)
			}
		}
		if keyless = rest; ctx.Err() != nil {
			break
		}
		if err != nil { // an answer is waited for as long as the callers do
			wait = 50 * time.Millisecond
		}
		pause(ctx, wait)
	}
	for _, p := range keyless {
		p.finish(Accepted{}, fmt.Errorf("accept: %w", ErrUnavailable))
	}
	return keyed
}

// stored tells which messages have tasks, wherever.
func (s *Store) stored(ctx context.Context, batch []*pending) (map[uint64]bool, error) {
	ids := make([]uint64, len(batch))
	for i, p := range batch {
		ids[i] = p.id
	}
	messages, err := s.messages(ctx, ids)
	found := map[uint64]bool{}
	for i := range messages {
		found[messages[i].MsgID] = true
	}
	return found, err
}

// answerWith answers a message whose key is known.
func (p *pending) answerWith(first keyRow) {
	switch {
	case first.msgID == p.id: // our own earlier commit
		p.finish(Accepted{MsgID: p.id}, nil)
	case first.bodyHash != p.BodyHash:
		p.finish(Accepted{}, ErrConflict)
	default:
		p.finish(Accepted{MsgID: first.msgID, Duplicate: true}, nil)
	}
}

type keyName struct {
	source string
	key    [sha256.Size]byte
}

type keyRow struct {
	msgID    uint64
	bodyHash [sha256.Size]byte
}

func (s *Store) keys(ctx context.Context, batch []*pending) (map[keyName]keyRow, error) {
	bySource := map[string][]any{}
	for _, p := range batch {
		if p.RequestID != "" {
			bySource[p.SourceID] = append(bySource[p.SourceID], p.key[:])
		}
	}
	if len(bySource) == 0 {
		return nil, nil
	}
	var (
		where []string
		args  []any
	)
	for source, keys := range bySource {
		var b strings.Builder
		values(&b, "?", len(keys))
		where = append(where, "(source_id = ? AND request_hash IN ("+b.String()+"))")
		args = append(append(args, source), keys...)
	}
	rows, err := s.db.QueryContext(ctx, sqlKeys+strings.Join(where, " OR "), args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	known := map[keyName]keyRow{}
	for rows.Next() {
		var (
			name            keyName
			row             keyRow
			hash, body, src []byte
		)
		if err := rows.Scan(&src, &hash, &row.msgID, &body); err != nil {
			return nil, err
		}
		name.source = string(src)
		copy(name.key[:], hash)
		copy(row.bodyHash[:], body)
		known[name] = row
	}
	return known, rows.Err()
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}
