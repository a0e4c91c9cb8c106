// Package bench measures Tidings on the machine that it runs on: database, product and load together, with durable
// settings, against a private server of its own. `tidings bench` runs it.
package bench

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"tidings/internal/localdb"
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

// Result is what one scenario measured.
type Result struct {
	Scenario  string        `json:"scenario"`
	Messages  int           `json:"messages"`
	Seconds   float64       `json:"seconds"`
	PerSecond float64       `json:"per_second"`
	P50       time.Duration `json:"p50_ns,omitempty"` // of one request
	P99       time.Duration `json:"p99_ns,omitempty"`
	Note      string        `json:"note,omitempty"`
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
	run      func(context.Context, *rig, int) (Result, error)
}

var scenarios = []scenario{
	{"post-8", "single POSTs over 8 connections, sent and recorded meanwhile", 20_000, func(ctx context.Context, r *rig, n int) (Result, error) { r.handOff = true; return r.post(ctx, n, 8) }},
	{"post-64", "single POSTs over 64 connections, sent and recorded meanwhile", 60_000, func(ctx context.Context, r *rig, n int) (Result, error) { r.handOff = true; return r.post(ctx, n, 64) }},
	{"claimed", "end to end: 4 producers in the process, batches of 500, claimed from the tables, sent and recorded", 100_000, func(ctx context.Context, r *rig, n int) (Result, error) { return r.endToEnd(ctx, n) }},
	{"handed-off", "the same, handed over at acceptance where slots are free", 100_000, func(ctx context.Context, r *rig, n int) (Result, error) {
		r.handOff = true
		return r.endToEnd(ctx, n)
	}},
	{"burn-down", "a backlog that is there before the engine starts", 200_000, func(ctx context.Context, r *rig, n int) (Result, error) { return r.burnDown(ctx, n) }},
	{"snapshot", "claimed, while somebody holds a snapshot from before all of it, against the same without", 500_000, func(ctx context.Context, r *rig, n int) (Result, error) { return r.snapshot(ctx, n) }},
	{"neighbour", "end to end, while another channel's provider hangs on every send; and without, three times in turn", 50_000, func(ctx context.Context, r *rig, n int) (Result, error) { return r.neighbour(ctx, n) }},
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
		result, err := runOne(ctx, db, s, n, o)
		if err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
		result.Scenario = s.name
		all.Results = append(all.Results, result)
	}
	return print(o, all)
}

func runOne(ctx context.Context, db *localdb.Server, s scenario, n int, o Options) (Result, error) {
	log := o.Log
	dsn := db.DSN("bench_" + strings.ReplaceAll(s.name, "-", "_"))
	if _, err := store.Migrate(ctx, store.Config{DSN: dsn}); err != nil {
		return Result{}, err
	}
	r := &rig{dsn: dsn, policies: policy.Defaults(), log: log, slots: 2000, text: strings.Repeat("x", o.Payload)}
	st, err := store.Open(ctx, store.Config{DSN: dsn, Connections: 32, Log: log, Wake: r.wake, Reserve: r.reserve})
	if err != nil {
		return Result{}, err
	}
	r.store = st
	defer st.Close()
	return s.run(ctx, r, n)
}

func print(o Options, all report) error {
	if o.JSON {
		enc := json.NewEncoder(o.Out)
		enc.SetIndent("", "  ")
		return enc.Encode(all)
	}
	fmt.Fprintf(o.Out, "tidings %s, %d cores, database: %s\n", all.Version, all.Cores, all.Server)
	w := tabwriter.NewWriter(o.Out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "scenario\tmessages\tseconds\tmessages/s\tp50\tp99\tnote\t")
	for _, r := range all.Results {
		fmt.Fprintf(w, "%s\t%d\t%.2f\t%.0f\t%s\t%s\t%s\t\n", r.Scenario, r.Messages, r.Seconds, r.PerSecond, latency(r.P50), latency(r.P99), r.Note)
	}
	return w.Flush()
}

func latency(d time.Duration) string {
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
	slots    int // sends at the same time
	sink     *sink
	log      *slog.Logger
}

func (r *rig) wake(l msg.Lane, c msg.Channel) {
	if r.engine != nil {
		r.engine.Wake(l, c)
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
	r.sink = &sink{want: int64(want), all: make(chan struct{})}
	engine, err := queue.New(queue.Config{
		Store: r.store, Policies: r.policies, Log: r.log,
		Channels: append(others, queue.Channel{Channel: msg.Log, ProviderName: "sink", Provider: r.sink, Slots: r.slots}),
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
