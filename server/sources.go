package server

import (
	"context"
	"net/http"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"tidings/internal/admit"
	"tidings/store"
)

func (s *Server) sourceRoutes(api huma.API) {
	add := func(id, method, path, summary string) huma.Operation {
		return operation("sources", id, method, path, summary+" (admin)")
	}
	create := add("create-source", http.MethodPost, "/api/sources", "Register a caller, and make its first key")
	create.DefaultStatus = http.StatusCreated
	huma.Register(api, create, s.createSource)
	huma.Register(api, add("list-sources", http.MethodGet, "/api/sources", "List callers"), s.listSources)
	huma.Register(api, add("get-source", http.MethodGet, "/api/sources/{id}", "Ask for a caller"), s.getSource)
	huma.Register(api, add("update-source", http.MethodPost, "/api/sources/{id}", "Change a caller; what is not given stays"), s.updateSource)
	key := add("create-key", http.MethodPost, "/api/sources/{id}/keys", "Make a key; at most two are valid at a time")
	key.DefaultStatus = http.StatusCreated
	huma.Register(api, key, s.createKey)
	revoke := add("revoke-key", http.MethodDelete, "/api/sources/{id}/keys/{key_id}", "Revoke a key")
	revoke.DefaultStatus = http.StatusNoContent
	huma.Register(api, revoke, s.revokeKey)
	huma.Register(api, add("list-audit", http.MethodGet, "/api/audit", "Who changed what, the latest first"), s.listAudit)
}

// Source is a caller.
type Source struct {
	SourceID   string    `json:"source_id"`
	Name       string    `json:"name,omitempty"`
	Role       string    `json:"role" enum:"sender,admin"`
	Enabled    bool      `json:"enabled"`
	Keys       []Key     `json:"keys"`
	CreateTime time.Time `json:"create_time"`
}

// Key is what may be shown of a key.
type Key struct {
	KeyID      string     `json:"key_id"`
	Key        string     `json:"key,omitempty" doc:"The key itself: shown once, when it is made."`
	CreateTime time.Time  `json:"create_time"`
	RevokeTime *time.Time `json:"revoke_time,omitempty"`
}

func sourceView(src *store.Source) Source {
	out := Source{SourceID: src.ID, Name: src.Name, Role: src.Role, Enabled: src.Enabled, CreateTime: src.Created, Keys: []Key{}}
	for _, k := range src.Keys {
		out.Keys = append(out.Keys, Key{KeyID: k.ID, CreateTime: k.Created, RevokeTime: k.Revoked})
	}
	return out
}

type sourceOutput struct{ Body Source }

type createSourceInput struct {
	Body struct {
		SourceID string `json:"source_id" doc:"The name that messages carry."`
		Name     string `json:"name,omitempty" maxLength:"256" doc:"For people to read."`
		Role     string `json:"role,omitempty" enum:"sender,admin" default:"sender"`
	}
}

func (s *Server) createSource(ctx context.Context, in *createSourceInput) (*sourceOutput, error) {
	by, err := admin(ctx)
	if err != nil {
		return nil, err
	}
	if !admit.ValidName(in.Body.SourceID) {
		return nil, faulty([]admit.Problem{{Field: "source_id", Code: admit.CodeInvalid, Message: admit.NameRule}})
	}
	if _, registered, err := s.cfg.Store.Caller(ctx, ""); !registered && err == nil && in.Body.Role != store.RoleAdmin {
		return nil, faulty([]admit.Problem{{Field: "role", Code: admit.CodeInvalid, Message: "must be admin for the first source: from then on keys are asked for, and nobody else could administer"}})
	}
	src := store.Source{ID: in.Body.SourceID, Name: in.Body.Name, Role: in.Body.Role}
	if err := s.cfg.Store.CreateSource(ctx, by.ID, src); err != nil {
		return nil, s.answer(ctx, err)
	}
	key, _, err := s.cfg.Store.CreateKey(ctx, by.ID, src.ID)
	if err != nil {
		return nil, s.answer(ctx, err)
	}
	out, err := s.source(ctx, src.ID)
	if err == nil && len(out.Body.Keys) > 0 {
		out.Body.Keys[len(out.Body.Keys)-1].Key = key
	}
	return out, err
}

