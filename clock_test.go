package main

import (
	"context"
	"database/sql"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tidings/internal/localdb"
)

// startDBAt runs a private server whose own clock and time zone are as the environment says (libfaketime).
func startDBAt(t *testing.T, env ...string) *localdb.Server {
	t.Helper()
	libs, err := filepath.Glob("/usr/lib/*/faketime/libfaketimeMT.so.1")
	if err != nil || len(libs) == 0 {
		t.Fatal("libfaketime is missing: apt-get install -y libfaketime (make test does)")
	}
	env = append(env, "LD_PRELOAD="+libs[0], "FAKETIME_DONT_FAKE_MONOTONIC=1", "DONT_FAKE_MONOTONIC=1")
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	s, err := localdb.Start(ctx, localdb.Config{Dir: worldDir(t), BufferPool: "32M", RedoLog: "16M", Relaxed: true, Env: env})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	return s
}

// The database's clock is an hour ahead of the process's, or behind it, or both are asked around a change to summer time in a server
// whose time zone has one: nothing is sent early by the database's clock, and nothing late.
func TestClocks(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		env  []string
		zone string // of the server
	}{
		{name: "the process an hour behind", env: []string{"FAKETIME=+1h"}},
		{name: "the process an hour ahead", env: []string{"FAKETIME=-1h"}},
		{name: "Asia/Shanghai", env: []string{"FAKETIME=+0", "TZ=Asia/Shanghai"}, zone: "CST"},
		{name: "Europe/Berlin into summer", env: []string{"FAKETIME=@2027-03-28 01:59:50", "TZ=Europe/Berlin"}, zone: "CET"},
		{name: "Europe/Berlin out of summer", env: []string{"FAKETIME=@2027-10-31 02:59:50", "TZ=Europe/Berlin"}, zone: "CE"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			db := startDBAt(t, c.env...)
			dir := worldDir(t)
			p := startTidings(t, dir, freeAddress(t), "mysql: {dsn: \""+db.DSN("tidings")+"\"}\ndelay: {slot: 10s, lead: 2s}\n")
			view := openDB(t, db)
			var zone string
			if err := view.QueryRow("SELECT @@system_time_zone").Scan(&zone); err != nil || !strings.HasPrefix(zone, c.zone) {
				t.Fatalf("the server's time zone is %s (%v)", zone, err)
			}
			now := clockOf(t, view)
			const n = 40
			dues := map[string]time.Time{}
			for i := range n {
				due := now.Add(time.Second + time.Duration(i)*500*time.Millisecond).Truncate(time.Millisecond)
				body := fmt.Sprintf(`{"channels":["log"],"to":"x","text":"hi","send_at":"%s"}`, due.In(time.FixedZone("", 2*3600)).Format(time.RFC3339Nano))
				status, answer, _ := post(p.url, body)
				if status != 202 {
					t.Fatalf("%d %v", status, answer)
				}
				dues[answer["msg_id"].(string)] = due
			}
			await(t, "all sent", time.Minute, func() bool { return count(t, view, "t_msg_record WHERE status = 3") == n })
			rows, err := view.Query("SELECT msg_id, due_time, finish_time FROM t_msg_record")
			if err != nil {
				t.Fatal(err)
			}
			defer rows.Close()
			for rows.Next() {
				var (
					id            string
					due, finished time.Time
				)
				if err := rows.Scan(&id, &due, &finished); err != nil {
					t.Fatal(err)
				}
				if !due.Equal(dues[id]) {
					t.Errorf("%s is due %v, was sent in for %v", id, due, dues[id])
				}
				// finish_time is by the process's copy of the database's clock, which is behind by up to a round trip: on a machine that is busy
				// with other tests, milliseconds. What this test is about is off by an hour.
				if late := finished.Sub(due); late < -100*time.Millisecond || late > 2*time.Second {
					t.Errorf("%s was sent %v after it was due", id, late)
				}
			}
			if err := rows.Err(); err != nil {
				t.Fatal(err)
			}
			if got := len(sends(t, dir)); got != n {
				t.Errorf("%d sends of %d messages", got, n)
			}
		})
	}
}

func clockOf(t *testing.T, db *sql.DB) (now time.Time) {
	t.Helper()
	if err := db.QueryRow("SELECT UTC_TIMESTAMP(3)").Scan(&now); err != nil {
		t.Fatal(err)
	}
	return now
}
