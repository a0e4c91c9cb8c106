package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"mime"
	"net/http"
	"strconv"
	"time"

	"tidings/internal/admit"
	"tidings/internal/explain"
	"tidings/internal/msg"
	"tidings/store"
)

type sendInput struct {
	ContentType    string `header:"Content-Type" hidden:"true"`
	IdempotencyKey string `header:"Idempotency-Key" doc:"Same as request_id in the body."`
	DryRun         bool   `query:"dry_run" doc:"Check and render only: nothing is accepted, charged or sent."`
	RawBody        []byte
}

type sendOutput struct {
	Status int
	Body   any // a Sent or a DryRun
}

// Sent answers an accepted message.
type Sent struct {
	MsgID     string     `json:"msg_id" doc:"The message's id."`
	Status    string     `json:"status,omitempty" doc:"The message's status now."`
	DueTime   *time.Time `json:"due_time,omitempty" doc:"When a scheduled message is due."`
	Duplicate bool       `json:"duplicate,omitempty" doc:"The request_id was known, with the same body: this is the first message."`
	Tasks     []SentTask `json:"tasks,omitempty" doc:"One task for each channel."`
}

// SentTask is a task of an accepted message.
type SentTask struct {
	Channel string `json:"channel"`
	Status  string `json:"status"`
	Reason  string `json:"reason,omitempty" doc:"Why the task is skipped."`
}

// send accepts a message, or refuses it.
func (s *Server) send(ctx context.Context, in *sendInput) (*sendOutput, error) {
	out, err := s.acceptOne(ctx, in)
	var p *APIError
	if errors.As(err, &p) && !in.DryRun {
		s.cfg.Metrics.Rejected(p.Code)
		s.cfg.Log.Debug("rejected", "request_id", requestID(ctx), "source", caller(ctx).ID, "code", p.Code)
	}
	return out, err
}

// logAccepted is the first of the three points at which a message is told of; the others are the queue's: sent, decided.
func (s *Server) logAccepted(ctx context.Context, msgID string, duplicate bool) {
	if msgID != "" && s.cfg.Log.Enabled(ctx, slog.LevelDebug) {
		s.cfg.Log.Debug("accepted", "request_id", requestID(ctx), "source", caller(ctx).ID, "msg_id", msgID, "duplicate", duplicate)
	}
}

// acceptOne: decode, check, store. The answer follows the commit.
func (s *Server) acceptOne(ctx context.Context, in *sendInput) (*sendOutput, error) {
	if kind, _, err := mime.ParseMediaType(in.ContentType); err != nil || kind != "application/json" {
		return nil, wrongType.problem()
	}
	r, problems, err := s.decoder.decode(in.RawBody)
	if err != nil {
		return nil, err
	}
	if key := in.IdempotencyKey; key != "" {
		if r.RequestID != "" && r.RequestID != key {
			problems = append(problems, admit.Problem{Field: "request_id", Code: admit.CodeInvalid, Message: "differs from the header Idempotency-Key"})
		}
		r.RequestID = key
	}
	checked, err := s.cfg.Admit.Check(ctx, caller(ctx).ID, r)
	if err != nil {
		return nil, s.answer(ctx, err)
	}
	all := merge(problems, checked.Problems)
	if in.DryRun {
		return s.dryRun(ctx, checked, problems, all)
	}
	if len(all) > 0 {
		return nil, faulty(all)
	}
	m := checked.Message
	accepted, err := s.cfg.Store.Enqueue(ctx, m)
	if err != nil {
		return nil, s.answer(ctx, err)
	}
	s.logAccepted(ctx, formatID(accepted.MsgID), accepted.Duplicate)
	if accepted.Duplicate {
		return s.sentBefore(ctx, accepted.MsgID)
	}
	sent := Sent{MsgID: formatID(accepted.MsgID), Tasks: sentTasks(m)}
	sent.Status, sent.DueTime = sentNow(m, s.cfg.Store.Now())
	return &sendOutput{Status: http.StatusAccepted, Body: sent}, nil
}

