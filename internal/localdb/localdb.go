// Package localdb runs a private MariaDB (or MySQL) server for one data directory: on a Unix socket only, with durable
// settings, started when it is first needed and stopped with the process. Several processes may share the directory: one
// of them, the holder of a file lock, runs the server and starts it again when it dies; when that process ends, the next
// one takes over. It is for trying Tidings out, for use on a single host, and for the tests.
package localdb

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/go-sql-driver/mysql"
)

// ErrNoServer says that no database server is installed.
var ErrNoServer = errors.New("neither mariadbd nor mysqld is installed; either set mysql.dsn to a server of yours, or run: " +
	"apt-get install -y --no-install-recommends mariadb-server-core mariadb-client-core")

// Config is how the private server is run. The zero value of each field means its default.
type Config struct {
	Dir        string       // the server's files lie in Dir/mysql; made when missing
	BufferPool string       // innodb_buffer_pool_size, default 128M
	RedoLog    string       // innodb_log_file_size, default 64M; fixed when the directory is first used
	Log        *slog.Logger // default: nothing is logged
	// Relaxed trades durability for speed (no fsync at commit). For tests that kill nothing.
	Relaxed bool
	// Env is added to the server's environment. For tests with another clock or time zone.
	Env []string
}

// Server is a private server that this process runs or shares.
type Server struct {
	cfg    Config
	dir    string // the server's files
	socket string
	user   string // the database user that this process connects as
	cancel context.CancelFunc
	done   chan struct{}
	ready  chan struct{}

	mu  sync.Mutex
	err error // why the server can never be ready
}

// Start runs the server of cfg.Dir, or joins the one that another process runs there, and returns when it answers.
func Start(ctx context.Context, cfg Config) (*Server, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	cfg.BufferPool = defaultTo(cfg.BufferPool, "128M")
	cfg.RedoLog = defaultTo(cfg.RedoLog, "64M")
	if err := os.MkdirAll(cfg.Dir, 0o755); err != nil {
		return nil, fmt.Errorf("private database: %w", err)
	}
	dir, err := filesDir(cfg.Dir)
	if err != nil {
		return nil, fmt.Errorf("private database: %w", err)
	}
	s := &Server{cfg: cfg, dir: dir, done: make(chan struct{}), ready: make(chan struct{})}
	if s.socket, err = socketPath(cfg.Dir, dir); err != nil {
		return nil, fmt.Errorf("private database: %w", err)
	}
	if s.user, err = databaseUser(); err != nil {
		return nil, fmt.Errorf("private database: %w", err)
	}
	run, cancel := context.WithCancel(context.Background())
	s.cancel = cancel
	go s.supervise(run)
	select {
	case <-s.ready:
		return s, nil
	case <-s.done:
		return nil, fmt.Errorf("private database in %s: %w", s.dir, s.failure())
	case <-ctx.Done():
		s.Stop()
		return nil, fmt.Errorf("private database in %s did not start: %w", s.dir, ctx.Err())
	}
}

// Socket is the path of the server's socket, for `mariadb --socket=…`.
func (s *Server) Socket() string { return s.socket }

// PID is the server's process id, or 0 when it does not run. The server may be another process's child.
func (s *Server) PID() int { return readPID(filepath.Join(s.dir, "pid")) }

// DSN names a database on the server, in the driver's notation.
func (s *Server) DSN(database string) string { return s.driverConfig(database).FormatDSN() }

func (s *Server) driverConfig(database string) *mysql.Config {
	cfg := mysql.NewConfig()
	cfg.Net, cfg.Addr, cfg.User, cfg.DBName = "unix", s.socket, s.user, database
	return cfg
}

// Stop ends this process's part: the server stops if this process runs it, and another process that shares the directory
// then starts it again. It may be called more than once.
func (s *Server) Stop() {
	s.cancel()
	<-s.done
}

func (s *Server) failure() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// supervise keeps a server running until ctx ends: our own when we get the lock, else another process's.
func (s *Server) supervise(ctx context.Context) {
	defer close(s.done)
	for wait := 100 * time.Millisecond; ctx.Err() == nil; {
		lock, err := lockFile(filepath.Join(s.dir, "lock"))
		switch {
		case errors.Is(err, syscall.EWOULDBLOCK): // another process runs it
			s.announce()
			wait = 100 * time.Millisecond
		case err != nil:
			s.fail(err)
			return
		default:
			started := time.Now()
			err = s.runServer(ctx)
			lock.Close()
			if ctx.Err() != nil {
				return
			}
			if !s.wasReady() { // it has never worked: give up and say why
				s.fail(err)
				return
			}
			s.cfg.Log.Warn("private database ended, starting it again", "err", err)
			wait = backoff(wait, time.Since(started))
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
	}
}

func backoff(wait, lived time.Duration) time.Duration {
	if lived > 10*time.Second {
		return 100 * time.Millisecond
	}
	return min(2*wait, 5*time.Second)
}

func (s *Server) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
}

