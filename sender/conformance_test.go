package sender

import (
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"

	"tidings/internal/msg"
)

// canaries are secrets and personal data that no verdict may repeat.
var canaries = []string{"canary-path", "canary-secret", "canary-receiver", "canary-text", "canary-password"}

// subject is a provider under the suite: how it is opened against a server, and what it is to make of the server's manners.
type subject struct {
	open    func(t *testing.T, addr string) Provider
	message func(addr string) *Message
	ok      http.HandlerFunc // a good answer
	// What the provider makes of an answer whose body is endless, or cannot be read: a webhook's status says all, a bot's
	// does not.
	badBody Kind
	// What it makes of a server's failure: a receiver that recognises a repetition may be asked again.
	broken Kind
}

const webhookSecret = "whsec_Y2FuYXJ5LXNlY3JldC1jYW5hcnktc2VjcmV0" // canary-secret-canary-secret

var subjects = map[string]subject{
	"webhook": {
		open: func(t *testing.T, _ string) Provider {
			return open(t, "webhook", Settings{"secret": webhookSecret, "allow_internal": true})
		},
		message: func(addr string) *Message {
			return &Message{Key: "42-webhook", MsgID: 42, Channel: msg.Webhook, Receiver: "http://" + addr + "/canary-path?canary-receiver", Text: "canary-text", Created: created}
		},
		ok:      func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) },
		badBody: Success, broken: Temporary,
	},
	"feishu": {
		open: func(t *testing.T, addr string) Provider {
			return open(t, "feishu", Settings{"bots": map[string]any{"canary-receiver": map[string]any{"url": "http://" + addr + "/canary-path", "secret": "canary-secret"}}})
		},
		message: func(string) *Message {
			return &Message{Key: "42-feishu", MsgID: 42, Channel: msg.Feishu, Receiver: "canary-receiver", Text: "canary-text", Created: created}
		},
		ok:      func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, `{"code":0,"msg":"success"}`) },
		badBody: Unknown, broken: Unknown,
	},
}

func open(t testing.TB, kind string, settings Settings) Provider {
	t.Helper()
	p, err := Open(kind, Env{Name: kind, DataDir: t.TempDir()}, settings)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

// host is a server that counts the requests it gets, and ends with the test however its handlers hang.
type host struct {
	addr string
	mu   sync.Mutex
	seen []*http.Request
	body [][]byte
}

func startHost(t testing.TB, handler http.HandlerFunc) *host {
	t.Helper()
	h := &host{}
	ctx, cancel := context.WithCancel(context.Background())
	ts := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		h.mu.Lock()
		h.seen, h.body = append(h.seen, r), append(h.body, body)
		h.mu.Unlock()
		handler(w, r.WithContext(ctx))
	}))
	ts.Start()
	t.Cleanup(func() { cancel(); ts.CloseClientConnections(); ts.Close() })
	h.addr = ts.Listener.Addr().String()
	return h
}

func status(code int, header ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		for i := 0; i < len(header); i += 2 {
			w.Header().Set(header[i], header[i+1])
		}
		w.WriteHeader(code)
	}
}

func hang(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }

func drop(w http.ResponseWriter, _ *http.Request) {
	conn, _, err := w.(http.Hijacker).Hijack()
	if err == nil {
		conn.Close()
	}
}

// stream writes a piece again and again until nobody reads any more.
func stream(piece string, every time.Duration) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusOK)
		for r.Context().Err() == nil {
			if _, err := io.WriteString(w, piece); err != nil {
				return
			}
			w.(http.Flusher).Flush()
			if every > 0 {
				time.Sleep(every)
			}
		}
	}
}

func gzipBomb(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Encoding", "gzip")
	w.WriteHeader(http.StatusOK)
	w.(http.Flusher).Flush()
	z := gzip.NewWriter(w)
	zeros := make([]byte, 1<<20)
	for range 64 {
		if _, err := z.Write(zeros); err != nil {
			return
		}
	}
	z.Close()
}

func endlessHeaders(w http.ResponseWriter, r *http.Request) {
	conn, _, err := w.(http.Hijacker).Hijack()
	if err != nil {
		return
	}
	defer conn.Close()
	io.WriteString(conn, "HTTP/1.1 200 OK\r\n")
	for r.Context().Err() == nil {
		if _, err := fmt.Fprintf(conn, "X-More: %s\r\n", strings.Repeat("x", 1000)); err != nil {
			return
		}
	}
}

