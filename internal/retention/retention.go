// Package retention lets what is too old leave: days of the history by their partitions, archived before if that is wished; figures,
// batches and taken submissions in small portions.
package retention

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"tidings/store"
)

// Keeper drops what is too old. One process at a time does, for all of a database: they must agree on what is kept.
type Keeper struct {
	Store *store.Store
	Log   *slog.Logger
	Ages
	ArchiveDir string // where days go before they are dropped; empty: nowhere

	archived map[string]int64 // days that this process has archived and could not drop yet, with their rows
}

// Ages say how long things are kept; 0: for ever.
type Ages struct {
	Record  time.Duration // t_msg_record and t_batch
	Attempt time.Duration // t_msg_attempt
	Submit  time.Duration // rows of t_msg_submit that were accepted or rejected
	Stat    time.Duration // t_stat_hour and t_attempt_hour
}

const (
	every = 10 * time.Minute
	// Of the duty, which is renewed while it is done. Should a second process begin all the same, each step may be repeated.
	lease = time.Minute
	// Somebody reads the table: each try makes everybody else wait for up to a second.
	busyPause = time.Minute
)

// stopped is what t_duty says of a process that was stopped in the middle: neither done nor failed.
const stopped = "stopped in the middle; the next process goes on"

// Run drops what is too old, now and then, until ctx ends.
func (k *Keeper) Run(ctx context.Context) {
	for ctx.Err() == nil {
		err := k.once(ctx)
		rest := every
		if errors.Is(err, store.ErrTableBusy) {
			rest = busyPause
		}
		if err != nil && ctx.Err() == nil {
			k.Log.Warn("cannot let go of what is too old, trying again", "in", rest, "err", err)
		}
		select {
		case <-time.After(rest):
		case <-ctx.Done():
		}
	}
}

// once keeps, unless another process does.
func (k *Keeper) once(ctx context.Context) error {
	owner := k.Store.NewOwner()
	mine, err := k.Store.TakeDuty(ctx, store.DutyRetention, owner, lease)
	if err == nil && !mine {
		return nil
	}
	if mine {
		stop := k.renew(ctx, owner, lease/3)
		err = k.Keep(ctx)
		stop()
	}
	failed := ""
	switch {
	case ctx.Err() != nil:
		failed = stopped
	case err != nil:
		failed = err.Error()
	}
	// After an error, too: who was stopped while it took the duty may have got it.
	leave, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	return errors.Join(err, k.Store.LeaveDuty(leave, store.DutyRetention, owner, failed))
}

// renew keeps the duty the owner's until stop is called.
func (k *Keeper) renew(ctx context.Context, owner string, every time.Duration) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-time.After(every):
			case <-ctx.Done():
				return
			}
			if _, err := k.Store.TakeDuty(ctx, store.DutyRetention, owner, lease); err != nil && ctx.Err() == nil {
				k.Log.Warn("cannot renew the duty of retention", "err", err)
			}
		}
	}()
	return func() { cancel(); <-done }
}

// Keep drops what is too old. What fails does not keep the rest from being dropped.
func (k *Keeper) Keep(ctx context.Context) (failed error) {
	ages := map[string]time.Duration{"t_msg_record": k.Record, "t_msg_attempt": k.Attempt}
	for _, table := range store.HistoryTables {
		if age := ages[table]; age > 0 {
			failed = errors.Join(failed, k.dropDays(ctx, table, age))
		}
	}
	for _, purge := range []struct {
		what string
		age  time.Duration
		do   func(context.Context, time.Duration) (int64, error)
	}{
		{"batches", k.Record, k.Store.PurgeBatches}, {"submissions", k.Submit, k.Store.PurgeSubmitted}, {"figures", k.Stat, k.Store.PurgeStats},
	} {
		if purge.age == 0 {
			continue
		}
		n, err := purge.do(ctx, purge.age)
		if n > 0 {
			k.Log.Debug("forgot what is too old", "what", purge.what, "rows", n)
		}
		failed = errors.Join(failed, err)
	}
	return failed
}

func (k *Keeper) dropDays(ctx context.Context, table string, age time.Duration) error {
	days, failed := k.Store.OldDays(ctx, table, age)
	for _, day := range days {
		err := k.dropDay(ctx, table, day)
		failed = errors.Join(failed, err)
		if errors.Is(err, store.ErrTableBusy) || ctx.Err() != nil {
			break
		}
	}
	return failed
}

func (k *Keeper) dropDay(ctx context.Context, table, day string) error {
	if k.ArchiveDir != "" {
		if err := k.archive(ctx, table, day); err != nil {
			return err
		}
	}
	began := time.Now()
	if err := k.Store.DropDay(ctx, table, day); err != nil {
		return err
	}
	delete(k.archived, table+day)
	k.Log.Info("dropped a day", "table", table, "day", day, "ms", time.Since(began).Milliseconds())
	return nil
}

// archive writes a day's file, unless this process has: the day could not be dropped then. What is only called like it is not believed.
func (k *Keeper) archive(ctx context.Context, table, day string) error {
	there, err := k.Store.CountDay(ctx, table, day)
	if err != nil {
		return err
	}
	if rows, ok := k.archived[table+day]; ok && rows == there {
		return nil
	}
	a, err := write(ctx, k.Store, k.ArchiveDir, table, day)
	if err != nil {
		return err
	}
	if k.archived == nil {
		k.archived = map[string]int64{}
	}
	k.archived[table+day] = a.Rows
	k.Log.Info("archived a day", "table", table, "day", day, "rows", a.Rows, "file", a.Path)
	return nil
}
