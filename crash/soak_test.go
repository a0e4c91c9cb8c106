//go:build crash

package crash

import (
	"context"
	"database/sql"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	_ "github.com/go-sql-driver/mysql"
)

// One process with a private database works for an hour (SOAK) at half speed (SOAK_RATE messages a second), with failures, retries,
// scheduled and cancelled messages among them. What it holds must not grow: memory, goroutines, file descriptors, connections, and the
// tables that messages pass through.
func TestSoak(t *testing.T) {
	length, err := time.ParseDuration(os.Getenv("SOAK"))
	if err != nil {
		length = time.Hour
	}
	rate := number(t, "SOAK_RATE", 2000)
	dir := worldDir(t)
	n := &node{dir: dir, address: freeAddress(t)}
	config := "log: {level: error}\nfrequency: {verification: {all: \"\"}, marketing: {all: \"\"}}\npolicies: {notification: {retry: [1s, 5s]}}\n" +
		"providers: {log: {type: log, print: false, delay: 5ms}}\nchannels: {log: {providers: [log]}}\ndelay: {slot: 10m, lead: 10s}\n"
	if err := os.WriteFile(filepath.Join(dir, "config.yaml"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	n.start(t)
	t.Cleanup(func() { n.stop(t, syscall.SIGTERM) })
	db, err := sql.Open("mysql", socketDSN(t, dir))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	ctx, cancel := context.WithTimeout(context.Background(), length)
	defer cancel()
	var accepted, refused atomic.Int64
	load := soakLoad(ctx, n.url(), rate, &accepted, &refused)
	out, err := os.Create(defaultTo(os.Getenv("SOAK_OUT"), filepath.Join(t.TempDir(), "soak.csv")))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	fmt.Fprintln(out, "minute,accepted,refused,"+strings.Join(sampleNames, ","))
	var samples []sample
	every := max(length/120, time.Second)
	for began := time.Now(); ctx.Err() == nil; {
		select {
		case <-time.After(every):
		case <-ctx.Done():
			continue
		}
		s := takeSample(t, n, db)
		samples = append(samples, s)
		fmt.Fprintf(out, "%.1f,%d,%d", time.Since(began).Minutes(), accepted.Load(), refused.Load())
		for _, name := range sampleNames {
			fmt.Fprintf(out, ",%.0f", s[name])
		}
		fmt.Fprintln(out)
	}
	load.Wait()
	t.Logf("%d accepted in %v (%.0f/s), %d refused", accepted.Load(), length, float64(accepted.Load())/length.Seconds(), refused.Load())
	if float64(accepted.Load()) < 0.9*float64(rate)*length.Seconds() {
		t.Errorf("it was not at the speed that was asked for")
	}
	// The first tenth fills caches and pools.
	samples = samples[len(samples)/10:]
	third := len(samples) / 3
	for _, name := range sampleNames {
		first, last := mean(samples[:third], name), mean(samples[len(samples)-third:], name)
		growth := (last - first) / max(first, 1)
		t.Logf("%-16s first third %12.0f, last third %12.0f, %+.1f %%", name, first, last, 100*growth)
		if name == "recorded" { // grows, as it should
			continue
		}
		if allowed := map[string]float64{"database_rss": 0.3, "queue_rows": 1, "queue_bytes": 0.5, "delay_rows": 0.5}[name]; growth > max(allowed, 0.1) && last-first > 20 {
			t.Errorf("%s grows", name)
		}
	}
}

func defaultTo(text, fallback string) string {
	if text == "" {
		return fallback
	}
	return text
}

// socketDSN is how the private database below dir is reached.
func socketDSN(t testing.TB, dir string) string {
	t.Helper()
	cmd := exec.Command(binary, "config", "show")
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v %s", err, out)
	}
	return "root@unix(" + filepath.Join(dir, "data", "mysql", "mysql.sock") + ")/tidings?parseTime=true&interpolateParams=true"
}

type sample map[string]float64

var sampleNames = []string{"rss", "heap", "goroutines", "fds", "connections", "queue_rows", "queue_bytes", "delay_rows", "database_rss", "recorded"}

var gauge = regexp.MustCompile(`(?m)^(process_resident_memory_bytes|go_memstats_heap_inuse_bytes|go_goroutines|process_open_fds|go_sql_open_connections)(?:\{[^}]*\})? (\S+)$`)

func takeSample(t testing.TB, n *node, db *sql.DB) sample {
	t.Helper()
	res, err := http.Get(n.url() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	s := sample{}
	for _, m := range gauge.FindAllStringSubmatch(string(text), -1) {
		v, err := strconv.ParseFloat(m[2], 64)
		if err != nil {
			t.Fatal(err)
		}
		s[map[string]string{
			"process_resident_memory_bytes": "rss", "go_memstats_heap_inuse_bytes": "heap", "go_goroutines": "goroutines", "process_open_fds": "fds", "go_sql_open_connections": "connections",
		}[m[1]]] += v
	}
	query := func(name, text string) {
		var v sql.NullFloat64
		if err := db.QueryRow(text).Scan(&v); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		s[name] = v.Float64
	}
	query("queue_rows", "SELECT (SELECT COUNT(*) FROM t_msg_queue_high) + (SELECT COUNT(*) FROM t_msg_queue_middle) + (SELECT COUNT(*) FROM t_msg_queue_low)")
	query("queue_bytes", "SELECT SUM(data_length + index_length) FROM information_schema.tables WHERE table_schema = 'tidings' AND table_name LIKE 't\\_msg\\_queue%'")
	query("delay_rows", "SELECT SUM(table_rows) FROM information_schema.tables WHERE table_schema = 'tidings' AND table_name LIKE 't\\_msg\\_delay%'")
	query("recorded", "SELECT SUM(tasks) FROM t_stat_hour")
	if pid, err := os.ReadFile(filepath.Join(n.dir, "data", "mysql", "pid")); err == nil {
		if status, err := os.ReadFile("/proc/" + strings.TrimSpace(string(pid)) + "/statm"); err == nil {
			fields := strings.Fields(string(status))
			pages, _ := strconv.ParseFloat(fields[1], 64)
			s["database_rss"] = pages * float64(os.Getpagesize())
		}
	}
	return s
}

func mean(samples []sample, name string) (sum float64) {
	for _, s := range samples {
		sum += s[name]
	}
	return sum / float64(max(len(samples), 1))
}

// soakLoad posts at a pace, over 32 connections.
func soakLoad(ctx context.Context, url string, rate int, accepted, refused *atomic.Int64) *sync.WaitGroup {
	const connections = 32
	var wg sync.WaitGroup
	transport := &http.Transport{MaxIdleConnsPerHost: connections}
	client := &http.Client{Transport: transport, Timeout: 10 * time.Second}
	began := time.Now()
	var number atomic.Int64
	for range connections {
		wg.Go(func() {
			random := rand.New(rand.NewPCG(rand.Uint64(), 0))
			for ctx.Err() == nil {
				n := number.Add(1)
				due := began.Add(time.Duration(n) * time.Second / time.Duration(rate))
				if wait := time.Until(due); wait > 0 {
					time.Sleep(wait)
				}
				more := ""
				switch random.IntN(100) {
				case 0:
					more = fmt.Sprintf(`,"delay":"%ds"`, 15+random.IntN(120))
				case 1:
					more = fmt.Sprintf(`,"request_id":"r-%d"`, n)
				}
				body := fmt.Sprintf(`{"channels":["log"],"to":"+86138%08d","subject":"Your order","text":"It is on its way: %d"%s}`, random.IntN(100_000), n, more)
				res, err := client.Post(url+"/api/messages", "application/json", strings.NewReader(body))
				if err != nil {
					refused.Add(1)
					continue
				}
				io.Copy(io.Discard, res.Body)
				res.Body.Close()
				if res.StatusCode == http.StatusAccepted {
					accepted.Add(1)
				} else {
					refused.Add(1)
				}
			}
			transport.CloseIdleConnections()
		})
	}
	return &wg
}
