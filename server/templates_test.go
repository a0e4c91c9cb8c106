package server_test

import (
	"database/sql"
	"fmt"
	"strings"
	"testing"

	"tidings/internal/testdb"
	"tidings/store"
)

func TestTemplates(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	made := b.do(t, "POST", "/api/templates", `{"template_id":"order","channel":"email","name":"Order","subject":"Order {{order.no}}","content":"Dear {{username}}","html":"<p>Dear {{username}}</p>","category":"marketing"}`)
	if made.status != 201 || made.body["version"] != 1.0 || made.body["status"] != "normal" {
		t.Fatalf("%d %s", made.status, made.raw)
	}
	if a := b.do(t, "POST", "/api/templates", `{"template_id":"order","channel":"email","subject":"x","content":"x"}`); a.status != 409 || a.body["code"] != "already_exists" {
		t.Errorf("a second time: %d %s", a.status, a.raw)
	}
	if a := b.do(t, "POST", "/api/templates", `{"template_id":"order","channel":"log","content":"{{username}}: {{order.no}}"}`); a.status != 201 {
		t.Errorf("a variant: %d %s", a.status, a.raw)
	}
	if a := b.do(t, "POST", "/api/templates", `{"channel":"log","content":"x"}`); a.status != 201 || len(a.body["template_id"].(string)) != 16 {
		t.Errorf("a generated id: %d %s", a.status, a.raw)
	}
	// An update of the name changes the name only.
	updated := b.do(t, "POST", "/api/templates/order", `{"channel":"email","name":"Bestellung"}`)
	if updated.status != 200 || updated.body["version"] != 2.0 || updated.body["name"] != "Bestellung" {
		t.Fatalf("%d %s", updated.status, updated.raw)
	}
	for _, field := range []string{"subject", "content", "html", "category", "sensitive", "status", "channel", "source_id"} {
		if updated.body[field] != made.body[field] {
			t.Errorf("%s changed from %v to %v", field, made.body[field], updated.body[field])
		}
	}
	if a := b.do(t, "POST", "/api/templates/order", `{"name":"x"}`); a.status != 422 || !sameNames(a.fields(), []string{"channel"}) {
		t.Errorf("which variant? %d %s", a.status, a.raw)
	}
	if got := b.do(t, "GET", "/api/templates/order", ""); len(got.body["variants"].([]any)) != 2 {
		t.Errorf("%s", got.raw)
	}
	if got := b.do(t, "GET", "/api/templates/order/versions", ""); len(got.body["variants"].([]any)) != 3 {
		t.Errorf("%s", got.raw)
	}
	if got := b.do(t, "GET", "/api/templates/nothing", ""); got.status != 404 {
		t.Errorf("%d", got.status)
	}
	first := b.do(t, "GET", "/api/templates?limit=2", "")
	rest := b.do(t, "GET", "/api/templates?limit=2&cursor="+first.body["next_cursor"].(string), "")
	if len(first.body["data"].([]any)) != 2 || len(rest.body["data"].([]any)) != 1 {
		t.Errorf("pages: %s %s", first.raw, rest.raw)
	}
	preview := b.do(t, "POST", "/api/templates/order/preview", `{"channel":"email","params":{"username":"Tom & Jerry","order":{"no":12345678901234567890}}}`)
	if preview.body["subject"] != "Order 12345678901234567890" || preview.body["text"] != "Dear Tom & Jerry" || preview.body["html"] != "<p>Dear Tom &amp; Jerry</p>" {
		t.Errorf("%s", preview.raw)
	}
	if a := b.do(t, "POST", "/api/templates/order/preview", `{"channel":"email"}`); a.status != 422 || a.body["code"] != "missing_variables" ||
		!sameNames(a.fields(), []string{"params.username", "params.order.no"}) {
		t.Errorf("%d %s", a.status, a.raw)
	}
	for name, body := range map[string]string{
		"syntax": `{"template_id":"bad","channel":"log","content":"{{if}}"}`, "no content": `{"template_id":"bad","channel":"log"}`,
		"html for text": `{"template_id":"bad","channel":"log","html":"<p>"}`, "id": `{"template_id":"a b","channel":"log","content":"x"}`,
		"no subject": `{"template_id":"bad","channel":"email","content":"x"}`, "printf": `{"template_id":"bad","channel":"log","content":"{{printf \"%1000000000d\" 1}}"}`,
		"recursion": `{"template_id":"bad","channel":"log","content":"{{define \"a\"}}{{template \"a\"}}{{end}}{{template \"a\"}}"}`,
		"too long":  `{"template_id":"bad","channel":"log","content":"` + strings.Repeat("x", 64<<10+1) + `"}`, "unknown field": `{"template_id":"bad","channel":"log","content":"x","colour":"red"}`,
	} {
		if a := b.do(t, "POST", "/api/templates", body); a.status != 422 || len(a.fields()) == 0 {
			t.Errorf("%s: %d %s", name, a.status, a.raw)
		}
	}
}

