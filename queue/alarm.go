package queue

import (
	"cmp"
	"context"
	"errors"
	"fmt"
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
// are told twice.
func (e *Engine) alarm(ctx context.Context) {
	retry, failures := map[string]time.Time{}, map[string]int{}
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
			if !l.Untold || l.Taken || !e.cfg.Alarm.due(l, e.store.Now()) || time.Now().Before(retry[l.Level]) {
				continue
			}
			if err := e.tell(ctx, l.Level); err != nil && ctx.Err() == nil {
				wait := min(leastRetry<<min(failures[l.Level], 10), mostRetry)
				failures[l.Level]++
				retry[l.Level] = time.Now().Add(wait)
				e.log.Error("cannot tell anybody of dead letters, trying again", "level", l.Level, "provider", e.cfg.Alarm.Name, "in", wait, "err", err)
			} else if err == nil {
				failures[l.Level] = 0
			}
		}
	}
}

// due tells whether people may be told now.
func (a *Alarm) due(l store.AlarmLevel, now time.Time) bool {
	switch {
	case l.Told == nil:
		return true
	case l.Level == store.AlarmNow:
		return !now.Before(l.Told.Add(cmp.Or(a.Every, time.Minute)))
	}
	midnight := now.UTC().Truncate(24 * time.Hour)
	digest := midnight.Add(a.DigestAt)
	if digest.After(now) {
		digest = digest.Add(-24 * time.Hour)
	}
	return l.Told.Before(digest)
}

// tell tells people of what they have not been told of at a level.
func (e *Engine) tell(ctx context.Context, level string) (err error) {
	a := e.cfg.Alarm
	timeout := cmp.Or(a.Timeout, alarmTimeout)
	owner, err := e.store.TakeAlarm(ctx, level, 2*timeout+10*time.Second)
	if err != nil || owner == "" {
		return err
	}
	told := false
	defer func() {
		failed := ""
		if err != nil {
			failed = err.Error()
		}
		leave, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		err = errors.Join(err, e.store.LeaveAlarm(leave, level, owner, told, failed))
	}()
	letters, err := e.untold(ctx, level)
	if err != nil {
		return err
	}
	groups := byReason(letters)
	if len(groups) > 0 {
		send, cancel := context.WithTimeout(ctx, timeout)
		v := a.Provider.Send(send, a.message(level, owner, groups))
		cancel()
		told = v.Kind == sender.Success
		e.cfg.Metrics.Alarm(level, told)
		if !told {
			return fmt.Errorf("%s: %s %s", v.Kind, v.Code, v.Text)
		}
		e.log.Info("told of dead letters", "level", level, "provider", a.Name, "letters", len(letters), "reasons", len(groups))
	}
	for part := range slices.Chunk(letters, 500) {
		if err := e.store.Told(context.WithoutCancel(ctx), level, part); err != nil {
			return err
		}
	}
	return nil
}

func (e *Engine) untold(ctx context.Context, level string) (letters []store.Untold, err error) {
	var last *store.Untold
	for len(letters) < mostAlarmed {
		page, err := e.store.Untold(ctx, level, last, alarmPage)
		if err != nil {
			return nil, err
		}
		if letters = append(letters, page...); len(page) < alarmPage {
			break
		}
		last = &page[len(page)-1]
	}
	return letters, nil
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

// byReason groups letters, the most frequent reason first. Those that somebody has handled meanwhile are nobody's business.
func byReason(letters []store.Untold) (groups []reasonCount) {
	found := map[reason]*reasonCount{}
	for i := range letters {
		l := &letters[i]
		if l.Category == "" {
			continue
		}
		r := reason{l.Category, l.Channel.String(), l.Provider, sameReason(l.Reason)}
		g := found[r]
		if g == nil {
			g = &reasonCount{reason: r, first: l.Died, last: l.Died, example: msg.TaskKey(l.MsgID, l.Channel)}
			found[r] = g
		}
		g.letters++
		if l.Died.Before(g.first) {
			g.first = l.Died
		}
		if l.Died.After(g.last) {
			g.last = l.Died
		}
	}
	for _, r := range slices.SortedFunc(maps.Keys(found), func(a, b reason) int {
		return cmp.Or(-cmp.Compare(found[a].letters, found[b].letters), cmp.Compare(a.category, b.category), cmp.Compare(a.text, b.text),
			cmp.Compare(a.channel, b.channel), cmp.Compare(a.provider, b.provider))
	}) {
		groups = append(groups, *found[r])
	}
	return groups
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
func (a *Alarm) message(level, owner string, groups []reasonCount) *sender.Message {
	all := 0
	var b strings.Builder
	for i, g := range groups {
		all += g.letters
		if i >= alarmLines {
			continue
		}
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
	letters := "dead letters"
	if all == 1 {
		letters = "dead letter"
	}
	subject := fmt.Sprintf("Tidings: %d %s", all, letters)
	if level == store.AlarmDaily {
		subject += " since the last digest"
	}
	return a.note("alarm-"+level+"-"+owner, subject, b.String())
}

func (a *Alarm) note(key, subject, text string) *sender.Message {
	return &sender.Message{Key: key, Channel: a.Channel, Category: msg.Notification, Receiver: a.Receiver, Subject: subject, Text: text, Attempt: 1, Created: time.Now()}
}

// Test delivers an alarm that tells of nothing.
func (a *Alarm) Test(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(a.Timeout, alarmTimeout))
	defer cancel()
	v := a.Provider.Send(ctx, a.note(fmt.Sprintf("alarm-test-%d", time.Now().UnixMilli()), "Tidings: a test", "This is how Tidings tells of dead letters."))
	if v.Kind != sender.Success {
		return fmt.Errorf("%s: %s %s", v.Kind, v.Code, v.Text)
	}
	return nil
}
