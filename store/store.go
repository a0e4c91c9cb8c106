// Package store holds every SQL statement of Tidings: accepting messages, claiming and settling tasks, and the upkeep around
// them. It knows nothing of HTTP, of channels' meanings or of policies.
//
// All of it is safe for concurrent use. Any transaction may be chosen as a deadlock's victim, so each is a function that can
// be run again. Every statement carries its name in a comment, for the slow log and for a test that parses each of them.
package store

import (
	"cmp"
	"context"
	"crypto/sha256"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/jmoiron/sqlx"
	"golang.org/x/sync/semaphore"

	"tidings/internal/id"
	"tidings/internal/metrics"
	"tidings/internal/msg"
)

// Config says how the store works. Zero values mean the defaults named.
type Config struct {
	DSN            string        // go-sql-driver's notation; the database name defaults to "tidings"
	MigratorDSN    string        // of an account that may make, change and drop tables and views; default DSN
	Connections    int           // most open connections; default 32
	Lease          time.Duration // how long a claim holds a task; default 60 s
	IdempotencyTTL time.Duration // how long a key is kept after the due time; default 24 h
	Timeout        time.Duration // how long a caller of Enqueue or a query waits at most; default 5 s
	NodeLease      time.Duration // how long a node number is held without renewal; default 60 s
	Version        string        // the program's version, for t_node
	Command        bool          // the process claims and sends nothing: it takes no share of rates
	Delay          DelayConfig   // scheduled sends
	Log            *slog.Logger
	Metrics        *metrics.Metrics // nil: nothing is counted
	// Wake is called after a commit that made tasks of a lane and channel ready, with the time (the database's) that the first of them
	// is due. It must not block.
	Wake func(lane msg.Lane, channel msg.Channel, due time.Time)
	// Reserve, when set, grants free sending slots for tasks that are about to be accepted: they are inserted as claimed
	// already, and handed over after the commit. nil means that they are to be queued. It must not block.
	Reserve func(lane msg.Lane, channel msg.Channel, n int) Reservation
	// Observe, when set, sees the text of every statement before it is sent. It must not block.
	Observe func(statement string)
}

// Store is a connection pool on one database and the node that this process is in it.
type Store struct {
	cfg      Config
	log      *slog.Logger
	db       *sqlx.DB
	packets  *sql.DB // sessions that take several statements at once; only run uses them
	moves    *sql.DB // the same for the delay tables: they wait a second for locks of rows and of tables
	ddl      *sql.DB // makes, changes and drops tables and views, and waits a second for them
	packet   int     // max_allowed_packet of the server, bytes
	clock    clock
	ids      *id.Generator
	node     nodeLease
	enqueues *intake
	quoted   [32]*intake // by channel: messages with quotas
	// waitingBytes bounds the messages whose callers wait; alone those that are accepted by themselves.
	waitingBytes, alone, heldAlone, aloneQuoted *semaphore.Weighted
	background                                  sync.WaitGroup // goroutines of acceptAlone, and of adopt
	orphans                                     orphanage
	callers                                     mirror[callers]
	templates                                   templates
	limits                                      limiter
	scheduled                                   *intake // messages that wait in the delay tables
	ring                                        mirror[*ring]
	turns                                       atomic.Uint64 // counts statements into slots: shards take them in turn
	turned                                      atomic.Pointer[turned]
	earliest                                    atomic.Pointer[time.Time] // when the first task in a delay table is due; nil: none is known
	held                                        sync.Map                  // keyName → time.Time: keys that were found locked, until when they go alone

	figures figures

	closing context.Context // ends when Close gives work in the background up
	giveUp  context.CancelFunc

	sabotage func([]string) []string // a test's way to make a packet fail at any statement
}

const sqlOwnNode = "SELECT /* tidings:node-own */ COUNT(*) FROM t_node WHERE holder = ?"

const (
	// Seconds: innodb_lock_wait_timeout of every session, and of those for packets: what waits in one holds others up.
	lockWait       = 2
	packetLockWait = 1
	minPacket      = 8 << 20
	retries        = 10
	// packetConnections is how many packets may be under way: both kinds of batches, and callers of EnqueueBatch.
	packetConnections = 32
	moveConnections   = 2                // one moves tasks, one turns the ring
	closeTime         = 5 * time.Second  // for work in the background when the store closes
	dbDeadline        = 10 * time.Second // for a statement that nobody waits for
)

