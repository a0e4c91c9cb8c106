package store

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jmoiron/sqlx"

	"tidings/internal/id"
)

// nodeLease is this process's hold on a node number.
type nodeLease struct {
	holder string
	number atomic.Uint32
	boot   atomic.Uint32
	claims atomic.Uint64 // owners made so far
	cancel context.CancelFunc
	done   sync.WaitGroup
}

// Node is the node number that this process holds.
func (s *Store) Node() uint16 { return uint16(s.node.number.Load()) }

// NewOwner names a claim. No two claims ever have the same name: not on two nodes, not after a restart.
func (s *Store) NewOwner() string {
	return fmt.Sprintf("%d.%d.%d", s.node.number.Load(), s.node.boot.Load(), s.node.claims.Add(1))
}

const (
	sqlFreeNode = `SELECT /* tidings:node-free */ node FROM t_node WHERE lease_end <= UTC_TIMESTAMP(3)
		ORDER BY node LIMIT 1 FOR UPDATE SKIP LOCKED`
	sqlTakeNode = `UPDATE /* tidings:node-take */ t_node SET boot = boot + 1, holder = ?, host = ?, pid = ?, version = ?, serves = ?,
		start_time = UTC_TIMESTAMP(3), lease_end = UTC_TIMESTAMP(3) + INTERVAL ? MICROSECOND
		WHERE node = ? AND lease_end <= UTC_TIMESTAMP(3)`
	sqlNewNode = `INSERT /* tidings:node-new */ INTO t_node (node, boot, holder, host, pid, version, serves, start_time, lease_end)
		SELECT COALESCE(MAX(node) + 1, 0), 1, ?, ?, ?, ?, ?, UTC_TIMESTAMP(3), UTC_TIMESTAMP(3) + INTERVAL ? MICROSECOND FROM t_node`
	sqlMyNode = `SELECT /* tidings:node-mine */ node, boot, start_time, lease_end, UTC_TIMESTAMP(3) AS now FROM t_node WHERE holder = ?`
	// An earlier end is never taken back: ids up to it may have been made before the database's clock stepped back.
	sqlRenewNode = `UPDATE /* tidings:node-renew */ t_node
		SET lease_end = GREATEST(lease_end + INTERVAL 1000 MICROSECOND, UTC_TIMESTAMP(3) + INTERVAL ? MICROSECOND)
		WHERE holder = ? AND lease_end > UTC_TIMESTAMP(3)`
	sqlNeighbours  = `SELECT /* tidings:node-neighbours */ holder, pid FROM t_node WHERE host = ? AND holder <> '' AND lease_end > UTC_TIMESTAMP(3)`
	sqlBuryNode    = `UPDATE /* tidings:node-bury */ t_node SET holder = '' WHERE holder = ?`
	sqlReleaseNode = `UPDATE /* tidings:node-release */ t_node SET holder = '', lease_end = LEAST(lease_end, GREATEST(?, UTC_TIMESTAMP(3))) WHERE holder = ?`
)

// Node is a process that holds a node number, or held it.
type Node struct {
	Node     uint16    `db:"node"`
	Boot     uint32    `db:"boot"`
	Holder   string    `db:"holder"` // empty: nobody
	Host     string    `db:"host"`
	PID      int       `db:"pid"`
	Version  string    `db:"version"`
	Serves   bool      `db:"serves"` // it claims and sends; commands do not
	Start    time.Time `db:"start_time"`
	LeaseEnd time.Time `db:"lease_end"`
}

// Alive tells whether a process holds the number at an instant of the database's time.
func (n *Node) Alive(now time.Time) bool { return n.Holder != "" && n.LeaseEnd.After(now) }

const sqlNodes = `SELECT /* tidings:nodes */ node, boot, holder, host, pid, version, serves, start_time, lease_end FROM t_node ORDER BY node`

// Nodes lists the processes that hold node numbers, or held them.
func (s *Store) Nodes(ctx context.Context) (nodes []Node, err error) {
	err = s.db.SelectContext(ctx, &nodes, sqlNodes)
	return nodes, public(err)
}

type nodeRow struct {
	Node     uint16    `db:"node"`
	Boot     uint32    `db:"boot"`
	Start    time.Time `db:"start_time"`
	LeaseEnd time.Time `db:"lease_end"`
	Now      time.Time `db:"now"`
}

// process begins the holders of this process: in a container, the one before had the same process id.
var process = rand.Text()[:8]

