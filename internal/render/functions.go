package render

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"slices"
	"strconv"
	"strings"
	"sync"
	texttemplate "text/template"
	"time"
	"unicode/utf8"

	_ "time/tzdata" // zones for date, wherever the binary runs
)

// scope is a place in a template: the value that a dot stands for there, and the execution. Every dot and every variable of
// the rewritten tree is one, so that functions find their execution without a lock.
type scope struct {
	value any
	run   *run
}

// functions are what rewritten trees call. The first group is put there by the rewriter; templates can name only the others.
var functions = texttemplate.FuncMap{
	"get": get, "opt": opt, "find": find, "findOpt": findOpt, "truth": truth, "inside": inside, "each": each, "place": place,

	"default": fallback, "upper": upper, "lower": lower, "date": date, "number": number, "json": asJSON, "len": length,
	"eq": equal, "ne": unequal, "lt": less, "le": lessOrEqual, "gt": greater, "ge": greaterOrEqual, "and": and, "or": or, "not": not,
}

var available = func() map[string]bool {
	names := map[string]bool{}
	for name := range functions {
		names[name] = true
	}
	for _, hidden := range []string{"get", "opt", "find", "findOpt", "truth", "inside", "each", "place"} {
		delete(names, hidden)
	}
	return names
}()

var functionNames = func() string {
	var names []string
	for name := range available {
		names = append(names, name)
	}
	slices.Sort(names)
	return strings.Join(names, ", ")
}()

// lenient functions take absent values.
var lenient = map[string]bool{"default": true, "and": true, "or": true, "not": true}

// get walks a path from a place. What is missing, or null, is noted, and stands for nothing.
func get(at any, path ...string) (any, error) { return look(at, path, false, true) }

// opt is get where a value may be absent.
func opt(at any, path ...string) (any, error) { return look(at, path, false, false) }

// find is get for a bare name: one that the place does not have is looked for in the message's variables.
func find(at any, path ...string) (any, error) { return look(at, path, true, true) }

// findOpt is find where a value may be absent.
func findOpt(at any, path ...string) (any, error) { return look(at, path, true, false) }

func look(at any, path []string, bare, needed bool) (any, error) {
	s, ok := at.(*scope)
	if !ok {
		if at == nil { // what {{with}} did not find
			return "", nil
		}
		return at, nil
	}
	if s == nil {
		return "", nil
	}
	if err := s.run.step(1); err != nil {
		return nil, err
	}
	from := s.value
	if here, ok := from.(map[string]any); bare && (!ok || !has(here, path[0])) {
		from = s.run.root
	}
	v, found := walk(from, path)
	if !found && needed && len(path) > 0 {
		s.run.miss(path)
	}
	return printable(s.run, v)
}

func has(object map[string]any, name string) bool {
	_, ok := object[name]
	return ok
}

func walk(v any, path []string) (any, bool) {
	for _, name := range path {
		object, ok := v.(map[string]any)
		if !ok {
			return nil, false
		}
		if v, ok = object[name]; !ok {
			return nil, false
		}
	}
	return v, v != nil
}

// value is a list or an object on its way through a template. It prints as JSON.
type value struct{ any }

// String is what printing shows.
func (v value) String() string {
	text, err := json.Marshal(v.any)
	if err != nil {
		return ""
	}
	return string(text)
}

// MarshalJSON is what a script in an HTML document shows.
func (v value) MarshalJSON() ([]byte, error) { return json.Marshal(v.any) }

func printable(r *run, v any) (any, error) {
	switch v := v.(type) {
	case nil:
		return "", nil
	case string:
		return v, r.produce(len(v))
	case json.Number:
		return v, r.produce(len(v))
	case map[string]any, []any:
		return value{v}, r.produce(sizeOf(v))
	}
	return v, nil
}

// sizeOf is about what a value takes when it is printed.
func sizeOf(v any) (n int) {
	switch v := v.(type) {
	case string:
		return len(v) + 2
	case json.Number:
		return len(v)
	case []any:
		for _, item := range v {
			n += sizeOf(item) + 1
		}
	case map[string]any:
		for name, item := range v {
			n += len(name) + sizeOf(item) + 4
		}
	}
	return n + 2
}

// raw takes the wrapping off.
func raw(v any) any {
	switch v := v.(type) {
	case value:
		return v.any
	case *scope:
		return v.value
	}
	return v
}

// place makes a place of a value, for {{$x := order}}{{$x.no}}.
func place(at *scope, v any) (*scope, error) {
	return &scope{value: raw(v), run: at.run}, at.run.step(1)
}

