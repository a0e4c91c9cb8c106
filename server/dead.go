package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"tidings/internal/admit"
	"tidings/internal/msg"
	"tidings/store"
)

func (s *Server) deadRoutes(api huma.API) {
	op := operation("dead letters", "list-dead", http.MethodGet, "/api/dead", "List dead letters, those that died last first")
	op.Description = "Dead letters are tasks whose attempts are used up, or whose outcome is unknown and must not be doubled. They stay until somebody requeues or discards them."
	huma.Register(api, op, s.listDead)
	huma.Register(api, operation("dead letters", "get-dead", http.MethodGet, "/api/dead/{msg_id}/{channel}", "Ask for a dead letter, with its attempts"), s.getDead)
	op = operation("dead letters", "requeue-one-dead", http.MethodPost, "/api/dead/{msg_id}/{channel}/requeue", "Send a dead letter again")
	op.Description = "It goes back to its lane at once, with its policy's attempts over again, time to be sent in, and the key that providers know it by. 409 channel_out_of_order: " +
		"its lane is paused, or no provider of the channel may be asked now; force requeues it all the same."
	huma.Register(api, op, s.requeueOne)
	op = operation("dead letters", "discard-one-dead", http.MethodPost, "/api/dead/{msg_id}/{channel}/discard", "Give a dead letter up")
	op.Description = "It is recorded as failed."
	huma.Register(api, op, s.discardOne)
	op = operation("dead letters", "requeue-dead", http.MethodPost, "/api/dead/requeue", "Send all dead letters again that a filter means")
	op.Description = "Those that died first go first, rate of them a second. It takes up to a minute; with done false there are more: ask again with the same filter and the until of the answer, " +
		"which leaves out those that die again. The same goes for an answer that did not arrive: what is requeued is requeued once. It stops with 409 channel_out_of_order while a lane is paused, or no provider of a channel may be asked."
	huma.Register(api, op, s.requeueDead)
	op = operation("dead letters", "discard-dead", http.MethodPost, "/api/dead/discard", "Give all dead letters up that a filter means")
	op.Description = "As requeue-dead goes about it."
	huma.Register(api, op, s.discardDead)
}

// DeadLetter is a task that waits for a person.
type DeadLetter struct {
	MsgID        string    `json:"msg_id"`
	Channel      string    `json:"channel"`
	Key          string    `json:"key" doc:"The task's name: the idempotency key that the provider gets, when it is requeued, too."`
	SourceID     string    `json:"source_id"`
	RequestID    string    `json:"request_id,omitempty"`
	BatchID      string    `json:"batch_id,omitempty"`
	Category     string    `json:"category"`
	Priority     string    `json:"priority" doc:"The lane that it goes back to."`
	Receiver     string    `json:"receiver"`
	TemplateID   string    `json:"template_id,omitempty"`
	Version      uint32    `json:"template_version,omitempty"`
	Reason       string    `json:"reason" doc:"What the last attempt ended with."`
	Provider     string    `json:"provider,omitempty" doc:"The provider asked last."`
	Attempt      int       `json:"attempt" doc:"Attempts so far."`
	AttemptLimit int       `json:"attempt_limit"`
	CreateTime   time.Time `json:"create_time"`
	DueTime      time.Time `json:"due_time"`
	ExpireTime   time.Time `json:"expire_time"`
	DeadTime     time.Time `json:"dead_time" doc:"When it became a dead letter."`
	Attempts     []Attempt `json:"attempts,omitempty" doc:"For one dead letter: the attempts that did not end in success."`
}

func deadView(d *store.DeadLetter) DeadLetter {
	return DeadLetter{
		MsgID: formatID(d.MsgID), Channel: d.Channel.String(), Key: d.Key(), SourceID: d.SourceID, RequestID: d.RequestID, BatchID: d.BatchID, Category: d.Category.String(),
		Priority: d.Lane.String(), Receiver: d.Receiver, TemplateID: d.TemplateID, Version: d.TemplateVersion, Reason: d.LastError, Provider: d.Provider, Attempt: d.Attempt,
		AttemptLimit: d.AttemptLimit, CreateTime: d.Created, DueTime: d.Due, ExpireTime: d.Expire, DeadTime: d.Died, Attempts: attemptViews(d.Attempts),
	}
}