// takeNode leases a node number whose earlier lease is over, or a new one.
func (s *Store) takeNode(ctx context.Context) error {
	holder := process + rand.Text()
	host, _ := os.Hostname()
	lease := s.cfg.NodeLease.Microseconds()
	for range retries {
		err := s.tx(ctx, func(tx *sqlx.Tx) error {
			var free []uint16
			if err := tx.SelectContext(ctx, &free, sqlFreeNode); err != nil {
				return err
			}
			var err error
			if len(free) == 0 {
				_, err = tx.ExecContext(ctx, sqlNewNode, holder, host, os.Getpid(), s.cfg.Version, !s.cfg.Command, lease)
			} else {
				_, err = tx.ExecContext(ctx, sqlTakeNode, holder, host, os.Getpid(), s.cfg.Version, !s.cfg.Command, lease, free[0])
			}
			return err
		})
		if isDuplicate(err) { // another process took the next number at the same time
			continue
		}
		if err != nil {
			return public(err)
		}
		row, err := s.myNode(ctx, holder)
		if err != nil {
			return err
		}
		if row.Node > id.MaxNode {
			return fmt.Errorf("all %d node numbers are leased", id.MaxNode+1)
		}
		s.node.holder = holder
		s.node.number.Store(uint32(row.Node))
		s.node.boot.Store(row.Boot)
		s.ids.Take(row.Node, row.Start, row.LeaseEnd)
		return nil
	}
	return errors.New("every number was taken by another process")
}

// buryNodes takes the numbers of this machine's dead processes from them: until their leases end they would count among those that
// share the rates. Another machine may have the same name, so one that lives may be buried. It takes another number then, at its next renewal; its
// old one is nobody's until the lease ends, so its ids stay its own.
func (s *Store) buryNodes(ctx context.Context) error {
	host, err := os.Hostname()
	if err != nil {
		return err
	}
	var neighbours []struct {
		Holder string `db:"holder"`
		PID    int    `db:"pid"`
	}
	if err := s.db.SelectContext(ctx, &neighbours, sqlNeighbours, host); err != nil {
		return public(err)
	}
	for _, n := range neighbours {
		if strings.HasPrefix(n.Holder, process) || n.PID != os.Getpid() && !dead(n.PID) {
			continue
		}
		if _, err := s.db.ExecContext(ctx, sqlBuryNode, n.Holder); err != nil {
			return public(err)
		}
	}
	return nil
}

// dead tells whether there is certainly no process with an id.
func dead(pid int) bool {
	p, err := os.FindProcess(pid)
	return err == nil && errors.Is(p.Signal(syscall.Signal(0)), os.ErrProcessDone)
}

func (s *Store) myNode(ctx context.Context, holder string) (row nodeRow, err error) {
	err = s.db.GetContext(ctx, &row, sqlMyNode, holder)
	if err == nil {
		s.clock.set(row.Now)
	}
	return row, public(err)
}

// renewNode extends the lease and sets the clock. A lease that ran out is not revived: another process may have the
// number by now, so a new one is taken.
func (s *Store) renewNode(ctx context.Context) error {
	res, err := s.db.ExecContext(ctx, sqlRenewNode, s.cfg.NodeLease.Microseconds(), s.node.holder)
	if err != nil {
		return public(err)
	}
	if n, err := res.RowsAffected(); err != nil || n == 0 {
		s.log.Warn("the lease on the node number ran out, taking another", "node", s.Node())
		return s.takeNode(ctx)
	}
	row, err := s.myNode(ctx, s.node.holder)
	if err != nil {
		return err
	}
	s.ids.Extend(row.LeaseEnd)
	return nil
}

func (s *Store) releaseNode(ctx context.Context) error {
	_, err := s.db.ExecContext(ctx, sqlReleaseNode, s.ids.Drop(), s.node.holder)
	return public(err)
}

// start renews the lease in the background until stop.
func (n *nodeLease) start(s *Store) {
	ctx, cancel := context.WithCancel(context.Background())
	n.cancel = cancel
	n.done.Go(func() {
		every := time.NewTicker(s.cfg.NodeLease / 12)
		defer every.Stop()
		for {
			select {
			case <-every.C:
				call, cancel := context.WithTimeout(ctx, s.cfg.NodeLease/6)
				if err := s.renewNode(call); err != nil && ctx.Err() == nil {
					s.log.Warn("cannot renew the lease on the node number", "err", err)
				}
				cancel()
			case <-ctx.Done():
				return
			}
		}
	})
}

func (n *nodeLease) stop() {
	n.cancel()
	n.done.Wait()
}