// Open connects to a database that Migrate has prepared, and takes a node number in it.
func Open(ctx context.Context, cfg Config) (*Store, error) {
	cfg.setDefaults()
	s, err := connect(ctx, cfg)
	if err != nil {
		return nil, err
	}
	if err := s.takeNode(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("take a node number: %w", err), s.closePools())
	}
	if err := s.sameDatabase(ctx); err != nil {
		return nil, errors.Join(err, s.releaseNode(ctx), s.closePools())
	}
	s.callers.load, s.limits.quotas.load, s.ring.load = s.loadCallers, s.loadQuotas, s.loadRing
	if err := errors.Join(s.callers.refresh(ctx), s.limits.quotas.refresh(ctx), s.ring.refresh(ctx)); err != nil { // copies are there from the first request on
		return nil, errors.Join(fmt.Errorf("read sources, quotas and delay slots: %w", err), s.releaseNode(ctx), s.closePools())
	}
	if !cfg.Command {
		if err := s.buryNodes(ctx); err != nil {
			s.log.Warn("cannot tell which processes of this machine are dead: they count as alive until their leases end", "err", err)
		}
	}
	s.limits.shared = map[[sha256.Size]byte]count{}
	s.node.start(s)
	s.startEnqueues()
	for name, pool := range map[string]*sql.DB{"queries": s.db.DB, "packets": s.packets, "moves": s.moves} {
		cfg.Metrics.Pool(name, pool)
	}
	return s, nil
}

func (cfg *Config) setDefaults() {
	setDefault(&cfg.Connections, 32)
	setDefault(&cfg.Lease, time.Minute)
	setDefault(&cfg.IdempotencyTTL, 24*time.Hour)
	setDefault(&cfg.Timeout, 5*time.Second)
	setDefault(&cfg.NodeLease, time.Minute)
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Reserve == nil {
		cfg.Reserve = func(msg.Lane, msg.Channel, int) Reservation { return nil }
	}
	if cfg.Wake == nil {
		cfg.Wake = func(msg.Lane, msg.Channel, time.Time) {}
	}
	cfg.Delay.setDefaults()
}

func setDefault[T comparable](value *T, fallback T) {
	var zero T
	if *value == zero {
		*value = fallback
	}
}

// connect opens the pool and learns what the server allows.
func connect(ctx context.Context, cfg Config) (*Store, error) {
	driverCfg, err := driverConfig(cfg.DSN)
	if err != nil {
		return nil, err
	}
	s := &Store{cfg: cfg, log: cfg.Log}
	probe := sqlx.NewDb(sql.OpenDB(&connector{cfg: driverCfg, observe: cfg.Observe}), "mysql")
	defer probe.Close()
	if err := probe.GetContext(ctx, &s.packet, "SELECT /* tidings:packet */ @@max_allowed_packet"); err != nil {
		return nil, fmt.Errorf("connect to the database: %w", public(err))
	}
	if s.packet < minPacket {
		return nil, fmt.Errorf("max_allowed_packet of the database is %d bytes; messages of 1 MiB need %d: SET GLOBAL max_allowed_packet = 67108864",
			s.packet, minPacket)
	}
	driverCfg.MaxAllowedPacket = s.packet
	s.db = sqlx.NewDb(sql.OpenDB(&connector{cfg: driverCfg, observe: cfg.Observe}), "mysql")
	s.db.SetMaxOpenConns(cfg.Connections)
	s.db.SetMaxIdleConns(cfg.Connections)
	s.db.SetConnMaxIdleTime(10 * time.Minute)
	several := driverCfg.Clone()
	several.MultiStatements = true
	several.Params["innodb_lock_wait_timeout"] = fmt.Sprint(packetLockWait)
	s.packets = sql.OpenDB(&connector{cfg: several, observe: cfg.Observe})
	s.packets.SetMaxOpenConns(packetConnections)
	s.packets.SetMaxIdleConns(packetConnections)
	s.packets.SetConnMaxIdleTime(10 * time.Minute)
	brief := several.Clone()
	brief.Params["lock_wait_timeout"] = fmt.Sprint(packetLockWait)
	s.moves = sql.OpenDB(&connector{cfg: brief, observe: cfg.Observe})
	s.moves.SetMaxOpenConns(moveConnections)
	s.moves.SetMaxIdleConns(moveConnections)
	s.moves.SetConnMaxIdleTime(10 * time.Minute)
	if s.ddl = s.moves; cfg.MigratorDSN != "" {
		if s.ddl, err = openDDL(cfg); err != nil {
			return nil, errors.Join(err, s.closePools())
		}
	}
	s.ids = id.NewGenerator(s.Now)
	s.closing, s.giveUp = context.WithCancel(context.Background())
	return s, nil
}

// openDDL opens the pool that changes tables with rights of its own. Who waits for a table's last reader holds up everybody that comes
// after, so it gives up after a second.
func openDDL(cfg Config) (*sql.DB, error) {
	brief, err := driverConfig(cmp.Or(cfg.MigratorDSN, cfg.DSN))
	if err != nil {
		return nil, err
	}
	brief.Params["lock_wait_timeout"] = fmt.Sprint(packetLockWait)
	pool := sql.OpenDB(&connector{cfg: brief, observe: cfg.Observe})
	pool.SetMaxOpenConns(moveConnections)
	pool.SetMaxIdleConns(1)
	pool.SetConnMaxIdleTime(time.Minute)
	return pool, nil
}

