package server_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"tidings/internal/msg"
	"tidings/internal/testdb"
	"tidings/store"
)

func TestSendAt(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	const head = `{"channels":["log"],"to":"x","text":"hi",`
	noon := time.Date(b.store.Now().Year()+1, 6, 1, 12, 0, 0, 0, time.UTC)
	for _, c := range []struct {
		name, rest string
		status     int
		fields     string
		due        time.Time // zero: as the request says, about
		expire     time.Time
	}{
		{name: "UTC", rest: `"send_at":"` + noon.Format(time.RFC3339) + `"}`, status: 202, due: noon, expire: noon.Add(24 * time.Hour)},
		{name: "an offset", rest: fmt.Sprintf(`"send_at":"%d-06-01T20:00:00+08:00"}`, noon.Year()), status: 202, due: noon, expire: noon.Add(24 * time.Hour)},
		{name: "Unix milliseconds", rest: fmt.Sprintf(`"send_at":%d}`, noon.UnixMilli()), status: 202, due: noon, expire: noon.Add(24 * time.Hour)},
		{name: "less than a millisecond rounds up", rest: fmt.Sprintf(`"send_at":"%d-06-01T11:59:59.9990001Z"}`, noon.Year()), status: 202, due: noon, expire: noon.Add(24 * time.Hour)},
		{name: "ttl counts from it", rest: `"send_at":"` + noon.Format(time.RFC3339) + `","ttl":"10m"}`, status: 202, due: noon, expire: noon.Add(10 * time.Minute)},
		{name: "expire_time", rest: fmt.Sprintf(`"send_at":%d,"expire_time":%d}`, noon.UnixMilli(), noon.Add(time.Minute).UnixMilli()), status: 202, due: noon, expire: noon.Add(time.Minute)},
		{name: "the category's expiry", rest: `"category":"verification","send_at":"` + noon.Format(time.RFC3339) + `"}`, status: 202, due: noon, expire: noon.Add(5 * time.Minute)},
		{name: "expire_time before it", rest: fmt.Sprintf(`"send_at":%d,"expire_time":%d}`, noon.UnixMilli(), noon.Add(-time.Minute).UnixMilli()), status: 422, fields: "expire_time"},
		{name: "no offset", rest: `"send_at":"2027-06-01T12:00:00"}`, status: 422, fields: "send_at"},
		{name: "seconds", rest: `"send_at":1812345678}`, status: 422, fields: "send_at"},
		{name: "nonsense", rest: `"send_at":"tomorrow"}`, status: 422, fields: "send_at"},
		{name: "an object", rest: `"send_at":{}}`, status: 422, fields: "send_at"},
		{name: "a truth", rest: `"send_at":true}`, status: 422, fields: "send_at"},
		{name: "eleven years", rest: fmt.Sprintf(`"send_at":"%d-01-01T00:00:00Z"}`, noon.Year()+11), status: 422, fields: "send_at"},
		{name: "the year 10000", rest: `"send_at":"10000-01-01T00:00:00Z"}`, status: 422, fields: "send_at"},
		{name: "so long ago that it has expired", rest: fmt.Sprintf(`"send_at":%d}`, b.store.Now().Add(-25*time.Hour).UnixMilli()), status: 422, fields: "send_at"},
		{name: "expired with a ttl", rest: fmt.Sprintf(`"send_at":%d,"ttl":"1h"}`, b.store.Now().Add(-2*time.Hour).UnixMilli()), status: 422, fields: "ttl"},
		{name: "a delay and an instant", rest: `"send_at":"` + noon.Format(time.RFC3339) + `","delay":"10m"}`, status: 422, fields: "delay"},
		{name: "a delay below zero", rest: `"delay":"-1s"}`, status: 422, fields: "delay"},
		{name: "a delay of eleven years", rest: `"delay":"96360h"}`, status: 422, fields: "delay"},
		{name: "a delay in words", rest: `"delay":"soon"}`, status: 422, fields: "delay"},
		{name: "a delay as a number", rest: `"delay":10}`, status: 422, fields: "delay"},
		{name: "two faults", rest: `"delay":"soon","ttl":"never"}`, status: 422, fields: "delay ttl"},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := b.do(t, "POST", "/api/messages", head+c.rest)
			if a.status != c.status || strings.Join(a.fields(), " ") != c.fields {
				t.Fatalf("%d %v, want %d %s: %s", a.status, a.fields(), c.status, c.fields, a.raw)
			}
			if c.status != 202 {
				return
			}
			if a.body["status"] != "scheduled" || a.body["due_time"] != c.due.Format(time.RFC3339) {
				t.Errorf("answered %s, want due %v", a.raw, c.due)
			}
			m := b.do(t, "GET", "/api/messages/"+a.body["msg_id"].(string), "")
			if m.body["due_time"] != c.due.Format(time.RFC3339) || m.body["expire_time"] != c.expire.Format(time.RFC3339) || m.body["status"] != "scheduled" {
				t.Errorf("stands as %s, want due %v, expired %v", m.raw, c.due, c.expire)
			}
		})
	}
}

