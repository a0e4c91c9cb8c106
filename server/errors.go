package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"tidings/internal/admit"
	"tidings/store"
)

// failure is a line of the API's table of errors: a stable code, its HTTP status, and what it means.
type failure struct {
	code   string
	status int
	detail string
}

var (
	invalidJSON     = failure{"invalid_json", http.StatusBadRequest, "The body is not one valid JSON value."}
	invalidRequest  = failure{"validation_failed", http.StatusUnprocessableEntity, "The request has faults; errors names each of them."}
	notConfigured   = failure{admit.CodeNotConfigured, http.StatusUnprocessableEntity, "The channel has no provider here."}
	missing         = failure{admit.CodeMissing, http.StatusUnprocessableEntity, "The template needs variables that params does not have; errors names each of them."}
	notReviewed     = failure{admit.CodeNotReviewed, http.StatusUnprocessableEntity, "No version of the template has passed the review."}
	unauthorized    = failure{"unauthorized", http.StatusUnauthorized, "Name a valid key of a source that is enabled: Authorization: Bearer tidings_…"}
	forbidden       = failure{"forbidden", http.StatusForbidden, "Only a source with the role admin may do this."}
	overQuota       = failure{"quota_exceeded", http.StatusTooManyRequests, "A quota is used up; limit says which, Retry-After until when. Nothing was charged."}
	overFrequency   = failure{"frequency_exceeded", http.StatusTooManyRequests, "The receiver has heard enough of this category for now; limit says how much that is, Retry-After until when. Nothing was charged."}
	keyConflict     = failure{"idempotency_conflict", http.StatusConflict, "The request_id was used for another message."}
	exists          = failure{"already_exists", http.StatusConflict, "There is one of that name already."}
	keysFull        = failure{"too_many_keys", http.StatusConflict, "The source has two valid keys; revoke one first."}
	notWaiting      = failure{"not_waiting", http.StatusConflict, "The version does not wait for review."}
	beingSent       = failure{"being_sent", http.StatusConflict, "The message is being sent now: how it ends is not known yet."}
	alreadyEnded    = failure{"already_ended", http.StatusConflict, "The message has been sent already, or has ended otherwise."}
	queuedTwice     = failure{"already_queued", http.StatusConflict, "The task stands in its queue table as well: somebody has copied it there by hand. Delete one of the two rows."}
	channelDown     = failure{"channel_out_of_order", http.StatusConflict, "The lane is paused, or no provider of the channel may be asked now; with force it is done all the same."}
	notFound        = failure{"not_found", http.StatusNotFound, "There is no such thing, or it is not yours."}
	wrongMethod     = failure{"method_not_allowed", http.StatusMethodNotAllowed, "The path exists, but not for this method."}
	wrongType       = failure{"unsupported_media_type", http.StatusUnsupportedMediaType, "Send plain JSON with the header Content-Type: application/json (curl --json does), not compressed."}
	bodyTooLarge    = failure{"body_too_large", http.StatusRequestEntityTooLarge, "The body is larger than is taken."}
	bodyTimeout     = failure{"body_timeout", http.StatusRequestTimeout, "The body did not arrive in time."}
	crossOrigin     = failure{"cross_origin", http.StatusForbidden, "A web page of another origin may not do this."}
	foreignHost     = failure{"foreign_host", http.StatusForbidden, "Without keys, the Host header must name this machine: localhost or a loopback address."}
	unavailable     = failure{"database_unavailable", http.StatusServiceUnavailable, "The database does not answer; nothing is lost, try again. Use the same request_id: the message may have been accepted."}
	busy            = failure{"database_busy", http.StatusServiceUnavailable, "The database is held up by locks; try again with the same request_id."}
	overloaded      = failure{"overloaded", http.StatusServiceUnavailable, "The intake is behind, and less urgent messages are refused first; try again with the same request_id."}
	internalFailure = failure{"internal", http.StatusInternalServerError, "Something went wrong here; the log says what, under this answer's X-Request-Id."}
)

// failures is the table, for the documentation.
var failures = []failure{
	invalidJSON, unauthorized, forbidden, crossOrigin, foreignHost, notFound, wrongMethod, bodyTimeout, keyConflict, exists, keysFull, notWaiting, beingSent, alreadyEnded,
	queuedTwice, channelDown,
	bodyTooLarge, wrongType, invalidRequest, notConfigured, missing, notReviewed, overQuota, overFrequency, internalFailure, unavailable, busy, overloaded,
}

