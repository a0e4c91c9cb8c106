package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"tidings/internal/admit"
	"tidings/internal/catalog"
	"tidings/internal/explain"
	"tidings/internal/msg"
	"tidings/store"
)

// deadFlags say which dead letters are meant.
type deadFlags struct {
	channel, category, source, template, reason, since, until string
	all, dryRun, force                                        bool
	rate, limit                                               int
	because                                                   string
}

func (f *deadFlags) add(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&f.channel, "channel", "", "of this channel")
	flags.StringVar(&f.category, "category", "", "verification, notification or marketing")
	flags.StringVar(&f.source, "source", "", "of this caller")
	flags.StringVar(&f.template, "template", "", "of this template")
	flags.StringVar(&f.reason, "reason", "", "whose reason has this in it, in any case")
	flags.StringVar(&f.since, "since", "", "died at or after: RFC 3339, or how long ago, such as 24h")
	flags.StringVar(&f.until, "until", "", "died before: the same")
}

func (f *deadFlags) addHandling(cmd *cobra.Command, rate int) {
	f.add(cmd)
	flags := cmd.Flags()
	flags.BoolVar(&f.all, "all", false, "all of them: needed where nothing else says which")
	flags.BoolVar(&f.dryRun, "dry-run", false, "only count them")
	flags.IntVar(&f.rate, "rate", rate, "how many a second")
}

func (f *deadFlags) filter(now time.Time) (filter store.DeadFilter, err error) {
	filter = store.DeadFilter{SourceID: f.source, Category: f.category, TemplateID: f.template, Reason: f.reason}
	if f.channel != "" {
		if filter.Channel, err = msg.ParseChannel(f.channel); err != nil {
			return filter, err
		}
	}
	if f.category != "" {
		if _, err := msg.ParseCategory(f.category); err != nil {
			return filter, err
		}
	}
	for name, into := range map[string]*time.Time{"since": &filter.Since, "until": &filter.Until} {
		text := map[string]string{"since": f.since, "until": f.until}[name]
		if text == "" {
			continue
		}
		if ago, err := time.ParseDuration(text); err == nil {
			*into = now.Add(-ago)
		} else if *into, err = admit.ParseTime(text); err != nil {
			return filter, fmt.Errorf("--%s must be RFC 3339 with an offset, or how long ago, such as 24h", name)
		}
	}
	if !filter.Until.IsZero() && !filter.Since.Before(filter.Until) {
		return filter, errors.New("--since must lie before --until")
	}
	if filter.Since.After(now) {
		return filter, errors.New("--since lies in the future")
	}
	return filter, nil
}

func (a *app) deadCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "dead", Short: "Look at dead letters, send them again, give them up", Args: cobra.NoArgs}
	cmd.AddCommand(a.deadListCommand(), a.deadShowCommand(), a.deadRequeueCommand(), a.deadDiscardCommand())
	return cmd
}

func (a *app) deadListCommand() *cobra.Command {
	var f deadFlags
	cmd := &cobra.Command{
		Use: "list", Short: "List dead letters, those that died last first", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if f.limit < 1 || f.limit > mostListed {
				return fmt.Errorf("--limit must be between 1 and %d", mostListed)
			}
			return a.withStore(cmd, func(ctx context.Context, st *store.Store) error {
				filter, err := f.filter(st.Now())
				if err != nil {
					return err
				}
				return listDead(ctx, st, filter, f.limit, cmd.OutOrStdout())
			})
		},
	}
	f.add(cmd)
	cmd.Flags().IntVar(&f.limit, "limit", 50, "how many at most")
	return cmd
}

const mostListed = 10_000

