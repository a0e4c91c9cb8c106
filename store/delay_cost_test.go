package store_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"tidings/internal/msg"
	"tidings/store"
)

// examined runs a statement and tells how many rows and index entries the server went through for it.
func examined(t testing.TB, conn *sql.Conn, query string, args ...any) (n int) {
	t.Helper()
	ctx := context.Background()
	if _, err := conn.ExecContext(ctx, "FLUSH STATUS"); err != nil {
		t.Fatal(err)
	}
	rows, err := conn.QueryContext(ctx, query, args...)
	if err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	for rows.Next() {
	}
	if err := errors.Join(rows.Err(), rows.Close()); err != nil {
		t.Fatal(err)
	}
	rows, err = conn.QueryContext(ctx, "SHOW SESSION STATUS LIKE 'Handler_read%'")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var (
			name  string
			value int
		)
		if err := rows.Scan(&name, &value); err != nil {
			t.Fatal(err)
		}
		n += value
	}
	return n
}

// explain tells the access type and the key of a statement's plan, a line for each table.
func explain(t testing.TB, conn *sql.Conn, query string, args ...any) (plan []string) {
	t.Helper()
	rows, err := conn.QueryContext(context.Background(), "EXPLAIN "+query, args...)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	columns, err := rows.Columns()
	if err != nil {
		t.Fatal(err)
	}
	for rows.Next() {
		cells, at := make([]sql.NullString, len(columns)), make([]any, len(columns))
		for i := range cells {
			at[i] = &cells[i]
		}
		if err := rows.Scan(at...); err != nil {
			t.Fatal(err)
		}
		var line []string
		for i, name := range columns {
			if name == "type" || name == "key" || name == "Extra" {
				line = append(line, cells[i].String)
			}
		}
		plan = append(plan, strings.Join(line, ", "))
	}
	return plan
}

// What finding, moving and claiming due tasks costs does not depend on how many are scheduled: the same with 1,000 rows and with 20,000,
// where the first 100 are due. (docs/benchmarks.md has 2,000,000 and 10,000,000.)
func TestSchedulingCostsTheSame(t *testing.T) {
	t.Parallel()
	s, db := ringOf(t, store.Config{})
	ctx := context.Background()
	conn, err := db.Conn(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fill := func(n int) {
		var batch []store.Message
		for i := range n {
			batch = append(batch, *scheduled(s, "", 24*time.Hour+time.Duration(i)*time.Millisecond))
		}
		if _, errs := s.EnqueueBatch(ctx, batch); errors.Join(errs...) != nil {
			t.Fatal(errs)
		}
	}
	for _, more := range []int{1000, 19_000} {
		for ; more > 0; more -= 1000 {
			fill(1000)
		}
		run(t, db, "ANALYZE TABLE t_msg_delay_2_0")
		run(t, db, "UPDATE t_msg_delay_2_0 SET due_time = UTC_TIMESTAMP(3) WHERE status = 0 ORDER BY due_time LIMIT 100")
		look := fmt.Sprintf(store.SQLDelayLook, "t_msg_delay_2_0")
		soon := s.Now().Add(time.Minute)
		args := []any{soon, "1000-01-01", "1000-01-01", 0, 20_000}
		if plan := explain(t, conn, look, args...); len(plan) != 1 || !strings.HasPrefix(plan[0], "range, idx_due") || strings.Contains(plan[0], "filesort") {
			t.Errorf("the plan of the mover's look: %q", plan)
		}
		if n := examined(t, conn, look, args...); n > 110 {
			t.Errorf("the mover's look at 100 due tasks went through %d rows", n)
		}
		if n := examined(t, conn, "SELECT MIN(due_time) FROM t_msg_delay_2_0 FORCE INDEX (idx_due) WHERE status = 0"); n > 2 {
			t.Errorf("the survey went through %d rows", n)
		}
		mark := fmt.Sprintf(store.SQLDelayMark, "t_msg_delay_2_0", "(channel = 31 AND msg_id IN ("+dueIDs(t, db)+"))", 100)
		if n := examined(t, conn, mark, soon, "x"); n > 600 { // each row is found, joined and changed
			t.Errorf("marking 100 tasks went through %d rows", n)
		}
		run(t, db, "UPDATE t_msg_delay_2_0 SET status = 0, owner = '' WHERE owner = 'x'")
		if moved := tend(t, s); moved != 100 {
			t.Fatalf("moved %d", moved)
		}
		claimLook := fmt.Sprintf(store.SQLLook, "t_msg_queue_middle")
		if n := examined(t, conn, claimLook, msg.Log, "1000-01-01", 500); n > 110 {
			t.Errorf("the pump's look at 100 due tasks went through %d rows", n)
		}
		for range 2 { // what is not due yet is not looked at, however much it is
			enqueue(t, s, scheduled(s, "", 30*time.Second))
		}
		if n := examined(t, conn, fmt.Sprintf(store.SQLNextDue, "t_msg_queue_middle"), msg.Log); n > 2 {
			t.Errorf("the look ahead went through %d rows", n)
		}
		tasks := claim(t, s, 500)
		if len(tasks) != 100 {
			t.Fatalf("claimed %d", len(tasks))
		}
		for _, task := range tasks {
			settle(t, s, success(s, task))
		}
	}
	next, err := s.NextDue(ctx, msg.Middle, msg.Log)
	if err != nil || next.Before(s.Now()) || next.After(s.Now().Add(time.Minute)) {
		t.Errorf("the next task is due %v (%v)", next, err)
	}
	if next, err := s.NextDue(ctx, msg.Low, msg.Log); err != nil || !next.IsZero() {
		t.Errorf("in an empty lane the next task is due %v (%v)", next, err)
	}
}

func dueIDs(t testing.TB, db *sql.DB) string {
	t.Helper()
	var ids string
	if err := db.QueryRow("SELECT GROUP_CONCAT(msg_id) FROM (SELECT msg_id FROM t_msg_delay_2_0 WHERE status = 0 AND due_time <= UTC_TIMESTAMP(3)) AS due").Scan(&ids); err != nil {
		t.Fatal(err)
	}
	return ids
}
