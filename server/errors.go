package server

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"strings"

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
	keyConflict     = failure{"idempotency_conflict", http.StatusConflict, "The request_id was used for another message."}
	notFound        = failure{"not_found", http.StatusNotFound, "There is no such thing, or it is not yours."}
	wrongMethod     = failure{"method_not_allowed", http.StatusMethodNotAllowed, "The path exists, but not for this method."}
	wrongType       = failure{"unsupported_media_type", http.StatusUnsupportedMediaType, "Send JSON with the header Content-Type: application/json (curl --json does)."}
	bodyTooLarge    = failure{"body_too_large", http.StatusRequestEntityTooLarge, "The body is larger than is taken."}
	bodyTimeout     = failure{"body_timeout", http.StatusRequestTimeout, "The body did not arrive in time."}
	crossOrigin     = failure{"cross_origin", http.StatusForbidden, "A web page of another origin may not do this."}
	foreignHost     = failure{"foreign_host", http.StatusForbidden, "The Host header must name this machine: localhost or a loopback address."}
	unavailable     = failure{"database_unavailable", http.StatusServiceUnavailable, "The database does not answer; nothing is lost, try again. Use the same request_id: the message may have been accepted."}
	busy            = failure{"database_busy", http.StatusServiceUnavailable, "The database is held up by locks; try again with the same request_id."}
	internalFailure = failure{"internal", http.StatusInternalServerError, "Something went wrong here; the log says what, under this answer's X-Request-Id."}
)

// APIError is an error answer (RFC 9457).
type APIError struct {
	Type   string          `json:"type" doc:"Always about:blank: code says what kind of problem it is."`
	Title  string          `json:"title" doc:"The HTTP status in words."`
	Status int             `json:"status" doc:"The HTTP status."`
	Code   string          `json:"code" doc:"A stable name for the problem."`
	Detail string          `json:"detail" doc:"What is wrong, in words."`
	Errors []admit.Problem `json:"errors,omitempty" doc:"Every faulty field."`
	retry  int             // seconds, for Retry-After; 0: no such header
}

func (p *APIError) Error() string { return p.Code + ": " + p.Detail }

// GetStatus is huma's question for the status.
func (p *APIError) GetStatus() int { return p.Status }

// ContentType is huma's question for the type of the body.
func (p *APIError) ContentType(string) string { return "application/problem+json" }

// GetHeaders is huma's question for headers of the answer.
func (p *APIError) GetHeaders() http.Header {
	if p.retry == 0 {
		return nil
	}
	return http.Header{"Retry-After": {strconv.Itoa(p.retry)}}
}

func (f failure) problem() *APIError {
	p := &APIError{Type: "about:blank", Title: http.StatusText(f.status), Status: f.status, Code: f.code, Detail: f.detail}
	if f.status == http.StatusServiceUnavailable {
		p.retry = 1
	}
	return p
}

// faulty answers a request with faulty fields. One fault that has a code of its own in the table lends it to the answer.
func faulty(problems []admit.Problem) *APIError {
	p := invalidRequest.problem()
	if len(problems) == 1 && problems[0].Code == admit.CodeNotConfigured {
		p = notConfigured.problem()
	}
	p.Errors = problems
	return p
}

// answer turns any error into a problem. What it does not recognise is logged, and told as "internal".
func (s *Server) answer(ctx context.Context, err error) error {
	var p *APIError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &p):
		return p
	case errors.Is(err, store.ErrConflict):
		return keyConflict.problem()
	case errors.Is(err, store.ErrNotFound):
		return notFound.problem()
	case errors.Is(err, store.ErrTooLarge):
		return bodyTooLarge.problem()
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

// humaProblem gives the errors that huma finds in parameters and bodies our form. It never repeats a value.
func humaProblem(_ huma.Context, status int, _ string, errs ...error) huma.StatusError {
	var problems []admit.Problem
	for _, err := range errs {
		var d *huma.ErrorDetail
		if errors.As(err, &d) {
			problems = append(problems, admit.Problem{Field: fieldName(d.Location), Code: admit.CodeInvalid, Message: d.Message})
		}
	}
	if len(problems) == 0 && status == http.StatusBadRequest {
		return invalidJSON.problem()
	}
	switch status {
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
	huma.NewErrorWithContext = humaProblem
	huma.NewError = func(status int, text string, errs ...error) huma.StatusError {
		return humaProblem(nil, status, text, errs...)
	}
}

// writeProblem answers outside huma's routes.
func writeProblem(w http.ResponseWriter, f failure) {
	p := f.problem()
	for name, values := range p.GetHeaders() {
		w.Header()[name] = values
	}
	w.Header().Set("Content-Type", p.ContentType(""))
	w.WriteHeader(p.Status)
	if err := jsonFormat.Marshal(w, p); err != nil { // the caller has gone
		return
	}
}