func listDead(ctx context.Context, st *store.Store, filter store.DeadFilter, limit int, out io.Writer) error {
	found, err := st.DeadLetters(ctx, filter, store.DeadCursor{}, limit)
	if err != nil {
		return err
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "MESSAGE\tCHANNEL\tDIED (UTC)\tCATEGORY\tSOURCE\tATTEMPTS\tPROVIDER\tREASON")
	for i := range found {
		d := &found[i]
		fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s\t%d\t%s\t%s\n", d.MsgID, d.Channel, d.Died.Format(timeForm), d.Category, d.SourceID, d.Attempt, cmp.Or(d.Provider, "-"), d.LastError)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	counts, err := st.CountDead(ctx, filter)
	if err != nil {
		return err
	}
	printCounts(out, counts)
	return nil
}

func printCounts(out io.Writer, counts map[msg.Channel]int) {
	all := 0
	for _, n := range counts {
		all += n
	}
	fmt.Fprintf(out, "dead letters: %d", all)
	for _, c := range slices.Sorted(maps.Keys(counts)) {
		fmt.Fprintf(out, ", %s %d", c, counts[c])
	}
	fmt.Fprintln(out)
}

// deadArgs reads a dead letter's name: 123 email, or 123-email, as alarms write it.
func deadArgs(args []string) (msgID uint64, channel msg.Channel, err error) {
	if len(args) == 1 {
		id, name, _ := strings.Cut(args[0], "-")
		args = []string{id, name}
	}
	if msgID, err = strconv.ParseUint(args[0], 10, 64); err != nil {
		return 0, 0, fmt.Errorf("%q is no message id", args[0])
	}
	channel, err = msg.ParseChannel(args[1])
	return msgID, channel, err
}

func (a *app) deadShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show <message> <channel>", Short: "Show a dead letter with its attempts", Args: cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			msgID, channel, err := deadArgs(args)
			if err != nil {
				return err
			}
			return a.withStore(cmd, func(ctx context.Context, st *store.Store) error {
				d, err := st.Dead(ctx, msgID, channel)
				if err != nil {
					return err
				}
				w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
				for _, line := range [][2]string{
					{"message", strconv.FormatUint(d.MsgID, 10)},
					{"key", d.Key()},
					{"source", d.SourceID},
					{"request_id", cmp.Or(d.RequestID, "-")},
					{"category", d.Category.String()},
					{"lane", d.Lane.String()},
					{"template", cmp.Or(d.TemplateID, "-")},
					{"created", d.Created.Format(timeForm)},
					{"due", d.Due.Format(timeForm)},
					{"died", d.Died.Format(timeForm)},
					{"attempts", fmt.Sprintf("%d of %d", d.Attempt, d.AttemptLimit)},
					{"provider", cmp.Or(d.Provider, "-")},
					{"reason", d.LastError},
				} {
					fmt.Fprintf(w, "%s\t%s\n", line[0], line[1])
				}
				for _, at := range d.Attempts {
					fmt.Fprintf(w, "attempt %d\t%s by %s at %s, after %d ms: %s %s\n", at.Attempt, at.Outcome, cmp.Or(at.Provider, "-"), at.Time.Format(timeForm), at.Latency, at.Code, at.Text)
				}
				return w.Flush()
			})
		},
	}
}

func (a *app) deadRequeueCommand() *cobra.Command {
	var f deadFlags
	cmd := &cobra.Command{
		Use: "requeue [<message> <channel>]", Short: "Send a dead letter again, or all that a filter means",
		Long: "Puts dead letters back into their lanes, with their policy's attempts over again and the keys that providers know them by; those that\n" +
			"died first go first. It stops while the lane is paused, or no provider of a channel may be asked. It may be stopped, and run again, at any time.",
		Args: oneOrFilter,
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg, _, err := a.config(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			policies, err := cfg.policies()
			if err != nil {
				return err
			}
			return a.withStore(cmd, func(ctx context.Context, st *store.Store) error {
				x := explainer(cfg, st, policies, catalog.New(st))
				h := store.Handling{By: byCommand, Rate: f.rate, Policy: x.Again}
				if !f.force {
					h.Ready = func(ctx context.Context, r store.Route) error { return inOrder(ctx, x, r) }
				}
				return f.handle(ctx, st, h, args, cmd.OutOrStdout())
			})
		},
	}
	f.addHandling(cmd, store.DefaultRequeueRate)
	cmd.Flags().BoolVar(&f.force, "force", false, "even while the lane is paused, or no provider of the channel may be asked")
	return cmd
}

