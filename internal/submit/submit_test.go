package submit_test

import (
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	_ "github.com/go-sql-driver/mysql"

	"tidings/internal/admit"
	"tidings/internal/catalog"
	"tidings/internal/msg"
	"tidings/internal/policy"
	"tidings/internal/submit"
	"tidings/internal/testdb"
	"tidings/internal/window"
	"tidings/store"
)

func TestMain(m *testing.M) { os.Exit(testdb.Main(m)) }

// desk is an intake at work, and the table it reads.
type desk struct {
	t     *testing.T
	store *store.Store
	db    *sql.DB
}

func open(t *testing.T, frequency func(string, msg.Category, msg.Channel) []window.Limit) *desk {
	t.Helper()
	return openWith(t, frequency, nil)
}

// openWith is open for a test that sees the statements.
func openWith(t *testing.T, frequency func(string, msg.Category, msg.Channel) []window.Limit, observe func(string)) *desk {
	t.Helper()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn, Observe: observe})
	db, err := sql.Open("mysql", dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	d := &desk{t: t, store: s, db: db}
	d.work(t, s, frequency)
	return d
}

// work takes submissions until the test ends.
func (d *desk) work(t *testing.T, s *store.Store, frequency func(string, msg.Category, msg.Channel) []window.Limit) {
	t.Helper()
	in := &submit.Intake{Store: s, Log: slog.New(slog.DiscardHandler), Admit: &admit.Admitter{
		Policies: policy.Defaults(), Configured: func(c msg.Channel) bool { return c != msg.Push }, Now: s.Now, Templates: catalog.New(s).Usable, Frequency: frequency, Region: "CN",
	}}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { in.Run(ctx); close(done) }()
	t.Cleanup(func() { cancel(); <-done })
}

func (d *desk) exec(query string, args ...any) int64 {
	d.t.Helper()
	res, err := d.db.Exec(query, args...)
	if err != nil {
		d.t.Fatalf("%s: %v", query, err)
	}
	id, err := res.LastInsertId()
	if err != nil {
		d.t.Fatal(err)
	}
	return id
}

func (d *desk) text(query string, args ...any) (s string) {
	d.t.Helper()
	if err := d.db.QueryRow(query, args...).Scan(&s); err != nil {
		d.t.Fatalf("%s: %v", query, err)
	}
	return s
}

