// Package admit checks requests and makes messages of them. HTTP and every other way in share it, so that they agree on what
// is accepted, on defaults and on the words for what is wrong.
package admit

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"mime"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	strict "github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"tidings/internal/catalog"
	"tidings/internal/id"
	"tidings/internal/msg"
	"tidings/internal/policy"
	"tidings/internal/render"
	"tidings/internal/window"
	"tidings/store"
)

// Request is a caller's wish, as JSON decodes it.
type Request struct {
	RequestID   string       `json:"request_id,omitempty" maxLength:"255" doc:"The caller's key for this message: sending it again gives the first answer. Same as the header Idempotency-Key."`
	BatchID     string       `json:"batch_id,omitempty" maxLength:"64" doc:"The campaign that the message belongs to: GET /api/batches/{id} counts its tasks."`
	Channels    []string     `json:"channels" maxItems:"9" doc:"The channels to send over. Each is a task of its own."`
	To          any          `json:"to" doc:"The receiver: an address, or an object with an address for each channel. A channel that the object leaves out is skipped."`
	Category    string       `json:"category,omitempty" enum:"verification,notification,marketing" doc:"Names the policy for retries and expiry, and gives the default priority. Default: the template's, or notification."`
	Priority    string       `json:"priority,omitempty" enum:"high,middle,low" doc:"The lane. Default: the category's."`
	TemplateID  string       `json:"template_id,omitempty" maxLength:"64" doc:"A template, instead of subject, text and html. The message keeps the version that is in use now."`
	Params      Raw          `json:"params,omitempty" doc:"The template's variables: an object."`
	Subject     string       `json:"subject,omitempty" doc:"The subject, for channels that have one."`
	Text        string       `json:"text,omitempty" doc:"The text."`
	HTML        string       `json:"html,omitempty" doc:"The text as HTML, for e-mail."`
	Attachments []Attachment `json:"attachments,omitempty" maxItems:"20" doc:"Files for an e-mail."`
	SendAt      any          `json:"send_at,omitempty" doc:"Do not send before this instant: RFC 3339 with an offset, or Unix milliseconds. At most 10 years ahead. Default: at once."`
	Delay       string       `json:"delay,omitempty" doc:"The same as a time from now, such as 90s, 10m or 24h." example:"10m"`
	ExpireTime  any          `json:"expire_time,omitempty" doc:"Do not send after this instant: RFC 3339 with an offset, or Unix milliseconds."`
	TTL         string       `json:"ttl,omitempty" doc:"Do not send when this long has passed since the message was due, such as 90s, 10m or 24h." example:"10m"`
	// Submitted is when the request was made, where it is checked later than that: without send_at it is due then. Zero: now.
	Submitted time.Time `json:"-"`
}

// Raw is JSON as it came: numbers of any size and precision come out as they went in.
type Raw = jsontext.Value

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
	CodeMissing       = "missing_variables"
	CodeNotReviewed   = "template_not_reviewed"
)

// Limits of what a message may hold. The column or the format behind each sets it.
const (
	MaxRequestID = 255 // characters
	MaxReceiver  = 512 // characters
	MaxSubject   = 998 // characters: what a line of an e-mail holds
	MaxTTL       = 10 * 365 * 24 * time.Hour
	MaxDelay     = MaxTTL
	MaxChannels  = 9
	MaxProblems  = 50 // that are named
	// MaxAttachments is how many files go with a message.
	MaxAttachments = 20
)

// Admitter checks requests. Its fields never change after it is first used.
type Admitter struct {
	Policies   *policy.Set
	Configured func(msg.Channel) bool // tells whether a channel has a provider
	Now        func() time.Time       // the database's time
	// Templates finds the versions of a source's template that new messages get; the store's errors. nil: there are none.
	Templates func(ctx context.Context, source, id string) (map[msg.Channel]*catalog.Version, error)
	// Frequency, when set, tells how often a recipient may hear of a source in a category.
	Frequency func(source string, category msg.Category, channel msg.Channel) []window.Limit
	// Region is where phone numbers without a country code are from, such as CN.
	Region string
	// Receiver, when set, asks a channel's provider whether it can serve a receiver, and for the form to store.
	Receiver func(msg.Channel, string) (string, error)
}

// Checked is a request after its checks.
type Checked struct {
	Message  *store.Message
	Problems []Problem // everything that is wrong with the request; none: Message is complete
	Steps    []Step    // the checks in their order
	Rendered []Rendered
}

