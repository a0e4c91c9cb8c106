// Package msg holds the words that every part of Tidings shares: channels, lanes, categories and states, with the one
// numbering that SQL columns, Go code and JSON use alike.
package msg

import (
	"fmt"
	"slices"
	"strconv"
)

// Channel is a way to reach a receiver. Its number is the value of every `channel` column.
type Channel uint8

// The channels. The numbers are stored; they never change.
const (
	Email    Channel = 1
	SMS      Channel = 2
	Feishu   Channel = 3
	Inbox    Channel = 4
	Push     Channel = 5
	Webhook  Channel = 6
	DingTalk Channel = 7
	WeCom    Channel = 8
	Log      Channel = 31
)

// Channels lists every channel by its number.
var Channels = []Channel{Email, SMS, Feishu, Inbox, Push, Webhook, DingTalk, WeCom, Log}

var channelNames = map[Channel]string{
	Email: "email", SMS: "sms", Feishu: "feishu", Inbox: "inbox", Push: "push",
	Webhook: "webhook", DingTalk: "dingtalk", WeCom: "wecom", Log: "log",
}

// String gives the channel's name as JSON, logs and metrics write it.
func (c Channel) String() string {
	if name, ok := channelNames[c]; ok {
		return name
	}
	return strconv.Itoa(int(c))
}

// ParseChannel finds the channel of a name.
func ParseChannel(name string) (Channel, error) {
	for _, c := range Channels {
		if channelNames[c] == name {
			return c, nil
		}
	}
	return 0, fmt.Errorf("unknown channel %q", name)
}

// MarshalText writes the channel's name.
func (c Channel) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// Lane is a queue table, which is to say a priority.
type Lane uint8

// The lanes, most urgent first. The order is also the order in which transactions lock the tables.
const (
	High Lane = iota
	Middle
	Low
)

// Lanes lists the lanes, most urgent first.
var Lanes = [...]Lane{High, Middle, Low}

var laneNames = [...]string{"high", "middle", "low"}

// String gives the lane's name: the value of `priority` in SQL and JSON, and the last part of its table's name.
func (l Lane) String() string { return laneNames[l] }

// ParseLane finds the lane of a name.
func ParseLane(name string) (Lane, error) {
	i := slices.Index(laneNames[:], name)
	if i < 0 {
		return 0, fmt.Errorf("unknown priority %q", name)
	}
	return Lane(i), nil
}

// MarshalText writes the lane's name.
func (l Lane) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// Category names the policy that a message is sent under.
type Category uint8

// The categories.
const (
	Verification Category = iota
	Notification
	Marketing
)

// Categories lists the categories.
var Categories = [...]Category{Verification, Notification, Marketing}

var categoryNames = [...]string{"verification", "notification", "marketing"}

// String gives the category's name: the value of `category` in SQL and JSON.
func (c Category) String() string { return categoryNames[c] }

// ParseCategory finds the category of a name.
func ParseCategory(name string) (Category, error) {
	i := slices.Index(categoryNames[:], name)
	if i < 0 {
		return 0, fmt.Errorf("unknown category %q", name)
	}
	return Category(i), nil
}

// MarshalText writes the category's name.
func (c Category) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// State is where a task stands. Its number is the value of every `status` column.
type State uint8

// The states of a task. Ready, Sending and Unknown live in a queue table, Dead in t_msg_dead, the others in t_msg_record.
// Moved marks the tombstone that a task leaves in a delay table: it is not a task, and no view or count shows it.
const (
	Ready State = iota
	Sending
	Unknown
	Success
	Failed
	Dead
	Expired
	Cancelled
	Skipped
	Moved
)

var stateNames = [...]string{"ready", "sending", "unknown", "success", "failed", "dead", "expired", "cancelled", "skipped", "moved"}

// String gives the state's name as JSON and views write it.
func (s State) String() string {
	if int(s) < len(stateNames) {
		return stateNames[s]
	}
	return strconv.Itoa(int(s)) // made by hand
}

// MarshalText writes the state's name.
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// Ended reports whether the state is final: a task in it never changes again. Dead is not final: it waits for a person.
func (s State) Ended() bool { return s == Success || s == Failed || (s >= Expired && s <= Skipped) }

// TaskKey is a task's name on the outside: the provider's idempotency key on every attempt.
func TaskKey(msgID uint64, c Channel) string {
	return strconv.FormatUint(msgID, 10) + "-" + c.String()
}

// Queued reports whether a task in the state stands in a queue table.
func (s State) Queued() bool { return s == Ready || s == Sending || s == Unknown }
