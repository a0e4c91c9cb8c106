package store

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"strings"
	"time"
)

// packet is a transaction that goes to the server in one piece: on a busy small machine a round trip costs about as much as
// the work itself. Its statements are run until one fails; what the transaction guards must therefore fail with an error.
//
// Two traps come with it. An error leaves the transaction open on its connection, and the next BEGIN there would commit
// half of it: run ends every failed packet with a ROLLBACK on the same connection, or closes it. And a row count is known
// to us only after the COMMIT: a guarded statement is followed by expect, which fails on the server before it.
type packet struct {
	statements []string
	args       []any
}

func (p *packet) add(statement string, args ...any) {
	p.statements = append(p.statements, statement)
	p.args = append(p.args, args...)
}

// expect fails the packet unless the statement before it changed n rows: a subquery with two rows where one is wanted is
// error 1242 in a SET, where a DO would only warn.
func (p *packet) expect(n int) {
	p.add("SET /* tidings:expect */ @tidings_ok = IF(ROW_COUNT() = ?, 1, (SELECT 1 UNION SELECT 2))", n)
}

// errNotSent marks a failure before anything of a packet reached the server.
var errNotSent = errors.New("not sent")

// mayBeCommitted tells whether a packet that failed may have been carried out all the same: only the server's own word, or
// that nothing was sent, rules it out.
func mayBeCommitted(err error) bool {
	return !errors.Is(err, errNotSent) && (number(err) == 0 || isLost(err))
}

const rollbackTime = 2 * time.Second

// run sends a packet's statements as one transaction. An error says that nothing was written, unless isLost: then nobody
// knows.
func (s *Store) run(ctx context.Context, p *packet) error {
	return s.onPacketConn(ctx, s.packets, func(conn *sql.Conn) error {
		_, err := conn.ExecContext(ctx, "BEGIN; "+s.text(p)+"; COMMIT", p.args...)
		return err
	})
}

// runOn is run for a packet that is made by reads inside its transaction. No packet: the transaction ends with them.
func (s *Store) runOn(ctx context.Context, make func(context.Context, queryer) (*packet, error)) error {
	return s.onPacketConn(ctx, s.packets, func(conn *sql.Conn) error {
		if _, err := conn.ExecContext(ctx, "BEGIN /* tidings:packet-begin */"); err != nil {
			return errors.Join(errNotSent, err)
		}
		p, err := make(ctx, conn)
		if err != nil {
			return errors.Join(errNotSent, err)
		}
		if p == nil {
			_, err = conn.ExecContext(ctx, "ROLLBACK /* tidings:packet-rollback */")
			return err
		}
		_, err = conn.ExecContext(ctx, s.text(p)+"; COMMIT", p.args...)
		return err
	})
}

func (s *Store) text(p *packet) string {
	statements := p.statements
	if s.sabotage != nil {
		statements = s.sabotage(statements)
	}
	return strings.Join(statements, "; ")
}

// onPacketConn runs a transaction on a held connection, and leaves none open there when it fails.
func (s *Store) onPacketConn(ctx context.Context, pool *sql.DB, do func(*sql.Conn) error) (err error) {
	conn, err := pool.Conn(ctx)
	if err != nil {
		return errors.Join(errNotSent, err)
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	if err := do(conn); err != nil {
		back, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTime)
		defer cancel()
		if _, failed := conn.ExecContext(back, "ROLLBACK /* tidings:packet-rollback */"); failed != nil {
			conn.Raw(func(any) error { return driver.ErrBadConn }) // the pool must not use it again
		}
		if errors.Is(err, driver.ErrBadConn) { // the driver's word for a connection that was found dead before anything was written
			return errors.Join(errNotSent, err)
		}
		return err
	}
	return nil
}
