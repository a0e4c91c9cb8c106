package main

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"tidings/internal/msg"
	"tidings/store"
)

func (a *app) laneCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "lane", Short: "Look at lanes, pause and resume them, change their weights", Args: cobra.NoArgs}
	var reason string
	list := &cobra.Command{
		Use: "list", Short: "Show weights and pauses", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withStore(cmd, func(ctx context.Context, st *store.Store) error { return listLanes(ctx, st, cmd.OutOrStdout()) })
		},
	}
	set := func(cmd *cobra.Command, name string, change func(*store.LaneControl)) error {
		lane, err := msg.ParseLane(name)
		if err != nil {
			return fmt.Errorf("there is no lane %q: there are high, middle and low", name)
		}
		return a.withStore(cmd, func(ctx context.Context, st *store.Store) error {
			if _, err := st.SetLane(ctx, byCommand, lane, change); err != nil {
				return err
			}
			return listLanes(ctx, st, cmd.OutOrStdout())
		})
	}
	pause := &cobra.Command{
		Use: "pause <lane>", Short: "Stop a lane, on every node within a second; what expires still ends", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return set(cmd, args[0], func(row *store.LaneControl) { row.Paused, row.Reason = true, reason })
		},
	}
	pause.Flags().StringVar(&reason, "reason", "", "why, for others to read")
	resume := &cobra.Command{
		Use: "resume <lane>", Short: "Let a lane go on", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return set(cmd, args[0], func(row *store.LaneControl) { row.Paused, row.Reason = false, "" })
		},
	}
	weight := &cobra.Command{
		Use: "weight <lane> <weight>", Short: "Change a lane's share of free slots against the others'", Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			n, err := strconv.Atoi(args[1])
			if err != nil {
				return store.ErrWeight
			}
			return set(cmd, args[0], func(row *store.LaneControl) { row.Weight = n })
		},
	}
	cmd.AddCommand(list, pause, resume, weight)
	return cmd
}

func listLanes(ctx context.Context, st *store.Store, out io.Writer) error {
	c, err := st.Control(ctx)
	if err != nil {
		return err
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "LANE\tWEIGHT\tPAUSED\tREASON\tBY\tSINCE (UTC)")
	for _, row := range c.Lanes {
		fmt.Fprintf(w, "%s\t%d\t%v\t%s\t%s\t%s\n", row.Name, row.Weight, row.Paused, row.Reason, row.By, orDash(row.Modified))
	}
	return w.Flush()
}

func (a *app) providerCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "provider", Short: "Look at providers, pause and resume them", Args: cobra.NoArgs}
	var reason string
	list := &cobra.Command{
		Use: "list", Short: "Show what is set for providers, and how each process finds them", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withStore(cmd, func(ctx context.Context, st *store.Store) error { return listProviders(ctx, st, cmd.OutOrStdout()) })
		},
	}
	set := func(cmd *cobra.Command, name string, paused bool) error {
		cfg, _, err := a.config(cmd.ErrOrStderr())
		if err != nil {
			return err
		}
		if _, ok := cfg.Providers[name]; !ok {
			return fmt.Errorf("there is no provider %q in the configuration", name)
		}
		return a.withStore(cmd, func(ctx context.Context, st *store.Store) error {
			if err := st.PauseProvider(ctx, byCommand, name, reason, paused); err != nil {
				return err
			}
			return listProviders(ctx, st, cmd.OutOrStdout())
		})
	}
	pause := &cobra.Command{
		Use: "pause <provider>", Short: "Ask a provider for nothing, on every node within a second", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return set(cmd, args[0], true) },
	}
	pause.Flags().StringVar(&reason, "reason", "", "why, for others to read")
	resume := &cobra.Command{
		Use: "resume <provider>", Short: "Let a provider be asked again", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return set(cmd, args[0], false) },
	}
	cmd.AddCommand(list, pause, resume)
	return cmd
}

func listProviders(ctx context.Context, st *store.Store, out io.Writer) error {
	c, err := st.Control(ctx)
	if err != nil {
		return err
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "PROVIDER\tNODE\tPAUSED\tREASON\tBY\tBUSY UNTIL (UTC)\tBREAKER\tSINCE (UTC)")
	for _, row := range c.Providers {
		if row.Node == store.AllNodes {
			busy := "-"
			if row.BusyUntil != nil {
				busy = orDash(*row.BusyUntil)
			}
			fmt.Fprintf(w, "%s\tall\t%v\t%s\t%s\t%s\t-\t-\n", row.Provider, row.Paused, row.Reason, row.By, busy)
			continue
		}
		since := "-"
		if row.BreakerTime != nil {
			since = orDash(*row.BreakerTime)
		}
		fmt.Fprintf(w, "%s\t%d\t-\t\t\t-\t%s\t%s\n", row.Provider, row.Node, row.Breaker, since)
	}
	return w.Flush()
}
