package store

import (
	"context"
	"database/sql/driver"
)

// fullConn is what the MySQL driver's connections can do; database/sql finds each ability by its interface.
type fullConn interface {
	driver.Conn
	driver.ConnBeginTx
	driver.ExecerContext
	driver.QueryerContext
	driver.Pinger
	driver.SessionResetter
	driver.Validator
	driver.NamedValueChecker
}

// observed shows each statement to Config.Observe before it is sent.
type observed struct {
	fullConn
	observe func(string)
}

func (c observed) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	c.observe(query)
	return c.fullConn.ExecContext(ctx, query, args)
}

func (c observed) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	c.observe(query)
	return c.fullConn.QueryContext(ctx, query, args)
}
