package server_test

import (
	"context"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"tidings/internal/msg"
	"tidings/store"
)

// dead sends a message and makes a dead letter of it.
func (b *bundle) dead(t testing.TB, body string) (id string) {
	t.Helper()
	a := b.do(t, "POST", "/api/messages", body)
	if a.status != 202 {
		t.Fatal(a.raw)
	}
	id = a.body["msg_id"].(string)
	b.bury(t, id)
	return id
}

// A dead letter is listed, shown, requeued and discarded, by its own source and by an admin.
func TestDeadLetters(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	admin, shop, bank := register(t, b)
	first := shop.dead(t, `{"channels":["log"],"to":"x","text":"hi","request_id":"r-1"}`)
	second := shop.dead(t, `{"channels":["log"],"to":"y","text":"hi","category":"marketing"}`)
	third := bank.dead(t, `{"channels":["log"],"to":"z","text":"hi"}`)

	list := func(who *bundle, query string) (ids []string, next string) {
		t.Helper()
		a := who.do(t, "GET", "/api/dead"+query, "")
		if a.status != 200 {
			t.Fatal(a.raw)
		}
		for _, d := range a.body["data"].([]any) {
			ids = append(ids, d.(map[string]any)["msg_id"].(string))
		}
		next, _ = a.body["next_cursor"].(string)
		return ids, next
	}
	for _, c := range []struct {
		who   *bundle
		query string
		want  []string
	}{
		{shop, "", []string{second, first}},
		{bank, "", []string{third}},
		{admin, "", []string{third, second, first}},
		{admin, "?source=shop", []string{second, first}},
		{shop, "?category=marketing", []string{second}},
		{shop, "?reason=TRY+later", []string{second, first}},
		{shop, "?reason=other", nil},
		{shop, "?channel=email", nil},
		{shop, "?since=2020-01-01T00:00:00Z&until=2020-01-02T00:00:00Z", nil},
	} {
		if got, _ := list(c.who, c.query); fmt.Sprint(got) != fmt.Sprint(c.want) {
			t.Errorf("%s: %v, want %v", c.query, got, c.want)
		}
	}
	for _, query := range []string{"/api/dead?source=bank", "/api/stats?source=bank"} {
		if a := shop.do(t, "GET", query, ""); a.status != 404 {
			t.Errorf("%s by another: %d %s", query, a.status, a.raw)
		}
	}
	for _, path := range []string{"/api/dead/requeue", "/api/dead/discard"} {
		if a := shop.do(t, "POST", path, `{"source":"bank"}`); a.status != 404 {
			t.Errorf("%s of another's: %d %s", path, a.status, a.raw)
		}
	}
	page, next := list(admin, "?limit=2")
	rest, end := list(admin, "?limit=2&cursor="+next)
	if len(page) != 2 || fmt.Sprint(rest) != fmt.Sprint([]string{first}) || end != "" {
		t.Errorf("pages %v and %v, next %q", page, rest, end)
	}
	for query, field := range map[string]string{"?since=yesterday": "since", "?cursor=1": "cursor", "?since=2026-01-02T00:00:00Z&until=2026-01-01T00:00:00Z": "since", "?channel=pigeon": "channel", "?limit=0": "limit"} {
		if a := shop.do(t, "GET", "/api/dead"+query, ""); a.status != 422 || !strings.Contains(a.raw, `"`+field+`"`) {
			t.Errorf("%s: %d %s", query, a.status, a.raw)
		}
	}
	a := shop.do(t, "GET", "/api/dead/"+first+"/log", "")
	if a.status != 200 || a.body["key"] != first+"-log" || a.body["reason"] != "421 try later" || a.body["attempt"] != 4.0 || a.body["request_id"] != "r-1" {
		t.Errorf("%d %s", a.status, a.raw)
	}
	for _, path := range []string{"/api/dead/" + first + "/email", "/api/dead/1/log", "/api/dead/x/log"} {
		if a := shop.do(t, "GET", path, ""); a.status != 404 {
			t.Errorf("%s: %d %s", path, a.status, a.raw)
		}
	}
	if a := bank.do(t, "POST", "/api/dead/"+first+"/log/requeue", ""); a.status != 404 {
		t.Errorf("somebody else's: %d %s", a.status, a.raw)
	}
	a = shop.do(t, "POST", "/api/dead/"+first+"/log/requeue", "")
	if a.status != 200 || a.body["status"] != "sending" || !strings.Contains(a.raw, `"attempt_limit":9`) {
		t.Errorf("requeue: %d %s", a.status, a.raw)
	}
	a = shop.do(t, "POST", "/api/dead/"+second+"/log/discard", `{"reason":"the sale is over"}`)
	if a.status != 200 || a.body["status"] != "failed" || !strings.Contains(a.raw, "the sale is over") {
		t.Errorf("discard: %d %s", a.status, a.raw)
	}
	if a := shop.do(t, "POST", "/api/dead/"+second+"/log/discard", ""); a.status != 404 {
		t.Errorf("discard again: %d %s", a.status, a.raw)
	}
}

