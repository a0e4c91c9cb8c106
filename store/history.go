package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"tidings/internal/id"
)

// HistoryTables are those that grow by days: each day is a partition, named by it (p20261130).
var HistoryTables = []string{"t_msg_record", "t_msg_attempt"}

// historyKeys are their primary keys: rows are read in that order.
var historyKeys = map[string][]string{
	"t_msg_record":  {"msg_id", "channel", "finish_time"},
	"t_msg_attempt": {"msg_id", "channel", "attempt", "create_time"},
}

const (
	sqlDayRows      = "SELECT /* tidings:history-rows */ * FROM %s PARTITION (%s) FORCE INDEX (PRIMARY) WHERE %s ORDER BY %s LIMIT %d"
	sqlDayCount     = "SELECT /* tidings:history-count */ COUNT(*) FROM %s PARTITION (%s)"
	sqlDropDay      = "ALTER /* tidings:history-drop */ TABLE %s DROP PARTITION %s"
	sqlHistorySizes = `SELECT /* tidings:history-sizes */ table_name AS table_name, partition_name AS day, COALESCE(table_rows, 0) AS row_count, COALESCE(data_length + index_length, 0) AS bytes
		FROM information_schema.partitions WHERE table_schema = DATABASE() AND table_name IN ('t_msg_record', 't_msg_attempt') AND partition_name <> 'p_future' ORDER BY table_name, partition_name`
	sqlRestoreLike   = "CREATE /* tidings:restore-create */ TABLE %s LIKE %s"
	sqlRestorePlain  = "ALTER /* tidings:restore-plain */ TABLE %s REMOVE PARTITIONING"
	sqlRestoreRows   = "INSERT /* tidings:restore-rows */ INTO %s (%s) VALUES "
	sqlRestored      = "SELECT /* tidings:restore-count */ COUNT(*) FROM %s"
	sqlPurgeStats    = `DELETE /* tidings:purge-stats */ FROM t_stat_hour WHERE hour < UTC_TIMESTAMP(3) - INTERVAL ? SECOND ORDER BY hour LIMIT ?`
	sqlPurgeAttempts = `DELETE /* tidings:purge-attempt-stats */ FROM t_attempt_hour WHERE hour < UTC_TIMESTAMP(3) - INTERVAL ? SECOND ORDER BY hour LIMIT ?`
	sqlOldBatches    = `SELECT /* tidings:batches-old */ source_id, batch_id, first_msg_id, last_msg_id, create_time FROM t_batch
		WHERE last_msg_id < ? AND (source_id > ? OR (source_id = ? AND batch_id > ?)) ORDER BY source_id, batch_id LIMIT ?`
	sqlPurgeBatch = `DELETE /* tidings:purge-batch */ FROM t_batch WHERE source_id = ? AND batch_id = ? AND last_msg_id = ?`

	historyPage = 2000 // rows that are read in one statement: what is read for long keeps undo from being purged
)

var (
	dayName     = regexp.MustCompile(`^p\d{8}$`)
	restoreName = regexp.MustCompile(`^[A-Za-z0-9_]{1,64}$`)
)

// OldDays lists the partitions of a history table all of whose rows are older than an age, the oldest first.
func (s *Store) OldDays(ctx context.Context, table string, age time.Duration) (days []string, err error) {
	names, err := partitionsOf(ctx, s.db.DB, table)
	if err != nil {
		return nil, public(err)
	}
	for name := range names {
		day, err := time.Parse("p20060102", name)
		if err == nil && !day.AddDate(0, 0, 1).After(s.Now().Add(-age)) {
			days = append(days, name)
		}
	}
	slices.Sort(days)
	return days, nil
}

// CountDay counts a partition's rows.
func (s *Store) CountDay(ctx context.Context, table, day string) (n int64, err error) {
	if err := checkDay(table, day); err != nil {
		return 0, err
	}
	err = s.db.GetContext(ctx, &n, fmt.Sprintf(sqlDayCount, table, day))
	return n, public(err)
}

func checkDay(table, day string) error {
	if historyKeys[table] == nil || !dayName.MatchString(day) {
		return fmt.Errorf("%.64q is no day of a history table", table+" "+day)
	}
	return nil
}

// EachOfDay reads a partition's rows in the order of the primary key. Values are int64, uint64, string, time.Time or nil; they are
// the callee's for the length of the call. Rows that are added meanwhile may be missed.
func (s *Store) EachOfDay(ctx context.Context, table, day string, each func(columns []string, values []any) error) error {
	if err := checkDay(table, day); err != nil {
		return err
	}
	keys := historyKeys[table]
	where, args := "1 = 1", []any(nil)
	for {
		query := fmt.Sprintf(sqlDayRows, table, day, where, strings.Join(keys, ", "), historyPage)
		last, n, err := s.pageOfDay(ctx, query, args, keys, each)
		if err != nil || n < historyPage {
			return err
		}
		where, args = after(keys, last)
	}
}

// after is the condition that rows follow a key.
func after(keys []string, last []any) (where string, args []any) {
	var or []string
	for i := range keys {
		var and []string
		for j := range i {
			and = append(and, keys[j]+" = ?")
			args = append(args, last[j])
		}
		or = append(or, "("+strings.Join(append(and, keys[i]+" > ?"), " AND ")+")")
		args = append(args, last[i])
	}
	return strings.Join(or, " OR "), args
}

