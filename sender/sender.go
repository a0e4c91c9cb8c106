// Package sender holds the channels' providers: one interface, one file a provider. A provider sends one message and says
// what came of it; when to try again is not its business.
package sender

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"time"

	"github.com/go-viper/mapstructure/v2"

	"tidings/internal/msg"
)

// Message is what a provider is to send: rendered, for one receiver.
type Message struct {
	Key      string // the task's key: the same on every attempt, for providers that recognise a repetition
	MsgID    uint64
	Channel  msg.Channel
	Category msg.Category
	Receiver string
	Subject  string
	Text     string
	HTML     string
	Attempt  int
	Created  time.Time
	// Attachments go with e-mails.
	Attachments []Attachment
	// Of the template, where there is one: the signature that SMS providers ask for, and its id on the provider's platform.
	SignName, RelTemplateID string
}

// Attachment is a file that goes with an e-mail.
type Attachment struct {
	Filename    string
	ContentType string
	Content     []byte
}

// Kind is what an attempt's end means.
type Kind uint8

// The kinds.
const (
	Unknown   Kind = iota // the request left and no answer came: perhaps sent
	Success               // the provider has taken the message over
	Temporary             // not sent; another attempt may do better
	Permanent             // not sent, and never will be
	Busy                  // not sent, and not looked at: the provider asks to come back later
)

var kindNames = [...]string{"unknown", "success", "temporary", "permanent", "busy"}

// Kinds lists the kinds by name.
func Kinds() []string { return kindNames[:] }

// String gives the kind's name, as logs and the attempt log write it.
func (k Kind) String() string { return kindNames[k] }

// Verdict is a provider's word on an attempt. Code and Text go into tables and logs: they must not repeat addresses,
// content or secrets.
type Verdict struct {
	Kind          Kind
	ProviderMsgID string        // with Success: the provider's own id, if it gives one
	Code          string        // the provider's code for the failure
	Text          string        // what went wrong, in words
	RetryAfter    time.Duration // with Busy: how long to stay away; 0: no word of it
	Unsent        bool          // with Temporary: nothing left for the provider, so that asking again at once cannot hurt
}

// Provider sends messages of one channel. Its methods are called from many goroutines at once.
type Provider interface {
	// Send makes one attempt and returns before ctx's deadline, or soon after it. It never tries again by itself.
	Send(ctx context.Context, m *Message) Verdict
	// Traits tells what may be expected of the provider. It never changes.
	Traits() Traits
	// Close lets go of connections. No Send runs then, and none follows.
	Close() error
}

// ReceiverChecker is a provider that knows which receivers it can serve. CheckReceiver gives the form to store; it asks no
// network. Its errors do not repeat the receiver.
type ReceiverChecker interface {
	CheckReceiver(receiver string) (string, error)
}

// Prober is a provider that can tell whether it is reachable, without sending anything.
type Prober interface {
	Probe(ctx context.Context) error
}

// Traits are what the queue needs to know of a provider.
type Traits struct {
	// Repeatable: asking again with the same key cannot hurt, because the provider recognises the key or because a
	// repetition costs nothing.
	Repeatable bool
	// Concurrency is how many sends make sense at the same time; 0: any number.
	Concurrency int
	// Destinations: each receiver is a server of its own, so one's failures say nothing of the others.
	Destinations bool
	// Receipts: a later word on an attempt of unknown outcome can be had.
	Receipts bool
}

// Settings configure a provider: the keys below providers.<name>, without `type`.
type Settings map[string]any

// Env is what providers share.
type Env struct {
	Name    string // the provider's name in the configuration
	DataDir string // for providers that keep files
}

type provider struct {
	channels []msg.Channel // that it can serve
	settings any           // its settings' struct, for the names of its keys
	open     func(Env, Settings) (Provider, error)
}

var types = map[string]provider{
	"log":     {msg.Channels, logConfig{}, openLog},
	"file":    {[]msg.Channel{msg.Email}, fileConfig{}, openFile},
	"smtp":    {[]msg.Channel{msg.Email}, smtpConfig{}, openSMTP},
	"webhook": {[]msg.Channel{msg.Webhook}, webhookConfig{}, openWebhook},
	"feishu":  {[]msg.Channel{msg.Feishu}, feishuConfig{}, openFeishu},
}

// Open makes the provider of a type. Unknown types and settings are errors that name them.
func Open(kind string, env Env, settings Settings) (Provider, error) {
	t, ok := types[kind]
	if !ok {
		return nil, fmt.Errorf("unknown type %q (there are %v)", kind, Types())
	}
	return t.open(env, settings)
}

// Serves tells whether providers of a type can serve a channel.
func Serves(kind string, c msg.Channel) bool { return slices.Contains(types[kind].channels, c) }

// Keys lists the settings of a type. Those of a map's entries have a star in the place of the entry's name: bots.*.url.
func Keys(kind string) (keys []string) {
	t, ok := types[kind]
	if !ok {
		return nil
	}
	fields := reflect.TypeOf(t.settings)
	for i := range fields.NumField() {
		key, kind := fields.Field(i).Tag.Get("mapstructure"), fields.Field(i).Type
		if kind.Kind() != reflect.Map {
			keys = append(keys, key)
			continue
		}
		for j := range kind.Elem().NumField() {
			keys = append(keys, key+".*."+kind.Elem().Field(j).Tag.Get("mapstructure"))
		}
	}
	return keys
}

// ChannelOf is the channel that providers of a type are made for; of those that serve any, log.
func ChannelOf(kind string) msg.Channel {
	channels := types[kind].channels
	return channels[len(channels)-1]
}

// Types lists the types of providers.
func Types() []string {
	var names []string
	for name := range types {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// decode reads settings into a struct with mapstructure tags.
func decode(settings Settings, into any) error {
	decoder, err := mapstructure.NewDecoder(&mapstructure.DecoderConfig{
		Result: into, ErrorUnused: true, WeaklyTypedInput: true,
		DecodeHook: mapstructure.StringToTimeDurationHookFunc(),
	})
	if err != nil {
		return err
	}
	return decoder.Decode(map[string]any(settings))
}