// The ways in for many take send_at and delay, too.
func TestSendAtForMany(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	const item = `{"channels":["log"],"to":"x","text":"hi","delay":"%s"}`
	a := b.do(t, "POST", "/api/messages/batch?batch_id=b", fmt.Sprintf("["+item+","+item+"]", "10m", "never"))
	if a.body["accepted"] != 1.0 || a.body["rejected"] != 1.0 {
		t.Error(a.raw)
	}
	a = b.do(t, "POST", "/api/messages/bulk?batch_id=b", fmt.Sprintf(item, "10m"), "Content-Type", "application/x-ndjson")
	if a.body["accepted"] != 1.0 {
		t.Error(a.raw)
	}
	if a := b.do(t, "GET", "/api/messages?status=scheduled", ""); len(a.body["data"].([]any)) != 2 {
		t.Error(a.raw)
	}
	if a := b.do(t, "POST", "/api/batches/b/cancel", ""); a.status != 200 || a.body["cancelled"] != 2.0 || a.body["done"] != true || a.body["counts"].(map[string]any)["cancelled"] != 2.0 {
		t.Error(a.status, a.raw)
	}
	if a := b.do(t, "POST", "/api/batches/none/cancel", ""); a.status != 404 {
		t.Error(a.status, a.raw)
	}
}

