package queue

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"tidings/internal/msg"
	"tidings/store"
)

func TestAlarmDue(t *testing.T) {
	t.Parallel()
	a := &Alarm{Every: time.Minute, DigestAt: time.Hour}
	at := func(text string) time.Time {
		v, err := time.Parse(time.RFC3339, text)
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	now := at("2026-11-30T09:00:00Z")
	for _, c := range []struct {
		level, told, oldest string
		now                 time.Time
		want                bool
	}{
		{store.AlarmNow, "", "2026-11-30T08:59:59Z", now, true},
		{store.AlarmNow, "", "", now, false},
		{store.AlarmNow, "2026-11-30T08:59:00Z", "2026-11-30T08:59:59Z", now, true},
		{store.AlarmNow, "2026-11-30T08:59:01Z", "2026-11-30T08:59:59Z", now, false},
		{store.AlarmDaily, "2026-11-29T01:00:00Z", "2026-11-29T12:00:00Z", now, true},
		{store.AlarmDaily, "2026-11-30T00:59:59Z", "2026-11-30T00:59:59Z", now, true},
		{store.AlarmDaily, "2026-11-30T01:00:00Z", "2026-11-29T12:00:00Z", now, false},
		{store.AlarmDaily, "2026-11-29T01:00:00Z", "2026-11-29T12:00:00Z", at("2026-11-30T00:59:59Z"), false},
		{store.AlarmDaily, "2026-11-29T01:00:00Z", "2026-11-29T12:00:00Z", at("2026-11-30T01:00:00Z"), true},
		{store.AlarmDaily, "2026-11-21T01:00:00Z", "2026-11-30T08:59:59Z", now, false}, // after quiet days: tomorrow
		{store.AlarmDaily, "", "2026-11-30T00:00:00Z", now, true},
	} {
		l := store.AlarmLevel{Level: c.level}
		if c.oldest != "" {
			oldest := at(c.oldest)
			l.Oldest = &oldest
		}
		if c.told != "" {
			told := at(c.told)
			l.Told = &told
		}
		if got := a.due(l, c.now); got != c.want {
			t.Errorf("%s, told %q, oldest %q, now %v: %v", c.level, c.told, c.oldest, c.now, got)
		}
	}
}

// Letters with the same reason are one line; those that somebody has handled are none.
func TestAlarmText(t *testing.T) {
	t.Parallel()
	died := time.Date(2026, 11, 30, 9, 0, 0, 0, time.UTC)
	letters := []store.Untold{
		{AlarmKey: store.AlarmKey{MsgID: 1, Channel: msg.SMS, Died: died}, Category: "verification", Provider: "aliyun", Reason: "503 busy, request 8f3a-11e9"},
		{AlarmKey: store.AlarmKey{MsgID: 2, Channel: msg.SMS, Died: died.Add(time.Minute)}, Category: "verification", Provider: "aliyun", Reason: "503 busy, request 77aa-2b31"},
		{AlarmKey: store.AlarmKey{MsgID: 3, Channel: msg.SMS, Died: died}, Category: "verification", Provider: "aliyun", Reason: "isv.OUT_OF_SERVICE"},
		{AlarmKey: store.AlarmKey{MsgID: 4, Channel: msg.SMS, Died: died}},
	}
	sum := func(letters []store.Untold) *digest {
		d := &digest{groups: map[reason]*reasonCount{}}
		d.add(letters)
		return d
	}
	m := (&Alarm{Channel: msg.Webhook, Receiver: "https://example.com"}).message(store.AlarmNow, sum(letters))
	const text = "2 × verification on sms by aliyun: 503 busy, request …\n  Nov 30 09:00:00 to 09:01:00 UTC, such as 1-sms\n" +
		"1 × verification on sms by aliyun: isv.OUT_OF_SERVICE\n  Nov 30 09:00:00 to 09:00:00 UTC, such as 3-sms\n"
	if m.Subject != "Tidings: 3 dead letters" || !strings.HasPrefix(m.Text, text) || m.Key == sum(letters[1:]).key(store.AlarmNow) || m.Key != sum(letters).key(store.AlarmNow) || len(sum(letters).deaths) != 4 || m.Receiver != "https://example.com" {
		t.Errorf("%s\n%s", m.Subject, m.Text)
	}
	var many []store.Untold
	for i := range 100 {
		many = append(many, store.Untold{AlarmKey: store.AlarmKey{MsgID: uint64(i + 1), Channel: msg.SMS, Died: died}, Category: "marketing", Reason: "reason " + strings.Repeat("x", i+1)})
	}
	if m := (&Alarm{}).message(store.AlarmDaily, sum(many)); strings.Count(m.Text, "×") != 20 || !strings.Contains(m.Text, "and 80 more reasons") || !strings.Contains(m.Subject, "100 dead letters since the last digest") {
		t.Errorf("%s\n%s", m.Subject, m.Text)
	}
	for i := range 5000 {
		many = append(many, store.Untold{AlarmKey: store.AlarmKey{MsgID: uint64(i + 200), Channel: msg.SMS, Died: died}, Category: "marketing", Reason: fmt.Sprint("r", strings.Repeat("y", i))})
	}
	if d := sum(many); len(d.groups) > mostReasons+1 || d.letters != 5100 || len(d.deaths) != 5100 {
		t.Errorf("%d groups of %d letters", len(d.groups), d.letters)
	}
}
