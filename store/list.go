package store

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"tidings/internal/id"
	"tidings/internal/msg"
)

// Filter says which messages a list is to show. Zero fields mean any.
type Filter struct {
	SourceID string // empty: of all sources
	Receiver string
	Channel  msg.Channel
	Status   string    // the derived status
	Since    time.Time // accepted at or after
	Until    time.Time // accepted before
	Before   uint64    // ids below it; the cursor of the page before
	Limit    int
}

// Page is a part of a list, the newest message first.
type Page struct {
	Messages []MessageView
	Next     uint64 // where the next page begins; 0: there is none
}

// listRows is how many rows a page examines in each table at most. Waiting tasks have no index by receiver or source (each
// costs every claim), so a page may show less than its limit, or nothing, and still have a next one.
const (
	listRows  = 2000
	listChunk = 100
)

const (
	sqlListWaiting = `SELECT /* tidings:list-waiting */ msg_id, channel, source_id, receiver FROM %s
		WHERE msg_id > 0 AND msg_id >= ? AND msg_id < ? ORDER BY msg_id DESC LIMIT ?`
	sqlListDead = `SELECT /* tidings:list-dead */ msg_id, channel, source_id, receiver FROM t_msg_dead
		WHERE msg_id >= ? AND msg_id < ? ORDER BY msg_id DESC LIMIT ?`
	sqlListReceiver = `SELECT /* tidings:list-receiver */ msg_id, channel, source_id, receiver FROM t_msg_record
		WHERE receiver = ? AND create_time >= ? AND create_time <= ? AND msg_id >= ? AND msg_id < ? ORDER BY create_time DESC, msg_id DESC LIMIT ?`
	sqlListAll = `SELECT /* tidings:list-all */ msg_id, channel, source_id, receiver FROM t_msg_record
		WHERE finish_time >= ? AND create_time >= ? AND create_time <= ? AND msg_id >= ? AND msg_id < ? ORDER BY msg_id DESC LIMIT ?`
	sqlListSource = `SELECT /* tidings:list-source */ msg_id, channel, source_id, receiver FROM t_msg_record
		WHERE source_id = ? AND create_time >= ? AND create_time <= ? AND msg_id >= ? AND msg_id < ? ORDER BY create_time DESC, msg_id DESC LIMIT ?`
)

type listRow struct {
	MsgID    uint64      `db:"msg_id"`
	Channel  msg.Channel `db:"channel"`
	SourceID string      `db:"source_id"`
	Receiver string      `db:"receiver"`
}

// List shows messages, waiting and ended ones alike. Whatever the filter, it examines a bounded
// number of rows.
func (s *Store) List(ctx context.Context, f Filter) (Page, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	ids, next, err := s.candidates(ctx, &f)
	if err != nil {
		return Page{}, public(err)
	}
	page := Page{Next: next}
	for chunk := range slices.Chunk(ids, listChunk) {
		found, err := s.messages(ctx, chunk)
		if err != nil {
			return Page{}, err
		}
		for _, m := range found {
			if f.Status != "" && m.Status != f.Status {
				continue
			}
			if page.Messages = append(page.Messages, m); len(page.Messages) == f.Limit {
				if m.MsgID != ids[len(ids)-1] || next != 0 {
					page.Next = m.MsgID
				}
				return page, nil
			}
		}
	}
	return page, nil
}

// candidates finds ids that may be in the list, the newest first, down to the point that every table was examined to. next
// is that point, or 0 when the tables hold no more.
func (s *Store) candidates(ctx context.Context, f *Filter) (ids []uint64, next uint64, err error) {
	low, high := f.bounds()
	if low >= high {
		return nil, 0, nil
	}
	var tables [][]listRow
	for _, l := range msg.Lanes {
		var rows []listRow
		if err := s.db.SelectContext(ctx, &rows, fmt.Sprintf(sqlListWaiting, queueTable(l)), low, high, listRows); err != nil {
			return nil, 0, err
		}
		tables = append(tables, rows)
	}
	var dead, ended []listRow
	if err := s.db.SelectContext(ctx, &dead, sqlListDead, low, high, listRows); err != nil {
		return nil, 0, err
	}
	query, key := sqlListSource, any(f.SourceID)
	switch {
	case f.Receiver != "":
		query, key = sqlListReceiver, f.Receiver
	case f.SourceID == "": // no record ends before its message began: that leaves out the partitions of earlier days
		query, key = sqlListAll, began(low)
	}
	if err := s.db.SelectContext(ctx, &ended, query, key, id.Time(low), id.Time(high), low, high, listRows); err != nil {
		return nil, 0, err
	}
	for _, rows := range append(tables, dead, ended) {
		if len(rows) == listRows {
			next = max(next, rows[len(rows)-1].MsgID)
		}
		for _, r := range rows {
			if f.fits(&r) {
				ids = append(ids, r.MsgID)
			}
		}
	}
	slices.SortFunc(ids, func(a, b uint64) int { return cmp.Compare(b, a) })
	ids = slices.DeleteFunc(slices.Compact(ids), func(id uint64) bool { return id < next })
	return ids, next, nil
}

// bounds turns times and cursor into a range of ids, whose top bits are the time.
func (f *Filter) bounds() (low, high uint64) {
	low, high = 1, math.MaxInt64
	if !f.Since.IsZero() {
		low = max(low, id.First(f.Since))
	}
	if !f.Until.IsZero() {
		high = min(high, id.First(f.Until))
	}
	if f.Before > 0 {
		high = min(high, f.Before)
	}
	return low, high
}

func (f *Filter) fits(r *listRow) bool {
	return (f.SourceID == "" || r.SourceID == f.SourceID) && (f.Receiver == "" || r.Receiver == f.Receiver) && (f.Channel == 0 || r.Channel == f.Channel)
}
