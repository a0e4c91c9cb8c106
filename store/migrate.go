package store

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"strings"
	"time"

	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
)

//go:embed migrations/*.sql
var migrations embed.FS

// Migrate makes the database when it is missing and brings its tables up to this binary's version. Several processes may
// call it at once, and every step may be repeated after a crash. A database that a newer version made is left alone:
// ErrNewer. It returns how many migrations it applied.
func Migrate(ctx context.Context, cfg Config) (applied int, err error) {
	cfg.setDefaults()
	if cfg.MigratorDSN != "" {
		cfg.DSN = cfg.MigratorDSN
	}
	if err := createDatabase(ctx, cfg); err != nil {
		return 0, fmt.Errorf("make the database: %w", public(err))
	}
	driverCfg, err := driverConfig(cfg.DSN)
	if err != nil {
		return 0, err
	}
	db := sql.OpenDB(&connector{cfg: driverCfg, observe: cfg.Observe})
	defer db.Close()
	provider, err := migrationProvider(db, cfg.Log)
	if err != nil {
		return 0, err
	}
	current, err := schemaVersion(ctx, db)
	if err != nil {
		return 0, public(err)
	}
	if known := newest(provider); current > known {
		return 0, newer(current, known)
	}
	results, err := provider.Up(ctx)
	if err != nil {
		return 0, fmt.Errorf("migrate: %w", err)
	}
	brief, err := openDDL(cfg)
	if err != nil {
		return 0, err
	}
	defer brief.Close()
	err = ensurePartitions(ctx, brief, cfg.Log)
	if isLockWait(err) { // somebody reads history: rows go into the last partition meanwhile, and upkeep tries again
		cfg.Log.Warn("cannot make the coming days' partitions now", "err", err)
		err = nil
	}
	return len(results), err
}

// Prepare makes the tables of an empty database as Migrate does, and changes none that are there: whoever only looks in must not take
// the tables away from under processes of an older version. ErrOlder says that Migrate is wanted, ErrNewer that it would not help.
func Prepare(ctx context.Context, cfg Config) error {
	cfg.setDefaults()
	driverCfg, err := driverConfig(cfg.DSN)
	if err != nil {
		return err
	}
	db := sql.OpenDB(&connector{cfg: driverCfg, observe: cfg.Observe})
	defer db.Close()
	provider, err := migrationProvider(db, cfg.Log)
	if err != nil {
		return err
	}
	current, err := schemaVersion(ctx, db)
	switch known := newest(provider); {
	case number(err) == erNoDatabase, err == nil && current == 0:
		_, err = Migrate(ctx, cfg)
		return err
	case err != nil:
		return fmt.Errorf("connect to the database: %w", public(err))
	case current > known:
		return newer(current, known)
	case current == known:
		return nil
	default:
		return olderUnlessMigrating(ctx, cfg, db, current, known)
	}
}

// olderUnlessMigrating waits for a migration that is under way, such as that of a server just started, by taking part in it.
func olderUnlessMigrating(ctx context.Context, cfg Config, db *sql.DB, current, known int64) error {
	var migrating int
	err := db.QueryRowContext(ctx, "SELECT /* tidings:migrating */ COUNT(*) FROM t_schema_lock WHERE locked = 1 AND lease_expires_at > NOW(6)").Scan(&migrating)
	switch {
	case err != nil:
		return public(err)
	case migrating > 0:
		_, err = Migrate(ctx, cfg)
		return err
	}
	return fmt.Errorf("%w: its schema is version %d, this binary's is %d; `tidings migrate` brings it up to date, and so does `tidings serve`", ErrOlder, current, known)
}

func migrationProvider(db *sql.DB, log *slog.Logger) (*goose.Provider, error) {
	files, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return nil, err
	}
	// The lease is what the next process waits when one was killed in the middle.
	locker, err := lock.NewMySQLTableLocker(lock.WithTableName("t_schema_lock"), lock.WithTableLeaseDuration(6*time.Second),
		lock.WithTableHeartbeatInterval(2*time.Second), lock.WithTableLockTimeout(200*time.Millisecond, 600))
	if err != nil {
		return nil, err
	}
	return goose.NewProvider(goose.DialectMySQL, db, files, goose.WithTableName("t_schema_version"), goose.WithLocker(locker),
		goose.WithDisableGlobalRegistry(true), goose.WithSlog(log.With("part", "migrate")))
}

