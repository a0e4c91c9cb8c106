package queue

import (
	"context"
	"sync"
	"time"

	"tidings/internal/msg"
	"tidings/store"
)

// pump feeds one channel's workers. It claims no more than its free slots can start at once, so nothing waits in memory
// behind a slow send, and a crash strands little. One goroutine runs it and owns the fields above mu; tasks that are handed
// over at acceptance take slots as well, so the rest is shared.
type pump struct {
	engine  *Engine
	channel Channel
	wake    chan struct{}
	// idleWorkers takes a task only if a worker waits for one.
	idleWorkers chan store.Task

	credit    [len(msg.Lanes)]int
	rowBytes  int // size of the biggest row claimed last, to keep claims of big ones small
	lastClaim time.Time
	wait      [len(msg.Lanes)]time.Duration // before the next look at a lane that had less than was asked for
	marks     [len(msg.Lanes)]checkpoint

	mu      sync.Mutex
	free    int
	starved bool                      // the pump waits for slots: a worker that ends is to wake it
	look    [len(msg.Lanes)]time.Time // when each lane is to be looked at next; far ahead: when somebody says so
	passing [len(msg.Lanes)]bool      // the pump is looking at the lane
}

const (
	claimRows  = 500
	claimBytes = 8 << 20
	firstWait  = 10 * time.Millisecond // after a claim that emptied the lane; doubled at each that finds nothing
	lastWait   = 640 * time.Millisecond
	// gatherWait is how long a pump whose slots are mostly busy lets free ones gather, so that it claims several rows at once.
	gatherWait = 5 * time.Millisecond
	errorWait  = 250 * time.Millisecond
	workerRest = 5 * time.Second // before a worker without work ends
)

var never = time.Now().Add(100 * 365 * 24 * time.Hour)

func newPump(e *Engine, c Channel) *pump {
	p := &pump{engine: e, channel: c, wake: make(chan struct{}, 1), idleWorkers: make(chan store.Task), free: c.Slots}
	for i := range p.look {
		p.look[i] = never
		p.wait[i] = firstWait
	}
	return p
}

// lookAt asks for a look at a lane at an instant, or earlier. Any goroutine may call it.
func (p *pump) lookAt(lane msg.Lane, when time.Time) {
	p.mu.Lock()
	earlier := when.Before(p.look[lane])
	if earlier {
		p.look[lane] = when
	}
	p.mu.Unlock()
	if earlier {
		p.poke()
	}
}

func (p *pump) poke() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// freed gives slots back.
func (p *pump) freed(n int) {
	p.mu.Lock()
	p.free += n
	starved := p.starved
	p.mu.Unlock()
	if starved {
		p.poke()
	}
}

// Reserve grants free slots to tasks that are about to be accepted, unless others of the channel wait before them.
func (e *Engine) Reserve(lane msg.Lane, channel msg.Channel, n int) store.Reservation {
	p := e.pumps[channel]
	if p == nil || e.heldBytes.Load() > mostHeldBytes {
		return nil
	}
	e.handOff.RLock()
	defer e.handOff.RUnlock()
	if e.stopping {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	for l := msg.High; l <= lane; l++ {
		if p.passing[l] || !p.look[l].After(now) {
			return nil
		}
	}
	n = min(n, p.free)
	if n == 0 {
		return nil
	}
	p.free -= n
	e.workers.Add(1) // Stop waits for the reservation, too
	return &reservation{p, n}
}

// reservation is a number of a pump's slots.
type reservation struct {
	pump *pump
	n    int
}

func (r *reservation) Granted() int { return r.n }

func (r *reservation) Start(tasks []store.Task) {
	defer r.pump.engine.workers.Done()
	r.pump.engine.hold(tasks)
	r.pump.start(tasks)
	if left := r.n - len(tasks); left > 0 {
		r.pump.freed(left)
	}
}

func (r *reservation) Release() {
	r.pump.freed(r.n)
	r.pump.engine.workers.Done()
}

// start gives each task to a worker. Their slots are taken already. Each worker has its own copy: one slow send must not
// keep all contents in memory.
func (p *pump) start(tasks []store.Task) {
	p.engine.workers.Add(len(tasks))
	for _, t := range tasks {
		select {
		case p.idleWorkers <- t:
		default:
			go p.worker(t)
		}
	}
}

// worker makes attempts until there has been nothing to do for a while. A goroutine for each attempt would grow its stack
// anew each time, which took a tenth of the process's time.
func (p *pump) worker(t store.Task) {
	rest := time.NewTimer(workerRest)
	defer rest.Stop()
	for {
		p.work(&t)
		p.freed(1)
		t = store.Task{}
		p.engine.workers.Done()
		rest.Reset(workerRest)
		select {
		case t = <-p.idleWorkers:
		case <-rest.C:
			return
		case <-p.engine.sends.Done():
			return
		}
	}
}

func (p *pump) run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for ctx.Err() == nil {
		timer.Reset(p.idle())
		select {
		case <-p.wake:
			continue
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		if p.engine.heldBytes.Load() <= mostHeldBytes {
			p.pass(ctx, p.takeDue())
		}
	}
}

// idle is how long there is nothing to do: until the next look, and not before a slot is free.
func (p *pump) idle() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	next := never
	for _, when := range p.look {
		if when.Before(next) {
			next = when
		}
	}
	wait := time.Until(next)
	p.starved = false
	switch {
	case p.engine.heldBytes.Load() > mostHeldBytes:
		return gatherWait
	case p.free == 0:
		p.starved = true
		return time.Second // a slot that becomes free ends it
	case p.free < (p.channel.Slots+3)/4:
		wait = max(wait, time.Until(p.lastClaim.Add(gatherWait)))
	}
	return max(wait, 0)
}

