package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/danielgtaylor/huma/v2"

	"tidings/internal/admit"
	"tidings/internal/msg"
	"tidings/internal/policy"
	"tidings/internal/render"
	"tidings/store"
)

// Limits of templates, in bytes unless said otherwise.
const (
	maxContent      = 64 << 10
	maxHTML         = 256 << 10
	maxTemplateName = 256 // characters, and of the sign name and the provider's id
)

func (s *Server) templateRoutes(api huma.API) {
	add := func(id, method, path, summary string) huma.Operation {
		return operation("templates", id, method, path, summary)
	}
	create := add("create-template", http.MethodPost, "/api/templates", "Make a template, or its variant for another channel")
	create.DefaultStatus = http.StatusCreated
	huma.Register(api, create, s.createTemplate)
	huma.Register(api, add("list-templates", http.MethodGet, "/api/templates", "List templates"), s.listTemplates)
	huma.Register(api, add("get-template", http.MethodGet, "/api/templates/{id}", "Ask for a template"), s.getTemplate)
	huma.Register(api, add("update-template", http.MethodPost, "/api/templates/{id}", "Make a new version; what is not given stays"), s.updateTemplate)
	remove := add("delete-template", http.MethodDelete, "/api/templates/{id}", "Take a template out of use; accepted messages are still sent")
	remove.DefaultStatus = http.StatusNoContent
	huma.Register(api, remove, s.deleteTemplate)
	huma.Register(api, add("list-template-versions", http.MethodGet, "/api/templates/{id}/versions", "List all versions, the newest first"), s.templateVersions)
	huma.Register(api, add("preview-template", http.MethodPost, "/api/templates/{id}/preview", "Fill a template, and send nothing"), s.previewTemplate)
	huma.Register(api, add("approve-template", http.MethodPost, "/api/templates/{id}/approve", "Let a version pass the review (admin)"), s.review(true))
	huma.Register(api, add("reject-template", http.MethodPost, "/api/templates/{id}/reject", "Refuse a version (admin)"), s.review(false))
}

// Template is a version of a template's variant for one channel.
type Template struct {
	TemplateID    string    `json:"template_id"`
	SourceID      string    `json:"source_id"`
	Channel       string    `json:"channel"`
	Version       uint32    `json:"version"`
	Status        string    `json:"status" enum:"waiting,normal,rejected,deleted"`
	Name          string    `json:"name,omitempty"`
	RelTemplateID string    `json:"rel_template_id,omitempty"`
	SignName      string    `json:"sign_name,omitempty"`
	Subject       string    `json:"subject,omitempty"`
	Content       string    `json:"content,omitempty"`
	HTML          string    `json:"html,omitempty"`
	Category      string    `json:"category,omitempty"`
	Policy        any       `json:"policy,omitempty" doc:"What of the category's policy is different."`
	Sensitive     bool      `json:"sensitive"`
	CreateTime    time.Time `json:"create_time"`
	ModifyTime    time.Time `json:"modify_time"`
}

func templateView(t *store.Template) Template {
	out := Template{
		TemplateID: t.ID, SourceID: t.SourceID, Channel: t.Channel.String(), Version: t.Version, Status: t.Status.String(), Name: t.Name,
		RelTemplateID: t.RelTemplateID, SignName: t.SignName, Subject: t.Subject, Content: t.Content, HTML: t.HTML, Sensitive: t.Sensitive,
		CreateTime: t.Created, ModifyTime: t.Modified,
	}
	if t.Category != nil {
		out.Category = *t.Category
	}
	if t.Policy != nil {
		out.Policy = json.RawMessage(*t.Policy)
	}
	return out
}

// TemplateFields is what a request may say of a template; nil: nothing.
type TemplateFields struct {
	Name          *string         `json:"name,omitempty" doc:"For people to read."`
	RelTemplateID *string         `json:"rel_template_id,omitempty" doc:"The template's id on the provider's platform."`
	SignName      *string         `json:"sign_name,omitempty" doc:"The signature that SMS providers ask for."`
	Subject       *string         `json:"subject,omitempty" doc:"The subject, with placeholders."`
	Content       *string         `json:"content,omitempty" doc:"The text, with placeholders such as {{username}}."`
	HTML          *string         `json:"html,omitempty" doc:"The text as HTML, for e-mail."`
	Category      *string         `json:"category,omitempty" enum:"verification,notification,marketing" doc:"Of messages that name none."`
	Policy        *TemplatePolicy `json:"policy,omitempty" doc:"What of the category's policy is to be different for its messages; {}: nothing."`
	Sensitive     *bool           `json:"sensitive,omitempty" doc:"Blank what a message said when it has ended. Default: for verification."`
}

