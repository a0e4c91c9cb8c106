package server_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"runtime"
	"strings"
	"testing"
	"time"

	"tidings/store"
)

func TestBatch(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	good := func(id string) string { return `{"channels":["log"],"to":"x","text":"hi","request_id":"` + id + `"}` }
	a := b.do(t, "POST", "/api/messages/batch?batch_id=autumn", "["+good("1")+","+`{"channels":["log"]}`+","+good("1")+","+good("2")+`,7,`+strings.Replace(good("2"), "hi", "ho", 1)+"]")
	if a.status != 200 || a.body["accepted"] != 2.0 || a.body["duplicates"] != 1.0 || a.body["rejected"] != 3.0 {
		t.Fatalf("%d %s", a.status, a.raw)
	}
	results := a.body["results"].([]any)
	for i, code := range []string{"", "validation_failed", "", "", "validation_failed", "idempotency_conflict"} {
		r := results[i].(map[string]any)
		failed, _ := r["error"].(map[string]any)
		if got, _ := failed["code"].(string); got != code || (code == "") != (r["msg_id"] != nil) {
			t.Errorf("item %d: %v", i, r)
		}
	}
	if results[0].(map[string]any)["msg_id"] != results[2].(map[string]any)["msg_id"] {
		t.Error("the repetition has another id")
	}
	campaign := b.do(t, "GET", "/api/batches/autumn", "")
	if campaign.body["tasks"] != 2.0 || !strings.Contains(campaign.raw, `"channels":{"log":{"ready":2}}`) {
		t.Errorf("%s", campaign.raw)
	}
	single := b.do(t, "POST", "/api/messages", `{"channels":["log","email"],"to":{"log":"x"},"subject":"s","text":"hi","batch_id":"autumn"}`)
	if single.status != 202 {
		t.Fatal(single.raw)
	}
	if got := b.do(t, "GET", "/api/batches/autumn", ""); !strings.Contains(got.raw, `"counts":{"ready":3,"skipped":1}`) {
		t.Errorf("%s", got.raw)
	}
	if got := b.do(t, "GET", "/api/batches", ""); len(got.body["data"].([]any)) != 1 {
		t.Errorf("%s", got.raw)
	}
	for name, body := range map[string]string{"an object": good("x"), "none": "[]", "too many": "[" + strings.Repeat(good("x")+",", 1000) + good("x") + "]"} {
		if a := b.do(t, "POST", "/api/messages/batch", body); a.status != 422 {
			t.Errorf("%s: %d %s", name, a.status, a.raw)
		}
	}
	if a := b.do(t, "POST", "/api/messages/batch", "["+good("x")+","); a.status != 400 {
		t.Errorf("%d %s", a.status, a.raw)
	}
	if a := b.do(t, "POST", "/api/messages/batch?batch_id=a%20b", "["+good("x")+"]"); a.status != 422 {
		t.Errorf("%d %s", a.status, a.raw)
	}
	if a := b.do(t, "GET", "/api/batches/none", ""); a.status != 404 {
		t.Errorf("%d %s", a.status, a.raw)
	}
}

// bulk sends lines and returns the last line of the answer.
func (b *bundle) bulk(t testing.TB, path string, lines io.Reader) (last map[string]any, progress int) {
	t.Helper()
	res, err := b.http.Post(b.url+path, "application/x-ndjson", lines)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if res.StatusCode != 200 {
		text, _ := io.ReadAll(res.Body)
		t.Fatalf("%d %s", res.StatusCode, text)
	}
	answers := bufio.NewScanner(res.Body)
	answers.Buffer(nil, 1<<20)
	for answers.Scan() {
		last = nil
		if err := json.Unmarshal(answers.Bytes(), &last); err != nil {
			t.Fatalf("%v: %s", err, answers.Text())
		}
		progress++
	}
	return last, progress
}

func TestBulk(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	var lines strings.Builder
	for i := range 1200 {
		fmt.Fprintf(&lines, `{"channels":["log"],"to":"x","text":"hi","request_id":"%d"}`+"\n", i)
		if i == 600 {
			lines.WriteString("\n{nonsense\r\n" + `{"channels":["log"],"to":"x","text":"` + strings.Repeat("y", 1<<20) + `"}` + "\n")
		}
	}
	last, progress := b.bulk(t, "/api/messages/bulk?batch_id=all", strings.NewReader(strings.TrimRight(lines.String(), "\n")))
	if last["done"] != true || last["lines"] != 1202.0 || last["accepted"] != 1200.0 || last["rejected"] != 2.0 || last["error"] != nil || progress < 3 {
		t.Fatalf("%d lines of progress, the last: %v", progress, last)
	}
	if last, _ = b.bulk(t, "/api/messages/bulk?batch_id=all", strings.NewReader(lines.String())); last["accepted"] != 0.0 || last["duplicates"] != 1200.0 {
		t.Fatalf("the second time: %v", last)
	}
	if got := b.do(t, "GET", "/api/batches/all", ""); got.body["tasks"] != 1200.0 {
		t.Fatalf("%s", got.raw)
	}
	if last, _ = b.bulk(t, "/api/messages/bulk", strings.NewReader("")); last["done"] != true || last["lines"] != 0.0 {
		t.Fatalf("no lines: %v", last)
	}
	if a := b.do(t, "POST", "/api/messages/bulk", "x", "Content-Type", "text/csv"); a.status != 415 {
		t.Fatalf("%d %s", a.status, a.raw)
	}
}

