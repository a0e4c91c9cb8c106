// Package crash is the rig that proves what docs/guarantees.md promises: two nodes of the shipped binary and their database are
// killed, stopped, cut off, filled up and set to other times under a mixed load, and an oracle compares what clients were told, what
// providers saw, and what the tables say.
//
// CRASH_ROUNDS is how many faults there are, CRASH_FAULTS which (all), CRASH_SEED repeats a run, CRASH_BINARY is another binary to test.
package crash

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// binary is the product as it is shipped.
var binary string

func TestMain(m *testing.M) {
	os.Exit(func() int {
		if binary = os.Getenv("CRASH_BINARY"); binary != "" {
			return m.Run()
		}
		dir, err := os.MkdirTemp("", "tidings-crash-")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		binary = filepath.Join(dir, "tidings")
		if out, err := exec.Command("go", "build", "-o", binary, "tidings").CombinedOutput(); err != nil {
			fmt.Fprintln(os.Stderr, err, string(out))
			return 1
		}
		return m.Run()
	}())
}
