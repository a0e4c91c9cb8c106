package store

import (
	"context"
	"database/sql/driver"
	"errors"
	"io"
	"net"

	"github.com/go-sql-driver/mysql"

	"tidings/internal/id"
)

// Errors that callers tell apart with errors.Is.
var (
	ErrNotFound    = errors.New("not found")
	ErrConflict    = errors.New("the request id was used for another message")
	ErrUnavailable = errors.New("the database is not available")
	ErrOverloaded  = errors.New("the intake is behind: less urgent messages are refused for now")
	ErrBusy        = errors.New("the database is held up by locks")
	ErrTooLarge    = errors.New("the message is larger than the database takes")
	ErrNewer       = errors.New("the database was made by a newer version of tidings")
	ErrOlder       = errors.New("the database was made by an older version of tidings")
)

// Server error numbers. MySQL's and MariaDB's agree on these.
const (
	erTooManyConnections = 1040
	erNoDatabase         = 1049
	erShutdown           = 1053
	erNoSuchTable        = 1146
	erTableExists        = 1050
	erPacketTooLarge     = 1153
	erDuplicateKey       = 1062
	erLockWait           = 1205
	erDeadlock           = 1213
	erReadOnly           = 1290
	erInterrupted        = 1317
	erPartitionOrder     = 1493
	erNoPartition        = 1507
	erSamePartition      = 1517
	erKilled             = 1927 // MariaDB: the connection was killed
	erSnapshot           = 1020 // MariaDB 11.6+: the row changed since the transaction's snapshot
	erDiskFull           = 1021
	erTableFull          = 1114
	erSeveralRows        = 1242 // a packet's guard
)

func number(err error) uint16 {
	var e *mysql.MySQLError
	if errors.As(err, &e) {
		return e.Number
	}
	return 0
}

// isGuard tells whether a packet failed by its own guard: what it was made of has changed.
func isGuard(err error) bool { return number(err) == erSeveralRows }

func isDuplicate(err error) bool { return number(err) == erDuplicateKey }

// isConflict tells whether the server undid the transaction because of others, and would let it pass the next time.
func isConflict(err error) bool { return number(err) == erDeadlock || number(err) == erSnapshot }

// isLockWait tells whether somebody has held a lock for longer than innodb_lock_wait_timeout.
func isLockWait(err error) bool { return number(err) == erLockWait }

// mustStartAgain tells whether the server undid the transaction, or a statement of it, for a reason that passes.
func mustStartAgain(err error) bool { return isConflict(err) || isLockWait(err) }

// isLost tells whether the connection or the server went away. Whether a COMMIT was carried out is then unknown.
func isLost(err error) bool {
	switch number(err) {
	case erTooManyConnections, erShutdown, erReadOnly, erInterrupted, erKilled, erDiskFull, erTableFull:
		return true
	}
	var timeout net.Error
	return errors.Is(err, driver.ErrBadConn) || errors.Is(err, mysql.ErrInvalidConn) || errors.Is(err, io.EOF) ||
		errors.Is(err, io.ErrUnexpectedEOF) || errors.As(err, &timeout)
}

// public turns a driver's error into one that callers can act on.
func public(err error) error {
	switch {
	case err == nil:
		return nil
	case number(err) == erPacketTooLarge || errors.Is(err, mysql.ErrPktTooLarge):
		return errors.Join(ErrTooLarge, err)
	case mustStartAgain(err) || isGuard(err):
		return errors.Join(ErrBusy, err)
	case isLost(err) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, id.ErrNoLease):
		return errors.Join(ErrUnavailable, err)
	}
	return err
}