// inside is the place that {{with}} goes to; nothing when there is nothing.
func inside(at *scope, v any) (any, error) {
	if !isTrue(v) {
		return nil, at.run.step(1)
	}
	return place(at, v)
}

// each is what {{range}} goes through.
func each(at *scope, v any) (any, error) {
	switch list := raw(v).(type) {
	case []any:
		places := make([]*scope, len(list))
		for i, item := range list {
			places[i] = &scope{value: item, run: at.run}
		}
		return places, at.run.step(len(list))
	case map[string]any:
		places := make(map[string]*scope, len(list))
		for name, item := range list {
			places[name] = &scope{value: item, run: at.run}
		}
		return places, at.run.step(len(list))
	case nil:
		return nil, nil
	case string:
		if list == "" { // missing, and noted
			return []*scope{}, nil
		}
	}
	return nil, faultf("range wants a list or an object")
}

func truth(at *scope, v any) (bool, error) { return isTrue(v), at.run.step(1) }

// isTrue: everything but nothing, false, zero, and what is empty.
func isTrue(v any) bool {
	switch v := raw(v).(type) {
	case nil:
		return false
	case bool:
		return v
	case string:
		return v != ""
	case []any:
		return len(v) > 0
	case map[string]any:
		return len(v) > 0
	}
	n, ok := rational(raw(v))
	return !ok || n.Sign() != 0
}

func fallback(at *scope, instead, v any) (any, error) {
	if !isTrue(v) {
		v = instead
	}
	return v, at.run.step(1)
}

func and(at *scope, values ...any) (any, error) {
	return firstThat(values, false), at.run.step(1 + len(values))
}

func or(at *scope, values ...any) (any, error) {
	return firstThat(values, true), at.run.step(1 + len(values))
}

func firstThat(values []any, want bool) any {
	for _, v := range values {
		if isTrue(v) == want {
			return v
		}
	}
	if len(values) == 0 {
		return false
	}
	return values[len(values)-1]
}

func not(at *scope, v any) (bool, error) { return !isTrue(v), at.run.step(1) }

func upper(at *scope, v any) (string, error) { return convert(at, v, strings.ToUpper) }

func lower(at *scope, v any) (string, error) { return convert(at, v, strings.ToLower) }

func convert(at *scope, v any, with func(string) string) (string, error) {
	text := fmt.Sprint(v)
	return with(text), errors.Join(at.run.step(1), at.run.produce(len(text)))
}

func asJSON(at *scope, v any) (string, error) {
	text, err := json.Marshal(raw(v))
	if err != nil {
		return "", faultf("json: %v", err)
	}
	return string(text), errors.Join(at.run.step(1), at.run.produce(len(text)))
}

func length(at *scope, v any) (int, error) {
	if err := at.run.step(1); err != nil {
		return 0, err
	}
	switch v := raw(v).(type) {
	case string:
		return utf8.RuneCountInString(v), nil
	case []any:
		return len(v), nil
	case map[string]any:
		return len(v), nil
	}
	return 0, faultf("len wants a text, a list or an object")
}

// maxDigits bounds numbers: 1e999999999 is ten bytes of JSON and a gigabyte of digits.
const maxDigits = 60

// rational is a number exactly as it is written.
func rational(v any) (*big.Rat, bool) {
	var text string
	switch v := v.(type) {
	case json.Number:
		text = string(v)
	case string:
		text = v
	case int:
		return new(big.Rat).SetInt64(int64(v)), true
	case float64:
		text = strconv.FormatFloat(v, 'g', -1, 64)
	default:
		return nil, false
	}
	if len(text) > 2*maxDigits {
		return nil, false
	}
	mantissa, exponent, found := strings.Cut(strings.ToLower(text), "e")
	if len(mantissa) > maxDigits || strings.ContainsAny(text, "/_xXpP") {
		return nil, false
	}
	if n, err := strconv.Atoi(exponent); found && (err != nil || n > maxDigits || n < -maxDigits) {
		return nil, false
	}
	return new(big.Rat).SetString(text)
}