// TemplatePolicy is what of the category's policy is different for a template's messages. What is left out stays.
type TemplatePolicy struct {
	Retry       []string `json:"retry,omitempty" maxItems:"100" doc:"The waits before the second, third, … attempt." example:"[\"1s\",\"30s\"]"`
	Attempts    int      `json:"attempts,omitempty" minimum:"1" maximum:"100" doc:"So many at most."`
	Jitter      *float64 `json:"jitter,omitempty" minimum:"0" maximum:"0.9" doc:"Each wait is up to this share longer or shorter."`
	Expiry      string   `json:"expiry,omitempty" doc:"Not sent when so long has passed since the due time." example:"1h"`
	Unknown     string   `json:"unknown,omitempty" enum:"ask_again,wait,dead_letter" doc:"What follows an attempt that may have been sent."`
	UnknownWait string   `json:"unknown_wait,omitempty" doc:"How long to wait for a receipt." example:"30s"`
	Degrade     string   `json:"degrade,omitempty" enum:"switch,wait,skip" doc:"What to do while the channel's first provider is out of order."`
	Alarm       string   `json:"alarm,omitempty" enum:"now,daily,none" doc:"When a dead letter is told of."`
}

// check tells what is wrong with a policy, against the category's that it is laid over.
func (p *TemplatePolicy) check(category *string, policies *policy.Set) (problems []admit.Problem) {
	text, err := json.Marshal(p)
	var settings policy.Settings
	if err == nil {
		err = json.Unmarshal(text, &settings)
	}
	if err != nil {
		return []admit.Problem{{Field: "policy", Code: admit.CodeInvalid, Message: "has waits that are no durations such as 30s or 5m"}}
	}
	c := msg.Notification
	if category != nil {
		if parsed, err := msg.ParseCategory(*category); err == nil {
			c = parsed
		}
	}
	_, faults := policies[c].With(settings)
	for _, f := range faults {
		problems = append(problems, admit.Problem{Field: "policy." + f.Key, Code: admit.CodeInvalid, Message: f.Text})
	}
	return problems
}

func (f *TemplateFields) apply(t *store.Template) {
	if f.Policy != nil {
		t.Policy = nil
		if text, err := json.Marshal(f.Policy); err == nil && string(text) != "{}" {
			own := string(text)
			t.Policy = &own
		}
	}
	for _, field := range []struct {
		from *string
		to   *string
	}{{f.Name, &t.Name}, {f.RelTemplateID, &t.RelTemplateID}, {f.SignName, &t.SignName}, {f.Subject, &t.Subject}, {f.Content, &t.Content}, {f.HTML, &t.HTML}} {
		if field.from != nil {
			*field.to = *field.from
		}
	}
	if f.Category != nil {
		t.Category = f.Category
	}
	if f.Sensitive != nil {
		t.Sensitive = *f.Sensitive
	}
}

