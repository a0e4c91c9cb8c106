package store_test

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"tidings/internal/testdb"
	"tidings/store"
)

// plan is how the server reads each real table of a query: table, access, index, and what it says besides.
func plan(t *testing.T, db *sql.DB, query string) (steps []string) {
	t.Helper()
	rows, err := db.Query("EXPLAIN " + query)
	if err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	defer rows.Close()
	for rows.Next() {
		var id, kind, table, access, possible, key, length, ref, n, extra sql.NullString
		if err := rows.Scan(&id, &kind, &table, &access, &possible, &key, &length, &ref, &n, &extra); err != nil {
			t.Fatal(err)
		}
		if table.String == "" || strings.HasPrefix(table.String, "<") { // a derived table, or no table at all
			continue
		}
		step := strings.TrimSpace(table.String + " " + access.String + " " + key.String)
		if strings.Contains(extra.String, "Using index") && !strings.Contains(extra.String, "Using index condition") {
			step += " only"
		}
		steps = append(steps, step)
	}
	slices.Sort(steps)
	return slices.Compact(steps)
}

// The views that docs/dba.md calls cheap are: their plans name the index that they are to use, and walk no table.
func TestViewPlans(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s, db := ringOf(t, store.Config{DSN: dsn})
	fill(t, s, 500)
	run(t, db, fmt.Sprintf(oldRecords, 0, 1, 3000))
	run(t, db, "INSERT INTO t_msg_record (msg_id, channel, source_id, category, priority, receiver, attempt_limit, due_time, next_time, expire_time, create_time, modify_time, finish_time) "+
		"SELECT seq, 2, 'shop', 'notification', 'middle', 'x', 1, t, t, t, t, t, t FROM (SELECT seq, UTC_TIMESTAMP(3) AS t FROM seq_1_to_3000) AS s")
	run(t, db, "INSERT INTO t_msg_attempt (msg_id, channel, attempt, outcome, node, create_time) SELECT seq, 2, 1, IF(seq MOD 50 = 0, 'unknown', 'temporary'), 0, UTC_TIMESTAMP(3) FROM seq_1_to_3000")
	run(t, db, "INSERT INTO t_stat_hour (hour, node, source_id, channel, category, outcome, tasks, latency_ms) SELECT '2026-01-01' + INTERVAL seq HOUR, 0, 'shop', 2, 'marketing', 'success', 1, 1 FROM seq_1_to_5000")
	run(t, db, "INSERT INTO t_attempt_hour SELECT '2026-01-01' + INTERVAL seq HOUR, 0, 'relay', 2, 'unknown', 1, 1 FROM seq_1_to_5000")
	run(t, db, "INSERT INTO t_batch SELECT 'shop', CONCAT('b', seq), seq, seq + 10, UTC_TIMESTAMP(3) FROM seq_1_to_500")
	run(t, db, "ANALYZE TABLE t_msg_record, t_msg_attempt, t_stat_hour, t_attempt_hour, t_batch, t_msg_queue_middle")
	everywhere := func(access string) (steps []string) {
		for _, table := range []string{"t_msg_dead", "t_msg_delay_1_0", "t_msg_delay_2_0", "t_msg_delay_3_0", "t_msg_delay_4_0", "t_msg_delay_far", "t_msg_queue_high", "t_msg_queue_low", "t_msg_queue_middle", "t_msg_record"} {
			steps = append(steps, table+" "+access+" PRIMARY")
		}
		return steps
	}
	queues := func(access string) (steps []string) {
		for _, table := range []string{"t_msg_queue_high", "t_msg_queue_low", "t_msg_queue_middle"} {
			for a := range strings.SplitSeq(access, ",") {
				steps = append(steps, table+" "+a)
			}
		}
		return steps
	}
	for _, c := range []struct {
		query string
		want  []string
	}{
		{"SELECT * FROM v_message WHERE msg_id = 77", everywhere("ref")},
		{"SELECT * FROM v_task WHERE msg_id = 77", everywhere("ref")},
		{"SELECT * FROM v_attempt WHERE msg_id = 77", []string{"t_msg_attempt ref PRIMARY", "t_msg_record ref PRIMARY"}},
		{"SELECT * FROM v_queue", queues("index idx_ready only,range idx_ready only")},
		{"SELECT * FROM v_provider_hour WHERE hour = '2026-01-05 10:00'", []string{"t_attempt_hour ref PRIMARY", "t_stat_hour ref PRIMARY"}},
		{"SELECT * FROM v_source_day WHERE day = '2026-01-05'", []string{"t_stat_hour ref idx_day"}},
		{"SELECT * FROM v_duplicates WHERE unknown_time >= UTC_TIMESTAMP(3) - INTERVAL 1 HOUR", []string{"a range idx_outcome", "r ref PRIMARY"}},
		{"SELECT * FROM v_duplicates WHERE msg_id = 77", []string{"a ref PRIMARY", "r ref PRIMARY"}},
		{"SELECT * FROM v_batch WHERE source_id = 'shop' AND batch_id = 'b7'", []string{"b const PRIMARY", "t range PRIMARY"}},
		{"SELECT * FROM v_delay WHERE due_time < UTC_TIMESTAMP(3)", []string{"t_msg_delay_1_0 range idx_due", "t_msg_delay_2_0 range idx_due", "t_msg_delay_3_0 range idx_due", "t_msg_delay_4_0 range idx_due", "t_msg_delay_far range idx_due"}},
		{"SELECT * FROM v_scheduled_by_hour", []string{"t_msg_delay_1_0 ref idx_due only", "t_msg_delay_2_0 ref idx_due only", "t_msg_delay_3_0 ref idx_due only", "t_msg_delay_4_0 ref idx_due only", "t_msg_delay_far ref idx_due only"}},
	} {
		if got := plan(t, db, c.query); !slices.Equal(got, c.want) {
			t.Errorf("%s\n got %s\nwant %s", c.query, strings.Join(got, "; "), strings.Join(c.want, "; "))
		}
	}
	for _, step := range plan(t, db, "SELECT * FROM v_stuck") {
		if !strings.Contains(step, "range idx_ready") && !strings.Contains(step, "range idx_due") {
			t.Errorf("v_stuck: %s", step)
		}
	}
}

