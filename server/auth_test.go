package server_test

import (
	"encoding/json"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"tidings/internal/testdb"
	"tidings/server"
	"tidings/store"
)

// register makes an admin and two senders, and returns the server as each of them sees it.
func register(t testing.TB, b *bundle) (admin, shop, bank *bundle) {
	t.Helper()
	keys := map[string]string{}
	for _, src := range []struct{ id, role string }{{"root", "admin"}, {"shop", "sender"}, {"bank", "sender"}} {
		a := b.as(keys["root"]).do(t, "POST", "/api/sources", `{"source_id":"`+src.id+`","role":"`+src.role+`"}`)
		if a.status != 201 {
			t.Fatalf("%d %s", a.status, a.raw)
		}
		keys[src.id] = a.body["keys"].([]any)[0].(map[string]any)["key"].(string)
	}
	return b.as(keys["root"]), b.as(keys["shop"]), b.as(keys["bank"])
}

const hello = `{"channels":["log"],"to":"x","text":"hi"}`

func TestKeys(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	if a := b.do(t, "POST", "/api/messages", hello); a.status != 202 {
		t.Fatalf("without sources: %d %s", a.status, a.raw)
	}
	if a := b.do(t, "POST", "/api/sources", `{"source_id":"shop","role":"sender"}`); a.status != 422 {
		t.Fatalf("a first source that cannot administer: %d %s", a.status, a.raw)
	}
	admin, shop, _ := register(t, b)
	for name, c := range map[string]*bundle{"none": b, "one that is none": b.as("tidings_0000_xx"), "a part of one": b.as(shop.key[:20])} {
		if a := c.do(t, "POST", "/api/messages", hello); a.status != 401 || a.body["code"] != "unauthorized" || a.header.Get("WWW-Authenticate") != "Bearer" {
			t.Errorf("key %s: %d %s", name, a.status, a.raw)
		}
	}
	sent := shop.do(t, "POST", "/api/messages", hello)
	if sent.status != 202 {
		t.Fatalf("%d %s", sent.status, sent.raw)
	}
	if a := shop.do(t, "GET", "/api/messages/"+sent.body["msg_id"].(string), ""); a.body["source_id"] != "shop" {
		t.Errorf("the message is of %v", a.body["source_id"])
	}
	// Two keys while changing from one to the other, not three.
	second := admin.do(t, "POST", "/api/sources/shop/keys", "")
	if second.status != 201 {
		t.Fatalf("%d %s", second.status, second.raw)
	}
	if a := admin.do(t, "POST", "/api/sources/shop/keys", ""); a.status != 409 || a.body["code"] != "too_many_keys" {
		t.Errorf("a third key: %d %s", a.status, a.raw)
	}
	fresh := b.as(second.body["key"].(string))
	for _, c := range []*bundle{shop, fresh} {
		if a := c.do(t, "POST", "/api/messages", hello); a.status != 202 {
			t.Errorf("one of two keys: %d %s", a.status, a.raw)
		}
	}
	first := admin.do(t, "GET", "/api/sources/shop", "").body["keys"].([]any)[0].(map[string]any)
	if first["key"] != nil {
		t.Error("a key is shown a second time")
	}
	if a := admin.do(t, "DELETE", "/api/sources/bank/keys/"+first["key_id"].(string), ""); a.status != 404 {
		t.Errorf("another source's key: %d", a.status)
	}
	if a := admin.do(t, "DELETE", "/api/sources/shop/keys/"+first["key_id"].(string), ""); a.status != 204 {
		t.Errorf("revoke: %d %s", a.status, a.raw)
	}
	if a := shop.do(t, "POST", "/api/messages", hello); a.status != 401 {
		t.Errorf("a revoked key: %d", a.status)
	}
	if a := admin.do(t, "POST", "/api/sources/shop", `{"enabled":false}`); a.status != 200 || a.body["enabled"] != false || a.body["role"] != "sender" {
		t.Errorf("%d %s", a.status, a.raw)
	}
	if a := fresh.do(t, "POST", "/api/messages", hello); a.status != 401 {
		t.Errorf("a disabled source: %d", a.status)
	}
	audit := admin.do(t, "GET", "/api/audit", "").raw
	for _, want := range []string{`"source.create"`, `"key.create"`, `"key.revoke"`, `"source.update"`, `"enabled false"`, `"root"`, `"default"`} {
		if !strings.Contains(audit, want) {
			t.Errorf("the audit lacks %s", want)
		}
	}
	if strings.Contains(audit, shop.key) {
		t.Error("the audit has a key")
	}
}

// What one node changes holds on the others within a second.
func TestKeysOnAnotherNode(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	here := serve(t, testdb.Open(t, store.Config{DSN: dsn}), dsn, false)
	there := serve(t, testdb.Open(t, store.Config{DSN: dsn}), dsn, false)
	if a := there.do(t, "POST", "/api/messages", hello); a.status != 202 {
		t.Fatal(a.raw)
	}
	admin, shop, _ := register(t, here)
	until := time.Now().Add(time.Second)
	for there.as(shop.key).do(t, "POST", "/api/messages", hello).status != 202 || there.do(t, "POST", "/api/messages", hello).status != 401 {
		if time.Now().After(until) {
			t.Fatal("the other node does not know the key after a second")
		}
	}
	keys := admin.do(t, "GET", "/api/sources/shop", "").body["keys"].([]any)
	admin.do(t, "DELETE", "/api/sources/shop/keys/"+keys[0].(map[string]any)["key_id"].(string), "")
	for until = time.Now().Add(time.Second); there.as(shop.key).do(t, "POST", "/api/messages", hello).status != 401; {
		if time.Now().After(until) {
			t.Fatal("the other node takes the revoked key after a second")
		}
	}
}

