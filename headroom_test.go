package main

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/spf13/viper"

	"tidings/store"
)

func TestHeadroom(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 12, 1, 10, 0, 0, 0, time.UTC)
	days := []store.DaySize{
		{Table: "t_msg_record", Day: "p20261101", Rows: 1, Bytes: 1e9},
		{Table: "t_msg_record", Day: "p20261129", Rows: 1, Bytes: 3e9},
		{Table: "t_msg_record", Day: "p20261130", Rows: 1, Bytes: 5e9},
		{Table: "t_msg_attempt", Day: "p20261130", Rows: 1, Bytes: 2e9},
		{Table: "t_msg_record", Day: "p20261201", Rows: 1, Bytes: 1e6},
		{Table: "t_msg_record", Day: "p20261202", Rows: 0, Bytes: 1e6},
	}
	g := growthOf(days, now)
	if g != (growth{bytes: 11_002_000_000, perDay: 5_000_000_000}) {
		t.Errorf("%+v", g)
	}
	for _, c := range []struct {
		keep time.Duration
		free int64
		want store.Finding
	}{
		{90 * 24 * time.Hour, 500e9, store.Finding{Level: store.Fine, What: "room for the history", Detail: "it has 11.0 GB, a day adds about 5.0 GB, so it comes to 450.0 GB; 500.0 GB are free"}},
		{90 * 24 * time.Hour, 400e9, store.Finding{Level: store.Risky, What: "room for the history", Detail: "it has 11.0 GB, a day adds about 5.0 GB, so it comes to 450.0 GB: more than is free (400.0 GB); shorten retention.record, or give it a larger disk"}},
		{90 * 24 * time.Hour, -1, store.Finding{Level: store.Fine, What: "room for the history", Detail: "it has 11.0 GB, a day adds about 5.0 GB, so it comes to 450.0 GB; what is free on the database's machine cannot be seen from here"}},
		{0, 1e6, store.Finding{Level: store.Fine, What: "room for the history", Detail: "it has 11.0 GB, a day adds about 5.0 GB; 1 MB are free"}},
	} {
		if got := g.finding(c.keep, c.free); got != c.want {
			t.Errorf("%v, %d free:\n got %+v\nwant %+v", c.keep, c.free, got, c.want)
		}
	}
	if got := growthOf(nil, now).finding(time.Hour, 5e3); got.Detail != "it has 0 KB; 5 KB are free" {
		t.Errorf("%+v", got)
	}
}

// What the migrator's account drops must be what the other has archived.
func TestMigratorOfAnotherDatabase(t *testing.T) {
	t.Parallel()
	for migrator, ok := range map[string]bool{"m:x@tcp(db:3306)/shop": true, "m:x@tcp(db:3306)/": false, "m:x@tcp(db:3306)/other": false} {
		v := viper.New()
		path := filepath.Join(t.TempDir(), "config.yaml")
		if err := os.WriteFile(path, []byte("mysql: {dsn: \"u:x@tcp(db:3306)/shop\", migrator_dsn: \""+migrator+"\"}\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := loadConfig(v, path); (err == nil) != ok {
			t.Errorf("%s: %v", migrator, err)
		}
	}
}

func TestAges(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]time.Duration{"90d": 2160 * time.Hour, "36h": 36 * time.Hour, "forever": 0, "1h": time.Hour} {
		if got, err := parseAge(text); err != nil || got != want {
			t.Errorf("%s: %v %v", text, got, err)
		}
	}
	for _, text := range []string{"", "90", "0d", "-1d", "5m", "1.5d", "99999d", "never"} {
		if got, err := parseAge(text); err == nil {
			t.Errorf("%q is %v", text, got)
		}
	}
}
