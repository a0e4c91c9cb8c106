package store

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jmoiron/sqlx"

	"tidings/internal/msg"
)

// LaneControl is how a lane is steered: a row of t_lane.
type LaneControl struct {
	Name     string    `db:"lane"`
	Weight   int       `db:"weight"`
	Paused   bool      `db:"paused"`
	Reason   string    `db:"reason"`
	By       string    `db:"modify_by"`
	Modified time.Time `db:"modify_time"`
}

// ProviderState is a row of t_provider_state.
type ProviderState struct {
	Provider    string     `db:"provider"`
	Node        uint16     `db:"node"` // AllNodes: what holds for every process
	Paused      bool       `db:"paused"`
	Reason      string     `db:"reason"`
	By          string     `db:"modify_by"`
	BusyUntil   *time.Time `db:"busy_until"`
	Breaker     string     `db:"breaker"`
	BreakerTime *time.Time `db:"breaker_time"`
	Modified    time.Time  `db:"modify_time"`
}

// AllNodes is the node number of what holds for every process.
const AllNodes = 65535

// Control is what people, and other processes, have set.
type Control struct {
	Lanes     [len(msg.Lanes)]LaneControl
	Providers []ProviderState
	Nodes     int // processes that are alive
}

const (
	sqlLanes          = `SELECT /* tidings:lanes */ lane, weight, paused, reason, modify_by, modify_time FROM t_lane`
	sqlProviderStates = `SELECT /* tidings:provider-states */ provider, node, paused, reason, modify_by, busy_until, breaker, breaker_time, modify_time
		FROM t_provider_state WHERE node = 65535 OR node IN (SELECT node FROM t_node WHERE lease_end > UTC_TIMESTAMP(3) AND holder <> '' AND serves = 1) ORDER BY provider, node`
	sqlLiveNodes = `SELECT /* tidings:live-nodes */ COUNT(*) FROM t_node WHERE lease_end > UTC_TIMESTAMP(3) AND holder <> '' AND serves = 1`
	sqlSetLane   = `INSERT /* tidings:lane-set */ INTO t_lane (lane, weight, paused, reason, modify_by, modify_time) VALUES (?, ?, ?, ?, ?, UTC_TIMESTAMP(3))
		ON DUPLICATE KEY UPDATE weight = VALUES(weight), paused = VALUES(paused), reason = VALUES(reason), modify_by = VALUES(modify_by), modify_time = VALUES(modify_time)`
	sqlLockLane      = `SELECT /* tidings:lane-lock */ lane, weight, paused, reason, modify_by, modify_time FROM t_lane WHERE lane = ? FOR UPDATE`
	sqlPauseProvider = `INSERT /* tidings:provider-pause */ INTO t_provider_state (provider, node, paused, reason, modify_by, modify_time) VALUES (?, 65535, ?, ?, ?, UTC_TIMESTAMP(3))
		ON DUPLICATE KEY UPDATE paused = VALUES(paused), busy_until = IF(VALUES(paused) = 1, busy_until, NULL), reason = VALUES(reason),
		modify_by = VALUES(modify_by), modify_time = VALUES(modify_time)`
	sqlBusyProvider = `INSERT /* tidings:provider-busy */ INTO t_provider_state (provider, node, busy_until, modify_time) VALUES (?, 65535, ?, UTC_TIMESTAMP(3))
		ON DUPLICATE KEY UPDATE busy_until = GREATEST(COALESCE(busy_until, VALUES(busy_until)), VALUES(busy_until)), modify_time = VALUES(modify_time)`
	sqlBreaker = `INSERT /* tidings:provider-breaker */ INTO t_provider_state (provider, node, breaker, breaker_time, modify_time) VALUES (?, ?, ?, UTC_TIMESTAMP(3), UTC_TIMESTAMP(3))
		ON DUPLICATE KEY UPDATE breaker_time = IF(breaker = VALUES(breaker), breaker_time, VALUES(breaker_time)), breaker = VALUES(breaker), modify_time = VALUES(modify_time)`
)

// DefaultWeights are the lanes' shares where t_lane does not say.
var DefaultWeights = [len(msg.Lanes)]int{70, 20, 10}

// Control reads what is set for lanes and providers, and how many processes share the work.
func (s *Store) Control(ctx context.Context) (c Control, err error) {
	var lanes []LaneControl
	if err := s.db.SelectContext(ctx, &lanes, sqlLanes); err != nil {
		return c, public(err)
	}
	for _, l := range msg.Lanes {
		c.Lanes[l] = LaneControl{Name: l.String(), Weight: DefaultWeights[l]}
	}
	for _, row := range lanes {
		if l, err := msg.ParseLane(row.Name); err == nil {
			c.Lanes[l] = row
		}
	}
	if err := s.db.SelectContext(ctx, &c.Providers, sqlProviderStates); err != nil {
		return c, public(err)
	}
	return c, public(s.db.GetContext(ctx, &c.Nodes, sqlLiveNodes))
}

// MostWeight bounds a lane's weight.
const MostWeight = 1000

// ErrWeight says that a weight cannot be.
var ErrWeight = fmt.Errorf("a weight is between 1 and %d; to stop a lane, pause it", MostWeight)

// SetLane changes a lane: every process obeys within a second. by is noted in the audit.
func (s *Store) SetLane(ctx context.Context, by string, lane msg.Lane, change func(*LaneControl)) (row LaneControl, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	err = s.tx(ctx, func(tx *sqlx.Tx) error {
		var rows []LaneControl
		if err := tx.SelectContext(ctx, &rows, sqlLockLane, lane.String()); err != nil {
			return err
		}
		row = LaneControl{Name: lane.String(), Weight: DefaultWeights[lane]}
		if len(rows) > 0 {
			row = rows[0]
		}
		change(&row)
		if row.Weight < 1 || row.Weight > MostWeight {
			return ErrWeight
		}
		row.Reason, row.By, row.Modified = clip(row.Reason, 255), clip(by, 64), s.Now().Truncate(time.Millisecond)
		if _, err := tx.ExecContext(ctx, sqlSetLane, row.Name, row.Weight, row.Paused, row.Reason, row.By); err != nil {
			return err
		}
		return audit(ctx, tx, by, "lane.set", row.Name, fmt.Sprintf("weight %d, paused %v", row.Weight, row.Paused))
	})
	if errors.Is(err, ErrWeight) {
		return row, err
	}
	return row, public(err)
}

// PauseProvider stops a provider from being asked, or lets it be asked again even if it has asked for a rest, by every process within a second.
func (s *Store) PauseProvider(ctx context.Context, by, provider, reason string, paused bool) error {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	return public(s.tx(ctx, func(tx *sqlx.Tx) error {
		if _, err := tx.ExecContext(ctx, sqlPauseProvider, provider, paused, clip(reason, 255), clip(by, 64)); err != nil {
			return err
		}
		action := "provider.resume"
		if paused {
			action = "provider.pause"
		}
		return audit(ctx, tx, by, action, provider, "")
	}))
}

// BusyProvider tells every process until when a provider asked not to be asked.
func (s *Store) BusyProvider(ctx context.Context, provider string, until time.Time) error {
	_, err := s.db.ExecContext(ctx, sqlBusyProvider, provider, until)
	return public(err)
}

// NoteBreaker writes how this process finds a provider, for people to see.
func (s *Store) NoteBreaker(ctx context.Context, provider, state string) error {
	_, err := s.db.ExecContext(ctx, sqlBreaker, provider, s.Node(), state)
	return public(err)
}