// The client is cut off in the middle, and sends all of it again: each message once.
func TestBulkAgainAfterCut(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	lineOf := func(i int) string {
		return fmt.Sprintf(`{"channels":["log"],"to":"x","text":"hi","request_id":"%d"}`+"\n", i)
	}
	conn, err := net.Dial("tcp", strings.TrimPrefix(b.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(conn, "POST /api/messages/bulk HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n")
	for i := range 1700 {
		text := lineOf(i)
		fmt.Fprintf(conn, "%x\r\n%s\r\n", len(text), text)
	}
	in := bufio.NewReader(conn) // until some of it is committed
	for !strings.Contains(func() string { s, _ := in.ReadString('\n'); return s }(), `"accepted"`) {
	}
	conn.Close()
	var all strings.Builder
	for i := range 3000 {
		all.WriteString(lineOf(i))
	}
	last, _ := b.bulk(t, "/api/messages/bulk?batch_id=again", strings.NewReader(all.String()))
	if last["done"] != true || last["rejected"] != 0.0 || last["accepted"].(float64)+last["duplicates"].(float64) != 3000 || last["duplicates"].(float64) < 500 {
		t.Fatalf("%v", last)
	}
	if waiting, err := b.store.List(context.Background(), store.Filter{Limit: 1}); err != nil || len(waiting.Messages) != 1 {
		t.Fatal(err)
	}
}

// Memory does not grow with the number of lines.
func TestBulkMemory(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	const n = 20_000
	text := strings.Repeat("z", 500)
	read, write := io.Pipe()
	go func() {
		for range n {
			fmt.Fprintf(write, `{"channels":["log"],"to":"x","text":"%s"}`+"\n", text)
		}
		write.Close()
	}()
	var most uint64
	stop := make(chan struct{})
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		for {
			var m runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&m)
			most = max(most, m.HeapAlloc)
			select {
			case <-stop:
				return
			case <-time.After(50 * time.Millisecond):
			}
		}
	}()
	last, _ := b.bulk(t, "/api/messages/bulk", read)
	close(stop)
	<-watched
	if last["accepted"] != float64(n) {
		t.Fatalf("%v", last)
	}
	if most > 256<<20 { // of all tests that run beside it; the lines alone are 11 MB
		t.Fatalf("%d MiB", most>>20)
	}
}

func TestQuotas(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	admin, shop, bank := register(t, b)
	made := admin.do(t, "POST", "/api/quotas", `{"source_id":"shop","channel":"log","num":3,"unit":60000}`)
	if made.status != 201 || made.body["kind"] != "source" {
		t.Fatalf("%d %s", made.status, made.raw)
	}
	if a := admin.do(t, "POST", "/api/quotas", `{"source_id":"shop","channel":"log","num":9,"unit":60000}`); a.status != 409 {
		t.Fatalf("%d %s", a.status, a.raw)
	}
	message := func(id string) string { return `{"channels":["log"],"to":"x","text":"hi","request_id":"` + id + `"}` }
	for i := range 3 {
		if a := shop.do(t, "POST", "/api/messages", message(fmt.Sprint(i))); a.status != 202 {
			t.Fatalf("%d: %d %s", i, a.status, a.raw)
		}
	}
	refused := shop.do(t, "POST", "/api/messages", message("3"))
	limit, _ := refused.body["limit"].(map[string]any)
	if refused.status != 429 || refused.body["code"] != "quota_exceeded" || refused.header.Get("Retry-After") == "" || refused.header.Get("X-RateLimit-Limit") != "3" ||
		limit["kind"] != "source" || limit["unit"] != 60000.0 {
		t.Fatalf("%d %s %v", refused.status, refused.raw, refused.header)
	}
	if a := shop.do(t, "POST", "/api/messages?dry_run=true", message("5")); a.body["would_accept"] != false || !strings.Contains(a.raw, `"check":"limits","ok":false`) {
		t.Errorf("%s", a.raw)
	}
	// A repetition is not charged, and so not refused; nor is a dry run, or another caller.
	if a := shop.do(t, "POST", "/api/messages", message("1")); a.status != 200 || a.body["duplicate"] != true {
		t.Errorf("%d %s", a.status, a.raw)
	}
	if a := bank.do(t, "POST", "/api/messages", message("1")); a.status != 202 {
		t.Errorf("%d %s", a.status, a.raw)
	}
	batch := shop.do(t, "POST", "/api/messages/batch", "["+message("0")+","+message("9")+"]")
	if batch.body["duplicates"] != 1.0 || batch.body["rejected"] != 1.0 || !strings.Contains(batch.raw, "quota_exceeded") {
		t.Errorf("%s", batch.raw)
	}
	if a := admin.do(t, "POST", fmt.Sprintf("/api/quotas/source/%v", made.body["id"]), `{"num":4}`); a.status != 200 || a.body["num"] != 4.0 {
		t.Fatalf("%d %s", a.status, a.raw)
	}
	if a := shop.do(t, "POST", "/api/messages", message("3")); a.status != 202 {
		t.Errorf("after the quota was raised: %d %s", a.status, a.raw)
	}
	if a := shop.do(t, "POST", "/api/messages", message("4")); a.status != 429 {
		t.Errorf("%d %s", a.status, a.raw)
	}
	if a := shop.do(t, "GET", "/api/quotas", ""); len(a.body["data"].([]any)) != 1 {
		t.Errorf("%s", a.raw)
	}
	if a := shop.do(t, "POST", "/api/quotas", `{"channel":"log","num":3,"unit":60000}`); a.status != 403 {
		t.Errorf("%d %s", a.status, a.raw)
	}
	if a := admin.do(t, "DELETE", fmt.Sprintf("/api/quotas/source/%v", made.body["id"]), ""); a.status != 204 {
		t.Fatalf("%d %s", a.status, a.raw)
	}
	if a := shop.do(t, "POST", "/api/messages", message("4")); a.status != 202 {
		t.Errorf("without the quota: %d %s", a.status, a.raw)
	}
	if a := admin.do(t, "POST", "/api/quotas", `{"channel":"log","num":0,"unit":0}`); a.status != 422 || len(a.fields()) != 2 {
		t.Errorf("%d %s", a.status, a.raw)
	}
}

