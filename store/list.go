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
	After    DueCursor // for Scheduled: the cursor of the page before
	Limit    int
}

// Page is a part of a list, the newest message first.
type Page struct {
	Messages []MessageView
	Next     uint64    // where the next page begins; 0: there is none
	NextDue  DueCursor // the same for Scheduled
}

// DueCursor is a place in a list by due time.
type DueCursor struct {
	Due   time.Time
	MsgID uint64 // 0: the beginning
}

// listRows is how many rows a page examines in each table at most, fewer where there are many delay tables. Waiting tasks have no index by receiver or source (each
// costs every claim), so a page may show less than its limit, or nothing, and still have a next one.
const (
	listRows  = 2000
	listChunk = 100
)

const (
	sqlListWaiting = `SELECT /* tidings:list-waiting */ msg_id, channel, source_id, receiver FROM %s
		WHERE msg_id > 0 AND msg_id >= ? AND msg_id < ? ORDER BY msg_id DESC LIMIT ?`
	sqlListDelayed = `SELECT /* tidings:list-delayed */ msg_id, channel, source_id, receiver, status FROM %s
		WHERE msg_id >= ? AND msg_id < ? ORDER BY msg_id DESC LIMIT ?`
	sqlListDead = `SELECT /* tidings:list-dead */ msg_id, channel, source_id, receiver FROM t_msg_dead
		WHERE msg_id >= ? AND msg_id < ? ORDER BY msg_id DESC LIMIT ?`
	sqlListReceiver = `SELECT /* tidings:list-receiver */ msg_id, channel, source_id, receiver FROM t_msg_record
		WHERE receiver = ? AND create_time >= ? AND create_time <= ? AND msg_id >= ? AND msg_id < ? ORDER BY create_time DESC, msg_id DESC LIMIT ?`
	sqlListAll = `SELECT /* tidings:list-all */ msg_id, channel, source_id, receiver FROM t_msg_record
		WHERE finish_time >= ? AND create_time >= ? AND create_time <= ? AND msg_id >= ? AND msg_id < ? ORDER BY msg_id DESC LIMIT ?`
	sqlListSource = `SELECT /* tidings:list-source */ msg_id, channel, source_id, receiver FROM t_msg_record
		WHERE source_id = ? AND create_time >= ? AND create_time <= ? AND msg_id >= ? AND msg_id < ? ORDER BY create_time DESC, msg_id DESC LIMIT ?`
)

// rowsOf is how many rows a page examines in each delay table.
func (r *ring) rowsOf() int { return max(listRows*8/max(len(r.tables), 8), listChunk) }

type listRow struct {
	MsgID    uint64      `db:"msg_id"`
	Channel  msg.Channel `db:"channel"`
	SourceID string      `db:"source_id"`
	Receiver string      `db:"receiver"`
	Status   msg.State   `db:"status"` // where tombstones are among the rows
	Due      time.Time   `db:"due_time"`
}

