package main

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// A caller with a key makes a template for three channels by API and sends it: one channel succeeds, one fails for good, one has
// no address. Each receiver gets what the template says, escaped for where it stands, and each task's row tells why.
func TestTemplateOverThreeChannels(t *testing.T) {
	t.Parallel()
	var (
		mu    sync.Mutex
		hooks []string
	)
	hook := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		mu.Lock()
		hooks = append(hooks, string(body))
		mu.Unlock()
		w.WriteHeader(http.StatusGone) // which is for good
	}))
	defer hook.Close()
	dir := worldDir(t)
	p := startTidings(t, dir, freeAddress(t), "providers: {hook: {type: webhook, allow_internal: true}}\nchannels: {webhook: {providers: [hook]}}\n")
	tidings := func(key string, args ...string) (string, error) {
		cmd := exec.Command(binary, append(args, "--listen", strings.TrimPrefix(p.url, "http://"))...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "TIDINGS_CLIENT_KEY="+key)
		out, err := cmd.Output()
		return strings.TrimSpace(string(out)), err
	}
	if out, err := tidings("", "key", "list"); err != nil || !strings.Contains(out, "no callers are registered") {
		t.Fatalf("%v %s", err, out)
	}
	admin, err := tidings("", "key", "create", "ops")
	if err != nil || !strings.HasPrefix(admin, "tidings_") {
		t.Fatalf("%v %q", err, admin)
	}
	shop, err := tidings("", "key", "create", "shop")
	if err != nil {
		t.Fatal(err)
	}
	if out, err := tidings("", "key", "list"); err != nil || strings.Contains(out, shop) || !strings.Contains(out, "shop    sender") {
		t.Fatalf("%v %s", err, out)
	}
	await(t, "the key to be asked for", 2*time.Second, func() bool {
		status, _, _ := post(p.url, `{"channels":["log"],"to":"x","text":"hi"}`)
		return status == 401
	})
	call := func(key, method, path, body string) (status int, answer string) {
		req, err := http.NewRequest(method, p.url+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Authorization", "Bearer "+key)
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		raw, err := io.ReadAll(res.Body)
		if err != nil {
			t.Fatal(err)
		}
		return res.StatusCode, string(raw)
	}
	for _, body := range []string{
		`{"template_id":"paid","channel":"email","subject":"{{name}}","content":"{{name}}","html":"<p>{{name}}</p>"}`,
		`{"template_id":"paid","channel":"webhook","content":"{{name}} {{id}} {{range items}}[{{.}}]{{end}}"}`,
		`{"template_id":"paid","channel":"log","content":"{{name}}"}`,
	} {
		if status, answer := call(shop, "POST", "/api/templates", body); status != 201 {
			t.Fatalf("%d %s", status, answer)
		}
	}
	out, err := tidings(shop, "send", "--channel", "email,webhook,log", "--to", "email=ann@example.com", "--to", "webhook="+hook.URL, "--template", "paid",
		"--param", "name=Tom & \"Jerry\"", "--param", "id:=9007199254740993", "--param", `items:=["a","b\nc"]`, "--wait", "20s")
	if err != nil {
		t.Fatalf("%v %s", err, out)
	}
	var m struct {
		MsgID  string `json:"msg_id"`
		Status string
		Tasks  []struct{ Channel, Status, LastError string }
	}
	if err := json.Unmarshal([]byte(strings.ReplaceAll(out, `"last_error"`, `"LastError"`)), &m); err != nil {
		t.Fatalf("%v in %s", err, out)
	}
	if m.Status != "partial" || len(m.Tasks) != 3 {
		t.Fatalf("%+v", m)
	}
	for i, want := range []struct{ channel, status, why string }{{"email", "success", ""}, {"webhook", "failed", "410"}, {"log", "skipped", "no address"}} {
		if got := m.Tasks[i]; got.Channel != want.channel || got.Status != want.status || !strings.Contains(got.LastError, want.why) {
			t.Errorf("%+v, want %+v", got, want)
		}
	}
	mail, err := os.ReadFile(filepath.Join(dir, "data/mail", m.MsgID+"-email.eml"))
	if err != nil || !strings.Contains(string(mail), "<p>Tom &amp; &#34;Jerry&#34;</p>") || !strings.Contains(string(mail), `Tom & "Jerry"`) {
		t.Errorf("%v\n%s", err, mail)
	}
	mu.Lock()
	defer mu.Unlock()
	var payload struct{ Data struct{ Text string } }
	if len(hooks) != 1 || json.Unmarshal([]byte(hooks[0]), &payload) != nil || payload.Data.Text != "Tom & \"Jerry\" 9007199254740993 [a][b\nc]" {
		t.Errorf("the hook got %q", hooks)
	}
	if status, answer := call(admin, "GET", "/api/audit", ""); status != 200 || strings.Count(answer, `"template.create"`) != 3 || !strings.Contains(answer, `"command-line"`) {
		t.Errorf("%d %s", status, answer)
	}
	if out, err := tidings("", "key", "revoke", strings.Split(shop, "_")[1]); err != nil {
		t.Errorf("%v %s", err, out)
	}
	await(t, "the revoked key to be refused", 2*time.Second, func() bool {
		status, _ := call(shop, "GET", "/api/messages", "")
		return status == 401
	})
}

// Without callers, only this machine is listened to.
func TestListenNeedsKeys(t *testing.T) {
	t.Parallel()
	dir := worldDir(t)
	run := func(args ...string) (string, error) {
		cmd := exec.Command(binary, args...)
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	if out, err := run("--listen", "0.0.0.0:0"); err == nil || !strings.Contains(out, "tidings key create") {
		t.Fatalf("%v %s", err, out)
	}
}