func TestCancelAndRescheduleByHTTP(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	send := func(rest string) string {
		t.Helper()
		a := b.do(t, "POST", "/api/messages", `{"channels":["log"],"to":"x","text":"hi"`+rest+`}`)
		if a.status != 202 {
			t.Fatal(a.raw)
		}
		return a.body["msg_id"].(string)
	}
	expect := func(a answer, status int, has string) {
		t.Helper()
		if a.status != status || !strings.Contains(a.raw, has) {
			t.Errorf("%d %s, want %d with %s", a.status, a.raw, status, has)
		}
	}
	id := send(`,"delay":"3h","request_id":"order 7"`)
	expect(b.do(t, "POST", "/api/messages/"+id+"/reschedule", `{"delay":"5h"}`), 200, `"status":"scheduled"`)
	expect(b.do(t, "POST", "/api/messages/"+id+"/reschedule", `{"send_at":"2035-01-01T08:00:00+08:00","ttl":"1h"}`), 200, `"due_time":"2035-01-01T00:00:00Z","expire_time":"2035-01-01T01:00:00Z"`)
	expect(b.do(t, "POST", "/api/messages/"+id+"/reschedule", `{"send_at":2051222400000}`), 200, `"due_time":"2035-01-01T00:00:00Z"`)
	for body, field := range map[string]string{
		`{}`: "send_at", `{"delay":"x"}`: "delay", `{"send_at":"x"}`: "send_at", `{"send_at":true}`: "send_at", `{"delay":"1h","send_at":"2035-01-01T08:00:00Z"}`: "delay",
		`{"delay":"1h","ttl":"x"}`: "ttl", `{"delay":"1h","expire_time":"2020-01-01T00:00:00Z"}`: "expire_time", `{"at":"x"}`: "at", `{"send_at":"2026-01-01T00:00:00Z"}`: "send_at",
	} {
		if a := b.do(t, "POST", "/api/messages/"+id+"/reschedule", body); a.status != 422 || !slices.Contains(a.fields(), field) {
			t.Errorf("%s: %d %s, want 422 for %s", body, a.status, a.raw, field)
		}
	}
	expect(b.do(t, "POST", "/api/messages/cancel?request_id=order%207", ""), 200, `"status":"cancelled","cancelled":1`)
	expect(b.do(t, "POST", "/api/messages/"+id+"/cancel", ""), 200, `"status":"cancelled","cancelled":0`)
	expect(b.do(t, "POST", "/api/messages/"+id+"/reschedule", `{"delay":"5h"}`), 409, `already_ended`)
	expect(b.do(t, "POST", "/api/messages", `{"channels":["log"],"to":"x","text":"hi","delay":"3h","request_id":"order 7"}`), 200, `"msg_id":"`+id+`","status":"cancelled","duplicate":true`)
	expect(b.do(t, "POST", "/api/messages/cancel?request_id=none", ""), 404, `not_found`)
	expect(b.do(t, "POST", "/api/messages/cancel", ""), 422, `request_id`)
	expect(b.do(t, "POST", "/api/messages/123/cancel", ""), 404, `not_found`)
	expect(b.do(t, "POST", "/api/messages/abc/cancel", ""), 404, `not_found`)

	sending := send("")
	claimed, err := b.store.Claim(context.Background(), msg.Middle, msg.Log, 10, time.Time{})
	if err != nil || len(claimed.Tasks) != 1 {
		t.Fatal(claimed, err)
	}
	expect(b.do(t, "POST", "/api/messages/"+sending+"/cancel", ""), 409, `"being_sent"`)
	if _, err := b.store.Settle(context.Background(), []store.Outcome{{Task: claimed.Tasks[0], State: msg.Success, Finished: b.store.Now()}}); err != nil {
		t.Fatal(err)
	}
	expect(b.do(t, "POST", "/api/messages/"+sending+"/cancel", ""), 409, `It stands at: log success.`)
}

func TestListScheduledByHTTP(t *testing.T) {
	t.Parallel()
	s := testdb.Open(t, store.Config{DSN: testdb.New(t)})
	b := serve(t, s, "", false)
	var want []string
	for _, delay := range []string{"3h", "1h", "200h", "2h"} {
		a := b.do(t, "POST", "/api/messages", `{"channels":["log"],"to":"x","text":"hi","delay":"`+delay+`"}`)
		want = append(want, a.body["msg_id"].(string))
	}
	want = []string{want[1], want[3], want[0], want[2]}
	var got []string
	for path := "/api/messages?status=scheduled&limit=3"; path != ""; {
		a := b.do(t, "GET", path, "")
		if a.status != 200 {
			t.Fatal(a.raw)
		}
		for _, m := range a.body["data"].([]any) {
			got = append(got, m.(map[string]any)["msg_id"].(string))
		}
		path = ""
		if next, ok := a.body["next_cursor"].(string); ok {
			path = "/api/messages?status=scheduled&limit=3&cursor=" + next
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	for _, cursor := range []string{"x", "1", "1-", "-", "9999999999999999-1", "-5-1", "1-1garbage", "1-0"} {
		if a := b.do(t, "GET", "/api/messages?status=scheduled&cursor="+cursor, ""); a.status != 422 {
			t.Errorf("cursor %s: %d", cursor, a.status)
		}
	}
}