// Step is one check and how many problems it found.
type Step struct {
	Name     string
	Problems int
}

// Rendered is what a receiver would see on a channel.
type Rendered struct {
	Channel  msg.Channel
	Receiver string
	render.Filled
}

// Check makes a message of a request, or tells everything that is wrong with it. An error says that the check itself failed:
// the store's.
func (a *Admitter) Check(ctx context.Context, source string, r *Request) (*Checked, error) {
	c := check{Admitter: a, r: r, m: &store.Message{SourceID: source, RequestID: r.RequestID, BatchID: r.BatchID}}
	for _, step := range []struct {
		name string
		do   func() error
	}{
		{"request_id", c.requestID},
		{"batch_id", c.batchID},
		{"template", func() error { return c.template(ctx) }},
		{"category", c.category},
		{"channels", c.channels},
		{"content", c.content},
		{"send_at", c.sendAt},
		{"expiry", c.expiry},
	} {
		before := len(c.problems)
		if err := step.do(); err != nil {
			return nil, err
		}
		c.steps = append(c.steps, Step{step.name, len(c.problems) - before})
	}
	checked := &Checked{Problems: c.problems, Steps: c.steps, Rendered: c.rendered}
	if len(c.problems) == 0 {
		hash, err := bodyHash(r, c.m.Params)
		if err != nil {
			return nil, err
		}
		c.m.BodyHash = hash
		checked.Message = c.m
	}
	return checked, nil
}

// check is one request on its way.
type check struct {
	*Admitter
	r        *Request
	m        *store.Message
	versions map[msg.Channel]*catalog.Version // of the template, by channel
	// variables of the template
	variables map[string]any
	problems  []Problem
	steps     []Step
	rendered  []Rendered
}

func (c *check) fault(field, code, format string, args ...any) {
	if len(c.problems) >= MaxProblems {
		return
	}
	c.problems = append(c.problems, Problem{Field: field, Code: code, Message: fmt.Sprintf(format, args...)})
}

func (c *check) requestID() error {
	if n := utf8.RuneCountInString(c.r.RequestID); n > MaxRequestID {
		c.fault("request_id", CodeTooLong, "has %d characters, at most %d are kept", n, MaxRequestID)
	}
	if !utf8.ValidString(c.r.RequestID) { // a header may hold any bytes
		c.fault("request_id", CodeInvalid, "is not UTF-8")
	}
	return nil
}

var nameForm = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)

// NameRule says in words what ValidName takes.
const NameRule = "must begin with a letter or digit and have up to 64 letters, digits, dots, dashes and underscores"

// ValidName tells whether a text may name a source, a template or a batch.
func ValidName(name string) bool { return nameForm.MatchString(name) }

func (c *check) batchID() error {
	if c.r.BatchID != "" && !ValidName(c.r.BatchID) {
		c.fault("batch_id", CodeInvalid, NameRule)
	}
	return nil
}

// template finds the versions that the message gets.
func (c *check) template(ctx context.Context) error {
	r := c.r
	if string(r.Params) == "null" {
		r.Params = nil
	}
	if r.TemplateID == "" {
		if len(r.Params) > 0 {
			c.fault("params", CodeInvalid, "go with a template_id only")
		}
		return nil
	}
	if r.Subject != "" || r.Text != "" || r.HTML != "" {
		c.fault("template_id", CodeInvalid, "and subject, text or html exclude each other")
		return nil
	}
	var err error
	if c.variables, err = render.Variables(r.Params); err != nil {
		c.fault("params", CodeInvalid, "must be an object")
	} else if depth(c.variables) > maxDepth {
		c.fault("params", CodeInvalid, "are nested more than %d deep, which is what JSON columns hold", maxDepth)
		c.variables = nil
	}
	c.m.TemplateID = r.TemplateID
	if c.Templates == nil {
		c.fault("template_id", CodeUnknown, "there is no such template")
		return nil
	}
	c.versions, err = c.Templates(ctx, c.m.SourceID, r.TemplateID)
	switch {
	case errors.Is(err, store.ErrNotFound):
		c.fault("template_id", CodeUnknown, "there is no such template")
	case errors.Is(err, store.ErrNotReviewed):
		c.fault("template_id", CodeNotReviewed, "no version of the template has passed the review")
	default:
		return err
	}
	return nil
}

