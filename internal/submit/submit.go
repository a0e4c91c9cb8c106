// Package submit takes requests by SQL: rows that services insert into t_msg_submit within their own transactions. They are checked and
// accepted as requests by HTTP are; only the way in and the way back differ.
package submit

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"time"
	"unicode/utf8"

	strict "github.com/go-json-experiment/json"

	"tidings/internal/admit"
	"tidings/internal/metrics"
	"tidings/store"
)

// Intake takes submissions. One process at a time does, for all: should a second one, the row that both take says so.
type Intake struct {
	Store   *store.Store
	Admit   *admit.Admitter
	Log     *slog.Logger
	Metrics *metrics.Metrics

	busy map[uint64]time.Time // rows that somebody has locked, until when they are left alone: all that are taken with them would wait
}

const (
	lease   = 10 * time.Second // of the duty
	soonest = 100 * time.Millisecond
	latest  = time.Second // between two looks while nothing comes in
	// Looks from the beginning walk what an old snapshot keeps of rows that were taken: they take a twentieth of the time, or come every
	// quarter of the lease.
	lookShare = 20
	// A pass begins anew after this long, or four times what its look took: what has just come in is before what was put off.
	passTime = time.Second
	// A submission that is refused for now is tried again after this long, if the refusal says no other time.
	leastWait = time.Second
	mostWait  = time.Minute
	busyFor   = 10 * time.Second
)

