// Package metrics counts what the process does, for Prometheus. Names and labels are an interface: docs/monitoring lists them, and
// alert rules rely on them. No label has a value that callers choose.
package metrics

import (
	"database/sql"
	"net/http"
	"runtime"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Metrics are a process's counters. All methods are safe for concurrent use, and do nothing on a nil Metrics.
type Metrics struct {
	registry  *prometheus.Registry
	accepted  prometheus.Counter
	rejected  *prometheus.CounterVec
	attempts  *prometheus.CounterVec
	duration  *prometheus.HistogramVec
	latency   *prometheus.HistogramVec
	claims    prometheus.Histogram
	settles   prometheus.Histogram
	retries   *prometheus.CounterVec
	recovered prometheus.Counter
	lost      prometheus.Counter
	alarms    *prometheus.CounterVec
	submitted *prometheus.CounterVec
	requests  *prometheus.CounterVec
	answers   *prometheus.HistogramVec
}

var rowBuckets = []float64{1, 2, 5, 10, 20, 50, 100, 200, 500}

// New makes the counters of a process, with those of Go and of the process itself.
func New(version, commit string) *Metrics {
	m := &Metrics{
		registry: prometheus.NewRegistry(),
		accepted: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "tidings_messages_accepted_total", Help: "Messages accepted: stored, and answered with 202.",
		}),
		rejected: counters("tidings_messages_rejected_total", "Messages refused, by the code of the answer.", "reason"),
		attempts: counters("tidings_send_attempts_total", "Attempts to send, by what came of them: success, temporary, permanent, unknown, busy.", "channel", "provider", "outcome"),
		duration: histograms("tidings_send_duration_seconds", "How long providers took to answer an attempt.",
			[]float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30}, "channel", "provider"),
		latency: histograms("tidings_delivery_latency_seconds", "From the time that a message was due to the beginning of the attempt that succeeded.",
			[]float64{.005, .01, .02, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200}, "lane", "channel"),
		claims: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "tidings_claim_rows", Help: "Tasks taken by one claim that found any.", Buckets: rowBuckets,
		}),
		settles: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "tidings_settle_rows", Help: "Outcomes written by one transaction.", Buckets: rowBuckets,
		}),
		retries:   counters("tidings_db_retries_total", "Transactions begun again, by the server's error number.", "code"),
		recovered: prometheus.NewCounter(prometheus.CounterOpts{Name: "tidings_lease_recovered_total", Help: "Tasks taken over after their lease or wait had ended."}),
		lost:      prometheus.NewCounter(prometheus.CounterOpts{Name: "tidings_settle_lost_total", Help: "Outcomes not written, for the task was no longer ours."}),
		alarms:    counters("tidings_alarms_total", "Alarms of dead letters, by whether they were delivered: success or failed.", "level", "outcome"),
		submitted: counters("tidings_submissions_total", "Requests by SQL (t_msg_submit) that were looked at: accepted, duplicate, rejected, postponed.", "outcome"),
		requests:  counters("tidings_http_requests_total", "Requests answered.", "method", "route", "code"),
		answers: histograms("tidings_http_request_duration_seconds", "How long requests took.",
			[]float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60}, "method", "route"),
	}
	for _, level := range []string{"now", "daily"} { // from zero on: a first failure must count as an increase
		for _, outcome := range []string{"success", "failed"} {
			m.alarms.WithLabelValues(level, outcome)
		}
	}
	for _, outcome := range []string{"accepted", "duplicate", "rejected", "postponed"} {
		m.submitted.WithLabelValues(outcome)
	}
	m.retries.WithLabelValues("1213")
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "tidings_build_info", Help: "1, with what runs.",
		ConstLabels: prometheus.Labels{"version": version, "commit": commit, "goversion": runtime.Version()},
	})
	build.Set(1)
	m.registry.MustRegister(build, m.accepted, m.rejected, m.attempts, m.duration, m.latency, m.claims, m.settles, m.retries, m.recovered, m.lost, m.alarms, m.submitted,
		m.requests, m.answers, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

func counters(name, help string, labels ...string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
}

func histograms(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
	return prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}, labels)
}

