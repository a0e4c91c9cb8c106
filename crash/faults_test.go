package crash

import (
	"syscall"
	"time"
)

// faults by name. Each returns when it is over, and everything runs again.
var faults = map[string]func(*rig){
	"kill": func(r *rig) { // a node
		n := r.one()
		n.stop(r.t, syscall.SIGKILL)
		n.start(r.t)
	},
	"term": func(r *rig) {
		n := r.one()
		n.stop(r.t, syscall.SIGTERM)
		n.start(r.t)
	},
	"stop": func(r *rig) { // a node stands still, for less or for longer than its lease
		n := r.one()
		n.cmd.Process.Signal(syscall.SIGSTOP)
		r.sleep(200*time.Millisecond, 2*lease)
		n.cmd.Process.Signal(syscall.SIGCONT)
	},
	"killdb": func(r *rig) {
		pid := r.db.PID()
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil { // it has ended by itself since it was last seen
			r.t.Logf("kill the database, process %d: %v", pid, err)
		}
		r.awaitDB(pid)
	},
	"stopdb": func(r *rig) { // the database stands still
		pid := r.db.PID()
		syscall.Kill(pid, syscall.SIGSTOP)
		r.sleep(200*time.Millisecond, lease)
		syscall.Kill(pid, syscall.SIGCONT)
	},
	"cut": func(r *rig) { // connections break after COMMIT was sent, before its answer
		r.proxy.cut.Store(40)
		r.sleep(200*time.Millisecond, 2*time.Second)
		r.proxy.cut.Store(0)
	},
	"hole": func(r *rig) { // nothing passes between the nodes and the database; then all that waited does
		r.proxy.stall()
		r.sleep(200*time.Millisecond, 2*lease)
		r.proxy.release()
	},
	"late": func(r *rig) { // a table is swapped while what was meant for it is still under way
		r.proxy.late.Store(true)
		time.Sleep(12 * time.Second) // longer than a slot
		r.proxy.late.Store(false)
	},
	"straggler": func(r *rig) { // what was meant for a table comes between the look that found it drained and its swap
		r.proxy.held.on.Store(true)
		time.Sleep(12 * time.Second) // longer than a slot
		r.proxy.held.on.Store(false)
	},
	"clock": func(r *rig) { // the database's clock steps forward or back
		offset := time.Duration(r.random.Int64N(int64(6*time.Second))) - 3*time.Second
		r.t.Logf("the database's clock is set %v off", offset)
		r.clock.set(r.t, offset)
		time.Sleep(1100 * time.Millisecond) // until it is read
	},
	"both": func(r *rig) { // all nodes at once
		for _, n := range r.nodes {
			n.cmd.Process.Signal(syscall.SIGKILL)
		}
		for _, n := range r.nodes {
			n.stop(r.t, syscall.SIGKILL)
			n.start(r.t)
		}
	},
}

var allFaults = []string{"kill", "killdb", "stop", "cut", "hole", "term", "stopdb", "clock", "both", "late", "straggler"}

func (r *rig) one() *node { return r.nodes[r.random.IntN(len(r.nodes))] }

func (r *rig) sleep(least, most time.Duration) {
	time.Sleep(least + time.Duration(r.random.Int64N(int64(most-least))))
}

// awaitDB waits for the server after the one with a process id.
func (r *rig) awaitDB(pid int) {
	r.t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		if now := r.db.PID(); now != 0 && now != pid && r.view.Ping() == nil {
			return
		}
		if time.Now().After(deadline) {
			r.t.Fatal("the database does not come back")
		}
	}
}

// hit makes one fault, and notes when it was at work.
func (r *rig) hit(name string) {
	s := span{what: name, start: time.Now()}
	faults[name](r)
	s.end = time.Now()
	r.faults = append(r.faults, s)
}