func sentTasks(m *store.Message) (tasks []SentTask) {
	for _, t := range m.Tasks {
		tasks = append(tasks, SentTask{Channel: t.Channel.String(), Status: msg.Ready.String()})
	}
	for _, t := range m.Skipped {
		tasks = append(tasks, SentTask{Channel: t.Channel.String(), Status: msg.Skipped.String(), Reason: t.Reason})
	}
	return tasks
}

// DryRun answers a request that was only to be checked.
type DryRun struct {
	DryRun   bool            `json:"dry_run"`
	Accepted bool            `json:"would_accept" doc:"Whether the request would be accepted, or is known already."`
	Checks   []DryCheck      `json:"checks"`
	Errors   []admit.Problem `json:"errors,omitempty" doc:"Every faulty field."`
	Tasks    []SentTask      `json:"tasks,omitempty"`
	Rendered []Rendered      `json:"rendered,omitempty" doc:"What the receiver would see on each channel."`
}

// DryCheck is the verdict of one check.
type DryCheck struct {
	Check   string `json:"check"`
	OK      bool   `json:"ok"`
	Verdict string `json:"verdict"`
}

// Rendered is what a receiver would see.
type Rendered struct {
	Channel  string `json:"channel"`
	Receiver string `json:"receiver,omitempty"`
	Subject  string `json:"subject,omitempty"`
	Text     string `json:"text,omitempty"`
	HTML     string `json:"html,omitempty"`
}

// dryRun tells what would come of a request. What was checked is what is checked for a real one.
func (s *Server) dryRun(ctx context.Context, checked *admit.Checked, schema, all []admit.Problem) (*sendOutput, error) {
	out := DryRun{DryRun: true, Accepted: len(all) == 0, Errors: all}
	verdict := func(name string, faults int) {
		text := "ok"
		if faults > 0 {
			text = fmt.Sprintf("faulty (%d), see errors", faults)
		}
		out.Checks = append(out.Checks, DryCheck{Check: name, OK: faults == 0, Verdict: text})
	}
	verdict("schema", len(schema))
	for _, step := range checked.Steps {
		verdict(step.Name, step.Problems)
	}
	if m := checked.Message; m != nil && len(all) == 0 {
		out.Tasks = sentTasks(m)
		known, err := s.cfg.Store.Known(ctx, m)
		check := DryCheck{Check: "idempotency", OK: true, Verdict: "new"}
		switch {
		case errors.Is(err, store.ErrConflict):
			check.OK, check.Verdict, out.Accepted = false, keyConflict.detail, false
		case err != nil:
			return nil, s.answer(ctx, err)
		case known != 0:
			check.Verdict = "known already: message " + formatID(known)
		}
		out.Checks = append(out.Checks, check)
		limits := DryCheck{Check: "limits", OK: true, Verdict: "ok"}
		if err := s.cfg.Store.Allowed(ctx, m); errors.Is(err, store.ErrLimited) {
			limits.OK, limits.Verdict = false, err.Error()
			out.Accepted = out.Accepted && known != 0 // a repetition is not charged
		} else if err != nil {
			return nil, s.answer(ctx, err)
		}
		out.Checks = append(out.Checks, limits)
	}
	for _, r := range checked.Rendered {
		out.Rendered = append(out.Rendered, Rendered{Channel: r.Channel.String(), Receiver: r.Receiver, Subject: r.Subject, Text: r.Text, HTML: r.HTML})
	}
	return &sendOutput{Status: http.StatusOK, Body: out}, nil
}

// sentBefore answers a repeated request with the first message as it stands now.
func (s *Server) sentBefore(ctx context.Context, msgID uint64) (*sendOutput, error) {
	sent := Sent{MsgID: formatID(msgID), Duplicate: true}
	m, err := s.cfg.Store.Message(ctx, msgID)
	if err != nil && !errors.Is(err, store.ErrNotFound) { // not found: its record is gone with its day; the key outlived it
		return nil, s.answer(ctx, err)
	}
	if err == nil {
		sent.Status, sent.Tasks = m.Status, tasksNow(m)
		if m.Status == statusScheduled {
			sent.DueTime = &m.Tasks[0].Due
		}
	}
	return &sendOutput{Status: http.StatusOK, Body: sent}, nil
}