// faults tells what is wrong with a template.
func (s *Server) faults(t *store.Template, given *TemplateFields) (problems []admit.Problem) {
	if given.Policy != nil {
		problems = given.Policy.check(t.Category, s.cfg.Admit.Policies)
	}
	fault := func(field, code, format string, args ...any) {
		problems = append(problems, admit.Problem{Field: field, Code: code, Message: fmt.Sprintf(format, args...)})
	}
	if !admit.ValidName(t.ID) {
		fault("template_id", admit.CodeInvalid, admit.NameRule)
	}
	for field, text := range map[string]string{"name": t.Name, "rel_template_id": t.RelTemplateID, "sign_name": t.SignName} {
		if n := utf8.RuneCountInString(text); n > maxTemplateName {
			fault(field, admit.CodeTooLong, "has %d characters, at most %d are kept", n, maxTemplateName)
		}
	}
	if n := utf8.RuneCountInString(t.Subject); n > admit.MaxSubject {
		fault("subject", admit.CodeTooLong, "has %d characters, at most %d are kept", n, admit.MaxSubject)
	}
	if strings.ContainsAny(t.Subject, "\r\n") {
		fault("subject", admit.CodeInvalid, "has a line break")
	}
	if len(t.Content) > maxContent {
		fault("content", admit.CodeTooLong, "has %d bytes, at most %d are kept", len(t.Content), maxContent)
	}
	if len(t.HTML) > maxHTML {
		fault("html", admit.CodeTooLong, "has %d bytes, at most %d are kept", len(t.HTML), maxHTML)
	}
	mail := t.Channel == msg.Email
	switch {
	case t.HTML != "" && !mail:
		fault("html", admit.CodeInvalid, "is for e-mail only")
	case t.Content == "" && t.HTML == "":
		fault("content", admit.CodeRequired, "must say something")
	}
	if mail && strings.TrimSpace(t.Subject) == "" {
		fault("subject", admit.CodeRequired, "an e-mail needs a subject")
	}
	if len(problems) == 0 {
		_, wrong := render.CompileSet(render.Source{Subject: t.Subject, Text: t.Content, HTML: t.HTML})
		for part, err := range wrong {
			fault(part, admit.CodeInvalid, "%v", err)
		}
	}
	return problems
}

func (s *Server) firstStatus() store.TemplateStatus {
	if s.cfg.Review {
		return store.TemplateWaiting
	}
	return store.TemplateNormal
}

type templateOutput struct{ Body Template }

type createTemplateInput struct {
	Body struct {
		TemplateID string `json:"template_id,omitempty" doc:"The name that messages use. Default: a random one."`
		SourceID   string `json:"source_id,omitempty" doc:"Whose it is. Default: yourself; only an admin may name others."`
		Channel    string `json:"channel" enum:"email,sms,feishu,inbox,push,webhook,dingtalk,wecom,log"`
		TemplateFields
	}
}

func (s *Server) createTemplate(ctx context.Context, in *createTemplateInput) (*templateOutput, error) {
	source, err := sourceFor(ctx, in.Body.SourceID)
	if err != nil {
		return nil, err
	}
	if !admit.ValidName(source) {
		return nil, faulty([]admit.Problem{{Field: "source_id", Code: admit.CodeInvalid, Message: admit.NameRule}})
	}
	channel, err := msg.ParseChannel(in.Body.Channel)
	if err != nil {
		return nil, faulty([]admit.Problem{{Field: "channel", Code: admit.CodeUnknown, Message: err.Error()}})
	}
	t := store.Template{SourceID: source, ID: in.Body.TemplateID, Channel: channel, Status: s.firstStatus()}
	if t.ID == "" {
		t.ID = newID()
	}
	t.Sensitive = in.Body.Category != nil && *in.Body.Category == msg.Verification.String()
	in.Body.apply(&t)
	if problems := s.faults(&t, &in.Body.TemplateFields); len(problems) > 0 {
		return nil, faulty(problems)
	}
	if err := s.cfg.Store.CreateTemplate(ctx, caller(ctx).ID, &t); err != nil {
		return nil, s.answer(ctx, err)
	}
	return &templateOutput{templateView(&t)}, nil
}

type updateTemplateInput struct {
	ID     string `path:"id"`
	Source string `query:"source" doc:"Whose it is. Default: yours."`
	Body   struct {
		Channel string `json:"channel,omitempty" enum:"email,sms,feishu,inbox,push,webhook,dingtalk,wecom,log" doc:"Which variant. Not needed while there is one."`
		TemplateFields
	}
}

func (s *Server) updateTemplate(ctx context.Context, in *updateTemplateInput) (*templateOutput, error) {
	source, channel, err := s.variant(ctx, in.Source, in.ID, in.Body.Channel)
	if err != nil {
		return nil, err
	}
	t, err := s.cfg.Store.UpdateTemplate(ctx, caller(ctx).ID, source, in.ID, channel, func(t *store.Template) error {
		in.Body.apply(t)
		t.Status = s.firstStatus()
		if problems := s.faults(t, &in.Body.TemplateFields); len(problems) > 0 {
			return faulty(problems)
		}
		return nil
	})
	if err != nil {
		return nil, s.answer(ctx, err)
	}
	return &templateOutput{templateView(t)}, nil
}

