package main

import (
	"database/sql"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// explained is what `tidings explain --json` prints of a message's one task.
type explained struct {
	Tasks []struct {
		Status, Why string
		Rows        []struct {
			Table, Where string
			Columns      map[string]any
		}
	}
}

// Every situation that a task can be in has its sentence, told by another process from what stands in the tables.
func TestExplain(t *testing.T) {
	t.Parallel()
	hook := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		code, _ := strconv.Atoi(strings.TrimPrefix(r.URL.Path, "/"))
		w.WriteHeader(code)
	}))
	t.Cleanup(hook.Close)
	db := startDB(t)
	dir := worldDir(t)
	closed := freeAddress(t)
	p := startTidings(t, dir, freeAddress(t), "mysql: {dsn: \""+db.DSN("tidings")+"\"}\nlog: {level: error}\ndegrade_after: 1s\n"+
		"policies: {verification: {retry: [1ms]}, notification: {retry: [1h]}}\nfrequency: {verification: {all: \"\"}, marketing: {all: \"\"}}\n"+
		"providers:\n  log: {type: log}\n  hook: {type: webhook, allow_internal: true}\n  slow: {type: log, delay: 20s}\n  thrifty: {type: log, rate: 0.01, burst: 1}\n"+
		"  rests: {type: log}\n  resting: {type: log}\n  relay: {type: smtp, host: 127.0.0.1, port: "+strings.TrimPrefix(closed, "127.0.0.1:")+", tls: none, from: a@example.com, breaker_open: 1h}\n"+
		"channels:\n  log: {providers: [log]}\n  webhook: {providers: [hook]}\n  sms: {providers: [slow]}\n  push: {providers: [thrifty]}\n"+
		"  inbox: {providers: [resting]}\n  dingtalk: {providers: [rests]}\n  email: {providers: [relay]}\n")
	view := openDB(t, db)
	by := func(query string, args ...any) {
		t.Helper()
		if _, err := view.Exec(query, args...); err != nil {
			t.Fatalf("%s: %v", query, err)
		}
	}
	tidings := func(args ...string) string {
		t.Helper()
		cmd := exec.Command(binary, args...)
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %v\n%s", args, err, out)
		}
		return string(out)
	}
	send := func(channel, to, more string) string {
		t.Helper()
		status, answer, _ := post(p.url, fmt.Sprintf(`{"channels":["%s"],"to":%q,"text":"hi"%s}`, channel, to, more))
		if status != 202 {
			t.Fatalf("%s %s: %d %v", channel, more, status, answer)
		}
		return answer["msg_id"].(string)
	}
	until := func(id, status string) string {
		t.Helper()
		await(t, id+" to be "+status, 20*time.Second, func() bool {
			return count(t, view, "v_task WHERE msg_id = ? AND status = '"+status+"'", id) == 1
		})
		return id
	}
	// row makes a task by hand, on a channel that the running process does not serve, so that it stays as it is.
	row := func(set string) string {
		t.Helper()
		id := send("log", "x", `,"delay":"30s"`) // within the lead: it stands in its lane
		by("UPDATE t_msg_queue_middle SET channel = 8, due_time = UTC_TIMESTAMP(3), next_time = UTC_TIMESTAMP(3), " + set + " WHERE msg_id = " + id)
		return id
	}
	const instant = `\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} UTC`

	byHand := map[string]string{}
	for name, set := range map[string]string{
		"leased by a process that has ended": "status = 1, owner = '900.1.1', attempt = 1, next_time = UTC_TIMESTAMP(3) + INTERVAL 1 MINUTE",
		"lease over":                         "status = 1, owner = '900.1.1', attempt = 5, next_time = UTC_TIMESTAMP(3) - INTERVAL 1 MINUTE",
		"unknown":                            "status = 2, attempt = 1, provider = 'fax', last_error = 'no answer', next_time = UTC_TIMESTAMP(3) + INTERVAL 1 MINUTE",
		"not configured":                     "status = 0",
	} {
		byHand[name] = row(set)
	}
	if count(t, view, "t_msg_queue_middle WHERE channel = 8 AND msg_id > 0") != len(byHand) {
		t.Fatal("the rows by hand are not there")
	}
	tidings("provider", "pause", "rests", "--reason", "bad day")
	by("INSERT INTO t_provider_state (provider, node, busy_until, modify_time) VALUES ('resting', 65535, UTC_TIMESTAMP(3) + INTERVAL 1 HOUR, UTC_TIMESTAMP(3))")
	tidings("lane", "pause", "low", "--reason", "the sale waits")
	await(t, "pauses to be obeyed", 10*time.Second, func() bool {
		res, err := http.Get(p.url + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		text := readAll(t, res)
		return strings.Contains(text, `tidings_lane_paused{lane="low"} 1`) && strings.Contains(text, `tidings_provider_usable{provider="resting"} 0`) &&
			strings.Contains(text, `tidings_provider_usable{provider="rests"} 0`)
	})
	// Ten mails that the closed port refuses open the breaker.
	for range 10 {
		send("email", "a@example.com", `,"subject":"x","category":"verification"`)
	}
	await(t, "the breaker to open", 20*time.Second, func() bool {
		return count(t, view, "t_provider_state WHERE provider = 'relay' AND breaker = 'open'") == 1
	})
	var tokens []string
	for range 5 {
		tokens = append(tokens, send("push", "x", ""))
	}
	cases := []struct{ name, id, why string }{
		{"scheduled", send("log", "x", `,"delay":"50h"`), `^It is scheduled for ` + instant + `: it waits in t_msg_delay_\w+, and moves to lane middle shortly before\.$`},
		{"soon", send("log", "x", `,"delay":"50s"`), `^It is due at ` + instant + `: it stands in lane middle already, and is sent then\.$`},
		{"sent", until(send("log", "x", ""), "success"), `^It was sent by log at ` + instant + `, by attempt 1\.$`},
		{"failed", until(send("webhook", hook.URL+"/410", ""), "failed"), `^It failed for good at ` + instant + `, in attempt 1 by hook: answered 410: gone for good\. It is not tried again\.$`},
		{"backing off", until(send("webhook", hook.URL+"/500", ""), "ready' AND attempt = '1"), `^It is backing off: attempt 2 of 2 is made at ` + instant + `; the last word of hook was "answered 500"\.$`},
		{"dead", until(send("webhook", hook.URL+"/500", `,"category":"verification"`), "dead"), `^It is a dead letter after 2 attempts: answered 500\. It waits for a person: tidings dead requeue \d+ webhook, or tidings dead discard \d+ webhook\.$`},
		{"sending", until(send("sms", "+8613800000000", ""), "sending"), `^Attempt 1 of 2 is under way: leased by node \d+ \(.+, process \d+\) until ` + instant + `\.$`},
		{"leased by a process that has ended", byHand["leased by a process that has ended"], `^Attempt 1 of 2 is leased by node 900 until ` + instant + `, but that process has ended: when the lease is over another one takes it over, and nobody will know whether it was sent: it is asked again, after a wait for a receipt where there are any\.$`},
		{"lease over", byHand["lease over"], `^Attempt 5 of 2 was leased by node 900 until ` + instant + `, and that has passed: .* with no attempt left it becomes a dead letter\.$`},
		{"unknown", byHand["unknown"], `^Nobody knows whether attempt 1 of 2 was sent \(no answer\): it waits for word of fax until ` + instant + `; then attempt 2 is made\.$`},
		{"not configured", byHand["not configured"], `^No provider of channel wecom is configured here: it waits for a process that has one, and expires at ` + instant + `\.$`},
		{"lane paused", send("log", "x", `,"priority":"low"`), `^Lane low is paused by command-line since ` + instant + ` \(the sale waits\): nothing of it is sent until somebody resumes it \(tidings lane resume low\); the task expires at ` + instant + `\.$`},
		{"scheduled in a paused lane", send("log", "x", `,"priority":"low","delay":"50h"`), `^It is scheduled for .* Lane low is paused by command-line`},
		{"provider paused", send("dingtalk", "x", ""), `^It is due, and waits: provider rests is paused by command-line since ` + instant + ` \(bad day\); it expires at ` + instant + `\.$`},
		{"provider busy", send("inbox", "x", ""), `^It is due, and waits: provider resting asked not to be asked before ` + instant + `; it expires at ` + instant + `\.$`},
		{"breaker open", send("email", "a@example.com", `,"subject":"x"`), `^(It is due, and waits|It was put off until ` + instant + `, for its provider could not be asked): provider relay fails: its breaker is open on node \d+ since ` + instant + `, and until ` + instant + `(; it expires at ` + instant + `)?\.$`},
		{"degraded", until(send("email", "a@example.com", `,"subject":"x","category":"marketing","priority":"high"`), "skipped"), `^It was skipped at ` + instant + `, because: no provider of email had been in order for 1s\.$`},
		{"behind others, for tokens", tokens[4], `^It is due since ` + instant + `, and waits behind [23] tasks of lane middle on push for tokens of thrifty, which may be asked 0\.01 times a second: about \d+m`},
		{"next, for a token", tokens[1], `^It is due since ` + instant + ` and comes next in its lane: it is sent as soon as thrifty has a free slot and a token: it may be asked 0\.01 times a second\.$`},
		{"expired", until(send("dingtalk", "x", `,"ttl":"10ms"`), "expired"), `^It expired: it was not to be sent after ` + instant + `; the time to send it was over before an attempt was made\.$`},
		{"cancelled", cancelled(t, p.url, send("log", "x", `,"delay":"50h"`)), `^It was cancelled by default at ` + instant + `\.$`},
	}
	discarded := until(send("webhook", hook.URL+"/500", `,"category":"verification"`), "dead")
	tidings("dead", "discard", discarded, "webhook", "--because", "a test")
	cases = append(cases, struct{ name, id, why string }{"discarded", discarded, `^It was a dead letter, and was discarded at ` + instant + ` by command-line: a test\.$`})
	check := func(name, id, why string) {
		t.Helper()
		var e explained
		if err := json.Unmarshal([]byte(tidings("explain", id, "--json")), &e); err != nil {
			t.Fatal(err)
		}
		if len(e.Tasks) != 1 || !regexp.MustCompile(why).MatchString(e.Tasks[0].Why) {
			t.Errorf("%s: %+v\nwant %s", name, e, why)
			return
		}
		for _, r := range e.Tasks[0].Rows { // what is named is there
			if n := count(t, view, r.Table+" WHERE "+r.Where); n != 1 {
				t.Errorf("%s: %s WHERE %s: %d rows", name, r.Table, r.Where, n)
			}
		}
		res, err := http.Get(p.url + "/api/messages/" + id + "/explain")
		if err != nil {
			return // it has been stopped
		}
		defer res.Body.Close()
		if body := readAll(t, res); !regexp.MustCompile(why).MatchString(whyOf(body)) {
			t.Errorf("%s by HTTP: %s", name, body)
		}
	}
	for _, c := range cases {
		check(c.name, c.id, c.why)
	}
	status, answer, _ := post(p.url, `{"channels":["log","webhook"],"to":{"log":"x"},"text":"hi","request_id":"order-42"}`)
	if status != 202 {
		t.Fatalf("%d %v", status, answer)
	}
	until(answer["msg_id"].(string), "success")
	if out := tidings("explain", answer["msg_id"].(string)); !regexp.MustCompile(`webhook: skipped\n  It was skipped at ` + instant + `, because: .*`).MatchString(out) {
		t.Errorf("no address: %s", out)
	} else if by := tidings("explain", "--request-id", "order-42"); by != out {
		t.Errorf("by request_id: %s\nwant %s", by, out)
	}
	p.stop(t, syscall.SIGTERM)
	check("put off", putOff(t, view.Exec, tokens[3]), `^It was put off until `+instant+`\.`)
	check("nobody alive", tokens[4], `^It is due since `+instant+`\. But no process of Tidings is alive that would do it \(t_node\)\.$`)
	if out, err := exec.Command(binary, "explain", "x").CombinedOutput(); err == nil || !strings.Contains(string(out), `"x" is no message id`) {
		t.Errorf("%v %s", err, out)
	}
	unknown := exec.Command(binary, "explain", "12345")
	unknown.Dir = dir
	if out, err := unknown.CombinedOutput(); err == nil || !strings.Contains(string(out), "not found") {
		t.Errorf("%v %s", err, out)
	}
}

func readAll(t testing.TB, res *http.Response) string {
	t.Helper()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(body)
}

// whyOf is the sentence of an answer with one task.
func whyOf(body string) string {
	var e explained
	if json.Unmarshal([]byte(body), &e) != nil || len(e.Tasks) != 1 {
		return ""
	}
	return e.Tasks[0].Why
}

func cancelled(t testing.TB, url, id string) string {
	t.Helper()
	res, err := http.Post(url+"/api/messages/"+id+"/cancel", "application/json", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if res.StatusCode != 200 {
		t.Fatal(readAll(t, res))
	}
	return id
}

// putOff makes a task look as one that the engine has put off without an attempt.
func putOff(t testing.TB, exec func(string, ...any) (sql.Result, error), id string) string {
	t.Helper()
	if _, err := exec("UPDATE t_msg_queue_middle SET next_time = UTC_TIMESTAMP(3) + INTERVAL 1 MINUTE WHERE msg_id = " + id); err != nil {
		t.Fatal(err)
	}
	return id
}