// Message is a message as its caller sees it.
type Message struct {
	MsgID      string    `json:"msg_id"`
	Status     string    `json:"status" enum:"scheduled,dispatched,sending,success,partial,failed,expired,cancelled,skipped" doc:"Derived from the tasks."`
	SourceID   string    `json:"source_id" doc:"The caller that sent it in."`
	RequestID  string    `json:"request_id,omitempty"`
	Category   string    `json:"category"`
	Priority   string    `json:"priority"`
	TemplateID string    `json:"template_id,omitempty"`
	CreateTime time.Time `json:"create_time"`
	DueTime    time.Time `json:"due_time"`
	ExpireTime time.Time `json:"expire_time" doc:"Not sent after this instant."`
	Tasks      []Task    `json:"tasks"`
	Attempts   []Attempt `json:"attempts,omitempty" doc:"Attempts that did not end in success."`
}

// Task is a message on one channel.
type Task struct {
	Key           string     `json:"key" doc:"The task's name: the idempotency key that the provider gets."`
	Channel       string     `json:"channel"`
	Receiver      string     `json:"receiver"`
	Status        string     `json:"status" enum:"ready,sending,unknown,success,failed,dead,expired,cancelled,skipped"`
	Attempt       int        `json:"attempt" doc:"Attempts so far."`
	AttemptLimit  int        `json:"attempt_limit"`
	Version       uint32     `json:"template_version,omitempty" doc:"The version of the template that the message was accepted with."`
	NextTime      *time.Time `json:"next_time,omitempty" doc:"ready: not before; sending: end of the lease; unknown: end of the wait."`
	FinishTime    *time.Time `json:"finish_time,omitempty"`
	Provider      string     `json:"provider,omitempty" doc:"The provider asked last."`
	ProviderMsgID string     `json:"provider_msg_id,omitempty"`
	LatencyMS     int64      `json:"latency_ms,omitempty"`
	LastError     string     `json:"last_error,omitempty"`
}

// Attempt is a try that did not end in success.
type Attempt struct {
	Channel   string    `json:"channel"`
	Attempt   int       `json:"attempt"`
	Outcome   string    `json:"outcome" enum:"temporary,permanent,unknown"`
	Provider  string    `json:"provider,omitempty"`
	Code      string    `json:"code,omitempty"`
	Text      string    `json:"text,omitempty"`
	LatencyMS int64     `json:"latency_ms"`
	Time      time.Time `json:"time"`
}

type messageInput struct {
	ID   string `path:"id" doc:"The message's id."`
	Wait string `query:"wait" doc:"Wait up to this long (such as 10s, at most 60s) for the message to end." example:"10s"`
}

type messageOutput struct{ Body Message }

// message answers for one message, at once or when it has ended.
func (s *Server) message(ctx context.Context, in *messageInput) (*messageOutput, error) {
	msgID, err := strconv.ParseUint(in.ID, 10, 64)
	if err != nil {
		return nil, notFound.problem()
	}
	var wait time.Duration
	if in.Wait != "" {
		if wait, err = time.ParseDuration(in.Wait); err != nil || wait < 0 || wait > maxWait {
			return nil, faulty([]admit.Problem{{Field: "wait", Code: admit.CodeInvalid, Message: "must be a duration up to 60s, such as 10s"}})
		}
	}
	m, err := s.awaitEnd(ctx, msgID, wait)
	if err != nil {
		return nil, s.answer(ctx, err)
	}
	return &messageOutput{Body: view(m)}, nil
}

