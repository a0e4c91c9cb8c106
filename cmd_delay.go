package main

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"tidings/store"
)

func (a *app) delayCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "delay", Short: "Look at scheduled messages", Args: cobra.NoArgs}
	cmd.AddCommand(&cobra.Command{
		Use: "status", Short: "Show the delay tables: slots, what waits by hour, what is due next, and what is late", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withStore(cmd, func(ctx context.Context, st *store.Store) error { return delayStatus(ctx, st, cmd.OutOrStdout()) })
		},
	})
	return cmd
}

const timeForm = "2006-01-02 15:04:05"

func delayStatus(ctx context.Context, st *store.Store, out io.Writer) error {
	status, err := st.DelayStatus(ctx)
	if err != nil {
		return err
	}
	waiting := map[string]store.Scheduled{}
	var (
		total int64
		next  time.Time
	)
	for _, t := range status.Tables {
		waiting[t.Table] = t
		total += t.Tasks
		if !t.Next.IsZero() && (next.IsZero() || t.Next.Before(next)) {
			next = t.Next
		}
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "SLOT\tSTATE\tGENERATION\tFROM (UTC)\tTO (UTC)\tTABLES\tTASKS\tNEXT DUE (UTC)\tTRUNCATED (UTC)")
	for i := range status.Slots {
		row := &status.Slots[i]
		tables := row.Tables()
		var (
			tasks int64
			first time.Time
		)
		for _, name := range tables {
			t := waiting[name]
			tasks += t.Tasks
			if !t.Next.IsZero() && (first.IsZero() || t.Next.Before(first)) {
				first = t.Next
			}
		}
		from, to, generation := row.From.Format(timeForm), row.To.Format(timeForm), fmt.Sprint(row.Generation)
		if row.Number == 0 {
			from, to, generation = "after the ring", "-", "-"
		}
		truncated := "-"
		if row.Truncated != nil {
			truncated = row.Truncated.Format(timeForm)
		}
		fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s\t%d\t%d\t%s\t%s\n", row.Number, row.State, generation, from, to, len(tables), tasks, orDash(first), truncated)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(out, "\nscheduled tasks: %d\nnext due: %s\n", total, orDash(next))
	if lag := status.Now.Sub(next); !next.IsZero() && lag > 0 {
		fmt.Fprintf(out, "LATE by %v: is tidings serve running on this database?\n", lag.Round(time.Second))
	} else {
		fmt.Fprintln(out, "late: nothing")
	}
	if len(status.Hours) > 0 {
		fmt.Fprintln(w, "\nHOUR (UTC)\tTASKS")
		for _, h := range status.Hours {
			fmt.Fprintf(w, "%s\t%d\n", h.Hour.Format("2006-01-02 15:04"), h.Tasks)
		}
	}
	return w.Flush()
}

func orDash(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.UTC().Format(timeForm)
}
