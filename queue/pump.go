package queue

import (
	"context"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"tidings/internal/metrics"
	"tidings/internal/msg"
	"tidings/internal/policy"
	"tidings/sender"
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
	idleWorkers chan job
	gates       []*gate // the channel's providers, in their order
	total       int     // slots of all of them
	skips       bool    // some policy skips messages while the channel is degraded
	counters    map[*gate]*metrics.Attempts
	latency     [len(msg.Lanes)]prometheus.Observer // nil: nothing is counted

	credit    [len(msg.Lanes)]int
	rowBytes  int // size of the biggest row claimed last, to keep claims of big ones small
	lastClaim time.Time
	wait      [len(msg.Lanes)]time.Duration // before the next look at a lane that had less than was asked for
	marks     [len(msg.Lanes)]checkpoint
	sorted    time.Time                 // when tasks were last claimed of which most have to wait
	retryAt   [len(msg.Lanes)]time.Time // when the last of a lane's second and later attempts that were put off will come

	expiry [len(msg.Lanes)]store.DueCursor // how far the scout has looked for expired tasks; it owns them

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

// job is a task on its way, and the provider that it goes to.
type job struct {
	store.Task
	via *gate
}

func newPump(e *Engine, c Channel) *pump {
	p := &pump{engine: e, channel: c, wake: make(chan struct{}, 1), idleWorkers: make(chan job), counters: map[*gate]*metrics.Attempts{}}
	for i := range p.look {
		p.look[i] = never
		p.wait[i] = firstWait
	}
	for _, provider := range c.Providers {
		g := e.gates[provider.Name]
		if g == nil { // a provider that serves several channels has its limits once
			g = newGate(provider, c.Slots, e.log)
			e.gates[provider.Name] = g
		}
		g.users = append(g.users, p)
		p.gates, p.total = append(p.gates, g), p.total+g.slots
		p.counters[g] = e.cfg.Metrics.Attempts(c.Channel.String(), g.Name, sender.Kinds()...)
	}
	for _, l := range msg.Lanes {
		p.latency[l] = e.cfg.Metrics.Latency(l.String(), c.Channel.String())
	}
	p.free = p.total
	for _, own := range e.cfg.Policies {
		p.skips = p.skips || own.Degrade == policy.Skip
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

// Reserve grants free slots to tasks that are about to be accepted, unless others of the channel wait before them. While less urgent
// ones wait, high takes the slots that are its own, so that it starves nobody.
func (e *Engine) Reserve(lane msg.Lane, channel msg.Channel, n int) store.Reservation {
	p := e.pumps[channel]
	if p == nil || e.heldBytes.Load() > mostHeldBytes {
		return nil
	}
	lanes := e.lanes.Load()
	if lanes.paused[lane] {
		return nil
	}
	e.handOff.RLock()
	defer e.handOff.RUnlock()
	if e.stopping {
		return nil
	}
	now, first := time.Now(), p.gates[0]
	if !first.status(now).usable {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	n = min(n, p.free)
	for l := range p.look {
		if lanes.paused[l] || (!p.passing[l] && p.look[l].After(now)) {
			continue
		}
		if msg.Lane(l) <= lane {
			return nil
		}
		if lane == msg.High {
			n = min(n, first.ownPlaces())
		} else {
			return nil
		}
	}
	if n <= 0 {
		return nil
	}
	if n = min(n, first.room(lane == msg.High)); n > 0 {
		n = first.take(n, lane == msg.High)
	}
	if n <= 0 {
		return nil
	}
	p.free -= n
	e.workers.Add(1) // Stop waits for the reservation, too
	return &reservation{p, lane, n}
}

// reservation is a number of a pump's slots, and places at its first provider.
type reservation struct {
	pump *pump
	lane msg.Lane
	n    int
}

func (r *reservation) Granted() int { return r.n }

func (r *reservation) Start(tasks []store.Task) {
	defer r.pump.engine.workers.Done()
	r.pump.engine.hold(tasks)
	jobs := make([]job, len(tasks))
	for i := range tasks {
		jobs[i] = job{tasks[i], r.pump.gates[0]}
	}
	r.pump.start(jobs)
	if left := r.n - len(tasks); left > 0 {
		r.pump.gates[0].give(left, r.lane == msg.High)
		r.pump.freed(left)
	}
}

func (r *reservation) Release() {
	r.pump.gates[0].give(r.n, r.lane == msg.High)
	r.pump.freed(r.n)
	r.pump.engine.workers.Done()
}

// start gives each task to a worker. Their slots are taken already. Each worker has its own copy: one slow send must not
// keep all contents in memory.
func (p *pump) start(jobs []job) {
	p.engine.workers.Add(len(jobs))
	for _, j := range jobs {
		select {
		case p.idleWorkers <- j:
		default:
			go p.worker(j)
		}
	}
}

// worker makes attempts until there has been nothing to do for a while. A goroutine for each attempt would grow its stack
// anew each time, which took a tenth of the process's time.
func (p *pump) worker(j job) {
	rest := time.NewTimer(workerRest)
	defer rest.Stop()
	for {
		p.work(&j)
		j.via.give(1, j.Lane == msg.High)
		p.freed(1)
		j = job{}
		p.engine.workers.Done()
		rest.Reset(workerRest)
		select {
		case j = <-p.idleWorkers:
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

// chain is how the channel's providers are found now.
func (p *pump) chain(now time.Time) []status {
	chain := make([]status, len(p.gates))
	for i, g := range p.gates {
		chain[i] = g.status(now)
	}
	return chain
}

// way is what the state of the providers lets the pump do.
type way uint8

const (
	wayOpen   way = iota // the first provider is asked
	waySort              // it is not: some tasks go to another, or end; the others are put back for later
	wayClosed            // nothing can be done
)

// wayNow tells what the pump may do, for how many tasks of high, which may have the most, and if for none, how long to wait for more;
// 0: until something changes.
func (p *pump) wayNow(now time.Time) (w way, room int, wait time.Duration) {
	chain := p.chain(now)
	if chain[0].usable {
		if room = p.gates[0].room(true); room == 0 {
			wait = p.gates[0].refill()
		}
		return wayOpen, room, wait
	}
	w = wayClosed
	for i, s := range chain[1:] {
		if g := p.gates[i+1]; s.usable {
			w = waySort
			if n := g.room(true); n > 0 {
				room = max(room, min(max(n, leastSort), sortRows))
			} else if refill := g.refill(); wait == 0 || (refill > 0 && refill < wait) {
				wait = refill
			}
		}
	}
	if down, since := degradedSince(chain); down && p.skips {
		if rest := p.engine.cfg.DegradeAfter - now.Sub(since); rest <= 0 {
			w, room = waySort, sortRows
		} else if wait == 0 || rest < wait {
			wait = rest
		}
	}
	return w, room, wait
}

// paced is wayNow at the pace at which tasks are sorted. Only the pump's goroutine may ask.
func (p *pump) paced(now time.Time) (w way, room int, wait time.Duration) {
	w, room, wait = p.wayNow(now)
	if rest := sortEvery - now.Sub(p.sorted); w == waySort && room > 0 && rest > 0 {
		return w, 0, rest
	}
	return w, room, wait
}

// roomFor is how many tasks of a lane may be claimed: others than high leave its places free.
func (p *pump) roomFor(lane msg.Lane, w way, room int) int {
	if w == wayOpen && lane != msg.High {
		return min(room, p.gates[0].room(false))
	}
	return room
}

// While most tasks have to wait, so many are claimed each time to find those that need not.
const (
	sortRows  = 100
	leastSort = 10
	sortEvery = 50 * time.Millisecond
)

// idle is how long there is nothing to do: until the next look at a lane that may have slots, and a provider that may be asked.
func (p *pump) idle() time.Duration {
	now := time.Now()
	w, room, refill := p.paced(now)
	lanes := p.engine.lanes.Load()
	var may [len(msg.Lanes)]bool
	for l := range may {
		may[l] = !lanes.paused[l] && p.roomFor(msg.Lane(l), w, room) > 0
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	next, held := never, false
	for lane, when := range p.look {
		switch {
		case lanes.paused[lane]:
		case !may[lane] && !when.After(now):
			held = true
		case when.Before(next):
			next = when
		}
	}
	wait := next.Sub(now)
	p.starved = held || p.free == 0
	if p.starved { // a slot that becomes free, or a provider that is in order again, ends it
		if refill == 0 || room > 0 {
			refill = time.Second
		}
		wait = min(wait, refill)
	}
	switch {
	case p.engine.heldBytes.Load() > mostHeldBytes:
		return gatherWait
	case p.free == 0:
		return max(wait, time.Millisecond)
	case p.free < (p.total+3)/4:
		wait = max(wait, time.Until(p.lastClaim.Add(gatherWait)))
	}
	return max(wait, 0)
}

// takeDue tells which lanes are due for a look. Their next look is cleared before it happens, so that a wake-up during
// the look is not lost. Without a free slot they stay due, and so do lanes that are paused.
func (p *pump) takeDue() (hungry [len(msg.Lanes)]bool) {
	now := time.Now()
	lanes := p.engine.lanes.Load()
	w, room, _ := p.paced(now)
	p.mu.Lock()
	defer p.mu.Unlock()
	for lane, when := range p.look {
		if p.free > 0 && !when.After(now) && !lanes.paused[lane] && p.roomFor(msg.Lane(lane), w, room) > 0 {
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
	now := time.Now()
	p.lastClaim = now
	w, room, _ := p.paced(now)
	if w == waySort && room > 0 {
		p.sorted = now
	}
	budget := p.budget(room)
	defer func() {
		p.mu.Lock()
		p.passing = [len(msg.Lanes)]bool{}
		p.free += budget // what was not used of it
		p.mu.Unlock()
	}()
	weights := p.engine.lanes.Load().weights
	full := hungry // lanes that could take more, but may not
	for budget > 0 && hungry != [len(msg.Lanes)]bool{} {
		for lane, share := range split(budget, weights, hungry, &p.credit) {
			lane := msg.Lane(lane)
			if share == 0 {
				continue
			}
			if share = min(share, p.roomFor(lane, w, share)); share <= 0 {
				hungry[lane] = false
				continue
			}
			got, err := p.claim(ctx, lane, share)
			budget -= got
			if err != nil {
				hungry[lane], full[lane] = false, false
				p.lookAt(lane, time.Now().Add(errorWait))
			} else if got < share {
				hungry[lane], full[lane] = false, false
				wait := p.pause(lane, got)
				p.lookAt(lane, time.Now().Add(wait))
				if got > 0 || wait > lastWait { // else the looks that follow tell
					p.lookAhead(ctx, lane)
				}
			}
		}
	}
	for lane, still := range full {
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
func (p *pump) budget(room int) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	budget := min(p.free, claimRows, room)
	if p.rowBytes > 0 {
		budget = min(budget, max(min(1, budget), claimBytes/p.rowBytes))
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

// claim takes tasks of a lane and starts a worker for each that may be sent now.
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
		e.cfg.Metrics.Claimed(len(tasks))
		p.rowBytes = taskBytes(&tasks[0])
		for i := range tasks {
			p.rowBytes = max(p.rowBytes, taskBytes(&tasks[i]))
		}
	}
	for i := range recorded {
		e.log.Warn("dropped a task that has a record already", "msg_id", recorded[i].MsgID, "channel", p.channel.Channel)
		e.finish(store.Outcome{Task: recorded[i], AlreadyRecorded: true})
	}
	jobs := p.place(lane, tasks)
	p.start(jobs)
	if unused := len(tasks) + len(recorded) - len(jobs); unused > 0 {
		p.freed(unused)
	}
	return len(tasks) + len(recorded), nil
}

// place finds a provider for each task. Those that may not be sent now are put back for later, or end.
func (p *pump) place(lane msg.Lane, tasks []store.Task) (jobs []job) {
	e, local := p.engine, time.Now()
	now, chain := e.store.Now(), p.chain(local)
	bound := make([][]*store.Task, len(p.gates))
	for i := range tasks {
		t := &tasks[i]
		r := chooseRoute(t, e.policy(t), chain, e.cfg.DegradeAfter, now, local)
		if r.gate >= 0 {
			if wait := p.retryWait(lane, t); wait > 0 {
				r = route{gate: -1, state: msg.Ready, wait: wait}
			}
		}
		if r.gate < 0 {
			e.finish(unsent(t, r, now))
			continue
		}
		bound[r.gate] = append(bound[r.gate], t)
	}
	for i, g := range p.gates {
		places := g.take(len(bound[i]), lane == msg.High)
		for k, t := range bound[i] {
			if k < places {
				jobs = append(jobs, job{*t, g})
			} else { // no room: soon
				e.finish(unsent(t, route{state: msg.Ready, wait: roomWait}, now))
			}
		}
	}
	return jobs
}

// roomWait is how long a task is put off that was claimed and found no room at its provider.
const roomWait = 100 * time.Millisecond

// retryWait keeps second and later attempts under their rate. What is too much is put off, a lane's tasks one after the other, so that they
// come back one by one. The lanes that have put off share the rate by weight. High may use up what the others have to leave. 0: the attempt
// may be made.
func (p *pump) retryWait(lane msg.Lane, t *store.Task) time.Duration {
	if t.Attempt <= 1 {
		return 0
	}
	e := p.engine
	keep := float64(e.retries.Burst()) * 3 / 10
	if lane == msg.High || e.retries.Burst() == 1 {
		keep = 0
	}
	now := time.Now()
	if e.retries.Tokens() >= 1+keep && e.retries.AllowN(now, 1) {
		return 0
	}
	if p.retryAt[lane].Before(now) {
		p.retryAt[lane] = now
	}
	weights, all := e.lanes.Load().weights, 0
	for l, w := range weights {
		if l == int(lane) || p.retryAt[l].After(now) {
			all += w
		}
	}
	p.retryAt[lane] = p.retryAt[lane].Add(time.Duration(float64(time.Second) / float64(e.retries.Limit()) * float64(all) / float64(weights[lane])))
	return max(p.retryAt[lane].Sub(now), time.Millisecond)
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
	wholeShare  = 49 // a look at the whole lane that took d is not repeated for 49 d
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
