package retention_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"database/sql"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	_ "github.com/go-sql-driver/mysql"

	"tidings/internal/retention"
	"tidings/internal/testdb"
	"tidings/store"
)

func TestMain(m *testing.M) { os.Exit(testdb.Main(m)) }

func raw(t *testing.T, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open("mysql", dsn+"?multiStatements=true")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

func run(t *testing.T, db *sql.DB, query string) {
	t.Helper()
	if _, err := db.Exec(query); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

func number(t *testing.T, db *sql.DB, query string) (n int) {
	t.Helper()
	if err := db.QueryRow(query).Scan(&n); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return n
}

// awkward are rows that are hard to write as text: quotes, line breaks, other scripts, NULL, JSON with spaces, large numbers.
const awkward = `INSERT INTO t_msg_record (msg_id, channel, source_id, request_id, category, priority, receiver, params, content, last_error, attempt_limit, due_time, next_time, expire_time, create_time, modify_time, finish_time) VALUES
	(18446744073709551615, 1, 'shop', 'quote " and \\ and \n', 'marketing', 'low', 'Änne <ä@example.com>', '{"a":  1.50, "b": "<&>\\u2028"}', NULL, '发送失败', 3, '2020-01-01 00:00:00.001', '2020-01-01', '2020-01-01', '2020-01-01', '2020-01-01', '2020-01-01 23:59:59.999'),
	(7, 2, 'shop', '', 'verification', 'high', '+8613800000000', NULL, '{"text": "line\\nbreak"}', '', 3, '2020-01-01', '2020-01-01', '2020-01-01', '2020-01-01', '2020-01-01', '2020-01-01 12:00:00'),
	(8, 2, 'shop', '', 'verification', 'high', 'x', '{"a":\n1}', '{"a":1.}', '', 3, '2020-01-01', '2020-01-01', '2020-01-01', '2020-01-01', '2020-01-01', '2020-01-01 12:00:00'),
	(7, 31, 'shop', '', 'verification', 'high', 'x', '[1, null, {}]', 'null', '', 3, '2020-01-01', '2020-01-01', '2020-01-01', '2020-01-01', '2020-01-01', '2020-01-01 12:00:00')`

// What is too old leaves; the archive has all of it, and brings it back as it was.
func TestKeep(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s, db := testdb.Open(t, store.Config{DSN: dsn}), raw(t, dsn)
	today := s.Now().UTC().Format("p20060102")
	for _, table := range store.HistoryTables {
		run(t, db, fmt.Sprintf("ALTER TABLE %s REORGANIZE PARTITION %s INTO (PARTITION p20200101 VALUES LESS THAN ('2020-01-02'), PARTITION p20200102 VALUES LESS THAN ('2020-01-03'), PARTITION %s VALUES LESS THAN ('%s'))",
			table, today, today, s.Now().UTC().AddDate(0, 0, 1).Format(time.DateOnly)))
	}
	run(t, db, awkward)
	run(t, db, `INSERT INTO t_msg_record (msg_id, channel, source_id, category, priority, receiver, content, attempt_limit, due_time, next_time, expire_time, create_time, modify_time, finish_time)
		SELECT 100 + seq, 31, 'shop', 'marketing', 'low', 'x', JSON_OBJECT('text', REPEAT('y', 1000)), 1, t, t, t, t, t, t FROM (SELECT seq, '2020-01-01 10:00:00' AS t FROM seq_1_to_2500) AS s;
		INSERT INTO t_msg_record (msg_id, channel, source_id, category, priority, receiver, attempt_limit, due_time, next_time, expire_time, create_time, modify_time, finish_time)
		VALUES (9, 31, 'shop', 'marketing', 'low', 'new', 1, UTC_TIMESTAMP(3), UTC_TIMESTAMP(3), UTC_TIMESTAMP(3), UTC_TIMESTAMP(3), UTC_TIMESTAMP(3), UTC_TIMESTAMP(3));
		INSERT INTO t_msg_attempt (msg_id, channel, attempt, outcome, text, node, create_time) VALUES (7, 2, 1, 'unknown', 'timeout "x"', 3, '2020-01-01 12:00:00.5');
		CREATE TABLE t_before AS SELECT * FROM t_msg_record PARTITION (p20200101)`)
	dir := t.TempDir()
	k := &retention.Keeper{Store: s, Log: slog.New(slog.DiscardHandler), Ages: retention.Ages{Record: 90 * 24 * time.Hour, Attempt: 90 * 24 * time.Hour}, ArchiveDir: dir}
	for range 2 { // a second time there is nothing to do
		if err := k.Keep(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	if n := number(t, db, "SELECT COUNT(*) FROM t_msg_record"); n != 1 {
		t.Errorf("%d rows are left, want the new one", n)
	}
	archives, err := retention.List(dir)
	if err != nil || len(archives) != 4 {
		t.Fatalf("%+v %v: want both days of both tables", archives, err)
	}
	a := archives[1]
	if filepath.Base(a.Path) != "t_msg_record.20200101.2504.ndjson.gz" || a.Rows != 2504 || a.Bytes == 0 {
		t.Errorf("%+v", a)
	}
	if lines := unzipped(t, a.Path); !strings.Contains(lines, `{"msg_id":"18446744073709551615","channel":1,"source_id":"shop",`) {
		t.Errorf("%.300s", lines)
	}
	name, rows, err := retention.Restore(context.Background(), s, a.Path, "")
	if err != nil || name != "t_msg_record_20200101" || rows != 2504 {
		t.Fatalf("%s %d %v", name, rows, err)
	}
	for _, pair := range [][2]string{{"t_before", name}, {name, "t_before"}} {
		if n := number(t, db, fmt.Sprintf("SELECT COUNT(*) FROM (SELECT * FROM %s EXCEPT SELECT * FROM %s) AS d", pair[0], pair[1])); n != 0 {
			t.Errorf("%d rows of %s are not in %s", n, pair[0], pair[1])
		}
	}
	if _, _, err := retention.Restore(context.Background(), s, a.Path, ""); err == nil {
		t.Error("restored over a table that is there")
	}
	if _, rows, err = retention.Restore(context.Background(), s, archives[0].Path, "t_tries"); err != nil || rows != 1 {
		t.Errorf("%d %v", rows, err)
	}
	if n := number(t, db, "SELECT COUNT(*) FROM t_tries WHERE text = 'timeout \"x\"' AND create_time = '2020-01-01 12:00:00.5'"); n != 1 {
		t.Error("an attempt came back changed")
	}
	// A file that is damaged is told of before anything is made.
	text, err := os.ReadFile(a.Path)
	if err != nil {
		t.Fatal(err)
	}
	for what, damaged := range map[string][]byte{"cut": text[:len(text)/2], "bent": append(append([]byte{}, text[:len(text)/2]...), append([]byte("xxxx"), text[len(text)/2+4:]...)...)} {
		path := filepath.Join(t.TempDir(), filepath.Base(a.Path))
		if err := os.WriteFile(path, damaged, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, _, err := retention.Restore(context.Background(), s, path, "t_"+what); err == nil || number(t, db, "SELECT COUNT(*) FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = 't_"+what+"'") != 0 {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// Without an archive that is whole, nothing is dropped; and what is archived is not archived again because it could not be dropped.
func TestNothingIsDroppedUnarchived(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s, db := testdb.Open(t, store.Config{DSN: dsn}), raw(t, dsn)
	today := s.Now().UTC().Format("p20060102")
	run(t, db, fmt.Sprintf("ALTER TABLE t_msg_record REORGANIZE PARTITION %s INTO (PARTITION p20200101 VALUES LESS THAN ('2020-01-02'), PARTITION %s VALUES LESS THAN ('%s'))",
		today, today, s.Now().UTC().AddDate(0, 0, 1).Format(time.DateOnly)))
	run(t, db, awkward)
	dir := filepath.Join(t.TempDir(), "archive")
	k := &retention.Keeper{Store: s, Log: slog.New(slog.DiscardHandler), Ages: retention.Ages{Record: time.Hour}, ArchiveDir: dir}
	if err := k.Keep(context.Background()); err == nil || number(t, db, "SELECT COUNT(*) FROM t_msg_record") != 4 {
		t.Fatalf("there is no directory to write to: %v", err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	// A file that is called like the archive is none for that.
	other := filepath.Join(dir, "t_msg_record.20200101.4.ndjson.gz")
	for what, text := range map[string]string{"nothing": "x", "another database's": zipped(t, "{}\n{}\n{}\n{}\n")} {
		if err := os.WriteFile(other, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := k.Keep(context.Background()); err == nil || number(t, db, "SELECT COUNT(*) FROM t_msg_record") != 4 {
			t.Fatalf("%s was taken for the archive: %v", what, err)
		}
	}
	if err := os.Remove(other); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, ".t_msg_record.20200101.123.part"), []byte("a crash's"), 0o600); err != nil {
		t.Fatal(err)
	}
	tx, err := db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	var n int
	if err := tx.QueryRow("SELECT COUNT(*) FROM t_msg_record").Scan(&n); err != nil {
		t.Fatal(err)
	}
	err = k.Keep(context.Background())
	files, _ := filepath.Glob(filepath.Join(dir, "*"))
	if err == nil || len(files) != 1 {
		t.Fatalf("with a reader: %v, files %v", err, files)
	}
	before, err := os.Stat(files[0])
	if err != nil {
		t.Fatal(err)
	}
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	if err := k.Keep(context.Background()); err != nil || number(t, db, "SELECT COUNT(*) FROM t_msg_record") != 0 {
		t.Fatalf("%v", err)
	}
	after, err := os.Stat(files[0])
	if err != nil || !after.ModTime().Equal(before.ModTime()) {
		t.Errorf("archived again: %v", err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, ".*")); len(left) != 0 {
		t.Errorf("left behind: %s", strings.Join(left, " "))
	}
}

func unzipped(t *testing.T, path string) string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func zipped(t *testing.T, text string) string {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	if _, err := w.Write([]byte(text)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// A row that comes while the day is archived, by somebody's hand, is not dropped with it: the archive has fewer rows than the day.
func TestRowWhileArchiving(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	db := raw(t, dsn)
	counts := 0
	s := testdb.Open(t, store.Config{DSN: dsn, Observe: func(statement string) {
		if strings.Contains(statement, "tidings:history-count") {
			if counts++; counts == 2 { // the first asks whether there is anything to do, the second proves the file
				run(t, db, strings.ReplaceAll(awkward, "'2020-01-01 12:00:00')", "'2020-01-01 12:00:01')"))
			}
		}
	}})
	today := s.Now().UTC().Format("p20060102")
	run(t, db, fmt.Sprintf("ALTER TABLE t_msg_record REORGANIZE PARTITION %s INTO (PARTITION p20200101 VALUES LESS THAN ('2020-01-02'), PARTITION %s VALUES LESS THAN ('%s'))",
		today, today, s.Now().UTC().AddDate(0, 0, 1).Format(time.DateOnly)))
	run(t, db, strings.ReplaceAll(awkward, "18446744073709551615", "1"))
	k := &retention.Keeper{Store: s, Log: slog.New(slog.DiscardHandler), Ages: retention.Ages{Record: time.Hour}, ArchiveDir: t.TempDir()}
	if err := k.Keep(context.Background()); err == nil || number(t, db, "SELECT COUNT(*) FROM t_msg_record") != 8 {
		t.Fatalf("dropped: %v", err)
	}
	if err := k.Keep(context.Background()); err != nil || number(t, db, "SELECT COUNT(*) FROM t_msg_record") != 0 {
		t.Fatalf("the next time: %v", err)
	}
}

// One process does it for all, and says what went wrong.
func TestKeeperRuns(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s, db := testdb.Open(t, store.Config{DSN: dsn}), raw(t, dsn)
	run(t, db, "INSERT INTO t_msg_submit (source_id, channels, receiver, status, next_time) VALUES ('x', 'log', 'y', 'accepted', UTC_TIMESTAMP(3) - INTERVAL 2 HOUR)")
	ctx, cancel := context.WithCancel(context.Background())
	k := &retention.Keeper{Store: s, Log: slog.New(slog.DiscardHandler), Ages: retention.Ages{Submit: time.Hour}}
	done := make(chan struct{})
	go func() { k.Run(ctx); close(done) }()
	for deadline := time.Now().Add(20 * time.Second); number(t, db, "SELECT COUNT(*) FROM t_duty WHERE duty = 'retention' AND done_time IS NOT NULL AND owner = '' AND last_error = ''") != 1; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("nobody did it")
		}
	}
	cancel()
	<-done
	if n := number(t, db, "SELECT COUNT(*) FROM t_msg_submit"); n != 0 {
		t.Errorf("%d submissions are left", n)
	}
}
