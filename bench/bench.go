// Package bench measures Tidings on the machine that it runs on: database, product and load together, with durable
// settings, against a private server of its own. `tidings bench` runs it.
package bench

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"text/tabwriter"
	"time"

	"tidings/internal/localdb"
	"tidings/internal/metrics"
	"tidings/internal/msg"
	"tidings/internal/policy"
	"tidings/queue"
	"tidings/sender"
	"tidings/store"
)

// Options choose what is measured.
type Options struct {
	Dir       string   // where the private database is made; removed afterwards
	Scenarios []string // names; none: all
	Messages  int      // messages of a scenario; 0: its own number
	Payload   int      // bytes of a message's text
	JSON      bool     // print JSON instead of a table
	Out       io.Writer
	Progress  io.Writer
	Version   string
	Log       *slog.Logger
}

// Result is what a scenario measured. What does not apply is zero.
type Result struct {
	Scenario  string        `json:"scenario"`
	Messages  int           `json:"messages"`
	Seconds   float64       `json:"seconds"`
	PerSecond float64       `json:"per_second"`
	P50       time.Duration `json:"p50_ns,omitempty"`
	P99       time.Duration `json:"p99_ns,omitempty"`
	Max       time.Duration `json:"max_ns,omitempty"`
	Note      string        `json:"note,omitempty"`
	Cost      *Cost         `json:"cost,omitempty"`
}

// Cost is what the database did for each message, by its own counters.
type Cost struct {
	RoundTrips float64 `json:"round_trips"`
	Statements float64 `json:"statements"`
	Inserted   float64 `json:"rows_inserted"`
	Updated    float64 `json:"rows_updated"`
	Deleted    float64 `json:"rows_deleted"`
	Commits    float64 `json:"commits"`
}

type report struct {
	Version string    `json:"version"`
	Time    time.Time `json:"time"`
	Cores   int       `json:"cores"`
	Server  string    `json:"server"`
	Results []Result  `json:"results"`
}

type scenario struct {
	name     string
	about    string
	messages int
	run      func(*rig, context.Context, int) ([]Result, error)
}

var scenarios = []scenario{
	{"post-1", "single POSTs over 1 connection, sent and recorded meanwhile", 3_000, post(1)},
	{"post-8", "the same over 8 connections", 20_000, post(8)},
	{"post-64", "the same over 64 connections", 60_000, post(64)},
	{"post-256", "the same over 256 connections", 60_000, post(256)},
	{"post-64-quota", "over 64 connections, with a quota of the caller and one of all", 60_000, handedOff((*rig).postQuota)},
	{"bulk", "lines of NDJSON in one request, each with a request_id, sent and recorded meanwhile", 1_000_000, handedOff((*rig).bulk)},
	{"claimed", "end to end: 4 producers in the process, batches of 500, claimed from the tables, sent and recorded", 100_000, one((*rig).endToEnd)},
	{"handed-off", "the same, handed over at acceptance where slots are free", 100_000, handedOff((*rig).endToEnd)},
	{"burn-down", "a backlog that is there before the engine starts", 500_000, one((*rig).burnDown)},
	{"latency", "POSTs at a fixed pace, 1,000/s and 25, 50, 75 % of full speed, from the intended time to the provider", 20_000, (*rig).latency},
	{"snapshot", "claimed, while somebody holds a snapshot from before all of it, against the same without", 500_000, one((*rig).snapshot)},
	{"snapshot-handed-off", "the same with hand-off", 500_000, handedOff((*rig).snapshot)},
	{"backlog", "a backlog of which little is sent: memory, and the time that a claim takes", 1_000_000, one((*rig).backlog)},
	{"due-at-once", "scheduled for one and the same second: how late each leaves", 200_000, one((*rig).dueAtOnce)},
	{"scheduled", "scheduled over the next five days: accepting, moving and claiming with few and with many of them", 2_000_000, one((*rig).scheduledBacklog)},
	{"lanes", "high at 100/s, while a backlog of low drains at its provider's 2,000/s: from the call that accepts to the provider", 500_000, handedOff((*rig).lanes)},
	{"idle", "nothing to do for 20 seconds", 0, one((*rig).idle)},
	{"neighbour", "end to end, while another channel's provider hangs on every send; and without, three times in turn", 50_000, one((*rig).neighbour)},
	{"limits", "the disk and the database alone: fsyncs, and 500 rows a statement over one connection", 50_000, (*rig).limits},
}

type measurement = func(*rig, context.Context, int) (Result, error)

func one(run measurement) func(*rig, context.Context, int) ([]Result, error) {
	return func(r *rig, ctx context.Context, n int) ([]Result, error) {
		result, err := run(r, ctx, n)
		return []Result{result}, err
	}
}

