package store_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"tidings/internal/testdb"
	"tidings/store"
)

// schemaOf lists the definition of every table and view, with the days' partitions and counters left out.
func schemaOf(t *testing.T, db *sql.DB) string {
	t.Helper()
	rows, err := db.Query("SELECT table_name, table_type FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name <> 't_schema_lock' ORDER BY table_name")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	var out strings.Builder
	for rows.Next() {
		var name, kind string
		if err := rows.Scan(&name, &kind); err != nil {
			t.Fatal(err)
		}
		var text, skip string
		if kind == "VIEW" {
			err = db.QueryRow("SHOW CREATE VIEW "+name).Scan(&name, &text, &skip, &skip)
		} else {
			err = db.QueryRow("SHOW CREATE TABLE "+name).Scan(&name, &text)
		}
		if err != nil {
			t.Fatal(err)
		}
		out.WriteString(volatile.ReplaceAllString(text, "") + "\n\n")
	}
	return out.String()
}

var volatile = regexp.MustCompile(`PARTITION .p\d{8}. VALUES LESS THAN \('[^']*'\) ENGINE = InnoDB,\s+| AUTO_INCREMENT=\d+|DEFINER=\S+ `)

// schema.sql is what people read; the migrations are what runs. They must agree.
func TestSchemaFile(t *testing.T) {
	t.Parallel()
	migrated := raw(t, testdb.New(t))
	text, err := os.ReadFile("../schema.sql")
	if err != nil {
		t.Fatal(err)
	}
	admin := raw(t, testdb.Server().DSN(""))
	run(t, admin, "CREATE DATABASE from_schema_file CHARACTER SET utf8mb4 COLLATE utf8mb4_bin")
	dsn := testdb.Server().DSN("from_schema_file")
	byHand := raw(t, dsn)
	run(t, byHand, string(text))
	if got, want := schemaOf(t, byHand), schemaOf(t, migrated); got != want {
		t.Fatalf("schema.sql and the migrations differ: %s", firstDifference(got, want))
	}
	for _, table := range []string{"t_msg_queue_high", "t_msg_queue_middle", "t_msg_queue_low"} {
		if n := count(t, byHand, "SELECT COUNT(*) FROM "+table); n != 9 {
			t.Errorf("%s has %d sentinels", table, n)
		}
	}
	if n, err := store.Migrate(context.Background(), store.Config{DSN: dsn, Observe: testdb.Observe}); err != nil || n != 0 {
		t.Fatalf("migrate after schema.sql applied %d migrations: %v", n, err)
	}
}

func firstDifference(got, want string) string {
	gotLines, wantLines := strings.Split(got, "\n"), strings.Split(want, "\n")
	for i := range min(len(gotLines), len(wantLines)) {
		if gotLines[i] != wantLines[i] {
			return fmt.Sprintf("line %d\n got %.300s\nwant %.300s", i+1, gotLines[i], wantLines[i])
		}
	}
	return fmt.Sprintf("%d and %d lines", len(gotLines), len(wantLines))
}

// Every statement of schema.sql must be MySQL 8, too.
func TestSchemaFileIsMySQL(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../schema.sql")
	if err != nil {
		t.Fatal(err)
	}
	// MySQL takes any built-in function as a default in parentheses since 8.0.13 (Reference Manual, Data Type Default Values); the parser
	// knows few.
	if err := parsesAsMySQL(strings.ReplaceAll(string(text), "DEFAULT (UTC_TIMESTAMP(3))", "DEFAULT CURRENT_TIMESTAMP(3)")); err != nil {
		t.Fatal(err)
	}
}

