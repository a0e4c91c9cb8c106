package server

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net/http"
	"runtime/debug"
	"time"

	"github.com/go-chi/chi/v5"
	"github.com/go-chi/chi/v5/middleware"
)

type requestIDKey struct{}

// requestID is the id under which a request is logged and answered.
func requestID(ctx context.Context) string {
	id, _ := ctx.Value(requestIDKey{}).(string)
	return id
}

const requestIDHeader = "X-Request-Id"

// observe gives a request its id, logs how it ended, without content or addresses, and turns a panic into an answer.
func (s *Server) observe(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		started := time.Now()
		id := r.Header.Get(requestIDHeader)
		if !acceptableID(id) {
			id = newID()
		}
		w.Header().Set(requestIDHeader, id)
		r = r.WithContext(context.WithValue(r.Context(), requestIDKey{}, id))
		if encoding := r.Header.Get("Content-Encoding"); encoding != "" && encoding != "identity" { // nothing here unpacks
			writeProblem(w, wrongType)
			return
		}
		ww := middleware.NewWrapResponseWriter(w, r.ProtoMajor)
		defer func() {
			if err := recover(); err != nil {
				if err == http.ErrAbortHandler {
					panic(err)
				}
				s.cfg.Log.Error("handler panicked", "request_id", id, "path", r.URL.Path, "err", fmt.Sprint(err), "stack", string(debug.Stack()))
				if ww.Status() == 0 {
					writeProblem(ww, internalFailure)
				}
			}
			s.cfg.Metrics.Request(knownMethod(r.Method), route(r), ww.Status(), time.Since(started))
			s.cfg.Log.Debug("request", "request_id", id, "method", r.Method, "path", r.URL.Path, "status", ww.Status(),
				"bytes", ww.BytesWritten(), "duration", time.Since(started).Round(time.Microsecond))
		}()
		next.ServeHTTP(ww, r)
	})
}

// route is the pattern of a request's path, known when it has been answered.
func route(r *http.Request) string {
	if c := chi.RouteContext(r.Context()); c != nil {
		return cmp.Or(c.RoutePattern(), "other")
	}
	return "other"
}

// knownMethod keeps callers from making up values of a label.
func knownMethod(method string) string {
	switch method {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodOptions:
		return method
	}
	return "other"
}

// acceptableID tells whether a caller's id may stand in logs and headers.
func acceptableID(id string) bool {
	if id == "" || len(id) > 64 {
		return false
	}
	for i := range len(id) {
		c := id[i]
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-' && c != '_' && c != '.' {
			return false
		}
	}
	return true
}

func newID() string {
	var b [8]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// sameOrigin keeps web pages of other origins from sending: a browser on this machine reaches a loopback listener.
func sameOrigin(next http.Handler) http.Handler {
	protection := http.NewCrossOriginProtection()
	protection.SetDenyHandler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { writeProblem(w, crossOrigin) }))
	return protection.Handler(next)
}