// What is wrong with a request is told within bounds, however much there is of it.
func TestManyFaults(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	many := func(item string, n int) string { return strings.TrimSuffix(strings.Repeat(item+",", n), ",") }
	var names strings.Builder
	for i := range 20_000 {
		fmt.Fprintf(&names, `"x%d":1,`, i)
	}
	for name, body := range map[string]string{
		"channels that are numbers": `{"channels":[` + many("1", 400_000) + `]}`,
		"channels":                  `{"channels":[` + many(`"log"`, 100_000) + `],"to":"x","text":"hi"}`,
		"unknown channels":          `{"channels":["` + strings.Repeat("x", 500_000) + `"],"to":"x","text":"hi"}`,
		"fields":                    `{` + names.String() + `"text":"hi"}`,
		"addresses":                 `{"channels":["log"],"to":{` + strings.ReplaceAll(names.String(), ":1", `:"y"`) + `"log":"x"},"text":"hi"}`,
		"attachments":               `{"channels":["email"],"to":"a@example.com","subject":"s","text":"t","attachments":[` + many(`{"filename":7}`, 50_000) + `]}`,
		"fields of an attachment":   `{"channels":["email"],"to":"a@example.com","subject":"s","text":"t","attachments":[{` + names.String() + `"filename":"x"}]}`,
		"an object for a text":      `{"text":{` + names.String() + `"a":1}}`,
	} {
		began := time.Now()
		a := b.do(t, "POST", "/api/messages", body)
		if a.status != 422 || len(a.raw) > 20_000 || time.Since(began) > 5*time.Second {
			t.Errorf("%s: %d, %d bytes after %v", name, a.status, len(a.raw), time.Since(began))
		}
	}
}

// Faulty lines fill a chunk as good ones do.
func TestFaultyLinesFillChunks(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	text := `{"channels":["log"],"nonsense":"` + strings.Repeat("x", 700_000) + `"}` + "\n"
	last, progress := b.bulk(t, "/api/messages/bulk", strings.NewReader(strings.Repeat(text, 4)))
	if last["rejected"] != 4.0 || progress < 4 {
		t.Fatalf("%d lines of progress, the last: %v", progress, last)
	}
}

// What would be ignored is refused: it promises what it would not keep.
func TestManyRefuseWhatTheyIgnore(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	const message = `{"channels":["log"],"to":"x","text":"hi"}`
	if a := b.do(t, "POST", "/api/messages/bulk?dry_run=true", message, "Content-Type", "application/x-ndjson"); a.status != 422 {
		t.Errorf("%d %s", a.status, a.raw)
	}
	for _, path := range []string{"/api/messages/bulk", "/api/messages/batch"} {
		if a := b.do(t, "POST", path, "["+message+"]", "Idempotency-Key", "k"); a.status != 422 {
			t.Errorf("%s: %d %s", path, a.status, a.raw)
		}
	}
	if a := b.do(t, "POST", "/api/messages", `{"channels":["log"],"to":"ann","To":"eve","text":"hi"}`); a.status != 422 || !sameNames(a.fields(), []string{"To"}) {
		t.Errorf("two names for one field: %d %s", a.status, a.raw)
	}
	if a := b.do(t, "POST", "/api/messages", `{"channels":["log"],"to":"ann","text":"hi","params":null}`); a.status != 202 {
		t.Errorf("no params: %d %s", a.status, a.raw)
	}
	if a := b.do(t, "GET", "/api/messages", ""); len(a.body["data"].([]any)) != 1 {
		t.Errorf("something was accepted: %s", a.raw)
	}
}
