package store

import (
	"cmp"
	"context"
	"database/sql"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jmoiron/sqlx"

	"tidings/internal/msg"
)

// Every transaction that records tasks or failed attempts adds them to the figures, as its last statements: the rows are this process's
// own, and are locked for as long as its commit takes.
const (
	sqlStat = `INSERT /* tidings:stat-add */ INTO t_stat_hour (hour, node, source_id, template_id, channel, category, provider, outcome, tasks, latency_ms) VALUES `
	// Of attempts that succeeded t_stat_hour knows.
	sqlAttemptStat    = `INSERT /* tidings:stat-add-attempts */ INTO t_attempt_hour (hour, node, provider, channel, outcome, attempts, latency_ms) VALUES `
	sqlStatEnd        = ` ON DUPLICATE KEY UPDATE tasks = tasks + VALUES(tasks), latency_ms = latency_ms + VALUES(latency_ms)`
	sqlAttemptStatEnd = ` ON DUPLICATE KEY UPDATE attempts = attempts + VALUES(attempts), latency_ms = latency_ms + VALUES(latency_ms)`
)

// statKey is what ended tasks are counted by.
type statKey struct {
	hour                         time.Time
	source, templateID, provider string
	channel                      msg.Channel
	category                     msg.Category
	outcome                      msg.State
}

func (a statKey) compare(b statKey) int {
	return cmp.Or(a.hour.Compare(b.hour), cmp.Compare(a.source, b.source), cmp.Compare(a.templateID, b.templateID),
		cmp.Compare(a.channel, b.channel), cmp.Compare(a.category, b.category), cmp.Compare(a.provider, b.provider), cmp.Compare(a.outcome, b.outcome))
}

// attemptKey is what failed attempts are counted by.
type attemptKey struct {
	hour     time.Time
	provider string
	channel  msg.Channel
	outcome  string
}

func (a attemptKey) compare(b attemptKey) int {
	return cmp.Or(a.hour.Compare(b.hour), cmp.Compare(a.provider, b.provider), cmp.Compare(a.channel, b.channel), cmp.Compare(a.outcome, b.outcome))
}

// statSum is how many, and their latencies, ms.
type statSum struct{ n, latency int64 }

// stats adds up what one transaction ends.
type stats struct {
	tasks    map[statKey]statSum
	attempts map[attemptKey]statSum
}

func newStats() stats { return stats{map[statKey]statSum{}, map[attemptKey]statSum{}} }

func (s stats) empty() bool { return len(s.tasks)+len(s.attempts) == 0 }

func hourOf(t time.Time) time.Time { return t.UTC().Truncate(time.Millisecond).Truncate(time.Hour) }

func (s stats) add(t *Task, outcome msg.State, provider string, finished time.Time, latency time.Duration) {
	addTo(s.tasks, statKey{hourOf(finished), t.SourceID, t.TemplateID, clip(provider, 64), t.Channel, t.Category, outcome}, statSum{1, latency.Milliseconds()})
}

func (s stats) addAttempt(o *Outcome) {
	addTo(s.attempts, attemptKey{hourOf(o.Finished), clip(o.Provider, 64), o.Task.Channel, o.Attempt.Outcome}, statSum{1, o.Latency.Milliseconds()})
}

func addTo[K comparable](sums map[K]statSum, k K, more statSum) {
	had := sums[k]
	sums[k] = statSum{had.n + more.n, had.latency + more.latency}
}

func (s stats) merge(other stats) {
	for k, more := range other.tasks {
		addTo(s.tasks, k, more)
	}
	for k, more := range other.attempts {
		addTo(s.attempts, k, more)
	}
}

// rows are sorted as the primary keys are, so that two transactions of this process lock them in one order.
func (s stats) rows(node uint16) []rows {
	tasks := rows{query: sqlStat, group: "(?,?,?,?,?,?,?,?,?,?)", end: sqlStatEnd, n: len(s.tasks)}
	for _, k := range slices.SortedFunc(maps.Keys(s.tasks), statKey.compare) {
		tasks.args = append(tasks.args, k.hour, node, k.source, k.templateID, k.channel, k.category.String(), k.provider, k.outcome.String(), s.tasks[k].n, s.tasks[k].latency)
	}
	attempts := rows{query: sqlAttemptStat, group: "(?,?,?,?,?,?,?)", end: sqlAttemptStatEnd, n: len(s.attempts)}
	for _, k := range slices.SortedFunc(maps.Keys(s.attempts), attemptKey.compare) {
		attempts.args = append(attempts.args, k.hour, node, k.provider, k.channel, k.outcome, s.attempts[k].n, s.attempts[k].latency)
	}
	return slices.DeleteFunc([]rows{tasks, attempts}, func(r rows) bool { return r.n == 0 })
}

// figures keeps what could not be added in its own transaction: somebody holds rows of the figures locked, and no task waits for
// that. Until they are free again all figures are owed; a process that dies meanwhile takes what it owes along.
type figures struct {
	mu     sync.Mutex
	owed   *stats // nil: nothing is, and transactions add their own
	paying bool
}

// owing tells whether transactions are to leave their figures out.
func (f *figures) owing() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.owed != nil
}

// owe takes figures of a transaction that left them out.
func (s *Store) owe(sum stats) {
	f := &s.figures
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.owed == nil {
		f.owed = new(newStats())
	}
	f.owed.merge(sum)
	if !f.paying {
		f.paying = true
		s.background.Go(s.pay)
	}
}

// payEvery is how often it is tried to add what is owed.
const payEvery = time.Second

