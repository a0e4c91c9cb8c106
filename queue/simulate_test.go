package queue

import (
	"log/slog"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"tidings/internal/msg"
	"tidings/internal/policy"
	"tidings/sender"
	"tidings/store"
)

// simulation is a queue in memory under the real rules: routes, breakers, limits and decisions. A single goroutine plays a process and
// the database; the clock is synctest's. What an attempt ends with, crashes, busy providers and pauses are drawn until the faults stop.
type simulation struct {
	t      *testing.T
	seed   uint64
	random *rand.Rand
	start  time.Time
	gates  []*gate
	mood   []mood
	paused bool
	tasks  []*simulated
	calm   bool // faults have stopped
}

type mood uint8

const (
	good mood = iota
	failing
	silent
	busy
	moods
)

type simulated struct {
	store.Task
	state    msg.State
	next     time.Time
	sends    int       // attempts that reached a provider
	running  time.Time // when the attempt that runs will end; zero: none runs
	verdict  sender.Verdict
	done     func(sender.Verdict)
	via      int
	orphaned bool // its process has crashed: nobody will report
}

func (s *simulation) fail(format string, args ...any) {
	s.t.Helper()
	s.t.Fatalf("SIMULATION_SEED=%d, %v after the start: "+format, append([]any{s.seed, time.Since(s.start)}, args...)...)
}

type nothing struct{ sender.Provider }

func (nothing) Traits() sender.Traits { return sender.Traits{} }

func newSimulation(t *testing.T, seed uint64) *simulation {
	s := &simulation{t: t, seed: seed, random: rand.New(rand.NewPCG(seed, 0)), start: time.Now()}
	for i := range 1 + s.random.IntN(3) {
		limits := Limits{Concurrency: 1 + s.random.IntN(10), BreakerOpen: 5 * time.Second}
		if s.random.IntN(2) == 0 {
			limits.Rate = float64(1 + s.random.IntN(50))
		}
		if s.random.IntN(2) == 0 {
			limits.Slow = 500 * time.Millisecond
		}
		s.gates = append(s.gates, newGate(Provider{Name: strconv.Itoa(i), Provider: nothing{}, Limits: limits}, 10, slog.New(slog.DiscardHandler)))
	}
	s.mood = make([]mood, len(s.gates))
	return s
}

func (s *simulation) policy(c msg.Category) policy.Policy { return policy.Defaults()[c] }

func (s *simulation) enqueue() {
	c := msg.Categories[s.random.IntN(len(msg.Categories))]
	p, now := s.policy(c), time.Now()
	task := &simulated{state: msg.Ready, next: now}
	task.Task = store.Task{MsgID: uint64(len(s.tasks) + 1), Channel: msg.SMS, Category: c, AttemptLimit: p.Attempts, Due: now, Expire: now.Add(p.Expiry)}
	s.tasks = append(s.tasks, task)
}

// step plays what is due now.
func (s *simulation) step() (open int) {
	for _, t := range s.tasks {
		switch {
		case t.state.Ended() || t.state == msg.Dead:
			continue
		case t.state == msg.Sending && !t.orphaned && !time.Now().Before(t.running):
			s.end(t)
		case t.state == msg.Sending && t.orphaned && !time.Now().Before(t.next), t.state == msg.Unknown && !time.Now().Before(t.next):
			s.recover(t)
		case t.state == msg.Ready && !time.Now().Before(t.next):
			s.begin(t)
		}
		if !t.state.Ended() && t.state != msg.Dead {
			open++
		}
	}
	return open
}