// fieldCodes are the codes of single fields, in an answer's errors.
var fieldCodes = []struct{ code, meaning string }{
	{admit.CodeRequired, "The field is missing or empty."},
	{admit.CodeInvalid, "The value is not what it must be; message says what that is."},
	{admit.CodeTooLong, "The value is longer than is kept."},
	{admit.CodeUnknown, "There is no such field, channel, template or name."},
	{admit.CodeNotConfigured, "The channel has no provider."},
	{admit.CodeMissing, "The template needs this variable."},
	{admit.CodeNotReviewed, "No version of the template has passed the review."},
}

// WriteErrorCodes writes the table of error codes as Markdown: docs/errors.md.
func WriteErrorCodes(w io.Writer) error {
	var b strings.Builder
	b.WriteString("# Error codes\n\nMade from the code's own table by `make docs`. An error is `application/problem+json` (RFC 9457) with a stable `code`; " +
		"faults of single\nfields stand in `errors`, each with `field`, `code` and `message`.\n\n| status | code | meaning |\n|---|---|---|\n")
	for _, f := range failures {
		fmt.Fprintf(&b, "| %d | `%s` | %s |\n", f.status, f.code, f.detail)
	}
	b.WriteString("\n503 comes with `Retry-After` where trying again soon makes sense.\n\n| code of a field | meaning |\n|---|---|\n")
	for _, f := range fieldCodes {
		fmt.Fprintf(&b, "| `%s` | %s |\n", f.code, f.meaning)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// APIError is an error answer (RFC 9457).
type APIError struct {
	Type   string          `json:"type" doc:"Always about:blank: code says what kind of problem it is."`
	Title  string          `json:"title" doc:"The HTTP status in words."`
	Status int             `json:"status" doc:"The HTTP status."`
	Code   string          `json:"code" doc:"A stable name for the problem."`
	Detail string          `json:"detail" doc:"What is wrong, in words."`
	Errors []admit.Problem `json:"errors,omitempty" doc:"Every faulty field."`
	Limit  *Limit          `json:"limit,omitempty" doc:"The limit that is used up."`
	retry  int             // seconds, for Retry-After; 0: no such header
}

// Limit is a limit that is used up.
type Limit struct {
	Kind         string `json:"kind" enum:"global,source,recipient" doc:"global: of all callers together; source: yours; recipient: what this receiver hears of you."`
	Channel      string `json:"channel"`
	Num          int    `json:"num" doc:"So many …"`
	Unit         int64  `json:"unit" doc:"… in any span of so many milliseconds."`
	RetryAfterMS int64  `json:"retry_after_ms" doc:"Until one more is allowed, unless others come first."`
}

func (p *APIError) Error() string { return p.Code + ": " + p.Detail }

// GetStatus is huma's question for the status.
func (p *APIError) GetStatus() int { return p.Status }

// ContentType is huma's question for the type of the body.
func (p *APIError) ContentType(string) string { return "application/problem+json" }

// GetHeaders is huma's question for headers of the answer.
func (p *APIError) GetHeaders() http.Header {
	switch {
	case p.Limit != nil:
		seconds := strconv.FormatInt((p.Limit.RetryAfterMS+999)/1000, 10)
		return http.Header{
			"Retry-After": {seconds}, "X-Ratelimit-Limit": {strconv.Itoa(p.Limit.Num)}, "X-Ratelimit-Remaining": {"0"}, "X-Ratelimit-Reset": {seconds},
		}
	case p.retry > 0:
		return http.Header{"Retry-After": {strconv.Itoa(p.retry)}}
	case p.Status == http.StatusUnauthorized:
		return http.Header{"Www-Authenticate": {"Bearer"}}
	}
	return nil
}

func (f failure) problem() *APIError {
	p := &APIError{Type: "about:blank", Title: http.StatusText(f.status), Status: f.status, Code: f.code, Detail: f.detail}
	if f.status == http.StatusServiceUnavailable {
		p.retry = 1
	}
	return p
}

// faulty answers a request with faulty fields. Faults that all have the same code of the table lend it to the answer.
func faulty(problems []admit.Problem) *APIError {
	p := invalidRequest.problem()
	for _, own := range []failure{notConfigured, missing, notReviewed} {
		if !slices.ContainsFunc(problems, func(p admit.Problem) bool { return p.Code != own.code }) {
			p = own.problem()
		}
	}
	p.Errors = problems
	return p
}

// answer turns any error into a problem. What it does not recognise is logged, and told as "internal".
func (s *Server) answer(ctx context.Context, err error) error {
	var p *APIError
	var limit *store.LimitError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &p):
		return p
	case errors.As(err, &limit):
		return limited(limit)
	case errors.Is(err, store.ErrConflict):
		return keyConflict.problem()
	case errors.Is(err, store.ErrNotFound):
		return notFound.problem()
	case errors.Is(err, store.ErrExists):
		return exists.problem()
	case errors.Is(err, store.ErrKeysFull):
		return keysFull.problem()
	case errors.Is(err, store.ErrQueued):
		return queuedTwice.problem()
	case errors.Is(err, store.ErrNotWaiting):
		return notWaiting.problem()
	case errors.Is(err, store.ErrTooLarge):
		return bodyTooLarge.problem()
	case errors.Is(err, store.ErrOverloaded):
		return overloaded.problem()
	case errors.Is(err, store.ErrBusy):
		return busy.problem()
	case errors.Is(err, store.ErrUnavailable):
		return unavailable.problem()
	case ctx.Err() != nil: // the caller has gone: nobody reads the answer
		return unavailable.problem()
	}
	s.cfg.Log.Error("request failed", "request_id", requestID(ctx), "err", err)
	return internalFailure.problem()
}