// number writes a number with so many digits after the point, and groups of three before it: {{number total 2}}.
func number(at *scope, v any, digits ...any) (string, error) {
	if err := at.run.step(1); err != nil {
		return "", err
	}
	n, ok := rational(raw(v))
	if !ok {
		return "", faultf("number wants a number")
	}
	places := 0
	if len(digits) > 0 {
		p, ok := rational(raw(digits[0]))
		if !ok || !p.IsInt() || !p.Num().IsInt64() || p.Num().Int64() < 0 || p.Num().Int64() > 20 {
			return "", faultf("number wants 0 to 20 digits after the point")
		}
		places = int(p.Num().Int64())
	}
	whole, fraction, _ := strings.Cut(n.FloatString(places), ".")
	sign := ""
	if strings.HasPrefix(whole, "-") {
		sign, whole = "-", whole[1:]
	}
	for i := len(whole) - 3; i > 0; i -= 3 {
		whole = whole[:i] + "," + whole[i:]
	}
	if fraction != "" {
		fraction = "." + fraction
	}
	return sign + whole + fraction, nil
}

var layouts = strings.NewReplacer("YYYY", "2006", "MM", "01", "DD", "02", "HH", "15", "mm", "04", "ss", "05")

// date writes an instant: {{date due "YYYY-MM-DD HH:mm"}}, in a zone: {{date due "HH:mm" "Asia/Shanghai"}}.
func date(at *scope, v, layout any, zone ...any) (string, error) {
	t, err := instant(raw(v))
	if err != nil {
		return "", err
	}
	t = t.UTC()
	if len(zone) > 0 {
		name, _ := raw(zone[0]).(string)
		location := zoneOf(name)
		if location == nil {
			return "", faultf("date knows no zone %.64q", name)
		}
		t = t.In(location)
	}
	form, _ := raw(layout).(string)
	if form == "" || len(form) > 100 {
		return "", faultf("date wants a form such as YYYY-MM-DD HH:mm:ss")
	}
	return t.Format(layouts.Replace(form)), errors.Join(at.run.step(1), at.run.produce(len(form)))
}

// zones keeps those that were asked for: reading one takes longer than all else that a template may do in a step.
var zones sync.Map

func zoneOf(name string) *time.Location {
	if known, ok := zones.Load(name); ok {
		return known.(*time.Location)
	}
	location, err := time.LoadLocation(name)
	if err != nil || name == "Local" {
		return nil
	}
	zones.Store(name, location)
	return location
}

func instant(v any) (time.Time, error) {
	if text, ok := v.(string); ok {
		if t, err := time.Parse(time.RFC3339Nano, text); err == nil {
			return t, nil
		}
		if t, err := time.Parse(time.DateOnly, text); err == nil {
			return t, nil
		}
	}
	if n, ok := rational(v); ok && n.IsInt() && n.Num().IsInt64() {
		return time.UnixMilli(n.Num().Int64()), nil
	}
	return time.Time{}, faultf("date wants RFC 3339, a day, or Unix milliseconds")
}

// compare orders two numbers by value, however they are written, or two texts. What is absent is neither less nor greater
// than anything: known is false.
func compare(at *scope, a, b any) (order int, known bool, err error) {
	if err := at.run.step(1); err != nil {
		return 0, false, err
	}
	a, b = raw(a), raw(b)
	x, isNumber := rational(a)
	y, areNumbers := rational(b)
	if isNumber && areNumbers {
		return x.Cmp(y), true, nil
	}
	s, isText := a.(string)
	t, areTexts := b.(string)
	switch {
	case isText && areTexts:
		return strings.Compare(s, t), true, nil
	case (isText && s == "") || (areTexts && t == "") || a == nil || b == nil:
		return 0, false, nil
	}
	return 0, false, faultf("a comparison wants two numbers or two texts")
}

func equal(at *scope, a any, others ...any) (bool, error) {
	for _, b := range others {
		if err := at.run.step(1); err != nil {
			return false, err
		}
		p, isBool := raw(a).(bool)
		q, areBools := raw(b).(bool)
		if isBool && areBools && p == q {
			return true, nil
		}
		if c, known, err := compare(at, a, b); err == nil && known && c == 0 {
			return true, nil
		}
	}
	return false, nil
}

func unequal(at *scope, a, b any) (bool, error) {
	same, err := equal(at, a, b)
	return !same, err
}

func less(at *scope, a, b any) (bool, error) {
	c, known, err := compare(at, a, b)
	return known && c < 0, err
}

func lessOrEqual(at *scope, a, b any) (bool, error) {
	c, known, err := compare(at, a, b)
	return known && c <= 0, err
}

func greater(at *scope, a, b any) (bool, error) {
	c, known, err := compare(at, a, b)
	return known && c > 0, err
}

func greaterOrEqual(at *scope, a, b any) (bool, error) {
	c, known, err := compare(at, a, b)
	return known && c >= 0, err
}