// takeDue tells which lanes are due for a look. Their next look is cleared before it happens, so that a wake-up during
// the look is not lost. Without a free slot they stay due.
func (p *pump) takeDue() (hungry [len(msg.Lanes)]bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	for lane, when := range p.look {
		if p.free > 0 && !when.After(now) {
			hungry[lane] = true
			p.look[lane] = never
		}
	}
	p.passing = hungry
	return hungry
}

// pass claims for the hungry lanes until all are fed or all slots are taken. What one lane leaves of its share goes to
// the others.
func (p *pump) pass(ctx context.Context, hungry [len(msg.Lanes)]bool) {
	p.lastClaim = time.Now()
	budget := p.budget()
	defer func() {
		p.mu.Lock()
		p.passing = [len(msg.Lanes)]bool{}
		p.free += budget // what was not used of it
		p.mu.Unlock()
	}()
	for budget > 0 && hungry != [len(msg.Lanes)]bool{} {
		for lane, share := range split(budget, p.engine.cfg.Weights, hungry, &p.credit) {
			if share == 0 {
				continue
			}
			got, err := p.claim(ctx, msg.Lane(lane), share)
			budget -= got
			if err != nil {
				hungry[lane] = false
				p.lookAt(msg.Lane(lane), time.Now().Add(errorWait))
			} else if got < share {
				hungry[lane] = false
				wait := p.pause(msg.Lane(lane), got)
				p.lookAt(msg.Lane(lane), time.Now().Add(wait))
				if got > 0 || wait > lastWait { // else the looks that follow tell
					p.lookAhead(ctx, msg.Lane(lane))
				}
			}
		}
	}
	for lane, still := range hungry {
		if still {
			p.lookAt(msg.Lane(lane), time.Now())
		}
	}
}

// lookAhead learns when the lane's next task is due: scheduled ones follow each other at instants that nobody wakes the pump for. The
// scout would tell, too, but up to a second late.
func (p *pump) lookAhead(ctx context.Context, lane msg.Lane) {
	call, cancel := context.WithTimeout(ctx, p.engine.cfg.SettleBudget)
	defer cancel()
	next, err := p.engine.store.NextDue(call, lane, p.channel.Channel)
	if err == nil && !next.IsZero() { // after an error the scout finds it
		p.lookAt(lane, p.engine.localTime(next))
	}
}

// budget takes free slots for as many rows as may be claimed now.
func (p *pump) budget() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	budget := min(p.free, claimRows)
	if p.rowBytes > 0 {
		budget = min(budget, max(1, claimBytes/p.rowBytes))
	}
	p.free -= budget
	return budget
}

// pause is how long to leave a lane alone after a claim that found less than was asked for. Another process may have put
// more there; after a few looks in vain it is left to the scout.
func (p *pump) pause(lane msg.Lane, got int) time.Duration {
	if got > 0 {
		p.wait[lane] = firstWait
	}
	wait := p.wait[lane]
	if wait > lastWait {
		return time.Until(never)
	}
	p.wait[lane] = 2 * wait
	return wait
}

