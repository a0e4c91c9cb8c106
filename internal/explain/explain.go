// Package explain says in plain words why each task of a message is where it is and what happens next. All that it says stands in
// rows, which it names: any process, or a DBA, comes to the same answer.
package explain

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"tidings/internal/msg"
	"tidings/internal/policy"
	"tidings/store"
)

// Provider is a provider of a channel's chain, as configured.
type Provider struct {
	Name        string
	Rate        float64       // attempts a second; 0: any number
	BreakerOpen time.Duration // how long it is left alone when it fails
}

// Explainer knows what does not change while the process runs.
type Explainer struct {
	Store        *store.Store
	Chain        func(msg.Channel) []Provider
	Policy       func(context.Context, *store.Task) policy.Policy
	DegradeAfter time.Duration
}

// Explained is a task with why it is where it is.
type Explained struct {
	Key     string `json:"key" doc:"The task's name."`
	Channel string `json:"channel"`
	Status  string `json:"status" enum:"ready,sending,unknown,success,failed,dead,expired,cancelled,skipped"`
	Why     string `json:"why" doc:"Why the task is where it is, and what happens next."`
	Rows    []Row  `json:"rows" doc:"The rows that say so."`
}

// Row is a row that an explanation rests on.
type Row struct {
	Table   string         `json:"table"`
	Where   string         `json:"where" doc:"The row, as SQL."`
	Columns map[string]any `json:"columns" doc:"What of it matters."`
}

// Message explains each task of a message. Without all, it says nothing of machines and people, and names the task's own row only. The
// store's errors.
func (e *Explainer) Message(ctx context.Context, m *store.MessageView, all bool) ([]Explained, error) {
	control, err := e.Store.Control(ctx)
	if err != nil {
		return nil, err
	}
	nodes, err := e.Store.Nodes(ctx)
	if err != nil {
		return nil, err
	}
	tasks := make([]Explained, 0, len(m.Tasks))
	for i := range m.Tasks {
		t := &m.Tasks[i]
		x := explanation{Explainer: e, ctx: ctx, t: t, control: &control, nodes: nodes, now: e.Store.Now(), policy: e.Policy(ctx, &t.Task), all: all}
		x.taskRow()
		why := x.why()
		if x.err != nil {
			return nil, x.err
		}
		tasks = append(tasks, Explained{Key: t.Key(), Channel: t.Channel.String(), Status: t.Status.String(), Why: why, Rows: x.rows})
	}
	return tasks, nil
}

// explanation is one task's on its way.
type explanation struct {
	*Explainer
	ctx     context.Context
	t       *store.TaskView
	control *store.Control
	nodes   []store.Node
	now     time.Time
	policy  policy.Policy
	rows    []Row
	err     error
	all     bool // the reader runs the place
}

