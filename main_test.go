package main

import (
	"bufio"
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"tidings/internal/localdb"
)

// binary is the product as it is shipped, built once for the tests below: they run it as its users do.
var binary string

func TestMain(m *testing.M) {
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "tidings-main-")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		binary = filepath.Join(dir, "tidings")
		if out, err := exec.Command("go", "build", "-o", binary, ".").CombinedOutput(); err != nil {
			fmt.Fprintln(os.Stderr, err, string(out))
			return 1
		}
		return m.Run()
	}())
}

// worldDir is a directory that a database server running as nobody can enter.
func worldDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "tidings-e2e-")
	if err == nil {
		err = os.Chmod(dir, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// startDB runs a private server that outlives the processes under test. It is durable: some tests kill it.
func startDB(t testing.TB) *localdb.Server {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	s, err := localdb.Start(ctx, localdb.Config{Dir: worldDir(t), BufferPool: "64M", RedoLog: "32M"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	return s
}

// process is a running tidings.
type process struct {
	cmd    *exec.Cmd
	url    string
	log    *lockedBuffer // what it said on standard error
	exited chan error
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// freeAddress finds a port that nobody listens on.
func freeAddress(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// startTidings runs the binary in dir with a configuration file, and waits until it is ready. What the log channel prints is
// appended to dir/sent.
func startTidings(t testing.TB, dir, address, config string) *process {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, "config.yaml"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := os.OpenFile(filepath.Join(dir, "sent"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	p := &process{cmd: exec.Command(binary, "--listen", address), url: "http://" + address, log: &lockedBuffer{}, exited: make(chan error, 1)}
	p.cmd.Dir, p.cmd.Stdout, p.cmd.Stderr = dir, out, p.log
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { p.exited <- p.cmd.Wait() }()
	t.Cleanup(func() { p.stop(t, syscall.SIGKILL) })
	deadline := time.Now().Add(time.Minute)
	for {
		res, err := http.Get(p.url + "/readyz")
		if err == nil {
			res.Body.Close()
			if res.StatusCode == http.StatusOK {
				return p
			}
		}
		if time.Now().After(deadline) {
			t.Fatalf("not ready: %v\n%s", err, p.log)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// stop sends a signal and returns how the process ended. It may be called again.
func (p *process) stop(t testing.TB, signal syscall.Signal) error {
	t.Helper()
	p.cmd.Process.Signal(signal)
	select {
	case err := <-p.exited:
		p.exited <- err
		return err
	case <-time.After(time.Minute):
		p.cmd.Process.Kill()
		t.Fatalf("did not end after %v:\n%s", signal, p.log)
		return nil
	}
}

func openDB(t testing.TB, s *localdb.Server) *sql.DB {
	t.Helper()
	cfg, err := mysql.ParseDSN(s.DSN("tidings"))
	if err != nil {
		t.Fatal(err)
	}
	cfg.ParseTime, cfg.InterpolateParams, cfg.Logger = true, true, &mysql.NopLogger{}
	cfg.Params = map[string]string{"time_zone": "'+00:00'"}
	connector, err := mysql.NewConnector(cfg)
	if err != nil {
		t.Fatal(err)
	}
	db := sql.OpenDB(connector)
	t.Cleanup(func() { db.Close() })
	return db
}

func count(t testing.TB, db *sql.DB, query string, args ...any) (n int) {
	t.Helper()
	if err := db.QueryRow("SELECT COUNT(*) FROM "+query, args...).Scan(&n); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return n
}

func await(t testing.TB, what string, within time.Duration, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(within); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain for: %s", what)
		}
	}
}

// patient is a client that gives up on an answer after ten seconds.
var patient = &http.Client{Timeout: 10 * time.Second}

// post sends a message and returns the status and the decoded answer; status 0 says that none came.
func post(url, body string) (status int, answer map[string]any, header http.Header) {
	res, err := patient.Post(url+"/api/messages", "application/json", strings.NewReader(body))
	if err != nil {
		return 0, nil, nil
	}
	defer res.Body.Close()
	if json.NewDecoder(res.Body).Decode(&answer) != nil {
		return 0, nil, nil
	}
	return res.StatusCode, answer, res.Header
}

type sent struct {
	Time time.Time `json:"time"`
	Key  string    `json:"key"`
}

// sends reads what the log channel printed.
func sends(t testing.TB, dirs ...string) (all []sent) {
	t.Helper()
	for _, dir := range dirs {
		f, err := os.Open(filepath.Join(dir, "sent"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		for lines := bufio.NewScanner(f); lines.Scan(); {
			var s sent
			if err := json.Unmarshal(lines.Bytes(), &s); err != nil {
				t.Fatalf("%q: %v", lines.Text(), err)
			}
			all = append(all, s)
		}
	}
	return all
}

// What the README promises to a newcomer: one command, a message by curl, the row by SQL, the mail as a file.
func TestFirstTry(t *testing.T) {
	t.Parallel()
	dir := worldDir(t)
	p := startTidings(t, dir, freeAddress(t), "")
	status, answer, _ := post(p.url, `{"channels":["email"],"to":"Ann <ann@example.com>","subject":"Hello","text":"It works."}`)
	if status != 202 {
		t.Fatalf("%d %v", status, answer)
	}
	res, err := http.Get(p.url + "/api/messages/" + answer["msg_id"].(string) + "?wait=10s")
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(res.Body)
	res.Body.Close()
	if !bytes.Contains(body, []byte(`"status":"success"`)) {
		t.Fatalf("%s", body)
	}
	if _, err := os.Stat(filepath.Join(dir, "data", "mail", answer["msg_id"].(string)+"-email.eml")); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "data", "mysql", "mysql.sock")
	if !strings.Contains(p.log.String(), "mariadb --socket="+socket+" tidings") {
		t.Fatalf("the socket is not printed:\n%s", p.log)
	}
	out, err := exec.Command("mariadb", "--socket="+socket, "tidings", "-Ne", "SELECT status, channel FROM t_msg_record").CombinedOutput()
	if err != nil || strings.TrimSpace(string(out)) != "3\t1" {
		t.Fatalf("%v %s", err, out)
	}
	health := exec.Command(binary, "health", "--listen", strings.TrimPrefix(p.url, "http://"))
	if out, err := health.CombinedOutput(); err != nil || string(out) != "ok\n" {
		t.Fatalf("health: %v %s", err, out)
	}
	migrate := exec.Command(binary, "migrate") // beside the running server
	migrate.Dir = dir
	if out, err := migrate.Output(); err != nil || !bytes.Contains(out, []byte("up to date")) {
		t.Fatalf("migrate: %v %s", err, out)
	}
	if err := p.stop(t, syscall.SIGTERM); err != nil {
		t.Fatalf("SIGTERM: %v\n%s", err, p.log)
	}
	if strings.Contains(p.log.String(), "ann@example.com") || strings.Contains(p.log.String(), "It works") {
		t.Fatalf("the log repeats the message:\n%s", p.log)
	}
}

// SIGTERM while 900 sends are in flight (a tenth of 1,000 slots is high's) that need less than the grace: nothing lost, nothing sent twice.
func TestTermWithSendsInFlight(t *testing.T) {
	t.Parallel()
	db := startDB(t)
	config := "mysql: {dsn: \"" + db.DSN("tidings") + "\"}\nproviders: {log: {type: log, delay: 10s}}\nchannels: {log: {providers: [log], slots: 1000}}\n"
	dir := worldDir(t)
	address := freeAddress(t)
	p := startTidings(t, dir, address, config)
	const n = 1300
	postMany(t, p.url, n)
	view := openDB(t, db)
	await(t, "900 sends in flight", 20*time.Second, func() bool { return count(t, view, "t_msg_queue_middle WHERE status = 1") == 900 })
	began := time.Now()
	if err := p.stop(t, syscall.SIGTERM); err != nil {
		t.Fatalf("%v\n%s", err, p.log)
	}
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("stopping took %v", took)
	}
	if claimed := count(t, view, "t_msg_queue_middle WHERE status <> 0 AND msg_id > 0"); claimed != 0 {
		t.Errorf("%d tasks are still claimed", claimed)
	}
	startTidings(t, dir, address, strings.Replace(config, "10s", "0s", 1))
	await(t, "all sent", 30*time.Second, func() bool { return count(t, view, "t_msg_record WHERE status = 3") == n })
	if got := sends(t, dir); len(got) != n {
		t.Fatalf("%d sends of %d messages", len(got), n)
	}
}

func postMany(t testing.TB, url string, n int) {
	t.Helper()
	var wg sync.WaitGroup
	for worker := range 16 {
		wg.Go(func() {
			for i := worker; i < n; i += 16 {
				if status, answer, _ := post(url, `{"channels":["log"],"to":"x","text":"hi"}`); status != 202 {
					t.Errorf("%d %v", status, answer)
					return
				}
			}
		})
	}
	wg.Wait()
}

// The database goes away: requests are answered 503 with Retry-After, at once, and work goes on by itself afterwards.
func TestDatabaseAway(t *testing.T) {
	t.Parallel()
	dbDir := worldDir(t)
	start := func() *localdb.Server {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		s, err := localdb.Start(ctx, localdb.Config{Dir: dbDir, BufferPool: "64M", RedoLog: "32M"})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(s.Stop)
		return s
	}
	db := start()
	dir := worldDir(t)
	p := startTidings(t, dir, freeAddress(t), "mysql: {dsn: \""+db.DSN("tidings")+"\"}\n")
	postMany(t, p.url, 20)
	db.Stop()
	away := time.Duration(rounds(t, "CRASH_SECONDS_AWAY", 5)) * time.Second
	for until := time.Now().Add(away); time.Now().Before(until); {
		began := time.Now()
		status, answer, header := post(p.url, `{"channels":["log"],"to":"x","text":"hi","request_id":"while-away"}`)
		if status != 503 || header.Get("Retry-After") == "" || answer["code"] != "database_unavailable" {
			t.Fatalf("%d %v", status, answer)
		}
		if took := time.Since(began); took > 7*time.Second {
			t.Fatalf("the answer took %v", took)
		}
	}
	if res, err := http.Get(p.url + "/livez"); err != nil || res.StatusCode != 200 {
		t.Fatalf("livez: %v", err)
	}
	if res, err := http.Get(p.url + "/readyz"); err != nil || res.StatusCode != 503 {
		t.Fatalf("readyz: %v", err)
	}
	db = start()
	view := openDB(t, db)
	await(t, "a message to be accepted", 20*time.Second, func() bool {
		status, _, _ := post(p.url, `{"channels":["log"],"to":"x","text":"hi","request_id":"while-away"}`)
		return status == 202 || status == 200
	})
	await(t, "all sent", 20*time.Second, func() bool { return count(t, view, "t_msg_record WHERE status = 3") == 21 })
	if got := sends(t, dir); len(got) != 21 {
		t.Fatalf("%d sends", len(got))
	}
}

// Two processes share the work. One is stopped for two lease times while it sends: its rows are recovered by the other, its
// late acks change nothing, and its ids do not repeat.
func TestStoppedProcess(t *testing.T) {
	t.Parallel()
	db := startDB(t)
	config := "mysql: {dsn: \"" + db.DSN("tidings") + "\"}\nqueue: {lease: 4s, send_timeout: 1500ms, settle_budget: 1s}\n" +
		"providers: {log: {type: log, delay: 300ms}}\nchannels: {log: {providers: [log], slots: 200}}\n"
	dirs := []string{worldDir(t), worldDir(t)}
	a := startTidings(t, dirs[0], freeAddress(t), config)
	b := startTidings(t, dirs[1], freeAddress(t), config)
	view := openDB(t, db)
	if n := count(t, view, "t_node WHERE lease_end > UTC_TIMESTAMP(3)"); n != 2 {
		t.Fatalf("%d nodes", n)
	}
	accepted := 900
	postMany(t, a.url, 400)
	postMany(t, b.url, 400)
	await(t, "claims by the first", 10*time.Second, func() bool { return count(t, view, "t_msg_queue_middle WHERE status = 1") > 0 })
	a.cmd.Process.Signal(syscall.SIGSTOP)
	stopped := time.Now()
	for time.Since(stopped) < 8*time.Second { // two leases
		postMany(t, b.url, 20)
		accepted += 20
		time.Sleep(50 * time.Millisecond)
	}
	a.cmd.Process.Signal(syscall.SIGCONT)
	postMany(t, a.url, 100)
	await(t, "the end of all tasks", 60*time.Second, func() bool { return count(t, view, "t_msg_queue_middle WHERE msg_id > 0") == 0 })
	total := count(t, view, "t_msg_record WHERE status = 3")
	if distinct := count(t, view, "(SELECT DISTINCT msg_id FROM t_msg_record) AS m"); distinct != total || total != accepted {
		t.Fatalf("%d records of %d messages, %d accepted", total, distinct, accepted)
	}
	times := map[string][]time.Time{}
	for _, s := range sends(t, dirs...) {
		times[s.Key] = append(times[s.Key], s.Time)
	}
	if len(times) != total {
		t.Fatalf("%d tasks were printed, %d recorded", len(times), total)
	}
	for key, at := range times {
		if len(at) > 2 {
			t.Errorf("%s was sent %d times", key, len(at))
		}
	}
	if err := a.stop(t, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
}

// An idle process asks the database less than 20 times a second, counted at the server.
func TestIdleIsQuiet(t *testing.T) {
	t.Parallel()
	db := startDB(t)
	p := startTidings(t, worldDir(t), freeAddress(t), "mysql: {dsn: \""+db.DSN("tidings")+"\"}\n")
	postMany(t, p.url, 50)
	view := openDB(t, db)
	view.SetMaxOpenConns(1)
	questions := func() (n int) {
		var name string
		if err := view.QueryRow("SHOW GLOBAL STATUS LIKE 'Questions'").Scan(&name, &n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	time.Sleep(3 * time.Second) // until the pumps have given up looking
	const span = 5
	before := questions()
	time.Sleep(span * time.Second)
	if perSecond := float64(questions()-before) / span; perSecond >= 20 {
		t.Fatalf("%.1f statements a second", perSecond)
	} else {
		t.Logf("%.1f statements a second", perSecond)
	}
}
