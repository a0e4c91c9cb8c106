//go:build crash

package crash

import (
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// The disk below the database fills up, three times, for a few seconds each. It needs root: the disk is a small tmpfs.
func TestDiskFull(t *testing.T) {
	seed := uint64(number(t, "CRASH_SEED", int(time.Now().UnixNano()&(1<<40-1))))
	t.Logf("CRASH_SEED=%d", seed)
	disk := worldDir(t)
	if err := syscall.Mount("tmpfs", disk, "tmpfs", 0, "size=320m,mode=755"); err != nil {
		t.Fatalf("mount a tmpfs (as root): %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(disk, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	r := newRig(t, rand.New(rand.NewPCG(seed, 0)), filepath.Join(disk, "db"))
	r.limit(t)
	stop := make(chan struct{})
	l, clients := r.load(8, seed, stop)
	w := r.watch()
	for range 3 {
		time.Sleep(3 * time.Second)
		s := span{what: "disk full", start: time.Now()}
		r.fill(disk)
		s.end = time.Now()
		r.faults = append(r.faults, s)
	}
	time.Sleep(2 * time.Second)
	close(stop)
	clients.Wait()
	v := r.judge(l)
	w.end()
	v.looks, v.illegal = w.looks, w.illegal
	t.Logf("%d faults: disk full", len(r.faults))
	t.Logf("%v", v)
	if v.bad() {
		t.Error("what was promised was not kept")
	}
}

// fill leaves no room on the disk for six seconds.
func (r *rig) fill(disk string) {
	path := filepath.Join(disk, "filler")
	f, err := os.Create(path)
	if err != nil {
		r.t.Fatal(err)
	}
	defer os.Remove(path)
	defer f.Close()
	block, full := make([]byte, 64<<10), false
	for end := time.Now().Add(6 * time.Second); time.Now().Before(end); {
		if _, err := f.Write(block); errors.Is(err, syscall.ENOSPC) { // what the database frees is taken, too
			full = true
			time.Sleep(10 * time.Millisecond)
		} else if err != nil {
			r.t.Fatal(err)
		}
	}
	if !full {
		r.t.Error("the disk was never full")
	}
}
