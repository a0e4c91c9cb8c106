// Package admit checks requests and makes messages of them. HTTP and every other way in share it, so that they agree on what
// is accepted, on defaults and on the words for what is wrong.
package admit

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"tidings/internal/msg"
	"tidings/internal/policy"
	"tidings/store"
)

// Request is a caller's wish, as JSON decodes it.
type Request struct {
	RequestID   string       `json:"request_id,omitempty" maxLength:"255" doc:"The caller's key for this message: sending it again gives the first answer. Same as the header Idempotency-Key."`
	Channels    []string     `json:"channels" maxItems:"1" doc:"The channel to send over."`
	To          any          `json:"to" doc:"The receiver: an address, or an object with an address for each channel."`
	Category    string       `json:"category,omitempty" enum:"verification,notification,marketing" doc:"Names the policy for retries and expiry, and gives the default priority. Default: notification."`
	Priority    string       `json:"priority,omitempty" enum:"high,middle,low" doc:"The lane. Default: the category's."`
	Subject     string       `json:"subject,omitempty" doc:"The subject, for channels that have one."`
	Text        string       `json:"text,omitempty" doc:"The text."`
	HTML        string       `json:"html,omitempty" doc:"The text as HTML, for e-mail."`
	Attachments []Attachment `json:"attachments,omitempty" maxItems:"20" doc:"Files for an e-mail."`
	ExpireTime  any          `json:"expire_time,omitempty" doc:"Do not send after this instant: RFC 3339 with an offset, or Unix milliseconds."`
	TTL         string       `json:"ttl,omitempty" doc:"Do not send when this long has passed since the message was due, such as 90s, 10m or 24h." example:"10m"`
}

// Attachment is a file that goes with an e-mail.
type Attachment struct {
	Filename    string `json:"filename" doc:"The name that the receiver sees."`
	ContentType string `json:"content_type,omitempty" doc:"A MIME type. Default: application/octet-stream."`
	Content     string `json:"content" doc:"The file, in base64."`
}

// Problem is one thing wrong with a request.
type Problem struct {
	Field   string `json:"field" doc:"The field, as it is called in the request."`
	Code    string `json:"code" doc:"A stable name for what is wrong."`
	Message string `json:"message" doc:"What is wrong, in words."`
}

// The codes of problems.
const (
	CodeRequired      = "required"
	CodeInvalid       = "invalid"
	CodeTooLong       = "too_long"
	CodeUnknown       = "unknown"
	CodeNotConfigured = "channel_not_configured"
)

// Limits of what a message may hold. The column or the format behind each sets it.
const (
	MaxRequestID = 255 // characters
	MaxReceiver  = 512 // characters
	MaxSubject   = 998 // characters: what a line of an e-mail holds
	MaxTTL       = 10 * 365 * 24 * time.Hour
)

// Admitter checks requests. Its fields never change after it is first used.
type Admitter struct {
	Policies   *policy.Set
	Configured func(msg.Channel) bool // tells whether a channel has a provider
	Now        func() time.Time       // the database's time
	// Receiver, when set, asks a channel's provider whether it can serve a receiver, and for the form to store.
	Receiver func(msg.Channel, string) (string, error)
}

// Check makes a message of a request, or tells everything that is wrong with it.
func (a *Admitter) Check(source string, r *Request) (*store.Message, []Problem) {
	c := check{Admitter: a, r: r, m: &store.Message{SourceID: source, RequestID: r.RequestID}}
	c.requestID()
	c.category()
	c.channels()
	c.content()
	c.expiry()
	if len(c.problems) > 0 {
		return nil, c.problems
	}
	c.m.BodyHash = bodyHash(r)
	return c.m, nil
}

// check is one request on its way.
type check struct {
	*Admitter
	r        *Request
	m        *store.Message
	problems []Problem
}

func (c *check) fault(field, code, format string, args ...any) {
	c.problems = append(c.problems, Problem{Field: field, Code: code, Message: fmt.Sprintf(format, args...)})
}

func (c *check) requestID() {
	if n := utf8.RuneCountInString(c.r.RequestID); n > MaxRequestID {
		c.fault("request_id", CodeTooLong, "has %d characters, at most %d are kept", n, MaxRequestID)
	}
	if !utf8.ValidString(c.r.RequestID) { // a header may hold any bytes
		c.fault("request_id", CodeInvalid, "is not UTF-8")
	}
}

