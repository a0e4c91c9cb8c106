// Peers measures the same work on other queues, in one run with Tidings: a message goes in durably, is taken by a worker that
// does nothing, and its end is recorded. Each server is private, on loopback or a socket, and stopped afterwards.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"
)

// contender is one queue in one setting.
type contender struct {
	name       string
	durability string
	part       int // measured with one message in so many: those that sync for every message would take minutes
	run        func(ctx context.Context, dir string, n int, payload string) (perSecond float64, err error)
}

var contenders = []contender{
	{"tidings claimed", "InnoDB, fsync at each commit; accepted after it", 1, tidings("claimed")},
	{"tidings handed-off", "InnoDB, fsync at each commit; accepted after it", 1, tidings("handed-off")},
	{"river", "PostgreSQL, fsync on, synchronous_commit on", 1, river},
	{"asynq, always", "Redis, appendfsync always", 5, asynqWith("always")},
	{"asynq, everysec", "Redis, appendfsync everysec: a crash loses up to a second", 5, asynqWith("everysec")},
	{"beanstalkd", "binlog, fsync at each write (-f0); ends are not recorded", 5, beanstalkd},
}

var binary = flag.String("tidings", "bin/tidings", "the tidings binary")

func main() {
	n := flag.Int("n", 100_000, "messages a round")
	rounds := flag.Int("rounds", 3, "rounds")
	payloads := flag.String("payloads", "200,2000", "bytes of a message, separated by commas")
	only := flag.String("only", "", "measure only contenders whose name contains one of these, separated by commas")
	flag.Parse()
	if err := measure(context.Background(), *n, *rounds, strings.Split(*payloads, ","), *only); err != nil {
		fmt.Fprintln(os.Stderr, "peers:", err)
		os.Exit(1)
	}
}

func measure(ctx context.Context, n, rounds int, payloads []string, only string) error {
	for _, size := range payloads {
		var bytes int
		if _, err := fmt.Sscan(size, &bytes); err != nil {
			return fmt.Errorf("payloads: %w", err)
		}
		rates := map[string][]float64{}
		for round := range rounds {
			for _, c := range contenders {
				if !slices.ContainsFunc(strings.Split(only, ","), func(part string) bool { return strings.Contains(c.name, part) }) {
					continue
				}
				rate, err := once(ctx, c, n/c.part, strings.Repeat("x", bytes))
				if err != nil {
					return fmt.Errorf("%s: %w", c.name, err)
				}
				fmt.Fprintf(os.Stderr, "round %d, %d bytes, %s: %.0f/s\n", round+1, bytes, c.name, rate)
				rates[c.name] = append(rates[c.name], rate)
			}
		}
		table(bytes, n, rates)
	}
	return nil
}

func once(ctx context.Context, c contender, n int, payload string) (float64, error) {
	dir, err := os.MkdirTemp("", "tidings-peer-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o755); err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	return c.run(ctx, dir, n, payload)
}

func table(bytes, n int, rates map[string][]float64) {
	fmt.Printf("\n%d messages of %d bytes (fewer where that takes minutes), end to end, messages/s:\n\n| | messages | median | spread | against river | durability |\n|---|---|---|---|---|---|\n", n, bytes)
	base := median(rates["river"])
	for _, c := range contenders {
		r := rates[c.name]
		if len(r) == 0 {
			continue
		}
		against := "-"
		if base > 0 {
			against = fmt.Sprintf("%.2f ×", median(r)/base)
		}
		fmt.Printf("| %s | %d | %.0f | %.0f–%.0f | %s | %s |\n", c.name, n/c.part, median(r), slices.Min(r), slices.Max(r), against, c.durability)
	}
}

func median(r []float64) float64 {
	if len(r) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(r))
	return sorted[len(sorted)/2]
}

// tidings runs a scenario of `tidings bench`.
func tidings(scenario string) func(context.Context, string, int, string) (float64, error) {
	return func(ctx context.Context, dir string, n int, payload string) (float64, error) {
		cmd := exec.CommandContext(ctx, *binary, "bench", scenario, "--json", "--dir", dir, "--messages", fmt.Sprint(n), "--payload", fmt.Sprint(len(payload)))
		var errs bytes.Buffer
		cmd.Stderr = &errs
		out, err := cmd.Output()
		if err != nil {
			return 0, fmt.Errorf("%w: %s", err, errs.String())
		}
		var report struct {
			Results []struct {
				PerSecond float64 `json:"per_second"`
			}
		}
		if err := json.Unmarshal(out, &report); err != nil {
			return 0, err
		}
		return report.Results[0].PerSecond, nil
	}
}

// produce calls put for every message from four producers, in batches of 500.
func produce(n int, put func(from, to int) error) error {
	errs := make(chan error, 4)
	for p := range 4 {
		go func() {
			from, end := n*p/4, n*(p+1)/4
			for from < end {
				to := min(from+500, end)
				if err := put(from, to); err != nil {
					errs <- err
					return
				}
				from = to
			}
			errs <- nil
		}()
	}
	var first error
	for range 4 {
		if err := <-errs; first == nil {
			first = err
		}
	}
	return first
}
