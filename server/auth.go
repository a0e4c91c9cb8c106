package server

import (
	"context"
	"errors"
	"net"
	"net/http"
	"strings"

	"tidings/store"
)

// DefaultSource is the caller that every request comes from while no sources are registered.
const DefaultSource = store.DefaultSource

type callerKey struct{}

// caller is the source that a request comes from. Only routes below /api/ have one.
func caller(ctx context.Context) store.Source {
	src, _ := ctx.Value(callerKey{}).(store.Source)
	return src
}

// authenticate finds the caller of everything below /api/. While no source is registered, callers on this machine are the
// source default, and administer.
func (s *Server) authenticate(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.HasPrefix(r.URL.Path, "/api/") {
			next.ServeHTTP(w, r)
			return
		}
		scheme, key, _ := strings.Cut(r.Header.Get("Authorization"), " ")
		if !strings.EqualFold(scheme, "Bearer") {
			key = ""
		}
		src, registered, err := s.cfg.Store.Caller(r.Context(), strings.TrimSpace(key))
		switch {
		case errors.Is(err, store.ErrNotFound):
			writeProblem(w, unauthorized)
			return
		case err != nil:
			writeProblem(w, unavailable)
			return
		case registered:
		case !fromHere(r.RemoteAddr):
			writeProblem(w, unauthorized)
			return
		case !ownHost(r.Host):
			writeProblem(w, foreignHost)
			return
		default:
			src = store.Source{ID: DefaultSource, Role: store.RoleAdmin, Enabled: true}
		}
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), callerKey{}, src)))
	})
}

func fromHere(remote string) bool {
	host, _, err := net.SplitHostPort(remote)
	ip := net.ParseIP(host)
	return err == nil && ip != nil && ip.IsLoopback()
}

// ownHost tells whether a Host header names this machine. A web page can have its own name resolve to here, and is then of the
// same origin; without keys, its Host header is all that tells it from a caller.
func ownHost(host string) bool {
	name, _, err := net.SplitHostPort(host)
	if err != nil {
		name = strings.Trim(host, "[]")
	}
	ip := net.ParseIP(name)
	return name == "localhost" || (ip != nil && ip.IsLoopback())
}

// admin refuses callers who may not administer.
func admin(ctx context.Context) (store.Source, error) {
	src := caller(ctx)
	if !src.Admin() {
		return src, forbidden.problem()
	}
	return src, nil
}

// sourceFor is whose things a request is about: the caller's own, or, for an admin, anybody's. Others' are not found.
func sourceFor(ctx context.Context, named string) (string, error) {
	src := caller(ctx)
	if named == "" || named == src.ID {
		return src.ID, nil
	}
	if !src.Admin() {
		return "", notFound.problem()
	}
	return named, nil
}