// TestConformance is what every provider that speaks HTTP has to do: keep the deadline, judge rightly, read no more of an answer
// than it needs, send the task's key, ask once, and repeat no secret.
func TestConformance(t *testing.T) {
	t.Parallel()
	const deadline = 700 * time.Millisecond
	for name, s := range subjects {
		for _, tt := range []struct {
			name    string
			handler http.HandlerFunc
			want    Kind
			retry   time.Duration
		}{
			{"good", s.ok, Success, 0},
			{"hangs", hang, Unknown, 0},
			{"drops the line", drop, Unknown, 0},
			{"endless body", stream(strings.Repeat("x", 8192), 0), s.badBody, 0},
			{"a byte at a time", stream("x", 50*time.Millisecond), s.badBody, 0},
			{"gzip bomb", gzipBomb, s.badBody, 0},
			{"endless headers", endlessHeaders, Unknown, 0},
			{"500", status(500), s.broken, 0},
			{"502", status(502), s.broken, 0},
			{"504", status(504), s.broken, 0},
			{"503 without a word", status(503), Temporary, 0},
			{"429", status(429, "Retry-After", "7"), Busy, 7 * time.Second},
			{"429 without a word", status(429), Busy, 0},
			{"429 for ever", status(429, "Retry-After", "99999999999"), Busy, 24 * time.Hour},
			{"429 with nonsense", status(429, "Retry-After", "soon"), Busy, 0},
			{"503", status(503, "Retry-After", "-5"), Busy, 0},
		} {
			t.Run(name+" "+tt.name, func(t *testing.T) {
				t.Parallel()
				h := startHost(t, tt.handler)
				p := s.open(t, h.addr)
				began := time.Now()
				v := sendWithin(p, deadline, s.message(h.addr))
				if took := time.Since(began); took > deadline+time.Second {
					t.Errorf("took %v", took)
				}
				if v.Kind != tt.want || v.RetryAfter != tt.retry {
					t.Errorf("verdict %+v, want %v", v, tt.want)
				}
				h.mu.Lock()
				defer h.mu.Unlock()
				if len(h.seen) != 1 {
					t.Errorf("%d requests", len(h.seen))
				}
				silent(t, v)
			})
		}
		t.Run(name+" refuses connections", func(t *testing.T) {
			t.Parallel()
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			addr := l.Addr().String()
			l.Close()
			v := sendWithin(s.open(t, addr), deadline, s.message(addr))
			if v.Kind != Temporary {
				t.Errorf("verdict %+v", v)
			}
			silent(t, v)
		})
		t.Run(name+" follows no redirect", func(t *testing.T) {
			t.Parallel()
			other := startHost(t, s.ok)
			for _, code := range []int{301, 302, 303, 307, 308} { // a 307 repeats the body, a 302 drops it: neither is to be followed
				h := startHost(t, status(code, "Location", "http://"+other.addr+"/"))
				v := sendWithin(s.open(t, h.addr), deadline, s.message(h.addr))
				if v.Kind == Success || len(other.seen) != 0 {
					t.Errorf("%d: verdict %+v, %d requests elsewhere", code, v, len(other.seen))
				}
			}
		})
	}
}

func silent(t *testing.T, v Verdict) {
	t.Helper()
	for _, canary := range canaries {
		if strings.Contains(v.Text+v.Code+v.ProviderMsgID, canary) {
			t.Errorf("the verdict repeats %s: %+v", canary, v)
		}
	}
}

