package server

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/validation"
	strict "github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"tidings/internal/admit"
)

// decoder reads requests of one type. It refuses what the schema of the API's description does not have, and names every
// fault at once.
type decoder struct {
	registry huma.Registry
	schema   *huma.Schema
}

func newDecoder(registry huma.Registry) *decoder {
	schema := registry.Schema(reflect.TypeFor[admit.Request](), true, "Message")
	full := registry.SchemaFromRef(schema.Ref)
	text := &huma.Schema{Type: huma.TypeString}
	full.Properties["to"].OneOf = []*huma.Schema{text, {Type: huma.TypeObject, AdditionalProperties: text}}
	for _, field := range instants {
		full.Properties[field].OneOf = []*huma.Schema{text, {Type: huma.TypeInteger}}
	}
	params := full.Properties["params"]
	params.Type, params.ContentEncoding, params.Items, params.AdditionalProperties = huma.TypeObject, "", nil, true
	return &decoder{registry: registry, schema: schema}
}

// instants are the fields that are text or a number.
var instants = []string{"send_at", "expire_time"}

// decode reads a request. Problems are faults of single fields; the request then holds what could be read.
func (d *decoder) decode(body []byte) (*admit.Request, []admit.Problem, error) {
	// What is right is read once; only what is not is looked at closely enough to say why. Admission checks all that the schema does.
	var good admit.Request
	if err := strict.Unmarshal(body, &good, strict.RejectUnknownMembers(true)); err == nil {
		return &good, nil, nil
	}
	// This parser refuses repeated names, bytes that are not UTF-8, and half surrogates, where encoding/json would guess.
	var tree any
	if err := strict.Unmarshal(body, &tree); err != nil {
		return nil, nil, badJSON(err)
	}
	if p := tooMany(tree); p != nil {
		return &admit.Request{}, []admit.Problem{*p}, nil
	}
	path := huma.NewPathBuffer(make([]byte, 0, 64), 0)
	var result huma.ValidateResult
	huma.Validate(d.registry, d.schema, path, huma.ModeWriteToServer, tree, &result)
	var problems []admit.Problem
	for _, err := range result.Errors {
		// Fields of several shapes are left to admission, which says better what they may be.
		p := schemaProblem(err)
		if p.Field != "to" && !slices.Contains(instants, p.Field) && p.Field != "params" && len(problems) < admit.MaxProblems {
			problems = append(problems, p)
		}
	}
	var r admit.Request
	exact := json.NewDecoder(bytes.NewReader(body))
	exact.UseNumber() // a variable of 64 bits comes out as it went in
	if err := exact.Decode(&r); err != nil && len(problems) == 0 {
		return nil, nil, badJSON(err)
	}
	return &r, problems, nil
}

// tooMany finds a list or an object with more parts than any request has: naming the fault of each would take more memory than the
// request.
func tooMany(tree any) *admit.Problem {
	object, ok := tree.(map[string]any)
	if !ok {
		return nil
	}
	if len(object) > maxFields {
		return &admit.Problem{Field: "body", Code: admit.CodeInvalid, Message: "has more fields than there are"}
	}
	for field, value := range object {
		list, _ := value.([]any)
		if most := listLimits[field]; most > 0 && len(list) > most {
			return &admit.Problem{Field: field, Code: admit.CodeTooLong, Message: fmt.Sprintf("has %d items, at most %d are taken", len(list), most)}
		}
		for _, item := range list {
			if part, _ := item.(map[string]any); len(part) > maxFields {
				return &admit.Problem{Field: field, Code: admit.CodeInvalid, Message: "has items with more fields than there are"}
			}
		}
		if field == "to" || field == "params" {
			continue
		}
		if _, ok := value.(map[string]any); ok {
			return &admit.Problem{Field: clip(field), Code: admit.CodeInvalid, Message: "must not be an object"}
		}
	}
	return nil
}

const maxFields = 50

var listLimits = map[string]int{"channels": admit.MaxChannels, "attachments": admit.MaxAttachments}

// clip keeps names that a caller made up from filling the answer.
func clip(name string) string {
	if len(name) <= 100 {
		return name
	}
	return strings.ToValidUTF8(name[:100], "") + "…"
}

func badJSON(err error) error {
	p := invalidJSON.problem()
	var syntax *jsontext.SyntacticError
	if errors.As(err, &syntax) {
		p.Detail = fmt.Sprintf("The body is not one valid JSON value: %v, at byte %d.", syntax.Err, syntax.ByteOffset)
	}
	return p
}

func schemaProblem(err error) admit.Problem {
	var d *huma.ErrorDetail
	if !errors.As(err, &d) {
		return admit.Problem{Code: admit.CodeInvalid, Message: "is not what it should be"}
	}
	p := admit.Problem{Field: cmp.Or(d.Location, "body"), Code: admit.CodeInvalid, Message: d.Message}
	if name, ok := strings.CutPrefix(d.Message, "expected required property "); ok {
		name = strings.TrimSuffix(name, " to be present")
		p = admit.Problem{Field: strings.TrimPrefix(d.Location+"."+name, "."), Code: admit.CodeRequired, Message: "is missing"}
	}
	if d.Message == validation.MsgUnexpectedProperty {
		p.Code, p.Message = admit.CodeUnknown, "there is no such field"
	}
	p.Field = clip(p.Field)
	return p
}

// merge adds the problems that admission found to those of the schema. A field is named once.
func merge(schema, admission []admit.Problem) []admit.Problem {
	named := map[string]bool{}
	for _, p := range schema {
		named[p.Field] = true
	}
	all := schema
	for _, p := range admission {
		root, _, _ := strings.Cut(p.Field, "[")
		if !named[p.Field] && !named[root] {
			all = append(all, p)
		}
	}
	return all
}
