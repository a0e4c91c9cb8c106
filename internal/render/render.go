// Package render fills templates: `{{username}}`, `{{order.no}}`, {{if}}, {{range}}, {{with}} and a short list of functions.
// It is text/template and html/template over a rewritten tree: names stand for variables, every one that is missing is
// reported at once, and nothing a template says can take more than a bounded time, memory or output. Templates reach no
// file, no environment and no network.
package render

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	htmltemplate "html/template"
	"io"
	"slices"
	"strings"
	texttemplate "text/template"
	"text/template/parse"
)

// Escape says what a template's values are escaped for.
type Escape bool

// The kinds of escaping.
const (
	None Escape = false // plain text: SMS, subjects, bots, whose providers put the text into JSON themselves
	HTML Escape = true  // by the place in the document: text, attribute, URL, script
)

// Limits of what rendering may cost.
const (
	MaxText  = 64 << 10 // bytes of a text or a subject
	MaxHTML  = 1 << 20  // bytes of an HTML part
	maxSteps = 100_000  // calls of functions, look-ups and rounds of {{range}}
	maxWork  = 8 << 20  // bytes that functions may produce
	maxDepth = 30       // of nested blocks and parentheses
)

// Error is a fault in a template or in what it was given, in words for the caller.
type Error struct{ Text string }

func (e *Error) Error() string { return e.Text }

func faultf(format string, args ...any) error { return &Error{fmt.Sprintf(format, args...)} }

// MissingError names the variables that a template needs and was not given.
type MissingError struct{ Names []string }

func (e *MissingError) Error() string { return "missing variables: " + strings.Join(e.Names, ", ") }

// Template is a compiled template, safe for concurrent use.
type Template struct {
	exec  func(io.Writer, any) error
	limit int
}

// Compile reads a template. Errors are *Error.
func Compile(source string, escape Escape) (*Template, error) {
	tree := parse.New("template")
	tree.Mode = parse.SkipFuncCheck
	trees := map[string]*parse.Tree{}
	if _, err := tree.Parse(source, "{{", "}}", trees); err != nil {
		return nil, syntax(err)
	}
	if len(trees) > 1 || (len(trees) == 1 && trees["template"] == nil) {
		return nil, faultf("define and block are not available")
	}
	w := rewriter{}
	w.list(tree.Root)
	if w.err != nil {
		return nil, w.err
	}
	if escape == HTML {
		return compileHTML(tree)
	}
	t, err := texttemplate.New("template").Funcs(functions).AddParseTree("template", tree)
	if err != nil {
		return nil, syntax(err)
	}
	return &Template{exec: t.Execute, limit: MaxText}, nil
}

func compileHTML(tree *parse.Tree) (*Template, error) {
	t, err := htmltemplate.New("template").Funcs(htmltemplate.FuncMap(functions)).AddParseTree("template", tree)
	if err != nil {
		return nil, syntax(err)
	}
	// What to escape for is found out at the first execution: faults of the document are to show now.
	var escaping *htmltemplate.Error
	if err := t.Execute(io.Discard, &scope{run: &run{}}); errors.As(err, &escaping) {
		return nil, faultf("%s", strings.TrimPrefix(escaping.Description, "template: "))
	}
	return &Template{exec: t.Execute, limit: MaxHTML}, nil
}

// syntax words the parser's errors: "template: template:1: unexpected …" begins with nothing that the caller knows.
func syntax(err error) error {
	text := strings.TrimPrefix(err.Error(), "template: template:")
	return faultf("line %s", text)
}

// Render fills a template with variables, as JSON decodes them with numbers kept as json.Number. Errors are *MissingError
// and *Error.
func (t *Template) Render(variables map[string]any) (string, error) {
	r := &run{root: variables}
	out := &limited{most: t.limit}
	err := t.exec(out, &scope{value: variables, run: r})
	if len(r.missing) > 0 {
		return "", &MissingError{r.missing}
	}
	if err == nil {
		return out.String(), nil
	}
	var own *Error
	if errors.As(err, &own) {
		return "", own
	}
	return "", faultf("cannot be filled: %s", plain(err))
}

// plain is the part of an execution's error that says what is wrong; the rest names our functions.
func plain(err error) string {
	text := err.Error()
	if i := strings.LastIndex(text, ">: "); i >= 0 {
		text = text[i+3:]
	}
	return text
}

// limited keeps up to a number of bytes.
type limited struct {
	strings.Builder
	most int
}

func (l *limited) Write(p []byte) (int, error) {
	if l.Len()+len(p) > l.most {
		return 0, faultf("fills up to more than %d bytes", l.most)
	}
	return l.Builder.Write(p)
}

// run is one execution: what it has cost, and what it missed.
type run struct {
	root    map[string]any
	missing []string
	steps   int
	work    int
}

func (r *run) step(n int) error {
	if r.steps += n; r.steps > maxSteps {
		return faultf("takes more than %d steps", maxSteps)
	}
	return nil
}

func (r *run) produce(bytes int) error {
	if r.work += bytes; r.work > maxWork {
		return faultf("handles more than %d bytes", maxWork)
	}
	return nil
}

func (r *run) miss(path []string) {
	name := strings.Join(path, ".")
	if !slices.Contains(r.missing, name) && len(r.missing) < 100 {
		r.missing = append(r.missing, name)
	}
}

// Variables reads a JSON object, with numbers as they are written. Nothing stands for no variables.
func Variables(text []byte) (map[string]any, error) {
	if len(text) == 0 {
		return nil, nil
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	var variables map[string]any
	if err := d.Decode(&variables); err != nil {
		return nil, faultf("the params column is not a JSON object")
	}
	return variables, nil
}