// A receiver with a standard library checks the signature, by the old secret as well as by the new one.
func TestWebhookSignature(t *testing.T) {
	t.Parallel()
	const old = "whsec_b2xkLXNlY3JldC1vbGQtc2VjcmV0"
	h := startHost(t, subjects["webhook"].ok)
	p := open(t, "webhook", Settings{"secret": webhookSecret, "previous_secret": old, "allow_internal": true})
	m := subjects["webhook"].message(h.addr)
	m.Subject = `quotes " and 漢字`
	if v := sendWithin(p, 5*time.Second, m); v.Kind != Success {
		t.Fatalf("verdict %+v", v)
	}
	for _, secret := range []string{webhookSecret, old} {
		receiver, err := standardwebhooks.NewWebhook(secret)
		if err != nil {
			t.Fatal(err)
		}
		if err := receiver.Verify(h.body[0], h.seen[0].Header); err != nil {
			t.Errorf("secret %s: %v", secret[:8], err)
		}
	}
	if id := h.seen[0].Header.Get("webhook-id"); id != "42-webhook" {
		t.Errorf("webhook-id %s", id)
	}
	var body map[string]any
	if err := json.Unmarshal(h.body[0], &body); err != nil {
		t.Fatal(err)
	}
	data := body["data"].(map[string]any)
	if body["type"] != "message" || data["msg_id"] != "42" || data["subject"] != m.Subject || data["text"] != m.Text {
		t.Errorf("body %s", h.body[0])
	}
}

func TestWebhookGone(t *testing.T) {
	t.Parallel()
	h := startHost(t, status(http.StatusGone))
	p := open(t, "webhook", Settings{"allow_internal": true})
	if v := sendWithin(p, 5*time.Second, subjects["webhook"].message(h.addr)); v.Kind != Permanent {
		t.Fatalf("verdict %+v", v)
	}
	if h.seen[0].Header.Get("webhook-signature") != "" {
		t.Error("signed without a secret")
	}
}

// Inside addresses are refused by their text and, however they are dressed up, when they are connected to.
func TestWebhookReachesNothingInside(t *testing.T) {
	t.Parallel()
	h := startHost(t, subjects["webhook"].ok)
	_, port, err := net.SplitHostPort(h.addr)
	if err != nil {
		t.Fatal(err)
	}
	p := open(t, "webhook", nil)
	for _, host := range []string{
		"127.0.0.1", "127.0.0.1.", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "0.0.0.0", "0", "localhost", "localhost.", "[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]",
		"good@127.0.0.1", "169.254.169.254", "metadata.google.internal",
	} {
		for _, scheme := range []string{"http", "https"} {
			m := subjects["webhook"].message(h.addr)
			m.Receiver = scheme + "://" + host + ":" + port + "/"
			if _, err := p.(ReceiverChecker).CheckReceiver(m.Receiver); err == nil {
				t.Errorf("%s was accepted", m.Receiver)
			}
			if v := sendWithin(p, time.Second, m); v.Kind != Permanent {
				t.Errorf("%s: %+v", m.Receiver, v)
			}
		}
	}
	// A name whose answer changed after it was accepted: the dialer sees the address itself.
	client := p.(*webhookProvider).client
	if res, err := client.Get("http://localhost:" + port + "/"); err == nil {
		res.Body.Close()
		t.Error("a name that resolves inside was connected to")
	}
	if len(h.seen) != 0 {
		t.Fatalf("%d requests arrived", len(h.seen))
	}
}

func TestRetryAfterDate(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)
	for value, want := range map[string]time.Duration{
		"Mon, 30 Nov 2026 12:00:30 GMT": 30 * time.Second, "Mon, 30 Nov 2026 11:00:00 GMT": 0, "30": 30 * time.Second, "": 0, "never": 0, "Mon, 30 Nov 2099 12:00:00 GMT": 24 * time.Hour,
	} {
		if got := retryAfter(http.Header{"Retry-After": {value}}, now); got != want {
			t.Errorf("%q: %v, want %v", value, got, want)
		}
	}
}

func TestFeishuCodes(t *testing.T) {
	t.Parallel()
	for answer, want := range map[string]Kind{
		`{"code":0,"msg":"success"}`:                                    Success,
		`{"code":0,"StatusCode":0,"StatusMessage":"success","data":{}}`: Success,
		`{"code":11232,"msg":"frequency limited"}`:                      Busy,
		`{"code":9499,"msg":"Bad Request"}`:                             Permanent,
		`{"code":19021,"msg":"sign match fail"}`:                        Permanent,
		`{"code":19024,"msg":"Key Words Not Found"}`:                    Permanent,
		`{"code":50000,"msg":"oops"}`:                                   Temporary,
		`{"StatusCode":0,"StatusMessage":"success"}`:                    Success,
		`<html>`: Unknown,
		``:       Unknown,
		`{}`:     Unknown,
	} {
		h := startHost(t, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, answer) })
		if v := sendWithin(subjects["feishu"].open(t, h.addr), 5*time.Second, subjects["feishu"].message("")); v.Kind != want {
			t.Errorf("%s: %+v, want %v", answer, v, want)
		}
	}
	h := startHost(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(400); io.WriteString(w, `{"code":11232}`) })
	if v := sendWithin(subjects["feishu"].open(t, h.addr), 5*time.Second, subjects["feishu"].message("")); v.Kind != Busy {
		t.Errorf("11232 inside a 400: %+v", v)
	}
}

