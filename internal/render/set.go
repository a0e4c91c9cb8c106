package render

import (
	"errors"
	"maps"
	"slices"
	"strings"
)

// Source is what a template says on one channel.
type Source struct {
	Subject string
	Text    string
	HTML    string
}

// Set is a source, compiled.
type Set struct {
	subject, text, html *Template
}

// Filled is a source with its variables filled in.
type Filled struct {
	Subject string
	Text    string
	HTML    string
}

// CompileSet compiles the parts of a source. The faults are by part: subject, content, html.
func CompileSet(src Source) (*Set, map[string]error) {
	var s Set
	faults := map[string]error{}
	for _, part := range []struct {
		name   string
		source string
		escape Escape
		into   **Template
	}{{"subject", src.Subject, None, &s.subject}, {"content", src.Text, None, &s.text}, {"html", src.HTML, HTML, &s.html}} {
		if part.source == "" {
			continue
		}
		t, err := Compile(part.source, part.escape)
		if err != nil {
			faults[part.name] = err
		}
		*part.into = t
	}
	if len(faults) > 0 {
		return nil, faults
	}
	return &s, nil
}

// Render fills all parts. A *MissingError names what any of them misses.
func (s *Set) Render(variables map[string]any) (f Filled, err error) {
	missing := map[string]bool{}
	for _, part := range []struct {
		name string
		t    *Template
		into *string
	}{{"subject", s.subject, &f.Subject}, {"text", s.text, &f.Text}, {"html", s.html, &f.HTML}} {
		if part.t == nil {
			continue
		}
		text, failed := part.t.Render(variables)
		var absent *MissingError
		switch {
		case errors.As(failed, &absent):
			for _, name := range absent.Names {
				missing[name] = true
			}
		case failed != nil && err == nil:
			err = faultf("the %s %v", part.name, failed)
		}
		*part.into = text
	}
	if len(missing) > 0 {
		return f, &MissingError{slices.Sorted(maps.Keys(missing))}
	}
	if err == nil && strings.ContainsFunc(f.Subject, func(r rune) bool { return r < 0x20 || (r >= 0x7f && r < 0xa0) }) {
		err = faultf("the subject would have a line break or another control character")
	}
	return f, err
}
