package store

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"time"
)

// Submission is a row of t_msg_submit that has not been taken yet: a request by SQL.
type Submission struct {
	ID         uint64         `db:"submit_id"`
	SourceID   string         `db:"source_id"`
	RequestID  string         `db:"request_id"`
	TemplateID string         `db:"template_id"`
	Channels   string         `db:"channels"`
	Priority   string         `db:"priority"`
	Category   string         `db:"category"`
	Receiver   string         `db:"receiver"`
	Params     sql.NullString `db:"params"`
	Content    sql.NullString `db:"content"`
	SendAt     sql.NullTime   `db:"send_at"`
	Expire     sql.NullTime   `db:"expire_time"`
	Created    time.Time      `db:"create_time"`
}

// SubmitPlace is a place in the order in which submissions are taken; zero: before the first.
type SubmitPlace struct {
	Next time.Time `db:"next_time"`
	ID   uint64    `db:"submit_id"`
}

// MaxSubmission is how many bytes params and content of a submission may have together: as much as a request by HTTP.
const MaxSubmission = 1 << 20

const (
	submitRows = 200
	// A look waits for nobody: what is not committed is not seen, and is found by a later look whatever its number. Sizes first: a
	// few rows of attachments would fill the memory.
	sqlSubmitLook = `SELECT /* tidings:submit-look */ submit_id, next_time, COALESCE(LENGTH(params), 0) + COALESCE(LENGTH(content), 0) AS size
		FROM t_msg_submit FORCE INDEX (idx_status) WHERE status = 'new' AND next_time <= UTC_TIMESTAMP(3) AND (next_time > ? OR (next_time = ? AND submit_id > ?))
		ORDER BY next_time, submit_id LIMIT ?`
	sqlSubmitted = `SELECT /* tidings:submit-read */ submit_id, source_id, request_id, template_id, channels, priority, category, receiver, params, content, send_at,
		expire_time, create_time FROM t_msg_submit WHERE submit_id IN (%s) AND status = 'new'`
	// Params and content are the message's from now on.
	sqlSubmitTake = `UPDATE /* tidings:submit-take */ t_msg_submit SET status = 'accepted', msg_id = ELT(INTERVAL(submit_id, %[1]s), %[2]s), params = NULL, content = NULL,
		error = '', next_time = UTC_TIMESTAMP(3) WHERE submit_id IN (%[1]s) AND status = 'new'`
	sqlSubmitTaken  = `SELECT /* tidings:submit-taken */ submit_id FROM t_msg_submit WHERE submit_id IN (%s) AND status = 'new'`
	sqlSubmitReject = `UPDATE /* tidings:submit-reject */ t_msg_submit SET status = 'rejected', error = ?, next_time = UTC_TIMESTAMP(3) WHERE submit_id = ? AND status = 'new'`
	sqlSubmitLater  = `UPDATE /* tidings:submit-later */ t_msg_submit SET error = ?, next_time = UTC_TIMESTAMP(3) + INTERVAL ? MICROSECOND WHERE submit_id = ? AND status = 'new'`
	sqlSubmitKnown  = `UPDATE /* tidings:submit-known */ t_msg_submit SET status = 'accepted', msg_id = ?, params = NULL, content = NULL, error = '', next_time = UTC_TIMESTAMP(3)
		WHERE submit_id = ? AND status = 'new'`
	sqlPurgeSubmitted = `DELETE /* tidings:purge-submitted */ FROM t_msg_submit WHERE status = ? AND next_time < UTC_TIMESTAMP(3) - INTERVAL ? SECOND ORDER BY next_time LIMIT ?`
)

// SubmitPage is a part of the submissions that are to be taken.
type SubmitPage struct {
	List     []Submission
	TooLarge []uint64 // larger than MaxSubmission: of those nothing is read
	Last     SubmitPlace
	More     bool // there may be others behind Last
}