func handedOff(run measurement) func(*rig, context.Context, int) ([]Result, error) {
	return one(func(r *rig, ctx context.Context, n int) (Result, error) {
		r.handOff = true
		return run(r, ctx, n)
	})
}

func post(connections int) func(*rig, context.Context, int) ([]Result, error) {
	return handedOff(func(r *rig, ctx context.Context, n int) (Result, error) { return r.post(ctx, n, connections) })
}

// Names lists the scenarios with what each measures.
func Names() []string {
	var names []string
	for _, s := range scenarios {
		names = append(names, fmt.Sprintf("%-12s %s (%d messages)", s.name, s.about, s.messages))
	}
	return names
}

// Run measures, and prints what it measured.
func Run(ctx context.Context, o Options) error {
	for _, name := range o.Scenarios {
		if !slices.ContainsFunc(scenarios, func(s scenario) bool { return s.name == name }) {
			return fmt.Errorf("there is no scenario %q; there are:\n  %s", name, strings.Join(Names(), "\n  "))
		}
	}
	dir, err := os.MkdirTemp(o.Dir, "tidings-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o755); err != nil {
		return err
	}
	start, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	db, err := localdb.Start(start, localdb.Config{Dir: dir, BufferPool: "256M", RedoLog: "256M", Log: o.Log})
	if err != nil {
		return err
	}
	defer db.Stop()
	all := report{Version: o.Version, Time: time.Now().UTC().Truncate(time.Second), Cores: runtime.NumCPU(), Server: "private, innodb_flush_log_at_trx_commit=1, pool 256M, redo 256M"}
	for _, s := range scenarios {
		if len(o.Scenarios) > 0 && !slices.Contains(o.Scenarios, s.name) {
			continue
		}
		n := s.messages
		if o.Messages > 0 {
			n = o.Messages
		}
		fmt.Fprintf(o.Progress, "%s: %s …\n", s.name, s.about)
		results, err := runOne(ctx, db, s, n, o)
		if err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
		for _, result := range results {
			setName(&result, s.name)
			all.Results = append(all.Results, result)
		}
	}
	return print(o, all)
}

func setName(r *Result, scenario string) {
	if r.Scenario == "" {
		r.Scenario = scenario
	}
}

func runOne(ctx context.Context, db *localdb.Server, s scenario, n int, o Options) ([]Result, error) {
	log := o.Log
	dsn := db.DSN("bench_" + strings.ReplaceAll(s.name, "-", "_"))
	if _, err := store.Migrate(ctx, store.Config{DSN: dsn}); err != nil {
		return nil, err
	}
	r := &rig{dsn: dsn, dir: o.Dir, policies: policy.Defaults(), log: log, slots: 2000, text: strings.Repeat("x", o.Payload)}
	st, err := store.Open(ctx, store.Config{DSN: dsn, Connections: 32, Log: log, Metrics: metrics.New("bench", ""), Wake: r.wake, Reserve: r.reserve, Observe: func(string) { r.roundTrips.Add(1) }})
	if err != nil {
		return nil, err
	}
	r.store = st
	defer st.Close()
	stop := r.showProgress(o.Progress)
	defer stop()
	before, err := r.counters(ctx)
	if err != nil {
		return nil, err
	}
	results, err := s.run(r, ctx, n)
	if err != nil || len(results) != 1 || results[0].Messages == 0 {
		return results, err
	}
	after, err := r.counters(ctx)
	results[0].Cost = after.since(before, r.done())
	return results, err
}

func print(o Options, all report) error {
	if o.JSON {
		enc := json.NewEncoder(o.Out)
		enc.SetIndent("", "  ")
		return enc.Encode(all)
	}
	fmt.Fprintf(o.Out, "tidings %s, %d cores, database: %s\n", all.Version, all.Cores, all.Server)
	w := tabwriter.NewWriter(o.Out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "scenario\tmessages\tseconds\tmessages/s\tp50\tp99\tmax\t  note")
	for _, r := range all.Results {
		fmt.Fprintf(w, "%s\t%d\t%.2f\t%.0f\t%s\t%s\t%s\t  %s\n", r.Scenario, r.Messages, r.Seconds, r.PerSecond, show(r.P50), show(r.P99), show(r.Max), r.Note)
	}
	w.Flush()
	fmt.Fprintln(o.Out)
	fmt.Fprintln(w, "for each message\tround trips\tstatements\tcommits\trows inserted\tupdated\tdeleted\t")
	for _, r := range all.Results {
		if c := r.Cost; c != nil {
			fmt.Fprintf(w, "%s\t%.3f\t%.3f\t%.3f\t%.2f\t%.2f\t%.2f\t\n", r.Scenario, c.RoundTrips, c.Statements, c.Commits, c.Inserted, c.Updated, c.Deleted)
		}
	}
	return w.Flush()
}

