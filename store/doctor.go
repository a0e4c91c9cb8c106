package store

import (
	"context"
	"fmt"
	"strings"
	"time"

	"tidings/internal/msg"
)

// Finding is one thing that Diagnose looked at.
type Finding struct {
	Level  Level
	What   string
	Detail string
}

// Level is how much a finding matters.
type Level uint8

// The levels.
const (
	Fine  Level = iota
	Risky       // works, with a risk that the detail names
	Wrong       // does not work, or loses messages
)

const (
	sqlDoctorVariables = `SELECT /* tidings:doctor-variables */ VERSION() AS version, @@session.time_zone AS time_zone, @@session.sql_mode AS sql_mode,
		@@innodb_flush_log_at_trx_commit AS flush, @@log_bin AS log_bin, @@sync_binlog AS sync_binlog, @@max_allowed_packet AS packet,
		@@binlog_format AS binlog_format, UTC_TIMESTAMP(3) AS now`
	// MySQL 8 calls the variable transaction_isolation, MariaDB before 11 tx_isolation; SHOW takes both without an error.
	sqlDoctorIsolation = `SHOW /* tidings:doctor-isolation */ SESSION VARIABLES WHERE variable_name IN ('tx_isolation', 'transaction_isolation')`
	sqlDoctorDead      = `SELECT /* tidings:doctor-dead */ COUNT(*) FROM (SELECT 1 FROM t_msg_dead LIMIT 10000) AS some`
	sqlDoctorNodes     = `SELECT /* tidings:doctor-nodes */ COUNT(*) FROM t_node WHERE lease_end > UTC_TIMESTAMP(3) AND holder <> '' AND serves = 1`
	sqlDoctorAlarms    = `SELECT /* tidings:doctor-alarms */ level, last_error FROM t_alarm_level WHERE last_error <> ''`
	sqlDoctorDuties    = `SELECT /* tidings:doctor-duties */ duty, last_error FROM t_duty WHERE last_error <> '' ORDER BY duty`
	sqlDoctorDays      = `SELECT /* tidings:doctor-days */ COUNT(*) FROM information_schema.partitions
		WHERE table_schema = DATABASE() AND table_name = ? AND partition_name > ? AND partition_name <> 'p_future'`
)

type doctorVariables struct {
	Version      string    `db:"version"`
	TimeZone     string    `db:"time_zone"`
	SQLMode      string    `db:"sql_mode"`
	Flush        int       `db:"flush"`
	LogBin       bool      `db:"log_bin"`
	SyncBinlog   int       `db:"sync_binlog"`
	Packet       int       `db:"packet"`
	BinlogFormat string    `db:"binlog_format"`
	Now          time.Time `db:"now"`
}

// Diagnose looks at the server and at the queue, in plain words. An error says that it could not look.
func (s *Store) Diagnose(ctx context.Context) ([]Finding, error) {
	var v doctorVariables
	if err := s.db.GetContext(ctx, &v, sqlDoctorVariables); err != nil {
		return nil, public(err)
	}
	f := serverFindings(v, time.Now())
	var name, isolation string
	if err := s.db.QueryRowContext(ctx, sqlDoctorIsolation).Scan(&name, &isolation); err != nil {
		return nil, public(err)
	}
	f = append(f, judge(isolation == "READ-COMMITTED", Wrong, "isolation of our sessions", isolation, "claims would lock gaps and hold producers up; something between us and the server changes SET SESSION"))
	queue, err := s.queueFindings(ctx, v.Now)
	return append(f, queue...), err
}

// serverFindings judges a server's variables.
func serverFindings(v doctorVariables, local time.Time) []Finding {
	offset := v.Now.Sub(local).Round(time.Millisecond)
	f := []Finding{
		versionFinding(v.Version),
		judge(v.TimeZone == "+00:00", Wrong, "time zone of our sessions", v.TimeZone, "times would be off by hours"),
		judge(strings.Contains(v.SQLMode, "STRICT_TRANS_TABLES"), Wrong, "strict mode", v.SQLMode, "values that do not fit would be cut instead of refused"),
		judge(offset.Abs() < 2*time.Second, Risky, "clock of the database against this machine's", offset.String(), "times in answers are the database's; callers' clocks may disagree"),
		judge(v.Flush == 1, Risky, "innodb_flush_log_at_trx_commit", fmt.Sprint(v.Flush), "a crash of the machine loses up to a second of accepted messages; set it to 1"),
		judge(v.Packet >= minPacket, Wrong, "max_allowed_packet", fmt.Sprint(v.Packet), fmt.Sprintf("messages of 1 MiB need %d", minPacket)),
	}
	if v.LogBin {
		f = append(f,
			judge(v.SyncBinlog == 1, Risky, "sync_binlog", fmt.Sprint(v.SyncBinlog), "after a crash of the machine a replica may miss messages; set it to 1"),
			judge(v.BinlogFormat != "STATEMENT", Wrong, "binlog_format", v.BinlogFormat, "READ COMMITTED needs ROW or MIXED"))
	}
	return f
}

func judge(ok bool, level Level, what, value, trouble string) Finding {
	if ok {
		return Finding{Fine, what, value}
	}
	return Finding{level, what, value + ": " + trouble}
}