// sameDatabase makes sure that the migrator's account sees this process's lease: what it drops must be what has been archived.
func (s *Store) sameDatabase(ctx context.Context) error {
	var found int
	if err := s.ddl.QueryRowContext(ctx, sqlOwnNode, s.node.holder).Scan(&found); err != nil {
		return fmt.Errorf("mysql.migrator_dsn: %w", public(err))
	}
	if found == 0 {
		return errors.New("mysql.migrator_dsn leads to another database than mysql.dsn")
	}
	return nil
}

// Close flushes what callers wait for, gives the node number back and closes the pool. Nothing may use the store after it.
func (s *Store) Close() error {
	s.enqueues.Close()
	s.scheduled.Close()
	for _, c := range msg.Channels {
		s.quoted[c].Close()
	}
	timer := time.AfterFunc(closeTime, s.giveUp)
	s.background.Wait()
	timer.Stop()
	s.giveUp()
	s.node.stop()
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	return errors.Join(s.releaseNode(ctx), s.closePools())
}

func (s *Store) closePools() error {
	failed := errors.Join(s.packets.Close(), s.moves.Close(), s.db.Close())
	if s.ddl != nil && s.ddl != s.moves {
		failed = errors.Join(failed, s.ddl.Close())
	}
	return failed
}

// Ping asks the database for a sign of life.
func (s *Store) Ping(ctx context.Context) error { return public(s.db.PingContext(ctx)) }

// Lease is how long a claim holds a task.
func (s *Store) Lease() time.Duration { return s.cfg.Lease }

// Lead is how long before they are due scheduled tasks are in their queue tables.
func (s *Store) Lead() time.Duration { return s.cfg.Delay.Lead }

// driverConfig reads a DSN and sets what the store's statements rely on.
func driverConfig(dsn string) (*mysql.Config, error) {
	cfg, err := mysql.ParseDSN(dsn)
	if err != nil {
		return nil, fmt.Errorf("mysql.dsn is not a DSN like user:password@tcp(127.0.0.1:3306)/tidings: %w", err)
	}
	setDefault(&cfg.DBName, "tidings")
	setDefault(&cfg.Timeout, 3*time.Second)
	setDefault(&cfg.ReadTimeout, 30*time.Second)
	setDefault(&cfg.WriteTimeout, 30*time.Second)
	cfg.ParseTime, cfg.Loc = true, time.UTC
	cfg.InterpolateParams = true
	cfg.ClientFoundRows = false // a guard's row count means rows changed
	cfg.Collation = "utf8mb4_bin"
	cfg.Logger = &mysql.NopLogger{} // what it would print comes back as an error, too
	if cfg.Params == nil {
		cfg.Params = map[string]string{}
	}
	cfg.Params["time_zone"] = "'+00:00'"
	cfg.Params["sql_mode"] = "'STRICT_TRANS_TABLES,NO_ENGINE_SUBSTITUTION'"
	cfg.Params["innodb_lock_wait_timeout"] = fmt.Sprint(lockWait)
	cfg.Params["lock_wait_timeout"] = "10"
	return cfg, nil
}

// connector makes sessions that read committed rows: MySQL and MariaDB name the variable differently, but share the statement.
type connector struct {
	cfg     *mysql.Config
	observe func(string)
}

func (c *connector) Driver() driver.Driver { return mysql.MySQLDriver{} }

func (c *connector) Connect(ctx context.Context) (driver.Conn, error) {
	inner, err := mysql.NewConnector(c.cfg)
	if err != nil {
		return nil, err
	}
	conn, err := inner.Connect(ctx)
	if err != nil {
		return nil, err
	}
	const statement = "SET /* tidings:session */ SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"
	if c.observe != nil {
		c.observe(statement)
		conn = observed{conn.(fullConn), c.observe}
	}
	if _, err := conn.(driver.ExecerContext).ExecContext(ctx, statement, nil); err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// tx runs fn in a transaction, again when the server undid it. fn must be able to run more than once.
func (s *Store) tx(ctx context.Context, fn func(*sqlx.Tx) error) error {
	return s.again(ctx, func() error {
		tx, err := s.db.BeginTxx(ctx, nil)
		if err != nil {
			return err
		}
		if err := fn(tx); err != nil {
			tx.Rollback()
			return err
		}
		return tx.Commit()
	})
}

// again repeats fn while the server undoes it for a conflict with others. A lock that was waited for in vain is not waited
// for again here: the caller knows better what to do meanwhile.
func (s *Store) again(ctx context.Context, fn func() error) error {
	for try := 1; ; try++ {
		err := fn()
		if err == nil || !isConflict(err) || try == retries {
			return err
		}
		s.cfg.Metrics.Retried(number(err))
		select {
		case <-time.After(rand.N(time.Duration(try) * 4 * time.Millisecond)):
		case <-ctx.Done():
			return errors.Join(err, ctx.Err())
		}
	}
}
