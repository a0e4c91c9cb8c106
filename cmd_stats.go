package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"tidings/internal/msg"
	"tidings/store"
)

func (a *app) statsCommand() *cobra.Command {
	var (
		f            store.StatFilter
		channel, day string
		by           []string
	)
	cmd := &cobra.Command{
		Use: "stats", Short: "Add up how tasks ended, by hour, day, source, template, channel or category", Args: cobra.NoArgs,
		Example: "  tidings stats --template welcome --day yesterday\n  tidings stats --since 168h --by day,channel",
		RunE: func(cmd *cobra.Command, _ []string) error {
			since, err := cmd.Flags().GetDuration("since")
			if err != nil {
				return err
			}
			if f.Category != "" {
				if _, err := msg.ParseCategory(f.Category); err != nil {
					return err
				}
			}
			if day != "" && cmd.Flags().Changed("since") {
				return errors.New("--day and --since exclude each other")
			}
			if channel != "" {
				if f.Channel, err = msg.ParseChannel(channel); err != nil {
					return err
				}
			}
			if f.By, err = statColumns(by); err != nil {
				return err
			}
			return a.withStore(cmd, func(ctx context.Context, st *store.Store) error {
				f.Until = st.Now()
				f.Since = f.Until.Add(-since).Truncate(time.Hour)
				if day != "" {
					if f.Since, err = parseDay(day, st.Now()); err != nil {
						return err
					}
					f.Until = f.Since.Add(24 * time.Hour)
				}
				return printStats(ctx, st, f, cmd.OutOrStdout())
			})
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&f.SourceID, "source", "", "of this caller")
	flags.StringVar(&f.TemplateID, "template", "", "of this template")
	flags.StringVar(&channel, "channel", "", "of this channel")
	flags.StringVar(&f.Category, "category", "", "verification, notification or marketing")
	flags.StringVar(&day, "day", "", "a day, UTC: 2026-11-29, today or yesterday; instead of --since")
	flags.Duration("since", 24*time.Hour, "from the hour that lies so long back")
	flags.StringSliceVar(&by, "by", nil, "what to group by")
	return cmd
}

// statColumns are the columns of the names that people group by.
func statColumns(names []string) (columns []string, err error) {
	for _, name := range names {
		column := cmp.Or(map[string]string{"source": "source_id", "template": "template_id"}[name], name)
		if !slices.Contains(store.StatColumns, column) {
			return nil, fmt.Errorf("--by must be of hour, day, source, template, channel, category; %q is not", name)
		}
		if !slices.Contains(columns, column) {
			columns = append(columns, column)
		}
	}
	return columns, nil
}

func parseDay(text string, now time.Time) (time.Time, error) {
	today := now.UTC().Truncate(24 * time.Hour)
	switch text {
	case "today":
		return today, nil
	case "yesterday":
		return today.Add(-24 * time.Hour), nil
	}
	day, err := time.Parse(time.DateOnly, text)
	if err != nil {
		return day, fmt.Errorf("--day must be a day such as 2026-11-29, today or yesterday")
	}
	return day, nil
}

func printStats(ctx context.Context, st *store.Store, f store.StatFilter, out io.Writer) error {
	groups, more, err := st.Stats(ctx, f)
	if err != nil {
		return err
	}
	outcomes := []msg.State{msg.Success, msg.Failed, msg.Expired, msg.Cancelled, msg.Skipped}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, column := range f.By {
		fmt.Fprintf(w, "%s\t", strings.ToUpper(column))
	}
	fmt.Fprint(w, "TASKS")
	for _, o := range outcomes {
		fmt.Fprintf(w, "\t%s", strings.ToUpper(o.String()))
	}
	fmt.Fprintln(w, "\tREACH\tLATENCY")
	for i := range groups {
		g := &groups[i]
		for _, column := range f.By {
			fmt.Fprintf(w, "%s\t", map[string]string{
				"hour": g.Hour.Format("2006-01-02 15:04"), "day": g.Day.Format(time.DateOnly), "source_id": g.SourceID, "template_id": g.TemplateID,
				"channel": g.Channel.String(), "category": g.Category,
			}[column])
		}
		fmt.Fprint(w, g.Tasks())
		for _, o := range outcomes {
			fmt.Fprintf(w, "\t%d", g.Outcomes[o.String()])
		}
		fmt.Fprintf(w, "\t%.1f %%\t%.0f ms\n", 100*g.Reach(), g.LatencyMS())
	}
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(out, "from %s to %s UTC\n", f.Since.Format(timeForm), f.Until.Format(timeForm))
	if more {
		fmt.Fprintln(out, "there is more than is shown: ask for less time, or fewer groups")
	}
	return nil
}
