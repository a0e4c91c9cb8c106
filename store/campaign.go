package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"time"

	"tidings/internal/msg"
)

// Campaign is a number of messages under one batch_id.
type Campaign struct {
	SourceID string    `db:"source_id"`
	BatchID  string    `db:"batch_id"`
	First    uint64    `db:"first_msg_id"`
	Last     uint64    `db:"last_msg_id"`
	Created  time.Time `db:"create_time"`
}

// CampaignCount is how many tasks of a campaign are in a state on a channel.
type CampaignCount struct {
	Channel msg.Channel `db:"channel"`
	Status  msg.State   `db:"status"`
	Tasks   int64       `db:"tasks"`
}

const (
	sqlCampaign  = `SELECT /* tidings:batch */ source_id, batch_id, first_msg_id, last_msg_id, create_time FROM t_batch WHERE source_id = ? AND batch_id = ?`
	sqlCampaigns = `SELECT /* tidings:batch-list */ source_id, batch_id, first_msg_id, last_msg_id, create_time FROM t_batch
		WHERE (? = '' OR source_id = ?) AND first_msg_id < ? ORDER BY first_msg_id DESC LIMIT ?`
)

// campaignStatement reads ranges of primary keys: a campaign's messages lie between its first and its last id.
func campaignStatement(delayTables []string) string {
	var parts []string
	part := func(table, where string) {
		parts = append(parts, "SELECT channel, status FROM "+table+" WHERE msg_id BETWEEN ? AND ? AND batch_id = ? AND source_id = ?"+where)
	}
	for _, l := range msg.Lanes {
		part(queueTable(l), "")
	}
	for _, table := range delayTables {
		part(table, fmt.Sprintf(" AND status <> %d", msg.Moved))
	}
	part("t_msg_dead", "")
	part("t_msg_record", " AND finish_time >= ?")
	return "SELECT /* tidings:batch-counts */ channel, status, COUNT(*) AS tasks FROM (" + strings.Join(parts, " UNION ALL ") +
		") AS tasks GROUP BY channel, status ORDER BY channel, status"
}

// Campaign reads a campaign and how far its tasks are. ErrNotFound.
func (s *Store) Campaign(ctx context.Context, source, batchID string) (c Campaign, counts []CampaignCount, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	err = s.db.GetContext(ctx, &c, sqlCampaign, source, batchID)
	if errors.Is(err, sql.ErrNoRows) {
		return c, nil, fmt.Errorf("batch %w", ErrNotFound)
	}
	if err != nil {
		return c, nil, public(err)
	}
	err = s.onRing(ctx, func(r *ring) error {
		var args []any
		for range len(msg.Lanes) + len(r.tables) + 2 {
			args = append(args, c.First, c.Last, batchID, source)
		}
		counts = nil
		return s.db.SelectContext(ctx, &counts, r.campaigns, append(args, began(c.First))...)
	})
	return c, counts, public(err)
}

// Campaigns lists campaigns, the latest first, whose first message's id is below before. An empty source means all.
func (s *Store) Campaigns(ctx context.Context, source string, before uint64, limit int) (list []Campaign, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	err = s.db.SelectContext(ctx, &list, sqlCampaigns, source, source, before, limit)
	return list, public(err)
}
