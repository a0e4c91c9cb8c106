package store

import (
	"context"
	"fmt"
	"strings"
	"time"

	"tidings/internal/msg"
)

// BacklogCap bounds what is counted of one lane, channel and state: a million waiting tasks are not counted for a figure.
const BacklogCap = 10_000

// Depth is how many tasks of a lane and channel there are in a state, BacklogCap at most. Ready are those that may be sent now;
// waiting, those that are ready and not due.
type Depth struct {
	Lane    msg.Lane    `db:"lane"`
	Channel msg.Channel `db:"channel"`
	State   string      `db:"state"`
	Tasks   int         `db:"tasks"`
}

// DeadDepth is how many dead letters of a channel and category there are, BacklogCap at most.
type DeadDepth struct {
	Channel  msg.Channel `db:"channel"`
	Category string      `db:"category"`
	Tasks    int         `db:"tasks"`
}

// Backlog is what waits.
type Backlog struct {
	Depths []Depth
	Oldest []Waiting // ready and due: since when the first of a lane and channel could have been sent
	Dead   []DeadDepth
}

// BacklogStates are the states that are counted.
var BacklogStates = []string{"ready", "waiting", "sending", "unknown"}

const (
	sqlDepth = `SELECT %d AS lane, %d AS channel, '%s' AS state, COUNT(*) AS tasks FROM
		(SELECT 1 FROM %s FORCE INDEX (idx_ready) WHERE channel = %[2]d AND status = %[5]d AND next_time < '9000-01-01'%[6]s LIMIT %[7]d) AS capped`
	sqlDeadPlaces = `SELECT /* tidings:backlog-dead-places */ category, channel, 0 AS tasks FROM t_msg_dead FORCE INDEX (idx_category) GROUP BY category, channel`
	sqlDeadDepth  = `SELECT '%[1]s' AS category, %[2]d AS channel, COUNT(*) AS tasks FROM
		(SELECT 1 FROM t_msg_dead FORCE INDEX (idx_category) WHERE category = '%[1]s' AND channel = %[2]d LIMIT %[3]d) AS capped`
)

// Backlog counts what waits, at a cost that is bounded whatever waits.
func (s *Store) Backlog(ctx context.Context) (b Backlog, err error) {
	waiting, err := s.Survey(ctx)
	if err != nil {
		return b, err
	}
	now := s.Now()
	var parts []string
	for _, w := range waiting {
		part := func(state, more string) {
			parts = append(parts, fmt.Sprintf(sqlDepth, w.Lane, w.Channel, state, queueTable(w.Lane), w.Status, more, BacklogCap))
		}
		if w.Status != msg.Ready {
			if !w.Status.Queued() { // made by hand
				continue
			}
			part(w.Status.String(), "")
			continue
		}
		part("ready", " AND next_time <= UTC_TIMESTAMP(3)")
		part("waiting", " AND next_time > UTC_TIMESTAMP(3)")
		if !w.Next.After(now) {
			b.Oldest = append(b.Oldest, w)
		}
	}
	if len(parts) > 0 {
		query := strings.Replace(strings.Join(parts, " UNION ALL "), "SELECT ", "SELECT /* tidings:backlog */ ", 1)
		if err := s.db.SelectContext(ctx, &b.Depths, query); err != nil {
			return b, public(err)
		}
	}
	var places []DeadDepth
	if err := s.db.SelectContext(ctx, &places, sqlDeadPlaces); err != nil || len(places) == 0 {
		return b, public(err)
	}
	parts = parts[:0]
	for _, p := range places {
		parts = append(parts, fmt.Sprintf(sqlDeadDepth, p.Category, p.Channel, BacklogCap))
	}
	query := strings.Replace(strings.Join(parts, " UNION ALL "), "SELECT ", "SELECT /* tidings:backlog-dead */ ", 1)
	return b, public(s.db.SelectContext(ctx, &b.Dead, query))
}

// ScheduleLag is how long the first scheduled message that is still in a delay table has been due; 0: none is.
func (s *Store) ScheduleLag() time.Duration {
	first := s.earliest.Load()
	if first == nil {
		return 0
	}
	return max(0, s.Now().Sub(*first))
}

// LateScheduled is the same as ScheduleLag for a process that moves no tasks: it looks.
func (s *Store) LateScheduled(ctx context.Context) (late time.Duration, err error) {
	err = s.onRing(ctx, func(r *ring) error {
		first, err := s.firstDue(ctx, r)
		if err != nil {
			return err
		}
		late = 0
		for _, due := range first {
			if !due.IsZero() {
				late = max(late, s.Now().Sub(due))
			}
		}
		return nil
	})
	return late, public(err)
}

// Ahead counts the tasks of a lane and channel that are to be sent before an instant, up to most.
func (s *Store) Ahead(ctx context.Context, lane msg.Lane, channel msg.Channel, before time.Time, most int) (n int, err error) {
	err = s.db.GetContext(ctx, &n, fmt.Sprintf(sqlAhead, queueTable(lane)), channel, before, most)
	return n, public(err)
}

const sqlAhead = `SELECT /* tidings:ahead */ COUNT(*) FROM (SELECT 1 FROM %s FORCE INDEX (idx_ready) WHERE channel = ? AND status = 0 AND next_time < ? LIMIT ?) AS capped`
