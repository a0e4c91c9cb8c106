package bench

import (
	"bufio"
	"context"
	"database/sql"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"tidings/internal/admit"
	"tidings/internal/metrics"
	"tidings/internal/msg"
	"tidings/queue"
	"tidings/sender"
	"tidings/server"
	"tidings/store"
)

// sink is a provider that takes everything at once and counts.
type sink struct {
	sent  atomic.Int64
	want  int64
	all   chan struct{}
	total *atomic.Int64
	delay time.Duration         // of each send
	note  func(*sender.Message) // when set, sees each message as it is handed over
}

func (s *sink) Send(ctx context.Context, m *sender.Message) sender.Verdict {
	if s.note != nil {
		s.note(m)
	}
	if s.delay > 0 {
		select {
		case <-time.After(s.delay):
		case <-ctx.Done():
			return sender.Verdict{Kind: sender.Busy}
		}
	}
	s.total.Add(1)
	if s.sent.Add(1) == s.want {
		close(s.all)
	}
	return sender.Verdict{Kind: sender.Success}
}

func (s *sink) Traits() sender.Traits { return sender.Traits{Repeatable: true} }

func (s *sink) Close() error { return nil }

// request is a message as a caller sends it.
func (r *rig) request(text string) string {
	return `{"channels":["log"],"to":"+8613800000000","subject":"Your order","text":"` + text + `"}`
}

// serve runs the HTTP server on a port of its own.
func (r *rig) serve() (address string, stop func(), err error) {
	api := server.New(server.Config{
		Store: r.store, Version: "bench", Log: r.log, Metrics: metrics.New("bench", ""),
		Admit: &admit.Admitter{Policies: r.policies, Configured: func(c msg.Channel) bool { return c == msg.Log }, Now: r.store.Now},
	})
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	httpServer := api.Listener()
	go httpServer.Serve(listener)
	return listener.Addr().String(), func() { httpServer.Close() }, nil
}

// post sends single messages by HTTP over a number of connections.
func (r *rig) post(ctx context.Context, n, connections int) (Result, error) {
	if err := r.start(n); err != nil {
		return Result{}, err
	}
	address, stop, err := r.serve()
	if err != nil {
		return Result{}, err
	}
	defer stop()
	latencies := make([]time.Duration, n)
	started := time.Now()
	err = parallel(connections, n, func(from, to int) error { return r.postAll(address, latencies[from:to]) })
	took := time.Since(started)
	if err != nil {
		return Result{}, err
	}
	if err := r.finish(ctx, n); err != nil {
		return Result{}, err
	}
	return spread(Result{Messages: n, Seconds: took.Seconds(), PerSecond: float64(n) / took.Seconds()}, latencies), r.check(ctx, n)
}

// spread adds what a number of latencies say.
func spread(r Result, latencies []time.Duration) Result {
	slices.Sort(latencies)
	n := len(latencies)
	r.P50, r.P99, r.Max = latencies[n/2], latencies[n*99/100], latencies[n-1]
	return r
}

// parallel runs a function over the parts of a range at the same time.
func parallel(parts, n int, do func(from, to int) error) error {
	var wg sync.WaitGroup
	errs := make(chan error, parts)
	for part := range parts {
		wg.Go(func() { errs <- do(n*part/parts, n*(part+1)/parts) })
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// postAll sends one request after another over one connection.
func (r *rig) postAll(address string, latencies []time.Duration) error {
	c, err := dial(address)
	if err != nil {
		return err
	}
	defer c.Close()
	body := r.request(r.text)
	for i := range latencies {
		started := time.Now()
		if err := c.post(body); err != nil {
			return err
		}
		r.accepted.Add(1)
		latencies[i] = time.Since(started)
	}
	return nil
}

// client speaks HTTP by hand: the load shares the cores with what is measured, so it must cost little.
type client struct {
	net.Conn
	in *bufio.Reader
}

func dial(address string) (*client, error) {
	conn, err := net.Dial("tcp", address)
	if err != nil {
		return nil, err
	}
	return &client{conn, bufio.NewReader(conn)}, nil
}

func (c *client) post(body string) error {
	request := fmt.Appendf(nil, "POST /api/messages HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	if _, err := c.Write(request); err != nil {
		return err
	}
	return readAnswer(c.in)
}

func readAnswer(in *bufio.Reader) error {
	status, err := in.ReadString('\n')
	if err != nil {
		return err
	}
	length := 0
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			return err
		}
		if line == "\r\n" {
			break
		}
		if value, ok := strings.CutPrefix(line, "Content-Length: "); ok {
			if length, err = strconv.Atoi(strings.TrimSpace(value)); err != nil {
				return err
			}
		}
	}
	if !strings.Contains(status, strconv.Itoa(http.StatusAccepted)) {
		answer := make([]byte, length)
		io.ReadFull(in, answer)
		return fmt.Errorf("%s: %s", strings.TrimSpace(status), answer)
	}
	_, err = in.Discard(length)
	return err
}