func (c *check) category() error {
	var err error
	c.m.Category = msg.Notification
	if name := cmp.Or(c.r.Category, c.templateCategory()); name != "" {
		if c.m.Category, err = msg.ParseCategory(name); err != nil {
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
	return nil
}

// templateCategory is the category of the template's variant for the first channel that has one.
func (c *check) templateCategory() string {
	for _, name := range c.r.Channels {
		if channel, err := msg.ParseChannel(name); err == nil {
			if v := c.versions[channel]; v != nil && v.Category != nil {
				return *v.Category
			}
		}
	}
	return ""
}

func (c *check) channels() error {
	if len(c.r.Channels) == 0 {
		c.fault("channels", CodeRequired, "must name a channel")
	}
	if to, ok := c.r.To.(map[string]any); len(c.r.Channels) > MaxChannels || (ok && len(to) > MaxChannels) {
		c.fault("channels", CodeTooLong, "and to have at most %d entries", MaxChannels)
		return nil
	}
	c.addressees()
	for i, name := range c.r.Channels {
		field := fmt.Sprintf("channels[%d]", i)
		channel, err := msg.ParseChannel(name)
		switch {
		case slices.Index(c.r.Channels, name) < i:
			c.fault(field, CodeInvalid, "names %.40s a second time", name)
			continue
		case err != nil:
			c.fault(field, CodeUnknown, "no channel is called %.40q; there are %s", name, strings.Join(channelNames(), ", "))
			continue
		case !c.Configured(channel):
			c.fault(field, CodeNotConfigured, "the channel %s has no provider; configure channels.%s.providers", name, name)
			continue
		}
		if len(c.versions) > 0 && c.versions[channel] == nil {
			c.fault(field, CodeUnknown, "the template has no variant for %s", name)
			continue
		}
		if address, ok := c.address(channel); ok {
			c.receiver(channel, address)
		}
	}
	return nil
}

// Missing is the problem of a variable that a template needs and was not given.
func Missing(name string) Problem {
	return Problem{Field: "params." + name, Code: CodeMissing, Message: "is missing: the template needs it"}
}

// Params reads the field params of a JSON body, with numbers as they are written.
func Params(body []byte) (map[string]any, error) {
	var holder struct{ Params map[string]any }
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber()
	err := d.Decode(&holder)
	return holder.Params, err
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
			field := "to." + strings.ToValidUTF8(name[:min(len(name), 100)], "")
			if _, ok := address.(string); !ok {
				c.fault(field, CodeInvalid, "must be an address, as text")
			}
			if !slices.Contains(c.r.Channels, name) {
				c.fault(field, CodeUnknown, "is not among the channels")
			}
		}
	default:
		c.fault("to", CodeInvalid, "must be an address, or an object with an address for each channel")
	}
}

// address finds the address for a channel. A channel of several may have none: it is skipped.
func (c *check) address(channel msg.Channel) (string, bool) {
	switch to := c.r.To.(type) {
	case string:
		return to, strings.TrimSpace(to) != ""
	case map[string]any:
		given, ok := to[channel.String()]
		address, isText := given.(string)
		switch {
		case isText && strings.TrimSpace(address) != "":
			return address, true
		case ok && !isText: // named as a fault already
		case len(to) > 0 && len(c.r.Channels) > 1 && !ok:
			c.m.Skipped = append(c.m.Skipped, store.SkippedTask{Channel: channel, Reason: "the request has no address for this channel"})
		default:
			c.fault("to."+channel.String(), CodeRequired, "must name the receiver on this channel")
		}
	}
	return "", false
}

func (c *check) receiver(channel msg.Channel, address string) {
	receiver, err := normalise(channel, address, c.Region)
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
	task := store.NewTask{Channel: channel, Receiver: receiver, AttemptLimit: c.policy(channel).Attempts}
	if v := c.versions[channel]; v != nil {
		task.TemplateVersion = v.Version
	}
	if c.Frequency != nil {
		task.Frequency, task.Recipient = c.Frequency(c.m.SourceID, c.m.Category, channel), recipient(channel, receiver)
	}
	c.m.Tasks = append(c.m.Tasks, task)
}

// policy is what a task on a channel is sent under.
func (c *check) policy(channel msg.Channel) policy.Policy {
	p := c.Policies.For(c.m.Category, channel)
	if v := c.versions[channel]; v != nil {
		p = v.Over(p)
	}
	return p
}

