package store_test

import (
	"context"
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

// A process that was stopped for longer than its lease takes another number, and its ids do not meet the new holder's.
func TestLostNodeLease(t *testing.T) {
	t.Parallel()
	dsn := testdb.New(t)
	s := testdb.Open(t, store.Config{DSN: dsn, NodeLease: 1200 * time.Millisecond})
	old := s.Node()
	db := raw(t, dsn)
	run(t, db, "UPDATE t_node SET holder = 'another', boot = boot + 1, lease_end = UTC_TIMESTAMP(3) + INTERVAL 1 HOUR WHERE node = ?", old)
	deadline := time.After(10 * time.Second)
	for s.Node() == old {
		select {
		case <-deadline:
			t.Fatal("the store goes on with a number that is another's")
		case <-time.After(10 * time.Millisecond):
		}
	}
	got := enqueue(t, s, message(""))
	if id.Node(got.MsgID) == old {
		t.Fatal("an id was made with the lost number")
	}
}