// announce lets Start return once the server answers. Only supervise's goroutine comes here.
func (s *Server) announce() bool {
	if s.ping() != nil {
		return false
	}
	if !s.wasReady() {
		close(s.ready)
	}
	return true
}

// ping logs in: a server opens its socket before it knows its users, and may yet fail over them.
func (s *Server) ping() error {
	if _, err := os.Stat(s.socket); err != nil {
		return err
	}
	cfg := s.driverConfig("")
	cfg.Timeout, cfg.ReadTimeout = time.Second, time.Second
	cfg.Logger = &mysql.NopLogger{} // that a server which starts hangs up is nothing to tell
	connector, err := mysql.NewConnector(cfg)
	if err != nil {
		return err
	}
	db := sql.OpenDB(connector)
	defer db.Close()
	return db.Ping()
}

func (s *Server) wasReady() bool {
	select {
	case <-s.ready:
		return true
	default:
		return false
	}
}

// runServer makes the files if need be, runs the server and returns when it has ended.
func (s *Server) runServer(ctx context.Context) error {
	bin, err := serverBinary()
	if err != nil {
		return err
	}
	if err := s.reapLeftover(ctx); err != nil {
		return err
	}
	if err := s.install(ctx, bin); err != nil {
		return err
	}
	cmd := exec.Command(bin, s.serverArgs(bin)...)
	cmd.Dir = s.dir
	if len(s.cfg.Env) > 0 {
		cmd.Env = append(os.Environ(), s.cfg.Env...)
	}
	cmd.SysProcAttr = childAttr()
	exited := make(chan error, 1)
	if err := startTied(cmd, exited); err != nil {
		return fmt.Errorf("start %s: %w", bin, err)
	}
	poll := time.NewTicker(20 * time.Millisecond)
	defer poll.Stop()
	for announced := false; ; {
		select {
		case err := <-exited:
			return fmt.Errorf("%s ended: %w; its log says: %s", filepath.Base(bin), err, tail(filepath.Join(s.dir, "error.log")))
		case <-poll.C:
			if announced = s.announce(); announced {
				poll.Stop()
			}
		case <-ctx.Done():
			stopProcess(cmd.Process, exited)
			return ctx.Err()
		}
	}
}

// stopProcess asks for an orderly stop and kills only after a long wait: InnoDB survives both.
func stopProcess(p *os.Process, exited <-chan error) {
	p.Signal(syscall.SIGTERM)
	select {
	case <-exited:
	case <-time.After(30 * time.Second):
		p.Kill()
		<-exited
	}
}