// DeadQuery says which dead letters are meant.
type DeadQuery struct {
	Channel    string `query:"channel" enum:"email,sms,feishu,inbox,push,webhook,dingtalk,wecom,log"`
	Category   string `query:"category" enum:"verification,notification,marketing"`
	Source     string `query:"source" doc:"The caller that sent the messages in. Default: yourself; for an admin, all."`
	TemplateID string `query:"template_id"`
	Reason     string `query:"reason" doc:"A part of the reason, in any case."`
	Since      string `query:"since" doc:"Died at or after: RFC 3339, or Unix milliseconds."`
	Until      string `query:"until" doc:"Died before: RFC 3339, or Unix milliseconds."`
}

// filter reads what is meant, for the caller. Huma has checked the names.
func (in *DeadQuery) filter(ctx context.Context) (f store.DeadFilter, problems []admit.Problem, err error) {
	if f.SourceID, err = sourceFor(ctx, in.Source); err != nil {
		return f, nil, err
	}
	if caller(ctx).Admin() {
		f.SourceID = in.Source // none: of all
	}
	f.Category, f.TemplateID, f.Reason = in.Category, in.TemplateID, in.Reason
	if in.Channel != "" {
		if f.Channel, err = msg.ParseChannel(in.Channel); err != nil {
			problems = append(problems, admit.Problem{Field: "channel", Code: admit.CodeInvalid, Message: err.Error()})
		}
	}
	problems = append(problems, readTimes(map[string]string{"since": in.Since, "until": in.Until}, map[string]*time.Time{"since": &f.Since, "until": &f.Until})...)
	if len(problems) == 0 && !f.Until.IsZero() && !f.Since.Before(f.Until) {
		problems = append(problems, admit.Problem{Field: "since", Code: admit.CodeInvalid, Message: "must lie before until"})
	}
	return f, problems, nil
}

// readTimes reads instants out of a query.
func readTimes(texts map[string]string, into map[string]*time.Time) (problems []admit.Problem) {
	for _, field := range []string{"since", "until"} {
		if texts[field] == "" {
			continue
		}
		t, err := admit.ParseTime(numberOrText(texts[field]))
		if err != nil {
			problems = append(problems, admit.Problem{Field: field, Code: admit.CodeInvalid, Message: err.Error()})
			continue
		}
		*into[field] = t
	}
	return problems
}

type listDeadInput struct {
	DeadQuery
	Limit  int    `query:"limit" minimum:"1" maximum:"500" default:"50"`
	Cursor string `query:"cursor" doc:"next_cursor of the page before."`
}

type listDeadOutput struct {
	Body struct {
		Data       []DeadLetter `json:"data"`
		NextCursor string       `json:"next_cursor,omitempty" doc:"Where the next page begins."`
	}
}

func (s *Server) listDead(ctx context.Context, in *listDeadInput) (*listDeadOutput, error) {
	f, problems, err := in.filter(ctx)
	if err != nil {
		return nil, err
	}
	var before store.DeadCursor
	if in.Cursor != "" {
		if before, err = parseDeadCursor(in.Cursor); err != nil {
			problems = append(problems, admit.Problem{Field: "cursor", Code: admit.CodeInvalid, Message: "is no next_cursor of a page of this list"})
		}
	}
	if len(problems) > 0 {
		return nil, faulty(problems)
	}
	found, err := s.cfg.Store.DeadLetters(ctx, f, before, in.Limit+1)
	if err != nil {
		return nil, s.answer(ctx, err)
	}
	var out listDeadOutput
	out.Body.Data = []DeadLetter{}
	for i := range found {
		if i == in.Limit {
			last := &found[i-1]
			out.Body.NextCursor = fmt.Sprintf("%d-%d-%d", last.Died.UnixMilli(), last.MsgID, last.Channel)
			break
		}
		out.Body.Data = append(out.Body.Data, deadView(&found[i]))
	}
	return &out, nil
}

func parseDeadCursor(cursor string) (c store.DeadCursor, err error) {
	var ms int64
	if n, err := fmt.Sscanf(cursor, "%d-%d-%d", &ms, &c.MsgID, &c.Channel); err != nil || n != 3 || ms < 0 || ms > latestCursor || c.MsgID == 0 {
		return c, errors.New("no cursor")
	}
	c.Died = time.UnixMilli(ms).UTC()
	return c, nil
}

