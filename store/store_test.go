package store_test

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"flag"
	"os"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"tidings/internal/msg"
	"tidings/internal/testdb"
	"tidings/store"
)

func TestMain(m *testing.M) {
	testdb.Observe = statements.add
	checks := "12" // each makes a database; -rapid.checks=200 for a night
	if set := flag.Lookup("rapid.checks"); set.Value.String() == set.DefValue {
		set.Value.Set(checks)
	}
	code := testdb.Main(m)
	if code == 0 && flag.Lookup("test.run").Value.String() == "" { // a part of the tests cannot have sent everything
		code = statements.check()
	}
	os.Exit(code)
}

// raw opens a plain connection pool on a store's database, as a DBA would have it.
func raw(t testing.TB, dsn string) *sql.DB {
	t.Helper()
	cfg, err := mysql.ParseDSN(dsn)
	if err != nil {
		t.Fatal(err)
	}
	cfg.ParseTime, cfg.InterpolateParams, cfg.MultiStatements = true, true, true
	cfg.Params = map[string]string{"time_zone": "'+00:00'"}
	db, err := sql.Open("mysql", cfg.FormatDSN())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

func run(t testing.TB, db interface {
	Exec(string, ...any) (sql.Result, error)
}, query string, args ...any,
) {
	t.Helper()
	if _, err := db.Exec(query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

func count(t testing.TB, db *sql.DB, query string, args ...any) (n int) {
	t.Helper()
	if err := db.QueryRow(query, args...).Scan(&n); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return n
}

func text(t testing.TB, db *sql.DB, query string, args ...any) (s string) {
	t.Helper()
	if err := db.QueryRow(query, args...).Scan(&s); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return s
}

func message(requestID string) *store.Message {
	return &store.Message{
		SourceID: "default", RequestID: requestID, BodyHash: sha256.Sum256([]byte("body")),
		Category: msg.Notification, Lane: msg.Middle, Content: []byte(`{"text":"hello"}`),
		Expire: time.Now().Add(time.Hour), Tasks: []store.NewTask{{Channel: msg.Log, Receiver: "someone", AttemptLimit: 5}},
	}
}

func enqueue(t testing.TB, s *store.Store, m *store.Message) store.Accepted {
	t.Helper()
	got, err := s.Enqueue(context.Background(), m)
	if err != nil {
		t.Fatalf("enqueue: %v", err)
	}
	return got
}

func claim(t testing.TB, s *store.Store, limit int) []store.Task {
	t.Helper()
	claimed, err := s.Claim(context.Background(), msg.Middle, msg.Log, limit, time.Time{})
	if err != nil || len(claimed.Recorded) > 0 {
		t.Fatalf("claim: %v, %d recorded", err, len(claimed.Recorded))
	}
	return claimed.Tasks
}

func settle(t testing.TB, s *store.Store, outcomes ...store.Outcome) []store.Settled {
	t.Helper()
	verdicts, err := s.Settle(context.Background(), outcomes)
	if err != nil {
		t.Fatalf("settle: %v", err)
	}
	return verdicts
}

func success(s *store.Store, task store.Task) store.Outcome {
	return store.Outcome{Task: task, State: msg.Success, Provider: "log", Finished: s.Now()}
}
