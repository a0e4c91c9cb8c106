package render

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

func variables(t testing.TB, text string) map[string]any {
	t.Helper()
	v, err := Variables([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func TestRender(t *testing.T) {
	t.Parallel()
	const order = `{"username":"Tom & Jerry","order":{"no":"A-17","total":1234567.50,"id":9007199254740993,"items":[{"name":"tea","n":2},{"name":"<b>","n":1}]},
		"due":"2026-12-31T16:30:00Z","paid":true,"zero":0,"empty":"","none":null,"tags":["a","b"],"用户":"小明","price":0.10,"big":123456789012345678901234567890}`
	for _, tt := range []struct{ source, want string }{
		{"Hello {{username}}", "Hello Tom & Jerry"},
		{"{{ username }}{{- \" \" -}}  x", "Tom & Jerry x"},
		{"{{.username}} {{$.username}}", "Tom & Jerry Tom & Jerry"},
		{"{{order.no}}/{{.order.no}}", "A-17/A-17"},
		{"{{用户}}", "小明"},
		{"{{order.id}} {{price}} {{big}}", "9007199254740993 0.10 123456789012345678901234567890"},
		{"{{if paid}}paid{{else}}open{{end}}", "paid"},
		{"{{if zero}}yes{{else}}no{{end}}{{if empty}}yes{{else}}no{{end}}{{if none}}yes{{else}}no{{end}}{{if absent}}yes{{else}}no{{end}}", "nononono"},
		{"{{if coupon}}use {{coupon.code}}{{end}}.", "."},
		{"{{if and paid (gt order.total 1000)}}big{{end}}", "big"},
		{"{{if eq order.no \"A-17\"}}it{{end}}{{if ne zero 0}}x{{end}}{{if le zero 0.0}}y{{end}}", "ity"},
		{"{{if eq order.id 9007199254740992}}same{{else}}other{{end}}", "other"},
		{"{{range order.items}}{{n}} {{name}}, {{end}}", "2 tea, 1 <b>, "},
		{"{{range order.items}}{{name}} of {{order.no}}; {{end}}", "tea of A-17; <b> of A-17; "},
		{"{{range $i, $item := order.items}}{{$i}}:{{$item.name}} {{end}}", "0:tea 1:<b> "},
		{"{{range tags}}{{.}}{{end}}", "ab"},
		{"{{range $k, $v := order.items}}{{break}}{{end}}x", "x"},
		{"{{with order}}{{no}}{{end}}{{with absent}}x{{else}}y{{end}}", "A-17y"},
		{"{{$o := order}}{{$o.no}} {{len $o.items}}", "A-17 2"},
		{"{{nick | default \"friend\"}} {{default \"x\" empty}} {{username | default \"x\"}}", "friend x Tom & Jerry"},
		{"{{upper order.no}} {{username | lower}}", "A-17 tom & jerry"},
		{"{{date due \"YYYY-MM-DD HH:mm\"}} {{date due \"MM/DD HH:mm\" \"Asia/Shanghai\"}}", "2026-12-31 16:30 01/01 00:30"},
		{"{{number order.total 2}} {{number price 1}} {{number zero}} {{number \"-1234.5\" 0}}", "1,234,567.50 0.1 0 -1,235"},
		{`{"no":{{json order.no}},"user":{{json username}}}`, `{"no":"A-17","user":"Tom \u0026 Jerry"}`},
		{"{{order.items}}", `[{"n":2,"name":"tea"},{"n":1,"name":"\u003cb\u003e"}]`},
		{"{{paid}} {{not paid}} {{or empty order.no}}", "true false A-17"},
		{"{{date}}", "today"},
		{"{{/* a remark */}}x", "x"},
		{"{{with $x := nope}}a{{else}}b{{$x}}{{end}}", "b"},
		{"{{if gt nope 3}}many{{else}}few{{end}}{{if and nope (gt nope 3)}}x{{end}}", "few"},
		{"{{range $i := order.items}}{{$i.name}}={{$i.price | default \"-\"}};{{end}}", "tea=-;<b>=-;"},
		{"{{range order.items}}{{.price | default \"-\"}}{{price}};{{end}}", "-0.10;-0.10;"},
		{"{{with order}}{{.username | default \"-\"}}{{username}}{{end}}", "-Tom & Jerry"},
		{"{{$n := nick | default \"x\"}}{{$n}}", "x"},
	} {
		params := order
		if tt.source == "{{date}}" {
			params = `{"date":"today"}`
		}
		tmpl, err := Compile(tt.source, None)
		if err != nil {
			t.Errorf("%s: %v", tt.source, err)
			continue
		}
		if got, err := tmpl.Render(variables(t, params)); err != nil || got != tt.want {
			t.Errorf("%s: %q, %v; want %q", tt.source, got, err, tt.want)
		}
	}
}

func TestRenderHTML(t *testing.T) {
	t.Parallel()
	const params = `{"name":"Tom & Jerry","link":"javascript:alert(1)","ok":"https://example.com/?a=1&b=\"2\"","s":"</script><b>'\"","items":[{"n":1},{"n":2}],"o":{"a":1},"q":"x' onmouseover='y"}`
	for _, tt := range []struct{ source, want string }{
		{"<p>{{name}}</p>", "<p>Tom &amp; Jerry</p>"},
		{`<a href="{{link}}">x</a>`, `<a href="#ZgotmplZ">x</a>`},
		{`<a href="{{ok}}">x</a>`, `<a href="https://example.com/?a=1&amp;b=%222%22">x</a>`},
		{`<i title='{{q}}'>`, `<i title='x&#39; onmouseover=&#39;y'>`},
		{`<script>var s = {{s}}, n = {{o}};</script>`, `<script>var s = "\u003c/script\u003e\u003cb\u003e'\"", n = {"a":1};</script>`},
		{"{{range items}}<li>{{n}}{{end}}{{if name}}!{{end}}{{nick | default \"<you>\"}}", "<li>1<li>2!&lt;you&gt;"},
	} {
		tmpl, err := Compile(tt.source, HTML)
		if err != nil {
			t.Errorf("%s: %v", tt.source, err)
			continue
		}
		if got, err := tmpl.Render(variables(t, params)); err != nil || got != tt.want {
			t.Errorf("%s: %s, %v; want %s", tt.source, got, err, tt.want)
		}
	}
}

func TestMissing(t *testing.T) {
	t.Parallel()
	tmpl, err := Compile("{{a}} {{b.c}} {{a}} {{range list}}{{x}}{{end}} {{upper none}} {{if maybe}}{{never}}{{end}} {{d | default 1}}", None)
	if err != nil {
		t.Fatal(err)
	}
	_, err = tmpl.Render(variables(t, `{"b":{"z":1},"none":null}`))
	var missing *MissingError
	if !errors.As(err, &missing) || !slices.Equal(missing.Names, []string{"a", "b.c", "list", "none"}) {
		t.Fatalf("%v", err)
	}
	declared, err := Compile("{{$n := nope}}Hello {{$n}}{{range $i := list}}{{$i.price}}{{end}}", None)
	if err != nil {
		t.Fatal(err)
	}
	if _, err = declared.Render(variables(t, `{"price":99,"list":[{"name":"milk"}]}`)); !errors.As(err, &missing) || !slices.Equal(missing.Names, []string{"nope", "price"}) {
		t.Fatalf("%v", err)
	}
	if _, err = tmpl.Render(variables(t, `{"a":1,"b":{"c":2},"none":"n","list":[{"y":1}]}`)); !errors.As(err, &missing) || !slices.Equal(missing.Names, []string{"x"}) {
		t.Fatalf("%v", err)
	}
}

func TestBadTemplates(t *testing.T) {
	t.Parallel()
	for _, source := range []string{
		"{{", "{{}}", "{{user name}}", "{{user-name}}", "{{if a}}", "{{end}}", "{{printf \"%1000000000d\" 1}}", "{{call x}}", "{{html a}}", "{{js a}}", "{{slice a 1}}",
		"{{index a 1}}", "{{template \"template\" .}}", "{{template \"x\"}}", "{{define \"x\"}}{{template \"x\"}}{{end}}", "{{block \"x\" .}}{{end}}", "{{get . \"a\"}}", "{{each . a}}",
		"{{if $o := a}}{{end}}", "{{find . \"a\"}}", "{{a | b}}", "{{1 2}}", "{{a.b 1}}", "{{\"x\" | 1}}", "{{nil}}", "{{$x}}", "{{env \"HOME\"}}",
		strings.Repeat("{{if a}}", 40) + strings.Repeat("{{end}}", 40), "{{" + strings.Repeat("(", 60) + "a" + strings.Repeat(")", 60) + "}}",
	} {
		if tmpl, err := Compile(source, None); err == nil {
			got, failed := tmpl.Render(map[string]any{"a": "x"})
			t.Errorf("%.60s compiles, and gives %q, %v", source, got, failed)
		}
	}
	for _, source := range []string{"<a href=\"{{if a}}'{{else}}\"{{end}}>", "<script>{{if a}}\"{{end}}</script>"} {
		if _, err := Compile(source, HTML); err == nil {
			t.Errorf("%s compiles", source)
		}
	}
}

// Whatever a template and its variables say, the time, the memory and the output are bounded.
func TestBounds(t *testing.T) {
	t.Parallel()
	list := "[" + strings.Repeat("1,", 999) + "1]"
	huge := `"` + strings.Repeat("x", 300<<10) + `"`
	for _, tt := range []struct{ source, params string }{
		{"{{range 1000000}}x{{end}}", `{}`},
		{"{{range n}}x{{end}}", `{"n":1000000}`},
		{"{{range a}}{{range a}}{{range a}}{{range a}}{{end}}{{end}}{{end}}{{end}}", `{"a":` + list + `}`},
		{"{{range a}}{{range a}}" + strings.Repeat("y", 1000) + "{{end}}{{end}}", `{"a":` + list + `}`},
		{"{{range a}}{{if upper h}}{{end}}{{end}}", `{"a":` + list + `,"h":` + huge + `}`},
		{"{{range a}}" + strings.Repeat("{{if 0}}{{end}}", 4000) + "{{end}}", `{"a":` + list + `}`},
		{"{{range a}}" + strings.Repeat("{{if eq 1 2}}{{end}}", 3000) + "{{end}}", `{"a":` + list + `}`},
		{"{{range a}}" + strings.Repeat("{{if date 0 \"H\" \"Asia/Shanghai\"}}{{end}}", 1000) + "{{end}}", `{"a":` + list + `}`},
		{"{{h}}", `{"h":` + huge + `}`},
		{"{{number n 2}}", `{"n":1e999999999}`},
		{"{{number n 2}}", `{"n":` + strings.Repeat("9", 5000) + `}`},
		{"{{number n 1000000000}}", `{"n":1}`},
		{"{{if lt n 1}}{{end}}{{date n \"YYYY\"}}", `{"n":1e999999999}`},
	} {
		tmpl, err := Compile(tt.source, None)
		if err != nil {
			continue // refused: as good
		}
		started := time.Now()
		got, err := tmpl.Render(variables(t, tt.params))
		if err == nil || time.Since(started) > 5*time.Second {
			t.Errorf("%.60s: %d bytes, %v after %v", tt.source, len(got), err, time.Since(started))
		}
		if err != nil && len(err.Error()) > 300 {
			t.Errorf("%.60s: the error has %d bytes", tt.source, len(err.Error()))
		}
	}
	deep := strings.Repeat(`{"a":`, 5000) + "1" + strings.Repeat("}", 5000)
	tmpl, err := Compile("{{a}}", None)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tmpl.Render(variables(t, deep)); err != nil {
		t.Log(err)
	}
}

func TestConcurrentUse(t *testing.T) {
	t.Parallel()
	for _, escape := range []Escape{None, HTML} {
		tmpl, err := Compile("{{name}}{{range items}}{{.}}{{end}}{{absent | default \"-\"}}", escape)
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan error)
		for i := range 16 {
			go func() {
				want := fmt.Sprintf("n%d%d-", i, i)
				got, err := tmpl.Render(map[string]any{"name": fmt.Sprintf("n%d", i), "items": []any{fmt.Sprint(i)}})
				if err == nil && got != want {
					err = fmt.Errorf("%q, want %q", got, want)
				}
				done <- err
			}()
		}
		for range 16 {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	}
}

func TestSet(t *testing.T) {
	t.Parallel()
	if _, faults := CompileSet(Source{Subject: "{{", Text: "{{x}}", HTML: "{{end}}"}); len(faults) != 2 || faults["subject"] == nil || faults["html"] == nil {
		t.Fatalf("%v", faults)
	}
	set, faults := CompileSet(Source{Subject: "For {{name}}", Text: "{{a}}", HTML: "<p>{{b}}</p>"})
	if len(faults) > 0 {
		t.Fatal(faults)
	}
	_, err := set.Render(map[string]any{})
	var missing *MissingError
	if !errors.As(err, &missing) || !slices.Equal(missing.Names, []string{"a", "b", "name"}) {
		t.Fatal(err)
	}
	got, err := set.Render(map[string]any{"name": "<Ann>", "a": "<1>", "b": "<2>"})
	if err != nil || got != (Filled{Subject: "For <Ann>", Text: "<1>", HTML: "<p>&lt;2&gt;</p>"}) {
		t.Fatalf("%+v, %v", got, err)
	}
	if _, err := set.Render(map[string]any{"name": "Ann\r\nBcc: eve@example.com", "a": "", "b": ""}); err == nil {
		t.Fatal("a header was smuggled into the subject")
	}
}

func FuzzRender(f *testing.F) {
	for _, seed := range []string{"Hello {{username}}", "{{range items}}{{.name | upper}}{{else}}none{{end}}", "<a href='{{link}}'>{{if x}}y{{end}}</a>", "{{number n 2}}{{date d \"YYYY\"}}", "{{$x := a}}{{with $x.b}}{{json .}}{{end}}"} {
		f.Add(seed, `{"username":"x","items":[{"name":"y"}],"n":1.5,"d":0,"a":{"b":[1,null,true]}}`)
	}
	f.Fuzz(func(t *testing.T, source, params string) {
		if len(source) > 4096 || len(params) > 4096 {
			return
		}
		v, err := Variables([]byte(params))
		if err != nil {
			return
		}
		for _, escape := range []Escape{None, HTML} {
			tmpl, err := Compile(source, escape)
			var own *Error
			if err != nil {
				if !errors.As(err, &own) {
					t.Fatalf("the error is not ours: %v", err)
				}
				continue
			}
			text, err := tmpl.Render(v)
			var missing *MissingError
			if err != nil && !errors.As(err, &own) && !errors.As(err, &missing) {
				t.Fatalf("the error is not ours: %v", err)
			}
			if len(text) > MaxHTML {
				t.Fatalf("%d bytes", len(text))
			}
		}
	})
}