// DeadPath names a dead letter.
type DeadPath struct {
	MsgID   string `path:"msg_id" doc:"The message's id."`
	Channel string `path:"channel" enum:"email,sms,feishu,inbox,push,webhook,dingtalk,wecom,log"`
}

type deadOutput struct{ Body DeadLetter }

// ownDead finds a dead letter of the caller's; others' are not found.
func (s *Server) ownDead(ctx context.Context, in *DeadPath) (*store.DeadLetter, error) {
	msgID, err := strconv.ParseUint(in.MsgID, 10, 64)
	if err != nil {
		return nil, notFound.problem()
	}
	channel, err := msg.ParseChannel(in.Channel)
	if err != nil {
		return nil, notFound.problem()
	}
	d, err := s.cfg.Store.Dead(ctx, msgID, channel)
	if err != nil {
		return nil, s.answer(ctx, err)
	}
	if _, err := sourceFor(ctx, d.SourceID); err != nil {
		return nil, err
	}
	return d, nil
}

func (s *Server) getDead(ctx context.Context, in *DeadPath) (*deadOutput, error) {
	d, err := s.ownDead(ctx, in)
	if err != nil {
		return nil, err
	}
	return &deadOutput{deadView(d)}, nil
}

type requeueOneInput struct {
	DeadPath
	Body *struct {
		Force bool `json:"force,omitempty" doc:"Requeue even if no provider of the channel may be asked now."`
	} `required:"false"`
}

func (s *Server) requeueOne(ctx context.Context, in *requeueOneInput) (*messageOutput, error) {
	d, err := s.ownDead(ctx, &in.DeadPath)
	if err != nil {
		return nil, err
	}
	h := store.Handling{By: caller(ctx).ID, Policy: s.cfg.Explain.Again}
	if in.Body == nil || !in.Body.Force {
		h.Ready = s.inOrder
	}
	return s.handleOne(ctx, d, h)
}

type discardOneInput struct {
	DeadPath
	Body *struct {
		Reason string `json:"reason,omitempty" maxLength:"255" doc:"Why, for others to read."`
	} `required:"false"`
}

func (s *Server) discardOne(ctx context.Context, in *discardOneInput) (*messageOutput, error) {
	d, err := s.ownDead(ctx, &in.DeadPath)
	if err != nil {
		return nil, err
	}
	h := store.Handling{By: caller(ctx).ID, Discard: true}
	if in.Body != nil {
		h.Reason = in.Body.Reason
	}
	return s.handleOne(ctx, d, h)
}

// handleOne answers with the message as it stands then.
func (s *Server) handleOne(ctx context.Context, d *store.DeadLetter, h store.Handling) (*messageOutput, error) {
	if err := s.cfg.Store.HandleDead(ctx, d.MsgID, d.Channel, h); err != nil {
		return nil, s.answer(ctx, err)
	}
	m, err := s.cfg.Store.Message(ctx, d.MsgID)
	if err != nil {
		return nil, s.answer(ctx, err)
	}
	return &messageOutput{Body: view(m)}, nil
}

// inOrder tells whether what goes this way can be sent now.
func (s *Server) inOrder(ctx context.Context, r store.Route) error {
	why, err := s.cfg.Explain.OutOfOrder(ctx, r, caller(ctx).Admin())
	if err != nil || why == "" {
		return err
	}
	p := channelDown.problem()
	p.Detail = fmt.Sprintf("%s: %s.", r.Channel, why)
	return p
}

// HandleDead says which dead letters are to be handled.
type HandleDead struct {
	Channel    string `json:"channel,omitempty" enum:"email,sms,feishu,inbox,push,webhook,dingtalk,wecom,log"`
	Category   string `json:"category,omitempty" enum:"verification,notification,marketing"`
	Source     string `json:"source,omitempty" doc:"The caller that sent the messages in. Default: yourself; for an admin, all."`
	TemplateID string `json:"template_id,omitempty"`
	Reason     string `json:"reason,omitempty" doc:"A part of the reason, in any case."`
	Since      string `json:"since,omitempty" doc:"Died at or after: RFC 3339."`
	Until      string `json:"until,omitempty" doc:"Died before: RFC 3339. Default: now."`
	All        bool   `json:"all,omitempty" doc:"Needed where nothing else says which."`
	Rate       int    `json:"rate,omitempty" minimum:"1" maximum:"10000" doc:"How many a second. Default: 100."`
	DryRun     bool   `json:"dry_run,omitempty" doc:"Only count them."`
}

