package retention

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"tidings/internal/testdb"
	"tidings/store"
)

// What takes longer than the lease stays its process's; and when that has left, or was stopped while it took the duty, another gets it.
func TestRenew(t *testing.T) {
	t.Parallel()
	s := testdb.Open(t, store.Config{})
	k := &Keeper{Store: s, Log: slog.New(slog.DiscardHandler)}
	ctx := context.Background()
	take := func(owner string, lease time.Duration) bool {
		t.Helper()
		mine, err := s.TakeDuty(ctx, store.DutyRetention, owner, lease)
		if err != nil {
			t.Fatal(err)
		}
		return mine
	}
	a, b := s.NewOwner(), s.NewOwner()
	if !take(a, 300*time.Millisecond) {
		t.Fatal("not to be had")
	}
	stop := k.renew(ctx, a, 50*time.Millisecond)
	for end := time.Now().Add(time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if take(b, time.Minute) {
			t.Fatal("another got it while it was being done")
		}
	}
	stop()
	if err := s.LeaveDuty(ctx, store.DutyRetention, a, ""); err != nil {
		t.Fatal(err)
	}
	stopping, cancel := context.WithCancel(ctx)
	cancel()
	if err := k.once(stopping); err == nil {
		t.Error("done by one who was stopped")
	}
	if !take(b, time.Minute) {
		t.Error("it was kept by one who was stopped")
	}
}
