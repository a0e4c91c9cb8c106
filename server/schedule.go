package server

import (
	"context"
	"encoding/json"
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

func (s *Server) scheduleRoutes(api huma.API) {
	op := operation("messages", "cancel-message", http.MethodPost, "/api/messages/{id}/cancel", "Cancel a message that has not been sent")
	op.Description = "Ends the tasks that wait: scheduled, ready, or waiting to be tried again. 200 says that some were ended, now or before; tasks " +
		"shows how each stands. 409 says that none was: being_sent while an attempt is under way, already_ended when it has been sent."
	huma.Register(api, op, s.cancel)
	op = operation("messages", "cancel-request", http.MethodPost, "/api/messages/cancel", "Cancel the message of a request_id")
	op.Description = "As cancel-message does. Afterwards the same request_id answers with the cancelled message; a new one is a new message."
	huma.Register(api, op, s.cancelRequest)
	op = operation("messages", "reschedule-message", http.MethodPost, "/api/messages/{id}/reschedule", "Send a message at another time")
	op.Description = "Takes send_at or delay as for a new message. Only a message that has not been tried can be rescheduled; 409 says why not."
	huma.Register(api, op, s.reschedule)
	op = operation("batches", "cancel-batch", http.MethodPost, "/api/batches/{id}/cancel", "Cancel the messages of a batch that have not been sent")
	op.Description = "Takes up to a minute; with done false there are more, so ask again. Messages that are accepted for the batch later are sent."
	huma.Register(api, op, s.cancelBatch)
}

// Cancelled answers a cancellation.
type Cancelled struct {
	MsgID     string     `json:"msg_id"`
	Status    string     `json:"status" doc:"The message's status now: cancelled, unless other tasks have been sent, or are being."`
	Cancelled int        `json:"cancelled" doc:"How many tasks this call ended; 0: they had been cancelled before."`
	Tasks     []SentTask `json:"tasks" doc:"How each task stands now."`
}

type cancelInput struct {
	ID string `path:"id" doc:"The message's id."`
}

type cancelOutput struct{ Body Cancelled }

func (s *Server) cancel(ctx context.Context, in *cancelInput) (*cancelOutput, error) {
	msgID, err := strconv.ParseUint(in.ID, 10, 64)
	if err != nil {
		return nil, notFound.problem()
	}
	if _, err := s.own(ctx, msgID); err != nil {
		return nil, s.answer(ctx, err)
	}
	return s.cancelOne(ctx, msgID)
}

type cancelRequestInput struct {
	RequestID string `query:"request_id" required:"true" doc:"The caller's key of the message."`
	Source    string `query:"source" doc:"Whose it is. Default: yours."`
}

func (s *Server) cancelRequest(ctx context.Context, in *cancelRequestInput) (*cancelOutput, error) {
	source, err := sourceFor(ctx, in.Source)
	if err != nil {
		return nil, err
	}
	msgID, err := s.cfg.Store.MessageByRequest(ctx, source, in.RequestID)
	if err != nil {
		return nil, s.answer(ctx, err)
	}
	return s.cancelOne(ctx, msgID)
}

func (s *Server) cancelOne(ctx context.Context, msgID uint64) (*cancelOutput, error) {
	n, m, err := s.cfg.Store.Cancel(ctx, msgID, caller(ctx).ID)
	if err != nil {
		return nil, s.answer(ctx, notChanged(err, m))
	}
	s.cfg.Log.Debug("cancelled", "request_id", requestID(ctx), "msg_id", msgID, "tasks", n)
	return &cancelOutput{Cancelled{MsgID: formatID(msgID), Status: m.Status, Cancelled: n, Tasks: tasksNow(m)}}, nil
}

func tasksNow(m *store.MessageView) (tasks []SentTask) {
	for _, t := range m.Tasks {
		tasks = append(tasks, SentTask{Channel: t.Channel.String(), Status: t.Status.String()})
	}
	return tasks
}

// notChanged says in words how a message stands that could not be changed.
func notChanged(err error, m *store.MessageView) error {
	var failure failure
	switch {
	case errors.Is(err, store.ErrSending):
		failure = beingSent
	case errors.Is(err, store.ErrEnded):
		failure = alreadyEnded
	default:
		return err
	}
	p := failure.problem()
	if m != nil {
		var states []string
		for _, t := range m.Tasks {
			states = append(states, t.Channel.String()+" "+t.Status.String())
		}
		p.Detail = fmt.Sprintf("%s It stands at: %s.", failure.detail, strings.Join(states, ", "))
	}
	return p
}

type rescheduleInput struct {
	ID   string `path:"id" doc:"The message's id."`
	Body struct {
		SendAt     json.RawMessage `json:"send_at,omitempty" doc:"The new due time: RFC 3339 with an offset, or Unix milliseconds."`
		Delay      string          `json:"delay,omitempty" doc:"The same as a time from now." example:"10m"`
		ExpireTime json.RawMessage `json:"expire_time,omitempty" doc:"Do not send after this instant. Default: as long after the new due time as it was after the old one."`
		TTL        string          `json:"ttl,omitempty" doc:"Do not send when this long has passed since the new due time." example:"24h"`
	}
}

func (s *Server) reschedule(ctx context.Context, in *rescheduleInput) (*messageOutput, error) {
	msgID, err := strconv.ParseUint(in.ID, 10, 64)
	if err != nil {
		return nil, notFound.problem()
	}
	now := s.cfg.Store.Now()
	due, problem := admit.Due(instant(in.Body.SendAt), in.Body.Delay, now)
	if problem == nil && due.IsZero() {
		problem = &admit.Problem{Field: "send_at", Code: admit.CodeRequired, Message: "or delay must say when"}
	}
	var expire time.Time
	if problem == nil {
		expire, problem = admit.Expiry(instant(in.Body.ExpireTime), in.Body.TTL, due, now)
	}
	if problem != nil {
		return nil, faulty([]admit.Problem{*problem})
	}
	m, err := s.own(ctx, msgID)
	if err != nil {
		return nil, s.answer(ctx, err)
	}
	if first := m.Tasks[0]; expire.IsZero() && !due.Add(first.Expire.Sub(first.Due)).After(now) {
		return nil, faulty([]admit.Problem{{Field: "send_at", Code: admit.CodeInvalid, Message: "lies so far back that the message would have expired"}})
	}
	changed, err := s.cfg.Store.Reschedule(ctx, msgID, due, expire)
	if err != nil {
		return nil, s.answer(ctx, notChanged(err, changed))
	}
	return &messageOutput{Body: view(changed)}, nil
}

// instant gives a JSON value the type that admission reads instants from; nil: there is none.
func instant(raw json.RawMessage) any {
	var v any
	if len(raw) == 0 || json.Unmarshal(raw, &v) != nil {
		return nil
	}
	return v
}

// BatchCancelled answers the cancellation of a batch.
type BatchCancelled struct {
	BatchID   string           `json:"batch_id"`
	Cancelled int              `json:"cancelled" doc:"How many tasks this call ended."`
	Done      bool             `json:"done" doc:"Whether none waits any more."`
	Counts    map[string]int64 `json:"counts" doc:"The batch's tasks by state, now."`
}

type batchCancelOutput struct{ Body BatchCancelled }

func (s *Server) cancelBatch(ctx context.Context, in *getBatchInput) (*batchCancelOutput, error) {
	source, err := sourceFor(ctx, in.Source)
	if err != nil {
		return nil, err
	}
	limited, cancel := context.WithTimeout(ctx, maxWait)
	defer cancel()
	n, err := s.cfg.Store.CancelBatch(limited, source, in.ID, caller(ctx).ID)
	done := err == nil
	if err != nil && limited.Err() == nil {
		return nil, s.answer(ctx, err)
	}
	s.cfg.Log.Info("cancelled a batch", "request_id", requestID(ctx), "batch_id", in.ID, "tasks", n, "done", done)
	_, counts, err := s.cfg.Store.Campaign(ctx, source, in.ID)
	if err != nil {
		return nil, s.answer(ctx, err)
	}
	out := BatchCancelled{BatchID: in.ID, Cancelled: n, Done: done, Counts: map[string]int64{}}
	for _, c := range counts {
		out.Counts[c.Status.String()] += c.Tasks
	}
	return &batchCancelOutput{out}, nil
}

// scheduled lists what waits for its time, the soonest first.
func (s *Server) scheduled(ctx context.Context, filter store.Filter, cursor string) (*listOutput, error) {
	if cursor != "" {
		due, id, _ := strings.Cut(cursor, "-")
		ms, err := strconv.ParseUint(due, 10, 48)
		if filter.After.MsgID, _ = strconv.ParseUint(id, 10, 63); err != nil || filter.After.MsgID == 0 || ms > latestCursor {
			return nil, faulty([]admit.Problem{{Field: "cursor", Code: admit.CodeInvalid, Message: "is no next_cursor of a page of this list"}})
		}
		filter.After.Due = time.UnixMilli(int64(ms)).UTC()
	}
	page, err := s.cfg.Store.Scheduled(ctx, filter)
	if err != nil {
		return nil, s.answer(ctx, err)
	}
	out := listOutput{Body: MessageList{Data: []Message{}}}
	for i := range page.Messages {
		out.Body.Data = append(out.Body.Data, view(&page.Messages[i]))
	}
	if next := page.NextDue; next.MsgID != 0 {
		out.Body.NextCursor = fmt.Sprintf("%d-%d", next.Due.UnixMilli(), next.MsgID)
	}
	return &out, nil
}

// latestCursor is the end of the year 9998, in Unix milliseconds.
const latestCursor = 253_370_764_800_000

const statusScheduled = "scheduled"

// sentNow is how a message stands that was just accepted.
func sentNow(m *store.Message, now time.Time) (status string, due *time.Time) {
	switch {
	case len(m.Tasks) == 0:
		return msg.Skipped.String(), nil
	case m.SendAt.After(now):
		return statusScheduled, &m.SendAt
	}
	return "dispatched", nil
}