// Every route, with no key and with another source's: never data.
func TestEveryRouteIsClosed(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	admin, shop, bank := register(t, b)
	sent := shop.do(t, "POST", "/api/messages", `{"channels":["log"],"to":"secret-receiver","text":"hi","request_id":"r-1"}`)
	if a := shop.do(t, "POST", "/api/templates", `{"template_id":"welcome","channel":"log","content":"secret-content"}`); a.status != 201 {
		t.Fatal(a.raw)
	}
	dead := shop.do(t, "POST", "/api/messages", `{"channels":["log"],"to":"secret-receiver","text":"hi"}`).body["msg_id"].(string)
	b.bury(t, dead)
	key := admin.do(t, "GET", "/api/sources/shop", "").body["keys"].([]any)[0].(map[string]any)["key_id"].(string)
	var api struct {
		Paths map[string]map[string]json.RawMessage
	}
	if err := json.Unmarshal([]byte(b.do(t, "GET", "/openapi.json", "").raw), &api); err != nil {
		t.Fatal(err)
	}
	open := map[string]bool{"/livez": true, "/readyz": true}
	walked := 0
	for path, methods := range api.Paths {
		for method := range methods {
			id := sent.body["msg_id"].(string)
			switch {
			case strings.HasPrefix(path, "/api/templates"):
				id = "welcome"
			case strings.HasPrefix(path, "/api/sources"):
				id = "shop"
			}
			target := strings.NewReplacer("{id}", id, "{key_id}", key, "{msg_id}", dead, "{channel}", "log").Replace(path)
			method := strings.ToUpper(method)
			body := ""
			if method == "POST" {
				body = `{}`
			}
			walked++
			if open[path] {
				continue
			}
			if a := b.do(t, method, target, body); a.status != 401 {
				t.Errorf("%s %s without a key: %d %s", method, target, a.status, a.raw)
			}
			for _, query := range []string{"", "?source=shop"} {
				a := bank.do(t, method, target+query, body)
				if strings.Contains(a.raw, "secret") || strings.Contains(a.raw, `"shop"`) {
					t.Errorf("%s %s%s with another's key shows: %s", method, target, query, a.raw)
				}
				mine := slices.Contains([]string{"/api/messages", "/api/messages/bulk", "/api/templates", "/api/batches", "/api/quotas", "/api/dead", "/api/stats"}, path) // the caller's own
				if !mine && a.status != 403 && a.status != 404 && a.status != 422 {
					t.Errorf("%s %s%s with another's key: %d %s", method, target, query, a.status, a.raw)
				}
			}
		}
	}
	if a := shop.do(t, "GET", "/api/messages/"+sent.body["msg_id"].(string), ""); a.body["status"] != "dispatched" {
		t.Errorf("another's key changed the message: %s", a.raw)
	}
	if walked < 20 {
		t.Errorf("only %d routes", walked)
	}
	if a := bank.do(t, "GET", "/api/messages?request_id=r-1", ""); !strings.Contains(a.raw, `"data":[]`) {
		t.Errorf("another's request_id: %s", a.raw)
	}
	if a := bank.do(t, "POST", "/api/messages", `{"channels":["log"],"to":"x","template_id":"welcome"}`); a.status != 422 {
		t.Errorf("another's template: %d %s", a.status, a.raw)
	}
	// The admin sees all, and its own request ids apart.
	if a := admin.do(t, "GET", "/api/messages", ""); !strings.Contains(a.raw, "secret-receiver") {
		t.Errorf("the admin's list: %s", a.raw)
	}
	if a := admin.do(t, "GET", "/api/messages?request_id=r-1&source=shop", ""); !strings.Contains(a.raw, "secret-receiver") {
		t.Errorf("the admin looking for a request: %s", a.raw)
	}
	if a := admin.do(t, "GET", "/api/templates", ""); !strings.Contains(a.raw, "secret-content") {
		t.Errorf("the admin's templates: %s", a.raw)
	}
}

// Without keys, only callers on this machine are let in, whatever the listener's address is.
func TestNoKeysFromElsewhere(t *testing.T) {
	t.Parallel()
	api := server.New(server.Config{Store: testdb.Open(t, store.Config{})})
	for remote, want := range map[string]int{"127.0.0.1:4000": 200, "[::1]:4000": 200, "192.0.2.7:4000": 401, "[2001:db8::1]:4000": 401, "": 401} {
		req := httptest.NewRequest("GET", "/api/messages", nil)
		req.Host, req.RemoteAddr = "localhost", remote
		res := httptest.NewRecorder()
		api.ServeHTTP(res, req)
		if res.Code != want {
			t.Errorf("from %q: %d %s", remote, res.Code, res.Body)
		}
	}
}