func (s *simulation) begin(t *simulated) {
	now := time.Now()
	if s.paused && now.Before(t.Expire) {
		return
	}
	chain := make([]status, len(s.gates))
	for i, g := range s.gates {
		chain[i] = g.status(now)
	}
	t.Attempt++ // the claim counts
	t.Status = msg.Sending
	r := chooseRoute(&t.Task, s.policy(t.Category), chain, 30*time.Second, now, now)
	if r.gate >= 0 && s.gates[r.gate].take(1, true) == 0 {
		r = route{gate: -1, state: msg.Ready, wait: roomWait}
	}
	if r.gate < 0 {
		s.apply(t, unsent(&t.Task, r, now))
		return
	}
	if !chain[r.gate].usable {
		s.fail("task %d goes to a provider that is not to be asked", t.MsgID)
	}
	done, ok := s.gates[r.gate].attempt()
	if !ok {
		s.gates[r.gate].give(1, true)
		s.apply(t, unsent(&t.Task, route{state: msg.Ready, wait: leastDefer}, now))
		return
	}
	if t.sends++; t.sends > t.AttemptLimit+busyBound {
		s.fail("task %d was sent %d times", t.MsgID, t.sends)
	}
	t.state, t.next, t.via, t.done = msg.Sending, now.Add(time.Minute), r.gate, done
	t.running, t.verdict = now.Add(time.Duration(10+s.random.IntN(300))*time.Millisecond), sender.Verdict{Kind: sender.Success}
	switch s.mood[r.gate] {
	case failing:
		t.verdict.Kind = sender.Temporary
	case silent:
		t.verdict.Kind, t.running = sender.Unknown, now.Add(30*time.Second)
	case busy:
		t.verdict = sender.Verdict{Kind: sender.Busy, RetryAfter: time.Duration(s.random.IntN(20)) * time.Second}
	}
	if s.random.IntN(50) == 0 {
		t.verdict = sender.Verdict{Kind: sender.Permanent}
	}
	if !s.calm && s.random.IntN(60) == 0 { // the process dies during the attempt
		t.orphaned = true
		s.gates[r.gate].give(1, true)
		done(t.verdict)
	}
}

// busyBound: attempts that a busy provider refused are not counted, and each keeps it from being asked for a while.
const busyBound = 10_000

func (s *simulation) end(t *simulated) {
	t.done(t.verdict)
	s.gates[t.via].give(1, true)
	now := time.Now()
	if t.verdict.Kind == sender.Busy {
		s.gates[t.via].busy(now.Add(max(t.verdict.RetryAfter, leastBusyWait)))
	}
	s.apply(t, decide(&t.Task, result{Verdict: t.verdict, Provider: s.gates[t.via].Name}, s.policy(t.Category), now))
}

func (s *simulation) recover(t *simulated) {
	t.Status, t.orphaned = t.state, false
	s.apply(t, decide(&t.Task, result{Provider: "?"}, s.policy(t.Category), time.Now()))
}

func (s *simulation) apply(t *simulated, o store.Outcome) {
	if o.Uncounted {
		t.Attempt--
	}
	if t.state.Ended() || t.state == msg.Dead {
		s.fail("task %d ends twice", t.MsgID)
	}
	if t.Attempt > t.AttemptLimit || t.Attempt < 0 {
		s.fail("task %d has had %d attempts of %d", t.MsgID, t.Attempt, t.AttemptLimit)
	}
	if o.State == msg.Skipped && t.Category != msg.Marketing {
		s.fail("task %d of %s is skipped", t.MsgID, t.Category)
	}
	if t.state, t.next = o.State, o.Next; (t.state == msg.Ready || t.state == msg.Unknown) && o.Next.After(t.Expire) {
		s.fail("task %d is put off until after it expires", t.MsgID)
	}
}

// disturb changes what providers do, who is paused, and accepts messages.
func (s *simulation) disturb() {
	for i := range s.mood {
		if s.random.IntN(40) == 0 {
			s.mood[i] = mood(s.random.IntN(int(moods)))
		}
		if s.random.IntN(100) == 0 {
			s.gates[i].set(s.random.IntN(2) == 0, time.Time{})
		}
	}
	if s.random.IntN(100) == 0 {
		s.paused = !s.paused
	}
	for range s.random.IntN(4) {
		s.enqueue()
	}
}

func (s *simulation) run() {
	for range 300 {
		s.disturb()
		s.step()
		time.Sleep(time.Duration(1+s.random.IntN(1000)) * time.Millisecond)
	}
	s.calm, s.paused = true, false
	for i := range s.gates {
		s.mood[i] = good
		s.gates[i].set(false, time.Time{})
	}
	for range 100_000 {
		if s.step() == 0 {
			return
		}
		time.Sleep(500 * time.Millisecond)
	}
	for _, t := range s.tasks {
		if !t.state.Ended() && t.state != msg.Dead {
			s.fail("task %d never ends: %v, attempt %d of %d, next in %v", t.MsgID, t.state, t.Attempt, t.AttemptLimit, time.Until(t.next))
		}
	}
}

// After faults stop, every task ends, once, within its attempts and its time. SIMULATION_SEED repeats one run.
func TestSimulation(t *testing.T) {
	t.Parallel()
	first, runs := uint64(time.Now().UnixNano()), 150
	if text := os.Getenv("SIMULATION_SEED"); text != "" {
		var err error
		if first, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatal(err)
		}
		runs = 1
	}
	for i := range runs {
		synctest.Test(t, func(t *testing.T) { newSimulation(t, first+uint64(i)).run() })
	}
}
