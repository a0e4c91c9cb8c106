package main

import (
	"database/sql"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/emersion/go-sasl"
	"github.com/emersion/go-smtp"
)

// parrot is a mail server that repeats all that it hears in its refusals.
type parrot struct{}

type parrotSession struct{ to string }

func (parrot) NewSession(*smtp.Conn) (smtp.Session, error) { return &parrotSession{}, nil }

func (s *parrotSession) AuthMechanisms() []string { return []string{sasl.Plain} }

func (s *parrotSession) Auth(string) (sasl.Server, error) {
	return sasl.NewPlainServer(func(_, _, _ string) error { return nil }), nil
}

func (s *parrotSession) Reset() {}

func (s *parrotSession) Logout() error { return nil }

func (s *parrotSession) Mail(string, *smtp.MailOptions) error { return nil }

func (s *parrotSession) Rcpt(to string, _ *smtp.RcptOptions) error {
	if s.to = to; strings.Contains(to, "refused") {
		return &smtp.SMTPError{Code: 550, EnhancedCode: smtp.EnhancedCode{5, 1, 1}, Message: "no such user <" + to + ">"}
	}
	return nil
}

func (s *parrotSession) Data(r io.Reader) error {
	body, err := io.ReadAll(r)
	if err != nil {
		return err
	}
	if strings.Contains(s.to, "later") {
		return &smtp.SMTPError{Code: 451, EnhancedCode: smtp.EnhancedCode{4, 0, 0}, Message: "not now, " + s.to + ": " + strings.NewReplacer("\r", " ", "\n", " ").Replace(string(body[max(0, len(body)-300):]))}
	}
	return nil
}

