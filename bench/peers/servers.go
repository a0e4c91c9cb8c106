package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"syscall"
	"time"
)

// unprivileged makes a command run as nobody when root starts it: PostgreSQL refuses root.
func unprivileged(cmd *exec.Cmd, dir string) error {
	cmd.Dir = dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if os.Getuid() != 0 {
		return nil
	}
	u, err := user.Lookup("nobody")
	if err != nil {
		return err
	}
	uid, err := strconv.Atoi(u.Uid)
	if err != nil {
		return err
	}
	gid, err := strconv.Atoi(u.Gid)
	if err != nil {
		return err
	}
	cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
	return os.Chown(dir, uid, gid)
}

// serve starts a server and returns how to stop it, once ready says that it answers.
func serve(cmd *exec.Cmd, ready func() error) (stop func(), err error) {
	log, err := os.CreateTemp("", "tidings-peer-log-")
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	stop = func() {
		cmd.Process.Signal(syscall.SIGINT)
		cmd.Wait()
		os.Remove(log.Name())
	}
	for range 200 {
		if err = ready(); err == nil {
			return stop, nil
		}
		time.Sleep(50 * time.Millisecond)
	}
	stop()
	return nil, fmt.Errorf("%s does not answer: %w", cmd.Path, err)
}

// freePort finds a loopback port that nobody listens on.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}

func answers(port int) func() error {
	return func() error {
		conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			return err
		}
		return conn.Close()
	}
}

// postgres starts a durable PostgreSQL on a socket in dir.
func postgres(ctx context.Context, dir string) (dsn string, stop func(), err error) {
	bins, err := filepath.Glob("/usr/lib/postgresql/*/bin")
	if err != nil || len(bins) == 0 {
		return "", nil, fmt.Errorf("no PostgreSQL server is installed (%v)", err)
	}
	bin, data := bins[len(bins)-1], filepath.Join(dir, "pg")
	init := exec.CommandContext(ctx, filepath.Join(bin, "initdb"), "-D", data, "-U", "bench", "--auth=trust", "--encoding=UTF8", "--locale=C")
	if err := unprivileged(init, dir); err != nil {
		return "", nil, err
	}
	if out, err := init.CombinedOutput(); err != nil {
		return "", nil, fmt.Errorf("initdb: %w: %s", err, out)
	}
	cmd := exec.Command(filepath.Join(bin, "postgres"), "-D", data, "-k", dir, "-c", "listen_addresses=", "-c", "shared_buffers=256MB",
		"-c", "max_wal_size=1GB", "-c", "max_connections=200", "-c", "fsync=on", "-c", "synchronous_commit=on")
	if err := unprivileged(cmd, dir); err != nil {
		return "", nil, err
	}
	stop, err = serve(cmd, func() error {
		conn, err := net.Dial("unix", filepath.Join(dir, ".s.PGSQL.5432"))
		if err != nil {
			return err
		}
		return conn.Close()
	})
	return "host=" + dir + " user=bench dbname=postgres", stop, err
}

// redis starts a Redis with an append-only file.
func redis(dir, fsync string) (addr string, stop func(), err error) {
	port, err := freePort()
	if err != nil {
		return "", nil, err
	}
	cmd := exec.Command("redis-server", "--port", fmt.Sprint(port), "--bind", "127.0.0.1", "--dir", dir, "--appendonly", "yes", "--appendfsync", fsync, "--save", "")
	stop, err = serve(cmd, answers(port))
	return fmt.Sprintf("127.0.0.1:%d", port), stop, err
}