// What the views say, in words.
func TestViews(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s, db := ringOf(t, store.Config{DSN: dsn})
	fill(t, s, 8)
	run(t, db, "UPDATE t_msg_queue_middle SET next_time = UTC_TIMESTAMP(3) - INTERVAL 20 MINUTE WHERE msg_id > 0")
	ids := []uint64{}
	rows, err := db.Query("SELECT msg_id FROM t_msg_queue_middle WHERE msg_id > 0 ORDER BY msg_id")
	if err != nil {
		t.Fatal(err)
	}
	for rows.Next() {
		var id uint64
		if err := rows.Scan(&id); err != nil {
			t.Fatal(err)
		}
		ids = append(ids, id)
	}
	rows.Close()
	for i, set := range []string{
		"status = 1", "status = 1, next_time = UTC_TIMESTAMP(3) + INTERVAL 1 MINUTE", "status = 2", "attempt = 1, next_time = UTC_TIMESTAMP(3) + INTERVAL 1 HOUR", "next_time = UTC_TIMESTAMP(3) + INTERVAL 2 HOUR",
	} {
		run(t, db, "UPDATE t_msg_queue_middle SET "+set+" WHERE msg_id = ?", ids[i])
	}
	run(t, db, "UPDATE t_msg_queue_middle SET next_time = UTC_TIMESTAMP(3) - INTERVAL 1 MINUTE WHERE msg_id = ?", ids[7])
	one := func(want, query string, args ...any) {
		t.Helper()
		if got := text(t, db, "SELECT COALESCE(GROUP_CONCAT(line ORDER BY line SEPARATOR '; '), '') FROM ("+query+") AS said", args...); got != want {
			t.Errorf("%s\n got %s\nwant %s", query, got, want)
		}
	}
	one("middle log 3 1 1 2 1 1200 2", "SELECT CONCAT_WS(' ', lane, channel, ready, waiting, retrying, sending, unknown, oldest_s, ROUND(TIMESTAMPDIFF(MINUTE, UTC_TIMESTAMP(3), next_due) / 60) + 1) AS line FROM v_queue")
	one("ready it has been due for more than 10 minutes 2; sending its lease or its wait has ended, and nobody took it over 1; unknown its lease or its wait has ended, and nobody took it over 1",
		"SELECT CONCAT_WS(' ', status, why, COUNT(*)) AS line FROM v_stuck GROUP BY status, why")
	late := enqueue(t, s, scheduled(s, "late", 24*3600e9)).MsgID
	one("", "SELECT 'x' AS line FROM v_stuck WHERE msg_id = ?", late)
	run(t, db, "UPDATE t_msg_delay_2_0 SET due_time = UTC_TIMESTAMP(3) - INTERVAL 2 MINUTE WHERE msg_id = ?", late)
	one("t_msg_delay_2_0 log ready it is due, and was not moved to its queue", "SELECT CONCAT_WS(' ', place, channel, status, why) AS line FROM v_stuck WHERE msg_id = ?", late)
	run(t, db, "INSERT INTO t_batch VALUES ('default', 'b', ?, ?, UTC_TIMESTAMP(3))", ids[0], late)
	run(t, db, "UPDATE t_msg_queue_middle SET batch_id = 'b' WHERE msg_id > 0")
	run(t, db, "UPDATE t_msg_delay_2_0 SET batch_id = 'b'")
	one("default b 9 6 2 1 0 0", "SELECT CONCAT_WS(' ', source_id, batch_id, tasks, ready, sending, unknown, success, dead) AS line FROM v_batch")
	run(t, db, `INSERT INTO t_stat_hour (hour, node, source_id, template_id, channel, category, provider, outcome, tasks, latency_ms) VALUES
		('2026-01-05 10:00', 0, 'shop', 'paid', 2, 'marketing', 'relay', 'success', 90, 900), ('2026-01-05 11:00', 1, 'shop', 'paid', 2, 'marketing', 'relay', 'failed', 10, 100),
		('2026-01-05 11:00', 0, 'shop', 'paid', 2, 'marketing', '', 'skipped', 50, 0), ('2026-01-06 00:00', 0, 'shop', 'paid', 2, 'marketing', 'relay', 'success', 1, 7);
		INSERT INTO t_attempt_hour VALUES ('2026-01-05 10:00', 0, 'relay', 2, 'temporary', 8, 800), ('2026-01-05 10:00', 1, 'relay', 2, 'unknown', 2, 2000)`)
	one("2026-01-05 shop paid sms 150 90 10 0 50 90.0 10", "SELECT CONCAT_WS(' ', day, source_id, template_id, channel, tasks, success, failed, expired, skipped, reach_percent, latency_ms) AS line FROM v_source_day WHERE day = '2026-01-05'")
	one("relay sms 90 8 0 2 90.0 37", "SELECT CONCAT_WS(' ', provider, channel, success, temporary, permanent, unknown, success_percent, latency_ms) AS line FROM v_provider_hour WHERE hour = '2026-01-05 10:00'")
	run(t, db, "INSERT INTO t_msg_dead SELECT * FROM t_msg_queue_middle WHERE msg_id > 0; UPDATE t_msg_dead SET provider = 'relay', last_error = IF(msg_id MOD 2 = 0, CONCAT('550 refused as m-', msg_id), 'timeout'), status = 5; DELETE FROM t_msg_dead WHERE msg_id IN (?, ?)", ids[0], ids[1])
	reasons := text(t, db, "SELECT GROUP_CONCAT(CONCAT_WS(' ', category, channel, provider, reason) ORDER BY reason SEPARATOR '; ') FROM v_dead_by_reason")
	if sum := count(t, db, "SELECT SUM(tasks) FROM v_dead_by_reason"); sum != 6 || !strings.Contains("notification log relay 550 refused as …; notification log relay timeout", reasons) {
		t.Errorf("%d dead letters, %s", sum, reasons)
	}
	run(t, db, "DELETE FROM t_msg_dead")
	run(t, db, "INSERT INTO t_msg_attempt (msg_id, channel, attempt, outcome, provider, text, node, create_time) VALUES (5, 2, 1, 'unknown', 'relay', 'timeout', 0, UTC_TIMESTAMP(3)), (6, 2, 1, 'unknown', 'relay', 'timeout', 0, UTC_TIMESTAMP(3))")
	run(t, db, `INSERT INTO t_msg_record (msg_id, channel, source_id, category, priority, receiver, status, attempt, attempt_limit, due_time, next_time, expire_time, provider, create_time, modify_time, finish_time)
		SELECT id, 2, 'shop', 'notification', 'middle', 'x', 3, attempt, 5, t, t, t, 'spare', t, t, t FROM (SELECT 5 AS id, 2 AS attempt, UTC_TIMESTAMP(3) AS t UNION ALL SELECT 6, 1, UTC_TIMESTAMP(3)) AS s`)
	one("5 sms 1 relay 2 success spare", "SELECT CONCAT_WS(' ', msg_id, channel, unknown_attempt, provider, attempts, status, last_provider) AS line FROM v_duplicates")
	one("log success; sms success; sms success", "SELECT CONCAT_WS(' ', channel, outcome) AS line FROM v_attempt WHERE outcome = 'success' UNION ALL SELECT 'log success'")
	run(t, db, "UPDATE t_lane SET paused = 1, reason = 'sale' WHERE lane = 'low'")
	one("high running 70; low paused 10 sale; middle running 20", "SELECT CONCAT_WS(' ', lane, status, weight, NULLIF(reason, '')) AS line FROM v_lanes")
	run(t, db, "INSERT INTO t_node (node, boot, holder, host, pid, version, serves, start_time, lease_end) VALUES (900, 1, '', 'h', 1, 'v', 1, UTC_TIMESTAMP(3), '2026-01-01'), (901, 1, 'x', 'h', 1, 'v', 0, UTC_TIMESTAMP(3), '2026-01-01')")
	one("900 left serve; 901 gone command", "SELECT CONCAT_WS(' ', node, status, role) AS line FROM v_nodes WHERE node >= 900")
	if n := count(t, db, "SELECT COUNT(*) FROM v_nodes WHERE status = 'alive' AND role = 'serve'"); n != 1 {
		t.Errorf("%d nodes are alive", n)
	}
}

