package store_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"tidings/internal/testdb"
	"tidings/store"
)

// days gives the history tables partitions of earlier days.
func days(t *testing.T, exec func(string), now time.Time, back ...int) (names []string) {
	t.Helper()
	for _, table := range store.HistoryTables {
		var parts []string
		names = nil
		for _, n := range append(back, 0) {
			day := now.UTC().Truncate(24*time.Hour).AddDate(0, 0, -n)
			names = append(names, day.Format("p20060102"))
			parts = append(parts, fmt.Sprintf("PARTITION %s VALUES LESS THAN ('%s')", names[len(names)-1], day.AddDate(0, 0, 1).Format(time.DateTime)))
		}
		exec("ALTER TABLE " + table + " REORGANIZE PARTITION " + names[len(names)-1] + " INTO (" + strings.Join(parts, ", ") + ")")
	}
	return names
}

const oldRecords = `INSERT INTO t_msg_record (msg_id, channel, source_id, category, priority, receiver, attempt_limit, due_time, next_time, expire_time, create_time, modify_time, finish_time)
	SELECT seq, 31, 'shop', 'notification', 'middle', CONCAT('r', seq), 1, t, t, t, t, t, t FROM (SELECT seq, UTC_TIMESTAMP(3) - INTERVAL %d DAY AS t FROM seq_%d_to_%d) AS s`

func TestHistory(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s, db := testdb.Open(t, store.Config{DSN: dsn}), raw(t, dsn)
	ctx := context.Background()
	names := days(t, func(q string) { run(t, db, q) }, s.Now(), 10, 3)
	run(t, db, fmt.Sprintf(oldRecords, 10, 1, 4100))
	run(t, db, fmt.Sprintf(oldRecords, 3, 5000, 5002))
	run(t, db, "INSERT INTO t_msg_attempt (msg_id, channel, attempt, outcome, node, create_time) SELECT 1, 31, seq, 'temporary', 0, UTC_TIMESTAMP(3) - INTERVAL 10 DAY FROM seq_1_to_2100")
	old, err := s.OldDays(ctx, "t_msg_record", 5*24*time.Hour)
	if err != nil || !slices.Equal(old, names[:1]) {
		t.Fatalf("%v %v, want %v", old, err, names[:1])
	}
	if old, err = s.OldDays(ctx, "t_msg_record", 10*24*time.Hour); err != nil || len(old) != 0 {
		t.Errorf("%v %v: the day has rows that are not so old", old, err)
	}
	// All rows, each once, in order, over several pages; of one message, too.
	for table, want := range map[string]int{"t_msg_record": 4100, "t_msg_attempt": 2100} {
		last, n := "", 0
		err = s.EachOfDay(ctx, table, names[0], func(columns []string, values []any) error {
			key := fmt.Sprintf("%08d %08d", values[0], values[2])
			if table == "t_msg_record" {
				key = fmt.Sprintf("%08d", values[0])
			}
			if key <= last {
				t.Fatalf("%s after %s", key, last)
			}
			last = key
			n++
			return nil
		})
		rows, counted := s.CountDay(ctx, table, names[0])
		if err != nil || counted != nil || n != want || rows != int64(want) {
			t.Errorf("%s: read %d rows, counted %d, want %d: %v %v", table, n, rows, want, err, counted)
		}
	}
	stop := errors.New("stop")
	if err := s.EachOfDay(ctx, "t_msg_record", names[0], func([]string, []any) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("%v", err)
	}
	// Somebody reads the table: it is not waited for.
	tx, err := db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	var n int
	if err := tx.QueryRow("SELECT COUNT(*) FROM t_msg_record").Scan(&n); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if err := s.DropDay(ctx, "t_msg_record", names[0]); !errors.Is(err, store.ErrTableBusy) || time.Since(began) > 5*time.Second {
		t.Errorf("dropped under a reader: %v after %v", err, time.Since(began))
	}
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	for range 2 { // another process may have been faster
		if err := s.DropDay(ctx, "t_msg_record", names[0]); err != nil {
			t.Fatal(err)
		}
	}
	if n := count(t, db, "SELECT COUNT(*) FROM t_msg_record"); n != 3 {
		t.Errorf("%d rows are left, want 3", n)
	}
	for _, bad := range [][2]string{{"t_msg_dead", names[1]}, {"t_msg_record", "p_future"}, {"t_msg_record", "p20260101; DROP TABLE t_node"}} {
		if err := s.DropDay(ctx, bad[0], bad[1]); err == nil {
			t.Errorf("%v was dropped", bad)
		}
	}
	if sizes, err := s.HistorySizes(ctx); err != nil || len(sizes) < 10 || sizes[0].Table != "t_msg_attempt" || sizes[0].Day != names[0] {
		t.Errorf("%+v %v", sizes, err)
	}
}

