package store_test

import (
	"context"
	"os"
	"os/exec"
	"testing"
	"time"

	"tidings/internal/id"
	"tidings/internal/testdb"
	"tidings/store"
)

func TestNodesAreDifferent(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	a, b := testdb.Open(t, store.Config{DSN: dsn}), testdb.Open(t, store.Config{DSN: dsn})
	if a.Node() == b.Node() {
		t.Fatalf("both are node %d", a.Node())
	}
	if n := count(t, raw(t, dsn), "SELECT COUNT(*) FROM t_node WHERE lease_end > UTC_TIMESTAMP(3) AND pid > 0"); n != 2 {
		t.Fatalf("%d living nodes", n)
	}
	if ta, tb := id.Time(enqueue(t, a, message("")).MsgID), time.Now(); tb.Sub(ta).Abs() > time.Minute {
		t.Fatalf("an id says %v, it is %v", ta, tb)
	}
	if first, second := a.NewOwner(), a.NewOwner(); first == second {
		t.Fatalf("two claims have one owner, %s", first)
	}
}

// A closed store's number is free at once, and its next holder's boot is another: owners never repeat.
func TestNodeNumberIsReused(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	open := func() (*store.Store, string) {
		s, err := store.Open(context.Background(), store.Config{DSN: dsn, Observe: testdb.Observe})
		if err != nil {
			t.Fatal(err)
		}
		return s, s.NewOwner()
	}
	a, first := open()
	last := enqueue(t, a, message("")).MsgID
	node := a.Node()
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	b, second := open()
	defer b.Close()
	if b.Node() != node || first == second {
		t.Fatalf("node %d then %d, owners %s then %s", node, b.Node(), first, second)
	}
	if next := enqueue(t, b, message("")).MsgID; next <= last {
		t.Fatalf("id %d after %d", next, last)
	}
}

// A process that was stopped for longer than its lease, or was taken for dead, takes another number, and its ids do not meet the new holder's.
func TestLostNodeLease(t *testing.T) {
	t.Parallel()
	for name, lost := range map[string]string{
		"another's": "holder = 'another', boot = boot + 1, lease_end = UTC_TIMESTAMP(3) + INTERVAL 1 HOUR",
		"nobody's":  "holder = ''",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dsn := testdb.New(t)
			s := testdb.Open(t, store.Config{DSN: dsn, NodeLease: 1200 * time.Millisecond})
			old := s.Node()
			run(t, raw(t, dsn), "UPDATE t_node SET "+lost+" WHERE node = ?", old)
			deadline := time.After(10 * time.Second)
			for s.Node() == old {
				select {
				case <-deadline:
					t.Fatal("the store goes on with a number that is not its own")
				case <-time.After(10 * time.Millisecond):
				}
			}
			got := enqueue(t, s, message(""))
			if id.Node(got.MsgID) == old {
				t.Fatal("an id was made with the lost number")
			}
		})
	}
}

// A process that was killed does not count until its lease ends, once there is another on its machine.
func TestDeadNodesAreBuried(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	db := raw(t, dsn)
	living := testdb.Open(t, store.Config{DSN: dsn})
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	killed := exec.Command("true")
	if err := killed.Run(); err != nil {
		t.Fatal(err)
	}
	for _, n := range []struct {
		node int
		host string
		pid  int
	}{
		{100, host, killed.Process.Pid},
		{101, host, os.Getpid()},               // of the same container, before it was restarted
		{102, host, 1},                         // alive
		{103, host + "-2", killed.Process.Pid}, // on another machine
	} {
		run(t, db, "INSERT INTO t_node (node, boot, holder, host, pid, version, serves, start_time, lease_end) VALUES (?, 1, CONCAT('n', ?), ?, ?, 'v', 1, UTC_TIMESTAMP(3), UTC_TIMESTAMP(3) + INTERVAL 1 MINUTE)", n.node, n.node, n.host, n.pid)
	}
	const said = "SELECT GROUP_CONCAT(CONCAT(node, ' ', status) ORDER BY node SEPARATOR ', ') FROM v_nodes WHERE node BETWEEN 100 AND 103"
	testdb.Open(t, store.Config{DSN: dsn, Command: true})
	if got := text(t, db, said); got != "100 alive, 101 alive, 102 alive, 103 alive" {
		t.Errorf("after a command: %s", got)
	}
	s := testdb.Open(t, store.Config{DSN: dsn})
	if got := text(t, db, said); got != "100 left, 101 left, 102 alive, 103 alive" {
		t.Errorf("after a start: %s", got)
	}
	c, err := s.Control(t.Context())
	if err != nil || c.Nodes != 4 {
		t.Errorf("%d processes share the work, want 4 (%v)", c.Nodes, err)
	}
	if n := count(t, db, "SELECT COUNT(*) FROM t_node WHERE node = 100 AND lease_end > UTC_TIMESTAMP(3)"); n != 1 {
		t.Error("the number may be taken while its ids may still be somebody's")
	}
	if n := count(t, db, "SELECT COUNT(*) FROM v_nodes WHERE node = ? AND status = 'alive'", living.Node()); n != 1 {
		t.Error("a store of the same process is not alive any more")
	}
}
