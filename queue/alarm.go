package queue

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"

	"tidings/internal/msg"
	"tidings/sender"
	"tidings/store"
)

// Alarm says how people are told of dead letters.
type Alarm struct {
	Name     string // of the provider
	Provider sender.Provider
	Channel  msg.Channel
	Receiver string
	Every    time.Duration // no alarm at once comes sooner after the one before; default 1 min
	DigestAt time.Duration // the digest is due so long after midnight, UTC
	Timeout  time.Duration // of one delivery; default 30 s
}

const (
	alarmLook    = time.Second // how often it is looked whether there is anything to tell
	alarmPage    = 1000        // letters of one look
	mostAlarmed  = 100_000     // letters of one alarm; the others come with the next
	alarmLines   = 20          // of one alarm; each is a reason
	leastRetry   = 5 * time.Second
	mostRetry    = 5 * time.Minute
	alarmTimeout = 30 * time.Second
)

// alarm tells people of dead letters. t_alarm keeps what they have not been told of: a letter is struck off when its alarm has been
// delivered, so an alarm that cannot be, or a process that dies, costs time and no letter. Should a process die between the two, they
// are told twice, under the same key.
func (e *Engine) alarm(ctx context.Context) {
	failures := map[string]int{}
	every := time.NewTicker(alarmLook)
	defer every.Stop()
	for {
		select {
		case <-every.C:
		case <-ctx.Done():
			return
		}
		levels, err := e.store.AlarmLevels(ctx)
		if err != nil { // the scout says so
			continue
		}
		for _, l := range levels {
			if l.Taken || !e.cfg.Alarm.due(l, e.store.Now()) {
				continue
			}
			rest := min(leastRetry<<min(failures[l.Level], 10), mostRetry)
			if err := e.tell(ctx, l.Level, rest); err == nil {
				failures[l.Level] = 0
			} else if ctx.Err() == nil {
				failures[l.Level]++
				e.log.Error("cannot tell anybody of dead letters, trying again", "level", l.Level, "provider", e.cfg.Alarm.Name, "in", rest, "err", err)
			}
		}
	}
}

// due tells whether there is something to tell, and people may be told now.
func (a *Alarm) due(l store.AlarmLevel, now time.Time) bool {
	switch {
	case l.Oldest == nil:
		return false
	case l.Level == store.AlarmNow:
		return l.Told == nil || !now.Before(l.Told.Add(cmp.Or(a.Every, time.Minute)))
	}
	digest := now.UTC().Truncate(24 * time.Hour).Add(a.DigestAt)
	if digest.After(now) {
		digest = digest.Add(-24 * time.Hour)
	}
	return (l.Told == nil || l.Told.Before(digest)) && l.Oldest.Before(digest)
}

// tell tells people of what they have not been told of at a level. After a failure nobody tries again before a rest is over.
func (e *Engine) tell(ctx context.Context, level string, rest time.Duration) (err error) {
	a := e.cfg.Alarm
	owner, err := e.store.TakeAlarm(ctx, level, 2*cmp.Or(a.Timeout, alarmTimeout)+10*time.Second)
	if err != nil || owner == "" {
		return err
	}
	told := false
	defer func() {
		failed := ""
		if err != nil {
			failed = err.Error()
		} else {
			rest = 0
		}
		leave, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		err = errors.Join(err, e.store.LeaveAlarm(leave, level, owner, told, failed, rest))
	}()
	d, err := e.untold(ctx, level)
	if err != nil {
		return err
	}
	if d.letters > 0 {
		err := a.deliver(ctx, a.message(level, d))
		e.cfg.Metrics.Alarm(level, err == nil)
		if told = err == nil; !told {
			return err
		}
		e.log.Info("told of dead letters", "level", level, "provider", a.Name, "letters", d.letters, "reasons", len(d.groups))
	}
	for part := range slices.Chunk(d.deaths, 500) {
		if err := e.store.Told(context.WithoutCancel(ctx), level, part); err != nil {
			return err
		}
	}
	return nil
}

// deliver asks the provider once.
func (a *Alarm) deliver(ctx context.Context, m *sender.Message) (err error) {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(a.Timeout, alarmTimeout))
	defer cancel()
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("the provider panicked: %v", r)
		}
	}()
	// Of the alarm only the receiver is anybody's: the text tells of reasons, which the provider's own may well be like.
	if v := sender.Redact(a.Provider.Send(ctx, m), &sender.Message{Receiver: m.Receiver}); v.Kind != sender.Success {
		return fmt.Errorf("%s: %s", v.Kind, strings.TrimSpace(v.Code+" "+v.Text))
	}
	return nil
}

// digest is what one alarm tells.
type digest struct {
	deaths  []store.AlarmKey // all that is struck off when it has been delivered
	letters int              // that still wait
	groups  map[reason]*reasonCount
}