// List shows messages, waiting and ended ones alike. Whatever the filter, it examines a bounded
// number of rows.
func (s *Store) List(ctx context.Context, f Filter) (Page, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	var (
		ids  []uint64
		next uint64
	)
	err := s.onRing(ctx, func(r *ring) (err error) {
		ids, next, err = s.candidates(ctx, r, &f)
		return err
	})
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
func (s *Store) candidates(ctx context.Context, r *ring, f *Filter) (ids []uint64, next uint64, err error) {
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
	for _, table := range r.tables {
		var rows []listRow
		if err := s.db.SelectContext(ctx, &rows, fmt.Sprintf(sqlListDelayed, table), low, high, r.rowsOf()); err != nil {
			return nil, 0, err
		}
		if len(rows) == r.rowsOf() {
			next = max(next, rows[len(rows)-1].MsgID)
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
	return r.Status != msg.Moved && (f.SourceID == "" || r.SourceID == f.SourceID) && (f.Receiver == "" || r.Receiver == f.Receiver) && (f.Channel == 0 || r.Channel == f.Channel)
}

// The rows of a queue table that wait for their time are the mover's; a task that is tried again later is not scheduled.
const (
	sqlListSoon = `SELECT /* tidings:list-soon */ msg_id, channel, source_id, receiver, due_time FROM %s FORCE INDEX (idx_ready)
		WHERE channel = ? AND status = 0 AND next_time > UTC_TIMESTAMP(3) AND next_time >= ? AND (next_time > ? OR msg_id > ?) AND msg_id >= ? AND msg_id < ? AND attempt = 0
		ORDER BY next_time, msg_id LIMIT ?`
	sqlListLater = `SELECT /* tidings:list-later */ msg_id, channel, source_id, receiver, due_time FROM %s FORCE INDEX (idx_due)
		WHERE status = 0 AND due_time > UTC_TIMESTAMP(3) AND due_time >= ? AND (due_time > ? OR msg_id > ?) AND msg_id >= ? AND msg_id < ?
		ORDER BY due_time, msg_id LIMIT ?`
)

// Scheduled shows messages that wait for their due time, the soonest first. It examines a bounded number of rows, so a page may be short and
// still have a next one.
func (s *Store) Scheduled(ctx context.Context, f Filter) (Page, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	var (
		rows []listRow
		end  DueCursor
	)
	err := s.onRing(ctx, func(r *ring) (err error) {
		rows, end, err = s.upcoming(ctx, r, &f)
		return err
	})
	if err != nil {
		return Page{}, public(err)
	}
	page := Page{NextDue: end}
	for part := range slices.Chunk(rows, listChunk) {
		ids := make([]uint64, len(part))
		for i := range part {
			ids[i] = part[i].MsgID
		}
		found, err := s.messages(ctx, ids)
		if err != nil {
			return Page{}, err
		}
		byID := map[uint64]MessageView{}
		for _, m := range found {
			byID[m.MsgID] = m
		}
		for _, row := range part {
			m, ok := byID[row.MsgID]
			if !ok || m.Status != "scheduled" {
				continue
			}
			if page.Messages = append(page.Messages, m); len(page.Messages) == f.Limit {
				page.NextDue = DueCursor{row.Due, row.MsgID}
				return page, nil
			}
		}
	}
	return page, nil
}

// upcoming finds the first rows by due time after the cursor, each message once, up to the point that every table was examined to: end, or
// zero when the tables hold no more.
func (s *Store) upcoming(ctx context.Context, r *ring, f *Filter) (rows []listRow, end DueCursor, err error) {
	from := earliest(f.After.Due)
	low, high := f.bounds()
	add := func(query string, args ...any) error {
		var more []listRow
		if err := s.db.SelectContext(ctx, &more, query, append(args, from, from, f.After.MsgID, low, high, r.rowsOf())...); err != nil {
			return err
		}
		if n := len(more); n == r.rowsOf() {
			if last := (DueCursor{more[n-1].Due, more[n-1].MsgID}); end.MsgID == 0 || last.compare(end) < 0 {
				end = last
			}
		}
		rows = append(rows, more...)
		return nil
	}
	for _, table := range r.tables {
		if err := add(fmt.Sprintf(sqlListLater, table)); err != nil {
			return nil, end, err
		}
	}
	for _, l := range msg.Lanes {
		for _, c := range msg.Channels {
			if f.Channel != 0 && f.Channel != c {
				continue
			}
			if err := add(fmt.Sprintf(sqlListSoon, queueTable(l)), c); err != nil {
				return nil, end, err
			}
		}
	}
	slices.SortFunc(rows, func(a, b listRow) int { return DueCursor{a.Due, a.MsgID}.compare(DueCursor{b.Due, b.MsgID}) })
	seen := map[uint64]bool{}
	rows = slices.DeleteFunc(rows, func(row listRow) bool {
		at := DueCursor{row.Due, row.MsgID}
		if seen[row.MsgID] || !f.fits(&row) || at.compare(f.After) <= 0 || (end.MsgID != 0 && at.compare(end) > 0) {
			return true
		}
		seen[row.MsgID] = true
		return false
	})
	return rows, end, nil
}

func (c DueCursor) compare(other DueCursor) int {
	return cmp.Or(c.Due.Compare(other.Due), cmp.Compare(c.MsgID, other.MsgID))
}
