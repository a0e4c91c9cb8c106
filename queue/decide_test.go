package queue

import (
	"math"
	"testing"
	"time"

	"tidings/internal/msg"
	"tidings/internal/policy"
	"tidings/sender"
	"tidings/store"
)

var now = time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)

// Each row is a cell: category, how the attempt ended, what the provider can do, attempts, time left; and what follows.
func TestDecide(t *testing.T) {
	t.Parallel()
	const (
		ver  = msg.Verification
		note = msg.Notification
		mark = msg.Marketing
	)
	repeatable, receipts := sender.Traits{Repeatable: true}, sender.Traits{Receipts: true}
	for _, tt := range []struct {
		name      string
		category  msg.Category
		verdict   sender.Verdict
		traits    sender.Traits
		attempt   int
		limit     int
		left      time.Duration // until the task expires
		waited    bool          // the task was found in state Unknown
		state     msg.State
		next      time.Duration // from now; without jitter
		uncounted bool
		attempts  string // the attempt row's outcome; empty: none
	}{
		{name: "success", category: note, verdict: sender.Verdict{Kind: sender.Success}, attempt: 1, limit: 5, left: time.Hour, state: msg.Success},
		{name: "success on the last attempt", category: note, verdict: sender.Verdict{Kind: sender.Success}, attempt: 5, limit: 5, left: time.Hour, state: msg.Success},
		{name: "success after expiry", category: note, verdict: sender.Verdict{Kind: sender.Success}, attempt: 1, limit: 5, left: -time.Second, state: msg.Success},
		{name: "permanent", category: ver, verdict: sender.Verdict{Kind: sender.Permanent}, attempt: 1, limit: 4, left: time.Hour, state: msg.Failed, attempts: "permanent"},
		{name: "permanent on the last", category: ver, verdict: sender.Verdict{Kind: sender.Permanent}, attempt: 4, limit: 4, left: time.Hour, state: msg.Failed, attempts: "permanent"},

		{name: "verification, first failure", category: ver, verdict: sender.Verdict{Kind: sender.Temporary}, attempt: 1, limit: 4, left: time.Hour, state: msg.Ready, next: time.Second, attempts: "temporary"},
		{name: "verification, second", category: ver, verdict: sender.Verdict{Kind: sender.Temporary}, attempt: 2, limit: 4, left: time.Hour, state: msg.Ready, next: 5 * time.Second, attempts: "temporary"},
		{name: "verification, third", category: ver, verdict: sender.Verdict{Kind: sender.Temporary}, attempt: 3, limit: 4, left: time.Hour, state: msg.Ready, next: 30 * time.Second, attempts: "temporary"},
		{name: "verification, used up", category: ver, verdict: sender.Verdict{Kind: sender.Temporary}, attempt: 4, limit: 4, left: time.Hour, state: msg.Dead, attempts: "temporary"},
		{name: "verification, requeued: the list starts anew", category: ver, verdict: sender.Verdict{Kind: sender.Temporary}, attempt: 5, limit: 8, left: time.Hour, state: msg.Ready, next: time.Second, attempts: "temporary"},
		{name: "notification, first failure", category: note, verdict: sender.Verdict{Kind: sender.Temporary}, attempt: 1, limit: 5, left: time.Hour, state: msg.Ready, next: 10 * time.Second, attempts: "temporary"},
		{name: "notification, fourth", category: note, verdict: sender.Verdict{Kind: sender.Temporary}, attempt: 4, limit: 5, left: time.Hour, state: msg.Ready, next: 30 * time.Minute, attempts: "temporary"},
		{name: "marketing, first failure", category: mark, verdict: sender.Verdict{Kind: sender.Temporary}, attempt: 1, limit: 4, left: time.Hour, state: msg.Ready, next: time.Minute, attempts: "temporary"},
		{name: "no time for another", category: note, verdict: sender.Verdict{Kind: sender.Temporary}, attempt: 1, limit: 5, left: 2 * time.Second, state: msg.Expired, attempts: "temporary"},
		{name: "used up and out of time", category: note, verdict: sender.Verdict{Kind: sender.Temporary}, attempt: 5, limit: 5, left: time.Second, state: msg.Dead, attempts: "temporary"},
		{name: "a limit set to nonsense by hand", category: note, verdict: sender.Verdict{Kind: sender.Temporary}, attempt: 1, limit: 50, left: time.Hour, state: msg.Ready, next: 10 * time.Second, attempts: "temporary"},

		{name: "busy with a word", category: note, verdict: sender.Verdict{Kind: sender.Busy, RetryAfter: 30 * time.Second}, attempt: 1, limit: 5, left: time.Hour, state: msg.Ready, next: 30 * time.Second, uncounted: true},
		{name: "busy without", category: note, verdict: sender.Verdict{Kind: sender.Busy}, attempt: 1, limit: 5, left: time.Hour, state: msg.Ready, next: 5 * time.Second, uncounted: true},
		{name: "busy for a moment", category: note, verdict: sender.Verdict{Kind: sender.Busy, RetryAfter: time.Millisecond}, attempt: 1, limit: 5, left: time.Hour, state: msg.Ready, next: time.Second, uncounted: true},
		{name: "busy on the last attempt", category: note, verdict: sender.Verdict{Kind: sender.Busy}, attempt: 5, limit: 5, left: time.Hour, state: msg.Ready, next: 5 * time.Second, uncounted: true},
		{name: "busy past expiry", category: ver, verdict: sender.Verdict{Kind: sender.Busy, RetryAfter: time.Hour}, attempt: 1, limit: 4, left: time.Minute, state: msg.Expired, uncounted: true},

		{name: "unknown, repeatable", category: mark, traits: repeatable, attempt: 1, limit: 4, left: time.Hour, state: msg.Ready, attempts: "unknown"},
		{name: "unknown, verification", category: ver, attempt: 1, limit: 4, left: time.Hour, state: msg.Ready, attempts: "unknown"},
		{name: "unknown, notification with receipts", category: note, traits: receipts, attempt: 1, limit: 5, left: time.Hour, state: msg.Unknown, next: 30 * time.Second, attempts: "unknown"},
		{name: "unknown, notification without receipts", category: note, attempt: 1, limit: 5, left: time.Hour, state: msg.Ready, attempts: "unknown"},
		{name: "unknown again, repeatable", category: note, traits: repeatable, attempt: 2, limit: 5, left: time.Hour, state: msg.Ready, next: time.Minute, attempts: "unknown"},
		{name: "unknown again, verification", category: ver, attempt: 3, limit: 4, left: time.Hour, state: msg.Ready, next: 30 * time.Second, attempts: "unknown"},
		{name: "unknown, marketing", category: mark, attempt: 1, limit: 4, left: time.Hour, state: msg.Dead, attempts: "unknown"},
		{name: "unknown, used up", category: ver, traits: repeatable, attempt: 4, limit: 4, left: time.Hour, state: msg.Dead, attempts: "unknown"},
		{name: "unknown, out of time", category: ver, attempt: 1, limit: 4, left: -time.Second, state: msg.Expired, attempts: "unknown"},
		{name: "waited in vain", category: note, traits: receipts, attempt: 1, limit: 5, left: time.Hour, waited: true, state: msg.Ready},
		{name: "waited in vain, used up", category: note, traits: receipts, attempt: 5, limit: 5, left: time.Hour, waited: true, state: msg.Dead},
		{name: "waited in vain, out of time", category: note, traits: receipts, attempt: 1, limit: 5, left: 0, waited: true, state: msg.Expired},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			p := policy.Defaults().For(tt.category, msg.Email)
			p.Jitter = 0
			task := store.Task{MsgID: 1, Channel: msg.Email, Category: tt.category, Status: msg.Sending, Attempt: tt.attempt, AttemptLimit: tt.limit, Expire: now.Add(tt.left)}
			if tt.waited {
				task.Status = msg.Unknown
			}
			o := decide(&task, result{Verdict: tt.verdict, Traits: tt.traits, Provider: "p"}, p, now)
			if o.State != tt.state || o.Uncounted != tt.uncounted {
				t.Errorf("state %v, uncounted %v; want %v, %v", o.State, o.Uncounted, tt.state, tt.uncounted)
			}
			if (o.State == msg.Ready || o.State == msg.Unknown) && !o.Next.Equal(now.Add(tt.next)) {
				t.Errorf("next in %v, want %v", o.Next.Sub(now), tt.next)
			}
			got := ""
			if o.Attempt != nil {
				got = o.Attempt.Outcome
			}
			if got != tt.attempts {
				t.Errorf("attempt row %q, want %q", got, tt.attempts)
			}
		})
	}
}

