package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/jmoiron/sqlx"

	"tidings/internal/msg"
)

// TemplateStatus is where a version of a template stands. Its number is the value of t_msg_template.status.
type TemplateStatus uint8

// The statuses of templates.
const (
	TemplateWaiting  TemplateStatus = 1 // for review
	TemplateNormal   TemplateStatus = 2
	TemplateRejected TemplateStatus = 3
	TemplateDeleted  TemplateStatus = 4
)

var templateStatusNames = map[TemplateStatus]string{TemplateWaiting: "waiting", TemplateNormal: "normal", TemplateRejected: "rejected", TemplateDeleted: "deleted"}

// String gives the status's name, as JSON writes it.
func (s TemplateStatus) String() string { return templateStatusNames[s] }

// Template is a version of a template's variant for one channel. What it says never changes.
type Template struct {
	SourceID      string         `db:"source_id"`
	ID            string         `db:"template_id"`
	Channel       msg.Channel    `db:"channel"`
	Version       uint32         `db:"version"`
	Name          string         `db:"name"`
	RelTemplateID string         `db:"rel_template_id"` // on the provider's platform
	SignName      string         `db:"sign_name"`
	Subject       string         `db:"subject"`
	Content       string         `db:"content"`
	HTML          string         `db:"html"`
	Category      *string        `db:"category"`
	Policy        *string        `db:"policy"` // JSON of what is different from the category's; nil: nothing
	Sensitive     bool           `db:"sensitive"`
	Status        TemplateStatus `db:"status"`
	Created       time.Time      `db:"create_time"`
	Modified      time.Time      `db:"modify_time"`
}

const (
	// sensitive is a reserved word.
	templateColumns = "source_id, template_id, channel, version, name, rel_template_id, sign_name, subject, content, html, category, policy, `sensitive`, status, create_time, modify_time"

	sqlNewTemplate = `INSERT /* tidings:template-new */ INTO t_msg_template (` + templateColumns + `)
		VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, UTC_TIMESTAMP(3), UTC_TIMESTAMP(3))`
	// The newest version of each variant, in any status but deleted, and the newest that messages may use.
	sqlTemplates = `SELECT /* tidings:templates */ ` + templateColumns + ` FROM t_msg_template AS t
		WHERE source_id = ? AND template_id = ? AND status <> 4 ORDER BY channel, version DESC`
	sqlTemplateVersion = `SELECT /* tidings:template-version */ ` + templateColumns + ` FROM t_msg_template
		WHERE source_id = ? AND template_id = ? AND channel = ? AND version = ?`
	sqlListTemplates = `SELECT /* tidings:template-list */ ` + templateColumns + ` FROM t_msg_template AS t
		WHERE (? = '' OR source_id = ?) AND (source_id, template_id, channel) > (?, ?, ?) AND status <> 4
		AND version = (SELECT MAX(version) FROM t_msg_template AS newer WHERE newer.source_id = t.source_id AND newer.template_id = t.template_id AND newer.channel = t.channel AND newer.status <> 4)
		ORDER BY source_id, template_id, channel LIMIT ?`
	sqlLockTemplate = `SELECT /* tidings:template-lock */ ` + templateColumns + ` FROM t_msg_template
		WHERE source_id = ? AND template_id = ? AND channel = ? ORDER BY version DESC LIMIT 1 FOR UPDATE`
	sqlTemplateStatus = `UPDATE /* tidings:template-status */ t_msg_template SET status = ?, modify_time = UTC_TIMESTAMP(3)
		WHERE source_id = ? AND template_id = ? AND channel = ? AND version = ? AND status = 1`
	sqlDeleteTemplate = `UPDATE /* tidings:template-delete */ t_msg_template SET status = 4, modify_time = UTC_TIMESTAMP(3)
		WHERE source_id = ? AND template_id = ? AND status <> 4`
)

// ErrNotWaiting says that a version has been reviewed before.
var ErrNotWaiting = errors.New("the version does not wait for review")