func at(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05.000") + " UTC" }

func (x *explanation) row(table, where string, columns map[string]any) {
	if len(x.rows) > 0 && !x.all { // the first is the task's own
		return
	}
	for name, value := range columns {
		if v, ok := value.(time.Time); ok {
			columns[name] = v.UTC().Format("2006-01-02 15:04:05.000")
		}
	}
	x.rows = append(x.rows, Row{table, where, columns})
}

func (x *explanation) taskRow() {
	t := x.t
	columns := map[string]any{
		"status": int(t.Status), "attempt": t.Attempt, "attempt_limit": t.AttemptLimit, "due_time": t.Due, "expire_time": t.Expire,
		"provider": t.Provider, "last_error": t.LastError,
	}
	switch {
	case t.Status.Ended():
		columns["finish_time"], columns["provider_msg_id"] = t.Finished, t.ProviderMsgID
	case t.Status != msg.Dead:
		columns["next_time"], columns["owner"] = t.Next, t.Owner
	}
	x.row(t.Place, fmt.Sprintf("msg_id = %d AND channel = %d", t.MsgID, t.Channel), columns)
}

func (x *explanation) why() string {
	t := x.t
	switch t.Status {
	case msg.Success:
		text := fmt.Sprintf("It was sent by %s at %s, by attempt %d", t.Provider, at(t.Finished), t.Attempt)
		if t.ProviderMsgID != "" {
			text += ", and is " + t.ProviderMsgID + " there"
		}
		return text + "."
	case msg.Failed:
		if by, ok := strings.CutPrefix(t.LastError, "discarded by "); ok {
			return fmt.Sprintf("It was a dead letter, and was discarded at %s by %s.", at(t.Finished), by)
		}
		return fmt.Sprintf("It failed for good at %s, in attempt %d by %s: %s. It is not tried again.", at(t.Finished), t.Attempt, orNobody(t.Provider), orUnknown(t.LastError))
	case msg.Expired:
		return fmt.Sprintf("It expired: it was not to be sent after %s; %s.", at(t.Expire), orUnknown(t.LastError))
	case msg.Cancelled:
		return fmt.Sprintf("It was %s at %s.", cmp.Or(t.LastError, "cancelled"), at(t.Finished))
	case msg.Skipped:
		return fmt.Sprintf("It was skipped at %s, because: %s.", at(t.Finished), strings.TrimPrefix(orUnknown(t.LastError), "skipped: "))
	case msg.Dead:
		return fmt.Sprintf("It is a dead letter after %s: %s. It waits for a person: tidings dead requeue %d %s, or tidings dead discard %[3]d %[4]s.",
			attempts(t.Attempt), orUnknown(t.LastError), t.MsgID, t.Channel)
	case msg.Sending:
		return x.sending()
	case msg.Unknown:
		return fmt.Sprintf("Nobody knows whether attempt %d of %d was sent (%s): it waits for word of %s until %s; then %s.",
			t.Attempt, t.AttemptLimit, orUnknown(t.LastError), orNobody(t.Provider), at(t.Next), x.again())
	}
	return x.ready()
}

func orNobody(provider string) string { return cmp.Or(provider, "no provider") }

func orUnknown(text string) string {
	return cmp.Or(strings.TrimSuffix(text, "."), "no reason is known")
}

func attempts(n int) string {
	if n == 1 {
		return "1 attempt"
	}
	return strconv.Itoa(n) + " attempts"
}

// again is what follows a wait for word in vain.
func (x *explanation) again() string {
	if x.t.Attempt >= x.t.AttemptLimit {
		return "it becomes a dead letter, for no attempt is left"
	}
	return fmt.Sprintf("attempt %d is made", x.t.Attempt+1)
}

// sending: somebody has it, or had.
func (x *explanation) sending() string {
	t := x.t
	number, _, _ := strings.Cut(t.Owner, ".")
	holder, alive := "node "+number, false
	for _, n := range x.nodes {
		if strconv.Itoa(int(n.Node)) == number {
			x.row("t_node", "node = "+number, map[string]any{"boot": n.Boot, "host": n.Host, "pid": n.PID, "lease_end": n.LeaseEnd})
			alive = n.Alive(x.now) && strings.HasPrefix(t.Owner, fmt.Sprintf("%d.%d.", n.Node, n.Boot))
			if alive && x.all {
				holder += fmt.Sprintf(" (%s, process %d)", n.Host, n.PID)
			}
		}
	}
	then := "nobody will know whether it was sent: " + x.unknown()
	switch {
	case t.Next.Before(x.now):
		return fmt.Sprintf("Attempt %d of %d was leased by %s until %s, and that has passed: another process takes it over within a second or a lease, and %s.",
			t.Attempt, t.AttemptLimit, holder, at(t.Next), then)
	case !alive:
		return fmt.Sprintf("Attempt %d of %d is leased by %s until %s, but that process has ended: when the lease is over another one takes it over, and %s.",
			t.Attempt, t.AttemptLimit, holder, at(t.Next), then)
	}
	return fmt.Sprintf("Attempt %d of %d is under way: leased by %s until %s.", t.Attempt, t.AttemptLimit, holder, at(t.Next))
}

// unknown is what the policy does with an attempt of unknown outcome.
func (x *explanation) unknown() string {
	switch {
	case x.t.Attempt >= x.t.AttemptLimit:
		return "with no attempt left it becomes a dead letter"
	case x.policy.Unknown == policy.BuryUnknown:
		return "it becomes a dead letter, unless its provider recognises repetitions and is asked again"
	case x.policy.Unknown == policy.WaitAndAsk:
		return "it is asked again, after a wait for a receipt where there are any"
	}
	return "it is asked again at once"
}

// ready: it waits for its time, for somebody, or for something.
func (x *explanation) ready() string {
	t := x.t
	x.lane()
	switch {
	case strings.HasPrefix(t.Place, "t_msg_delay_") && t.Due.After(x.now):
		return fmt.Sprintf("It is scheduled for %s: it waits in %s, and moves to lane %s shortly before.%s", at(t.Due), t.Place, t.Lane, x.paused(" "))
	case strings.HasPrefix(t.Place, "t_msg_delay_"):
		return fmt.Sprintf("It has been due since %s and still waits in %s: the next process that moves scheduled messages takes it along.%s", at(t.Due), t.Place, x.nobody())
	case !t.Expire.After(x.now):
		return fmt.Sprintf("It expired at %s without being sent, and is recorded as expired at the next look.%s", at(t.Expire), x.nobody())
	case t.Next.After(x.now):
		return x.later()
	}
	if text := x.paused(""); text != "" {
		return text
	}
	return x.due()
}

func (x *explanation) lane() {
	l := x.control.Lanes[x.t.Lane]
	x.row("t_lane", "lane = '"+l.Name+"'", map[string]any{"paused": l.Paused, "weight": l.Weight, "reason": l.Reason, "modify_by": l.By, "modify_time": l.Modified})
}

// paused says that the lane is, if it is.
func (x *explanation) paused(before string) string {
	l := x.control.Lanes[x.t.Lane]
	if !l.Paused {
		return ""
	}
	text := fmt.Sprintf("%sLane %s is %s since %s", before, l.Name, pausedBy(l.By, x.all), at(l.Modified))
	if l.Reason != "" && x.all {
		text += " (" + l.Reason + ")"
	}
	return text + fmt.Sprintf(": nothing of it is sent until somebody resumes it (tidings lane resume %s); the task expires at %s.", l.Name, at(x.t.Expire))
}

func pausedBy(by string, all bool) string {
	if by == "" || !all {
		return "paused"
	}
	return "paused by " + by
}

// nobody says that no process works, if none does.
func (x *explanation) nobody() string {
	for _, n := range x.nodes {
		if n.Serves && n.Alive(x.now) {
			return ""
		}
	}
	return " But no process of Tidings is alive that would do it (t_node)."
}

// later: its time has not come.
func (x *explanation) later() string {
	t := x.t
	paused := x.paused(" ")
	switch {
	case t.Attempt == 0 && t.Due.After(x.now):
		return fmt.Sprintf("It is due at %s: it stands in lane %s already, and is sent then.%s", at(t.Due), t.Lane, paused)
	case t.Attempt == 0:
		text := fmt.Sprintf("It was put off until %s", at(t.Next))
		if down := x.down(); down != "" {
			text += ", for its provider could not be asked: " + down
		}
		return text + "." + paused
	}
	return fmt.Sprintf("It is backing off: attempt %d of %d is made at %s; the last word of %s was %q.%s",
		t.Attempt+1, t.AttemptLimit, at(t.Next), orNobody(t.Provider), orUnknown(t.LastError), paused)
}

// due: it could be sent now.
func (x *explanation) due() string {
	t := x.t
	chain := x.Chain(t.Channel)
	if len(chain) == 0 {
		return fmt.Sprintf("No provider of channel %s is configured here: it waits for a process that has one, and expires at %s.", t.Channel, at(t.Expire))
	}
	if nobody := x.nobody(); nobody != "" {
		return "It is due since " + at(t.Next) + "." + nobody
	}
	usable := -1
	for i, p := range chain {
		if x.state(p).why == "" {
			usable = i
			break
		}
	}
	if usable < 0 || (usable > 0 && x.policy.Degrade != policy.Switch) {
		return x.outOfOrder(chain)
	}
	p := chain[usable]
	n, err := x.Store.Ahead(x.ctx, t.Lane, t.Channel, t.Next, mostAhead)
	if err != nil {
		x.err = err
		return ""
	}
	text := fmt.Sprintf("It is due since %s and comes next in its lane: it is sent as soon as %s has a free slot", at(t.Next), p.Name)
	if n > 0 {
		more := ""
		if n == mostAhead {
			more = "at least "
		}
		text = fmt.Sprintf("It is due since %s, and waits behind %s%d tasks of lane %s on %s", at(t.Next), more, n, t.Lane, t.Channel)
	}
	switch {
	case p.Rate > 0 && n > 0:
		text += fmt.Sprintf(" for tokens of %s, which may be asked %g times a second: about %v", p.Name, p.Rate, seconds(float64(n)/p.Rate))
	case p.Rate > 0:
		text += fmt.Sprintf(" and a token: it may be asked %g times a second", p.Rate)
	case n > 0:
		text += " for a free slot of " + p.Name
	}
	if t.Attempt > 0 {
		text += "; second and later attempts stay under a rate of their own (retry.max_per_second)"
	}
	if usable > 0 {
		text += fmt.Sprintf("; %s is asked first as a rule, but %s", chain[0].Name, x.state(chain[0]).why)
	}
	return text + "."
}

const mostAhead = 10_000

func seconds(s float64) time.Duration {
	return max(time.Second, time.Duration(s*float64(time.Second)).Round(time.Second))
}

// outOfOrder: no provider may be asked.
func (x *explanation) outOfOrder(chain []Provider) string {
	t := x.t
	var states []string
	down := true
	for i, p := range chain {
		s := x.state(p)
		down = down && s.breaker
		if i == 0 || x.policy.Degrade == policy.Switch {
			states = append(states, s.why)
		}
	}
	text := "It is due, and waits: " + strings.Join(states, "; ")
	switch {
	case x.policy.Degrade == policy.Skip && down:
		return text + fmt.Sprintf("; it is skipped once no provider of %s has been in order for %v.", t.Channel, x.DegradeAfter)
	case x.policy.Degrade == policy.Switch && len(chain) > 1:
		text += "; no other provider of " + t.Channel.String() + " is in order"
	}
	return text + fmt.Sprintf("; it expires at %s.", at(t.Expire))
}

// down says what is wrong with the channel's first provider, if anything is.
func (x *explanation) down() string {
	if chain := x.Chain(x.t.Channel); len(chain) > 0 {
		return x.state(chain[0]).why
	}
	return ""
}

// state is what is wrong with a provider, with the rows that say so.
func (x *explanation) state(p Provider) state {
	s := stateOf(x.control, p, x.now, x.all)
	for _, row := range s.rows {
		where := fmt.Sprintf("provider = '%s' AND node = %d", row.Provider, row.Node)
		if !x.has(where) {
			columns := map[string]any{"paused": row.Paused, "reason": row.Reason, "modify_by": row.By, "modify_time": row.Modified, "breaker": row.Breaker}
			if row.BusyUntil != nil {
				columns["busy_until"] = *row.BusyUntil
			}
			if row.BreakerTime != nil {
				columns["breaker_time"] = *row.BreakerTime
			}
			x.row("t_provider_state", where, columns)
		}
	}
	return s
}

func (x *explanation) has(where string) bool {
	for _, r := range x.rows {
		if r.Where == where {
			return true
		}
	}
	return false
}

// state is how a provider is found by the table.
type state struct {
	why     string // what is wrong; empty: nothing
	breaker bool   // it fails
	rows    []store.ProviderState
}

func stateOf(c *store.Control, p Provider, now time.Time, all bool) (s state) {
	var open *store.ProviderState
	nodes, failing := 0, 0
	for i := range c.Providers {
		row := &c.Providers[i]
		switch {
		case row.Provider != p.Name:
		case row.Node == store.AllNodes && row.Paused:
			s.rows = append(s.rows, *row)
			s.why = fmt.Sprintf("provider %s is %s since %s", p.Name, pausedBy(row.By, all), at(row.Modified))
			if row.Reason != "" && all {
				s.why += " (" + row.Reason + ")"
			}
		case row.Node == store.AllNodes && row.BusyUntil != nil && row.BusyUntil.After(now):
			s.rows = append(s.rows, *row)
			s.why = fmt.Sprintf("provider %s asked not to be asked before %s", p.Name, at(*row.BusyUntil))
		case row.Node != store.AllNodes:
			if nodes++; row.Breaker == "open" {
				failing++
				open = row
				s.rows = append(s.rows, *row)
			}
		}
	}
	if s.breaker = nodes > 0 && failing == nodes; s.breaker && s.why == "" {
		since := open.Modified
		if open.BreakerTime != nil {
			since = *open.BreakerTime
		}
		s.why = fmt.Sprintf("provider %s fails: its breaker is open on node %d since %s, and until %s", p.Name, open.Node, at(since), at(since.Add(p.BreakerOpen)))
	}
	if s.why == "" {
		s.rows = nil
	}
	return s
}

// Again is what a requeued task gets: so many attempts more, and so long to be sent in.
func (e *Explainer) Again(ctx context.Context, t *store.Task) (attempts int, expiry time.Duration) {
	p := e.Policy(ctx, t)
	return p.Attempts, p.Expiry
}

// OutOfOrder says why nothing should be sent again now that goes this way: its lane is paused, or no provider may be asked. Empty: it can
// be sent.
func (e *Explainer) OutOfOrder(ctx context.Context, r store.Route, all bool) (string, error) {
	c, err := e.Store.Control(ctx)
	if err != nil {
		return "", err
	}
	for _, l := range c.Lanes {
		if l.Name == r.Lane && l.Paused {
			return fmt.Sprintf("lane %s is %s since %s", l.Name, pausedBy(l.By, all), at(l.Modified)), nil
		}
	}
	chain := e.Chain(r.Channel)
	if len(chain) == 0 {
		return "no provider is configured for it", nil
	}
	category, err := msg.ParseCategory(r.Category)
	if err != nil {
		return "", err
	}
	if e.Policy(ctx, &store.Task{Channel: r.Channel, Category: category}).Degrade != policy.Switch {
		chain = chain[:1] // no other one is asked
	}
	var why []string
	for _, p := range chain {
		s := stateOf(&c, p, e.Store.Now(), all)
		if s.why == "" {
			return "", nil
		}
		why = append(why, s.why)
	}
	return strings.Join(why, "; "), nil
}