// pay adds what is owed, as soon as it can.
func (s *Store) pay() {
	f := &s.figures
	for last := false; ; {
		pause(s.closing, payEvery)
		last = s.closing.Err() != nil
		f.mu.Lock()
		sum := *f.owed
		f.owed = new(newStats())
		f.mu.Unlock()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(s.closing), dbDeadline)
		err := s.tx(ctx, func(tx *sqlx.Tx) error { return insertRows(ctx, tx, sum.rows(s.Node())...) })
		cancel()
		f.mu.Lock()
		if err == nil && f.owed.empty() {
			f.owed, f.paying = nil, false
			f.mu.Unlock()
			return
		}
		f.mu.Unlock()
		if err == nil {
			continue
		}
		if last {
			s.log.Error("figures are lost: their tables have been locked until the end", "groups", len(sum.tasks)+len(sum.attempts), "err", err)
			return
		}
		s.owe(sum)
	}
}

// StatFilter says which figures to add up. Empty fields mean any.
type StatFilter struct {
	Since, Until         time.Time // hours that begin in between
	SourceID, TemplateID string
	Channel              msg.Channel
	Category             string
	By                   []string // columns to group by; of StatColumns
}

// StatColumns are what figures can be grouped by.
var StatColumns = []string{"hour", "day", "source_id", "template_id", "channel", "category"}

// StatGroup is a group's figures. Of what it is grouped by, the fields are set.
type StatGroup struct {
	Hour       time.Time
	Day        time.Time
	SourceID   string
	TemplateID string
	Channel    msg.Channel
	Category   string
	Outcomes   map[string]int64 // tasks by how they ended
	latency    int64            // of those that ended in success, ms
}

// Tasks is how many ended.
func (g *StatGroup) Tasks() (n int64) {
	for _, tasks := range g.Outcomes {
		n += tasks
	}
	return n
}

// Reach is the share of those that were to be sent that ended in success: skipped and cancelled ones do not count. 0: there were none.
func (g *StatGroup) Reach() float64 {
	meant := g.Tasks() - g.Outcomes[msg.Skipped.String()] - g.Outcomes[msg.Cancelled.String()]
	if meant == 0 {
		return 0
	}
	return float64(g.Outcomes[msg.Success.String()]) / float64(meant)
}

// LatencyMS is how long providers took on average over those that ended in success.
func (g *StatGroup) LatencyMS() float64 {
	if n := g.Outcomes[msg.Success.String()]; n > 0 {
		return float64(g.latency) / float64(n)
	}
	return 0
}

// statRow is a group's figures for one outcome.
type statRow struct {
	statGrouping
	Outcome   string `db:"outcome"`
	Tasks     int64  `db:"tasks"`
	LatencyMS int64  `db:"latency_ms"`
}

// statGrouping is what rows are grouped by.
type statGrouping struct {
	Hour       sql.NullTime `db:"hour"`
	Day        sql.NullTime `db:"day"`
	SourceID   string       `db:"source_id"`
	TemplateID string       `db:"template_id"`
	Channel    msg.Channel  `db:"channel"`
	Category   string       `db:"category"`
}

// mostStats bounds an answer: of groups, each with its outcomes.
const mostStats = 10_000

// Stats adds up figures, in the order of the groups. more: there is more than an answer holds.
func (s *Store) Stats(ctx context.Context, f StatFilter) (groups []StatGroup, more bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	var by []string
	columns := ""
	for _, name := range f.By {
		if !slices.Contains(StatColumns, name) {
			continue
		}
		column := name
		if name == "day" {
			column = "CAST(DATE(hour) AS DATETIME)"
		}
		columns += column + " AS " + name + ", "
		by = append(by, column)
	}
	by = append(by, "outcome")
	where, args := []string{"hour >= ?", "hour < ?"}, []any{f.Since, f.Until}
	for _, c := range []struct {
		column string
		value  any
		any    bool
	}{
		{"source_id", f.SourceID, f.SourceID == ""},
		{"template_id", f.TemplateID, f.TemplateID == ""},
		{"channel", f.Channel, f.Channel == 0},
		{"category", f.Category, f.Category == ""},
	} {
		if !c.any {
			where, args = append(where, c.column+" = ?"), append(args, c.value)
		}
	}
	order := strings.Join(by, ", ")
	query := "SELECT /* tidings:stats */ " + columns + "outcome, CAST(SUM(tasks) AS SIGNED) AS tasks, CAST(SUM(latency_ms) AS SIGNED) AS latency_ms FROM t_stat_hour WHERE " +
		strings.Join(where, " AND ") + " GROUP BY " + order + " ORDER BY " + order + " LIMIT ?"
	var rows []statRow
	if err := sqlx.SelectContext(ctx, s.db, &rows, query, append(args, mostStats+1)...); err != nil {
		return nil, false, public(err)
	}
	for i := range rows {
		r := &rows[i]
		if i == 0 || rows[i-1].statGrouping != r.statGrouping {
			if len(groups) == mostStats/5 { // the last one may not be whole
				return groups, true, nil
			}
			groups = append(groups, StatGroup{
				Hour: r.Hour.Time, Day: r.Day.Time, SourceID: r.SourceID, TemplateID: r.TemplateID, Channel: r.Channel, Category: r.Category, Outcomes: map[string]int64{},
			})
		}
		g := &groups[len(groups)-1]
		if g.Outcomes[r.Outcome] += r.Tasks; r.Outcome == msg.Success.String() {
			g.latency += r.LatencyMS
		}
	}
	return groups, false, nil
}
