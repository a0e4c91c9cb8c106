package server

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"runtime/debug"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"tidings/internal/admit"
)

const (
	maxLine       = 1 << 20
	bulkReadTime  = 30 * time.Second // for one read, not for the whole
	bulkWriteTime = 30 * time.Second
	bulkParallel  = 2  // chunks that are committed at the same time
	bulkAhead     = 2  // chunks that are read and checked meanwhile
	mostBulkFault = 20 // faulty lines that a progress line names
)

// BulkProgress is a line of the answer to a bulk request: one for each chunk, and a last one with Done.
type BulkProgress struct {
	Done       bool         `json:"done,omitempty" doc:"The last line: the sums."`
	BatchID    string       `json:"batch_id,omitempty"`
	Lines      int          `json:"lines" doc:"Read so far; empty ones do not count."`
	Accepted   int          `json:"accepted" doc:"So far."`
	Duplicates int          `json:"duplicates" doc:"So far: known by their request_id, with the same body."`
	Rejected   int          `json:"rejected" doc:"So far."`
	Errors     []ItemResult `json:"errors,omitempty" doc:"The first faulty lines of the chunk."`
	Error      *APIError    `json:"error,omitempty" doc:"Why the request ended before its body did. Send it again: what has a request_id is accepted once."`
}

func (s *Server) bulkRoute(api huma.API) {
	op := &huma.Operation{
		OperationID: "send-bulk", Method: http.MethodPost, Path: "/api/messages/bulk", Summary: "Send any number of messages, one a line",
		Description: "Takes lines of JSON (NDJSON), each a message of up to 1 MiB, and commits them in chunks. The answer has a line for each " +
			"chunk and a last one with the sums. With a request_id in each line, a request that was cut off can be sent again as a whole.",
		Tags:        []string{"messages"},
		Parameters:  []*huma.Param{{Name: "batch_id", In: "query", Description: "The campaign of the messages that name none. Default: a random one.", Schema: &huma.Schema{Type: huma.TypeString}}},
		RequestBody: &huma.RequestBody{Required: true, Content: map[string]*huma.MediaType{"application/x-ndjson": {Schema: s.decoder.schema}}},
		Responses:   map[string]*huma.Response{"200": {Description: "Lines of progress", Content: map[string]*huma.MediaType{"application/x-ndjson": {Schema: contentOf[BulkProgress](api)["application/json"].Schema}}}},
	}
	api.OpenAPI().AddOperation(op)
}