// variant finds whose template and which variant a request is about.
func (s *Server) variant(ctx context.Context, source, id, channel string) (string, msg.Channel, error) {
	source, err := sourceFor(ctx, source)
	if err != nil {
		return "", 0, err
	}
	if channel != "" {
		c, err := msg.ParseChannel(channel)
		if err != nil {
			err = faulty([]admit.Problem{{Field: "channel", Code: admit.CodeUnknown, Message: err.Error()}})
		}
		return source, c, err
	}
	versions, err := s.cfg.Store.TemplateVersions(ctx, source, id)
	if err != nil {
		return "", 0, s.answer(ctx, err)
	}
	for _, v := range versions {
		if v.Channel != versions[0].Channel {
			return "", 0, faulty([]admit.Problem{{Field: "channel", Code: admit.CodeRequired, Message: "must say which variant: the template has several"}})
		}
	}
	return source, versions[0].Channel, nil
}

type templateInput struct {
	ID     string `path:"id"`
	Source string `query:"source" doc:"Whose it is. Default: yours."`
}

// TemplateVariants is a template: its newest version for each channel.
type TemplateVariants struct {
	TemplateID string     `json:"template_id"`
	SourceID   string     `json:"source_id"`
	Variants   []Template `json:"variants"`
}

type templateVariantsOutput struct{ Body TemplateVariants }

func (s *Server) getTemplate(ctx context.Context, in *templateInput) (*templateVariantsOutput, error) {
	return s.variants(ctx, in, func(i int, all []store.Template) bool { return i == 0 || all[i].Channel != all[i-1].Channel })
}

func (s *Server) templateVersions(ctx context.Context, in *templateInput) (*templateVariantsOutput, error) {
	return s.variants(ctx, in, func(int, []store.Template) bool { return true })
}

func (s *Server) variants(ctx context.Context, in *templateInput, wanted func(int, []store.Template) bool) (*templateVariantsOutput, error) {
	source, err := sourceFor(ctx, in.Source)
	if err != nil {
		return nil, err
	}
	versions, err := s.cfg.Store.TemplateVersions(ctx, source, in.ID)
	if err != nil {
		return nil, s.answer(ctx, err)
	}
	out := TemplateVariants{TemplateID: in.ID, SourceID: source}
	for i := range versions {
		if wanted(i, versions) {
			out.Variants = append(out.Variants, templateView(&versions[i]))
		}
	}
	return &templateVariantsOutput{out}, nil
}

func (s *Server) deleteTemplate(ctx context.Context, in *templateInput) (*struct{}, error) {
	source, err := sourceFor(ctx, in.Source)
	if err != nil {
		return nil, err
	}
	return nil, s.answer(ctx, s.cfg.Store.DeleteTemplate(ctx, caller(ctx).ID, source, in.ID))
}

type listTemplatesInput struct {
	Source string `query:"source" doc:"Whose they are. Default: yours; for an admin, all."`
	Limit  int    `query:"limit" minimum:"1" maximum:"500" default:"50"`
	Cursor string `query:"cursor" doc:"next_cursor of the page before."`
}

type listTemplatesOutput struct {
	Body struct {
		Data       []Template `json:"data"`
		NextCursor string     `json:"next_cursor,omitempty" doc:"Where the next page begins."`
	}
}

func (s *Server) listTemplates(ctx context.Context, in *listTemplatesInput) (*listTemplatesOutput, error) {
	source, err := sourceFor(ctx, in.Source)
	if err != nil {
		return nil, err
	}
	if caller(ctx).Admin() {
		source = in.Source // none: all
	}
	var after store.TemplateCursor
	if in.Cursor != "" {
		parts := strings.Split(in.Cursor, "/")
		if len(parts) == 3 {
			after.SourceID, after.ID = parts[0], parts[1]
			after.Channel, err = msg.ParseChannel(parts[2])
		}
		if len(parts) != 3 || err != nil {
			return nil, faulty([]admit.Problem{{Field: "cursor", Code: admit.CodeInvalid, Message: "is no next_cursor of a page"}})
		}
	}
	list, err := s.cfg.Store.Templates(ctx, source, after, in.Limit)
	if err != nil {
		return nil, s.answer(ctx, err)
	}
	var out listTemplatesOutput
	out.Body.Data = []Template{}
	for i := range list {
		out.Body.Data = append(out.Body.Data, templateView(&list[i]))
	}
	if len(list) == in.Limit {
		last := &list[len(list)-1]
		out.Body.NextCursor = last.SourceID + "/" + last.ID + "/" + last.Channel.String()
	}
	return &out, nil
}

