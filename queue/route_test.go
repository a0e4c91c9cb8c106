package queue

import (
	"fmt"
	"testing"
	"time"

	"tidings/internal/msg"
	"tidings/internal/policy"
	"tidings/sender"
	"tidings/store"
)

// Every cell of category, how the chain is found, and time left: who is asked, or what becomes of the task instead.
func TestRoute(t *testing.T) {
	t.Parallel()
	local := time.Now()
	up := status{usable: true}
	down := func(ago time.Duration) status { return status{down: local.Add(-ago)} }
	resting := status{wait: 30 * time.Second} // busy, or paused by hand: not down
	long := status{wait: time.Hour}
	const (
		ask  = msg.Sending // here: somebody is asked
		wait = msg.Ready
		skip = msg.Skipped
		over = msg.Expired
	)
	for _, tt := range []struct {
		chain                  string
		found                  []status
		ver, note, mark        msg.State
		verGate                int
		leastWait, longestWait time.Duration
	}{
		{chain: "first in order", found: []status{up}, ver: ask, note: ask, mark: ask},
		{chain: "first of two in order", found: []status{up, up}, ver: ask, note: ask, mark: ask},
		{chain: "first in order, second down", found: []status{up, down(time.Hour)}, ver: ask, note: ask, mark: ask},
		{chain: "one, down", found: []status{down(time.Second)}, ver: wait, note: wait, mark: wait, leastWait: 800 * time.Millisecond, longestWait: 1200 * time.Millisecond},
		{chain: "one, down for long", found: []status{down(time.Hour)}, ver: wait, note: wait, mark: skip},
		{chain: "one, down for as long as it takes", found: []status{down(30 * time.Second)}, ver: wait, note: wait, mark: skip},
		{chain: "one, resting", found: []status{resting}, ver: wait, note: wait, mark: wait, leastWait: 24 * time.Second, longestWait: 36 * time.Second},
		{chain: "one, resting for long", found: []status{long}, ver: wait, note: wait, mark: wait, leastWait: 24 * time.Second, longestWait: 36 * time.Second},
		{chain: "first down, second in order", found: []status{down(time.Hour), up}, ver: ask, verGate: 1, note: wait, mark: wait},
		{chain: "first resting, second in order", found: []status{resting, up}, ver: ask, verGate: 1, note: wait, mark: wait},
		{chain: "first and second down, third in order", found: []status{down(time.Hour), down(time.Hour), up}, ver: ask, verGate: 2, note: wait, mark: wait},
		{chain: "both down, the second not for long", found: []status{down(time.Hour), down(time.Second)}, ver: wait, note: wait, mark: wait},
		{chain: "both down for long", found: []status{down(time.Hour), down(time.Minute)}, ver: wait, note: wait, mark: skip},
		{chain: "down, and resting", found: []status{down(time.Hour), resting}, ver: wait, note: wait, mark: wait},
	} {
		for category, want := range map[msg.Category]msg.State{msg.Verification: tt.ver, msg.Notification: tt.note, msg.Marketing: tt.mark} {
			for _, left := range []time.Duration{time.Hour, 0, -time.Second} {
				t.Run(fmt.Sprintf("%s, %s, %v left", tt.chain, category, left), func(t *testing.T) {
					t.Parallel()
					task := store.Task{MsgID: 7, Channel: msg.SMS, Category: category, Attempt: 1, Due: now, Expire: now.Add(left)}
					r := chooseRoute(&task, policy.Defaults()[category], tt.found, 30*time.Second, now, local)
					want, gate := want, -1
					if left <= 0 {
						want = over
					}
					if want == ask {
						want, gate = msg.Ready, 0
						if category == msg.Verification {
							gate = tt.verGate
						}
					}
					if r.gate != gate || r.state != want {
						t.Errorf("provider %d, state %v; want %d, %v", r.gate, r.state, gate, want)
					}
					if gate < 0 && want == msg.Ready && (r.wait < max(tt.leastWait, 800*time.Millisecond) || (tt.longestWait > 0 && r.wait > tt.longestWait)) {
						t.Errorf("waits %v, want %v to %v", r.wait, tt.leastWait, tt.longestWait)
					}
					if (want == skip || want == over) == (r.why == "") {
						t.Errorf("the reason is %q", r.why)
					}
				})
			}
		}
	}
}

// Every cell of category, verdict, attempts left and time left. (How the breaker is found is the route's business, before the attempt: TestRoute.)
func TestDecideEveryCell(t *testing.T) {
	t.Parallel()
	const (
		ready, sent, failed, dead, expired = msg.Ready, msg.Success, msg.Failed, msg.Dead, msg.Expired
	)
	for _, tt := range []struct {
		verdict sender.Kind
		// with attempts and time left; with the last attempt; with no time left; with neither.
		ver, note, mark [4]msg.State
	}{
		{sender.Success, [4]msg.State{sent, sent, sent, sent}, [4]msg.State{sent, sent, sent, sent}, [4]msg.State{sent, sent, sent, sent}},
		{sender.Permanent, [4]msg.State{failed, failed, failed, failed}, [4]msg.State{failed, failed, failed, failed}, [4]msg.State{failed, failed, failed, failed}},
		{sender.Temporary, [4]msg.State{ready, dead, expired, dead}, [4]msg.State{ready, dead, expired, dead}, [4]msg.State{ready, dead, expired, dead}},
		{sender.Busy, [4]msg.State{ready, ready, expired, expired}, [4]msg.State{ready, ready, expired, expired}, [4]msg.State{ready, ready, expired, expired}},
		{sender.Unknown, [4]msg.State{ready, dead, expired, dead}, [4]msg.State{ready, dead, expired, dead}, [4]msg.State{dead, dead, dead, dead}},
	} {
		for category, cells := range map[msg.Category][4]msg.State{msg.Verification: tt.ver, msg.Notification: tt.note, msg.Marketing: tt.mark} {
			for cell, want := range cells {
				p := policy.Defaults()[category]
				task := store.Task{MsgID: 7, Channel: msg.SMS, Category: category, Status: msg.Sending, Attempt: 1, AttemptLimit: p.Attempts, Expire: now.Add(100 * time.Hour)}
				if cell == 1 || cell == 3 {
					task.Attempt = p.Attempts
				}
				if cell >= 2 {
					task.Expire = now
				}
				o := decide(&task, result{Verdict: sender.Verdict{Kind: tt.verdict}, Provider: "p"}, p, now)
				if o.State != want {
					t.Errorf("%s, %s, cell %d: %v, want %v", category, tt.verdict, cell, o.State, want)
				}
				if o.Uncounted != (tt.verdict == sender.Busy) {
					t.Errorf("%s, %s, cell %d: uncounted %v", category, tt.verdict, cell, o.Uncounted)
				}
			}
		}
	}
}
