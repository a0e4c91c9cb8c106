package localdb

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	_ "github.com/go-sql-driver/mysql"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func start(t *testing.T, dir string) *Server {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	s, err := Start(ctx, Config{Dir: dir, Relaxed: true, BufferPool: "32M", RedoLog: "8M"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	return s
}

func ask(s *Server, query string) (answer string, err error) {
	db, err := sql.Open("mysql", s.DSN(""))
	if err != nil {
		return "", err
	}
	defer db.Close()
	err = db.QueryRow(query).Scan(&answer)
	return answer, err
}

// eventually waits for something that another process does.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain for: %s", what)
		}
	}
}

func TestLifecycle(t *testing.T) {
	t.Parallel()
	dir := t.TempDir() // for root: not open to others, so the files go elsewhere
	t.Cleanup(func() { removeFiles(dir) })
	s := start(t, dir)
	if v, err := ask(s, "SELECT @@skip_networking"); err != nil || v != "1" {
		t.Fatalf("skip_networking %s, %v", v, err)
	}
	if _, err := ask(s, "SELECT @@innodb_flush_log_at_trx_commit"); err != nil {
		t.Fatal(err)
	}
	pid := s.PID()
	if os.Getuid() == 0 {
		info, err := os.Stat(fmt.Sprintf("/proc/%d", pid))
		if err != nil || info.Sys().(*syscall.Stat_t).Uid == 0 {
			t.Fatalf("the server runs as root (%v)", err)
		}
	}
	syscall.Kill(pid, syscall.SIGKILL)
	eventually(t, "another server after a kill", func() bool { v, err := ask(s, "SELECT 1"); return err == nil && v == "1" && s.PID() != pid })
	last := s.PID()
	s.Stop()
	if isServer(last, s.dir) {
		t.Fatal("the server outlives Stop")
	}
	again := start(t, dir)
	if _, err := ask(again, "SELECT 1"); err != nil {
		t.Fatal(err)
	}
}

// Two processes share the directory; when the one that runs the server ends, the other takes over.
func TestShared(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	t.Cleanup(func() { removeFiles(dir) })
	first := start(t, dir)
	second := start(t, dir)
	pid := first.PID()
	if second.PID() != pid || first.Socket() != second.Socket() {
		t.Fatalf("servers %d and %d", pid, second.PID())
	}
	first.Stop()
	eventually(t, "the second process's server", func() bool { _, err := ask(second, "SELECT 1"); return err == nil })
	if second.PID() == pid {
		t.Fatal("the first one's server still runs")
	}
}

// A making that was interrupted is begun anew.
func TestInterruptedInstall(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	t.Cleanup(func() { removeFiles(dir) })
	files, err := filesDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"making", "ibdata1", "aria_log_control"} {
		if err := os.WriteFile(filepath.Join(files, name), []byte("half"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := ask(start(t, dir), "SELECT 1"); err != nil {
		t.Fatal(err)
	}
}

// A directory that somebody else filled is left as it is.
func TestForeignFilesAreKept(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	t.Cleanup(func() { removeFiles(dir) })
	files, err := filesDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	foreign := filepath.Join(files, "payroll.ibd")
	if err := os.WriteFile(foreign, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if _, err := Start(ctx, Config{Dir: dir}); err == nil || !strings.Contains(err.Error(), "payroll.ibd") {
		t.Fatalf("started over foreign files: %v", err)
	}
	if text, err := os.ReadFile(foreign); err != nil || string(text) != "precious" {
		t.Fatalf("the foreign file: %q, %v", text, err)
	}
}

func TestCannotStart(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	t.Cleanup(func() { removeFiles(dir) })
	files, err := filesDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(files, "installed"), nil, 0o600); err != nil { // but it is empty
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	_, err = Start(ctx, Config{Dir: dir})
	if err == nil || errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "log says") {
		t.Fatalf("an empty directory: %v", err)
	}
}

func TestLongPathHasShortSocket(t *testing.T) {
	t.Parallel()
	long := "/tmp/" + strings.Repeat("long/", 30)
	path, err := socketPath(long, long+"mysql")
	if err != nil || len(path) > 100 {
		t.Fatalf("%s, %v", path, err)
	}
}

// removeFiles removes what lies outside the test's directory.
func removeFiles(dir string) {
	if target, err := filepath.EvalSymlinks(filepath.Join(dir, "mysql")); err == nil {
		os.RemoveAll(target)
	}
}