func TestFeishuBodies(t *testing.T) {
	t.Parallel()
	now := time.Unix(1599360473, 0)
	m := subjects["feishu"].message("")
	m.Text = `<a> & "b"`
	for _, tt := range []struct{ subject, secret, want string }{
		{"", "", `{"msg_type":"text","content":{"text":"<a> & \"b\""}}`},
		{"Title", "", `{"msg_type":"post","content":{"post":{"zh_cn":{"title":"Title","content":[[{"tag":"text","text":"<a> & \"b\""}]]}}}}`},
		{"", "demo", `{"timestamp":"1599360473","sign":"SIGN","msg_type":"text","content":{"text":"<a> & \"b\""}}`},
	} {
		m.Subject = tt.subject
		got, err := feishuBody(m, tt.secret, now)
		if want := strings.Replace(tt.want, "SIGN", "l1N0gAcBjdwBvGm1xMjOF0XSyaLRpR7tuO5dHfhAYc8=", 1); err != nil || string(got) != want {
			t.Errorf("%s\nwant %s, %v", got, want, err)
		}
	}
	m.Text = strings.Repeat("漢", 7000)
	if v := subjects["feishu"].open(t, "127.0.0.1:1").Send(context.Background(), m); v.Kind != Permanent {
		t.Errorf("21,000 bytes: %+v", v)
	}
}

func TestFeishuReceiver(t *testing.T) {
	t.Parallel()
	p := open(t, "feishu", Settings{"bots": map[string]any{"ops": map[string]any{"url": "https://open.feishu.cn/open-apis/bot/v2/hook/x"}}}).(ReceiverChecker)
	if name, err := p.CheckReceiver("Ops"); err != nil || name != "ops" {
		t.Errorf("%s, %v", name, err)
	}
	if _, err := p.CheckReceiver("sales"); err == nil || !strings.Contains(err.Error(), "ops") {
		t.Errorf("an unknown bot: %v", err)
	}
	for _, settings := range []Settings{{}, {"bots": map[string]any{"ops": map[string]any{"url": "nowhere"}}}, {"bots": map[string]any{"ops": map[string]any{"link": "https://x"}}}} {
		if _, err := Open("feishu", Env{}, settings); err == nil {
			t.Errorf("%v was accepted", settings)
		}
	}
}

// What every provider of every type has to do, whatever it speaks: give up at the deadline, say that nothing was delivered,
// and repeat neither secrets nor addresses. Here the other side takes connections and never says a word.
func TestEveryTypeKeepsTheDeadline(t *testing.T) {
	t.Parallel()
	addr := faultyServer(t, "banner", func(c net.Conn) { io.Copy(io.Discard, c) })
	canary := Settings{"password": "canary-password", "username": "shop"}
	all := map[string]Provider{
		"webhook": subjects["webhook"].open(t, addr), "feishu": subjects["feishu"].open(t, addr), "smtp": openMail(t, addr, canary),
		"log": open(t, "log", Settings{"delay": "1h", "print": false}), "file": open(t, "file", nil),
	}
	for _, kind := range Types() {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			p := all[kind]
			if p == nil {
				t.Fatal("the suite does not know this type")
			}
			m := mailTo("canary-receiver@example.com")
			if s, ok := subjects[kind]; ok {
				m = s.message(addr)
			}
			deadline := 300 * time.Millisecond
			if kind == "file" { // it waits for nobody: its deadline must be over before
				deadline = 0
			}
			began := time.Now()
			v := sendWithin(p, deadline, m)
			if took := time.Since(began); took > deadline+time.Second || v.Kind == Success {
				t.Errorf("after %v: %+v", took, v)
			}
			silent(t, v)
		})
	}
}