func createDatabase(ctx context.Context, cfg Config) error {
	driverCfg, err := driverConfig(cfg.DSN)
	if err != nil {
		return err
	}
	name := driverCfg.DBName
	driverCfg.DBName = ""
	db := sql.OpenDB(&connector{cfg: driverCfg, observe: cfg.Observe})
	defer db.Close()
	var found int
	err = db.QueryRowContext(ctx, "SELECT /* tidings:database-exists */ COUNT(*) FROM information_schema.schemata WHERE schema_name = ?", name).Scan(&found)
	if err != nil || found > 0 { // a user without the right to create databases may still use one
		return err
	}
	_, err = db.ExecContext(ctx, "CREATE /* tidings:database-create */ DATABASE IF NOT EXISTS `"+strings.ReplaceAll(name, "`", "``")+
		"` CHARACTER SET utf8mb4 COLLATE utf8mb4_bin")
	return err
}

// schemaVersion is the newest migration that the database has had; 0: none.
func schemaVersion(ctx context.Context, db *sql.DB) (current int64, err error) {
	err = db.QueryRowContext(ctx, "SELECT /* tidings:schema-version */ COALESCE(MAX(version_id), 0) FROM t_schema_version WHERE is_applied = 1").Scan(&current)
	if number(err) == erNoSuchTable {
		return 0, nil
	}
	return current, err
}

// newest is the last migration that this binary has.
func newest(provider *goose.Provider) int64 {
	sources := provider.ListSources()
	return sources[len(sources)-1].Version
}

func newer(current, known int64) error {
	return fmt.Errorf("%w: its schema is version %d, this binary knows %d", ErrNewer, current, known)
}

const (
	sqlPartitions = `SELECT /* tidings:partitions */ partition_name FROM information_schema.partitions
		WHERE table_schema = DATABASE() AND table_name = ? AND partition_name IS NOT NULL`
	partitionsAhead = 7 // days
)

// EnsurePartitions splits the coming days off the last partition of the history tables. It is cheap when nothing is
// missing, and may run on several nodes at once.
func (s *Store) EnsurePartitions(ctx context.Context) error {
	return ensurePartitions(ctx, s.ddl, s.log)
}

// ensurePartitions wants sessions that give up soon (openDDL): while an ALTER waits for somebody's long read to end, every insert into
// the table waits behind it.
func ensurePartitions(ctx context.Context, db *sql.DB, log *slog.Logger) error {
	var now time.Time
	if err := db.QueryRowContext(ctx, "SELECT /* tidings:now */ UTC_TIMESTAMP(3)").Scan(&now); err != nil {
		return public(err)
	}
	for _, table := range HistoryTables {
		made, err := splitDays(ctx, db, table, now)
		if err != nil {
			return fmt.Errorf("partitions of %s: %w", table, public(err))
		}
		if made > 0 {
			log.Debug("split days off the last partition", "table", table, "days", made)
		}
	}
	return nil
}

// splitDays makes today's partition and the next days', as far as no later one exists: days are only ever split off the
// end, so a gap (the process stood still for a week) is filled by one wide partition.
func splitDays(ctx context.Context, db *sql.DB, table string, now time.Time) (made int, err error) {
	have, err := partitionsOf(ctx, db, table)
	if err != nil {
		return 0, err
	}
	latest := ""
	for name := range have {
		if name != "p_future" {
			latest = max(latest, name)
		}
	}
	var parts []string
	for day := range partitionsAhead + 1 {
		from := now.UTC().Truncate(24*time.Hour).AddDate(0, 0, day)
		if name := from.Format("p20060102"); name > latest {
			parts = append(parts, fmt.Sprintf("PARTITION %s VALUES LESS THAN ('%s')", name, from.AddDate(0, 0, 1).Format(time.DateTime)))
		}
	}
	if len(parts) == 0 {
		return 0, nil
	}
	_, err = db.ExecContext(ctx, "ALTER /* tidings:partition-split */ TABLE "+table+" REORGANIZE PARTITION p_future INTO ("+
		strings.Join(parts, ", ")+", PARTITION p_future VALUES LESS THAN (MAXVALUE))")
	if n := number(err); n == erSamePartition || n == erPartitionOrder { // another node was faster
		return 0, nil
	}
	return len(parts), err
}

func partitionsOf(ctx context.Context, db *sql.DB, table string) (names map[string]bool, err error) {
	rows, err := db.QueryContext(ctx, sqlPartitions, table)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	names = map[string]bool{}
	for rows.Next() {
		var name string
		if err := rows.Scan(&name); err != nil {
			return nil, err
		}
		names[name] = true
	}
	return names, rows.Err()
}
