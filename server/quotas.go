package server

import (
	"context"
	"net/http"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"tidings/internal/admit"
	"tidings/internal/msg"
	"tidings/store"
)

func (s *Server) quotaRoutes(api huma.API) {
	add := func(id, method, path, summary string) huma.Operation {
		return operation("quotas", id, method, path, summary)
	}
	create := add("create-quota", http.MethodPost, "/api/quotas", "Limit a channel, of one caller or of all together (admin)")
	create.DefaultStatus = http.StatusCreated
	huma.Register(api, create, s.createQuota)
	huma.Register(api, add("list-quotas", http.MethodGet, "/api/quotas", "List quotas: for an admin all, else those that hold for yourself"), s.listQuotas)
	huma.Register(api, add("update-quota", http.MethodPost, "/api/quotas/{kind}/{id}", "Change a quota's number (admin)"), s.updateQuota)
	remove := add("delete-quota", http.MethodDelete, "/api/quotas/{kind}/{id}", "Remove a quota (admin)")
	remove.DefaultStatus = http.StatusNoContent
	huma.Register(api, remove, s.deleteQuota)
}

// Quota is a limit of a channel.
type Quota struct {
	Kind     string    `json:"kind" enum:"global,source"`
	ID       uint64    `json:"id" doc:"Its row in t_global_quota or t_source_quota."`
	SourceID string    `json:"source_id,omitempty" doc:"The caller; none: of all together."`
	Channel  string    `json:"channel"`
	Num      int       `json:"num" doc:"So many tasks …"`
	Unit     int64     `json:"unit" doc:"… in any span of so many milliseconds."`
	Modified time.Time `json:"modify_time"`
}

func quotaView(q *store.Quota) Quota {
	kind := "global"
	if q.SourceID != "" {
		kind = "source"
	}
	return Quota{Kind: kind, ID: q.ID, SourceID: q.SourceID, Channel: q.Channel.String(), Num: q.Num, Unit: q.UnitMS, Modified: q.Modified}
}

type createQuotaInput struct {
	Body struct {
		SourceID string `json:"source_id,omitempty" doc:"The caller. Default: all together."`
		Channel  string `json:"channel" enum:"email,sms,feishu,inbox,push,webhook,dingtalk,wecom,log"`
		Num      int    `json:"num" minimum:"1" maximum:"1000000000"`
		Unit     int64  `json:"unit" minimum:"1" maximum:"31536000000" doc:"ms: 1000 is a second, 60000 a minute, 86400000 a day."`
	}
}

type quotaOutput struct{ Body Quota }

func (s *Server) createQuota(ctx context.Context, in *createQuotaInput) (*quotaOutput, error) {
	by, err := admin(ctx)
	if err != nil {
		return nil, err
	}
	channel, err := msg.ParseChannel(in.Body.Channel)
	if err != nil {
		return nil, faulty([]admit.Problem{{Field: "channel", Code: admit.CodeUnknown, Message: err.Error()}})
	}
	if in.Body.SourceID != "" && !admit.ValidName(in.Body.SourceID) {
		return nil, faulty([]admit.Problem{{Field: "source_id", Code: admit.CodeInvalid, Message: admit.NameRule}})
	}
	q := store.Quota{SourceID: in.Body.SourceID, Channel: channel, Num: in.Body.Num, UnitMS: in.Body.Unit}
	if err := s.cfg.Store.CreateQuota(ctx, by.ID, &q); err != nil {
		return nil, s.answer(ctx, err)
	}
	return s.quota(ctx, q.SourceID != "", q.ID)
}

// quota reads one quota back.
func (s *Server) quota(ctx context.Context, ofSource bool, id uint64) (*quotaOutput, error) {
	list, err := s.cfg.Store.Quotas(ctx)
	if err != nil {
		return nil, s.answer(ctx, err)
	}
	for i := range list {
		if list[i].ID == id && (list[i].SourceID != "") == ofSource {
			return &quotaOutput{quotaView(&list[i])}, nil
		}
	}
	return nil, notFound.problem()
}

type listQuotasOutput struct {
	Body struct {
		Data []Quota `json:"data"`
	}
}

func (s *Server) listQuotas(ctx context.Context, _ *struct{}) (*listQuotasOutput, error) {
	list, err := s.cfg.Store.Quotas(ctx)
	if err != nil {
		return nil, s.answer(ctx, err)
	}
	var out listQuotasOutput
	out.Body.Data = []Quota{}
	src := caller(ctx)
	for i := range list {
		if src.Admin() || list[i].SourceID == src.ID {
			out.Body.Data = append(out.Body.Data, quotaView(&list[i]))
		}
	}
	return &out, nil
}

type quotaInput struct {
	Kind string `path:"kind" enum:"global,source"`
	ID   uint64 `path:"id"`
}

type updateQuotaInput struct {
	Kind string `path:"kind" enum:"global,source"`
	ID   uint64 `path:"id"`
	Body struct {
		Num int `json:"num" minimum:"1" maximum:"1000000000"`
	}
}

func (s *Server) updateQuota(ctx context.Context, in *updateQuotaInput) (*quotaOutput, error) {
	by, err := admin(ctx)
	if err != nil {
		return nil, err
	}
	q, err := s.find(ctx, in.Kind, in.ID)
	if err != nil {
		return nil, err
	}
	q.Num = in.Body.Num
	if err := s.cfg.Store.UpdateQuota(ctx, by.ID, q); err != nil {
		return nil, s.answer(ctx, err)
	}
	return s.quota(ctx, q.SourceID != "", q.ID)
}

func (s *Server) deleteQuota(ctx context.Context, in *quotaInput) (*struct{}, error) {
	by, err := admin(ctx)
	if err != nil {
		return nil, err
	}
	q, err := s.find(ctx, in.Kind, in.ID)
	if err != nil {
		return nil, err
	}
	return nil, s.answer(ctx, s.cfg.Store.DeleteQuota(ctx, by.ID, q))
}

func (s *Server) find(ctx context.Context, kind string, id uint64) (*store.Quota, error) {
	list, err := s.cfg.Store.Quotas(ctx)
	if err != nil {
		return nil, s.answer(ctx, err)
	}
	for i := range list {
		if list[i].ID == id && (list[i].SourceID != "") == (kind == "source") {
			return &list[i], nil
		}
	}
	return nil, notFound.problem()
}
