package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"tidings/internal/msg"
	"tidings/store"
)

func (a *app) topCommand() *cobra.Command {
	var (
		every time.Duration
		once  bool
	)
	cmd := &cobra.Command{
		Use: "top", Short: "Watch the lanes: what waits, how old it is, and how fast it goes (plain lines where there is no terminal)", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if every < 100*time.Millisecond {
				return fmt.Errorf("--every must be at least 100ms")
			}
			return a.withStore(cmd, func(ctx context.Context, st *store.Store) error {
				out := cmd.OutOrStdout()
				return watch(ctx, st, out, every, once, isTerminal(out) && !once)
			})
		},
	}
	cmd.Flags().DurationVar(&every, "every", 2*time.Second, "how often to look")
	cmd.Flags().BoolVar(&once, "once", false, "look once, without rates, which take two looks")
	return cmd
}

func isTerminal(out io.Writer) bool {
	f, ok := out.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// look is what top shows.
type look struct {
	when    time.Time
	backlog store.Backlog
	paused  map[string]string         // lanes, and why
	ended   map[msg.Channel]endedSums // since the hour before this one began
	nodes   int
	lag     time.Duration // of scheduled tasks
}

type endedSums struct{ success, other int64 }

// watch shows a look after the other until ctx ends.
func watch(ctx context.Context, st *store.Store, out io.Writer, every time.Duration, once, screen bool) error {
	var before *look
	for {
		now, err := takeLook(ctx, st)
		if err != nil {
			if ctx.Err() != nil { // Ctrl-C
				return nil
			}
			return err
		}
		switch {
		case screen:
			fmt.Fprint(out, "\x1b[H\x1b[2J") // to the top, and clear
			err = now.table(out, before)
		case once:
			err = now.table(out, before)
		default:
			err = now.lines(out, before)
		}
		if err != nil || once {
			return err
		}
		before = now
		select {
		case <-time.After(every):
		case <-ctx.Done():
			return nil
		}
	}
}

func takeLook(ctx context.Context, st *store.Store) (*look, error) {
	l := &look{when: st.Now(), paused: map[string]string{}, ended: map[msg.Channel]endedSums{}}
	var err error
	if l.backlog, err = st.Backlog(ctx); err != nil {
		return nil, err
	}
	control, err := st.Control(ctx)
	if err != nil {
		return nil, err
	}
	l.nodes = control.Nodes
	for _, lane := range control.Lanes {
		if lane.Paused {
			l.paused[lane.Name] = cmp.Or(lane.Reason, "no reason is given")
		}
	}
	groups, _, err := st.Stats(ctx, store.StatFilter{Since: l.when.Truncate(time.Hour).Add(-time.Hour), Until: l.when, By: []string{"channel"}})
	if err != nil {
		return nil, err
	}
	for i := range groups {
		g := &groups[i]
		success := g.Outcomes[msg.Success.String()]
		l.ended[g.Channel] = endedSums{success, g.Tasks() - success}
	}
	l.lag, err = st.LateScheduled(ctx)
	return l, err
}

// row is a lane and channel with what waits there.
type row struct {
	lane    msg.Lane
	channel msg.Channel
	tasks   map[string]int
	oldest  time.Duration
}

func (l *look) rows() []row {
	type key struct {
		lane    msg.Lane
		channel msg.Channel
	}
	byKey := map[key]*row{}
	at := func(lane msg.Lane, c msg.Channel) *row {
		k := key{lane, c}
		if byKey[k] == nil {
			byKey[k] = &row{lane: lane, channel: c, tasks: map[string]int{}}
		}
		return byKey[k]
	}
	for _, d := range l.backlog.Depths {
		at(d.Lane, d.Channel).tasks[d.State] += d.Tasks
	}
	for _, w := range l.backlog.Oldest {
		at(w.Lane, w.Channel).oldest = l.when.Sub(w.Next)
	}
	var rows []row
	for _, r := range byKey {
		rows = append(rows, *r)
	}
	slices.SortFunc(rows, func(a, b row) int { return cmp.Or(cmp.Compare(a.lane, b.lane), cmp.Compare(a.channel, b.channel)) })
	return rows
}

// rates tells how many tasks ended a second on each channel between two looks.
func (l *look) rates(before *look) (text string) {
	if before == nil {
		return ""
	}
	seconds := l.when.Sub(before.when).Seconds()
	var parts []string
	for _, c := range msg.Channels {
		now, then := l.ended[c], before.ended[c]
		success, other := now.success-then.success, now.other-then.other
		if success < 0 || other < 0 || success+other == 0 || seconds <= 0 { // an hour has gone by, or nothing has ended
			continue
		}
		part := fmt.Sprintf("%s %.0f/s", c, float64(success)/seconds)
		if other > 0 {
			part += fmt.Sprintf(" (and %.0f/s not delivered)", float64(other)/seconds)
		}
		parts = append(parts, part)
	}
	if len(parts) == 0 {
		return "nothing"
	}
	return strings.Join(parts, ", ")
}

func (l *look) dead() (n int) {
	for _, d := range l.backlog.Dead {
		n += d.Tasks
	}
	return n
}

// capped writes a count that is not counted any further.
func capped(n int) string {
	if n >= store.BacklogCap {
		return fmt.Sprintf("%d+", store.BacklogCap)
	}
	return fmt.Sprint(n)
}

func (l *look) table(out io.Writer, before *look) error {
	fmt.Fprintf(out, "tidings at %s UTC: %d processes, %s dead letters, scheduled sends %s late\n", l.when.UTC().Format(timeForm), l.nodes, capped(l.dead()), l.lag.Round(time.Second))
	if rates := l.rates(before); rates != "" {
		fmt.Fprintf(out, "sent: %s\n", rates)
	}
	for _, lane := range msg.Lanes {
		if why, paused := l.paused[lane.String()]; paused {
			fmt.Fprintf(out, "lane %s is paused: %s\n", lane, why)
		}
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "\nLANE\tCHANNEL\tREADY\tWAITING\tSENDING\tUNKNOWN\tOLDEST\t")
	for _, r := range l.rows() {
		fmt.Fprintf(w, "%s\t%s", r.lane, r.channel)
		for _, state := range store.BacklogStates {
			fmt.Fprintf(w, "\t%s", capped(r.tasks[state]))
		}
		fmt.Fprintf(w, "\t%s\t\n", max(r.oldest, 0).Round(time.Millisecond))
	}
	return w.Flush()
}

// lines are for logs and pipes: one a lane and channel, and one for all.
func (l *look) lines(out io.Writer, before *look) error {
	when := l.when.UTC().Format(time.RFC3339)
	var paused []string
	for _, lane := range msg.Lanes {
		if _, ok := l.paused[lane.String()]; ok {
			paused = append(paused, lane.String())
		}
	}
	_, err := fmt.Fprintf(out, "%s processes=%d dead=%d scheduled_late=%s paused=%q sent=%q\n", when, l.nodes, l.dead(), l.lag.Round(time.Second), strings.Join(paused, ","), l.rates(before))
	for _, r := range l.rows() {
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(out, "%s lane=%s channel=%s ready=%d waiting=%d sending=%d unknown=%d oldest=%s\n", when, r.lane, r.channel,
			r.tasks["ready"], r.tasks["waiting"], r.tasks["sending"], r.tasks["unknown"], max(r.oldest, 0).Round(time.Millisecond))
	}
	return err
}