// CreateTemplate stores the first version of a variant, or the next one after a deleted one. ErrExists when the variant is there.
func (s *Store) CreateTemplate(ctx context.Context, by string, t *Template) error {
	return s.newVersion(ctx, by, "template.create", t.SourceID, t.ID, t.Channel, func(newest *Template) (*Template, error) {
		if newest != nil && newest.Status != TemplateDeleted {
			return nil, fmt.Errorf("template %q for %s: %w", t.ID, t.Channel, ErrExists)
		}
		return t, nil
	}, t)
}

// UpdateTemplate stores a new version of a variant, made by change of the newest one, and returns it. ErrNotFound.
func (s *Store) UpdateTemplate(ctx context.Context, by, source, id string, channel msg.Channel, change func(*Template) error) (*Template, error) {
	var made Template
	err := s.newVersion(ctx, by, "template.update", source, id, channel, func(newest *Template) (*Template, error) {
		if newest == nil || newest.Status == TemplateDeleted {
			return nil, fmt.Errorf("template %w", ErrNotFound)
		}
		made = *newest
		return &made, change(&made)
	}, &made)
	return &made, err
}

func (s *Store) newVersion(ctx context.Context, by, action, source, id string, channel msg.Channel, make func(newest *Template) (*Template, error), made *Template) error {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	defer s.templates.forget()
	err := s.tx(ctx, func(tx *sqlx.Tx) error {
		newest, err := lockTemplate(ctx, tx, source, id, channel)
		if err != nil {
			return err
		}
		t, err := make(newest)
		if err != nil {
			return err
		}
		t.Version = 1
		if newest != nil {
			t.Version = newest.Version + 1
		}
		t.Created = s.Now().Truncate(time.Millisecond)
		t.Modified = t.Created
		if _, err := tx.ExecContext(ctx, sqlNewTemplate, t.SourceID, t.ID, t.Channel, t.Version, t.Name, t.RelTemplateID, t.SignName, t.Subject, t.Content,
			t.HTML, t.Category, t.Policy, t.Sensitive, t.Status); err != nil {
			return err
		}
		*made = *t
		return audit(ctx, tx, by, action, templateName(t), "status "+t.Status.String())
	})
	if isDuplicate(err) { // two callers at once made the same first version
		err = fmt.Errorf("template %q: %w", id, ErrExists)
	}
	return public(err)
}

func templateName(t *Template) string {
	return t.SourceID + "/" + t.ID + "/" + t.Channel.String() + "/" + strconv.FormatUint(uint64(t.Version), 10)
}

// lockTemplate finds the newest version of a variant, deleted or not; nil: there is none.
func lockTemplate(ctx context.Context, tx *sqlx.Tx, source, id string, channel msg.Channel) (*Template, error) {
	var t Template
	err := tx.GetContext(ctx, &t, sqlLockTemplate, source, id, channel)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, nil
	}
	return &t, err
}

// ReviewTemplate approves or rejects a version that waits. ErrNotFound, ErrNotWaiting.
func (s *Store) ReviewTemplate(ctx context.Context, by, source, id string, channel msg.Channel, version uint32, approve bool) error {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	defer s.templates.forget()
	status, action := TemplateRejected, "template.reject"
	if approve {
		status, action = TemplateNormal, "template.approve"
	}
	return public(s.tx(ctx, func(tx *sqlx.Tx) error {
		var t Template
		err := tx.GetContext(ctx, &t, sqlTemplateVersion, source, id, channel, version)
		if errors.Is(err, sql.ErrNoRows) || (err == nil && t.Status == TemplateDeleted) {
			return fmt.Errorf("template %w", ErrNotFound)
		}
		if err != nil {
			return err
		}
		res, err := tx.ExecContext(ctx, sqlTemplateStatus, status, source, id, channel, version)
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil || n == 0 {
			return errors.Join(err, ErrNotWaiting)
		}
		return audit(ctx, tx, by, action, templateName(&t), "")
	}))
}