// awaitEnd reads a message again and again, at growing intervals, until it has ended or the wait is over.
func (s *Server) awaitEnd(ctx context.Context, msgID uint64, wait time.Duration) (*store.MessageView, error) {
	deadline := time.Now().Add(wait)
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, 500*time.Millisecond) {
		m, err := s.own(ctx, msgID)
		if err != nil || ended(m.Status) || !time.Now().Before(deadline) {
			return m, err
		}
		select {
		case <-time.After(min(pause, time.Until(deadline))):
		case <-ctx.Done():
			return m, nil
		}
	}
}

// own reads a message of the caller's; others' are not found.
func (s *Server) own(ctx context.Context, msgID uint64) (*store.MessageView, error) {
	m, err := s.cfg.Store.Message(ctx, msgID)
	if err != nil {
		return nil, err
	}
	if _, err := sourceFor(ctx, m.Tasks[0].SourceID); err != nil {
		return nil, err
	}
	return m, nil
}

func ended(status string) bool {
	return status != "scheduled" && status != "dispatched" && status != "sending"
}

type listInput struct {
	RequestID string `query:"request_id" doc:"The caller's key of one message. Goes with no other filter."`
	Source    string `query:"source" doc:"The caller that sent the messages in. Default: yourself; for an admin, all."`
	Receiver  string `query:"receiver" doc:"The receiver, as the messages show it."`
	Channel   string `query:"channel" enum:"email,sms,feishu,inbox,push,webhook,dingtalk,wecom,log"`
	Status    string `query:"status" enum:"scheduled,dispatched,sending,success,partial,failed,expired,cancelled,skipped" doc:"scheduled lists the soonest first; the others the newest first."`
	Since     string `query:"since" doc:"Accepted at or after: RFC 3339, or Unix milliseconds."`
	Until     string `query:"until" doc:"Accepted before: RFC 3339, or Unix milliseconds."`
	Limit     int    `query:"limit" minimum:"1" maximum:"500" default:"50"`
	Cursor    string `query:"cursor" doc:"next_cursor of the page before."`
}

type listOutput struct{ Body MessageList }

// MessageList is a page of messages, the newest first; of scheduled ones, the soonest.
type MessageList struct {
	Data       []Message `json:"data"`
	NextCursor string    `json:"next_cursor,omitempty" doc:"Where the next page begins. A page may be short, or empty, and still have a next one: each examines a bounded number of rows."`
}

// list shows messages by filter, or the one of a request id: a list of one, or of none.
func (s *Server) list(ctx context.Context, in *listInput) (*listOutput, error) {
	var page store.Page
	source, err := sourceFor(ctx, in.Source)
	if err != nil {
		return nil, err
	}
	if in.RequestID != "" {
		page, err = s.byRequest(ctx, source, in.RequestID)
	} else {
		if caller(ctx).Admin() {
			source = in.Source // none: of all
		}
		filter, problems := in.filter(source)
		if len(problems) > 0 {
			return nil, faulty(problems)
		}
		if in.Status == statusScheduled {
			return s.scheduled(ctx, filter, in.Cursor)
		}
		page, err = s.cfg.Store.List(ctx, filter)
	}
	if err != nil {
		return nil, s.answer(ctx, err)
	}
	out := listOutput{Body: MessageList{Data: []Message{}}}
	for i := range page.Messages {
		out.Body.Data = append(out.Body.Data, view(&page.Messages[i]))
	}
	if page.Next > 0 {
		out.Body.NextCursor = formatID(page.Next)
	}
	return &out, nil
}

func (s *Server) byRequest(ctx context.Context, source, requestID string) (page store.Page, err error) {
	msgID, err := s.cfg.Store.MessageByRequest(ctx, source, requestID)
	if err == nil {
		var m *store.MessageView
		if m, err = s.cfg.Store.Message(ctx, msgID); err == nil {
			page.Messages = []store.MessageView{*m}
		}
	}
	if errors.Is(err, store.ErrNotFound) {
		return store.Page{}, nil
	}
	return page, err
}