func (a *app) deadDiscardCommand() *cobra.Command {
	var f deadFlags
	cmd := &cobra.Command{
		Use: "discard [<message> <channel>]", Short: "Give a dead letter up, or all that a filter means: they are recorded as failed", Args: oneOrFilter,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withStore(cmd, func(ctx context.Context, st *store.Store) error {
				h := store.Handling{By: byCommand, Discard: true, Reason: f.because, Rate: f.rate}
				return f.handle(ctx, st, h, args, cmd.OutOrStdout())
			})
		},
	}
	f.addHandling(cmd, store.MostRequeueRate)
	cmd.Flags().StringVar(&f.because, "because", "", "why, for others to read")
	return cmd
}

func oneOrFilter(_ *cobra.Command, args []string) error {
	if len(args) > 2 {
		return errors.New("name a message and a channel, or none and a filter")
	}
	return nil
}

// inOrder tells whether what goes this way can be sent now.
func inOrder(ctx context.Context, x *explain.Explainer, r store.Route) error {
	why, err := x.OutOfOrder(ctx, r, true)
	if err == nil && why != "" {
		err = fmt.Errorf("nothing of lane %s can be sent over %s now: %s; --force does it all the same", r.Lane, r.Channel, why)
	}
	return err
}

// handle does to one dead letter, or to all that the flags mean, what h says.
func (f *deadFlags) handle(ctx context.Context, st *store.Store, h store.Handling, args []string, out io.Writer) error {
	if f.rate < 1 || f.rate > store.MostRequeueRate {
		return fmt.Errorf("--rate must be between 1 and %d", store.MostRequeueRate)
	}
	done := "requeued"
	if h.Discard {
		done = "discarded"
	}
	filter, err := f.filter(st.Now())
	if err != nil {
		return err
	}
	if len(args) > 0 {
		if filter != (store.DeadFilter{}) || f.all {
			return errors.New("a dead letter and a filter exclude each other")
		}
		return f.handleOne(ctx, st, h, args, done, out)
	}
	if filter == (store.DeadFilter{Until: filter.Until}) && !f.all {
		return errors.New("say which dead letters are meant: --channel, --category, --source, --template, --reason, --since, or --all")
	}
	if filter.Until.IsZero() {
		filter.Until = st.Now().Truncate(time.Millisecond) // those that die again meanwhile are not meant
	}
	counts, err := st.CountDead(ctx, filter)
	if err != nil {
		return err
	}
	printCounts(out, counts)
	if f.dryRun {
		return nil
	}
	all, err := st.HandleAllDead(ctx, filter, h)
	fmt.Fprintf(out, "%s: %d\n", done, all.Tasks)
	if all.Left > 0 {
		fmt.Fprintf(out, "left alone, for their tasks stand in their queue tables as well: %d\n", all.Left)
	}
	if err == nil && !all.Done {
		err = errors.New("stopped before all were done")
	}
	if err != nil {
		return fmt.Errorf("%w; to go on, run it again with --until %s", err, filter.Until.Format(time.RFC3339Nano))
	}
	return nil
}

func (f *deadFlags) handleOne(ctx context.Context, st *store.Store, h store.Handling, args []string, done string, out io.Writer) error {
	msgID, channel, err := deadArgs(args)
	if err != nil {
		return err
	}
	if f.dryRun {
		if _, err := st.Dead(ctx, msgID, channel); err != nil {
			return err
		}
		fmt.Fprintf(out, "would be %s: %s\n", done, msg.TaskKey(msgID, channel))
		return nil
	}
	if err := st.HandleDead(ctx, msgID, channel, h); err != nil {
		return err
	}
	fmt.Fprintf(out, "%s %s\n", done, msg.TaskKey(msgID, channel))
	return nil
}