// Requeueing by filter counts first, asks for a filter, refuses while the channel is out of order, and reaches its own only.
func TestRequeueByFilter(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	admin, shop, bank := register(t, b)
	for range 3 {
		shop.dead(t, `{"channels":["log"],"to":"x","text":"hi"}`)
	}
	bank.dead(t, `{"channels":["log"],"to":"x","text":"hi"}`)
	if a := shop.do(t, "POST", "/api/dead/requeue", `{}`); a.status != 422 || !strings.Contains(a.raw, `"all"`) {
		t.Errorf("no filter: %d %s", a.status, a.raw)
	}
	if a := shop.do(t, "POST", "/api/dead/requeue", `{"chanel":"log"}`); a.status != 422 {
		t.Errorf("unknown field: %d %s", a.status, a.raw)
	}
	a := shop.do(t, "POST", "/api/dead/requeue", `{"channel":"log","dry_run":true}`)
	if a.status != 200 || !strings.Contains(a.raw, `"counts":{"log":3}`) || a.body["tasks"] != 0.0 {
		t.Errorf("dry run: %d %s", a.status, a.raw)
	}
	if err := b.store.PauseProvider(context.Background(), "ann", "relay", "bad day", true); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"/api/dead/requeue"} {
		if a := shop.do(t, "POST", path, `{"channel":"log"}`); a.status != 409 || a.body["code"] != "channel_out_of_order" || !strings.Contains(a.raw, "provider relay is paused since") || strings.Contains(a.raw, "by ann") || strings.Contains(a.raw, "bad day") {
			t.Errorf("%s with a paused provider: %d %s", path, a.status, a.raw)
		}
	}
	if a := admin.do(t, "POST", "/api/dead/requeue", `{"channel":"log"}`); a.status != 409 || !strings.Contains(a.raw, "paused by ann") || !strings.Contains(a.raw, "bad day") || !strings.Contains(a.raw, "0 were handled before. Go on with until 20") {
		t.Errorf("for an admin: %d %s", a.status, a.raw)
	}
	if a := admin.do(t, "POST", "/api/dead/requeue", `{"channel":"log","dry_run":true}`); a.status != 200 {
		t.Errorf("a dry run: %d %s", a.status, a.raw)
	}
	if a := shop.do(t, "POST", "/api/dead/requeue", `{"channel":"log","force":true,"reason":"no such"}`); a.status != 200 || a.body["tasks"] != 0.0 {
		t.Errorf("forced: %d %s", a.status, a.raw)
	}
	if err := b.store.PauseProvider(context.Background(), "ann", "relay", "", false); err != nil {
		t.Fatal(err)
	}
	pause := func(paused bool) {
		if _, err := b.store.SetLane(context.Background(), "ann", msg.Middle, func(l *store.LaneControl) { l.Paused = paused }); err != nil {
			t.Fatal(err)
		}
	}
	pause(true)
	if a := shop.do(t, "POST", "/api/dead/requeue", `{"channel":"log"}`); a.status != 409 || !strings.Contains(a.raw, "lane middle is paused") {
		t.Errorf("into a paused lane: %d %s", a.status, a.raw)
	}
	pause(false)
	began := time.Now()
	a = shop.do(t, "POST", "/api/dead/requeue", `{"channel":"log","rate":10}`)
	if a.status != 200 || a.body["tasks"] != 3.0 || a.body["done"] != true || a.body["until"] == nil || time.Since(began) < 200*time.Millisecond {
		t.Errorf("requeue: %d %s after %v", a.status, a.raw, time.Since(began))
	}
	a = admin.do(t, "POST", "/api/dead/discard", `{"all":true,"because":"test"}`)
	if a.status != 200 || a.body["tasks"] != 1.0 {
		t.Errorf("an admin discards all: %d %s", a.status, a.raw)
	}
}

