package server

import (
	"cmp"
	"context"
	"mime"
	"net/http"
	"strconv"
	"time"

	"github.com/danielgtaylor/huma/v2"
	strict "github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"tidings/internal/admit"
	"tidings/store"
)

// Limits of a batch, and of what one transaction of it takes.
const (
	maxBatchItems = 1000
	maxBatchBody  = 8 << 20
	chunkItems    = 500
	chunkBytes    = 1 << 20
)

func (s *Server) batchRoutes(api huma.API) {
	huma.Register(api, huma.Operation{
		OperationID: "send-batch", Method: http.MethodPost, Path: "/api/messages/batch", Summary: "Send up to 1,000 messages",
		Description: "Takes an array of messages and answers for each: a bad one spoils no other.",
		Tags:        []string{"messages"}, MaxBodyBytes: maxBatchBody + 1, BodyReadTimeout: bodyTimeLimit, SkipValidateBody: true,
		RequestBody: &huma.RequestBody{Required: true, Content: map[string]*huma.MediaType{"application/json": {Schema: &huma.Schema{Type: huma.TypeArray, Items: s.decoder.schema}}}},
	}, s.sendBatch)
	huma.Register(api, huma.Operation{
		OperationID: "get-batch", Method: http.MethodGet, Path: "/api/batches/{id}", Summary: "Ask for a batch: how many tasks are in which state", Tags: []string{"batches"},
	}, s.getBatch)
	huma.Register(api, huma.Operation{
		OperationID: "list-batches", Method: http.MethodGet, Path: "/api/batches", Summary: "List batches, the latest first", Tags: []string{"batches"},
	}, s.listBatches)
}

type batchInput struct {
	ContentType string `header:"Content-Type" hidden:"true"`
	Key         string `header:"Idempotency-Key" hidden:"true"`
	BatchID     string `query:"batch_id" doc:"The campaign of the messages that name none."`
	RawBody     []byte
}

// BatchAnswer answers a batch of messages.
type BatchAnswer struct {
	Accepted   int          `json:"accepted"`
	Duplicates int          `json:"duplicates" doc:"Known by their request_id, with the same body."`
	Rejected   int          `json:"rejected"`
	BatchID    string       `json:"batch_id,omitempty"`
	Results    []ItemResult `json:"results" doc:"In the order of the request."`
}

// ItemResult answers one message of many.
type ItemResult struct {
	Index     *int      `json:"index,omitempty" doc:"Its place in the request, from 0."`
	Line      int       `json:"line,omitempty" doc:"Its line in the request, from 1."`
	MsgID     string    `json:"msg_id,omitempty"`
	Duplicate bool      `json:"duplicate,omitempty"`
	Error     *APIError `json:"error,omitempty"`
}

type batchOutput struct{ Body BatchAnswer }

func (s *Server) sendBatch(ctx context.Context, in *batchInput) (*batchOutput, error) {
	if kind, _, err := mime.ParseMediaType(in.ContentType); err != nil || kind != "application/json" {
		return nil, wrongType.problem()
	}
	if in.Key != "" {
		return nil, keyForMany()
	}
	if problem := checkBatchID(in.BatchID); problem != nil {
		return nil, problem
	}
	var items []jsontext.Value
	if err := strict.Unmarshal(in.RawBody, &items); err != nil {
		if err := strict.Unmarshal(in.RawBody, new(any)); err != nil {
			return nil, badJSON(err)
		}
		return nil, faulty([]admit.Problem{{Field: "body", Code: admit.CodeInvalid, Message: "must be an array of messages"}})
	}
	if len(items) == 0 || len(items) > maxBatchItems {
		return nil, faulty([]admit.Problem{{Field: "body", Code: admit.CodeInvalid, Message: "must have 1 to " + strconv.Itoa(maxBatchItems) + " messages; POST /api/messages/bulk takes any number"}})
	}
	out := BatchAnswer{BatchID: in.BatchID, Results: make([]ItemResult, len(items))}
	var c chunk
	for i, item := range items {
		out.Results[i].Index = &i
		if c.full(len(item)) {
			s.accept(ctx, &c, &out)
		}
		s.check(ctx, &c, item, in.BatchID, &out.Results[i])
	}
	s.accept(ctx, &c, &out)
	for _, r := range out.Results {
		if r.Error != nil {
			out.Rejected++
		}
	}
	return &batchOutput{out}, nil
}

// keyForMany refuses a key that cannot stand for many messages: ignored, it would promise what it does not keep.
func keyForMany() *APIError {
	return faulty([]admit.Problem{{Field: "Idempotency-Key", Code: admit.CodeInvalid, Message: "is for single messages: give each of many a request_id"}})
}

func checkBatchID(id string) *APIError {
	if id != "" && !admit.ValidName(id) {
		return faulty([]admit.Problem{{Field: "batch_id", Code: admit.CodeInvalid, Message: admit.NameRule}})
	}
	return nil
}

// chunk is what one transaction is to take.
type chunk struct {
	messages []store.Message
	results  []*ItemResult
	bytes    int
}

