package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/beanstalkd/go-beanstalk"
	"github.com/hibiken/asynq"
	"github.com/jackc/pgx/v5/pgxpool"
	riverqueue "github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
)

// counter tells when all messages have been worked on.
type counter struct {
	left atomic.Int64
	all  chan struct{}
}

func newCounter(n int) *counter {
	c := &counter{all: make(chan struct{})}
	c.left.Store(int64(n))
	return c
}

func (c *counter) done() {
	if c.left.Add(-1) == 0 {
		close(c.all)
	}
}

func (c *counter) wait(ctx context.Context) error {
	select {
	case <-c.all:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%d messages are left: %w", c.left.Load(), ctx.Err())
	}
}

type riverArgs struct {
	Text string `json:"text"`
}

func (riverArgs) Kind() string { return "bench" }

type riverWorker struct {
	riverqueue.WorkerDefaults[riverArgs]
	count *counter
}

func (w *riverWorker) Work(context.Context, *riverqueue.Job[riverArgs]) error {
	w.count.done()
	return nil
}

// river runs with the settings of its own benchmark: 2,000 workers, a fetch cooldown of 2 ms, a poll of 20 ms, and
// InsertManyFast in batches of 500.
func river(ctx context.Context, dir string, n int, payload string) (float64, error) {
	dsn, stop, err := postgres(ctx, dir)
	if err != nil {
		return 0, err
	}
	defer stop()
	cfg, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return 0, err
	}
	cfg.MaxConns = 32
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return 0, err
	}
	defer pool.Close()
	for range 100 { // the socket is there before the server is
		if err = pool.Ping(ctx); err == nil {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	if err != nil {
		return 0, err
	}
	driver := riverpgxv5.New(pool)
	migrator, err := rivermigrate.New(driver, nil)
	if err != nil {
		return 0, err
	}
	if _, err := migrator.Migrate(ctx, rivermigrate.DirectionUp, nil); err != nil {
		return 0, err
	}
	count := newCounter(n)
	workers := riverqueue.NewWorkers()
	riverqueue.AddWorker(workers, &riverWorker{count: count})
	client, err := riverqueue.NewClient(driver, &riverqueue.Config{
		Workers: workers, FetchCooldown: 2 * time.Millisecond, FetchPollInterval: 20 * time.Millisecond,
		Queues: map[string]riverqueue.QueueConfig{riverqueue.QueueDefault: {MaxWorkers: 2000}},
		Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	if err != nil {
		return 0, err
	}
	if err := client.Start(ctx); err != nil {
		return 0, err
	}
	started := time.Now()
	err = produce(n, func(from, to int) error {
		batch := make([]riverqueue.InsertManyParams, to-from)
		for i := range batch {
			batch[i].Args = riverArgs{payload}
		}
		_, err := client.InsertManyFast(ctx, batch)
		return err
	})
	if err == nil {
		err = count.wait(ctx)
	}
	if stopped := client.Stop(ctx); err == nil { // which writes the ends that are still in memory
		err = stopped
	}
	return float64(n) / time.Since(started).Seconds(), err
}

// asynqWith keeps finished tasks for an hour, so that an end is recorded as the others record it.
func asynqWith(fsync string) func(context.Context, string, int, string) (float64, error) {
	return func(ctx context.Context, dir string, n int, payload string) (float64, error) {
		addr, stop, err := redis(dir, fsync)
		if err != nil {
			return 0, err
		}
		defer stop()
		options := asynq.RedisClientOpt{Addr: addr}
		count := newCounter(n)
		server := asynq.NewServer(options, asynq.Config{Concurrency: 200, LogLevel: asynq.FatalLevel})
		handler := asynq.HandlerFunc(func(context.Context, *asynq.Task) error { count.done(); return nil })
		if err := server.Start(handler); err != nil {
			return 0, err
		}
		client := asynq.NewClient(options)
		defer client.Close()
		started := time.Now()
		err = produce(n, func(from, to int) error {
			for range to - from {
				if _, err := client.EnqueueContext(ctx, asynq.NewTask("bench", []byte(payload)), asynq.Retention(time.Hour)); err != nil {
					return err
				}
			}
			return nil
		})
		if err == nil {
			err = count.wait(ctx)
		}
		took := time.Since(started)
		server.Shutdown()
		return float64(n) / took.Seconds(), err
	}
}

func beanstalkd(ctx context.Context, dir string, n int, payload string) (float64, error) {
	port, err := freePort()
	if err != nil {
		return 0, err
	}
	binlog := filepath.Join(dir, "binlog")
	if err := os.Mkdir(binlog, 0o755); err != nil {
		return 0, err
	}
	stop, err := serve(exec.Command("beanstalkd", "-l", "127.0.0.1", "-p", fmt.Sprint(port), "-b", binlog, "-f0"), answers(port))
	if err != nil {
		return 0, err
	}
	defer stop()
	addr := fmt.Sprintf("127.0.0.1:%d", port)
	count := newCounter(n)
	failed := make(chan error, 8)
	for range 8 {
		go func() { failed <- consume(addr, count) }()
	}
	started := time.Now()
	conns := make(chan *beanstalk.Conn, 4)
	for range 4 {
		conn, err := beanstalk.Dial("tcp", addr)
		if err != nil {
			return 0, err
		}
		defer conn.Close()
		conns <- conn
	}
	err = produce(n, func(from, to int) error {
		conn := <-conns
		defer func() { conns <- conn }()
		for range to - from {
			if _, err := conn.Put([]byte(payload), 1, 0, time.Minute); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	select {
	case <-count.all:
	case err := <-failed:
		return 0, err
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	return float64(n) / time.Since(started).Seconds(), nil
}

func consume(addr string, count *counter) error {
	conn, err := beanstalk.Dial("tcp", addr)
	if err != nil {
		return err
	}
	defer conn.Close()
	for {
		id, _, err := conn.Reserve(time.Minute)
		if err != nil {
			return err
		}
		if err := conn.Delete(id); err != nil {
			return err
		}
		count.done()
	}
}