// DeleteTemplate takes a template out of use, all its variants and versions. Messages that were accepted with it are sent.
// ErrNotFound.
func (s *Store) DeleteTemplate(ctx context.Context, by, source, id string) error {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	defer s.templates.forget()
	return public(s.tx(ctx, func(tx *sqlx.Tx) error {
		res, err := tx.ExecContext(ctx, sqlDeleteTemplate, source, id)
		if err != nil {
			return err
		}
		if n, err := res.RowsAffected(); err != nil || n == 0 {
			return errors.Join(err, fmt.Errorf("template %w", ErrNotFound))
		}
		return audit(ctx, tx, by, "template.delete", source+"/"+id, "")
	}))
}

// TemplateVersions lists all versions of a template that are not deleted: by channel, the newest first.
func (s *Store) TemplateVersions(ctx context.Context, source, id string) (versions []Template, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	if err = s.db.SelectContext(ctx, &versions, sqlTemplates, source, id); err == nil && len(versions) == 0 {
		err = fmt.Errorf("template %w", ErrNotFound)
	}
	return versions, public(err)
}

// TemplateVersion finds one version, whatever its status: a message keeps the version that it was accepted with. ErrNotFound.
func (s *Store) TemplateVersion(ctx context.Context, source, id string, channel msg.Channel, version uint32) (*Template, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	var t Template
	err := s.db.GetContext(ctx, &t, sqlTemplateVersion, source, id, channel, version)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, fmt.Errorf("template %w", ErrNotFound)
	}
	return &t, public(err)
}

// TemplateCursor is where a list of templates goes on.
type TemplateCursor struct {
	SourceID, ID string
	Channel      msg.Channel
}

// Templates lists the newest version of each variant. An empty source means all.
func (s *Store) Templates(ctx context.Context, source string, after TemplateCursor, limit int) (list []Template, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	err = s.db.SelectContext(ctx, &list, sqlListTemplates, source, source, after.SourceID, after.ID, after.Channel, limit)
	return list, public(err)
}

// templates is a copy of what messages may use: by source and id, the newest normal version for each channel.
type templates struct {
	mu      sync.Mutex
	entries map[templateKey]templateEntry
	changes int
}

type templateKey struct{ source, id string }

type templateEntry struct {
	loaded   time.Time
	variants map[msg.Channel]*Template
	waiting  bool // there are versions, and none has passed the review
}

const (
	templatesFresh = time.Second
	mostTemplates  = 10_000
)

func (c *templates) forget() {
	c.mu.Lock()
	c.entries = nil
	c.changes++
	c.mu.Unlock()
}

// ErrNotReviewed says that no version of a template has passed the review.
var ErrNotReviewed = errors.New("the template waits for review")

// UsableTemplate finds the versions of a template that new messages get, by channel: the newest normal ones, as they were at most
// a second ago. ErrNotFound, ErrNotReviewed.
func (s *Store) UsableTemplate(ctx context.Context, source, id string) (map[msg.Channel]*Template, error) {
	c := &s.templates
	key := templateKey{source, id}
	c.mu.Lock()
	entry, ok := c.entries[key]
	changes := c.changes
	c.mu.Unlock()
	if !ok || time.Since(entry.loaded) > templatesFresh {
		loaded := time.Now()
		versions, err := s.TemplateVersions(ctx, source, id)
		if err != nil && !errors.Is(err, ErrNotFound) {
			return nil, err
		}
		entry = templateEntry{loaded: loaded, variants: map[msg.Channel]*Template{}, waiting: len(versions) > 0}
		for i := range versions {
			t := &versions[i]
			if t.Status == TemplateNormal && entry.variants[t.Channel] == nil {
				entry.variants[t.Channel], entry.waiting = t, false
			}
		}
		c.mu.Lock()
		if len(c.entries) >= mostTemplates || c.entries == nil {
			c.entries = map[templateKey]templateEntry{}
		}
		if c.changes == changes { // else what was read may be what was changed
			c.entries[key] = entry
		}
		c.mu.Unlock()
	}
	switch {
	case len(entry.variants) > 0:
		return entry.variants, nil
	case entry.waiting:
		return nil, ErrNotReviewed
	}
	return nil, fmt.Errorf("template %w", ErrNotFound)
}
