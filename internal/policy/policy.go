// Package policy holds what a category asks for: when to try again and how often, when a message is too late, what to do when
// nobody knows whether it was sent, when its providers are out of order, and whom a dead letter alarms.
package policy

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"tidings/internal/msg"
)

// Policy is how the messages of a category are sent.
type Policy struct {
	Priority msg.Lane        // the lane of a message that names none
	Retry    []time.Duration // waits before the second, third, … attempt
	Attempts int             // so many at most; past the list, its last wait is repeated
	Jitter   float64         // each wait is stretched or shrunk by up to this share of it
	Expiry   time.Duration   // after the due time it is too late to send, unless the message says otherwise
	Unknown  UnknownAction   // what follows an attempt of which nobody knows how it ended
	// UnknownWait is how long a task whose outcome is unknown waits for a receipt, where the provider has one.
	UnknownWait time.Duration
	Degrade     DegradeAction // what to do while the channel's provider is out of order
	Alarm       Alarm         // whom a dead letter tells, and when
}

// UnknownAction is what follows an attempt whose outcome is unknown, with a provider that may send twice.
type UnknownAction uint8

// The actions.
const (
	AskAgain    UnknownAction = iota // send again at once: late is worse than twice
	WaitAndAsk                       // wait UnknownWait for the receipt, then send again
	BuryUnknown                      // a dead letter: twice is worse than never
)

// DegradeAction is what to do while the first provider of a channel is out of order.
type DegradeAction uint8

// The actions.
const (
	Switch DegradeAction = iota // ask the next provider of the chain
	Wait                        // until it is back
	Skip                        // wait, and skip the message once no provider of the chain has been in order for a while
)

// Alarm is when a dead letter is told of.
type Alarm uint8

// The levels.
const (
	AlarmNow Alarm = iota
	AlarmDaily
	AlarmNone
)

var (
	unknownNames = []string{"ask_again", "wait", "dead_letter"}
	degradeNames = []string{"switch", "wait", "skip"}
	alarmNames   = []string{"now", "daily", "none"}
)

// String gives the action's name, as configuration and templates write it.
func (a UnknownAction) String() string { return unknownNames[a] }

// String gives the action's name, as configuration and templates write it.
func (a DegradeAction) String() string { return degradeNames[a] }

// String gives the level's name, as configuration and templates write it.
func (a Alarm) String() string { return alarmNames[a] }

// Set has a policy for every category.
type Set [len(msg.Categories)]Policy

// For returns the policy of a task: its category's, but one quick retry is enough for the inbox, which is a table of ours.
func (s *Set) For(category msg.Category, channel msg.Channel) Policy {
	p := s[category]
	if channel == msg.Inbox {
		p.Retry, p.Attempts = inboxRetry, len(inboxRetry)+1
	}
	return p
}

var inboxRetry = []time.Duration{time.Second}

// Settings say what of a policy is to be different. What is not set stays. They are the same in config.yaml and in a template's policy.
type Settings struct {
	Priority    string          `mapstructure:"priority" json:"-"`
	Retry       []time.Duration `mapstructure:"retry" json:"-"`
	Attempts    int             `mapstructure:"attempts" json:"attempts,omitempty"`
	Jitter      *float64        `mapstructure:"jitter" json:"jitter,omitempty"`
	Expiry      time.Duration   `mapstructure:"expiry" json:"-"`
	Unknown     string          `mapstructure:"unknown" json:"unknown,omitempty"`
	UnknownWait *time.Duration  `mapstructure:"unknown_wait" json:"-"`
	Degrade     string          `mapstructure:"degrade" json:"degrade,omitempty"`
	Alarm       string          `mapstructure:"alarm" json:"alarm,omitempty"`
}

// Limits of policies. A list of waits may be as long as the column that counts attempts.
const (
	mostAttempts = 100
	mostWait     = 30 * 24 * time.Hour
	mostExpiry   = 10 * 365 * 24 * time.Hour
)

// Fault is a setting that cannot be.
type Fault struct{ Key, Text string }

func (f Fault) Error() string { return f.Key + " " + f.Text }