// limited answers a request that a limit refuses.
func limited(e *store.LimitError) *APIError {
	p := overQuota.problem()
	if e.Kind == store.KindRecipient {
		p = overFrequency.problem()
	}
	p.Limit = &Limit{
		Kind: e.Kind, Channel: e.Channel.String(), Num: e.Limit.Num, Unit: e.Limit.Unit.Milliseconds(),
		RetryAfterMS: max(1, (e.Wait + time.Millisecond - 1).Milliseconds()),
	}
	return p
}

// humaProblem gives the errors that huma finds in parameters and bodies our form. It never repeats a value.
func humaProblem(_ huma.Context, status int, _ string, errs ...error) huma.StatusError {
	var problems []admit.Problem
	for _, err := range errs {
		var d *huma.ErrorDetail
		if errors.As(err, &d) {
			problems = append(problems, admit.Problem{Field: fieldName(d.Location), Code: admit.CodeInvalid, Message: d.Message})
		}
	}
	if status == http.StatusBadRequest && !slices.ContainsFunc(problems, func(p admit.Problem) bool { return p.Field != "body" }) {
		return invalidJSON.problem()
	}
	switch status {
	case http.StatusUnsupportedMediaType:
		return wrongType.problem()
	case http.StatusRequestEntityTooLarge:
		return bodyTooLarge.problem()
	case http.StatusRequestTimeout:
		return bodyTimeout.problem()
	case http.StatusBadRequest, http.StatusUnprocessableEntity:
		return faulty(problems)
	}
	return internalFailure.problem()
}

// fieldName turns huma's location (body.to, query.wait, path.id) into the name that the caller knows.
func fieldName(location string) string {
	for _, part := range []string{"body.", "query.", "path.", "header."} {
		if name, ok := strings.CutPrefix(location, part); ok {
			return name
		}
	}
	return location
}

// The hooks are variables of huma's package: the only way to have parameter errors, and the errors in the API's description, in
// the same form as all others.
func init() {
	huma.ValidateStrictCasing = true // "To" is not "to": of two such names one would win unseen
	huma.NewErrorWithContext = humaProblem
	huma.NewError = func(status int, text string, errs ...error) huma.StatusError {
		return humaProblem(nil, status, text, errs...)
	}
}

// writeProblem answers outside huma's routes.
func writeProblem(w http.ResponseWriter, f failure) { writeAPIError(w, f.problem()) }

func writeAPIError(w http.ResponseWriter, p *APIError) {
	for name, values := range p.GetHeaders() {
		w.Header()[name] = values
	}
	w.Header().Set("Content-Type", p.ContentType(""))
	w.WriteHeader(p.Status)
	if err := jsonFormat.Marshal(w, p); err != nil { // the caller has gone
		return
	}
}