// until waits for a row to have a status.
func (d *desk) until(id int64, status string) {
	d.t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; {
		got := d.text("SELECT CONCAT(status, ': ', error) FROM t_msg_submit WHERE submit_id = ?", id)
		if strings.HasPrefix(got, status) {
			return
		}
		if time.Now().After(deadline) {
			d.t.Fatalf("row %d is %s, not %s", id, got, status)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

const small = `INSERT INTO t_msg_submit (source_id, channels, receiver, content) VALUES ('default', 'log', 'ann', '{"text": "hi"}')`

// What a service inserts becomes what a request by HTTP becomes, or says why not.
func TestSubmit(t *testing.T) {
	t.Parallel()
	d := open(t, nil)
	if err := d.store.CreateTemplate(context.Background(), "test", &store.Template{SourceID: "default", ID: "paid", Channel: msg.Log, Content: "Dear {{name}}", Status: store.TemplateNormal}); err != nil {
		t.Fatal(err)
	}
	accepted := []struct{ name, row, want string }{
		{"least", `('default', 'log', 'ann', '{"text": "hi"}', DEFAULT, DEFAULT, DEFAULT, DEFAULT, NULL, NULL, NULL)`, "log ann t_msg_queue_middle notification submit-%d {\"text\":\"hi\"}"},
		{
			"all", `('default', ' log , email', '{"email": "Ann <ann@example.com>", "log": "ann"}', '{"subject": "s", "text": "t"}', 'order-1', 'high', 'marketing', '', NULL, NULL, UTC_TIMESTAMP(3) + INTERVAL 1 HOUR)`,
			"email \"Ann\" <ann@example.com> t_msg_queue_high marketing order-1",
		},
		{"template", `('default', 'log', 'ann', NULL, 'order-2', '', '', 'paid', '{"name": "Ann"}', NULL, NULL)`, "log ann t_msg_queue_middle notification order-2"},
		{"scheduled", `('default', 'log', 'ann', '{"text": "hi"}', 'order-3', '', '', '', NULL, UTC_TIMESTAMP(3) + INTERVAL 2 DAY, NULL)`, "log ann t_msg_delay_far notification order-3"},
	}
	const into = "INSERT INTO t_msg_submit (source_id, channels, receiver, content, request_id, priority, category, template_id, params, send_at, expire_time) VALUES "
	for _, c := range accepted {
		id := d.exec(into + c.row)
		d.until(id, "accepted")
		want := c.want
		if strings.Contains(want, "%d") {
			want = fmt.Sprintf(want, id)
		}
		got := d.text(`SELECT CONCAT_WS(' ', t.channel, t.receiver, t.place, t.category, t.request_id) FROM t_msg_submit AS s JOIN v_task AS t ON t.msg_id = s.msg_id WHERE s.submit_id = ? ORDER BY t.channel LIMIT 1`, id)
		if c.name == "least" {
			got += " " + d.text("SELECT content FROM t_msg_queue_middle WHERE msg_id = (SELECT msg_id FROM t_msg_submit WHERE submit_id = ?)", id)
		}
		if got != want {
			t.Errorf("%s: %s, want %s", c.name, got, want)
		}
		if left := d.text("SELECT COUNT(params) + COUNT(content) FROM t_msg_submit WHERE submit_id = ?", id); left != "0" {
			t.Errorf("%s: what the message says stays in t_msg_submit", c.name)
		}
	}
	rejected := []struct{ row, want string }{
		{`('nobody', 'log', 'ann', '{"text": "hi"}', '', '', '', '', NULL, NULL, NULL)`, "source_id is no caller"},
		{`('default', 'log,fax', 'ann', '{"text": "hi"}', '', '', '', '', NULL, NULL, NULL)`, `channels[1] no channel is called "fax"`},
		{`('default', 'push', 'ann', '{"text": "hi"}', '', '', '', '', NULL, NULL, NULL)`, "the channel push has no provider"},
		{`('default', '', '', NULL, '', 'urgent', 'news', '', NULL, NULL, NULL)`, "category must be verification"},
		{`('default', '', '', NULL, '', 'urgent', '', '', NULL, NULL, NULL)`, "priority must be high, middle or low; channels must name a channel; receiver must name the receiver; content.text must say something"},
		{`('default', 'email', '{"email": 7}', '{"text": "x", "subject": "s"}', '', '', '', '', NULL, NULL, NULL)`, "receiver.email must be an address"},
		{`('default', 'email', '{oops', '{"text": "x", "subject": "s"}', '', '', '', '', NULL, NULL, NULL)`, "receiver begins like a JSON object and is none"},
		{`('default', 'email', 'ann@example.com', '{"text": "x"}', '', '', '', '', NULL, NULL, NULL)`, "content.subject an e-mail needs a subject"},
		{`('default', 'log', 'ann', '{"txet": "x"}', '', '', '', '', NULL, NULL, NULL)`, "content must be an object"},
		{`('default', 'log', 'ann', NULL, '', '', '', 'paid', '{}', NULL, NULL)`, "params.name is missing"},
		{`('default', 'log', 'ann', NULL, '', '', '', 'lost', '{}', NULL, NULL)`, "template_id there is no such template"},
		{`('default', 'log', 'ann', '{"text": "other"}', 'order-1', '', '', '', NULL, NULL, NULL)`, "the request id was used for another message"},
		{`('default', 'log', 'ann', '{"text": "late"}', '', '', '', '', NULL, NULL, UTC_TIMESTAMP(3) - INTERVAL 1 HOUR)`, "expire_time lies in the past"},
		{`('default', 'log', 'ann', CONCAT('{"text": "', REPEAT('x', 1100000), '"}'), '', '', '', '', NULL, NULL, NULL)`, "more than 1048576 bytes"},
		{`('default', 'log', CONVERT(X'61EDA08062' USING utf8mb4), '{"text": "hi"}', '', '', '', '', NULL, NULL, NULL)`, "receiver is not valid UTF-8"},
		{`('default', 'log', 'ann', CONVERT(X'7B2274657874223A2261EDA08062227D' USING utf8mb4), '', '', '', '', NULL, NULL, NULL)`, "content is not valid UTF-8"},
		{`('default', 'log', 'ann', NULL, CONVERT(X'61EDA08062' USING utf8mb4), '', '', '', NULL, NULL, NULL)`, "request_id is not valid UTF-8"},
	}
	for _, c := range rejected {
		id := d.exec(into + c.row)
		d.until(id, "rejected")
		if got := d.text("SELECT error FROM t_msg_submit WHERE submit_id = ?", id); !strings.Contains(got, c.want) {
			t.Errorf("%.80s: %q, want %q", c.row, got, c.want)
		}
	}
	// Mended, it is tried again; and the same key with the same body is the same message.
	first := d.exec(into + `('default', 'log', 'bob', '{"texd": "hi"}', 'order-9', '', '', '', NULL, NULL, NULL)`)
	d.until(first, "rejected")
	d.exec(`UPDATE t_msg_submit SET status = 'new', error = '', next_time = '1000-01-01', content = '{"text": "hi"}' WHERE submit_id = ?`, first)
	d.until(first, "accepted")
	again := d.exec(into + `('default', 'log', 'bob', '{"text": "hi"}', 'order-9', '', '', '', NULL, NULL, NULL)`)
	d.until(again, "accepted")
	if n := d.text("SELECT COUNT(DISTINCT msg_id) FROM t_msg_submit WHERE submit_id IN (?, ?)", first, again); n != "1" {
		t.Errorf("the same key twice became %s messages", n)
	}
}

// A row that cannot even be checked holds up nobody, and says so.
func TestSubmitOfDamagedTemplate(t *testing.T) {
	t.Parallel()
	d := open(t, nil)
	if err := d.store.CreateTemplate(context.Background(), "test", &store.Template{SourceID: "default", ID: "paid", Channel: msg.Log, Content: "Dear {{name}}", Status: store.TemplateNormal}); err != nil {
		t.Fatal(err)
	}
	d.exec("UPDATE t_msg_template SET content = 'Dear {{name'")
	damaged := d.exec(`INSERT INTO t_msg_submit (source_id, channels, receiver, template_id, params) VALUES ('default', 'log', 'ann', 'paid', '{"name": "Ann"}')`)
	d.until(d.exec(small), "accepted")
	d.until(damaged, "new: it cannot be accepted")
}

// A message that was inserted while nobody ran is due then, and not when it is taken: a verification of yesterday is not sent.
func TestSubmittedLongAgo(t *testing.T) {
	t.Parallel()
	d := open(t, nil)
	old := d.exec(`INSERT INTO t_msg_submit (source_id, channels, receiver, content, category, create_time) VALUES ('default', 'log', 'ann', '{"text": "code 1"}', 'verification', UTC_TIMESTAMP(3) - INTERVAL 1 HOUR)`)
	d.until(old, "rejected")
	late := d.exec(`INSERT INTO t_msg_submit (source_id, channels, receiver, content, create_time) VALUES ('default', 'log', 'ann', '{"text": "x"}', UTC_TIMESTAMP(3) - INTERVAL 1 HOUR)`)
	d.until(late, "accepted")
	if n := d.text("SELECT COUNT(*) FROM t_msg_queue_middle AS q JOIN t_msg_submit AS s ON s.msg_id = q.msg_id AND q.due_time = s.create_time AND q.expire_time = s.create_time + INTERVAL 24 HOUR WHERE s.submit_id = ?", late); n != "1" {
		t.Error("its time does not count from its insertion")
	}
}

// A business whose transaction stays open holds up nobody, and what it commits late is taken, whatever its number.
func TestSubmitBesideOpenTransactions(t *testing.T) {
	t.Parallel()
	d := open(t, nil)
	tx, err := d.db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	res, err := tx.Exec(small)
	if err != nil {
		t.Fatal(err)
	}
	early, _ := res.LastInsertId()
	var ids []int64
	for range 300 { // more than one look takes
		ids = append(ids, d.exec(small))
	}
	for _, id := range ids {
		d.until(id, "accepted")
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	d.until(early, "accepted")
	if n := d.text("SELECT COUNT(DISTINCT msg_id) FROM v_task"); n != "301" {
		t.Errorf("%s messages", n)
	}
}

// So does one that is to be rejected.
func TestLockedBadSubmission(t *testing.T) {
	t.Parallel()
	d := open(t, nil)
	tx, err := d.db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	bad := d.exec(strings.Replace(strings.Replace(small, "content)", "content, next_time)", 1), `'{"text": "hi"}'`, `'{"txet": "hi"}', UTC_TIMESTAMP(3) + INTERVAL 1 SECOND`, 1))
	var n int
	if err := tx.QueryRow("SELECT submit_id FROM t_msg_submit WHERE submit_id = ? FOR UPDATE", bad).Scan(&n); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(4 * time.Second); time.Now().Before(deadline); {
		d.until(d.exec(small), "accepted")
	}
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	d.until(bad, "rejected")
}

// A row that somebody has locked holds up itself.
func TestLockedSubmission(t *testing.T) {
	t.Parallel()
	var tries atomic.Int64 // to take the row, which is the first
	d := openWith(t, nil, func(statement string) {
		if strings.Contains(statement, "tidings:submit-take") && (strings.Contains(statement, " IN (1)") || strings.Contains(statement, " IN (1,")) {
			tries.Add(1)
		}
	})
	// Not to be taken before it is locked.
	locked := d.exec(strings.Replace(strings.Replace(small, "content)", "content, next_time)", 1), `'{"text": "hi"}'`, `'{"text": "hi"}', UTC_TIMESTAMP(3) + INTERVAL 2 SECOND`, 1))
	tx, err := d.db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	var n int
	if err := tx.QueryRow("SELECT submit_id FROM t_msg_submit WHERE submit_id = ? FOR UPDATE", locked).Scan(&n); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(8 * time.Second); time.Now().Before(deadline); {
		d.until(d.exec(small), "accepted")
	}
	if n := tries.Load(); n == 0 || n > 4 { // once it has been found locked it is left alone: else each look would wait a second for it
		t.Errorf("it was tried %d times in 8 s, want twice: with others, and by itself", n)
	}
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	d.until(locked, "accepted")
}

// What a limit refuses waits for its turn and says so; nobody has to insert it again.
func TestSubmissionOverALimit(t *testing.T) {
	t.Parallel()
	d := open(t, func(string, msg.Category, msg.Channel) []window.Limit {
		return []window.Limit{{Num: 1, Unit: 2 * time.Second}}
	})
	first, second := d.exec(small), d.exec(small)
	d.until(first, "accepted")
	seen := false
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		seen = seen || strings.Contains(d.text("SELECT error FROM t_msg_submit WHERE submit_id = ?", second), "recipient limit of 1 in 2s on log is used up")
		if d.text("SELECT status FROM t_msg_submit WHERE submit_id = ?", second) == "accepted" {
			break
		}
	}
	d.until(second, "accepted")
	if !seen {
		t.Error("the row did not say why it waited")
	}
}

// Several processes: one takes the rows, and when its lease has ended another does. Both at once would not take one twice, for the row says
// that it is taken.
func TestSubmitByMany(t *testing.T) {
	t.Parallel()
	d := open(t, nil)
	d.work(t, d.store, nil)
	for range 50 {
		d.exec(small)
	}
	ctx := context.Background()
	page, err := d.store.Submitted(ctx, store.SubmitPlace{})
	if err != nil {
		t.Fatal(err)
	}
	var messages []store.Message
	for _, row := range page.List {
		messages = append(messages, store.Message{
			SourceID: "default", RequestID: fmt.Sprintf("mine-%d", row.ID), Category: msg.Notification, Lane: msg.Low, Content: []byte(row.Content.String), SubmitID: row.ID,
			Expire: d.store.Now().Add(time.Hour), Tasks: []store.NewTask{{Channel: msg.Log, Receiver: "x", AttemptLimit: 5}},
		})
	}
	d.store.EnqueueBatch(ctx, messages)
	for deadline := time.Now().Add(20 * time.Second); d.text("SELECT COUNT(*) FROM t_msg_submit WHERE status = 'new'") != "0"; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("rows stay new")
		}
	}
	if n := d.text("SELECT COUNT(*) FROM v_task"); n != "50" {
		t.Errorf("50 rows became %s messages", n)
	}
	if n := d.text("SELECT COUNT(*) FROM t_msg_submit AS s JOIN v_task AS t ON t.msg_id = s.msg_id"); n != "50" {
		t.Errorf("%s rows name their message", n)
	}
	if n := d.text("SELECT COUNT(*) FROM t_idempotency"); n != "50" {
		t.Errorf("%s keys", n)
	}
}
