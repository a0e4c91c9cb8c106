package main

import (
	"database/sql"
	"fmt"
	"net/http"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"
)

func openRoot(t testing.TB, dsn string) (*sql.DB, error) {
	db, err := sql.Open("mysql", dsn+"?multiStatements=true&interpolateParams=true&time_zone=%27%2B00%3A00%27")
	if err == nil {
		t.Cleanup(func() { db.Close() })
	}
	return db, err
}

// A day of HISTORY_ROWS rows is archived and dropped while messages come in at HISTORY_RATE a second: neither those who hand them in nor
// those who record them wait for more than a second longer. What comes back from the archive is what was there.
func TestDayDroppedUnderLoad(t *testing.T) {
	t.Parallel()
	rows, rate := rounds(t, "HISTORY_ROWS", 20_000), rounds(t, "HISTORY_RATE", 200)
	db := startDB(t)
	dir, address := worldDir(t), freeAddress(t)
	config := "mysql: {dsn: \"" + db.DSN("tidings") + "\"}\nlog: {level: info}\nproviders: {log: {type: log, print: false}}\nretention: {record: %s}\narchive_dir: archive\n"
	startTidings(t, dir, address, fmt.Sprintf(config, "forever")).stop(t, 15)
	root, err := openRoot(t, db.DSN("tidings"))
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now().UTC()
	old := now.AddDate(0, 0, -100)
	set(t, root, fmt.Sprintf("ALTER TABLE t_msg_record REORGANIZE PARTITION p%[1]s INTO (PARTITION p%[2]s VALUES LESS THAN ('%[3]s'), PARTITION p%[1]s VALUES LESS THAN ('%[4]s'))",
		now.Format("20060102"), old.Format("20060102"), old.AddDate(0, 0, 1).Format(time.DateOnly), now.AddDate(0, 0, 1).Format(time.DateOnly)))
	for first := 1; first <= rows; first += 100_000 {
		set(t, root, fmt.Sprintf(`INSERT INTO t_msg_record (msg_id, channel, source_id, request_id, category, priority, receiver, params, attempt_limit, due_time, next_time, expire_time, create_time, modify_time, finish_time)
			SELECT seq, 31, 'shop', CONCAT('order-', seq), 'notification', 'middle', CONCAT('r', seq), CONCAT('{"order": "', seq, '", "name": "Ann Example"}'), 1, t, t, t, t, t, t FROM (SELECT seq, '%s 12:00:00' AS t FROM seq_%d_to_%d) AS s`,
			old.Format(time.DateOnly), first, min(first+99_999, rows)))
	}
	set(t, root, "CREATE TABLE t_before LIKE t_msg_record; ALTER TABLE t_before REMOVE PARTITIONING; INSERT INTO t_before SELECT * FROM t_msg_record PARTITION (p"+old.Format("20060102")+")")
	p := startTidings(t, dir, address, fmt.Sprintf(config, "90d"))
	view := openDB(t, db)
	dropped := func() bool {
		return count(t, view, "information_schema.partitions WHERE table_schema = 'tidings' AND partition_name = 'p"+old.Format("20060102")+"' AND table_name = 't_msg_record'") == 0
	}
	stop := make(chan struct{})
	var (
		load    sync.WaitGroup
		mu      sync.Mutex
		slowest time.Duration
		posts   int
	)
	began := time.Now()
	for client := range 16 {
		load.Go(func() {
			pace := time.NewTicker(16 * time.Second / time.Duration(rate))
			defer pace.Stop()
			for {
				select {
				case <-stop:
					return
				case <-pace.C:
				}
				at := time.Now()
				status, answer, _ := post(p.url, fmt.Sprintf(`{"channels":["log"],"to":"load %d","text":"hi"}`, client))
				if status != http.StatusAccepted {
					t.Errorf("%d %v", status, answer)
					return
				}
				mu.Lock()
				slowest, posts = max(slowest, time.Since(at)), posts+1
				mu.Unlock()
			}
		})
	}
	await(t, "the day to be dropped", 15*time.Minute, dropped)
	took := time.Since(began)
	time.Sleep(time.Second) // of load after it
	close(stop)
	load.Wait()
	await(t, "all to be recorded", 30*time.Second, func() bool { return count(t, view, "t_msg_record") == posts })
	var lag float64
	if err := view.QueryRow("SELECT MAX(TIMESTAMPDIFF(MICROSECOND, due_time, modify_time)) / 1e6 FROM t_msg_record").Scan(&lag); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(dir, "archive", "t_msg_record.*"))
	if err != nil || len(files) != 1 {
		t.Fatalf("%v %v", files, err)
	}
	out, err := command(t, dir, "archive", "restore", files[0], "--table", "t_back")
	if err != nil {
		t.Fatalf("%v %s", err, out)
	}
	if n := count(t, view, "(SELECT * FROM t_before EXCEPT SELECT * FROM t_back) AS d") + count(t, view, "(SELECT * FROM t_back EXCEPT SELECT * FROM t_before) AS d"); n != 0 {
		t.Errorf("%d rows came back changed", n)
	}
	t.Logf("%d rows archived and dropped within %v under %d messages (%.0f/s): slowest POST %v, longest from due to recorded %.2f s",
		rows, took.Round(time.Second), posts, float64(posts)/took.Seconds(), slowest.Round(time.Millisecond), lag)
	if slowest > 2*time.Second || lag > 2 {
		t.Errorf("POST took up to %v, and a task up to %.2f s to be recorded", slowest, lag)
	}
}

// command runs the binary in a directory with its configuration.
func command(t testing.TB, dir string, args ...string) (string, error) {
	t.Helper()
	cmd := exec.Command(binary, args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	return string(out), err
}
