package queue_test

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"tidings/internal/metrics"
	"tidings/internal/msg"
	"tidings/queue"
	"tidings/sender"
	"tidings/store"
)

// pager is where alarms arrive.
type pager struct {
	*httptest.Server
	down  atomic.Bool
	mu    sync.Mutex
	texts []string
}

func newPager(t testing.TB) *pager {
	p := &pager{}
	p.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if p.down.Load() {
			w.WriteHeader(http.StatusInternalServerError)
			return
		}
		var body struct {
			Data struct{ Subject, Text string }
		}
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
			t.Error(err)
		}
		p.mu.Lock()
		p.texts = append(p.texts, body.Data.Subject+"\n"+body.Data.Text)
		p.mu.Unlock()
	}))
	t.Cleanup(p.Close)
	return p
}

func (p *pager) told() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]string{}, p.texts...)
}

func (p *pager) alarm(t testing.TB, every time.Duration) *queue.Alarm {
	provider, err := sender.Open("webhook", sender.Env{Name: "pager"}, sender.Settings{"allow_internal": true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { provider.Close() })
	return &queue.Alarm{Name: "pager", Provider: provider, Channel: msg.Webhook, Receiver: p.URL, Every: every, DigestAt: 0}
}

func verification(m *store.Message) {
	m.Category, m.Lane, m.Tasks[0].AttemptLimit = msg.Verification, msg.High, 1
}

func marketing(m *store.Message) {
	m.Category, m.Lane, m.Tasks[0].AttemptLimit = msg.Marketing, msg.Low, 1
}

// Dead verifications are told of at once, by reason and not by message; while the pager is down nothing is lost; marketing waits for
// the digest.
func TestAlarms(t *testing.T) {
	t.Parallel()
	pager := newPager(t)
	pager.down.Store(true)
	counters := metrics.New("test", "")
	provider := &script{send: func(_ context.Context, m *sender.Message) sender.Verdict {
		if m.MsgID%3 == 0 {
			return sender.Verdict{Kind: sender.Temporary, Code: "421", Text: "421 try later"}
		}
		return sender.Verdict{Kind: sender.Temporary, Code: "timeout", Text: "no answer"}
	}}
	b := setup(t, provider, func(_ *store.Config, qc *queue.Config) { qc.Alarm, qc.Metrics = pager.alarm(t, time.Second), counters })
	b.send(t, 40, verification)
	b.send(t, 5, marketing)
	b.await(t, 45, "t_msg_dead")
	b.await(t, 1, "t_alarm_level WHERE level = 'now' AND last_error <> '' AND told_time IS NULL")
	if n := b.count(t, "t_alarm WHERE level = 'now'"); n != 40 {
		t.Errorf("%d letters are to be told of while the pager is down", n)
	}
	pager.down.Store(false)
	b.await(t, 0, "t_alarm WHERE level = 'now'")
	texts := pager.told()
	if len(texts) != 1 || !strings.Contains(texts[0], "40 dead letters") || strings.Count(texts[0], "×") != 2 || !strings.Contains(texts[0], "no answer") || !strings.Contains(texts[0], "421 try later") {
		t.Errorf("told: %q", texts)
	}
	if n := b.count(t, "t_alarm WHERE level = 'daily'"); n != 5 {
		t.Errorf("%d wait for the digest", n)
	}
	b.send(t, 1, verification)
	b.await(t, 46, "t_msg_dead")
	b.await(t, 0, "t_alarm WHERE level = 'now'")
	for _, statement := range []string{
		"UPDATE t_alarm SET create_time = create_time - INTERVAL 1 DAY WHERE level = 'daily'",
		"UPDATE t_alarm_level SET told_time = told_time - INTERVAL 1 DAY WHERE level = 'daily'",
	} {
		if _, err := b.db.Exec(statement); err != nil {
			t.Fatal(err)
		}
	}
	b.await(t, 0, "t_alarm")
	if texts := pager.told(); len(texts) != 3 || !strings.Contains(texts[1], "1 dead letter\n") || !strings.Contains(texts[2], "5 dead letters since the last digest") {
		t.Errorf("told: %q", texts)
	}
	if n := b.count(t, "t_msg_dead"); n != 46 {
		t.Errorf("%d dead letters: telling of them must not change them", n)
	}
}

// A policy without alarm tells nobody.
func TestNoAlarm(t *testing.T) {
	t.Parallel()
	policies := quick()
	policies[msg.Notification].Alarm = 2 // none
	provider := &script{send: func(context.Context, *sender.Message) sender.Verdict { return sender.Verdict{Kind: sender.Temporary} }}
	b := setup(t, provider, func(_ *store.Config, qc *queue.Config) { qc.Policies = policies })
	b.send(t, 1, func(m *store.Message) { m.Tasks[0].AttemptLimit = 1 })
	b.await(t, 1, "t_msg_dead")
	if n := b.count(t, "t_alarm"); n != 0 {
		t.Errorf("%d letters are to be told of", n)
	}
}

// The figures for Prometheus are well named, and say what happened.
func TestMetrics(t *testing.T) {
	t.Parallel()
	counters := metrics.New("1.2.3", "abc")
	fail := atomic.Bool{}
	fail.Store(true)
	provider := &script{send: func(_ context.Context, m *sender.Message) sender.Verdict {
		if fail.Load() {
			return sender.Verdict{Kind: sender.Temporary, Text: "no"}
		}
		return sender.Verdict{Kind: sender.Success}
	}}
	b := setup(t, provider, func(sc *store.Config, qc *queue.Config) { sc.Metrics, qc.Metrics = counters, counters })
	b.send(t, 2, verification)
	b.await(t, 2, "t_msg_dead")
	fail.Store(false)
	b.send(t, 5)
	b.await(t, 5, "t_msg_record")
	if _, err := b.store.SetLane(context.Background(), "ann", msg.Low, func(l *store.LaneControl) { l.Paused = true }); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(10 * time.Second); !b.engine.Health().Lanes[msg.Low].Paused && time.Now().Before(deadline); {
		time.Sleep(10 * time.Millisecond)
	}
	b.send(t, 3, marketing)
	if _, err := b.db.Exec("UPDATE t_msg_queue_low SET next_time = next_time - INTERVAL 1 HOUR WHERE msg_id > 0"); err != nil {
		t.Fatal(err)
	}
	want := map[string]float64{
		`tidings_messages_accepted_total{}`:                                                10,
		`tidings_send_attempts_total{channel="log",outcome="temporary",provider="script"}`: 2,
		`tidings_send_attempts_total{channel="log",outcome="success",provider="script"}`:   5,
		`tidings_send_attempts_total{channel="log",outcome="unknown",provider="script"}`:   0,
		`tidings_send_duration_seconds{channel="log",provider="script"}`:                   7,
		`tidings_delivery_latency_seconds{channel="log",lane="middle"}`:                    5,
		`tidings_queue_messages{channel="log",lane="low",state="ready"}`:                   3,
		`tidings_queue_messages{channel="log",lane="high",state="ready"}`:                  0,
		`tidings_dead_messages{category="verification",channel="log"}`:                     2,
		`tidings_breaker_state{provider="script"}`:                                         0,
		`tidings_provider_usable{provider="script"}`:                                       1,
		`tidings_lane_paused{lane="low"}`:                                                  1,
		`tidings_schedule_lag_seconds{}`:                                                   0,
		`tidings_database_up{}`:                                                            1,
		`tidings_build_info{commit="abc",goversion="*",version="1.2.3"}`:                   1,
	}
	deadline := time.Now().Add(10 * time.Second)
	for {
		got := gather(t, counters)
		var wrong []string
		for name, value := range want {
			if v, ok := got[name]; !ok || v != value {
				wrong = append(wrong, name)
			}
		}
		if age := got[`tidings_queue_oldest_age_seconds{channel="log",lane="low"}`]; age < 3600 {
			wrong = append(wrong, "age")
		}
		if len(wrong) == 0 {
			break
		}
		if time.Now().After(deadline) { // the pause is obeyed within half a second, and counts are kept for five
			for _, name := range wrong {
				t.Errorf("%s: %v, want %v", name, got[name], want[name])
			}
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	for _, name := range []string{"tidings_claim_rows{}", "tidings_settle_rows{}", "go_goroutines{}", "process_open_fds{}", `go_sql_open_connections{db_name="packets"}`, "tidings_lease_recovered_total{}"} {
		if _, ok := gather(t, counters)[name]; !ok {
			t.Errorf("there is no %s", name)
		}
	}
	faults, err := promlint.NewWithMetricFamilies(families(t, counters)).Lint()
	if err != nil || len(faults) > 0 {
		t.Errorf("%v %v", faults, err)
	}
}