func (c *check) category() {
	var err error
	c.m.Category = msg.Notification
	if c.r.Category != "" {
		if c.m.Category, err = msg.ParseCategory(c.r.Category); err != nil {
			c.fault("category", CodeUnknown, "must be verification, notification or marketing")
			c.m.Category = msg.Notification
		}
	}
	c.m.Lane = c.Policies[c.m.Category].Priority
	if c.r.Priority != "" {
		if c.m.Lane, err = msg.ParseLane(c.r.Priority); err != nil {
			c.fault("priority", CodeUnknown, "must be high, middle or low")
		}
	}
}

func (c *check) channels() {
	if len(c.r.Channels) == 0 {
		c.fault("channels", CodeRequired, "must name a channel")
	}
	if len(c.r.Channels) > 1 {
		c.fault("channels", CodeInvalid, "must name one channel")
	}
	c.addressees()
	for i, name := range c.r.Channels {
		field := fmt.Sprintf("channels[%d]", i)
		channel, err := msg.ParseChannel(name)
		switch {
		case err != nil:
			c.fault(field, CodeUnknown, "no channel is called %q; there are %s", name, strings.Join(channelNames(), ", "))
			continue
		case !c.Configured(channel):
			c.fault(field, CodeNotConfigured, "the channel %s has no provider; configure channels.%s.providers", name, name)
			continue
		}
		c.m.AttemptLimit = c.Policies.For(c.m.Category, channel).Attempts()
		if address, ok := c.address(name); ok {
			c.receiver(channel, address)
		}
	}
}

func channelNames() (names []string) {
	for _, c := range msg.Channels {
		names = append(names, c.String())
	}
	return names
}

// addressees checks the shape of `to`: every address must be for a channel of the message.
func (c *check) addressees() {
	switch to := c.r.To.(type) {
	case nil:
		c.fault("to", CodeRequired, "must name the receiver")
	case string:
		if strings.TrimSpace(to) == "" {
			c.fault("to", CodeRequired, "must name the receiver")
		}
	case map[string]any:
		for name, address := range to {
			if _, ok := address.(string); !ok {
				c.fault("to."+name, CodeInvalid, "must be an address, as text")
			}
			if !slices.Contains(c.r.Channels, name) {
				c.fault("to."+name, CodeUnknown, "is not among the channels")
			}
		}
	default:
		c.fault("to", CodeInvalid, "must be an address, or an object with an address for each channel")
	}
}

// address finds the address for a channel.
func (c *check) address(channel string) (string, bool) {
	switch to := c.r.To.(type) {
	case string:
		return to, strings.TrimSpace(to) != ""
	case map[string]any:
		address, ok := to[channel].(string)
		if _, given := to[channel]; !given || (ok && strings.TrimSpace(address) == "") {
			c.fault("to."+channel, CodeRequired, "must name the receiver on this channel")
			return "", false
		}
		return address, ok
	}
	return "", false
}

func (c *check) receiver(channel msg.Channel, address string) {
	receiver, err := normalise(channel, address)
	if err == nil && c.Receiver != nil {
		receiver, err = c.Receiver(channel, receiver)
	}
	if err != nil {
		field := "to"
		if _, ok := c.r.To.(map[string]any); ok {
			field = "to." + channel.String()
		}
		c.fault(field, CodeInvalid, "%v", err)
		return
	}
	c.m.Tasks = append(c.m.Tasks, store.NewTask{Channel: channel, Receiver: receiver})
}

func (c *check) content() {
	r := c.r
	if n := utf8.RuneCountInString(r.Subject); n > MaxSubject {
		c.fault("subject", CodeTooLong, "has %d characters, at most %d fit into a header", n, MaxSubject)
	}
	if i := strings.IndexFunc(r.Subject, isControl); i >= 0 {
		c.fault("subject", CodeInvalid, "has a line break or another control character at byte %d", i)
	}
	mail := slices.Contains(r.Channels, msg.Email.String())
	switch {
	case r.Text == "" && r.HTML == "":
		c.fault("text", CodeRequired, "must say something")
	case r.Text == "" && !mail:
		c.fault("text", CodeRequired, "must say something: html is for e-mail only")
	}
	if mail && strings.TrimSpace(r.Subject) == "" {
		c.fault("subject", CodeRequired, "an e-mail needs a subject")
	}
	content, err := marshal(store.Content{Subject: r.Subject, Text: r.Text, HTML: r.HTML, Attachments: c.attachments(mail)})
	if err != nil {
		c.fault("text", CodeInvalid, "%v", err)
	}
	c.m.Content = content
}

