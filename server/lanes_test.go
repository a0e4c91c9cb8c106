package server_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"tidings/internal/msg"
	"tidings/internal/testdb"
	"tidings/server"
	"tidings/store"
)

func TestLanesByHTTP(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	admin, shop, _ := register(t, b)
	for _, step := range []struct {
		method, path, body string
		status             int
		has                string
	}{
		{"GET", "/api/lanes", "", 200, `{"lane":"high","weight":70,"paused":false`},
		{"POST", "/api/lanes/low/pause", `{"reason":"too much"}`, 200, `"lane":"low","weight":10,"paused":true,"reason":"too much","modify_by":"root"`},
		{"POST", "/api/lanes/middle/pause", "", 200, `"lane":"middle","weight":20,"paused":true`},
		{"POST", "/api/lanes/low/weight", `{"weight":5}`, 200, `"weight":5,"paused":true,"reason":"too much"`},
		{"POST", "/api/lanes/low/resume", "", 200, `"weight":5,"paused":false`},
		{"POST", "/api/lanes/low/weight", `{"weight":0}`, 422, `"field":"weight"`},
		{"POST", "/api/lanes/low/weight", `{}`, 422, `required property weight`},
		{"POST", "/api/lanes/urgent/pause", "", 422, `"field":"lane"`},
		{"POST", "/api/providers/relay/pause", `{"reason":"moving"}`, 200, `"provider":"relay","node":"all","paused":true,"reason":"moving"`},
		{"GET", "/api/providers", "", 200, `"provider":"relay","node":"all","paused":true`},
		{"POST", "/api/providers/relay/resume", "", 200, `"paused":false`},
	} {
		a := admin.do(t, step.method, step.path, step.body)
		if a.status != step.status || !strings.Contains(a.raw, step.has) {
			t.Errorf("%s %s %s: %d %s, want %d with %s", step.method, step.path, step.body, a.status, a.raw, step.status, step.has)
		}
		if a := shop.do(t, step.method, step.path, step.body); a.status != 403 && a.status != 422 {
			t.Errorf("%s %s by a sender: %d", step.method, step.path, a.status)
		}
	}
	if a := admin.do(t, "GET", "/api/audit", ""); !strings.Contains(a.raw, `"lane.set"`) || !strings.Contains(a.raw, `"provider.pause"`) {
		t.Error(a.raw)
	}
}

func TestReadyVerbose(t *testing.T) {
	t.Parallel()
	s := testdb.Open(t, store.Config{})
	api := server.New(server.Config{Store: s, Health: func() any { return map[string]string{"lanes": "fine"} }, Provider: func(name string) bool { return name == "relay" }})
	b := serveAPI(t, api, s)
	for path, want := range map[string]bool{"/readyz": false, "/readyz?verbose": true, "/readyz?verbose=true": true, "/readyz?verbose=false": false} {
		a := b.do(t, "GET", path, "")
		if a.status != 200 || a.body["status"] != "ok" || strings.Contains(a.raw, "fine") != want {
			t.Errorf("%s: %d %s", path, a.status, a.raw)
		}
	}
	if a := b.do(t, "POST", "/api/providers/none/pause", ""); a.status != 404 {
		t.Errorf("an unknown provider: %d %s", a.status, a.raw)
	}
}

// A template's policy lies over its category's: attempts and expiry of its messages follow it.
func TestTemplatePolicy(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	for policy, fields := range map[string]string{
		`{"retry":["soon"]}`:                 "policy",
		`{"retry":["0s"]}`:                   "policy.retry",
		`{"expiry":"1ms"}`:                   "policy.expiry",
		`{"unknown":"maybe"}`:                "policy.unknown",
		`{"attempts":101}`:                   "policy.attempts",
		`{"jitter":2}`:                       "policy.jitter",
		`{"priority":"high"}`:                "policy.priority",
		`{"degrade":"skip","alarm":"loud"}`:  "policy.alarm",
		`{"expiry":"1ms","retry":["8760h"]}`: "policy.retry policy.expiry",
	} {
		a := b.do(t, "POST", "/api/templates", `{"template_id":"x","channel":"log","content":"hi","policy":`+policy+`}`)
		if a.status != 422 || strings.Join(a.fields(), " ") != fields {
			t.Errorf("%s: %d %v %s, want 422 for %s", policy, a.status, a.fields(), a.raw, fields)
		}
	}
	a := b.do(t, "POST", "/api/templates", `{"template_id":"code","channel":"log","content":"hi","policy":{"retry":["1s","2s"],"expiry":"2h","degrade":"wait"}}`)
	if a.status != 201 || !strings.Contains(a.raw, `"policy":{"retry":["1s","2s"],"expiry":"2h","degrade":"wait"}`) {
		t.Fatal(a.status, a.raw)
	}
	sent := b.do(t, "POST", "/api/messages", `{"channels":["log"],"to":"x","template_id":"code","delay":"3h"}`)
	m := b.do(t, "GET", "/api/messages/"+sent.body["msg_id"].(string), "")
	task := m.body["tasks"].([]any)[0].(map[string]any)
	if task["attempt_limit"] != 3.0 {
		t.Errorf("%v attempts, want 3", task["attempt_limit"])
	}
	due, expire := m.body["due_time"].(string), m.body["expire_time"].(string)
	if got := instantOf(t, expire).Sub(instantOf(t, due)).Hours(); got != 2 {
		t.Errorf("expires %v hours after it is due, want 2", got)
	}
	if a := b.do(t, "POST", "/api/templates/code", `{"policy":{}}`); a.status != 200 || strings.Contains(a.raw, "policy") {
		t.Errorf("without a policy: %d %s", a.status, a.raw)
	}
	variants, err := b.store.UsableTemplate(context.Background(), "default", "code")
	if err != nil || variants[msg.Log].Version != 2 || variants[msg.Log].Policy != nil {
		t.Errorf("%+v %v", variants[msg.Log], err)
	}
}

func instantOf(t *testing.T, text string) time.Time {
	t.Helper()
	at, err := time.Parse(time.RFC3339Nano, text)
	if err != nil {
		t.Fatal(err)
	}
	return at
}