// A message keeps its version; a deleted template takes no new messages.
func TestTemplateVersions(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	b.do(t, "POST", "/api/templates", `{"template_id":"t","channel":"log","content":"one {{x}}","category":"verification"}`)
	send := func() answer {
		return b.do(t, "POST", "/api/messages", `{"channels":["log"],"to":"x","template_id":"t","params":{"x":9007199254740993}}`)
	}
	one := send()
	b.do(t, "POST", "/api/templates/t", `{"content":"two {{x}} {{y}}"}`)
	if a := send(); a.status != 422 || a.body["code"] != "missing_variables" || !sameNames(a.fields(), []string{"params.y"}) {
		t.Fatalf("%d %s", a.status, a.raw)
	}
	if a := b.do(t, "DELETE", "/api/templates/t", ""); a.status != 204 {
		t.Fatalf("%d %s", a.status, a.raw)
	}
	if a := send(); a.status != 422 || !sameNames(a.fields(), []string{"template_id"}) {
		t.Fatalf("%d %s", a.status, a.raw)
	}
	if a := b.do(t, "GET", "/api/templates/t", ""); a.status != 404 {
		t.Fatalf("%d %s", a.status, a.raw)
	}
	got := b.do(t, "GET", "/api/messages/"+one.body["msg_id"].(string), "")
	if got.body["template_id"] != "t" || got.body["category"] != "verification" || got.body["priority"] != "high" {
		t.Fatalf("%s", got.raw)
	}
	db, err := sql.Open("mysql", b.dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	var params string
	var version int
	if err := db.QueryRow("SELECT params, template_version FROM t_msg_queue_high WHERE msg_id > 0 AND content IS NULL").Scan(&params, &version); err != nil {
		t.Fatal(err)
	}
	if params != `{"x":9007199254740993}` || version != 1 {
		t.Fatalf("version %d with %s", version, params)
	}
	if a := b.do(t, "POST", "/api/templates", `{"template_id":"t","channel":"log","content":"again"}`); a.status != 201 || a.body["version"] != 3.0 {
		t.Fatalf("the name again: %d %s", a.status, a.raw)
	}
}

func TestReview(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	b := serve(t, testdb.Open(t, store.Config{DSN: dsn}), dsn, true)
	admin, shop, _ := register(t, b)
	if a := shop.do(t, "POST", "/api/templates", `{"template_id":"t","channel":"log","content":"one"}`); a.body["status"] != "waiting" {
		t.Fatalf("%d %s", a.status, a.raw)
	}
	const message = `{"channels":["log"],"to":"x","template_id":"t"}`
	if a := shop.do(t, "POST", "/api/messages", message); a.status != 422 || a.body["code"] != "template_not_reviewed" {
		t.Fatalf("%d %s", a.status, a.raw)
	}
	if a := shop.do(t, "POST", "/api/templates/t/approve", `{}`); a.status != 403 {
		t.Fatalf("%d %s", a.status, a.raw)
	}
	if a := admin.do(t, "POST", "/api/templates/t/approve?source=shop", ""); a.status != 200 {
		t.Fatalf("%d %s", a.status, a.raw)
	}
	if a := shop.do(t, "POST", "/api/messages", message); a.status != 202 {
		t.Fatalf("%d %s", a.status, a.raw)
	}
	shop.do(t, "POST", "/api/templates/t", `{"content":"two"}`)
	if a := shop.do(t, "POST", "/api/messages", message); a.status != 202 { // with version 1
		t.Fatalf("%d %s", a.status, a.raw)
	}
	if a := admin.do(t, "POST", "/api/templates/t/reject?source=shop", `{"version":2}`); a.status != 200 {
		t.Fatalf("%d %s", a.status, a.raw)
	}
	if a := admin.do(t, "POST", "/api/templates/t/approve?source=shop", `{"version":2}`); a.status != 409 || a.body["code"] != "not_waiting" {
		t.Fatalf("%d %s", a.status, a.raw)
	}
	if a := admin.do(t, "POST", "/api/templates/t/approve?source=shop", `{"version":7}`); a.status != 404 {
		t.Fatalf("%d %s", a.status, a.raw)
	}
}

func TestSeveralChannels(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	sent := b.do(t, "POST", "/api/messages", `{"channels":["email","log","webhook"],"to":{"email":"a@example.com","log":"x"},"subject":"s","text":"hi","request_id":"k"}`)
	if sent.status != 202 || !strings.Contains(sent.raw, `{"channel":"webhook","status":"skipped","reason":"the request has no address for this channel"}`) {
		t.Fatalf("%d %s", sent.status, sent.raw)
	}
	got := b.do(t, "GET", "/api/messages/"+sent.body["msg_id"].(string), "")
	if got.body["status"] != "dispatched" || len(got.body["tasks"].([]any)) != 3 || !strings.Contains(got.raw, "no address") {
		t.Fatalf("%s", got.raw)
	}
	again := b.do(t, "POST", "/api/messages", `{"channels":["email","log","webhook"],"to":{"email":"a@example.com","log":"x"},"subject":"s","text":"hi","request_id":"k"}`)
	if again.status != 200 || again.body["msg_id"] != sent.body["msg_id"] || len(again.body["tasks"].([]any)) != 3 {
		t.Fatalf("%d %s", again.status, again.raw)
	}
	for name, body := range map[string]string{
		"one of two addresses is none": `{"channels":["email","log"],"to":{"email":"ann","log":"x"},"subject":"s","text":"hi"}`,
		"no addresses":                 `{"channels":["email","log"],"to":{},"subject":"s","text":"hi"}`,
		"a blank address":              `{"channels":["email","log"],"to":{"email":" ","log":"x"},"subject":"s","text":"hi"}`,
		"html alone":                   `{"channels":["email","log"],"to":{"email":"a@example.com","log":"x"},"subject":"s","html":"<p>hi"}`,
	} {
		if a := b.do(t, "POST", "/api/messages", body); a.status != 422 {
			t.Errorf("%s: %d %s", name, a.status, a.raw)
		}
	}
	db, err := sql.Open("mysql", b.dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	var n int
	if err := db.QueryRow("SELECT COUNT(*) FROM v_task").Scan(&n); err != nil || n != 3 {
		t.Fatalf("%d tasks, %v: a rejected request left some", n, err)
	}
}

func TestDryRun(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	b.do(t, "POST", "/api/templates", `{"template_id":"t","channel":"email","subject":"For {{name}}","content":"Hello {{name}}","html":"<p>{{name}}</p>"}`)
	good := `{"channels":["email","webhook"],"to":{"email":"a@example.com"},"template_id":"t","params":{"name":"Tom & Jerry"},"request_id":"k"}`
	if a := b.do(t, "POST", "/api/messages?dry_run=true", good); a.status != 200 || a.body["would_accept"] != false || !sameNames(a.fields(), []string{"channels[1]"}) {
		t.Fatalf("%d %s", a.status, a.raw)
	}
	good = strings.Replace(good, `["email","webhook"]`, `["email"]`, 1)
	a := b.do(t, "POST", "/api/messages?dry_run=true", good)
	if a.status != 200 || a.body["would_accept"] != true || !strings.Contains(a.raw, `"subject":"For Tom & Jerry","text":"Hello Tom & Jerry","html":"<p>Tom &amp; Jerry</p>"`) ||
		!strings.Contains(a.raw, `{"check":"idempotency","ok":true,"verdict":"new"}`) {
		t.Fatalf("%d %s", a.status, a.raw)
	}
	if a := b.do(t, "GET", "/api/messages", ""); !strings.Contains(a.raw, `"data":[]`) {
		t.Fatalf("the dry run accepted something: %s", a.raw)
	}
	real := b.do(t, "POST", "/api/messages", good)
	if real.status != 202 {
		t.Fatalf("%d %s", real.status, real.raw)
	}
	if a := b.do(t, "POST", "/api/messages?dry_run=true", good); !strings.Contains(a.raw, "known already: message "+real.body["msg_id"].(string)) {
		t.Fatalf("%s", a.raw)
	}
	if a := b.do(t, "POST", "/api/messages?dry_run=true", strings.Replace(good, "Tom", "Tim", 1)); a.body["would_accept"] != false {
		t.Fatalf("%s", a.raw)
	}
	if a := b.do(t, "POST", "/api/messages?dry_run=true", `{"text":5}`); a.status != 200 || a.body["would_accept"] != false || len(a.fields()) < 3 {
		t.Fatalf("%d %s", a.status, a.raw)
	}
	deep := strings.Repeat(`{"a":`, 40) + "1" + strings.Repeat("}", 40)
	if a := b.do(t, "POST", "/api/messages", fmt.Sprintf(`{"channels":["email"],"to":"a@example.com","template_id":"t","params":{"name":"x","deep":%s}}`, deep)); a.status != 422 || !sameNames(a.fields(), []string{"params"}) {
		t.Fatalf("%d %s", a.status, a.raw)
	}
}