// The version before makes v_delay in numbers, and may do so beside this one: the next turn of the ring makes it in words again.
func TestViewOfTheVersionBefore(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s, db := ringOf(t, store.Config{DSN: dsn})
	id := enqueue(t, s, scheduled(s, "", 24*time.Hour)).MsgID
	var old []string
	for _, table := range []string{"t_msg_delay_far", "t_msg_delay_1_0", "t_msg_delay_2_0", "t_msg_delay_3_0", "t_msg_delay_4_0"} {
		old = append(old, viewOf(table))
	}
	run(t, db, "CREATE OR REPLACE VIEW v_delay AS "+strings.Join(old, " UNION ALL "))
	if got := text(t, db, "SELECT status FROM v_message WHERE msg_id = ?", id); got == "scheduled" {
		t.Fatal("the view is in words already: the test shows nothing")
	}
	tend(t, testdb.Open(t, store.Config{DSN: dsn}))
	if got := text(t, db, "SELECT status FROM v_message WHERE msg_id = ?", id); got != "scheduled" {
		t.Errorf("the message is %s", got)
	}
}

// An account that changes the tables of another database is refused before it does.
func TestMigratorElsewhere(t *testing.T) {
	t.Parallel()
	if s, err := store.Open(context.Background(), store.Config{DSN: testdb.New(t), MigratorDSN: testdb.New(t)}); err == nil {
		s.Close()
		t.Error("opened")
	}
}