func TestRestoreTables(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s, db := testdb.Open(t, store.Config{DSN: dsn}), raw(t, dsn)
	ctx := context.Background()
	if err := s.MakeRestoreTable(ctx, "t_back", "t_msg_attempt"); err != nil {
		t.Fatal(err)
	}
	if err := s.MakeRestoreTable(ctx, "t_back", "t_msg_attempt"); !errors.Is(err, store.ErrExists) {
		t.Errorf("made twice: %v", err)
	}
	for _, bad := range [][2]string{{"t back", "t_msg_attempt"}, {"t_x", "t_node"}} {
		if err := s.MakeRestoreTable(ctx, bad[0], bad[1]); err == nil {
			t.Errorf("%v was made", bad)
		}
	}
	columns := []string{"msg_id", "channel", "attempt", "outcome", "node", "create_time"}
	if err := s.InsertRestored(ctx, "t_back", columns, [][]any{{"7", "31", "1", "unknown", "0", "2020-01-01 00:00:00.123"}, {"7", "31", "2", "unknown", "0", "2020-01-01 00:00:01.123"}}); err != nil {
		t.Fatal(err)
	}
	if n, err := s.CountRestored(ctx, "t_back"); n != 2 || err != nil {
		t.Errorf("%d %v", n, err)
	}
	if err := s.InsertRestored(ctx, "t_back", []string{"msg_id) VALUES (1); --"}, [][]any{{"7"}}); err == nil {
		t.Error("a column's name was taken for what it was not")
	}
	if n := count(t, db, "SELECT COUNT(*) FROM information_schema.partitions WHERE table_schema = DATABASE() AND table_name = 't_back' AND partition_name IS NOT NULL"); n != 0 {
		t.Errorf("it has %d partitions", n)
	}
}

func TestPurgeOfFigures(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s, db := testdb.Open(t, store.Config{DSN: dsn}), raw(t, dsn)
	ctx := context.Background()
	run(t, db, `INSERT INTO t_stat_hour (hour, node, source_id, channel, category, outcome, tasks, latency_ms) SELECT UTC_TIMESTAMP() - INTERVAL seq DAY, 0, 'shop', 31, 'marketing', 'success', 1, 1 FROM seq_1_to_10;
		INSERT INTO t_attempt_hour (hour, node, channel, outcome, attempts, latency_ms) SELECT UTC_TIMESTAMP() - INTERVAL seq DAY, 0, 31, 'unknown', 1, 1 FROM seq_1_to_10;
		INSERT INTO t_batch VALUES ('shop', 'old', 1, 2, UTC_TIMESTAMP(3) - INTERVAL 9 DAY), ('shop', 'new', 1, ~0, UTC_TIMESTAMP(3) - INTERVAL 9 DAY)`)
	if n, err := s.PurgeStats(ctx, 5*24*time.Hour+time.Hour); n != 10 || err != nil {
		t.Errorf("purged %d %v", n, err)
	}
	// What waits keeps its batch, however long ago it was accepted.
	m := scheduled(s, "", 300*24*time.Hour)
	m.BatchID = "new"
	id := enqueue(t, s, m).MsgID
	run(t, db, "UPDATE t_msg_delay_far SET msg_id = 5, source_id = 'shop' WHERE msg_id = ?", id)
	run(t, db, "UPDATE t_batch SET last_msg_id = 9 WHERE batch_id = 'new' AND source_id = 'shop'")
	run(t, db, "DELETE FROM t_batch WHERE source_id = 'default'")
	if n, err := s.PurgeBatches(ctx, 8*24*time.Hour); n != 1 || err != nil || count(t, db, "SELECT COUNT(*) FROM t_batch WHERE batch_id = 'new'") != 1 {
		t.Errorf("purged %d batches: %v", n, err)
	}
}