func show(d time.Duration) string {
	if d == 0 {
		return "-"
	}
	return d.Round(10 * time.Microsecond).String()
}

// rig is a store, and an engine that sends to nowhere.
type rig struct {
	store    *store.Store
	policies *policy.Set
	engine   *queue.Engine
	dsn      string
	handOff  bool
	text     string
	slots    int          // sends at the same time
	ask      queue.Limits // what the provider may be asked for
	sink     *sink
	log      *slog.Logger
	dir      string // on the disk that the database is on

	roundTrips atomic.Int64
	accepted   atomic.Int64
	sent       atomic.Int64 // by the sinks of all engines so far
}

// done is how many messages have gone all the way.
func (r *rig) done() float64 { return float64(max(r.sent.Load(), 1)) }

// showProgress writes a line that follows the counts, if somebody looks at a terminal.
func (r *rig) showProgress(out io.Writer) (stop func()) {
	file, ok := out.(*os.File)
	if !ok {
		return func() {}
	}
	if info, err := file.Stat(); err != nil || info.Mode()&os.ModeCharDevice == 0 {
		return func() {}
	}
	end := make(chan struct{})
	var line sync.WaitGroup
	line.Go(func() {
		tick := time.NewTicker(500 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				fmt.Fprintf(file, "\r  %9d accepted %9d sent", r.accepted.Load(), r.sent.Load())
			case <-end:
				fmt.Fprint(file, "\r\x1b[K")
				return
			}
		}
	})
	return func() {
		close(end)
		line.Wait()
	}
}

// counters are the server's, and our own.
type counters map[string]float64

func (r *rig) counters(ctx context.Context) (counters, error) {
	db, err := sql.Open("mysql", r.dsn)
	if err != nil {
		return nil, err
	}
	defer db.Close()
	rows, err := db.QueryContext(ctx, "SHOW GLOBAL STATUS WHERE variable_name IN ('Questions', 'Com_commit', 'Handler_write', 'Handler_update', 'Handler_delete')")
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	c := counters{"round_trips": float64(r.roundTrips.Load())}
	for rows.Next() {
		var (
			name  string
			value float64
		)
		if err := rows.Scan(&name, &value); err != nil {
			return nil, err
		}
		c[strings.ToLower(name)] = value
	}
	return c, rows.Err()
}

func (c counters) since(before counters, messages float64) *Cost {
	each := func(name string) float64 { return (c[name] - before[name]) / messages }
	return &Cost{
		RoundTrips: each("round_trips"), Statements: each("questions"), Commits: each("com_commit"),
		Inserted: each("handler_write"), Updated: each("handler_update"), Deleted: each("handler_delete"),
	}
}

func (r *rig) wake(l msg.Lane, c msg.Channel, due time.Time) {
	if r.engine != nil {
		r.engine.Wake(l, c, due)
	}
}

func (r *rig) reserve(l msg.Lane, c msg.Channel, n int) store.Reservation {
	if r.engine == nil || !r.handOff {
		return nil
	}
	return r.engine.Reserve(l, c, n)
}

// start runs an engine whose provider takes everything at once, beside other channels.
func (r *rig) start(want int, others ...queue.Channel) error {
	r.sink = &sink{want: int64(want), all: make(chan struct{}), total: &r.sent}
	engine, err := queue.New(queue.Config{
		Store: r.store, Policies: r.policies, Log: r.log, Metrics: metrics.New("bench", ""), // as in production: all is counted
		Channels: append(others, queue.Channel{Channel: msg.Log, Providers: []queue.Provider{{Name: "sink", Provider: r.sink, Limits: r.ask}}, Slots: r.slots}),
	})
	if err != nil {
		return err
	}
	r.engine = engine
	engine.Start()
	return nil
}

// finish stops the engine, by which every outcome is recorded, and proves that each message was sent and recorded once.
func (r *rig) finish(ctx context.Context, want int) error {
	select {
	case <-r.sink.all:
	case <-time.After(5 * time.Minute):
		return fmt.Errorf("%d of %d messages were sent", r.sink.sent.Load(), want)
	case <-ctx.Done():
		return ctx.Err()
	}
	r.engine.Stop(ctx)
	return nil
}

// check counts what the run left behind.
func (r *rig) check(ctx context.Context, want int) error {
	waiting, err := r.store.Survey(ctx)
	if err != nil {
		return err
	}
	if sent := r.sink.sent.Load(); int(sent) != want || len(waiting) > 0 {
		return fmt.Errorf("%d messages, %d sends, left in the queue: %v", want, sent, waiting)
	}
	return nil
}

var _ sender.Provider = (*sink)(nil)