// The waits of many tasks spread over ±20 % of the policy's, evenly enough that no instant is crowded.
func TestJitter(t *testing.T) {
	t.Parallel()
	p := policy.Defaults().For(msg.Notification, msg.Email)
	var bins [10]int
	const n = 10_000
	for i := range n {
		task := store.Task{MsgID: uint64(i) << 22, Channel: msg.Email, Attempt: 1, AttemptLimit: 5}
		wait := retryWait(&task, p)
		if wait < 8*time.Second || wait > 12*time.Second {
			t.Fatalf("wait %v", wait)
		}
		if again := retryWait(&task, p); again != wait {
			t.Fatal("the same task waits differently")
		}
		bins[min(9, int((wait-8*time.Second)/(400*time.Millisecond)))]++
	}
	for i, count := range bins {
		if math.Abs(float64(count)-n/10) > n/50 {
			t.Errorf("bin %d has %d of %d", i, count, n)
		}
	}
}

func TestInboxRetriesOnce(t *testing.T) {
	t.Parallel()
	if got := policy.Defaults().For(msg.Marketing, msg.Inbox).Attempts; got != 2 {
		t.Fatalf("%d attempts", got)
	}
}

func TestSplit(t *testing.T) {
	t.Parallel()
	weights := [3]int{70, 20, 10}
	for _, tt := range []struct {
		n      int
		hungry [3]bool
		want   [3]int
	}{
		{100, [3]bool{true, true, true}, [3]int{70, 20, 10}},
		{10, [3]bool{true, true, true}, [3]int{7, 2, 1}},
		{100, [3]bool{false, true, true}, [3]int{0, 67, 33}},
		{100, [3]bool{false, false, true}, [3]int{0, 0, 100}},
		{1, [3]bool{true, true, true}, [3]int{1, 0, 0}},
		{5, [3]bool{}, [3]int{}},
		{0, [3]bool{true, true, true}, [3]int{}},
	} {
		var credit [3]int
		if got := split(tt.n, weights, tt.hungry, &credit); got != tt.want {
			t.Errorf("split(%d, %v) = %v, want %v", tt.n, tt.hungry, got, tt.want)
		}
	}
}

// One slot at a time must still come out as 70/20/10, and low must never wait for ever.
func TestSplitOneByOne(t *testing.T) {
	t.Parallel()
	var (
		credit, sum [3]int
		gap         int
	)
	for range 1000 {
		got := split(1, [3]int{70, 20, 10}, [3]bool{true, true, true}, &credit)
		for lane := range sum {
			sum[lane] += got[lane]
		}
		if gap++; got[msg.Low] > 0 {
			gap = 0
		}
		if gap > 11 {
			t.Fatalf("low has waited for %d turns", gap)
		}
	}
	if sum != [3]int{700, 200, 100} {
		t.Fatalf("1000 turns: %v", sum)
	}
}