// Run takes submissions until ctx ends.
func (in *Intake) Run(ctx context.Context) {
	in.busy = map[uint64]time.Time{}
	owner, mine := in.Store.NewOwner(), time.Time{} // the duty is ours until then, by this process's clock
	for idle := soonest; ctx.Err() == nil; {
		if time.Until(mine) < lease/2 {
			began := time.Now()
			took, err := in.Store.TakeDuty(ctx, store.DutySubmit, owner, lease)
			if err != nil || !took {
				pause(ctx, lease/4)
				continue
			}
			mine = began.Add(lease)
		}
		n, looked, err := in.pass(ctx, mine)
		if err != nil && ctx.Err() == nil {
			in.Log.Warn("cannot take requests from t_msg_submit", "err", err)
		}
		if idle = min(2*idle, latest); n > 0 {
			idle = soonest
		}
		pause(ctx, min(max(idle, lookShare*looked), lease/4))
	}
	leave, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	if err := in.Store.LeaveDuty(leave, store.DutySubmit, owner, ""); err != nil {
		in.Log.Debug("the duty of taking submissions was not given back", "err", err)
	}
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// pass takes what there is, once through, for a while and as long as the duty is ours. looked is what the look from the beginning took.
func (in *Intake) pass(ctx context.Context, until time.Time) (taken int, looked time.Duration, err error) {
	began := time.Now()
	maps.DeleteFunc(in.busy, func(_ uint64, until time.Time) bool { return began.After(until) })
	page, err := in.Store.Submitted(ctx, store.SubmitPlace{})
	looked = time.Since(began)
	if end := time.Now().Add(max(passTime, 4*looked)); end.Before(until) {
		until = end
	}
	for err == nil {
		var n int
		n, err = in.takePage(ctx, page)
		if taken += n; err != nil || !page.More || ctx.Err() != nil || time.Now().After(until) {
			break
		}
		page, err = in.Store.Submitted(ctx, page.Last)
	}
	return taken, looked, err
}

// takePage takes what one look has found.
func (in *Intake) takePage(ctx context.Context, page store.SubmitPage) (taken int, failed error) {
	taken, failed = in.take(ctx, page.List)
	for _, id := range page.TooLarge {
		if !in.isBusy(id) {
			taken++
			failed = errors.Join(failed, in.reject(ctx, id, fmt.Sprintf("params and content have more than %d bytes", store.MaxSubmission)))
		}
	}
	return taken, failed
}

// take checks submissions and accepts those that are right, in one transaction. One that has not been answered is met again.
func (in *Intake) take(ctx context.Context, list []store.Submission) (taken int, failed error) {
	var (
		messages []store.Message
		ids      []uint64
	)
	faults := map[uint64]fault{}
	for i := range list {
		row := &list[i]
		if in.isBusy(row.ID) {
			continue
		}
		m, wrong, err := in.check(ctx, row)
		if err != nil && (ctx.Err() != nil || errors.Is(err, store.ErrUnavailable) || errors.Is(err, store.ErrBusy)) {
			return taken, err
		}
		if taken++; err != nil {
			failed = errors.Join(failed, in.unfit(ctx, row.ID, err))
		} else if m != nil {
			messages, ids = append(messages, *m), append(ids, row.ID)
		} else {
			faults[row.ID] = wrong
		}
	}
	if len(messages) > 0 {
		results, errs := in.Store.EnqueueBatch(ctx, messages)
		for i, id := range ids {
			failed = errors.Join(failed, in.settle(ctx, id, results[i], errs[i]))
		}
	}
	for id, wrong := range faults { // last: one of them may be locked
		if wrong.perhaps {
			failed = errors.Join(failed, in.postpone(ctx, id, wrong.why, leastWait))
		} else {
			failed = errors.Join(failed, in.reject(ctx, id, wrong.why))
		}
	}
	return taken, failed
}

// isBusy tells whether a row was found locked a moment ago.
func (in *Intake) isBusy(id uint64) bool { return time.Now().Before(in.busy[id]) }

// written is the answer to a change of a row: where somebody has it locked, it is left for later.
func (in *Intake) written(id uint64, err error) error {
	if errors.Is(err, store.ErrBusy) {
		in.busy[id] = time.Now().Add(busyFor)
		return nil
	}
	return err
}

// fault is what is wrong with a submission. perhaps: a copy of what it names may be too old to know it.
type fault struct {
	why     string
	perhaps bool
}

// copies is how old what is known of callers and templates may be.
const copies = 2 * time.Second

// settle writes back what the transaction of a message did not: that there was none.
func (in *Intake) settle(ctx context.Context, id uint64, accepted store.Accepted, err error) error {
	var limit *store.LimitError
	switch {
	case err == nil && accepted.Duplicate:
		in.Metrics.Submitted("duplicate")
		return in.written(id, in.Store.KnownSubmission(ctx, id, accepted.MsgID))
	case err == nil:
		in.Metrics.Submitted("accepted")
		in.Log.Debug("accepted", "msg_id", fmt.Sprint(accepted.MsgID), "submit_id", id)
		return nil
	case errors.As(err, &limit):
		return in.postpone(ctx, id, err.Error(), min(max(limit.Wait, leastWait), mostWait))
	case errors.Is(err, store.ErrConflict), errors.Is(err, store.ErrTooLarge):
		return in.reject(ctx, id, err.Error())
	case errors.Is(err, store.ErrTaken):
		return nil
	case errors.Is(err, store.ErrBusy):
		return in.written(id, err)
	case errors.Is(err, store.ErrUnavailable):
		return err // the next look meets it again
	}
	return in.unfit(ctx, id, err)
}

// unfit puts a row off that cannot be checked or stored and perhaps never can, such as one whose template was damaged by hand. Others
// must not wait for it.
func (in *Intake) unfit(ctx context.Context, id uint64, err error) error {
	in.Log.Error("a submission cannot be accepted", "submit_id", id, "err", err)
	return in.postpone(ctx, id, "it cannot be accepted: see the log", mostWait)
}

func (in *Intake) postpone(ctx context.Context, id uint64, why string, wait time.Duration) error {
	in.Metrics.Submitted("postponed")
	return in.written(id, in.Store.PostponeSubmission(ctx, id, why, wait))
}

func (in *Intake) reject(ctx context.Context, id uint64, why string) error {
	in.Metrics.Submitted("rejected")
	in.Log.Debug("a submission is rejected: t_msg_submit.error says why", "submit_id", id)
	return in.written(id, in.Store.RejectSubmission(ctx, id, why))
}

// check makes a message of a submission, or says why it is none.
func (in *Intake) check(ctx context.Context, row *store.Submission) (*store.Message, fault, error) {
	fresh := in.Store.Now().Sub(row.Created) < copies
	ok, err := in.Store.MaySend(ctx, row.SourceID)
	if err != nil {
		return nil, fault{}, err
	}
	if !ok {
		return nil, fault{"source_id is no caller that is registered and enabled (tidings key list); while none is, it is " + store.DefaultSource, fresh}, nil
	}
	r, why := request(row)
	if why != "" {
		return nil, fault{why: why}, nil
	}
	checked, err := in.Admit.Check(ctx, row.SourceID, r)
	if err != nil {
		return nil, fault{}, err
	}
	if len(checked.Problems) > 0 {
		var words []string
		for _, p := range checked.Problems {
			words = append(words, column(p.Field)+" "+p.Message)
		}
		return nil, fault{strings.Join(words, "; "), fresh && row.TemplateID != ""}, nil
	}
	checked.Message.SubmitID = row.ID
	return checked.Message, fault{}, nil
}

// column is what a field of a request is called here.
func column(field string) string {
	name, _, _ := strings.Cut(field, ".")
	switch {
	case name == "to":
		return "receiver" + strings.TrimPrefix(field, "to")
	case name == "subject" || name == "text" || name == "html" || strings.HasPrefix(name, "attachments"):
		return "content." + field
	}
	return field
}

// notText names the first column that is not valid UTF-8. MariaDB lets halves of surrogate pairs into utf8mb4; JSON cannot hold them.
func notText(row *store.Submission) string {
	for _, c := range []struct{ name, text string }{
		{"request_id", row.RequestID},
		{"template_id", row.TemplateID},
		{"channels", row.Channels},
		{"priority", row.Priority},
		{"category", row.Category},
		{"receiver", row.Receiver},
		{"params", row.Params.String},
		{"content", row.Content.String},
	} {
		if !utf8.ValidString(c.text) {
			return c.name
		}
	}
	return ""
}

// content is what the column content may hold.
type content struct {
	Subject     string             `json:"subject"`
	Text        string             `json:"text"`
	HTML        string             `json:"html"`
	Attachments []admit.Attachment `json:"attachments"`
}

// request makes a request of a row, or says why it cannot be one.
func request(row *store.Submission) (r *admit.Request, why string) {
	if name := notText(row); name != "" {
		return nil, name + " is not valid UTF-8"
	}
	r = &admit.Request{
		RequestID: row.RequestID, TemplateID: row.TemplateID, Priority: row.Priority, Category: row.Category, To: row.Receiver, Submitted: row.Created,
	}
	if r.RequestID == "" {
		r.RequestID = fmt.Sprintf("submit-%d", row.ID)
	}
	for name := range strings.SplitSeq(row.Channels, ",") {
		if name = strings.TrimSpace(name); name != "" {
			r.Channels = append(r.Channels, name)
		}
	}
	if strings.HasPrefix(strings.TrimSpace(row.Receiver), "{") {
		var to map[string]any
		if strict.Unmarshal([]byte(row.Receiver), &to) != nil {
			return nil, "receiver begins like a JSON object and is none"
		}
		r.To = to
	}
	if row.Params.Valid {
		r.Params = admit.Raw(row.Params.String)
	}
	if row.Content.Valid {
		var c content
		if err := strict.Unmarshal([]byte(row.Content.String), &c, strict.RejectUnknownMembers(true)); err != nil {
			return nil, "content must be an object with subject, text, html and attachments" // the parser's words may repeat what it says
		}
		r.Subject, r.Text, r.HTML, r.Attachments = c.Subject, c.Text, c.HTML, c.Attachments
	}
	if row.SendAt.Valid {
		r.SendAt = row.SendAt.Time.Format(time.RFC3339Nano)
	}
	if row.Expire.Valid {
		r.ExpireTime = row.Expire.Time.Format(time.RFC3339Nano)
	}
	return r, ""
}