// claim takes tasks of a lane and starts a worker for each.
func (p *pump) claim(ctx context.Context, lane msg.Lane, limit int) (got int, err error) {
	e := p.engine
	// A claim that has begun is carried through: rows of ours that nobody knows of would be taken for lost ones.
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), e.store.Lease())
	defer cancel()
	claimed, err := p.take(call, lane, limit)
	tasks, recorded := claimed.Tasks, claimed.Recorded
	if err != nil {
		e.note(err)
		e.log.Warn("cannot claim", "channel", p.channel.Channel, "lane", lane, "err", err)
		return 0, err
	}
	e.hold(tasks)
	e.hold(recorded)
	if len(tasks) > 0 {
		p.rowBytes = taskBytes(&tasks[0])
		for i := range tasks {
			p.rowBytes = max(p.rowBytes, taskBytes(&tasks[i]))
		}
	}
	for i := range recorded {
		e.log.Warn("dropped a task that has a record already", "msg_id", recorded[i].MsgID, "channel", p.channel.Channel)
		e.finish(store.Outcome{Task: recorded[i], AlreadyRecorded: true})
	}
	p.start(tasks)
	if len(recorded) > 0 {
		p.freed(len(recorded))
	}
	return len(tasks) + len(recorded), nil
}

// checkpoint bounds a lane's looks from below. While somebody holds an old snapshot (a backup, a long SELECT), InnoDB keeps
// the index entries of all tasks since, and a look from the beginning walks them each time. So looks begin a little before
// what the last one saw: most of them very little, and some times a second further back, for the rows of transactions that
// committed late. Looks at the whole lane find what turned up behind that; they follow an empty look, and come at least once a
// second, but take no more than a fiftieth of the time.
type checkpoint struct {
	newest    time.Time // next_time that was seen last, by the database's clock; zero: none yet
	lastWide  time.Time
	lastWhole time.Time
	nextWhole time.Time // not before, for its cost
}

const (
	narrowSlack = 200 * time.Millisecond
	wideSlack   = 2 * time.Second
	wideEvery   = 250 * time.Millisecond // at 10,000 a second, wide looks all the time cost a third of the throughput under a snapshot
	wholeEvery  = time.Second
	wholeShare  = 49 // a look at the whole lane that took d is not repeated for 19 d
	mostRest    = 20 * time.Second
)

// take claims tasks of a lane from its checkpoint on, or from the beginning where that is due.
func (p *pump) take(ctx context.Context, lane msg.Lane, limit int) (store.Claimed, error) {
	mark := &p.marks[lane]
	now := time.Now()
	mayWhole := !now.Before(mark.nextWhole)
	if !mark.newest.IsZero() && !(mayWhole && now.Sub(mark.lastWhole) > wholeEvery) {
		slacks := []time.Duration{narrowSlack, wideSlack}
		if now.Sub(mark.lastWide) > wideEvery {
			slacks = slacks[1:]
		}
		for _, slack := range slacks {
			if slack == wideSlack {
				mark.lastWide = now
			}
			c, err := p.engine.store.Claim(ctx, lane, p.channel.Channel, limit, mark.newest.Add(-slack))
			if err != nil || !c.Newest.IsZero() {
				mark.saw(c.Newest)
				return c, err
			}
		}
		if !mayWhole {
			p.lookAt(lane, mark.nextWhole)
			return store.Claimed{}, nil
		}
	}
	began := time.Now()
	c, err := p.engine.store.Claim(ctx, lane, p.channel.Channel, limit, time.Time{})
	mark.lastWhole = time.Now()
	if err == nil { // an error took its time for another reason
		mark.nextWhole = mark.lastWhole.Add(restAfter(mark.lastWhole.Sub(began)))
	}
	mark.saw(c.Newest)
	return c, err
}

// restAfter is how long a look at everything is not repeated, for what it cost. Whatever slowed one down, the next comes
// before a lease is over.
func restAfter(took time.Duration) time.Duration { return min(wholeShare*took, mostRest) }

// saw moves the checkpoint to what a look has seen, forwards or back.
func (m *checkpoint) saw(newest time.Time) {
	if !newest.IsZero() {
		m.newest = newest
	}
}

// split divides n slots among the hungry lanes by weight. credit carries what rounding left over from one call to the
// next, so that even one slot at a time comes out in the weights' proportion and no lane starves.
func split(n int, weights [len(msg.Lanes)]int, hungry [len(msg.Lanes)]bool, credit *[len(msg.Lanes)]int) (shares [len(msg.Lanes)]int) {
	total := 0
	for lane := range weights {
		if hungry[lane] {
			total += weights[lane]
		} else {
			credit[lane] = 0 // a lane without work saves nothing up
		}
	}
	if total == 0 {
		return shares
	}
	left := n
	for lane := range weights {
		if hungry[lane] {
			shares[lane] = n * weights[lane] / total
			credit[lane] += n * weights[lane] % total
			left -= shares[lane]
		}
	}
	for ; left > 0; left-- {
		best := -1
		for lane := range weights {
			if hungry[lane] && (best < 0 || credit[lane] > credit[best]) {
				best = lane
			}
		}
		shares[best]++
		credit[best] -= total
	}
	return shares
}