func (c *chunk) full(next int) bool {
	return len(c.messages) == chunkItems || (c.bytes > 0 && c.bytes+next > chunkBytes)
}

// check decodes and checks one message of many, as single ones are, and puts it into the chunk, or its faults into the result.
func (s *Server) check(ctx context.Context, c *chunk, body []byte, batchID string, result *ItemResult) {
	c.bytes += len(body) // faulty ones, too: what is wrong with them takes room
	r, problems, err := s.decoder.decode(body)
	if err == nil {
		r.BatchID = cmp.Or(r.BatchID, batchID)
		var checked *admit.Checked
		if checked, err = s.cfg.Admit.Check(ctx, caller(ctx).ID, r); err == nil {
			if all := merge(problems, checked.Problems); len(all) > 0 {
				err = faulty(all)
			} else {
				c.messages = append(c.messages, *checked.Message)
				c.results = append(c.results, result)
			}
		}
	}
	s.refuse(result, s.answer(ctx, err))
}

// refuse notes why one message of many is refused, if it is.
func (s *Server) refuse(r *ItemResult, err error) {
	if p, ok := err.(*APIError); ok && p != nil {
		r.Error = p
		s.cfg.Metrics.Rejected(p.Code)
	}
}

// accept stores a chunk, answers its messages, and empties it.
func (s *Server) accept(ctx context.Context, c *chunk, out *BatchAnswer) {
	if len(c.messages) == 0 {
		*c = chunk{}
		return
	}
	accepted, errs := s.cfg.Store.EnqueueBatch(ctx, c.messages)
	for i, result := range c.results {
		switch {
		case errs[i] != nil:
			s.refuse(result, s.answer(ctx, errs[i]))
		case accepted[i].Duplicate:
			out.Duplicates++
			result.MsgID, result.Duplicate = formatID(accepted[i].MsgID), true
		default:
			out.Accepted++
			result.MsgID = formatID(accepted[i].MsgID)
		}
		s.logAccepted(ctx, result.MsgID, result.Duplicate)
	}
	*c = chunk{}
}

// Batch is a campaign and how far it is.
type Batch struct {
	BatchID    string                      `json:"batch_id"`
	SourceID   string                      `json:"source_id"`
	CreateTime time.Time                   `json:"create_time" doc:"When its first message was accepted."`
	Tasks      int64                       `json:"tasks,omitempty"`
	Counts     map[string]int64            `json:"counts,omitempty" doc:"Tasks by state."`
	Channels   map[string]map[string]int64 `json:"channels,omitempty" doc:"Tasks by channel and state."`
}

type getBatchInput struct {
	ID     string `path:"id"`
	Source string `query:"source" doc:"Whose it is. Default: yours."`
}

type getBatchOutput struct{ Body Batch }

func (s *Server) getBatch(ctx context.Context, in *getBatchInput) (*getBatchOutput, error) {
	source, err := sourceFor(ctx, in.Source)
	if err != nil {
		return nil, err
	}
	c, counts, err := s.cfg.Store.Campaign(ctx, source, in.ID)
	if err != nil {
		return nil, s.answer(ctx, err)
	}
	out := Batch{BatchID: c.BatchID, SourceID: c.SourceID, CreateTime: c.Created, Counts: map[string]int64{}, Channels: map[string]map[string]int64{}}
	for _, n := range counts {
		channel, state := n.Channel.String(), n.Status.String()
		if out.Channels[channel] == nil {
			out.Channels[channel] = map[string]int64{}
		}
		out.Channels[channel][state] += n.Tasks
		out.Counts[state] += n.Tasks
		out.Tasks += n.Tasks
	}
	return &getBatchOutput{out}, nil
}

type listBatchesInput struct {
	Source string `query:"source" doc:"Whose they are. Default: yours; for an admin, all."`
	Limit  int    `query:"limit" minimum:"1" maximum:"500" default:"50"`
	Cursor string `query:"cursor" doc:"next_cursor of the page before."`
}

type listBatchesOutput struct {
	Body struct {
		Data       []Batch `json:"data"`
		NextCursor string  `json:"next_cursor,omitempty"`
	}
}

func (s *Server) listBatches(ctx context.Context, in *listBatchesInput) (*listBatchesOutput, error) {
	source, err := sourceFor(ctx, in.Source)
	if err != nil {
		return nil, err
	}
	if caller(ctx).Admin() {
		source = in.Source // none: all
	}
	before, err := pageBefore(in.Cursor)
	if err != nil {
		return nil, err
	}
	list, err := s.cfg.Store.Campaigns(ctx, source, before, in.Limit)
	if err != nil {
		return nil, s.answer(ctx, err)
	}
	var out listBatchesOutput
	out.Body.Data = []Batch{}
	for _, c := range list {
		out.Body.Data = append(out.Body.Data, Batch{BatchID: c.BatchID, SourceID: c.SourceID, CreateTime: c.Created})
	}
	if len(list) == in.Limit {
		out.Body.NextCursor = formatID(list[len(list)-1].First)
	}
	return &out, nil
}
