package store

import (
	"context"
	"maps"
	"sync"
	"time"

	"tidings/internal/id"
	"tidings/internal/msg"
)

// Reservation is a number of free sending slots. Exactly one of its methods is called, once.
type Reservation interface {
	Granted() int       // at least 1
	Start(tasks []Task) // sends the tasks, at most as many as were granted, and frees the slots that are left
	Release()           // frees the slots
}

// place is where tasks queue up: a lane's table, and in it a channel.
type place struct {
	lane    msg.Lane
	channel msg.Channel
}

// offer is a reservation and the tasks that are to use it.
type offer struct {
	Reservation
	owner string
	left  int // slots without a task
}

// offer asks for slots for a batch's tasks, and marks as many tasks as there are slots as claimed, the oldest first.
func (s *Store) offer(batch []*pending) map[place]*offer {
	wanted := map[place]int{}
	for _, p := range batch {
		for _, t := range p.Tasks {
			if p.isDue() {
				wanted[place{p.Lane, t.Channel}]++
			}
		}
	}
	offers := map[place]*offer{}
	for at, n := range wanted {
		if r := s.cfg.Reserve(at.lane, at.channel, n); r != nil {
			offers[at] = &offer{Reservation: r, owner: s.NewOwner(), left: r.Granted()}
		}
	}
	if len(offers) == 0 {
		return nil
	}
	for _, p := range batch {
		if !p.isDue() {
			continue
		}
		for i, t := range p.Tasks {
			if o := offers[place{p.Lane, t.Channel}]; o != nil && o.left > 0 {
				o.left--
				p.owners[i] = o.owner
			}
		}
	}
	return offers
}

// handOver gives committed tasks to their slots.
func (s *Store) handOver(offers map[place]*offer, batch []*pending, started time.Time) {
	if len(offers) == 0 {
		return
	}
	tasks := map[place][]Task{}
	for _, p := range batch {
		for i := range p.Tasks {
			if p.owners[i] != "" {
				at := place{p.Lane, p.Tasks[i].Channel}
				tasks[at] = append(tasks[at], s.handedTask(p, i, started))
			}
		}
	}
	for at, o := range offers {
		o.Start(tasks[at])
	}
}

// handedTask is a task as its row is, without reading it back.
func (s *Store) handedTask(p *pending, i int, started time.Time) Task {
	return Task{
		MsgID: p.id, Channel: p.Tasks[i].Channel, SourceID: p.SourceID, RequestID: p.RequestID, BatchID: p.BatchID, Category: p.Category, Lane: p.Lane,
		Receiver: p.Tasks[i].Receiver, TemplateID: p.TemplateID, TemplateVersion: p.Tasks[i].TemplateVersion, Params: p.Params, Content: p.Content,
		Status: msg.Sending, Attempt: 1, AttemptLimit: p.Tasks[i].AttemptLimit, Owner: p.owners[i],
		Due: p.due, Next: p.lease, Expire: p.Expire, Created: id.Time(p.id), LeaseEnd: started.Add(s.cfg.Lease),
	}
}

// withdraw frees the slots of a batch that was not committed. When nobody knows whether it was, tasks may stand in their
// tables under a claim that nobody works on: they are put back, or after their lease they would count as attempts of unknown
// outcome.
func (s *Store) withdraw(offers map[place]*offer, batch []*pending, err error) {
	for _, o := range offers {
		o.Release()
	}
	if len(offers) == 0 || !mayBeCommitted(err) {
		return
	}
	var orphans []Outcome
	for _, p := range batch {
		for i, t := range p.Tasks {
			if p.owners[i] != "" {
				task := Task{MsgID: p.id, Channel: t.Channel, Lane: p.Lane, Attempt: 1, Owner: p.owners[i]}
				orphans = append(orphans, Outcome{Task: task, State: msg.Ready, Uncounted: true})
			}
		}
	}
	s.adopt(orphans)
}

// orphanage keeps tasks that may stand in their tables under a claim that nobody works on, until they are found there or
// their lease is over: the packet that nobody had an answer to may still be carried out, long after.
type orphanage struct {
	mu      sync.Mutex
	waiting map[time.Time][]Outcome // by when to give them up
	running bool
}

// adopt takes orphans in, and runs the one goroutine that looks after all of them.
func (s *Store) adopt(orphans []Outcome) {
	o := &s.orphans
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.waiting == nil {
		o.waiting = map[time.Time][]Outcome{}
	}
	o.waiting[time.Now().Add(s.cfg.Lease)] = orphans
	if !o.running {
		o.running = true
		s.background.Go(s.putBackOrphans)
	}
}

func (s *Store) putBackOrphans() {
	for wait := 100 * time.Millisecond; ; wait = min(2*wait, 5*time.Second) {
		if s.closing.Err() != nil || !s.visitOrphans() {
			return
		}
		pause(s.closing, wait)
	}
}

// visitOrphans puts back those that have appeared. It tells whether any are left.
func (s *Store) visitOrphans() (left bool) {
	o := &s.orphans
	o.mu.Lock()
	rounds := maps.Clone(o.waiting)
	o.mu.Unlock()
	for until, orphans := range rounds {
		rest := s.putBack(orphans)
		o.mu.Lock()
		if o.waiting[until] = rest; len(rest) == 0 || time.Now().After(until) {
			delete(o.waiting, until)
		}
		o.mu.Unlock()
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.running = len(o.waiting) > 0
	return o.running
}

// putBack settles orphans as tasks that were not begun, and returns those that are not there, or locked by somebody.
func (s *Store) putBack(orphans []Outcome) (rest []Outcome) {
	now := s.Now()
	for i := range orphans {
		orphans[i].Next, orphans[i].Finished = now, now
	}
	ctx, cancel := context.WithTimeout(s.closing, s.cfg.Timeout)
	defer cancel()
	verdicts, _ := s.Settle(ctx, orphans) // what it did not do is tried again
	for i, verdict := range verdicts {
		if verdict == Done {
			s.cfg.Wake(orphans[i].Task.Lane, orphans[i].Task.Channel, now)
		} else {
			rest = append(rest, orphans[i])
		}
	}
	return rest
}
