// Package testdb gives each test a database of its own on a real private server, made from the product's migrations.
package testdb

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"tidings/internal/localdb"
	"tidings/store"
)

var server *localdb.Server

// Main starts the package's server, runs the tests, stops it and looks for leaked goroutines. Call it from TestMain; the code is for os.Exit.
func Main(m *testing.M) (code int) {
	code = withServer(m)
	if err := goleak.Find(); code == 0 && err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	return code
}

func withServer(m *testing.M) (code int) {
	dir, err := os.MkdirTemp("", "tidings-test-")
	if err == nil {
		err = os.Chmod(dir, 0o755)
	}
	if err == nil {
		defer os.RemoveAll(dir)
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		server, err = localdb.Start(ctx, localdb.Config{Dir: dir, Relaxed: true, BufferPool: "64M", RedoLog: "32M"})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "the tests need a database server:", err)
		return 1
	}
	defer server.Stop()
	return m.Run()
}

// Server is the package's server.
func Server() *localdb.Server { return server }

// Empty names a database that does not exist yet. It goes with the server.
func Empty(t testing.TB) (dsn string) {
	t.Helper()
	var b [8]byte
	rand.Read(b[:])
	name := "test_" + hex.EncodeToString(b[:])
	return server.DSN(name)
}

// New makes a migrated database for the test.
func New(t testing.TB) (dsn string) {
	t.Helper()
	dsn = Empty(t)
	if _, err := store.Migrate(context.Background(), store.Config{DSN: dsn, Observe: Observe}); err != nil {
		t.Fatalf("migrate: %v", err)
	}
	return dsn
}

// Open migrates a database for the test and opens a store on it, closed with the test.
func Open(t testing.TB, cfg store.Config) *store.Store {
	t.Helper()
	if cfg.DSN == "" {
		cfg.DSN = New(t)
	}
	if also := cfg.Observe; also == nil {
		cfg.Observe = Observe
	} else if all := Observe; all != nil {
		cfg.Observe = func(statement string) { all(statement); also(statement) }
	}
	s, err := store.Open(context.Background(), cfg)
	if err != nil {
		t.Fatalf("open the store: %v", err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close the store: %v", err)
		}
	})
	return s
}

// Observe, when set before the tests run, sees every statement of every store.
var Observe func(string)
