package server_test

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"tidings/internal/admit"
	"tidings/internal/catalog"
	"tidings/internal/explain"
	"tidings/internal/metrics"
	"tidings/internal/msg"
	"tidings/internal/policy"
	"tidings/internal/testdb"
	"tidings/server"
	"tidings/store"
)

func TestMain(m *testing.M) { os.Exit(testdb.Main(m)) }

type bundle struct {
	store *store.Store
	dsn   string
	url   string
	http  *http.Client
	key   string // the caller's; empty: none
}

// as is the same server, for a caller with another key.
func (b bundle) as(key string) *bundle {
	b.key = key
	return &b
}

func setup(t testing.TB, cfg store.Config) *bundle {
	t.Helper()
	if cfg.DSN == "" {
		cfg.DSN = testdb.New(t)
	}
	s := testdb.Open(t, cfg)
	return serve(t, s, cfg.DSN, false)
}

// serve starts a server on a store.
func serve(t testing.TB, s *store.Store, dsn string, review bool) *bundle {
	templates := catalog.New(s)
	api := server.New(server.Config{Store: s, Version: "test", Review: review, Metrics: metrics.New("test", ""), Explain: &explain.Explainer{
		Store: s, Chain: func(msg.Channel) []explain.Provider {
			return []explain.Provider{{Name: "relay", BreakerOpen: 10 * time.Second}}
		},
		Policy: func(ctx context.Context, t *store.Task) policy.Policy {
			return templates.Policy(ctx, policy.Defaults(), t)
		},
	}, Admit: &admit.Admitter{
		Policies: policy.Defaults(), Now: s.Now, Templates: templates.Usable,
		Configured: func(c msg.Channel) bool { return c == msg.Log || c == msg.Email || c == msg.Webhook },
	}})
	b := serveAPI(t, api, s)
	b.dsn = dsn
	return b
}

func serveAPI(t testing.TB, api *server.Server, s *store.Store) *bundle {
	ts := httptest.NewUnstartedServer(nil)
	ts.Config = api.Listener()
	ts.Start()
	t.Cleanup(ts.Close)
	return &bundle{store: s, url: ts.URL, http: ts.Client()}
}

// bury makes a dead letter of a message, as the queue would.
func (b *bundle) bury(t testing.TB, id string) {
	t.Helper()
	db, err := sql.Open("mysql", b.dsn+"?multiStatements=true")
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	for _, table := range []string{"t_msg_queue_high", "t_msg_queue_middle", "t_msg_queue_low"} {
		_, err := db.Exec(fmt.Sprintf(`INSERT INTO t_msg_dead SELECT * FROM %s WHERE msg_id = %s; DELETE FROM %[1]s WHERE msg_id = %[2]s;
			UPDATE t_msg_dead SET status = 5, attempt = 4, last_error = '421 try later', provider = 'relay', modify_time = UTC_TIMESTAMP(3) WHERE msg_id = %[2]s`, table, id))
		if err != nil {
			t.Fatal(err)
		}
	}
}

// content reads what a waiting message says out of its row.
func (b *bundle) content(t testing.TB, id uint64) (c store.Content) {
	t.Helper()
	db, err := sql.Open("mysql", b.dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	var text []byte
	if err := db.QueryRow("SELECT content FROM t_msg_queue_middle WHERE msg_id = ?", id).Scan(&text); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &c); err != nil {
		t.Fatal(err)
	}
	return c
}

type answer struct {
	status int
	header http.Header
	body   map[string]any
	raw    string
}

