// Package policy holds what a category asks for: when to retry, how often, when a message is too late, and what to do when
// nobody knows whether it was sent.
package policy

import (
	"time"

	"tidings/internal/msg"
)

// Policy is how the messages of a category are sent.
type Policy struct {
	Priority msg.Lane        // the lane of a message that names none
	Retry    []time.Duration // waits before the second, third, … attempt
	Jitter   float64         // each wait is stretched or shrunk by up to this share of it
	Expiry   time.Duration   // after the due time it is too late to send, unless the message says otherwise
	Unknown  UnknownAction   // what follows an attempt of which nobody knows how it ended
	// UnknownWait is how long a task whose outcome is unknown waits for a receipt, where the provider has one.
	UnknownWait time.Duration
}

// Attempts is how often a task of this policy is sent at most.
func (p Policy) Attempts() int { return len(p.Retry) + 1 }

// UnknownAction is what follows an attempt whose outcome is unknown, with a provider that may send twice.
type UnknownAction uint8

// The actions.
const (
	AskAgain    UnknownAction = iota // send again at once: late is worse than twice
	WaitAndAsk                       // wait UnknownWait for the receipt, then send again
	BuryUnknown                      // a dead letter: twice is worse than never
)

// Set has a policy for every category.
type Set [len(msg.Categories)]Policy

// For returns the policy of a task: its category's, but one quick retry is enough for the inbox, which is a table of ours.
func (s *Set) For(category msg.Category, channel msg.Channel) Policy {
	p := s[category]
	if channel == msg.Inbox {
		p.Retry = inboxRetry
	}
	return p
}

var inboxRetry = []time.Duration{time.Second}

// Defaults are the policies of a fresh installation.
func Defaults() *Set {
	return &Set{
		msg.Verification: {
			Priority: msg.High,
			Retry:    []time.Duration{time.Second, 5 * time.Second, 30 * time.Second},
			Jitter:   0.2, Expiry: 5 * time.Minute, Unknown: AskAgain,
		},
		msg.Notification: {
			Priority: msg.Middle,
			Retry:    []time.Duration{10 * time.Second, time.Minute, 5 * time.Minute, 30 * time.Minute},
			Jitter:   0.2, Expiry: 24 * time.Hour, Unknown: WaitAndAsk, UnknownWait: 30 * time.Second,
		},
		msg.Marketing: {
			Priority: msg.Low,
			Retry:    []time.Duration{time.Minute, 5 * time.Minute, 30 * time.Minute},
			Jitter:   0.2, Expiry: 6 * time.Hour, Unknown: BuryUnknown,
		},
	}
}
