// Package catalog has the templates of the store, compiled. Admission asks it which version a message gets, the queue for the
// version that a message has.
package catalog

import (
	"context"
	"encoding/json"
	"fmt"

	lru "github.com/hashicorp/golang-lru/v2"

	"tidings/internal/msg"
	"tidings/internal/policy"
	"tidings/internal/render"
	"tidings/store"
)

// Catalog is safe for concurrent use.
type Catalog struct {
	store    *store.Store
	compiled *lru.Cache[key, *Version]
}

// Version is a version of a template's variant for a channel, ready to be filled.
type Version struct {
	*store.Template
	*render.Set
	own policy.Settings
}

// Over is a category's policy with what the template says over it.
func (v *Version) Over(p policy.Policy) policy.Policy {
	p, _ = p.With(v.own) // faults were told when the template was made; by hand-made ones the category's stays
	return p
}

// Policy is what a task is sent under: its category's, with what its template says over it. Where the template cannot be read, or
// there are none (c is nil), the category's holds.
func (c *Catalog) Policy(ctx context.Context, set *policy.Set, t *store.Task) policy.Policy {
	p := set.For(t.Category, t.Channel)
	if t.TemplateID == "" || c == nil {
		return p
	}
	version, err := c.Version(ctx, t.SourceID, t.TemplateID, t.Channel, t.TemplateVersion)
	if err != nil {
		return p
	}
	return version.Over(p)
}

type key struct {
	source, id string
	channel    msg.Channel
	version    uint32
}

// mostCompiled bounds the memory: a template may have 320 KiB of text.
const mostCompiled = 512

// New makes a catalogue of a store's templates.
func New(st *store.Store) *Catalog {
	compiled, err := lru.New[key, *Version](mostCompiled)
	if err != nil {
		panic(err) // only for a size of zero
	}
	return &Catalog{store: st, compiled: compiled}
}

// Usable finds the versions that new messages of a source get, by channel. The store's errors.
func (c *Catalog) Usable(ctx context.Context, source, id string) (map[msg.Channel]*Version, error) {
	variants, err := c.store.UsableTemplate(ctx, source, id)
	if err != nil {
		return nil, err
	}
	found := make(map[msg.Channel]*Version, len(variants))
	for channel, t := range variants {
		if found[channel], err = c.compile(t); err != nil {
			return nil, err
		}
	}
	return found, nil
}

// Version finds one version, whatever has become of its template since. The store's errors.
func (c *Catalog) Version(ctx context.Context, source, id string, channel msg.Channel, version uint32) (*Version, error) {
	if v, ok := c.compiled.Get(key{source, id, channel, version}); ok {
		return v, nil
	}
	t, err := c.store.TemplateVersion(ctx, source, id, channel, version)
	if err != nil {
		return nil, err
	}
	return c.compile(t)
}

// compile makes a version ready, once: what it says never changes.
func (c *Catalog) compile(t *store.Template) (*Version, error) {
	k := key{t.SourceID, t.ID, t.Channel, t.Version}
	if v, ok := c.compiled.Get(k); ok {
		return v, nil
	}
	set, faults := render.CompileSet(render.Source{Subject: t.Subject, Text: t.Content, HTML: t.HTML})
	for part, err := range faults { // it was checked when it was made: somebody has changed the row by hand
		return nil, fmt.Errorf("%s of template %s, version %d: %w", part, t.ID, t.Version, err)
	}
	v := &Version{Template: t, Set: set}
	if t.Policy != nil {
		if json.Unmarshal([]byte(*t.Policy), &v.own) != nil { // somebody has changed it by hand: the category's holds
			v.own = policy.Settings{}
		}
	}
	c.compiled.Add(k, v)
	return v, nil
}
