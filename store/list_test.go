package store_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"tidings/internal/id"
	"tidings/internal/msg"
	"tidings/internal/testdb"
	"tidings/store"
)

func list(t *testing.T, s *store.Store, f store.Filter) (ids []uint64, next uint64) {
	t.Helper()
	f.SourceID = "default"
	if f.Limit == 0 {
		f.Limit = 50
	}
	page, err := s.List(context.Background(), f)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range page.Messages {
		ids = append(ids, m.MsgID)
	}
	return ids, page.Next
}

// Waiting, dead and recorded messages are one list, newest first, by every filter.
func TestList(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn})
	var all []uint64
	for i := range 6 {
		m := message("")
		m.Lane = msg.Lanes[i%3]
		m.Tasks[0].Receiver = []string{"ann", "bob"}[i%2]
		if i == 5 {
			m.Tasks[0].Channel = msg.SMS
		}
		all = append(all, enqueue(t, s, m).MsgID)
	}
	foreign := message("")
	foreign.SourceID = "billing"
	enqueue(t, s, foreign)
	// The first middle one ends in success, the high ones as dead letters.
	tasks := claim(t, s, 1)
	settle(t, s, success(s, tasks[0]))
	high, err := s.Claim(context.Background(), msg.High, msg.Log, 10, time.Time{})
	if err != nil || len(high.Tasks) != 2 {
		t.Fatal(err, len(high.Tasks))
	}
	for _, task := range high.Tasks {
		settle(t, s, store.Outcome{Task: task, State: msg.Dead, Finished: s.Now()})
	}
	newest := slices.Clone(all)
	slices.Reverse(newest)
	pick := func(at ...int) (ids []uint64) {
		for _, i := range at {
			ids = append(ids, all[i])
		}
		return ids
	}
	for name, tt := range map[string]struct {
		filter store.Filter
		want   []uint64
	}{
		"all":         {store.Filter{}, newest},
		"receiver":    {store.Filter{Receiver: "ann"}, pick(4, 2, 0)},
		"success":     {store.Filter{Status: "success"}, pick(1)},
		"failed":      {store.Filter{Status: "failed"}, pick(3, 0)},
		"dispatched":  {store.Filter{Status: "dispatched"}, pick(5, 4, 2)},
		"channel":     {store.Filter{Channel: msg.SMS}, pick(5)},
		"both":        {store.Filter{Receiver: "bob", Status: "failed"}, pick(3)},
		"since":       {store.Filter{Since: id.Time(all[3])}, newest[:slices.Index(newest, firstOfTime(all, 3))+1]},
		"until":       {store.Filter{Until: id.Time(all[0])}, nil},
		"nobody":      {store.Filter{Receiver: "carl"}, nil},
		"the future":  {store.Filter{Since: time.Now().Add(time.Hour)}, nil},
		"before time": {store.Filter{Until: time.Unix(0, 0)}, nil},
	} {
		if got, next := list(t, s, tt.filter); !slices.Equal(got, tt.want) || next != 0 {
			t.Errorf("%s: %v, next %d, want %v", name, got, next, tt.want)
		}
	}
	var paged []uint64
	for before := uint64(0); ; {
		got, next := list(t, s, store.Filter{Limit: 2, Before: before})
		paged = append(paged, got...)
		if next == 0 {
			break
		}
		before = next
	}
	if !slices.Equal(paged, newest) {
		t.Errorf("page by page: %v, want %v", paged, newest)
	}
}

// firstOfTime is the oldest id of the same millisecond.
func firstOfTime(ids []uint64, at int) uint64 {
	for at > 0 && id.Time(ids[at-1]).Equal(id.Time(ids[at])) {
		at--
	}
	return ids[at]
}

// A filter that fits nothing near the head examines a bounded number of rows a page, and its cursor leads to the end.
func TestListIsBounded(t *testing.T) {
	t.Parallel()
	s := testdb.Open(t, store.Config{})
	m := message("")
	m.Tasks[0].Receiver = "needle"
	needle := enqueue(t, s, m).MsgID
	for range 10 {
		fill(t, s, 500)
	}
	pages, before := 0, uint64(0)
	for {
		pages++
		got, next := list(t, s, store.Filter{Receiver: "needle", Before: before})
		if len(got) == 1 && got[0] == needle {
			break
		}
		if before = next; next == 0 || len(got) > 0 {
			t.Fatalf("page %d has %v and ends at %d", pages, got, next)
		}
	}
	if pages != 3 { // 2,000 rows a page
		t.Fatalf("found on page %d", pages)
	}
}

func TestDiagnose(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn, Command: true})
	run(t, raw(t, dsn), "UPDATE t_alarm_level SET last_error = 'no answer' WHERE level = 'now'")
	findings, err := s.Diagnose(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]store.Finding{}
	for _, f := range findings {
		if f.Level == store.Wrong {
			t.Errorf("%+v", f)
		}
		got[f.What] = f
	}
	if f := got["innodb_flush_log_at_trx_commit"]; f.Level != store.Risky || !strings.Contains(f.Detail, "loses") {
		t.Errorf("the tests' server is not durable, and that is not said: %+v", f)
	}
	if f := got["processes that serve"]; f.Level != store.Risky {
		t.Errorf("nobody serves: %+v", f)
	}
	if f := got["alarms of level now"]; f.Level != store.Risky || !strings.Contains(f.Detail, "no answer") {
		t.Errorf("an alarm that was not delivered: %+v", f)
	}
	if f := got["days made ahead in t_msg_record"]; f.Level != store.Fine || f.Detail != "7" {
		t.Errorf("days: %+v", f)
	}
}

func TestOldMessageIsNotFound(t *testing.T) {
	t.Parallel()
	s := testdb.Open(t, store.Config{})
	for _, msgID := range []uint64{0, 1, 1 << 62} {
		if _, err := s.Message(context.Background(), msgID); !errors.Is(err, store.ErrNotFound) {
			t.Errorf("%d: %v", msgID, err)
		}
	}
}
