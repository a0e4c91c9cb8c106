package bench

import (
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/go-sql-driver/mysql"

	"tidings/internal/msg"

	"tidings/store"
)

// backlog measures how little the size of a backlog matters: the time of a claim, and the memory of the process while a
// provider takes 2,000 a second of it.
func (r *rig) backlog(ctx context.Context, n int) (Result, error) {
	few := min(10_000, n/2)
	if err := r.produce(ctx, few); err != nil {
		return Result{}, err
	}
	small, err := r.claims(ctx)
	if err != nil {
		return Result{}, err
	}
	started := time.Now()
	if err := r.produce(ctx, n-few); err != nil {
		return Result{}, err
	}
	took := time.Since(started)
	large, err := r.claims(ctx)
	if err != nil {
		return Result{}, err
	}
	r.slots = 100
	if err := r.start(n); err != nil {
		return Result{}, err
	}
	r.sink.delay = 50 * time.Millisecond
	var first, most int
	for i := range 40 {
		time.Sleep(500 * time.Millisecond)
		now := residentMiB()
		if i == 4 {
			first = now
		}
		most = max(most, now)
	}
	stop, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	r.engine.Stop(stop)
	result := spread(Result{Messages: n, Seconds: took.Seconds(), PerSecond: float64(n-few) / took.Seconds()}, large)
	before := spread(Result{}, small)
	result.Note = fmt.Sprintf("accepted; claims of 100: p50 %s, p99 %s with %d rows; memory %d MiB after 2 s, at most %d", show(before.P50), show(before.P99), few, first, most)
	return result, nil
}

// claims measures claims of 100 tasks, which are put back.
func (r *rig) claims(ctx context.Context) (took []time.Duration, err error) {
	for range 50 {
		started := time.Now()
		c, err := r.store.Claim(ctx, msg.Middle, msg.Log, 100, time.Time{})
		if err != nil {
			return nil, err
		}
		took = append(took, time.Since(started))
		outcomes := make([]store.Outcome, len(c.Tasks))
		for i := range c.Tasks {
			outcomes[i] = store.Outcome{Task: c.Tasks[i], State: msg.Ready, Next: c.Tasks[i].Due, Uncounted: true}
		}
		if _, err := r.store.Settle(ctx, outcomes); err != nil {
			return nil, err
		}
	}
	return took, nil
}

// residentMiB is the process's memory. 0 where the system does not tell.
func residentMiB() int {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0
	}
	_, after, _ := bytes.Cut(status, []byte("VmRSS:"))
	kib, _ := strconv.Atoi(strings.TrimSpace(strings.SplitN(string(after), "kB", 2)[0]))
	return kib / 1024
}

// idle counts what an engine without work asks of the database.
func (r *rig) idle(ctx context.Context, _ int) (Result, error) {
	if err := r.start(1); err != nil {
		return Result{}, err
	}
	time.Sleep(5 * time.Second) // until it has come to rest
	const span = 20 * time.Second
	before, cpu := r.roundTrips.Load(), cpuTime()
	time.Sleep(span)
	statements, used := r.roundTrips.Load()-before, cpuTime()-cpu
	r.engine.Stop(ctx)
	return Result{
		Seconds: span.Seconds(),
		Note:    fmt.Sprintf("%.1f statements a second, %.1f ms of processor time a second", float64(statements)/span.Seconds(), float64(used.Milliseconds())/span.Seconds()),
	}, nil
}

// limits measures what the machine gives at best: one connection, no index look-ups, nothing else to do.
func (r *rig) limits(ctx context.Context, n int) ([]Result, error) {
	fsyncs, err := r.fsyncs()
	if err != nil {
		return nil, err
	}
	cfg, err := mysql.ParseDSN(r.dsn)
	if err != nil {
		return nil, err
	}
	cfg.InterpolateParams = true
	connector, err := mysql.NewConnector(cfg)
	if err != nil {
		return nil, err
	}
	db := sql.OpenDB(connector)
	defer db.Close()
	db.SetMaxOpenConns(1)
	results := []Result{fsyncs}
	for _, what := range []struct {
		name   string
		delete bool
	}{{"limits-insert", false}, {"limits-insert-delete", true}} {
		if _, err := db.ExecContext(ctx, "DROP TABLE IF EXISTS raw"); err != nil {
			return nil, err
		}
		if _, err := db.ExecContext(ctx, "CREATE TABLE raw (id BIGINT UNSIGNED PRIMARY KEY, content TEXT) ENGINE=InnoDB"); err != nil {
			return nil, err
		}
		started := time.Now()
		for from := 0; from < n; from += 500 {
			args := make([]any, 0, 1000)
			for id := from; id < from+500; id++ {
				args = append(args, id, r.text)
			}
			if _, err := db.ExecContext(ctx, "INSERT INTO raw VALUES (?,?)"+strings.Repeat(",(?,?)", 499), args...); err != nil {
				return nil, err
			}
			if !what.delete {
				continue
			}
			if _, err := db.ExecContext(ctx, "DELETE FROM raw WHERE id BETWEEN ? AND ?", from, from+499); err != nil {
				return nil, err
			}
		}
		took := time.Since(started).Seconds()
		results = append(results, Result{Scenario: what.name, Messages: n, Seconds: took, PerSecond: float64(n) / took, Note: "rows of two columns, 500 a transaction"})
	}
	return results, nil
}

func (r *rig) fsyncs() (Result, error) {
	file, err := os.CreateTemp(r.dir, "tidings-fsync-")
	if err != nil {
		return Result{}, err
	}
	defer os.Remove(filepath.Clean(file.Name()))
	defer file.Close()
	var took []time.Duration
	started := time.Now()
	for block := make([]byte, 4096); time.Since(started) < 2*time.Second; {
		one := time.Now()
		if _, err := file.WriteAt(block, 0); err != nil {
			return Result{}, err
		}
		if err := file.Sync(); err != nil {
			return Result{}, err
		}
		took = append(took, time.Since(one))
	}
	seconds := time.Since(started).Seconds()
	return spread(Result{Scenario: "limits-fsync", Messages: len(took), Seconds: seconds, PerSecond: float64(len(took)) / seconds, Note: "4 KiB written and synced, one after another"}, took), nil
}

// cpuTime is what the process has used of the processors.
func cpuTime() time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		return 0
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
