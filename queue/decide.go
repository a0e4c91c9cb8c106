package queue

import (
	"cmp"
	"encoding/binary"
	"hash/fnv"
	"math"
	"time"

	"tidings/internal/msg"
	"tidings/internal/policy"
	"tidings/sender"
	"tidings/store"
)

// result is an attempt's end: the provider's verdict and what matters of the provider.
type result struct {
	sender.Verdict
	Provider string
	Traits   sender.Traits
	Latency  time.Duration
}

// decide turns the end of an attempt into the task's outcome. It is pure: now is the database's time, and the jitter comes
// from the task itself. A task found in state Unknown has waited for word of its last attempt in vain.
func decide(t *store.Task, r result, p policy.Policy, now time.Time) store.Outcome {
	o := store.Outcome{
		Task: *t, Provider: r.Provider, Latency: r.Latency, Finished: now, Error: r.Text,
		ProviderMsgID: r.ProviderMsgID,
	}
	switch r.Kind {
	case sender.Success:
		o.State, o.Error = msg.Success, ""
	case sender.Permanent:
		o.State = msg.Failed
		o.Attempt = attempt(r, "permanent")
	case sender.Busy:
		o.State, o.Uncounted = msg.Ready, true
		o.Next = now.Add(max(cmp.Or(r.RetryAfter, busyWait), leastBusyWait))
	case sender.Temporary:
		o.State = msg.Ready
		o.Next = now.Add(retryWait(t, p))
		o.Attempt = attempt(r, "temporary")
		if t.Attempt >= t.AttemptLimit {
			o.State = msg.Dead
		}
	case sender.Unknown:
		decideUnknown(t, r, p, now, &o)
	}
	if (o.State == msg.Ready || o.State == msg.Unknown) && !o.Next.Before(t.Expire) {
		o.State = msg.Expired
		o.Error = "no time is left for another attempt; the last one: " + o.Error
	}
	if o.State == msg.Dead && p.Alarm != policy.AlarmNone {
		o.Alarm = p.Alarm.String()
	}
	return o
}

// decideUnknown answers an attempt that may have been sent. Where asking again cannot hurt it is asked again at once; where
// it can, the category decides what is worse: late, never, or twice.
func decideUnknown(t *store.Task, r result, p policy.Policy, now time.Time, o *store.Outcome) {
	waited := t.Status == msg.Unknown
	if !waited { // else the attempt's row was written when the wait began
		o.Attempt = attempt(r, "unknown")
	}
	o.State, o.Next = msg.Ready, now
	if place(t, p) > 0 && !waited { // the first time it is asked again at once; a provider that stays silent gets more time
		o.Next = now.Add(retryWait(t, p))
	}
	switch {
	case t.Attempt >= t.AttemptLimit:
		o.State = msg.Dead
		o.Error = "outcome unknown, and no attempt is left: " + o.Error
	case waited || r.Traits.Repeatable || p.Unknown == policy.AskAgain:
	case p.Unknown == policy.BuryUnknown:
		o.State = msg.Dead
		o.Error = "outcome unknown: " + o.Error
	case r.Traits.Receipts && p.UnknownWait > 0:
		o.State, o.Next = msg.Unknown, now.Add(p.UnknownWait)
	}
}

// busyWait is how long to stay away from a provider that is busy and does not say for how long, and the least time otherwise.
const (
	busyWait      = 5 * time.Second
	leastBusyWait = time.Second
)

func attempt(r result, outcome string) *store.Attempt {
	return &store.Attempt{Outcome: outcome, Code: r.Code, Text: r.Text}
}

// expired ends a task without an attempt.
func expired(t *store.Task, now time.Time, why string) store.Outcome {
	return store.Outcome{Task: *t, State: msg.Expired, Uncounted: true, Finished: now, Error: why, Provider: t.Provider}
}

// giveBack returns a task that was claimed and not begun.
func giveBack(t *store.Task, now time.Time) store.Outcome {
	return store.Outcome{Task: *t, State: msg.Ready, Next: now, Uncounted: true, Finished: now, Error: t.LastError, Provider: t.Provider}
}

// retryWait is the policy's wait after this attempt, with jitter. A requeued dead letter starts the list anew: its limit was
// raised by the list's length, so the attempts that are left tell the place.
func retryWait(t *store.Task, p policy.Policy) time.Duration {
	if len(p.Retry) == 0 {
		return 0
	}
	wait := p.Retry[min(place(t, p), len(p.Retry)-1)]
	return wait + time.Duration(p.Jitter*spread(t)*float64(wait))
}

// place is how many attempts of the policy's list lie before the task's last one.
func place(t *store.Task, p policy.Policy) int {
	return max(0, p.Attempts-1-(t.AttemptLimit-t.Attempt))
}

// spread is a number in [-1, 1) that differs between tasks and attempts, and is the same each time it is asked for: retries
// of many tasks that failed at one moment spread out, and decide stays pure.
func spread(t *store.Task) float64 {
	h := fnv.New64a()
	var b [16]byte
	binary.LittleEndian.PutUint64(b[:], t.MsgID)
	binary.LittleEndian.PutUint32(b[8:], uint32(t.Channel))
	binary.LittleEndian.PutUint32(b[12:], uint32(t.Attempt))
	h.Write(b[:])
	x := h.Sum64() // FNV's low bits follow the input too closely: finish it as murmur3 does
	x = (x ^ x>>33) * 0xff51afd7ed558ccd
	x ^= x >> 33
	return float64(x)/(math.MaxUint64/2) - 1
}
