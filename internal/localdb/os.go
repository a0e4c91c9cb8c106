package localdb

import (
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
)

// nobodyHome is where a server's files go when root starts it on a data directory that `nobody` cannot enter.
const nobodyHome = "/var/lib/tidings"

// filesDir returns the directory of the server's files, made and owned by the user that the server will run as. It is
// base/mysql. A database server refuses to run as root, so for root it runs as `nobody`, who often cannot enter root's
// directories; then base/mysql is a link to a directory of its own under nobodyHome.
func filesDir(base string) (string, error) {
	abs, err := filepath.Abs(base)
	if err != nil {
		return "", err
	}
	dir := filepath.Join(abs, "mysql")
	if _, err := os.Stat(dir); err == nil {
		return filepath.EvalSymlinks(dir)
	}
	if target, err := os.Readlink(dir); err == nil {
		return "", fmt.Errorf("%s is a link to %s, which is not there (not mounted?); remove the link to begin with an empty database", dir, target)
	}
	if os.Getuid() == 0 && !openToOthers(abs) {
		target, err := os.MkdirTemp(mkdirs(nobodyHome), "db-")
		if err != nil {
			return "", err
		}
		if err := os.Symlink(target, dir); err != nil {
			return "", err
		}
		return target, giveAway(target)
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return "", err
	}
	return dir, giveAway(dir)
}

func mkdirs(dir string) string {
	_ = os.MkdirAll(dir, 0o755) // what is wrong shows when the directory is used
	return dir
}

// openToOthers tells whether any user can enter a directory.
func openToOthers(dir string) bool {
	dir, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return false
	}
	for {
		info, err := os.Stat(dir)
		if err != nil || info.Mode().Perm()&0o001 == 0 {
			return false
		}
		if dir == "/" {
			return true
		}
		dir = filepath.Dir(dir)
	}
}

func giveAway(dir string) error {
	if os.Getuid() != 0 {
		return os.Chmod(dir, 0o700)
	}
	uid, gid, err := nobody()
	if err != nil {
		return err
	}
	return os.Chown(dir, int(uid), int(gid))
}

func nobody() (uid, gid uint32, err error) {
	u, err := user.Lookup("nobody")
	if err != nil {
		return 0, 0, fmt.Errorf("root cannot run a database server itself: %w", err)
	}
	id, err := strconv.ParseUint(u.Uid, 10, 32)
	if err != nil {
		return 0, 0, err
	}
	group, err := strconv.ParseUint(u.Gid, 10, 32)
	if err != nil {
		return 0, 0, err
	}
	return uint32(id), uint32(group), nil
}

func osUser() (string, error) {
	u, err := user.Current()
	if err != nil {
		return "", fmt.Errorf("the name of the user who runs this: %w", err)
	}
	return u.Username, nil
}

// childAttr makes a child that leaves our process group, so that Ctrl-C at a terminal reaches us alone and we stop it in
// order; that is stopped by the kernel when we are killed; and that is never root.
func childAttr() *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	if os.Getuid() == 0 {
		if uid, gid, err := nobody(); err == nil {
			attr.Credential = &syscall.Credential{Uid: uid, Gid: gid}
		}
	}
	return attr
}

// startTied starts a command from a thread that lives as long as the command does: the kernel sends Pdeathsig when the
// thread that started it ends, and Go ends threads at will.
func startTied(cmd *exec.Cmd, exited chan<- error) error {
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			exited <- cmd.Wait()
		}
	}()
	return <-started
}

// outputTied runs a command to its end in the same way.
func outputTied(cmd *exec.Cmd) (out []byte, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		out, err = cmd.CombinedOutput()
	}()
	<-done
	return out, err
}

// lockFile takes the lock that its holder's death releases. The error is EWOULDBLOCK when another process has it.
func lockFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// isServer tells whether a process id still belongs to the database server of a directory, and not to a later process that
// got its number.
func isServer(pid int, dir string) bool {
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	if err != nil {
		return false
	}
	comm := strings.TrimSpace(string(name))
	if comm != "mariadbd" && comm != "mysqld" {
		return false
	}
	if args, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); err != nil || !strings.Contains(string(args), dir) {
		return false
	}
	state, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && !strings.Contains(string(state), ") Z ")
}

func hash(text string) uint32 {
	h := fnv.New32a()
	h.Write([]byte(text))
	return h.Sum32()
}