type previewInput struct {
	ID     string `path:"id"`
	Source string `query:"source" doc:"Whose it is. Default: yours."`
	Body   struct {
		Channel string         `json:"channel,omitempty" enum:"email,sms,feishu,inbox,push,webhook,dingtalk,wecom,log" doc:"Which variant. Not needed while there is one."`
		Version uint32         `json:"version,omitempty" doc:"Which version. Default: the newest."`
		Params  map[string]any `json:"params,omitempty" doc:"The variables."`
	}
	RawBody []byte
}

type previewOutput struct{ Body Rendered }

func (s *Server) previewTemplate(ctx context.Context, in *previewInput) (*previewOutput, error) {
	source, channel, err := s.variant(ctx, in.Source, in.ID, in.Body.Channel)
	if err != nil {
		return nil, err
	}
	versions, err := s.cfg.Store.TemplateVersions(ctx, source, in.ID)
	if err != nil {
		return nil, s.answer(ctx, err)
	}
	for i := range versions {
		t := &versions[i]
		if t.Channel == channel && (in.Body.Version == 0 || t.Version == in.Body.Version) {
			return preview(t, in.RawBody)
		}
	}
	return nil, notFound.problem()
}

func preview(t *store.Template, body []byte) (*previewOutput, error) {
	variables, err := admit.Params(body)
	if err != nil {
		return nil, invalidJSON.problem()
	}
	set, wrong := render.CompileSet(render.Source{Subject: t.Subject, Text: t.Content, HTML: t.HTML})
	for part, err := range wrong {
		return nil, faulty([]admit.Problem{{Field: part, Code: admit.CodeInvalid, Message: err.Error()}})
	}
	filled, err := set.Render(variables)
	var absent *render.MissingError
	var problems []admit.Problem
	switch {
	case errors.As(err, &absent):
		for _, name := range absent.Names {
			problems = append(problems, admit.Missing(name))
		}
		return nil, faulty(problems)
	case err != nil:
		return nil, faulty([]admit.Problem{{Field: "params", Code: admit.CodeInvalid, Message: err.Error()}})
	}
	return &previewOutput{Rendered{Channel: t.Channel.String(), Subject: filled.Subject, Text: filled.Text, HTML: filled.HTML}}, nil
}

type reviewInput struct {
	ID     string `path:"id"`
	Source string `query:"source" doc:"Whose it is. Default: yours."`
	Body   *ReviewBody
}

// ReviewBody says which version a review is about.
type ReviewBody struct {
	Channel string `json:"channel,omitempty" enum:"email,sms,feishu,inbox,push,webhook,dingtalk,wecom,log" doc:"Which variant. Not needed while there is one."`
	Version uint32 `json:"version,omitempty" doc:"Which version. Default: the newest."`
}

// review approves or rejects.
func (s *Server) review(approve bool) func(context.Context, *reviewInput) (*templateVariantsOutput, error) {
	return func(ctx context.Context, in *reviewInput) (*templateVariantsOutput, error) {
		if _, err := admin(ctx); err != nil {
			return nil, err
		}
		body := ReviewBody{}
		if in.Body != nil {
			body = *in.Body
		}
		source, channel, err := s.variant(ctx, in.Source, in.ID, body.Channel)
		if err != nil {
			return nil, err
		}
		version := body.Version
		if version == 0 {
			versions, err := s.cfg.Store.TemplateVersions(ctx, source, in.ID)
			if err != nil {
				return nil, s.answer(ctx, err)
			}
			for i := range versions {
				if versions[i].Channel == channel {
					version = max(version, versions[i].Version)
				}
			}
		}
		if err := s.cfg.Store.ReviewTemplate(ctx, caller(ctx).ID, source, in.ID, channel, version, approve); err != nil {
			return nil, s.answer(ctx, err)
		}
		return s.getTemplate(ctx, &templateInput{ID: in.ID, Source: in.Source})
	}
}
