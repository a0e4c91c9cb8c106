package main

import (
	"database/sql"
	"fmt"
	"net/http"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"
)

var sqlBlock = regexp.MustCompile("(?s)```sql\n(.*?)```")

// handEdits are the snippets of a heading of docs/dba.md.
func handEdits(t *testing.T) map[string][]string {
	t.Helper()
	text, err := os.ReadFile("docs/dba.md")
	if err != nil {
		t.Fatal(err)
	}
	_, part, _ := strings.Cut(string(text), "## Change by hand")
	part, _, _ = strings.Cut(part, "\n## ")
	edits := map[string][]string{}
	for _, section := range strings.Split(part, "\n### ")[1:] {
		heading, body, _ := strings.Cut(section, "\n")
		for _, block := range sqlBlock.FindAllStringSubmatch(body, -1) {
			edits[heading] = append(edits[heading], block[1])
		}
	}
	return edits
}

// Every change by hand that docs/dba.md shows does what it says there, while workers are busy with the same tables.
func TestHandEdits(t *testing.T) {
	t.Parallel()
	db := startDB(t)
	dir, address := worldDir(t), freeAddress(t)
	p := startTidings(t, dir, address, "mysql: {dsn: \""+db.DSN("tidings")+"\"}\nlog: {level: error}\nfrequency: {verification: {all: \"\"}, marketing: {all: \"\"}}\n"+
		"providers: {log: {type: log, delay: 2ms}, relay: {type: log, print: false}}\nchannels: {log: {providers: [log]}, sms: {providers: [relay]}}\n")
	view := openDB(t, db)
	// As a client has it: several statements at once, and InnoDB's own isolation.
	hand, err := sql.Open("mysql", db.DSN("tidings")+"?multiStatements=true&tx_isolation=%27REPEATABLE-READ%27&time_zone=%27%2B08%3A00%27")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { hand.Close() })
	stop := make(chan struct{})
	var busy sync.WaitGroup
	for _, priority := range []string{"high", "middle", "low"} {
		busy.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					if status, answer, _ := post(p.url, `{"channels":["log"],"to":"busy","text":"hi","priority":"`+priority+`"}`); status != 202 {
						t.Errorf("%d %v", status, answer)
						return
					}
				}
			}
		})
	}
	edits, done := handEdits(t), map[string]bool{}
	edit := func(heading string, n int, id string, more ...string) {
		t.Helper()
		done[fmt.Sprintf("%s %d", heading, n)] = true
		if n >= len(edits[heading]) {
			t.Fatalf("docs/dba.md has no snippet %d under %q", n, heading)
		}
		text := strings.NewReplacer(append([]string{"253138251735207936", id, "channel = 1 ", "channel = 31 ", "channel = 1;", "channel = 31;"}, more...)...).Replace(edits[heading][n])
		if _, err := hand.Exec(text); err != nil {
			t.Fatalf("%s: %v\n%s", heading, err, text)
		}
	}
	send := func(more string) string {
		t.Helper()
		status, answer, _ := post(p.url, `{"channels":["log"],"to":"ann","text":"hi"`+more+`}`)
		if status != 202 {
			t.Fatalf("%d %v", status, answer)
		}
		return answer["msg_id"].(string)
	}
	becomes := func(id, status string) {
		t.Helper()
		await(t, id+" to be "+status, 20*time.Second, func() bool { return count(t, view, "v_task WHERE msg_id = ? AND status = ?", id, status) == 1 })
		if n := count(t, view, "v_task WHERE msg_id = ?", id); n != 1 {
			t.Errorf("%s stands in %d places", id, n)
		}
	}
	// waiting stands in its queue table for half a minute, if nobody does anything.
	waiting := func(priority string) string { return send(`,"delay":"30s","priority":"` + priority + `"`) }

	id := waiting("middle")
	set(t, view, "UPDATE t_msg_queue_middle SET status = 1, owner = '900.1.1', attempt = 1, next_time = UTC_TIMESTAMP(3) + INTERVAL 1 MINUTE WHERE msg_id = ?", id)
	edit("Release a task whose process hangs", 0, id)
	becomes(id, "success")

	id = waiting("middle")
	edit("Send it later, or sooner", 0, id, "INTERVAL 5 SECOND", "INTERVAL 1 SECOND")
	becomes(id, "success")

	id = send(`,"delay":"200h"`)
	edit("Send it later, or sooner", 1, id, "INTERVAL 5 SECOND", "INTERVAL 1 SECOND")
	becomes(id, "success")

	id = waiting("middle")
	edit("Give it more time and more attempts", 0, id)
	if n := count(t, view, "t_msg_queue_middle WHERE msg_id = ? AND attempt_limit = 5 AND expire_time > UTC_TIMESTAMP(3) + INTERVAL 23 HOUR", id); n != 1 {
		t.Error("it has no more time")
	}

	id = waiting("low")
	edit("Move it to another lane", 0, id)
	if n := count(t, view, "v_task WHERE msg_id = ? AND place = 't_msg_queue_high' AND priority = 'high'", id); n != 1 {
		t.Error("it is not in the lane high")
	}
	set(t, view, "UPDATE t_msg_queue_high SET next_time = UTC_TIMESTAMP(3) WHERE msg_id = ?", id)
	becomes(id, "success")
	// A worker that claims it in between keeps it: the snippet moves nothing, or the worker finds nothing.
	for range 20 {
		id := send(`,"priority":"low"`)
		edit("Move it to another lane", 0, id)
		becomes(id, "success")
	}

	id = waiting("middle")
	edit("Cancel it", 0, id)
	becomes(id, "cancelled")

	dead := func() string {
		id := waiting("middle")
		set(t, view, "INSERT INTO t_msg_dead SELECT * FROM t_msg_queue_middle WHERE msg_id = ?", id)
		set(t, view, "DELETE FROM t_msg_queue_middle WHERE msg_id = ?", id)
		set(t, view, "UPDATE t_msg_dead SET status = 5 WHERE msg_id = ?", id)
		return id
	}
	id = dead()
	edit("Send a dead letter again", 0, id)
	becomes(id, "success")
	id = waiting("middle") // which is no dead letter: nothing happens to it
	edit("Send a dead letter again", 0, id)
	edit("Give a dead letter up", 0, id)
	if n := count(t, view, "t_msg_queue_middle WHERE msg_id = ? AND status = 0 AND attempt_limit = 5 AND next_time > UTC_TIMESTAMP(3)", id); n != 1 {
		t.Error("a task that was no dead letter was changed")
	}
	id = dead()
	edit("Give a dead letter up", 0, id)
	becomes(id, "failed")

	edit("Pause a lane, and let it run", 0, "")
	await(t, "the lane to stand still", 10*time.Second, func() bool { return strings.Contains(verbose(t, p.url), `"lane":"low","weight":10,"paused":true`) })
	id = send(`,"priority":"low"`)
	edit("Pause a lane, and let it run", 1, "")
	becomes(id, "success")

	edit("Pause a channel", 0, "")
	await(t, "the provider to be paused", 10*time.Second, func() bool {
		return strings.Contains(verbose(t, p.url), `"provider":"relay","usable":false,"paused":true`)
	})
	status, answer, _ := post(p.url, `{"channels":["sms"],"to":"+8613800000000","text":"hi"}`)
	if status != 202 {
		t.Fatalf("%d %v", status, answer)
	}
	id = answer["msg_id"].(string)
	if n := count(t, view, "v_task WHERE msg_id = ? AND status = 'ready'", id); n != 1 {
		t.Error("a paused provider was asked")
	}
	edit("Pause a channel", 1, "")
	becomes(id, "success")

	edit("Set a quota", 0, "", "'shop', 2, 5000, 1000", "'default', 2, 1, 3600000")
	await(t, "the quota to hold", 10*time.Second, func() bool {
		status, _, _ := post(p.url, `{"channels":["sms"],"to":"+8613800000001","text":"hi"}`)
		return status == 429
	})

	set(t, view, "INSERT INTO t_source_key (key_id, source_id, key_hash, create_time) VALUES ('ab12cd34', 'gone', REPEAT('x', 32), UTC_TIMESTAMP(3))")
	edit("Take a key out of use", 0, "")
	if n := count(t, view, "t_source_key WHERE key_id = 'ab12cd34' AND revoke_time IS NOT NULL"); n != 1 {
		t.Error("the key is in use")
	}

	set(t, view, `INSERT INTO t_msg_submit (submit_id, source_id, channels, receiver) VALUES (42, 'default', 'log', 'ann')`)
	await(t, "the submission to be rejected", 10*time.Second, func() bool { return count(t, view, "t_msg_submit WHERE submit_id = 42 AND status = 'rejected'") == 1 })
	set(t, view, `UPDATE t_msg_submit SET content = '{"text": "hi"}' WHERE submit_id = 42`)
	edit("Try a rejected request by SQL again, or withdraw one", 0, "")
	await(t, "the submission to be accepted", 10*time.Second, func() bool { return count(t, view, "t_msg_submit WHERE submit_id = 42 AND status = 'accepted'") == 1 })
	set(t, view, `INSERT INTO t_msg_submit (submit_id, source_id, channels, receiver, next_time) VALUES (43, 'default', 'log', 'ann', UTC_TIMESTAMP(3) + INTERVAL 1 HOUR)`)
	edit("Try a rejected request by SQL again, or withdraw one", 1, "", "= 42", "= 43")
	if n := count(t, view, "t_msg_submit WHERE submit_id = 43"); n != 0 {
		t.Error("it is there still")
	}

	close(stop)
	busy.Wait()
	for heading, blocks := range edits {
		for n := range blocks {
			if !done[fmt.Sprintf("%s %d", heading, n)] {
				t.Errorf("snippet %d under %q is not tested", n, heading)
			}
		}
	}
	await(t, "an empty queue", 30*time.Second, func() bool { return count(t, view, "v_task WHERE receiver = 'busy' AND status <> 'success'") == 0 })
	if twice := count(t, view, "(SELECT msg_id FROM v_task GROUP BY msg_id, channel HAVING COUNT(*) > 1) AS twice"); twice != 0 {
		t.Errorf("%d tasks stand in two places", twice)
	}
}

// Every view is explained to those who are to use it.
func TestEveryViewIsExplained(t *testing.T) {
	t.Parallel()
	schema, err := os.ReadFile("schema.sql")
	if err != nil {
		t.Fatal(err)
	}
	guide, err := os.ReadFile("docs/dba.md")
	if err != nil {
		t.Fatal(err)
	}
	names := regexp.MustCompile(`VIEW (v_\w+) AS`).FindAllStringSubmatch(string(schema), -1)
	if len(names) < 14 {
		t.Fatalf("%d views", len(names))
	}
	for _, m := range names {
		if !strings.Contains(string(guide), "`"+m[1]) {
			t.Errorf("docs/dba.md does not explain %s", m[1])
		}
	}
}

func set(t *testing.T, db *sql.DB, query string, args ...any) {
	t.Helper()
	if _, err := db.Exec(query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

// verbose is what a process says of its lanes and providers.
func verbose(t *testing.T, url string) string {
	t.Helper()
	res, err := http.Get(url + "/readyz?verbose")
	if err != nil {
		t.Fatal(err)
	}
	return readAll(t, res)
}