// RequeueDead says which dead letters are to be sent again.
type RequeueDead struct {
	HandleDead
	Force bool `json:"force,omitempty" doc:"Requeue even while no provider of a channel may be asked."`
}

// DiscardDead says which dead letters are to be given up.
type DiscardDead struct {
	HandleDead
	Because string `json:"because,omitempty" maxLength:"255" doc:"Why, for others to read."`
}

// HandledDead answers what became of dead letters.
type HandledDead struct {
	DryRun bool           `json:"dry_run,omitempty"`
	Counts map[string]int `json:"counts" doc:"By channel: how many the filter meant before the call."`
	Tasks  int            `json:"tasks" doc:"How many this call handled."`
	Left   int            `json:"left,omitempty" doc:"How many were left alone, for their tasks stand in their queue tables as well: somebody has copied them."`
	Done   bool           `json:"done" doc:"Whether none is left that the filter means."`
	Until  time.Time      `json:"until" doc:"Give it to the next call of the same work."`
}

type handledOutput struct{ Body HandledDead }

type requeueInput struct{ Body RequeueDead }

func (s *Server) requeueDead(ctx context.Context, in *requeueInput) (*handledOutput, error) {
	h := store.Handling{By: caller(ctx).ID, Policy: s.cfg.Explain.Again, Rate: in.Body.Rate}
	if !in.Body.Force {
		h.Ready = s.inOrder
	}
	return s.handleAll(ctx, &in.Body.HandleDead, h)
}

type discardInput struct{ Body DiscardDead }

func (s *Server) discardDead(ctx context.Context, in *discardInput) (*handledOutput, error) {
	return s.handleAll(ctx, &in.Body.HandleDead, store.Handling{
		By: caller(ctx).ID, Discard: true, Reason: in.Body.Because, Rate: cmp.Or(in.Body.Rate, store.MostRequeueRate),
	})
}

func (s *Server) handleAll(ctx context.Context, in *HandleDead, h store.Handling) (*handledOutput, error) {
	query := DeadQuery{Channel: in.Channel, Category: in.Category, Source: in.Source, TemplateID: in.TemplateID, Reason: in.Reason, Since: in.Since, Until: in.Until}
	f, problems, err := query.filter(ctx)
	if err != nil {
		return nil, err
	}
	if query == (DeadQuery{Until: in.Until}) && !in.All {
		problems = append(problems, admit.Problem{Field: "all", Code: admit.CodeRequired, Message: "must be true where no filter says which dead letters are meant"})
	}
	if len(problems) > 0 {
		return nil, faulty(problems)
	}
	if f.Until.IsZero() {
		f.Until = s.cfg.Store.Now().Truncate(time.Millisecond)
	}
	counts, err := s.cfg.Store.CountDead(ctx, f)
	if err != nil {
		return nil, s.answer(ctx, err)
	}
	out := HandledDead{DryRun: in.DryRun, Counts: map[string]int{}, Until: f.Until}
	for channel, n := range counts {
		out.Counts[channel.String()] = n
	}
	if in.DryRun {
		return &handledOutput{out}, nil
	}
	limited, cancel := context.WithTimeout(ctx, maxWait)
	defer cancel()
	all, err := s.cfg.Store.HandleAllDead(limited, f, h)
	if all.Tasks > 0 {
		s.cfg.Log.Info("handled dead letters", "request_id", requestID(ctx), "by", h.By, "tasks", all.Tasks, "discarded", h.Discard, "done", all.Done)
	}
	var problem *APIError
	if errors.As(err, &problem) { // what was done is done
		stopped := *problem
		stopped.Detail = strings.TrimSuffix(problem.Detail, ".") + fmt.Sprintf("; %d were handled before. Go on with until %s.", all.Tasks, f.Until.Format(time.RFC3339Nano))
		return nil, &stopped
	}
	if err != nil {
		return nil, s.answer(ctx, err)
	}
	out.Tasks, out.Left, out.Done = all.Tasks, all.Left, all.Done
	return &handledOutput{out}, nil
}
