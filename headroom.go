package main

import (
	"context"
	"fmt"
	"path/filepath"
	"syscall"
	"time"

	"tidings/store"
)

const (
	// smallMachine is what a machine of 2 cores that runs everything accepts, sends and records a second, and half of it the average of an hour
	// that leaves room for its peaks (docs/capacity.md).
	smallMachine = 4000
	weekDays     = 7
)

// headroom tells how much room is left: of the disk, for the history that is to come, and of the machine.
func headroom(ctx context.Context, st *store.Store, cfg *Config) ([]store.Finding, error) {
	days, err := st.HistorySizes(ctx)
	if err != nil {
		return nil, err
	}
	ages, err := cfg.ages()
	if err != nil {
		return nil, err
	}
	growth := growthOf(days, st.Now())
	f := []store.Finding{growth.finding(ages.Record, freeDisk(cfg))}
	hours, _, err := st.Stats(ctx, store.StatFilter{Since: st.Now().Add(-weekDays * 24 * time.Hour), Until: st.Now(), By: []string{"hour"}})
	if err != nil {
		return nil, err
	}
	var busiest *store.StatGroup
	for i := range hours {
		if busiest == nil || hours[i].Tasks() > busiest.Tasks() {
			busiest = &hours[i]
		}
	}
	if busiest == nil {
		return f, nil
	}
	rate := float64(busiest.Tasks()) / time.Hour.Seconds()
	busy := store.Finding{
		Level: store.Fine, What: "busiest hour of the week",
		Detail: fmt.Sprintf("%.1f tasks a second in the hour from %s UTC; two cores that run everything do about %d", rate, busiest.Hour.Format("2006-01-02 15:04"), smallMachine),
	}
	if rate > smallMachine/2 {
		busy.Level, busy.Detail = store.Risky, busy.Detail+": more than half of that leaves no room for peaks; docs/capacity.md says what to add"
	}
	return append(f, busy), nil
}

// growth is what the history has and what a day adds to it.
type growth struct {
	bytes, perDay int64
}

// growthOf averages the days of the last week that are over.
func growthOf(days []store.DaySize, now time.Time) (g growth) {
	today := now.UTC().Format("p20060102")
	weekAgo := now.UTC().AddDate(0, 0, -weekDays).Format("p20060102")
	seen := map[string]bool{}
	var week int64
	for _, d := range days {
		g.bytes += d.Bytes
		if d.Day >= weekAgo && d.Day < today && d.Rows > 0 {
			week += d.Bytes
			seen[d.Day] = true
		}
	}
	if len(seen) > 0 {
		g.perDay = week / int64(len(seen))
	}
	return g
}

// finding compares what is to come with what is free; free < 0: nobody knows.
func (g growth) finding(keep time.Duration, free int64) store.Finding {
	f := store.Finding{Level: store.Fine, What: "room for the history", Detail: fmt.Sprintf("it has %s", size(g.bytes))}
	if g.perDay > 0 {
		f.Detail += fmt.Sprintf(", a day adds about %s", size(g.perDay))
	}
	if g.perDay > 0 && keep > 0 {
		whole := g.perDay * int64(keep/(24*time.Hour))
		f.Detail += fmt.Sprintf(", so it comes to %s", size(whole))
		if free >= 0 && max(whole-g.bytes, 0) > free {
			f.Level = store.Risky
			f.Detail += fmt.Sprintf(": more than is free (%s); shorten retention.record, or give it a larger disk", size(free))
			return f
		}
	}
	if free >= 0 {
		f.Detail += fmt.Sprintf("; %s are free", size(free))
	} else {
		f.Detail += "; what is free on the database's machine cannot be seen from here"
	}
	return f
}

// freeDisk is what is free for the private database, which may lie behind a link; -1: the database is elsewhere.
func freeDisk(cfg *Config) int64 {
	var fs syscall.Statfs_t
	if cfg.MySQL.DSN != "" || syscall.Statfs(filepath.Join(cfg.DataDir, "mysql"), &fs) != nil {
		return -1
	}
	return int64(fs.Bavail) * fs.Bsize
}

func size(bytes int64) string {
	switch {
	case bytes >= 1e9:
		return fmt.Sprintf("%.1f GB", float64(bytes)/1e9)
	case bytes >= 1e6:
		return fmt.Sprintf("%.0f MB", float64(bytes)/1e6)
	}
	return fmt.Sprintf("%.0f KB", float64(bytes)/1e3)
}