// What a message says, to whom it goes, and what opens doors: none of it is in a log, an error, a metric or an alarm, and when a
// verification has ended, in no table but for the receiver.
func TestCanary(t *testing.T) {
	t.Parallel()
	mail := smtp.NewServer(parrot{})
	mail.AllowInsecureAuth = true
	mailPort, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go mail.Serve(mailPort)
	t.Cleanup(func() { mail.Close() })
	var alarms []byte
	echo := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if strings.HasPrefix(r.URL.Path, "/pager") {
			alarms = append(alarms, body...)
			return
		}
		w.Header().Set("X-Echo", r.URL.String())
		w.WriteHeader(http.StatusBadRequest)
		fmt.Fprintf(w, "%v %s", r.Header, body)
	}))
	t.Cleanup(echo.Close)
	db := startDB(t)
	root := openDBAs(t, db.DSN(""))
	for _, statement := range []string{"CREATE DATABASE tidings", "CREATE USER canary IDENTIFIED BY 'canary-password'", "GRANT ALL ON *.* TO canary"} {
		if _, err := root.Exec(statement); err != nil {
			t.Fatal(err)
		}
	}
	socket := regexp.MustCompile(`unix\(([^)]*)\)`).FindString(db.DSN(""))
	dir := worldDir(t)
	p := startTidings(t, dir, freeAddress(t), "mysql: {dsn: \"canary:canary-password@"+socket+"/tidings\"}\nlog: {level: debug}\n"+
		"policies: {verification: {retry: [1ms]}}\nfrequency: {verification: {all: \"50/1m\"}}\nalarm: {provider: hook, receiver: \""+echo.URL+"/pager\", every: 1s}\n"+
		"providers:\n  hook: {type: webhook, allow_internal: true, secret: whsec_Y2FuYXJ5LXNlY3JldC1jYW5hcnktc2VjcmV0}\n"+
		"  relay: {type: smtp, host: 127.0.0.1, port: "+strings.TrimPrefix(mailPort.Addr().String(), "127.0.0.1:")+", tls: none, from: a@example.com}\n"+
		"  spare: {type: smtp, host: 127.0.0.1, port: "+strings.TrimPrefix(mailPort.Addr().String(), "127.0.0.1:")+", tls: none, username: shop, password: canary-smtp, from: a@example.com}\n"+
		"  bot: {type: feishu, bots: {ops: {url: \""+echo.URL+"/canary-bot\", secret: canary-bot-secret}}}\n"+
		"channels: {webhook: {providers: [hook]}, email: {providers: [relay, spare]}, feishu: {providers: [bot]}}\n")
	keys := exec.Command(binary, "key", "create", "shop")
	keys.Dir = dir
	out, err := keys.Output()
	if err != nil {
		t.Fatal(err)
	}
	key := strings.TrimSpace(string(out))
	await(t, "the key to be asked for", 5*time.Second, func() bool {
		status, _, _ := post(p.url, `{}`)
		return status == 401
	})
	var refusals strings.Builder
	call := func(method, path, body string) (status int, answer string) {
		t.Helper()
		req, err := http.NewRequest(method, p.url+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Authorization", "Bearer "+key)
		res, err := patient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		answer = readAll(t, res)
		if res.StatusCode >= 400 {
			fmt.Fprintln(&refusals, method, path, answer)
		}
		return res.StatusCode, answer
	}
	if status, answer := call("POST", "/api/templates", `{"template_id":"code","channel":"email","category":"verification","subject":"canary-subject {{code}}","content":"{{code}}"}`); status != 201 {
		t.Fatal(answer)
	}
	const said = `,"subject":"canary-subject","text":"canary-text","category":"verification"}`
	var ids []string
	for _, body := range []string{
		`{"channels":["email"],"to":"canary-receiver@example.com"` + said,
		`{"channels":["email"],"to":"canary-receiver-refused@example.com"` + said,
		`{"channels":["email"],"to":"canary-receiver-later@example.com"` + said,
		`{"channels":["email"],"to":"canary-receiver-later@example.com","template_id":"code","params":{"code":"canary-param"}}`,
		`{"channels":["email"],"to":"canary-receiver@example.com","template_id":"code","params":{"code":"canary-param"}}`,
		`{"channels":["webhook"],"to":"` + echo.URL + `/canary-receiver"` + said,
		`{"channels":["feishu"],"to":"ops"` + said,
		`{"channels":["email"],"to":"canary-receiver@example.com","delay":"50h"` + said,
		`{"channels":["email"],"to":"canary-receiver@example.com","delay":"70s"` + said,
	} {
		status, answer := call("POST", "/api/messages", body)
		if status != 202 {
			t.Fatalf("%s: %d %s", body, status, answer)
		}
		var sent struct {
			MsgID string `json:"msg_id"`
		}
		if err := json.Unmarshal([]byte(answer), &sent); err != nil {
			t.Fatal(err)
		}
		ids = append(ids, sent.MsgID)
	}
	for _, bad := range []string{
		`{"channels":["email"],"to":"canary-receiver@"` + said,
		`{"channels":["email"],"to":"canary-receiver@example.com","template_id":"code","params":{}}`,
		`{"channels":["email"],"to":"canary-receiver@example.com","template_id":"code","params":"canary-param"}`,
		`{"channels":["webhook"],"to":"canary-receiver"` + said,
		`{"channels":["email"],"to":"canary-receiver@example.com","send_at":"canary-text"` + said,
		`{"channels":["email"],"to":"canary-receiver@example.com","text":"canary-text"`,
	} {
		if status, answer := call("POST", "/api/messages", bad); status < 400 {
			t.Errorf("%s: %d %s", bad, status, answer)
		}
	}
	view := openDB(t, db)
	for _, row := range []string{ // by SQL: right ones, and such as are rejected
		`('shop', 'email', 'canary-receiver@example.com', NULL, 'code', '{"code": "canary-param"}')`,
		`('shop', 'email', 'canary-receiver-refused@example.com', '{"subject": "canary-subject", "text": "canary-text"}', '', NULL)`,
		`('shop', 'email', 'canary-receiver@', NULL, 'code', '{"code": "canary-param"}')`,
		`('shop', 'email', 'canary-receiver@example.com', '{"canary-field": "canary-text"}', '', NULL)`,
	} {
		set(t, view, "INSERT INTO t_msg_submit (source_id, channels, receiver, content, template_id, params, category) VALUES "+strings.TrimSuffix(row, ")")+", 'verification')")
	}
	await(t, "the rows to be taken", 20*time.Second, func() bool {
		return count(t, view, "t_msg_submit WHERE status = 'accepted'") == 2 && count(t, view, "t_msg_submit WHERE status = 'rejected'") == 2
	})
	if n := count(t, view, "t_msg_submit WHERE error LIKE '%canary%'"); n != 0 {
		t.Errorf("%d errors repeat what they are about", n)
	}
	set(t, view, "DELETE FROM t_msg_submit WHERE status = 'rejected'") // they keep what they say, to be mended
	for range 60 {                                                     // past the frequency
		call("POST", "/api/messages", `{"channels":["email"],"to":"canary-receiver@example.com"`+said)
	}
	for _, id := range ids[len(ids)-2:] {
		if status, answer := call("POST", "/api/messages/"+id+"/cancel", ""); status != 200 {
			t.Errorf("cancel: %d %s", status, answer)
		}
	}
	await(t, "nothing to wait", 40*time.Second, func() bool { return count(t, view, "v_task WHERE status IN ('ready', 'sending', 'unknown')") == 0 })
	if n := count(t, view, "t_msg_dead"); n == 0 {
		t.Error("there are no dead letters: the test shows little")
	}
	await(t, "the alarm", 30*time.Second, func() bool { return count(t, view, "t_alarm") == 0 })
	if status, answer := call("POST", "/api/dead/discard", `{"all":true}`); status != 200 {
		t.Errorf("discard: %d %s", status, answer)
	}
	res, err := http.Get(p.url + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	metrics := readAll(t, res)
	res.Body.Close()
	for _, id := range ids {
		if _, answer := call("GET", "/api/messages/"+id, ""); strings.Contains(answer, "canary-text") || strings.Contains(answer, "canary-param") || strings.Contains(answer, "canary-subject") {
			t.Errorf("an answer repeats what was said: %s", answer)
		}
	}
	p.stop(t, syscall.SIGTERM)
	for where, text := range map[string]string{"the log": p.log.String(), "the metrics": metrics, "refusals": refusals.String(), "alarms": string(alarms)} {
		for _, secret := range []string{"canary", key, "Y2FuYXJ5LXNlY3JldC1jYW5hcnktc2VjcmV0"} {
			if i := strings.Index(text, secret); i >= 0 {
				t.Errorf("%s have %q: …%s…", where, secret, text[max(0, i-200):min(len(text), i+100)])
			}
		}
		if len(text) == 0 {
			t.Errorf("%s are empty", where)
		}
	}
	for place, values := range columns(t, view, "tidings") {
		for _, v := range values {
			if strings.Contains(v, "canary") && !slices.Contains([]string{"t_msg_record.receiver", "t_msg_template.subject", "t_msg_delay_far.receiver", "t_msg_submit.receiver"}, place) && !regexp.MustCompile(`^t_msg_delay_\w+\.receiver$`).MatchString(place) {
				t.Errorf("%s has %q", place, v)
			}
			if strings.Contains(v, key) {
				t.Errorf("%s has a key", place)
			}
		}
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) == 0 {
		t.Error(err)
	}
}

func openDBAs(t testing.TB, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open("mysql", dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

// columns reads every value of every table, by table and column.
func columns(t testing.TB, db *sql.DB, schema string) map[string][]string {
	t.Helper()
	var tables []string
	rows, err := db.Query("SELECT table_name FROM information_schema.tables WHERE table_schema = ? AND table_type = 'BASE TABLE'", schema)
	if err != nil {
		t.Fatal(err)
	}
	for rows.Next() {
		var name string
		if err := rows.Scan(&name); err != nil {
			t.Fatal(err)
		}
		tables = append(tables, name)
	}
	rows.Close()
	found := map[string][]string{}
	for _, table := range tables {
		rows, err := db.Query("SELECT * FROM " + table)
		if err != nil {
			t.Fatal(err)
		}
		names, err := rows.Columns()
		if err != nil {
			t.Fatal(err)
		}
		for rows.Next() {
			values, into := make([]sql.RawBytes, len(names)), make([]any, len(names))
			for i := range values {
				into[i] = &values[i]
			}
			if err := rows.Scan(into...); err != nil {
				t.Fatal(err)
			}
			for i, v := range values {
				found[table+"."+names[i]] = append(found[table+"."+names[i]], string(v))
			}
		}
		rows.Close()
	}
	return found
}