// Limits of what becomes a header of a mail's part, in bytes: encoded as a parameter, a name takes three times as much, twice
// on a line that may have 998.
const (
	maxFilename    = 120
	maxContentType = 100
)

func (c *check) attachments(mail bool) (files []store.Attachment) {
	if len(c.r.Attachments) > 0 && !mail {
		c.fault("attachments", CodeInvalid, "go with e-mail only")
		return nil
	}
	for i, a := range c.r.Attachments {
		field := fmt.Sprintf("attachments[%d]", i)
		if a.Filename == "" || len(a.Filename) > maxFilename || strings.ContainsFunc(a.Filename, isControl) || strings.ContainsAny(a.Filename, `/\\`) {
			c.fault(field+".filename", CodeInvalid, "must be a plain name of up to %d bytes", maxFilename)
		}
		kind := cmp.Or(a.ContentType, "application/octet-stream")
		if kind = plainType(kind); kind == "" {
			c.fault(field+".content_type", CodeInvalid, "must be a MIME type such as text/plain")
		}
		content, err := base64.StdEncoding.DecodeString(a.Content)
		if err != nil || len(content) == 0 {
			c.fault(field+".content", CodeInvalid, "must be a file in base64")
		}
		files = append(files, store.Attachment{Filename: a.Filename, ContentType: kind, Content: content})
	}
	return files
}

// plainType is a MIME type with no parameter but its charset: the name is the filename's business. Empty: it is none.
func plainType(text string) string {
	kind, params, err := mime.ParseMediaType(text)
	if err != nil || !strings.Contains(kind, "/") {
		return ""
	}
	kept := map[string]string{}
	if charset := params["charset"]; charset != "" {
		kept["charset"] = charset
	}
	if text = mime.FormatMediaType(kind, kept); len(text) > maxContentType {
		return ""
	}
	return text
}

func isControl(r rune) bool { return r < 0x20 || r == 0x7f || (r >= 0x80 && r < 0xa0) }

func (c *check) expiry() {
	now := c.Now()
	c.m.Expire = now.Add(c.Policies[c.m.Category].Expiry)
	if c.r.TTL != "" && c.r.ExpireTime != nil {
		c.fault("ttl", CodeInvalid, "and expire_time exclude each other")
		return
	}
	if c.r.TTL != "" {
		ttl, err := time.ParseDuration(c.r.TTL)
		switch {
		case err != nil:
			c.fault("ttl", CodeInvalid, "must be a duration such as 90s, 10m or 24h")
		case ttl < time.Millisecond || ttl > MaxTTL:
			c.fault("ttl", CodeInvalid, "must be between 1ms and 10 years")
		}
		c.m.Expire = now.Add(ttl)
	}
	if c.r.ExpireTime != nil {
		at, err := ParseTime(c.r.ExpireTime)
		switch {
		case err != nil:
			c.fault("expire_time", CodeInvalid, "%v", err)
		case !at.After(now):
			c.fault("expire_time", CodeInvalid, "lies in the past")
		case at.After(now.Add(MaxTTL)):
			c.fault("expire_time", CodeInvalid, "lies more than 10 years ahead")
		}
		c.m.Expire = at
	}
}

var errTime = errors.New("must be RFC 3339 with an offset, such as 2026-12-31T09:00:00+08:00, or Unix milliseconds")

// ParseTime reads an instant of a request: RFC 3339 text, or a number of Unix milliseconds.
func ParseTime(v any) (time.Time, error) {
	switch v := v.(type) {
	case string:
		t, err := time.Parse(time.RFC3339Nano, v)
		if err != nil {
			return t, errTime
		}
		return t.UTC(), nil
	case float64:
		if v != float64(int64(v)) || v < 0 || v > 1<<53 {
			return time.Time{}, errTime
		}
		return time.UnixMilli(int64(v)).UTC(), nil
	}
	return time.Time{}, errTime
}

// bodyHash tells requests apart that came under the same key. The key itself does not count.
func bodyHash(r *Request) [sha256.Size]byte {
	bare := *r
	bare.RequestID = ""
	body, err := marshal(&bare)
	if err != nil {
		panic("admit: a decoded request does not encode: " + err.Error()) // strings, numbers and maps of them always do
	}
	return sha256.Sum256(body)
}

// marshal writes JSON as people want to read it in a column: <, > and & as themselves.
func marshal(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimRight(b.Bytes(), "\n"), nil
}