func (r *rig) batch(n int) []store.Message {
	content := []byte(`{"subject":"Your order","text":"` + r.text + `"}`)
	batch := make([]store.Message, n)
	for i := range batch {
		batch[i] = store.Message{
			SourceID: "default", Category: msg.Notification, Lane: msg.Middle, Expire: r.store.Now().Add(time.Hour),
			Content: content, Tasks: []store.NewTask{{Channel: msg.Log, Receiver: "+8613800000000", AttemptLimit: 5}},
		}
	}
	return batch
}

// produce accepts messages in batches of 500 from four producers.
func (r *rig) produce(ctx context.Context, n int) error {
	return parallel(4, n, func(from, to int) error {
		for from < to {
			size := min(500, to-from)
			_, errs := r.store.EnqueueBatch(ctx, r.batch(size))
			for _, err := range errs {
				if err != nil {
					return err
				}
			}
			r.accepted.Add(int64(size))
			from += size
		}
		return nil
	})
}

// endToEnd measures from the first message's acceptance to the last one's record.
func (r *rig) endToEnd(ctx context.Context, n int) (Result, error) {
	if err := r.start(n); err != nil {
		return Result{}, err
	}
	started := time.Now()
	if err := r.produce(ctx, n); err != nil {
		return Result{}, err
	}
	return r.untilRecorded(ctx, n, started)
}

// burnDown measures how fast a backlog is sent and recorded.
func (r *rig) burnDown(ctx context.Context, n int) (Result, error) {
	if err := r.produce(ctx, n); err != nil {
		return Result{}, err
	}
	started := time.Now()
	if err := r.start(n); err != nil {
		return Result{}, err
	}
	return r.untilRecorded(ctx, n, started)
}

// hanging is a provider that never answers.
type hanging struct{ sink }

func (*hanging) Send(ctx context.Context, _ *sender.Message) sender.Verdict {
	<-ctx.Done()
	return sender.Verdict{Kind: sender.Busy}
}

// neighbour measures what a provider that hangs costs the other channels.
func (r *rig) neighbour(ctx context.Context, n int) (Result, error) {
	stuck := r.batch(500)
	for i := range stuck {
		stuck[i].Tasks[0].Channel = msg.Webhook
	}
	if _, errs := r.store.EnqueueBatch(ctx, stuck); errs[0] != nil {
		return Result{}, errs[0]
	}
	var alone, beside []float64
	for range 3 {
		rate, err := r.rate(ctx, n)
		if err != nil {
			return Result{}, err
		}
		alone = append(alone, rate)
		if rate, err = r.rate(ctx, n, queue.Channel{Channel: msg.Webhook, Providers: []queue.Provider{{Name: "hanging", Provider: &hanging{}}}, Slots: 100}); err != nil {
			return Result{}, err
		}
		beside = append(beside, rate)
	}
	slices.Sort(alone)
	slices.Sort(beside)
	return Result{
		Messages: n, Seconds: float64(n) / beside[1], PerSecond: beside[1],
		Note: fmt.Sprintf("%.0f/s without it: %.0f %% kept", alone[1], 100*beside[1]/alone[1]),
	}, nil
}

// snapshot measures what an old snapshot (a backup, a long SELECT) costs claims.
func (r *rig) snapshot(ctx context.Context, n int) (Result, error) {
	before, err := r.rate(ctx, n/5)
	if err != nil {
		return Result{}, err
	}
	db, err := sql.Open("mysql", r.dsn)
	if err != nil {
		return Result{}, err
	}
	defer db.Close()
	reader, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelRepeatableRead, ReadOnly: true})
	if err != nil {
		return Result{}, err
	}
	defer reader.Rollback()
	var seen int
	if err := reader.QueryRowContext(ctx, "SELECT COUNT(*) FROM t_msg_record").Scan(&seen); err != nil { // which takes the snapshot
		return Result{}, err
	}
	started := time.Now()
	during, err := r.rate(ctx, n)
	if err != nil {
		return Result{}, err
	}
	return Result{
		Messages: n, Seconds: time.Since(started).Seconds(), PerSecond: during,
		Note: fmt.Sprintf("%.0f/s before it: %.0f %% kept", before, 100*during/before),
	}, nil
}

// rate is the throughput end to end beside other channels.
func (r *rig) rate(ctx context.Context, n int, others ...queue.Channel) (float64, error) {
	if err := r.start(n, others...); err != nil {
		return 0, err
	}
	started := time.Now()
	if err := r.produce(ctx, n); err != nil {
		return 0, err
	}
	select {
	case <-r.sink.all:
	case <-time.After(5 * time.Minute):
		return 0, fmt.Errorf("%d of %d messages were sent", r.sink.sent.Load(), n)
	}
	took := time.Since(started)
	stop, cancel := context.WithTimeout(ctx, time.Second) // the hanging sends are cancelled, and their tasks go back
	defer cancel()
	r.engine.Stop(stop)
	return float64(n) / took.Seconds(), nil
}

func (r *rig) untilRecorded(ctx context.Context, n int, started time.Time) (Result, error) {
	if err := r.finish(ctx, n); err != nil {
		return Result{}, err
	}
	took := time.Since(started)
	return Result{Messages: n, Seconds: took.Seconds(), PerSecond: float64(n) / took.Seconds()}, r.check(ctx, n)
}
