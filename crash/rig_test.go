package crash

import (
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"tidings/internal/localdb"
)

// node is a process of Tidings.
type node struct {
	dir, address string
	cmd          *exec.Cmd
	exited       chan error
}

func (n *node) url() string { return "http://" + n.address }

func (n *node) start(t testing.TB) {
	t.Helper()
	out, err := os.OpenFile(filepath.Join(n.dir, "sent"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	log, err := os.OpenFile(filepath.Join(n.dir, "log"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	for deadline := time.Now().Add(2 * time.Minute); ; { // the database may be away: it ends then, and is started again, as a supervisor does
		cmd := exec.Command(binary, "--listen", n.address)
		cmd.Dir, cmd.Stdout, cmd.Stderr = n.dir, out, log
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		exited := make(chan error, 1)
		go func() { exited <- cmd.Wait() }()
		n.cmd, n.exited = cmd, exited
		for {
			if res, err := http.Get(n.url() + "/readyz"); err == nil {
				res.Body.Close()
				if res.StatusCode == http.StatusOK {
					return
				}
			}
			select {
			case err := <-exited:
				exited <- err
			case <-time.After(20 * time.Millisecond):
				if time.Now().Before(deadline) {
					continue
				}
			}
			break
		}
		if time.Now().After(deadline) {
			text, _ := os.ReadFile(filepath.Join(n.dir, "log"))
			t.Fatalf("node %s does not become ready:\n%s", n.address, text[max(0, len(text)-4000):])
		}
	}
}

func (n *node) stop(t testing.TB, signal syscall.Signal) {
	t.Helper()
	n.cmd.Process.Signal(signal)
	select {
	case err := <-n.exited:
		n.exited <- err
	case <-time.After(time.Minute):
		n.cmd.Process.Kill()
		t.Errorf("node %s did not end within a minute after %v", n.address, signal)
		<-n.exited
	}
}

// tellErrors prints what the node found wrong with itself.
func (n *node) tellErrors(t testing.TB) {
	text, err := os.ReadFile(filepath.Join(n.dir, "log"))
	if err != nil {
		t.Log(err)
		return
	}
	told := 0
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, "level=ERROR") && !strings.Contains(line, "state=dead") && told < 20 {
			told++
			t.Logf("node %s: %s", n.address, strings.TrimSpace(line))
		}
	}
}

// span is when a fault was at work.
type span struct {
	what       string
	start, end time.Time
}

type rig struct {
	t      testing.TB
	random *rand.Rand
	dir    string
	db     *localdb.Server
	view   *sql.DB // straight to the server
	proxy  *proxy
	nodes  []*node
	world  *world
	faults []span
	clock  *clock
}

func worldDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "tidings-crash-")
	if err == nil {
		err = os.Chmod(dir, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() && os.Getenv("CRASH_KEEP") != "" {
			t.Logf("kept: %s", dir)
			return
		}
		os.RemoveAll(dir)
	})
	return dir
}

// newRig starts a database, in dbDir if it is named, and two nodes.
func newRig(t testing.TB, random *rand.Rand, dbDir string) *rig {
	t.Helper()
	r := &rig{t: t, random: random, dir: worldDir(t)}
	if dbDir == "" {
		dbDir = worldDir(t)
	}
	r.clock = newClock(t)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var err error
	if r.db, err = localdb.Start(ctx, localdb.Config{Dir: dbDir, BufferPool: "64M", RedoLog: "32M", Env: r.clock.env()}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.db.Stop)
	r.view = r.open("")
	for _, statement := range []string{"CREATE DATABASE tidings", "CREATE USER rig IDENTIFIED BY 'rig'", "GRANT ALL ON tidings.* TO rig"} {
		if _, err := r.view.Exec(statement); err != nil {
			t.Fatal(err)
		}
	}
	r.view = r.open("tidings")
	r.proxy = newProxy(t, r.db.Socket())
	r.world = newWorld(t, r.dir)
	config := fmt.Sprintf(`mysql: {dsn: "rig:rig@tcp(%s)/tidings"}
queue: {lease: %v, send_timeout: 1500ms, settle_budget: 1s}
delay: {slot: %v, slots: 3, lead: %v}
log: {level: warn}
shutdown: {grace: 2s}
frequency: {verification: {all: ""}, marketing: {all: ""}}
policies:
  verification: {retry: [100ms, 200ms, 500ms, 1s]}
  notification: {retry: [200ms, 500ms, 1s]}
  marketing: {retry: [200ms, 500ms, 1s], degrade: wait, unknown: ask_again}
providers:
  hook: {type: webhook, allow_internal: true, concurrency: 20}
  relay: {type: smtp, host: 127.0.0.1, port: %s, tls: none, from: a@example.com, breaker_open: 1s}
  log: {type: log, concurrency: 10}
channels: {webhook: {providers: [hook]}, email: {providers: [relay]}, log: {providers: [log]}}
`, r.proxy.Addr(), lease, slot, lead, r.world.mail(t))
	for i := range 2 {
		n := &node{dir: filepath.Join(r.dir, fmt.Sprint("node", i)), address: freeAddress(t)}
		if err := os.Mkdir(n.dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(n.dir, "config.yaml"), []byte(config), 0o600); err != nil {
			t.Fatal(err)
		}
		n.start(t)
		t.Cleanup(func() {
			n.cmd.Process.Signal(syscall.SIGCONT)
			n.stop(t, syscall.SIGKILL)
			if t.Failed() {
				n.tellErrors(t)
			}
		})
		r.nodes = append(r.nodes, n)
	}
	return r
}