// Figures say what became of the messages, and what the reach was.
func TestStatsAnswer(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	for i := range 3 {
		id := b.do(t, "POST", "/api/messages", `{"channels":["log"],"to":"x","text":"hi"}`).body["msg_id"].(string)
		if i > 0 {
			b.bury(t, id)
			if a := b.do(t, "POST", "/api/dead/"+id+"/log/discard", ""); a.status != 200 {
				t.Fatal(a.raw)
			}
		} else if a := b.do(t, "POST", "/api/messages/"+id+"/cancel", ""); a.status != 200 {
			t.Fatal(a.raw)
		}
	}
	a := b.do(t, "GET", "/api/stats", "")
	if a.status != 200 || !strings.Contains(a.raw, `"tasks":3,"outcomes":{"cancelled":1,"failed":2},"reach":0`) {
		t.Errorf("%d %s", a.status, a.raw)
	}
	a = b.do(t, "GET", "/api/stats?by=day,source,template,channel,category,hour&channel=log&day="+b.store.Now().Format(time.DateOnly), "")
	if a.status != 200 || !strings.Contains(a.raw, `"source_id":"default","template_id":"","channel":"log","category":"notification"`) {
		t.Errorf("%d %s", a.status, a.raw)
	}
	if a := b.do(t, "GET", "/api/stats?day=2020-01-01", ""); a.status != 200 || !strings.Contains(a.raw, `"data":[]`) {
		t.Errorf("%d %s", a.status, a.raw)
	}
	for query, field := range map[string]string{"by=color": "by", "day=soon": "day", "day=2026-11-29&since=2026-11-29T00:00:00Z": "day", "until=x": "until"} {
		if a := b.do(t, "GET", "/api/stats?"+query, ""); a.status != 422 || !strings.Contains(a.raw, `"field":"`+field+`"`) {
			t.Errorf("%s: %d %s", query, a.status, a.raw)
		}
	}
}

// Requests are counted by route, and what is refused by its code.
func TestRequestMetrics(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	b.do(t, "POST", "/api/messages", `{"channels":["log"],"to":"x","text":"hi"}`)
	b.do(t, "POST", "/api/messages", `{"channels":["log"],"text":"hi"}`)
	b.do(t, "GET", "/api/messages/12345", "")
	b.do(t, "GET", "/nowhere/12345", "")
	res, err := b.http.Get(b.url + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	raw, err := io.ReadAll(res.Body)
	if err != nil || res.StatusCode != 200 {
		t.Fatal(res.Status, err)
	}
	text := string(raw)
	for _, line := range []string{
		`tidings_messages_rejected_total{reason="validation_failed"} 1`,
		`tidings_http_requests_total{code="202",method="POST",route="/api/messages"} 1`,
		`tidings_http_requests_total{code="404",method="GET",route="/api/messages/{id}"} 1`,
	} {
		if !strings.Contains(text, line+"\n") {
			t.Errorf("no %s", line)
		}
	}
	if strings.Contains(text, "12345") {
		t.Error("a path became a label")
	}
}