// bulk is a request of lines. Memory does not grow with it: a few chunks are under way at a time.
func (s *Server) bulk(w http.ResponseWriter, r *http.Request) {
	kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil || (kind != "application/x-ndjson" && kind != "application/ndjson" && kind != "application/jsonl" && kind != "application/json") {
		failure := wrongType
		failure.detail = "Send lines of JSON with the header Content-Type: application/x-ndjson, not compressed."
		writeProblem(w, failure)
		return
	}
	for name := range r.URL.Query() {
		if name != "batch_id" { // such as dry_run: ignored, it would send
			writeAPIError(w, faulty([]admit.Problem{{Field: clip(name), Code: admit.CodeUnknown, Message: "there is no such parameter here"}}))
			return
		}
	}
	if r.Header.Get("Idempotency-Key") != "" {
		writeAPIError(w, keyForMany())
		return
	}
	batchID := r.URL.Query().Get("batch_id")
	if problem := checkBatchID(batchID); problem != nil {
		writeAPIError(w, problem)
		return
	}
	if batchID == "" {
		batchID = newID()
	}
	control := http.NewResponseController(w)
	if err := control.EnableFullDuplex(); err != nil {
		s.cfg.Log.Warn("answers to bulk requests come after their body", "err", err)
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	ctx, stop := context.WithCancel(r.Context())
	chunks := make(chan *bulkChunk, bulkAhead)
	go s.readBulk(ctx, control, r.Body, batchID, chunks)
	ended := false // the body has been read to its end
	defer func() { // nothing may read the body, or write to the store, when this has returned
		stop()
		if !ended {
			control.SetReadDeadline(time.Now())
		}
		for c := range chunks {
			<-c.committed
		}
	}()
	sum := BulkProgress{BatchID: batchID}
	for c := range chunks {
		ended = c.last
		<-c.committed
		c.addTo(&sum)
		if c.err != nil {
			sum.Done, sum.Error = true, c.err
		}
		control.SetWriteDeadline(time.Now().Add(bulkWriteTime))
		if err := jsonFormat.Marshal(w, &sum); err != nil {
			return // the caller has gone; what was answered, and perhaps a chunk more, is accepted
		}
		control.Flush()
		if sum.Done {
			return
		}
		sum.Errors = nil
	}
}

// bulkChunk is a number of lines that were read and checked.
type bulkChunk struct {
	chunk
	lines     int
	results   []*ItemResult
	last      bool
	err       *APIError // why there are no more
	counts    BatchAnswer
	committed chan struct{} // closed when counts is there
}

// readBulk reads and checks lines until the body ends, while earlier chunks are committed.
func (s *Server) readBulk(ctx context.Context, control *http.ResponseController, body io.Reader, batchID string, chunks chan<- *bulkChunk) {
	defer close(chunks)
	places := make(chan struct{}, bulkParallel)
	pass := func(c *bulkChunk) bool {
		c.committed = make(chan struct{})
		select {
		case places <- struct{}{}:
		case <-ctx.Done():
			return false
		}
		go func() {
			defer close(c.committed)
			s.accept(ctx, &c.chunk, &c.counts)
			<-places
		}()
		select {
		case chunks <- c:
			return true
		case <-ctx.Done():
			<-c.committed
			return false
		}
	}
	defer func() { // out here no middleware would catch it
		if failure := recover(); failure != nil {
			s.cfg.Log.Error("a line's check panicked", "request_id", requestID(ctx), "err", fmt.Sprint(failure), "stack", string(debug.Stack()))
			pass(&bulkChunk{err: internalFailure.problem()})
		}
	}()
	in := bufio.NewReaderSize(deadlineReader{ctx, control, body}, 64<<10)
	c := &bulkChunk{}
	for number := 1; ; number++ {
		text, err := readLine(in)
		if text = bytes.TrimSpace(text); len(text) > 0 && !errors.Is(err, errLongLine) {
			if c.full(len(text)) || c.lines >= chunkItems {
				if !pass(c) {
					return
				}
				c = &bulkChunk{}
			}
			c.lines++
			result := &ItemResult{Line: number}
			s.check(ctx, &c.chunk, text, batchID, result)
			c.results = append(c.results, result)
		}
		switch {
		case err == nil:
			continue
		case errors.Is(err, errLongLine):
			c.lines++
			result := &ItemResult{Line: number}
			s.refuse(result, bodyTooLarge.problem())
			c.results = append(c.results, result)
			continue
		case errors.Is(err, io.EOF):
			c.last = true
		default: // the caller has gone, or is too slow
			c.err = bodyTimeout.problem()
		}
		pass(c)
		return
	}
}

// addTo adds to the sums. When the database is what refuses, the rest is not tried.
func (c *bulkChunk) addTo(sum *BulkProgress) {
	sum.Lines += c.lines
	sum.Accepted += c.counts.Accepted
	sum.Duplicates += c.counts.Duplicates
	for _, r := range c.results {
		if r.Error == nil {
			continue
		}
		sum.Rejected++
		if len(sum.Errors) < mostBulkFault {
			sum.Errors = append(sum.Errors, *r)
		}
		if r.Error.Status == http.StatusServiceUnavailable {
			c.err = r.Error
		}
	}
	sum.Done = c.last
}

// deadlineReader gives every read its own time.
type deadlineReader struct {
	ctx     context.Context
	control *http.ResponseController
	r       io.Reader
}

func (d deadlineReader) Read(p []byte) (int, error) {
	if d.ctx.Err() != nil {
		return 0, d.ctx.Err()
	}
	if err := d.control.SetReadDeadline(time.Now().Add(bulkReadTime)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return 0, err
	}
	if d.ctx.Err() != nil { // the deadline that ends this read may just have been set, and overwritten
		return 0, d.ctx.Err()
	}
	return d.r.Read(p)
}

var errLongLine = errors.New("the line is too long")

// readLine reads a line. One that is too long is read to its end and not kept.
func readLine(in *bufio.Reader) (text []byte, err error) {
	long := false
	for {
		part, err := in.ReadSlice('\n')
		if long = long || len(text)+len(part) > maxLine; !long {
			text = append(text, part...)
		}
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
		case long && (err == nil || errors.Is(err, io.EOF)):
			return nil, errLongLine
		default:
			return text, err
		}
	}
}