// expires is how long after the due time the message is sent: the longest of its channels.
func (c *check) expires() (longest time.Duration) {
	for _, t := range c.m.Tasks {
		longest = max(longest, c.policy(t.Channel).Expiry)
	}
	return cmp.Or(longest, c.Policies[c.m.Category].Expiry)
}

func (c *check) content() error {
	if c.r.TemplateID != "" {
		return c.filled()
	}
	r := c.r
	if n := utf8.RuneCountInString(r.Subject); n > MaxSubject {
		c.fault("subject", CodeTooLong, "has %d characters, at most %d fit into a header", n, MaxSubject)
	}
	if i := strings.IndexFunc(r.Subject, isControl); i >= 0 {
		c.fault("subject", CodeInvalid, "has a line break or another control character at byte %d", i)
	}
	mail := slices.Contains(r.Channels, msg.Email.String())
	others := slices.ContainsFunc(r.Channels, func(name string) bool { return name != msg.Email.String() })
	switch {
	case r.Text == "" && r.HTML == "":
		c.fault("text", CodeRequired, "must say something")
	case r.Text == "" && others:
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
	for _, t := range c.m.Tasks {
		c.rendered = append(c.rendered, Rendered{t.Channel, t.Receiver, render.Filled{Subject: r.Subject, Text: r.Text, HTML: r.HTML}})
	}
	return nil
}

// filled renders the template on every channel, to prove that nothing is missing. The result is thrown away: the version and
// the variables are stored, so that a later version changes no accepted message.
func (c *check) filled() error {
	mail := slices.Contains(c.r.Channels, msg.Email.String())
	if files := c.attachments(mail); len(files) > 0 {
		content, err := marshal(store.Content{Attachments: files})
		if err != nil {
			return err
		}
		c.m.Content = content
	}
	if c.variables != nil {
		params, err := marshalExact(c.variables)
		if err != nil {
			return err
		}
		c.m.Params = params
	}
	if slices.ContainsFunc(c.problems, func(p Problem) bool { return p.Field == "params" }) {
		return nil
	}
	missing := map[string]bool{}
	for _, t := range c.m.Tasks {
		if c.versions[t.Channel] == nil {
			continue
		}
		filled, err := c.versions[t.Channel].Render(c.variables)
		var absent *render.MissingError
		switch {
		case errors.As(err, &absent):
			for _, name := range absent.Names {
				missing[name] = true
			}
		case err != nil:
			c.fault("params", CodeInvalid, "on %s %v", t.Channel, err)
		case t.Channel == msg.Email && strings.TrimSpace(filled.Subject) == "":
			c.fault("params", CodeInvalid, "leave the subject of the e-mail empty")
		case strings.TrimSpace(filled.Text) == "" && strings.TrimSpace(filled.HTML) == "":
			c.fault("params", CodeInvalid, "leave nothing to say on %s", t.Channel)
		}
		c.rendered = append(c.rendered, Rendered{t.Channel, t.Receiver, filled})
	}
	for _, name := range slices.Sorted(maps.Keys(missing)) {
		if len(c.problems) < MaxProblems {
			c.problems = append(c.problems, Missing(name))
		}
	}
	return nil
}

// maxDepth is a little less than the nesting that MariaDB takes for valid JSON (32).
const maxDepth = 30

func depth(v any) (most int) {
	switch v := v.(type) {
	case map[string]any:
		for _, item := range v {
			most = max(most, depth(item))
		}
	case []any:
		for _, item := range v {
			most = max(most, depth(item))
		}
	default:
		return 0
	}
	return most + 1
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
	if len(c.r.Attachments) > MaxAttachments {
		c.fault("attachments", CodeTooLong, "are %d, at most %d go with a message", len(c.r.Attachments), MaxAttachments)
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

// sendAt says when the message is due, if not at once.
func (c *check) sendAt() error {
	at, problem := Due(c.r.SendAt, c.r.Delay, c.Now())
	if problem != nil {
		c.problems = append(c.problems, *problem)
	}
	c.m.SendAt = at
	return nil
}

// Due reads when something is to be sent: send_at or delay, both as a request has them. Zero: neither is there.
func Due(sendAt any, delay string, now time.Time) (time.Time, *Problem) {
	fault := func(field, text string) (time.Time, *Problem) {
		return time.Time{}, &Problem{Field: field, Code: CodeInvalid, Message: text}
	}
	switch {
	case sendAt != nil && delay != "":
		return fault("delay", "and send_at exclude each other")
	case delay != "":
		d, err := time.ParseDuration(delay)
		if err != nil {
			return fault("delay", "must be a duration such as 90s, 10m or 24h")
		}
		if d < 0 || d > MaxDelay {
			return fault("delay", "must be between 0s and 10 years")
		}
		return wholeMillis(now.Add(d)), nil
	case sendAt != nil:
		at, err := ParseTime(sendAt)
		switch {
		case err != nil:
			return fault("send_at", err.Error())
		case at.Before(id.Epoch):
			return fault("send_at", "lies before 2025; a number means Unix milliseconds, not seconds")
		case at.After(now.Add(MaxDelay)):
			return fault("send_at", "lies more than 10 years ahead")
		}
		return wholeMillis(at), nil
	}
	return time.Time{}, nil
}

// wholeMillis is what a column keeps of an instant: never earlier than it.
func wholeMillis(t time.Time) time.Time {
	if whole := t.Truncate(time.Millisecond); whole.Before(t) {
		return whole.Add(time.Millisecond)
	}
	return t
}

// expiry counts from the due time.
func (c *check) expiry() error {
	now := c.Now()
	if c.m.SendAt.IsZero() {
		c.m.SendAt = c.r.Submitted
	}
	due := now
	if !c.m.SendAt.IsZero() {
		due = c.m.SendAt
	}
	expire, problem := Expiry(c.r.ExpireTime, c.r.TTL, due, now)
	switch {
	case problem != nil:
		c.problems = append(c.problems, *problem)
	case expire.IsZero():
		if expire = due.Add(c.expires()); !expire.After(now) {
			c.fault("send_at", CodeInvalid, "lies so far back that the message has expired: a %s is sent until %v after it is due; expire_time or ttl say otherwise",
				c.m.Category, c.expires())
		}
	}
	c.m.Expire = expire
	return nil
}

// Expiry reads until when something is to be sent: expire_time or ttl, both as a request has them. Zero: neither is there.
func Expiry(expireTime any, ttl string, due, now time.Time) (time.Time, *Problem) {
	fault := func(field, text string) (time.Time, *Problem) {
		return time.Time{}, &Problem{Field: field, Code: CodeInvalid, Message: text}
	}
	switch {
	case ttl != "" && expireTime != nil:
		return fault("ttl", "and expire_time exclude each other")
	case ttl != "":
		d, err := time.ParseDuration(ttl)
		if err != nil {
			return fault("ttl", "must be a duration such as 90s, 10m or 24h")
		}
		if d < time.Millisecond || d > MaxTTL {
			return fault("ttl", "must be between 1ms and 10 years")
		}
		if !due.Add(d).After(now) {
			return fault("ttl", "is over already: it counts from send_at")
		}
		return due.Add(d), nil
	case expireTime != nil:
		at, err := ParseTime(expireTime)
		switch {
		case err != nil:
			return fault("expire_time", err.Error())
		case !at.After(now):
			return fault("expire_time", "lies in the past")
		case !at.After(due):
			return fault("expire_time", "lies before the message is due")
		case at.After(due.Add(MaxTTL)):
			return fault("expire_time", "lies more than 10 years after the message is due")
		}
		return at, nil
	}
	return time.Time{}, nil
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
	case json.Number:
		ms, err := strconv.ParseInt(string(v), 10, 64)
		if err != nil || ms < 0 || ms > 1<<53 {
			return time.Time{}, errTime
		}
		return time.UnixMilli(ms).UTC(), nil
	}
	return time.Time{}, errTime
}

// bodyHash tells requests apart that came under the same key. The key itself does not count, nor does the campaign: a file of
// messages that is sent again gets another one where none is named.
func bodyHash(r *Request, params []byte) ([sha256.Size]byte, error) {
	bare := *r
	bare.RequestID, bare.BatchID, bare.Params = "", "", nil
	body, err := marshal(&bare)
	if err != nil {
		return [sha256.Size]byte{}, fmt.Errorf("a request that was read cannot be written: %w", err)
	}
	return sha256.Sum256(append(body, params...)), nil // params as they are stored: in one order, however they came
}

// marshal writes JSON as people want to read it in a column: <, > and & as themselves.
func marshal(v any) ([]byte, error) { return strict.Marshal(v, strict.Deterministic(true)) }

// marshalExact is marshal for variables, whose numbers are kept as they were written.
func marshalExact(v map[string]any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimRight(b.Bytes(), "\n"), nil
}