// With returns the policy with settings over it. If anything is wrong with them it returns the policy as it is, and all that is.
func (p Policy) With(s Settings) (Policy, []Fault) {
	before := p
	var faults []Fault
	fault := func(key, format string, args ...any) {
		faults = append(faults, Fault{key, fmt.Sprintf(format, args...)})
	}
	if s.Priority != "" {
		lane, err := msg.ParseLane(s.Priority)
		if err != nil {
			fault("priority", "must be high, middle or low")
		}
		p.Priority = lane
	}
	if s.Retry != nil {
		p.Retry, p.Attempts = s.Retry, len(s.Retry)+1
		for i, wait := range s.Retry {
			if wait < time.Millisecond || wait > mostWait {
				fault("retry", "must be waits between 1ms and %v; number %d is not", mostWait, i+1)
			}
		}
	}
	if s.Attempts != 0 {
		p.Attempts = s.Attempts
	}
	if p.Attempts < 1 || p.Attempts > mostAttempts {
		fault("attempts", "must be between 1 and %d", mostAttempts)
	}
	if p.Attempts > 1 && len(p.Retry) == 0 {
		fault("retry", "must have a wait, for there are several attempts")
	}
	if s.Jitter != nil {
		if p.Jitter = *s.Jitter; p.Jitter < 0 || p.Jitter > 0.9 {
			fault("jitter", "must be between 0 and 0.9")
		}
	}
	if s.Expiry != 0 {
		if p.Expiry = s.Expiry; p.Expiry < time.Second || p.Expiry > mostExpiry {
			fault("expiry", "must be between 1s and 10 years")
		}
	}
	if s.UnknownWait != nil {
		if p.UnknownWait = *s.UnknownWait; p.UnknownWait < 0 || p.UnknownWait > mostWait {
			fault("unknown_wait", "must be between 0s and %v", mostWait)
		}
	}
	choose(&p.Unknown, s.Unknown, unknownNames, "unknown", fault)
	choose(&p.Degrade, s.Degrade, degradeNames, "degrade", fault)
	choose(&p.Alarm, s.Alarm, alarmNames, "alarm", fault)
	if len(faults) > 0 {
		return before, faults
	}
	return p, nil
}

func choose[T ~uint8](into *T, name string, names []string, key string, fault func(key, format string, args ...any)) {
	if name == "" {
		return
	}
	i := slices.Index(names, name)
	if i < 0 {
		fault(key, "must be one of %v", names)
		return
	}
	*into = T(i)
}

// text is how JSON writes settings: waits as text such as 30s.
type text struct {
	Priority    string   `json:"priority,omitempty"`
	Retry       []string `json:"retry,omitempty"`
	Expiry      string   `json:"expiry,omitempty"`
	UnknownWait string   `json:"unknown_wait,omitempty"`
	plain
}

type plain Settings

// MarshalJSON writes what is set.
func (s Settings) MarshalJSON() ([]byte, error) {
	t := text{Priority: s.Priority, plain: plain(s)}
	for _, wait := range s.Retry {
		t.Retry = append(t.Retry, wait.String())
	}
	if s.Expiry != 0 {
		t.Expiry = s.Expiry.String()
	}
	if s.UnknownWait != nil {
		t.UnknownWait = s.UnknownWait.String()
	}
	return json.Marshal(t)
}

// UnmarshalJSON reads what MarshalJSON writes.
func (s *Settings) UnmarshalJSON(data []byte) error {
	var t text
	if err := json.Unmarshal(data, &t); err != nil {
		return err
	}
	*s = Settings(t.plain)
	s.Priority = t.Priority
	var errs []error
	duration := func(key, value string) time.Duration {
		d, err := time.ParseDuration(value)
		if err != nil {
			errs = append(errs, Fault{key, "must be durations such as 30s or 5m"})
		}
		return d
	}
	for _, wait := range t.Retry {
		s.Retry = append(s.Retry, duration("retry", wait))
	}
	if t.Expiry != "" {
		s.Expiry = max(duration("expiry", t.Expiry), 1) // none at all is too short, not unset
	}
	if t.UnknownWait != "" {
		wait := duration("unknown_wait", t.UnknownWait)
		s.UnknownWait = &wait
	}
	return errors.Join(errs...)
}

// Defaults are the policies of a fresh installation.
func Defaults() *Set {
	return &Set{
		msg.Verification: {
			Priority: msg.High, Retry: []time.Duration{time.Second, 5 * time.Second, 30 * time.Second}, Attempts: 4,
			Jitter: 0.2, Expiry: 5 * time.Minute, Unknown: AskAgain, UnknownWait: 30 * time.Second, Degrade: Switch, Alarm: AlarmNow,
		},
		msg.Notification: {
			Priority: msg.Middle, Retry: []time.Duration{10 * time.Second, time.Minute, 5 * time.Minute, 30 * time.Minute}, Attempts: 5,
			Jitter: 0.2, Expiry: 24 * time.Hour, Unknown: WaitAndAsk, UnknownWait: 30 * time.Second, Degrade: Wait, Alarm: AlarmDaily,
		},
		msg.Marketing: {
			Priority: msg.Low, Retry: []time.Duration{time.Minute, 5 * time.Minute, 30 * time.Minute}, Attempts: 4,
			Jitter: 0.2, Expiry: 6 * time.Hour, Unknown: BuryUnknown, UnknownWait: 30 * time.Second, Degrade: Skip, Alarm: AlarmDaily,
		},
	}
}