const (
	lease = 4 * time.Second
	slot  = 10 * time.Second // of delay tables
	lead  = time.Second      // scheduled messages are in their queue table so long before
)

func freeAddress(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

func (r *rig) open(database string) *sql.DB {
	cfg, err := mysql.ParseDSN(r.db.DSN(database))
	if err != nil {
		r.t.Fatal(err)
	}
	cfg.ParseTime, cfg.InterpolateParams, cfg.Logger = true, true, &mysql.NopLogger{}
	cfg.Params = map[string]string{"time_zone": "'+00:00'"}
	connector, err := mysql.NewConnector(cfg)
	if err != nil {
		r.t.Fatal(err)
	}
	db := sql.OpenDB(connector)
	r.t.Cleanup(func() { db.Close() })
	return db
}

// clock sets the database's clock, by a file that libfaketime reads again every second.
type clock struct {
	lib, file string
	steps     []step
}

// step is a change of the clock: seen by the database at start at the earliest, and by every node before end and unseen are over.
type step struct {
	start, end time.Time
	offset     time.Duration
}

func newClock(t testing.TB) *clock {
	t.Helper()
	libs, err := filepath.Glob("/usr/lib/*/faketime/libfaketimeMT.so.1")
	if err != nil || len(libs) == 0 {
		t.Fatal("libfaketime is missing: make setup-faketime")
	}
	c := &clock{lib: libs[0], file: filepath.Join(worldDir(t), "offset")}
	c.set(t, 0)
	return c
}

func (c *clock) env() []string {
	return []string{
		"LD_PRELOAD=" + c.lib, "FAKETIME_TIMESTAMP_FILE=" + c.file, "FAKETIME_CACHE_DURATION=1", "FAKETIME_DONT_FAKE_MONOTONIC=1", "DONT_FAKE_MONOTONIC=1",
	}
}

func (c *clock) set(t testing.TB, offset time.Duration) {
	t.Helper()
	start := time.Now()
	text := fmt.Sprintf("%+.3f", offset.Seconds())
	if err := os.WriteFile(c.file+".new", []byte(strings.TrimSpace(text)+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(c.file+".new", c.file); err != nil {
		t.Fatal(err)
	}
	c.steps = append(c.steps, step{start, time.Now(), offset})
}

// unseen is how long a step may go unnoticed: libfaketime reads it within a second; a node asks the database every five, and
// not while nothing passes between them. Until then it stamps and sends what is due at once by what it knew before.
const unseen = time.Second + 5*time.Second + 2*lease + 2*time.Second

// latest is the highest that the database's clock can have been taken for at an instant.
func (c *clock) latest(at time.Time) time.Time {
	most := time.Duration(-1 << 62)
	for i, s := range c.steps {
		ended := i+1 < len(c.steps) && c.steps[i+1].end.Add(unseen).Before(at)
		if s.start.Before(at) && !ended {
			most = max(most, s.offset)
		}
	}
	return at.Add(most)
}