// untold puts letters together by reason, page by page.
func (e *Engine) untold(ctx context.Context, level string) (*digest, error) {
	d := &digest{groups: map[reason]*reasonCount{}}
	for last := (store.AlarmKey{}); len(d.deaths) < mostAlarmed; {
		page, err := e.store.Untold(ctx, level, last, alarmPage)
		if err != nil {
			return nil, err
		}
		d.add(page)
		if len(page) < alarmPage {
			break
		}
		last = page[len(page)-1].AlarmKey
	}
	return d, nil
}

// reason is what letters of one alarm line have in common.
type reason struct {
	category, channel, provider, text string
}

type reasonCount struct {
	reason
	letters     int
	first, last time.Time
	example     string
}

// mostReasons bounds what is kept of one alarm; more are told of together.
const mostReasons = 1000

// add counts letters. Those that somebody has handled meanwhile are nobody's business.
func (d *digest) add(letters []store.Untold) {
	for i := range letters {
		l := &letters[i]
		d.deaths = append(d.deaths, l.AlarmKey)
		if l.Category == "" {
			continue
		}
		d.letters++
		r := reason{l.Category, l.Channel.String(), l.Provider, sameReason(l.Reason)}
		if d.groups[r] == nil && len(d.groups) >= mostReasons {
			r.text = "other reasons"
		}
		g := d.groups[r]
		if g == nil {
			g = &reasonCount{reason: r, first: l.Died, example: msg.TaskKey(l.MsgID, l.Channel)}
			d.groups[r] = g
		}
		g.letters++
		g.last = l.Died // they come in this order
	}
}

// sorted gives the most frequent reason first.
func (d *digest) sorted() []*reasonCount {
	return slices.SortedFunc(maps.Values(d.groups), func(a, b *reasonCount) int {
		return cmp.Or(-cmp.Compare(a.letters, b.letters), cmp.Compare(a.category, b.category), cmp.Compare(a.text, b.text),
			cmp.Compare(a.channel, b.channel), cmp.Compare(a.provider, b.provider))
	})
}

// key is the same for the same deaths: a receiver that was told and whose answer was lost recognises the repetition.
func (d *digest) key(level string) string {
	h := fnv.New64a()
	for _, death := range d.deaths {
		fmt.Fprintf(h, "%d-%d-%d ", death.Died.UnixMilli(), death.MsgID, death.Channel)
	}
	return fmt.Sprintf("alarm-%s-%016x", level, h.Sum64())
}

var changing = regexp.MustCompile(`[0-9A-Za-z_.:-]*[0-9][0-9A-Za-z_.:-]*`)

// sameReason leaves out of a text what differs from message to message: words of six letters and more with a digit in them, such as
// the ids that providers give. Short ones are codes.
func sameReason(text string) string {
	return changing.ReplaceAllStringFunc(text, func(word string) string {
		if len(word) < 6 {
			return word
		}
		return "…"
	})
}

// message is what people read.
func (a *Alarm) message(level string, d *digest) *sender.Message {
	var b strings.Builder
	groups := d.sorted()
	for _, g := range groups[:min(len(groups), alarmLines)] {
		fmt.Fprintf(&b, "%d × %s on %s", g.letters, g.category, g.channel)
		if g.provider != "" {
			fmt.Fprintf(&b, " by %s", g.provider)
		}
		fmt.Fprintf(&b, ": %s\n  %s to %s UTC, such as %s\n", cmp.Or(g.text, "no reason is known"), g.first.Format("Jan 2 15:04:05"), g.last.Format("15:04:05"), g.example)
	}
	if more := len(groups) - alarmLines; more > 0 {
		fmt.Fprintf(&b, "and %d more reasons\n", more)
	}
	b.WriteString("Look: tidings dead list, or GET /api/dead. Send again: tidings dead requeue.")
	subject := fmt.Sprintf("Tidings: %d dead letters", d.letters)
	if d.letters == 1 {
		subject = "Tidings: 1 dead letter"
	}
	if level == store.AlarmDaily {
		subject += " since the last digest"
	}
	return a.note(d.key(level), subject, b.String())
}

func (a *Alarm) note(key, subject, text string) *sender.Message {
	return &sender.Message{Key: key, Channel: a.Channel, Category: msg.Notification, Receiver: a.Receiver, Subject: subject, Text: text, Attempt: 1, Created: time.Now()}
}

// Test delivers an alarm that tells of nothing.
func (a *Alarm) Test(ctx context.Context) error {
	return a.deliver(ctx, a.note(fmt.Sprintf("alarm-test-%d", time.Now().UnixMilli()), "Tidings: a test", "This is how Tidings tells of dead letters."))
}