// filter reads the query. What huma has checked already is not checked again.
func (in *listInput) filter(source string) (f store.Filter, problems []admit.Problem) {
	fault := func(field string, err error) {
		problems = append(problems, admit.Problem{Field: field, Code: admit.CodeInvalid, Message: err.Error()})
	}
	f = store.Filter{SourceID: source, Receiver: in.Receiver, Status: in.Status, Limit: in.Limit}
	var err error
	if in.Channel != "" {
		if f.Channel, err = msg.ParseChannel(in.Channel); err != nil {
			fault("channel", err)
		}
	}
	for field, into := range map[string]*time.Time{"since": &f.Since, "until": &f.Until} {
		text := map[string]string{"since": in.Since, "until": in.Until}[field]
		if text == "" {
			continue
		}
		if *into, err = admit.ParseTime(numberOrText(text)); err != nil {
			fault(field, err)
		}
	}
	if in.Cursor != "" && in.Status != statusScheduled {
		if f.Before, err = strconv.ParseUint(in.Cursor, 10, 63); err != nil || f.Before == 0 {
			fault("cursor", errors.New("is no next_cursor of a page"))
		}
	}
	return f, problems
}

// numberOrText gives a query's value the type that JSON would have given it.
func numberOrText(text string) any {
	if _, err := strconv.ParseInt(text, 10, 64); err == nil {
		return json.Number(text)
	}
	return text
}

func view(m *store.MessageView) Message {
	first := &m.Tasks[0]
	out := Message{
		MsgID: formatID(m.MsgID), Status: m.Status, SourceID: first.SourceID, RequestID: first.RequestID,
		TemplateID: first.TemplateID, Category: first.Category.String(), Priority: first.Lane.String(),
		CreateTime: first.Created, DueTime: first.Due, ExpireTime: first.Expire,
	}
	for i := range m.Tasks {
		t := &m.Tasks[i]
		task := Task{
			Key: t.Key(), Channel: t.Channel.String(), Receiver: t.Receiver, Status: t.Status.String(), Attempt: t.Attempt, AttemptLimit: t.AttemptLimit, Version: t.TemplateVersion,
			Provider: t.Provider, ProviderMsgID: t.ProviderMsgID, LatencyMS: t.Latency.Milliseconds(), LastError: t.LastError,
		}
		switch {
		case !t.Finished.IsZero():
			task.FinishTime = &t.Finished
		case t.Status.Queued():
			task.NextTime = &t.Next
		}
		out.Tasks = append(out.Tasks, task)
	}
	out.Attempts = attemptViews(m.Attempts)
	return out
}

func attemptViews(attempts []store.AttemptView) (out []Attempt) {
	for _, a := range attempts {
		out = append(out, Attempt{
			Channel: a.Channel.String(), Attempt: a.Attempt, Outcome: a.Outcome, Provider: a.Provider, Code: a.Code, Text: a.Text,
			LatencyMS: a.Latency, Time: a.Time,
		})
	}
	return out
}

// Explanation says why each task of a message is where it is.
type Explanation struct {
	MsgID  string              `json:"msg_id"`
	Status string              `json:"status"`
	Tasks  []explain.Explained `json:"tasks"`
}

type explainInput struct {
	ID string `path:"id" doc:"The message's id."`
}

type explainOutput struct{ Body Explanation }

func (s *Server) explain(ctx context.Context, in *explainInput) (*explainOutput, error) {
	msgID, err := strconv.ParseUint(in.ID, 10, 64)
	if err != nil {
		return nil, notFound.problem()
	}
	m, err := s.own(ctx, msgID)
	if err != nil {
		return nil, s.answer(ctx, err)
	}
	tasks, err := s.cfg.Explain.Message(ctx, m, caller(ctx).Admin())
	if err != nil {
		return nil, s.answer(ctx, err)
	}
	return &explainOutput{Explanation{MsgID: formatID(msgID), Status: m.Status, Tasks: tasks}}, nil
}

// formatID writes an id as text: JavaScript's numbers end at 2^53.
func formatID(id uint64) string { return strconv.FormatUint(id, 10) }