// Submitted reads submissions that are to be taken, from a place on.
func (s *Store) Submitted(ctx context.Context, after SubmitPlace) (page SubmitPage, err error) {
	var seen []struct {
		SubmitPlace
		Size int `db:"size"`
	}
	from := earliest(after.Next)
	if err := s.db.SelectContext(ctx, &seen, sqlSubmitLook, from, from, after.ID, submitRows); err != nil {
		return page, public(err)
	}
	var (
		ids   []uint64
		bytes int
	)
	page.Last, page.More = after, len(seen) == submitRows
	for _, row := range seen {
		if row.Size > MaxSubmission {
			page.TooLarge = append(page.TooLarge, row.ID)
		} else {
			if bytes += row.Size; bytes > MaxSubmission && len(ids) > 0 {
				page.More = true
				break
			}
			ids = append(ids, row.ID)
		}
		page.Last = row.SubmitPlace
	}
	if len(ids) > 0 {
		err = s.db.SelectContext(ctx, &page.List, fmt.Sprintf(sqlSubmitted, joinIDs(ids)))
	}
	return page, public(err)
}

// RejectSubmission says why a submission is no message. It stays, to be mended and set to new, until it is purged.
func (s *Store) RejectSubmission(ctx context.Context, id uint64, why string) error {
	_, err := s.db.ExecContext(ctx, sqlSubmitReject, clip(why, 1024), id)
	return public(err)
}

// PostponeSubmission lets a submission wait, and says why.
func (s *Store) PostponeSubmission(ctx context.Context, id uint64, why string, wait time.Duration) error {
	_, err := s.db.ExecContext(ctx, sqlSubmitLater, clip(why, 1024), wait.Microseconds(), id)
	return public(err)
}

// KnownSubmission notes the message that a submission's key stood for already.
func (s *Store) KnownSubmission(ctx context.Context, id, msgID uint64) error {
	_, err := s.db.ExecContext(ctx, sqlSubmitKnown, msgID, id)
	return public(err)
}

// PurgeSubmitted forgets submissions that were accepted or rejected so long ago, and tells how many.
func (s *Store) PurgeSubmitted(ctx context.Context, age time.Duration) (purged int64, err error) {
	for _, status := range []string{"accepted", "rejected"} {
		n, err := s.purge(ctx, sqlPurgeSubmitted, status, int64(age.Seconds()))
		if purged += n; err != nil {
			return purged, err
		}
	}
	return purged, nil
}

// takeSubmitted marks the submissions that messages come from. It comes first in its packet: if one of them is not new any more, nothing
// is accepted.
func takeSubmitted(p *packet, batch []*pending) {
	var own []*pending
	for _, m := range batch {
		if m.SubmitID > 0 {
			own = append(own, m)
		}
	}
	if len(own) == 0 {
		return
	}
	slices.SortFunc(own, func(a, b *pending) int { return cmp.Compare(a.SubmitID, b.SubmitID) })
	ids, messages := make([]uint64, len(own)), make([]uint64, len(own))
	for i, m := range own {
		ids[i], messages[i] = m.SubmitID, m.id
	}
	p.add(fmt.Sprintf(sqlSubmitTake, joinIDs(ids), joinIDs(messages)))
	p.expect(len(own))
}

// ErrTaken says that a submission is not new any more: somebody else has taken it, or a person has changed it.
var ErrTaken = errors.New("the submission is not new any more")

// answerTaken answers the messages whose submission is not new any more, and returns the others.
func (s *Store) answerTaken(ctx context.Context, batch []*pending) []*pending {
	var ids, fresh []uint64
	for _, p := range batch {
		if p.SubmitID > 0 {
			ids = append(ids, p.SubmitID)
		}
	}
	if len(ids) == 0 {
		return batch
	}
	if err := s.db.SelectContext(ctx, &fresh, fmt.Sprintf(sqlSubmitTaken, joinIDs(ids))); err != nil {
		return batch // the next try meets the same trouble, and decides
	}
	rest := batch[:0]
	for _, p := range batch {
		if p.SubmitID > 0 && !slices.Contains(fresh, p.SubmitID) {
			p.finish(Accepted{}, ErrTaken)
			continue
		}
		rest = append(rest, p)
	}
	return rest
}
