package server

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"tidings/internal/admit"
	"tidings/internal/msg"
	"tidings/store"
)

func (s *Server) laneRoutes(api huma.API) {
	add := func(id, method, path, summary string) huma.Operation {
		return operation("lanes", id, method, path, summary)
	}
	huma.Register(api, add("list-lanes", http.MethodGet, "/api/lanes", "List lanes: weights and pauses (admin)"), s.listLanes)
	huma.Register(api, add("pause-lane", http.MethodPost, "/api/lanes/{lane}/pause", "Stop a lane, on every node within a second (admin)"), s.pauseLane)
	huma.Register(api, add("resume-lane", http.MethodPost, "/api/lanes/{lane}/resume", "Let a lane go on (admin)"), s.resumeLane)
	huma.Register(api, add("weigh-lane", http.MethodPost, "/api/lanes/{lane}/weight", "Change a lane's share of free slots (admin)"), s.weighLane)
	add = func(id, method, path, summary string) huma.Operation {
		return operation("providers", id, method, path, summary)
	}
	huma.Register(api, add("list-providers", http.MethodGet, "/api/providers", "List what is set for providers, and how each process finds them (admin)"), s.listProviders)
	huma.Register(api, add("pause-provider", http.MethodPost, "/api/providers/{provider}/pause", "Ask a provider for nothing, on every node within a second (admin)"), s.pauseProvider(true))
	huma.Register(api, add("resume-provider", http.MethodPost, "/api/providers/{provider}/resume", "Let a provider be asked again (admin)"), s.pauseProvider(false))
}

// Lane is a lane and how it is steered.
type Lane struct {
	Lane       string    `json:"lane"`
	Weight     int       `json:"weight" doc:"Its share of free sending slots, against the other lanes that have work."`
	Paused     bool      `json:"paused" doc:"Nothing of it is sent; what expires still ends."`
	Reason     string    `json:"reason,omitempty"`
	ModifyBy   string    `json:"modify_by,omitempty"`
	ModifyTime time.Time `json:"modify_time"`
}

func laneView(row *store.LaneControl) Lane {
	return Lane{Lane: row.Name, Weight: row.Weight, Paused: row.Paused, Reason: row.Reason, ModifyBy: row.By, ModifyTime: row.Modified}
}

type lanesOutput struct {
	Body struct {
		Data []Lane `json:"data"`
	}
}

func (s *Server) listLanes(ctx context.Context, _ *struct{}) (*lanesOutput, error) {
	if _, err := admin(ctx); err != nil {
		return nil, err
	}
	c, err := s.cfg.Store.Control(ctx)
	if err != nil {
		return nil, s.answer(ctx, err)
	}
	var out lanesOutput
	for i := range c.Lanes {
		out.Body.Data = append(out.Body.Data, laneView(&c.Lanes[i]))
	}
	return &out, nil
}

type laneOutput struct{ Body Lane }

type laneInput struct {
	Lane string `path:"lane" enum:"high,middle,low"`
}

type pauseInput struct {
	Lane string `path:"lane" enum:"high,middle,low"`
	Body *struct {
		Reason string `json:"reason,omitempty" maxLength:"255" doc:"Why, for others to read."`
	} `required:"false"`
}

func (s *Server) setLane(ctx context.Context, name string, change func(*store.LaneControl)) (*laneOutput, error) {
	if _, err := admin(ctx); err != nil {
		return nil, err
	}
	lane, err := msg.ParseLane(name)
	if err != nil {
		return nil, notFound.problem()
	}
	row, err := s.cfg.Store.SetLane(ctx, caller(ctx).ID, lane, change)
	if errors.Is(err, store.ErrWeight) {
		return nil, faulty([]admit.Problem{{Field: "weight", Code: admit.CodeInvalid, Message: err.Error()}})
	}
	if err != nil {
		return nil, s.answer(ctx, err)
	}
	return &laneOutput{laneView(&row)}, nil
}

func (s *Server) pauseLane(ctx context.Context, in *pauseInput) (*laneOutput, error) {
	return s.setLane(ctx, in.Lane, func(row *store.LaneControl) {
		row.Paused, row.Reason = true, ""
		if in.Body != nil {
			row.Reason = in.Body.Reason
		}
	})
}

func (s *Server) resumeLane(ctx context.Context, in *laneInput) (*laneOutput, error) {
	return s.setLane(ctx, in.Lane, func(row *store.LaneControl) { row.Paused, row.Reason = false, "" })
}

type weightInput struct {
	Lane string `path:"lane" enum:"high,middle,low"`
	Body struct {
		Weight int `json:"weight" minimum:"1" maximum:"1000"`
	}
}

func (s *Server) weighLane(ctx context.Context, in *weightInput) (*laneOutput, error) {
	return s.setLane(ctx, in.Lane, func(row *store.LaneControl) { row.Weight = in.Body.Weight })
}

// ProviderState is what is set for a provider, or how a process finds it.
type ProviderState struct {
	Provider    string     `json:"provider"`
	Node        string     `json:"node" doc:"The process's number, or all."`
	Paused      bool       `json:"paused"`
	Reason      string     `json:"reason,omitempty"`
	ModifyBy    string     `json:"modify_by,omitempty"`
	BusyUntil   *time.Time `json:"busy_until,omitempty" doc:"It asked not to be asked before."`
	Breaker     string     `json:"breaker,omitempty" enum:"closed,open,half-open" doc:"open: it fails and is not asked; half-open: a few attempts find out."`
	BreakerTime *time.Time `json:"breaker_time,omitempty" doc:"Since when."`
}

type providersOutput struct {
	Body struct {
		Data []ProviderState `json:"data"`
	}
}

func (s *Server) listProviders(ctx context.Context, _ *struct{}) (*providersOutput, error) {
	if _, err := admin(ctx); err != nil {
		return nil, err
	}
	c, err := s.cfg.Store.Control(ctx)
	if err != nil {
		return nil, s.answer(ctx, err)
	}
	out := providersOutput{}
	out.Body.Data = []ProviderState{}
	for _, row := range c.Providers {
		state := ProviderState{Provider: row.Provider, Node: formatID(uint64(row.Node)), Breaker: row.Breaker, BreakerTime: row.BreakerTime}
		if row.Node == store.AllNodes {
			state = ProviderState{Provider: row.Provider, Node: "all", Paused: row.Paused, Reason: row.Reason, ModifyBy: row.By, BusyUntil: row.BusyUntil}
		}
		out.Body.Data = append(out.Body.Data, state)
	}
	return &out, nil
}

type providerInput struct {
	Provider string `path:"provider"`
	Body     *struct {
		Reason string `json:"reason,omitempty" maxLength:"255" doc:"Why, for others to read."`
	} `required:"false"`
}

type providerOutput struct{ Body ProviderState }

func (s *Server) pauseProvider(paused bool) func(context.Context, *providerInput) (*providerOutput, error) {
	return func(ctx context.Context, in *providerInput) (*providerOutput, error) {
		if _, err := admin(ctx); err != nil {
			return nil, err
		}
		if s.cfg.Provider != nil && !s.cfg.Provider(in.Provider) {
			return nil, notFound.problem()
		}
		reason := ""
		if in.Body != nil && paused {
			reason = in.Body.Reason
		}
		if err := s.cfg.Store.PauseProvider(ctx, caller(ctx).ID, in.Provider, reason, paused); err != nil {
			return nil, s.answer(ctx, err)
		}
		return &providerOutput{ProviderState{Provider: in.Provider, Node: "all", Paused: paused, Reason: reason, ModifyBy: caller(ctx).ID}}, nil
	}
}