func TestMigrateByManyAtOnce(t *testing.T) {
	t.Parallel()
	dsn := testdb.Empty(t)
	var wg sync.WaitGroup
	for range 6 {
		wg.Go(func() {
			if _, err := store.Migrate(context.Background(), store.Config{DSN: dsn, Observe: testdb.Observe}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if got, want := schemaOf(t, raw(t, dsn)), schemaOf(t, raw(t, testdb.New(t))); got != want {
		t.Fatalf("migrated at once and alone differ: %s", firstDifference(got, want))
	}
}

// A crash can leave any prefix of a migration's statements behind: MySQL commits each DDL statement by itself.
func TestMigrateAfterCrash(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("migrations/00001_first_tables.sql")
	if err != nil {
		t.Fatal(err)
	}
	body := strings.SplitN(string(text), "-- +goose Up\n", 2)[1]
	parts := strings.SplitAfter(body, ";\n")
	want := schemaOf(t, raw(t, testdb.New(t)))
	for _, done := range []int{1, 4, 7, 9, len(parts) - 1} {
		dsn := testdb.New(t)
		db := raw(t, dsn)
		for _, name := range []string{"t_msg_queue_high", "t_msg_queue_middle", "t_msg_queue_low", "t_msg_record", "t_msg_attempt", "t_msg_dead", "t_idempotency", "t_node", "t_schema_version"} {
			run(t, db, "DROP TABLE "+name)
		}
		run(t, db, "DROP VIEW v_task, v_message, v_attempt")
		run(t, db, strings.Join(slices.Clone(parts[:done]), ""))
		if _, err := store.Migrate(context.Background(), store.Config{DSN: dsn, Observe: testdb.Observe}); err != nil {
			t.Fatalf("after %d statements: %v", done, err)
		}
		if got := schemaOf(t, db); got != want {
			t.Fatalf("after %d statements: %s", done, firstDifference(got, want))
		}
	}
}

func TestMigrateRefusesNewer(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	run(t, raw(t, dsn), "INSERT INTO t_schema_version (version_id, is_applied) VALUES (9999, 1)")
	if _, err := store.Migrate(context.Background(), store.Config{DSN: dsn, Observe: testdb.Observe}); !errors.Is(err, store.ErrNewer) {
		t.Fatalf("migrate: %v", err)
	}
}

// A command makes an empty database's tables, and leaves those of another version as they are.
func TestPrepare(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	none, current, older, newer, migrating := testdb.Empty(t), testdb.New(t), testdb.New(t), testdb.New(t), testdb.New(t)
	run(t, raw(t, testdb.Server().DSN("")), "CREATE DATABASE prepared_empty CHARACTER SET utf8mb4 COLLATE utf8mb4_bin")
	run(t, raw(t, older), "DELETE FROM t_schema_version ORDER BY version_id DESC LIMIT 1; DROP VIEW v_stuck")
	run(t, raw(t, newer), "INSERT INTO t_schema_version (version_id, is_applied) VALUES (9999, 1)")
	whole := schemaOf(t, raw(t, current))
	run(t, raw(t, migrating), `DELETE FROM t_schema_version ORDER BY version_id DESC LIMIT 1;
		UPDATE t_schema_lock SET locked = 1, locked_by = 'a server', lease_expires_at = NOW(6) + INTERVAL 5 SECOND`)
	for _, c := range []struct {
		what, dsn string
		want      error
	}{
		{"one that a server is bringing up to date", migrating, nil}, // first, for its lease
		{"no database", none, nil},
		{"an empty one", testdb.Server().DSN("prepared_empty"), nil},
		{"a current one", current, nil},
		{"an older one", older, store.ErrOlder},
		{"a newer one", newer, store.ErrNewer},
	} {
		before := whole
		if c.want != nil {
			before = schemaOf(t, raw(t, c.dsn))
		}
		if err := store.Prepare(ctx, store.Config{DSN: c.dsn, Observe: testdb.Observe}); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.what, err, c.want)
		} else if after := schemaOf(t, raw(t, c.dsn)); after != before {
			t.Errorf("%s: %s", c.what, firstDifference(after, before))
		}
	}
}

// Who has split a day off waits for a reader no longer than before: inserts wait behind it.
func TestSplitKeepsLockWait(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	day := s.Now().UTC().AddDate(0, 0, 7).Format("p20060102")
	run(t, raw(t, dsn), "ALTER TABLE t_msg_record DROP PARTITION "+day)
	if err := s.EnsurePartitions(context.Background()); err != nil {
		t.Fatal(err)
	}
	if n := count(t, raw(t, dsn), "SELECT COUNT(*) FROM information_schema.partitions WHERE table_schema = DATABASE() AND table_name = 't_msg_record' AND partition_name = ?", day); n != 1 {
		t.Fatal("the day was not split off")
	}
	waits, err := s.LockWaits(context.Background())
	if err != nil || len(waits) == 0 || slices.Max(waits) != 1 {
		t.Errorf("%v %v, want a second for each", waits, err)
	}
}

func TestPartitionsAhead(t *testing.T) {
	t.Parallel()
	s := testdb.Open(t, store.Config{})
	if err := s.EnsurePartitions(context.Background()); err != nil {
		t.Fatal(err)
	}
	dsn := testdb.New(t)
	db := raw(t, dsn)
	for _, table := range []string{"t_msg_record", "t_msg_attempt"} {
		n := count(t, db, "SELECT COUNT(*) FROM information_schema.partitions WHERE table_schema = DATABASE() AND table_name = ?", table)
		if n != 9 {
			t.Errorf("%s has %d partitions, want today, seven days ahead and the rest", table, n)
		}
	}
}