func (s *Store) pageOfDay(ctx context.Context, query string, args []any, keys []string, each func([]string, []any) error) (last []any, n int, err error) {
	rows, err := s.db.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, 0, public(err)
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	columns, err := rows.Columns()
	if err != nil {
		return nil, 0, err
	}
	values, into := make([]any, len(columns)), make([]any, len(columns))
	for i := range values {
		into[i] = &values[i]
	}
	for rows.Next() {
		if err := rows.Scan(into...); err != nil {
			return nil, 0, err
		}
		for i, v := range values {
			if text, ok := v.([]byte); ok {
				values[i] = string(text)
			}
		}
		if err := each(columns, values); err != nil {
			return nil, 0, err
		}
		n++
	}
	for _, k := range keys {
		last = append(last, values[slices.Index(columns, k)])
	}
	return last, n, public(rows.Err())
}

// DropDay drops a partition with its rows. ErrTableBusy when somebody reads the table: everybody else waits meanwhile, so it gives up
// after a second. It is no error when the partition is gone already.
func (s *Store) DropDay(ctx context.Context, table, day string) error {
	if err := checkDay(table, day); err != nil {
		return err
	}
	err := s.alter(ctx, fmt.Sprintf(sqlDropDay, table, day))
	if number(err) == erNoPartition {
		return nil
	}
	return err
}

// DaySize is a day of a history table, as the server estimates it.
type DaySize struct {
	Table string `db:"table_name"`
	Day   string `db:"day"`
	Rows  int64  `db:"row_count"`
	Bytes int64  `db:"bytes"`
}

// HistorySizes tells how large the days of the history tables are, about.
func (s *Store) HistorySizes(ctx context.Context) (days []DaySize, err error) {
	err = s.db.SelectContext(ctx, &days, sqlHistorySizes)
	return days, public(err)
}

// PurgeStats forgets figures that are older than an age.
func (s *Store) PurgeStats(ctx context.Context, age time.Duration) (purged int64, err error) {
	for _, query := range []string{sqlPurgeStats, sqlPurgeAttempts} {
		n, err := s.purge(ctx, query, int64(age.Seconds()))
		if purged += n; err != nil {
			return purged, err
		}
	}
	return purged, nil
}

// PurgeBatches forgets batches whose messages were accepted longer ago than an age and have left without a trace: neither waits, nor is
// any a dead letter or in the record.
func (s *Store) PurgeBatches(ctx context.Context, age time.Duration) (purged int64, err error) {
	const page = 500
	before := id.First(s.Now().Add(-age))
	for last := (Campaign{}); ; {
		var old []Campaign
		if err := s.db.SelectContext(ctx, &old, sqlOldBatches, before, last.SourceID, last.SourceID, last.BatchID, page); err != nil {
			return purged, public(err)
		}
		for _, c := range old {
			_, counts, err := s.Campaign(ctx, c.SourceID, c.BatchID)
			if err != nil && !errors.Is(err, ErrNotFound) {
				return purged, err
			}
			if len(counts) > 0 || err != nil {
				continue
			}
			n, err := affected(s.db.ExecContext(ctx, sqlPurgeBatch, c.SourceID, c.BatchID, c.Last))
			if purged += int64(n); err != nil {
				return purged, public(err)
			}
		}
		if len(old) < page {
			return purged, nil
		}
		last = old[page-1]
	}
}

// MakeRestoreTable makes an empty table with the columns of a history table, for rows that come back from an archive. ErrExists.
func (s *Store) MakeRestoreTable(ctx context.Context, name, like string) error {
	if historyKeys[like] == nil || !restoreName.MatchString(name) {
		return fmt.Errorf("%.64q is no name for a table like %.64q: letters, digits and underscores", name, like)
	}
	_, err := s.ddl.ExecContext(ctx, fmt.Sprintf(sqlRestoreLike, name, like))
	if number(err) == erTableExists {
		return fmt.Errorf("table %s %w", name, ErrExists)
	}
	if err == nil {
		_, err = s.ddl.ExecContext(ctx, fmt.Sprintf(sqlRestorePlain, name))
	}
	return public(err)
}

// InsertRestored inserts rows into a table that MakeRestoreTable made.
func (s *Store) InsertRestored(ctx context.Context, name string, columns []string, values [][]any) error {
	if !restoreName.MatchString(name) || slices.ContainsFunc(columns, func(c string) bool { return !restoreName.MatchString(c) }) {
		return errors.New("the archive has names that are no names of columns")
	}
	r := rows{query: fmt.Sprintf(sqlRestoreRows, name, "`"+strings.Join(columns, "`, `")+"`"), group: "(" + strings.Repeat("?,", len(columns)-1) + "?)", n: len(values)}
	for _, row := range values {
		r.args = append(r.args, row...)
	}
	_, err := s.db.ExecContext(ctx, r.text(), r.args...)
	return public(err)
}

// CountRestored counts the rows of a table that MakeRestoreTable made.
func (s *Store) CountRestored(ctx context.Context, name string) (n int64, err error) {
	if !restoreName.MatchString(name) {
		return 0, sql.ErrNoRows
	}
	err = s.db.GetContext(ctx, &n, fmt.Sprintf(sqlRestored, name))
	return n, public(err)
}