func versionFinding(version string) Finding {
	var major, minor int
	fmt.Sscanf(version, "%d.%d", &major, &minor)
	switch {
	case strings.Contains(version, "TiDB"):
		return Finding{Wrong, "version", version + ": TiDB reads SKIP LOCKED but does not lock as MySQL does, so tasks would be sent twice"}
	case strings.Contains(version, "MariaDB"):
		return judge(major > 10 || (major == 10 && minor >= 6), Wrong, "version", version, "MariaDB 10.6 or later is needed")
	}
	return judge(major >= 8, Wrong, "version", version, "MySQL 8 or later is needed")
}

func (s *Store) queueFindings(ctx context.Context, now time.Time) (f []Finding, err error) {
	today := now.UTC().Format("p20060102")
	for _, table := range HistoryTables {
		var days int
		if err := s.db.GetContext(ctx, &days, sqlDoctorDays, table, today); err != nil {
			return f, public(err)
		}
		f = append(f, judge(days >= 2, Risky, "days made ahead in "+table, fmt.Sprint(days), "history goes into the last partition, which cannot be dropped by day; does `tidings serve` run?"))
	}
	var nodes int
	if err := s.db.GetContext(ctx, &nodes, sqlDoctorNodes); err != nil {
		return f, public(err)
	}
	f = append(f, judge(nodes > 0, Risky, "processes that serve", fmt.Sprint(nodes), "nobody sends: `tidings serve` does not run on this database"))
	var dead int
	if err := s.db.GetContext(ctx, &dead, sqlDoctorDead); err != nil {
		return f, public(err)
	}
	f = append(f, judge(dead == 0, Risky, "dead letters (counted up to 10,000)", fmt.Sprint(dead), "they wait for a person: tidings dead list says why"))
	var alarms []struct {
		Level string `db:"level"`
		Error string `db:"last_error"`
	}
	if err := s.db.SelectContext(ctx, &alarms, sqlDoctorAlarms); err != nil {
		return f, public(err)
	}
	for _, a := range alarms {
		f = append(f, Finding{Risky, "alarms of level " + a.Level, "not delivered: " + a.Error})
	}
	more, err := s.controlFindings(ctx)
	if f = append(f, more...); err != nil {
		return f, err
	}
	waiting, err := s.Survey(ctx)
	if err != nil {
		return f, err
	}
	var oldest time.Duration
	for _, w := range waiting {
		if w.Status == msg.Ready {
			oldest = max(oldest, now.Sub(w.Next))
		}
	}
	oldest = oldest.Round(time.Millisecond)
	f = append(f, judge(oldest < time.Minute, Risky, "oldest task that is due", oldest.String(), "the queue is behind: is a provider slow, or a channel without one?"))
	scheduled, err := s.delayFindings(ctx, now)
	return append(f, scheduled...), err
}

// controlFindings tells what is paused, and whether tables can be changed: what only they see who may change a view is asked for.
func (s *Store) controlFindings(ctx context.Context) (f []Finding, err error) {
	var text string
	if err := s.ddl.QueryRowContext(ctx, sqlViewText).Scan(&text); err != nil {
		return nil, public(err)
	}
	if text == "" {
		f = append(f, Finding{Wrong, "rights to change tables", "the account has not those of tidings_migrator (deploy/grants.sql): days of the history and delay tables are not made; set mysql.migrator_dsn"})
	}
	c, err := s.Control(ctx)
	if err != nil {
		return f, err
	}
	for _, l := range c.Lanes {
		if l.Paused {
			f = append(f, Finding{Risky, "lane " + l.Name, fmt.Sprintf("paused by %s: %s; tidings lane resume %s", l.By, l.Reason, l.Name)})
		}
	}
	for _, p := range c.Providers {
		if p.Paused {
			f = append(f, Finding{Risky, "provider " + p.Provider, fmt.Sprintf("paused by %s: %s; tidings provider resume %s", p.By, p.Reason, p.Provider)})
		}
	}
	var duties []struct {
		Duty  string `db:"duty"`
		Error string `db:"last_error"`
	}
	if err := s.db.SelectContext(ctx, &duties, sqlDoctorDuties); err != nil {
		return f, public(err)
	}
	for _, d := range duties {
		f = append(f, Finding{Risky, "duty " + d.Duty, "not done to its end: " + d.Error})
	}
	return f, nil
}

func (s *Store) delayFindings(ctx context.Context, now time.Time) (f []Finding, err error) {
	err = s.onRing(ctx, func(r *ring) error {
		open := 0
		for i := range r.slots {
			if sl := &r.slots[i]; sl.State == slotOpen && sl.To.After(now) {
				open++
			}
		}
		late, err := s.LateScheduled(ctx)
		if err != nil {
			return err
		}
		late = late.Round(time.Millisecond)
		f = []Finding{
			judge(open > 0, Risky, "slots that take scheduled messages", fmt.Sprint(open), "all of them wait in t_msg_delay_far; has `tidings serve` run for a few seconds?"),
			judge(late == 0, Risky, "oldest scheduled task that was not moved to its queue in time", late.String(), "nobody moves scheduled tasks: is `tidings serve` running?"),
		}
		return nil
	})
	return f, public(err)
}
