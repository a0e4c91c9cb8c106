package server

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"tidings/internal/admit"
	"tidings/internal/msg"
	"tidings/store"
)

func (s *Server) statsRoute(api huma.API) {
	op := operation("figures", "stats", http.MethodGet, "/api/stats", "Add up how tasks ended, by hour, day, source, template, channel or category")
	op.Description = "From t_stat_hour, which the transactions that record tasks add to. A task counts in the hour in which it ended; dead letters have not ended. " +
		"Yesterday's reach of a template: ?template_id=welcome&day=2026-11-29."
	huma.Register(api, op, s.stats)
}

type statsInput struct {
	Source     string   `query:"source" doc:"The caller that sent the messages in. Default: yourself; for an admin, all."`
	TemplateID string   `query:"template_id"`
	Channel    string   `query:"channel" enum:"email,sms,feishu,inbox,push,webhook,dingtalk,wecom,log"`
	Category   string   `query:"category" enum:"verification,notification,marketing"`
	Day        string   `query:"day" doc:"A day, UTC: 2026-11-29. Instead of since and until."`
	Since      string   `query:"since" doc:"From the hour that this instant lies in: RFC 3339, or Unix milliseconds. Default: 24 hours before until."`
	Until      string   `query:"until" doc:"Hours that begin before this instant: RFC 3339, or Unix milliseconds. Default: now."`
	By         []string `query:"by" doc:"What to group by: hour, day, source, template, channel, category; several with commas. Default: one group."`
}

// StatGroup is a group's figures.
type StatGroup struct {
	Hour       *time.Time       `json:"hour,omitempty"`
	Day        string           `json:"day,omitempty"`
	SourceID   *string          `json:"source_id,omitempty"`
	TemplateID *string          `json:"template_id,omitempty" doc:"Empty: messages without a template."`
	Channel    string           `json:"channel,omitempty"`
	Category   string           `json:"category,omitempty"`
	Tasks      int64            `json:"tasks" doc:"Tasks that ended."`
	Outcomes   map[string]int64 `json:"outcomes" doc:"How: success, failed, expired, cancelled, skipped."`
	Reach      float64          `json:"reach" doc:"The share that ended in success of those that were to be sent: skipped and cancelled ones do not count. 0 when there were none."`
	LatencyMS  float64          `json:"latency_ms" doc:"How long the provider took on average, of those that ended in success."`
}

type statsOutput struct {
	Body struct {
		Since time.Time   `json:"since"`
		Until time.Time   `json:"until"`
		Data  []StatGroup `json:"data"`
		More  bool        `json:"more,omitempty" doc:"There is more than an answer holds: ask for less time, or fewer groups."`
	}
}

var statNames = map[string]string{"hour": "hour", "day": "day", "source": "source_id", "template": "template_id", "channel": "channel", "category": "category"}

func (s *Server) stats(ctx context.Context, in *statsInput) (*statsOutput, error) {
	source, err := sourceFor(ctx, in.Source)
	if err != nil {
		return nil, err
	}
	if caller(ctx).Admin() {
		source = in.Source
	}
	f, problems := in.filter(s.cfg.Store.Now())
	if len(problems) > 0 {
		return nil, faulty(problems)
	}
	f.SourceID = source
	groups, more, err := s.cfg.Store.Stats(ctx, f)
	if err != nil {
		return nil, s.answer(ctx, err)
	}
	var out statsOutput
	out.Body.Since, out.Body.Until, out.Body.More, out.Body.Data = f.Since, f.Until, more, []StatGroup{}
	for i := range groups {
		out.Body.Data = append(out.Body.Data, groupView(f.By, &groups[i]))
	}
	return &out, nil
}

func (in *statsInput) filter(now time.Time) (f store.StatFilter, problems []admit.Problem) {
	fault := func(field, format string, args ...any) {
		problems = append(problems, admit.Problem{Field: field, Code: admit.CodeInvalid, Message: fmt.Sprintf(format, args...)})
	}
	f = store.StatFilter{TemplateID: in.TemplateID, Category: in.Category}
	if in.Channel != "" {
		var err error
		if f.Channel, err = msg.ParseChannel(in.Channel); err != nil {
			fault("channel", "%v", err)
		}
	}
	for _, name := range in.By {
		column, ok := statNames[name]
		if !ok {
			fault("by", "must be of hour, day, source, template, channel, category")
		} else if !slices.Contains(f.By, column) {
			f.By = append(f.By, column)
		}
	}
	problems = append(problems, readTimes(map[string]string{"since": in.Since, "until": in.Until}, map[string]*time.Time{"since": &f.Since, "until": &f.Until})...)
	if in.Day != "" {
		day, err := time.Parse(time.DateOnly, in.Day)
		switch {
		case err != nil:
			fault("day", "must be a day such as 2026-11-29")
		case in.Since != "" || in.Until != "":
			fault("day", "and since or until exclude each other")
		}
		f.Since, f.Until = day, day.Add(24*time.Hour)
	}
	if f.Until.IsZero() {
		f.Until = now.Truncate(time.Millisecond)
	}
	if f.Since.IsZero() {
		f.Since = f.Until.Add(-24 * time.Hour)
	}
	f.Since = f.Since.UTC().Truncate(time.Hour)
	return f, problems
}

func groupView(by []string, g *store.StatGroup) StatGroup {
	out := StatGroup{Tasks: g.Tasks(), Outcomes: g.Outcomes, Reach: g.Reach(), LatencyMS: g.LatencyMS(), Category: g.Category}
	for _, column := range by {
		switch column {
		case "hour":
			out.Hour = &g.Hour
		case "day":
			out.Day = g.Day.Format(time.DateOnly)
		case "source_id":
			out.SourceID = &g.SourceID
		case "template_id":
			out.TemplateID = &g.TemplateID
		case "channel":
			out.Channel = g.Channel.String()
		}
	}
	return out
}
