package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// receiver is a webhook receiver that remembers by key when it was told.
type receiver struct {
	*httptest.Server
	mu      sync.Mutex
	failing bool
	failed  map[string]int
	told    map[string][]time.Time
}

func newReceiver(t testing.TB) *receiver {
	r := &receiver{failing: true, failed: map[string]int{}, told: map[string][]time.Time{}}
	r.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		key := req.Header.Get("webhook-id")
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.failing {
			r.failed[key]++
			w.WriteHeader(http.StatusInternalServerError)
			return
		}
		r.told[key] = append(r.told[key], time.Now())
	}))
	t.Cleanup(r.Close)
	return r
}

// A thousand dead letters are requeued by filter while the process is killed twice: each is sent, under the key that it always had,
// and the audit says who did it. Sent twice is only what was sent within a second before a kill, as ever.
func TestRequeueUnderKills(t *testing.T) {
	t.Parallel()
	const n = 1000
	hook := newReceiver(t)
	db := startDB(t)
	dir, address := worldDir(t), freeAddress(t)
	config := "mysql: {dsn: \"" + db.DSN("tidings") + "\"}\nqueue: {lease: 3s, send_timeout: 1s, settle_budget: 1s}\nlog: {level: error}\n" +
		"policies: {notification: {retry: [1ms]}}\nproviders: {hook: {type: webhook, allow_internal: true}}\nchannels: {webhook: {providers: [hook]}}\n"
	p := startTidings(t, dir, address, config)
	var lines strings.Builder
	for i := range n {
		fmt.Fprintf(&lines, `{"channels":["webhook"],"to":"%s/%d","text":"hi","request_id":"r-%d"}`+"\n", hook.URL, i, i)
	}
	res, err := http.Post(p.url+"/api/messages/bulk", "application/x-ndjson", strings.NewReader(lines.String()))
	if err != nil {
		t.Fatal(err)
	}
	readAll(t, res)
	res.Body.Close()
	view := openDB(t, db)
	await(t, "all to be dead", time.Minute, func() bool { return count(t, view, "t_msg_dead") == n })
	hook.mu.Lock()
	hook.failing = false
	hook.mu.Unlock()

	var kills []time.Time
	until := ""
	handled, asked := 0, 0
	requeue := func() (done bool) {
		asked++
		body := fmt.Sprintf(`{"channel":"webhook","reason":"answered 500","rate":250%s}`, until)
		res, err := http.Post(p.url+"/api/dead/requeue", "application/json", strings.NewReader(body))
		if err != nil {
			return false // it was killed
		}
		defer res.Body.Close()
		var answer struct {
			Tasks int
			Done  bool
			Until string
		}
		if text := readAll(t, res); res.StatusCode != 200 || json.Unmarshal([]byte(text), &answer) != nil {
			t.Errorf("%d %s", res.StatusCode, text)
		}
		handled += answer.Tasks
		return answer.Done
	}
	// Nobody had an answer that says until when; the caller names it from the start.
	until = `,"until":"` + time.Now().UTC().Add(time.Second).Format(time.RFC3339Nano) + `"`
	for range 2 {
		left := count(t, view, "t_msg_dead")
		finished := make(chan bool)
		go func() { finished <- requeue() }()
		await(t, "some to be requeued", 20*time.Second, func() bool { return count(t, view, "t_msg_dead") < left-150 })
		kills = append(kills, time.Now())
		p.stop(t, syscall.SIGKILL)
		if <-finished {
			t.Error("it was done before it was killed: the test shows little")
		}
		p = startTidings(t, dir, address, config)
	}
	for !requeue() {
		if asked > 10 {
			t.Fatal("it is never done")
		}
	}
	await(t, "all to be sent", time.Minute, func() bool { return count(t, view, "t_msg_record WHERE status = 3") == n })
	hook.mu.Lock()
	defer hook.mu.Unlock()
	twice := 0
	for key, at := range hook.told {
		if hook.failed[key] != 2 {
			t.Errorf("%s was not asked for before, or not twice: %d", key, hook.failed[key])
		}
		if len(at) > 1 {
			twice++
			// 250 a second and their records are much for a machine that runs other tests: a record may come late.
			if !shortlyBefore(at[0], kills, 3*time.Second) {
				t.Errorf("%s was sent %d times, first at %v, far from any kill", key, len(at), at[0])
			}
		}
	}
	if len(hook.told) != n || len(hook.failed) != n {
		t.Errorf("%d keys were sent, of %d", len(hook.told), len(hook.failed))
	}
	if left := count(t, view, "v_task WHERE status <> 'success'"); left != 0 {
		t.Errorf("%d tasks are not sent", left)
	}
	audited := 0
	rows, err := view.Query("SELECT object FROM t_audit WHERE action = 'dead.requeue' AND source_id = 'default'")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var object string
		if err := rows.Scan(&object); err != nil {
			t.Fatal(err)
		}
		if number, ok := strings.CutSuffix(object, " dead letters"); ok {
			letters, err := strconv.Atoi(number)
			if err != nil {
				t.Fatal(err)
			}
			audited += letters
		} else {
			audited++
		}
	}
	if audited != n {
		t.Errorf("the audit has %d of them", audited)
	}
	t.Logf("%d requeued over %d calls and 2 kills, %d of them by calls that answered; %d sent, twice %d", n, asked, handled, len(hook.told), twice)
}