// reapLeftover waits for the server of an owner that was killed: it has been told to stop by the kernel and may still
// be writing. One that does not go is asked again.
func (s *Server) reapLeftover(ctx context.Context) error {
	for try := range 400 {
		pid := readPID(filepath.Join(s.dir, "pid"))
		if pid == 0 || !isServer(pid, s.dir) {
			return nil
		}
		if try%100 == 50 {
			syscall.Kill(pid, syscall.SIGTERM)
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return errors.New("a server that an earlier process left behind does not stop")
}

// install makes a fresh server's system tables. A marker tells a finished directory from one whose making was interrupted.
func (s *Server) install(ctx context.Context, bin string) error {
	marker := filepath.Join(s.dir, "installed")
	if _, err := os.Stat(marker); err == nil {
		return nil
	}
	s.cfg.Log.Info("making a private database", "dir", s.dir)
	if err := s.beginInstall(); err != nil {
		return err
	}
	var cmd *exec.Cmd
	if isMariaDB(bin) {
		script, err := lookPath("mariadb-install-db")
		if err != nil {
			return ErrNoServer
		}
		cmd = exec.CommandContext(ctx, script, "--no-defaults", "--datadir="+s.dir, "--skip-test-db", "--skip-name-resolve",
			"--auth-root-authentication-method=socket", "--auth-root-socket-user="+s.user, "--innodb-log-file-size="+s.cfg.RedoLog)
	} else {
		cmd = exec.CommandContext(ctx, bin, "--no-defaults", "--initialize-insecure", "--datadir="+filepath.Join(s.dir, "data"))
	}
	cmd.Dir = s.dir
	cmd.Env = append(os.Environ(), "TMPDIR="+s.dir) // a server that starts removes temporary tables of others from a shared one
	cmd.SysProcAttr = childAttr()
	if out, err := outputTied(cmd); err != nil {
		return fmt.Errorf("%s: %w: %s", filepath.Base(cmd.Path), err, telling(string(out)))
	}
	return writeMarker(marker)
}

// beginInstall makes room for a fresh server: in an empty directory, or over what an interrupted making of ours left. Files
// that somebody else put there are not touched.
func (s *Server) beginInstall() error {
	making := filepath.Join(s.dir, "making")
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return err
	}
	if _, err := os.Stat(making); err != nil {
		for _, e := range entries {
			if e.Name() != "lock" {
				return fmt.Errorf("%s holds %s, which Tidings did not make; choose another data_dir, or move it away", s.dir, e.Name())
			}
		}
		return writeMarker(making)
	}
	return emptyDir(s.dir, "lock", "making")
}

func writeMarker(path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

func (s *Server) serverArgs(bin string) []string {
	args := []string{
		"--no-defaults", "--socket=" + s.socket, "--pid-file=" + filepath.Join(s.dir, "pid"), "--log-error=" + filepath.Join(s.dir, "error.log"),
		"--tmpdir=" + s.dir, "--skip-networking", "--skip-name-resolve", "--character-set-server=utf8mb4",
		"--max-connections=300", "--max-allowed-packet=64M", "--innodb-buffer-pool-size=" + s.cfg.BufferPool,
		"--performance-schema=OFF", "--transaction-isolation=READ-COMMITTED",
	}
	if len(s.cfg.Env) == 0 { // else the time zone is the environment's
		args = append(args, "--default-time-zone=+00:00")
	}
	if s.cfg.Relaxed {
		args = append(args, "--innodb-flush-log-at-trx-commit=0", "--innodb-doublewrite=0")
	} else {
		args = append(args, "--innodb-flush-log-at-trx-commit=1")
	}
	if isMariaDB(bin) {
		return append(args, "--datadir="+s.dir, "--innodb-log-file-size="+s.cfg.RedoLog,
			"--aria-pagecache-buffer-size=1M", "--key-buffer-size=1M")
	}
	return append(args, "--datadir="+filepath.Join(s.dir, "data"), "--disable-log-bin", "--mysqlx=OFF")
}

func serverBinary() (string, error) {
	for _, name := range []string{"mariadbd", "mysqld"} {
		if path, err := lookPath(name); err == nil {
			return path, nil
		}
	}
	return "", ErrNoServer
}

// databaseUser is the user that install makes: MariaDB lets the user of the same name in on the socket; MySQL's only user is
// root without a password, behind a directory that nobody else may enter.
func databaseUser() (string, error) {
	if bin, err := serverBinary(); err == nil && !isMariaDB(bin) {
		return "root", nil
	}
	return osUser()
}

func isMariaDB(bin string) bool { return filepath.Base(bin) == "mariadbd" }

// lookPath also looks where Debian puts servers, which an ordinary user's PATH leaves out.
func lookPath(name string) (string, error) {
	if path, err := exec.LookPath(name); err == nil {
		return filepath.Abs(path)
	}
	return exec.LookPath("/usr/sbin/" + name)
}

// socketPath is beside the server's files, or under the temporary directory when that path is too long for a socket.
func socketPath(base, dir string) (string, error) {
	const longest = 100 // sun_path holds 108 bytes, and the server itself adds a few for its own names
	path := filepath.Join(dir, "mysql.sock")
	if len(path) <= longest {
		return path, nil
	}
	short := filepath.Join(os.TempDir(), fmt.Sprintf("tidings-%d-%08x.sock", os.Getuid(), hash(base)))
	if len(short) > longest {
		return "", fmt.Errorf("the path %s is too long for a socket; choose a shorter data_dir", path)
	}
	return short, nil
}

func readPID(path string) int {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0
	}
	pid, _ := strconv.Atoi(strings.TrimSpace(string(text)))
	return pid
}

func emptyDir(dir string, keep ...string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if slices.Contains(keep, e.Name()) {
			continue
		}
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// telling picks the lines that say what went wrong; the script ends with a page of advice.
func telling(out string) string {
	var lines []string
	for _, line := range strings.Split(out, "\n") {
		if strings.Contains(line, "ERROR") || strings.Contains(line, "rror:") {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	if len(lines) == 0 {
		return lastLines(out, 20)
	}
	return strings.Join(lines[:min(len(lines), 5)], " | ")
}

func tail(path string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	return lastLines(string(text), 5)
}

func lastLines(text string, n int) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], " | ")
}

func defaultTo(value, fallback string) string {
	if value == "" {
		return fallback
	}
	return value
}