// Register adds figures that are read when they are asked for.
func (m *Metrics) Register(c prometheus.Collector) {
	if m != nil {
		m.registry.MustRegister(c)
	}
}

// Pool adds the figures of a connection pool.
func (m *Metrics) Pool(name string, db *sql.DB) {
	if m != nil {
		m.registry.MustRegister(collectors.NewDBStatsCollector(db, name))
	}
}

// Gatherer gives all figures, as tests read them.
func (m *Metrics) Gatherer() prometheus.Gatherer { return m.registry }

// Handler answers Prometheus.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{MaxRequestsInFlight: 4, ErrorHandling: promhttp.ContinueOnError})
}

// Accepted counts messages that were stored.
func (m *Metrics) Accepted(n int) {
	if m != nil {
		m.accepted.Add(float64(n))
	}
}

// Rejected counts a message that was refused, by the code of the answer.
func (m *Metrics) Rejected(reason string) {
	if m != nil {
		m.rejected.WithLabelValues(reason).Inc()
	}
}

// Rejections makes the codes known for which messages may be refused.
func (m *Metrics) Rejections(reasons ...string) {
	if m == nil {
		return
	}
	for _, r := range reasons {
		m.rejected.WithLabelValues(r)
	}
}

// Attempts are the counters of one channel's attempts at one provider: they are looked up once.
type Attempts struct {
	outcomes func(outcome string) prometheus.Counter
	duration prometheus.Observer
}

// Attempts gives the counters for a channel and provider.
func (m *Metrics) Attempts(channel, provider string, outcomes ...string) *Attempts {
	if m == nil {
		return nil
	}
	known := map[string]prometheus.Counter{}
	for _, o := range outcomes {
		known[o] = m.attempts.WithLabelValues(channel, provider, o)
	}
	return &Attempts{func(o string) prometheus.Counter { return known[o] }, m.duration.WithLabelValues(channel, provider)}
}

// Ended counts an attempt.
func (a *Attempts) Ended(outcome string, took time.Duration) {
	if a != nil {
		a.outcomes(outcome).Inc()
		a.duration.Observe(took.Seconds())
	}
}

// Latency gives the histogram of a lane and channel; nil on a nil Metrics.
func (m *Metrics) Latency(lane, channel string) prometheus.Observer {
	if m == nil {
		return nil
	}
	return m.latency.WithLabelValues(lane, channel)
}

// Claimed notes how many tasks a claim took.
func (m *Metrics) Claimed(rows int) {
	if m != nil {
		m.claims.Observe(float64(rows))
	}
}

// Settled notes how many outcomes a transaction wrote.
func (m *Metrics) Settled(rows int) {
	if m != nil {
		m.settles.Observe(float64(rows))
	}
}

// Retried counts a transaction that is begun again.
func (m *Metrics) Retried(code uint16) {
	if m != nil {
		m.retries.WithLabelValues(strconv.Itoa(int(code))).Inc()
	}
}

// Recovered counts tasks that were taken over.
func (m *Metrics) Recovered(n int) {
	if m != nil {
		m.recovered.Add(float64(n))
	}
}

// Lost counts an outcome that came too late.
func (m *Metrics) Lost() {
	if m != nil {
		m.lost.Inc()
	}
}

// Alarm counts an alarm that was delivered, or was not.
func (m *Metrics) Alarm(level string, delivered bool) {
	if m == nil {
		return
	}
	outcome := "failed"
	if delivered {
		outcome = "success"
	}
	m.alarms.WithLabelValues(level, outcome).Inc()
}

// Submitted counts a request by SQL, by what came of it.
func (m *Metrics) Submitted(outcome string) {
	if m != nil {
		m.submitted.WithLabelValues(outcome).Inc()
	}
}

// Request counts an answered request. route is the pattern, not the path.
func (m *Metrics) Request(method, route string, code int, took time.Duration) {
	if m != nil {
		m.requests.WithLabelValues(method, route, strconv.Itoa(code)).Inc()
		m.answers.WithLabelValues(method, route).Observe(took.Seconds())
	}
}