func (b *bundle) do(t testing.TB, method, path, body string, header ...string) answer {
	t.Helper()
	req, err := http.NewRequest(method, b.url+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	if b.key != "" {
		req.Header.Set("Authorization", "Bearer "+b.key)
	}
	for i := 0; i < len(header); i += 2 {
		if header[i] == "Host" {
			req.Host = header[i+1]
		}
		req.Header.Set(header[i], header[i+1])
	}
	res, err := b.http.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	raw, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	a := answer{status: res.StatusCode, header: res.Header, raw: string(raw)}
	if err := json.Unmarshal(raw, &a.body); err != nil && len(raw) > 0 {
		t.Fatalf("%s %s answers no JSON: %s", method, path, raw)
	}
	return a
}

func (a answer) fields() (names []string) {
	errs, _ := a.body["errors"].([]any)
	for _, e := range errs {
		names = append(names, e.(map[string]any)["field"].(string))
	}
	return names
}

func TestSend(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	a := b.do(t, "POST", "/api/messages", `{"channels":["log"],"to":"someone","text":"hi","request_id":"r1"}`)
	if a.status != 202 || a.body["status"] != "dispatched" || a.body["duplicate"] != nil {
		t.Fatalf("%d %s", a.status, a.raw)
	}
	if want := []any{map[string]any{"channel": "log", "status": "ready"}}; !reflect.DeepEqual(a.body["tasks"], want) {
		t.Fatalf("tasks %v", a.body["tasks"])
	}
	id, ok := a.body["msg_id"].(string)
	if n, err := strconv.ParseUint(id, 10, 64); !ok || err != nil || n < 1<<53 {
		t.Fatalf("msg_id %v is no text of a number beyond 2^53", a.body["msg_id"])
	}
	again := b.do(t, "POST", "/api/messages", `{"text":"hi","to":"someone","channels":["log"],"request_id":"r1"}`)
	if again.status != 200 || again.body["msg_id"] != id || again.body["duplicate"] != true || again.body["status"] != "dispatched" {
		t.Fatalf("again: %d %s", again.status, again.raw)
	}
	byHeader := b.do(t, "POST", "/api/messages", `{"channels":["log"],"to":"someone","text":"hi"}`, "Idempotency-Key", "r1")
	if byHeader.status != 200 || byHeader.body["msg_id"] != id {
		t.Fatalf("by header: %d %s", byHeader.status, byHeader.raw)
	}
	other := b.do(t, "POST", "/api/messages", `{"channels":["log"],"to":"someone","text":"another","request_id":"r1"}`)
	if other.status != 409 || other.body["code"] != "idempotency_conflict" {
		t.Fatalf("another body: %d %s", other.status, other.raw)
	}
	m := b.do(t, "GET", "/api/messages/"+id, "")
	if m.status != 200 || m.body["status"] != "dispatched" || m.body["request_id"] != "r1" || m.body["category"] != "notification" || m.body["priority"] != "middle" {
		t.Fatalf("get: %d %s", m.status, m.raw)
	}
	found := b.do(t, "GET", "/api/messages?request_id=r1", "")
	if list, _ := found.body["data"].([]any); found.status != 200 || len(list) != 1 || list[0].(map[string]any)["msg_id"] != id {
		t.Fatalf("find: %d %s", found.status, found.raw)
	}
	none := b.do(t, "GET", "/api/messages?request_id=r2", "")
	if list, _ := none.body["data"].([]any); none.status != 200 || len(list) != 0 {
		t.Fatalf("find none: %d %s", none.status, none.raw)
	}
}

func TestDefaultsByCategory(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	for _, tt := range []struct {
		category, priority string
		limit              float64
		expiry             time.Duration
	}{
		{"verification", "high", 4, 5 * time.Minute},
		{"notification", "middle", 5, 24 * time.Hour},
		{"marketing", "low", 4, 6 * time.Hour},
	} {
		a := b.do(t, "POST", "/api/messages", `{"channels":["log"],"to":"x","text":"hi","category":"`+tt.category+`"}`)
		m := b.do(t, "GET", "/api/messages/"+a.body["msg_id"].(string), "")
		task := m.body["tasks"].([]any)[0].(map[string]any)
		due, _ := time.Parse(time.RFC3339Nano, m.body["due_time"].(string))
		expire, _ := time.Parse(time.RFC3339Nano, m.body["expire_time"].(string))
		if m.body["priority"] != tt.priority || task["attempt_limit"] != tt.limit || expire.Sub(due)-tt.expiry > time.Second || tt.expiry-expire.Sub(due) > time.Second {
			t.Errorf("%s: %s", tt.category, m.raw)
		}
	}
}

// Every faulty field is named at once, and nothing is used up by it.
func TestFaults(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	for _, tt := range []struct {
		name, body string
		status     int
		code       string
		fields     []string
	}{
		{"nothing", `{}`, 422, "validation_failed", []string{"channels", "to", "text"}},
		{
			"everything", `{"channels":["fax"],"to":7,"priority":"top","category":"spam","subject":"a\r\nBcc: x","ttl":"soon","bcc":"x","request_id":"` + strings.Repeat("k", 256) + `"}`, 422, "validation_failed",
			[]string{"request_id", "category", "priority", "bcc", "to", "channels[0]", "subject", "text", "ttl"},
		},
		{"wrong types", `{"channels":"log","to":["x"],"text":5,"subject":["a"]}`, 422, "validation_failed", []string{"channels", "subject", "text", "to"}},
		{"not configured", `{"channels":["sms"],"to":"+8613800000000","text":"hi"}`, 422, "channel_not_configured", []string{"channels[0]"}},
		{"a channel twice", `{"channels":["log","log"],"to":"a@example.com","text":"hi"}`, 422, "validation_failed", []string{"channels[1]"}},
		{"one address that does not fit all channels", `{"channels":["log","email"],"to":"ann","subject":"s","text":"hi"}`, 422, "validation_failed", []string{"to"}},
		{"params without a template", `{"channels":["log"],"to":"x","text":"hi","params":{"a":1}}`, 422, "validation_failed", []string{"params"}},
		{"a template and a text", `{"channels":["log"],"to":"x","text":"hi","template_id":"none"}`, 422, "validation_failed", []string{"template_id"}},
		{"an unknown template", `{"channels":["log"],"to":"x","template_id":"none"}`, 422, "validation_failed", []string{"template_id"}},
		{"10,000 deep", strings.Repeat(`{"a":`, 10_000) + "1" + strings.Repeat("}", 10_000), 422, "validation_failed", []string{"channels", "to", "text", "a"}},
		{"no address", `{"channels":["log"],"to":{},"text":"hi"}`, 422, "validation_failed", []string{"to.log"}},
		{"an address of another channel", `{"channels":["log"],"to":{"log":"x","sms":"y"},"text":"hi"}`, 422, "validation_failed", []string{"to.sms"}},
		{"an address that is none", `{"channels":["email"],"to":{"email":"ann"},"subject":"s","text":"hi"}`, 422, "validation_failed", []string{"to.email"}},
		{"a line break in the address", `{"channels":["email"],"to":"Ann\r\nBcc: b@example.com <a@example.com>","subject":"s","text":"hi"}`, 422, "validation_failed", []string{"to"}},
		{"NUL in the subject", `{"channels":["email"],"to":"a@example.com","subject":"s\u0000","text":"hi"}`, 422, "validation_failed", []string{"subject"}},
		{"mail without a subject", `{"channels":["email"],"to":"a@example.com","text":"hi"}`, 422, "validation_failed", []string{"subject"}},
		{"html alone on a channel of text", `{"channels":["log"],"to":"x","html":"<p>hi"}`, 422, "validation_failed", []string{"text"}},
		{"past", `{"channels":["log"],"to":"x","text":"hi","expire_time":"2020-01-01T00:00:00Z"}`, 422, "validation_failed", []string{"expire_time"}},
		{"no offset", `{"channels":["log"],"to":"x","text":"hi","expire_time":"2030-01-01T00:00:00"}`, 422, "validation_failed", []string{"expire_time"}},
		{"both ends", `{"channels":["log"],"to":"x","text":"hi","ttl":"10m","expire_time":4102444800000}`, 422, "validation_failed", []string{"ttl"}},
		{"negative ttl", `{"channels":["log"],"to":"x","text":"hi","ttl":"-1s"}`, 422, "validation_failed", []string{"ttl"}},
		{"no JSON", `{"channels":`, 400, "invalid_json", nil},
		{"blank", ` `, 400, "invalid_json", nil},
		{"more than one value", `{} {}`, 400, "invalid_json", nil},
		{"a name twice", `{"text":"a","text":"b"}`, 400, "invalid_json", nil},
		{"half a surrogate", `{"text":"\ud83d"}`, 400, "invalid_json", nil},
		{"not UTF-8", "{\"text\":\"\xff\"}", 400, "invalid_json", nil},
		{"a list", `[]`, 422, "validation_failed", []string{"body", "channels", "to", "text"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			a := b.do(t, "POST", "/api/messages", tt.body)
			if a.status != tt.status || a.body["code"] != tt.code || a.header.Get("Content-Type") != "application/problem+json" {
				t.Fatalf("%d %s", a.status, a.raw)
			}
			if got := a.fields(); !sameNames(got, tt.fields) {
				t.Errorf("faulty fields %v, want %v", got, tt.fields)
			}
		})
	}
	after := b.do(t, "POST", "/api/messages", `{"channels":["log"],"to":"x","text":"hi"}`)
	if after.status != 202 {
		t.Fatalf("after all that: %d", after.status)
	}
}

func sameNames(a, b []string) bool {
	count := map[string]int{}
	for _, n := range a {
		count[n]++
	}
	for _, n := range b {
		count[n]--
	}
	for _, n := range count {
		if n != 0 {
			return false
		}
	}
	return true
}

func TestHTTPHabits(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	const good = `{"channels":["log"],"to":"x","text":"hi"}`
	if a := b.do(t, "POST", "/api/messages", good, "Content-Type", "text/plain"); a.status != 415 {
		t.Errorf("text/plain: %d", a.status)
	}
	if a := b.do(t, "POST", "/api/messages", good, "Content-Encoding", "gzip"); a.status != 415 {
		t.Errorf("compressed: %d", a.status)
	}
	if a := b.do(t, "POST", "/api/templates", good, "Content-Type", "text/plain"); a.status != 415 {
		t.Errorf("text/plain to another route: %d %s", a.status, a.raw)
	}
	for _, body := range []string{`{"channel":"log","channel":"log"}`, `{} {}`, `{`, "", strings.Repeat("[", 20_000)} {
		if a := b.do(t, "POST", "/api/templates", body); a.status != 400 || a.body["code"] != "invalid_json" {
			t.Errorf("%.40s to another route: %d %s", body, a.status, a.raw)
		}
	}
	if a := b.do(t, "POST", "/api/messages", good, "Content-Type", "application/json; charset=utf-8"); a.status != 202 {
		t.Errorf("with a charset: %d %s", a.status, a.raw)
	}
	if a := b.do(t, "POST", "/api/messages", good, "Sec-Fetch-Site", "cross-site"); a.status != 403 || a.body["code"] != "cross_origin" {
		t.Errorf("from another site's page: %d %s", a.status, a.raw)
	}
	if a := b.do(t, "GET", "/api/messages", "", "Host", "evil.example:8080", "Sec-Fetch-Site", "same-origin"); a.status != 403 || a.body["code"] != "foreign_host" {
		t.Errorf("a name that was rebound to this machine: %d %s", a.status, a.raw)
	}
	if res, err := b.http.Post(b.url+"/api/messages", "application/json", strings.NewReader("")); err != nil || res.StatusCode != 400 {
		t.Errorf("an empty body: %v", err)
	} else {
		res.Body.Close()
	}
	if a := b.do(t, "PUT", "/api/messages", good); a.status != 405 || a.body["code"] != "method_not_allowed" {
		t.Errorf("PUT: %d %s", a.status, a.raw)
	}
	if a := b.do(t, "GET", "/api/nothing", ""); a.status != 404 || a.body["code"] != "not_found" {
		t.Errorf("unknown path: %d %s", a.status, a.raw)
	}
	for _, id := range []string{"0", "1", "abc", "-5", "99999999999999999999999999", "18446744073709551615"} {
		if a := b.do(t, "GET", "/api/messages/"+id, ""); a.status != 404 {
			t.Errorf("id %s: %d %s", id, a.status, a.raw)
		}
	}
	if a := b.do(t, "GET", "/api/messages?color=red", ""); a.status != 422 {
		t.Errorf("unknown parameter: %d %s", a.status, a.raw)
	}
	if a := b.do(t, "GET", "/livez", "", "X-Request-Id", "abc-123"); a.status != 200 || a.header.Get("X-Request-Id") != "abc-123" {
		t.Errorf("livez: %d, id %q", a.status, a.header.Get("X-Request-Id"))
	}
	if a := b.do(t, "GET", "/readyz", "", "X-Request-Id", "no spaces\tor such"); a.status != 200 || len(a.header.Get("X-Request-Id")) != 16 {
		t.Errorf("readyz: %d, id %q", a.status, a.header.Get("X-Request-Id"))
	}
	both := b.do(t, "POST", "/api/messages", `{"channels":["log"],"to":"x","text":"hi","request_id":"a"}`, "Idempotency-Key", "b")
	if both.status != 422 || !sameNames(both.fields(), []string{"request_id"}) {
		t.Errorf("two keys: %d %s", both.status, both.raw)
	}
}

func TestOpenAPI(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	a := b.do(t, "GET", "/openapi.json", "")
	paths, _ := a.body["paths"].(map[string]any)
	for _, path := range []string{"/api/messages", "/api/messages/{id}", "/livez", "/readyz"} {
		if paths[path] == nil {
			t.Errorf("%s is not described", path)
		}
	}
	if !strings.Contains(a.raw, `"Every faulty field."`) || !strings.Contains(a.raw, `"200"`) {
		t.Error("the description lacks our errors, or the answer to a repetition")
	}
	if !strings.Contains(a.raw, `"ttl"`) || strings.Contains(a.raw, "unpkg") {
		t.Error("the description lacks the request, or loads from elsewhere")
	}
}

// Texts at the edges come out exactly as they went in.
func TestExact(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	for name, m := range map[string]map[string]any{
		"300 Chinese characters and 100 emoji": {"channels": []string{"email"}, "to": "a@example.com", "subject": strings.Repeat("漢", 300) + strings.Repeat("😀", 100), "text": "hi"},
		"quotes, backslashes, question marks":  {"channels": []string{"log"}, "to": `a"b\c?d'e`, "text": `a"b\c?d'e -- /* ; */ %s`, "subject": `\`},
		"control characters in the text":       {"channels": []string{"log"}, "to": "x", "text": "a\r\n\t\u0000\u0001\u2028b"},
		"markup":                               {"channels": []string{"log"}, "to": "x", "text": "<b>&amp;</b>"},
		"a long text":                          {"channels": []string{"log"}, "to": "x", "text": strings.Repeat("é", 500_000)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			body, err := json.Marshal(m)
			if err != nil {
				t.Fatal(err)
			}
			a := b.do(t, "POST", "/api/messages", string(body))
			if a.status != 202 {
				t.Fatalf("%d %s", a.status, a.raw)
			}
			id, _ := strconv.ParseUint(a.body["msg_id"].(string), 10, 64)
			v, err := b.store.Message(context.Background(), id)
			if err != nil {
				t.Fatal(err)
			}
			content := b.content(t, id)
			subject, _ := m["subject"].(string)
			if content.Text != m["text"] || content.Subject != subject || v.Tasks[0].Receiver != m["to"] {
				t.Fatalf("%.100q %.100q %q", content.Text, content.Subject, v.Tasks[0].Receiver)
			}
		})
	}
}

func TestMailAddresses(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	for to, want := range map[string]string{
		"ann@example.com":                           "ann@example.com",
		" ann@example.com ":                         "ann@example.com",
		"Ann Lee <ann@example.com>":                 `"Ann Lee" <ann@example.com>`,
		`"O'Brien, \"Pat\"" <pat@example.com>`:      `"O'Brien, \"Pat\"" <pat@example.com>`,
		"张三 <zhang@example.com>":                    `"张三" <zhang@example.com>`,
		"ann@例え.jp":                                 "ann@xn--r8jz45g.jp",
		`"much more unusual"@example.com`:           `"much more unusual"@example.com`,
		"zed":                                       "",
		"zed@":                                      "",
		"a@b@c":                                     "",
		"ann@example.com, bob@example.com":          "",
		"用户@example.com":                            "",
		strings.Repeat("a", 65) + "@example.com":    "",
		"a@" + strings.Repeat("a", 260) + ".com":    "",
		strings.Repeat("n", 129) + " <a@b.example>": "",
	} {
		body, _ := json.Marshal(map[string]any{"channels": []string{"email"}, "to": to, "subject": "s", "text": "t"})
		a := b.do(t, "POST", "/api/messages", string(body))
		if want == "" {
			if a.status != 422 {
				t.Errorf("%q: %d %s", to, a.status, a.raw)
			}
			if strings.Contains(a.raw, to) {
				t.Errorf("%q is repeated in the answer", to)
			}
			continue
		}
		if a.status != 202 {
			t.Errorf("%q: %d %s", to, a.status, a.raw)
			continue
		}
		m := b.do(t, "GET", "/api/messages/"+a.body["msg_id"].(string), "")
		if got := m.body["tasks"].([]any)[0].(map[string]any)["receiver"]; got != want {
			t.Errorf("%q is stored as %q, want %q", to, got, want)
		}
	}
}

// Bodies of just 1 MiB, many at once, are taken; one byte more is not.
func TestBigBodies(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{Timeout: 30 * time.Second})
	const frame = `{"channels":["log"],"to":"x","text":""}`
	exact := strings.Replace(frame, `""`, `"`+strings.Repeat(`\"`, (1<<20-len(frame))/2)+`"`, 1)
	exact += strings.Repeat(" ", 1<<20-len(exact))
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			if a := b.do(t, "POST", "/api/messages", exact); a.status != 202 {
				t.Errorf("%d bytes: %d %s", len(exact), a.status, a.raw)
			}
		})
	}
	wg.Wait()
	if a := b.do(t, "POST", "/api/messages", exact+" "); a.status != 413 || a.body["code"] != "body_too_large" {
		t.Errorf("one byte more: %d %s", a.status, a.raw)
	}
}

func TestWait(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	id := b.do(t, "POST", "/api/messages", `{"channels":["log"],"to":"x","text":"hi"}`).body["msg_id"].(string)
	started := time.Now()
	if a := b.do(t, "GET", "/api/messages/"+id+"?wait=100ms", ""); a.body["status"] != "dispatched" || time.Since(started) < 100*time.Millisecond {
		t.Fatalf("after %v: %s", time.Since(started), a.raw)
	}
	done := make(chan answer, 1)
	go func() { done <- b.do(t, "GET", "/api/messages/"+id+"?wait=30s", "") }()
	claimed, err := b.store.Claim(context.Background(), msg.Middle, msg.Log, 1, time.Time{})
	if err != nil || len(claimed.Tasks) != 1 {
		t.Fatal(err)
	}
	if _, err := b.store.Settle(context.Background(), []store.Outcome{{Task: claimed.Tasks[0], State: msg.Success, Finished: b.store.Now()}}); err != nil {
		t.Fatal(err)
	}
	if a := <-done; a.body["status"] != "success" {
		t.Fatalf("waited for the end: %s", a.raw)
	}
	if a := b.do(t, "GET", "/api/messages/"+id+"?wait=2h", ""); a.status != 422 {
		t.Fatalf("2h: %d", a.status)
	}
}

// One key from a hundred callers at once, over two processes' servers.
func TestOneKeyOverTwoServers(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	servers := []*bundle{setup(t, store.Config{DSN: dsn}), setup(t, store.Config{DSN: dsn})}
	for round := range 10 {
		var (
			wg    sync.WaitGroup
			mu    sync.Mutex
			ids   = map[string]int{}
			codes = map[int]int{}
		)
		for caller := range 100 {
			wg.Go(func() {
				a := servers[caller%2].do(t, "POST", "/api/messages", fmt.Sprintf(`{"channels":["log"],"to":"x","text":"hi","request_id":"round-%d"}`, round))
				mu.Lock()
				defer mu.Unlock()
				codes[a.status]++
				id, _ := a.body["msg_id"].(string)
				ids[id]++
			})
		}
		wg.Wait()
		if len(ids) != 1 || codes[202] != 1 || codes[200] != 99 {
			t.Fatalf("round %d: ids %v, statuses %v", round, ids, codes)
		}
	}
}

func FuzzDecode(f *testing.F) {
	for _, seed := range []string{`{}`, `{"channels":["log"],"to":"x","text":"hi"}`, `{"to":{"log":"x"}}`, `{"a":1,"a":2}`, `[[[[`, `{"text":"\ud800"}`, "{\"text\":\"\xff\"}", `{"expire_time":1e400}`, `{"channels":[null]}`} {
		f.Add([]byte(seed))
	}
	api := server.New(server.Config{Store: testdb.Open(f, store.Config{}), Version: "fuzz", Admit: &admit.Admitter{
		Policies: policy.Defaults(), Now: time.Now, Configured: func(msg.Channel) bool { return false }, // so that nothing reaches the store
	}})
	f.Fuzz(func(t *testing.T, body []byte) {
		req := httptest.NewRequest("POST", "/api/messages", bytes.NewReader(body))
		req.Host, req.RemoteAddr = "localhost", "127.0.0.1:1"
		req.Header.Set("Content-Type", "application/json")
		res := httptest.NewRecorder()
		api.ServeHTTP(res, req)
		if res.Code < 400 || res.Code > 499 {
			t.Fatalf("%d %s", res.Code, res.Body)
		}
		if res.Code == http.StatusForbidden || res.Code == http.StatusUnauthorized {
			t.Fatal("the request did not reach the decoder")
		}
		if !json.Valid(res.Body.Bytes()) {
			t.Fatalf("no JSON: %s", res.Body)
		}
	})
}

func TestList(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	var ids []string
	for i := range 5 {
		a := b.do(t, "POST", "/api/messages", fmt.Sprintf(`{"channels":["log"],"to":"to-%d","text":"hi","request_id":"r-%d"}`, i%2, i))
		ids = append(ids, a.body["msg_id"].(string))
	}
	names := func(a answer) (got []string) {
		for _, m := range a.body["data"].([]any) {
			got = append(got, m.(map[string]any)["msg_id"].(string))
		}
		return got
	}
	first := b.do(t, "GET", "/api/messages?limit=3", "")
	if got := names(first); !reflect.DeepEqual(got, []string{ids[4], ids[3], ids[2]}) {
		t.Fatalf("first page %s", first.raw)
	}
	second := b.do(t, "GET", "/api/messages?limit=3&cursor="+first.body["next_cursor"].(string), "")
	if got := names(second); !reflect.DeepEqual(got, []string{ids[1], ids[0]}) || second.body["next_cursor"] != nil {
		t.Fatalf("second page %s", second.raw)
	}
	for query, want := range map[string]int{
		"receiver=to-1": 2, "status=dispatched": 5, "status=success": 0, "channel=log": 5, "channel=email": 0, "source=other": 0, "source=default": 5,
		"since=2020-01-01T00:00:00Z": 5, "until=1577836800000": 0, "receiver=to-0&status=dispatched&channel=log": 3,
	} {
		if a := b.do(t, "GET", "/api/messages?"+query, ""); a.status != 200 || len(names(a)) != want {
			t.Errorf("%s: %d %s", query, a.status, a.raw)
		}
	}
	for _, query := range []string{"limit=0", "limit=501", "limit=x", "channel=fax", "status=odd", "since=yesterday", "cursor=abc", "cursor=-1", "color=red"} {
		if a := b.do(t, "GET", "/api/messages?"+query, ""); a.status != 422 {
			t.Errorf("%s: %d %s", query, a.status, a.raw)
		}
	}
}

func TestAttachments(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	const frame = `{"channels":["email"],"to":"a@example.com","subject":"s","text":"t","attachments":[%s]}`
	good := b.do(t, "POST", "/api/messages", fmt.Sprintf(frame, `{"filename":"räume.txt","content_type":"text/plain; charset=utf-8; name=other","content":"aGk="},{"filename":"x","content":"AAEC"}`))
	if good.status != 202 {
		t.Fatalf("%d %s", good.status, good.raw)
	}
	id, _ := strconv.ParseUint(good.body["msg_id"].(string), 10, 64)
	content := b.content(t, id)
	want := []store.Attachment{{Filename: "räume.txt", ContentType: "text/plain; charset=utf-8", Content: []byte("hi")}, {Filename: "x", ContentType: "application/octet-stream", Content: []byte{0, 1, 2}}}
	if !reflect.DeepEqual(content.Attachments, want) {
		t.Fatalf("%+v", content.Attachments)
	}
	for attachment, field := range map[string]string{
		`{"filename":"../etc/passwd","content":"aGk="}`:                                            "attachments[0].filename",
		`{"filename":"a\r\nb","content":"aGk="}`:                                                   "attachments[0].filename",
		`{"filename":"a","content":"not base64!"}`:                                                 "attachments[0].content",
		`{"filename":"a","content":""}`:                                                            "attachments[0].content",
		`{"filename":"a","content_type":"text\r\nX: y","content":"aGk="}`:                          "attachments[0].content_type",
		`{"filename":"` + strings.Repeat("漢", 70) + `","content":"aGk="}`:                          "attachments[0].filename",
		`{"filename":"a","content_type":"text/` + strings.Repeat("x", 200) + `","content":"aGk="}`: "attachments[0].content_type",
		`{"filename":"a","content":"aGk=","path":"/etc/passwd"}`:                                   "attachments[0].path",
	} {
		if a := b.do(t, "POST", "/api/messages", fmt.Sprintf(frame, attachment)); a.status != 422 || !sameNames(a.fields(), []string{field}) {
			t.Errorf("%s: %d %s", attachment, a.status, a.raw)
		}
	}
	if a := b.do(t, "POST", "/api/messages", `{"channels":["log"],"to":"x","text":"t","attachments":[{"filename":"a","content":"aGk="}]}`); a.status != 422 {
		t.Errorf("on a channel of text: %d %s", a.status, a.raw)
	}
}

// A header may hold any bytes; a key may not.
func TestKeyHeaderIsText(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	if a := b.do(t, "POST", "/api/messages", `{"channels":["log"],"to":"x","text":"hi"}`, "Idempotency-Key", "caf\xe9"); a.status != 422 || !sameNames(a.fields(), []string{"request_id"}) {
		t.Fatalf("%d %s", a.status, a.raw)
	}
}