func (s *Server) source(ctx context.Context, id string) (*sourceOutput, error) {
	src, err := s.cfg.Store.Source(ctx, id)
	if err != nil {
		return nil, s.answer(ctx, err)
	}
	return &sourceOutput{sourceView(src)}, nil
}

type sourceInput struct {
	ID string `path:"id"`
}

func (s *Server) getSource(ctx context.Context, in *sourceInput) (*sourceOutput, error) {
	if _, err := admin(ctx); err != nil {
		return nil, err
	}
	return s.source(ctx, in.ID)
}

type listSourcesOutput struct {
	Body struct {
		Data []Source `json:"data"`
	}
}

func (s *Server) listSources(ctx context.Context, _ *struct{}) (*listSourcesOutput, error) {
	if _, err := admin(ctx); err != nil {
		return nil, err
	}
	sources, err := s.cfg.Store.Sources(ctx)
	if err != nil {
		return nil, s.answer(ctx, err)
	}
	var out listSourcesOutput
	out.Body.Data = []Source{}
	for i := range sources {
		out.Body.Data = append(out.Body.Data, sourceView(&sources[i]))
	}
	return &out, nil
}

type updateSourceInput struct {
	ID   string `path:"id"`
	Body struct {
		Name    *string `json:"name,omitempty" maxLength:"256"`
		Role    *string `json:"role,omitempty" enum:"sender,admin"`
		Enabled *bool   `json:"enabled,omitempty" doc:"false: its keys open nothing, within a second on every node."`
	}
}

func (s *Server) updateSource(ctx context.Context, in *updateSourceInput) (*sourceOutput, error) {
	by, err := admin(ctx)
	if err != nil {
		return nil, err
	}
	change := store.SourceChange{Name: in.Body.Name, Role: in.Body.Role, Enabled: in.Body.Enabled}
	if err := s.cfg.Store.UpdateSource(ctx, by.ID, in.ID, change); err != nil {
		return nil, s.answer(ctx, err)
	}
	return s.source(ctx, in.ID)
}

type keyOutput struct{ Body Key }

func (s *Server) createKey(ctx context.Context, in *sourceInput) (*keyOutput, error) {
	by, err := admin(ctx)
	if err != nil {
		return nil, err
	}
	key, info, err := s.cfg.Store.CreateKey(ctx, by.ID, in.ID)
	if err != nil {
		return nil, s.answer(ctx, err)
	}
	return &keyOutput{Key{KeyID: info.ID, Key: key, CreateTime: info.Created}}, nil
}

type revokeKeyInput struct {
	ID    string `path:"id"`
	KeyID string `path:"key_id"`
}

func (s *Server) revokeKey(ctx context.Context, in *revokeKeyInput) (*struct{}, error) {
	by, err := admin(ctx)
	if err != nil {
		return nil, err
	}
	return nil, s.answer(ctx, s.cfg.Store.RevokeKey(ctx, by.ID, in.ID, in.KeyID))
}

type listAuditInput struct {
	Limit  int    `query:"limit" minimum:"1" maximum:"500" default:"50"`
	Cursor string `query:"cursor" doc:"next_cursor of the page before."`
}

// AuditEntry says who did what.
type AuditEntry struct {
	Time     time.Time `json:"time"`
	SourceID string    `json:"source_id" doc:"Who did it; command-line for the program itself."`
	Action   string    `json:"action"`
	Object   string    `json:"object"`
	Detail   string    `json:"detail,omitempty"`
}

type listAuditOutput struct {
	Body struct {
		Data       []AuditEntry `json:"data"`
		NextCursor string       `json:"next_cursor,omitempty"`
	}
}

func (s *Server) listAudit(ctx context.Context, in *listAuditInput) (*listAuditOutput, error) {
	if _, err := admin(ctx); err != nil {
		return nil, err
	}
	before, err := pageBefore(in.Cursor)
	if err != nil {
		return nil, err
	}
	entries, err := s.cfg.Store.Audit(ctx, before, in.Limit)
	if err != nil {
		return nil, s.answer(ctx, err)
	}
	var out listAuditOutput
	out.Body.Data = []AuditEntry{}
	for _, e := range entries {
		out.Body.Data = append(out.Body.Data, AuditEntry{Time: e.Time, SourceID: e.By, Action: e.Action, Object: e.Object, Detail: e.Detail})
	}
	if len(entries) == in.Limit {
		out.Body.NextCursor = formatID(entries[len(entries)-1].ID)
	}
	return &out, nil
}
