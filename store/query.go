package store

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"tidings/internal/id"
	"tidings/internal/msg"
)

// MessageView is a message as it stands, for its caller.
type MessageView struct {
	MsgID    uint64
	Status   string // derived from the tasks, see Status
	Tasks    []TaskView
	Attempts []AttemptView // those that did not end in success, oldest first
}

// TaskView is a task with what is known of its end.
type TaskView struct {
	Task
	Finished      time.Time // zero: it has not ended
	ProviderMsgID string
	Latency       time.Duration // of the successful or last attempt
	Place         string        // the table that it stands in
}

// AttemptView is a row of the attempt log.
type AttemptView struct {
	Channel  msg.Channel `db:"channel"`
	Attempt  int         `db:"attempt"`
	Outcome  string      `db:"outcome"`
	Provider string      `db:"provider"`
	Code     string      `db:"code"`
	Text     string      `db:"text"`
	Latency  int64       `db:"latency_ms"`
	Time     time.Time   `db:"create_time"`
}

// messagesStatement is one statement over all places, so that a task that moves meanwhile is seen exactly once. No record ends
// before its message began: that bound leaves out the partitions of earlier days.
// Content and params stay where they are: nobody is shown them, and a page of attachments would fill the memory.
func messagesStatement(delayTables []string) string {
	columns := strings.Replace(taskColumns, "params, content", "NULL AS params, NULL AS content", 1)
	var parts []string
	part := func(table, more, where string) {
		parts = append(parts, fmt.Sprintf("SELECT %s, '%s' AS place, %s FROM %[2]s WHERE msg_id IN (%%[1]s)%[4]s", columns, table, more, where))
	}
	const notEnded = "NULL AS finish_time, '' AS provider_msg_id, 0 AS latency_ms"
	for _, l := range msg.Lanes {
		part(queueTable(l), notEnded, "")
	}
	for _, table := range delayTables {
		part(table, notEnded, fmt.Sprintf(" AND status <> %d", msg.Moved))
	}
	part("t_msg_dead", notEnded, "")
	part("t_msg_record", "finish_time, provider_msg_id, latency_ms", " AND finish_time >= ?")
	return strings.Replace(strings.Join(parts, " UNION ALL "), "SELECT ", "SELECT /* tidings:messages */ ", 1) + " ORDER BY msg_id DESC, channel"
}

const (
	sqlMessageAttempts = `SELECT /* tidings:message-attempts */ channel, attempt, outcome, provider, code, text, latency_ms, create_time
		FROM t_msg_attempt WHERE msg_id = ? AND create_time >= ? ORDER BY create_time, channel, attempt`
	sqlByRequest = `SELECT /* tidings:by-request */ msg_id FROM t_idempotency WHERE source_id = ? AND request_hash = ?`
)

// Message reads a message with its tasks and attempts, but without content and params. ErrNotFound when there is none with that id.
func (s *Store) Message(ctx context.Context, msgID uint64) (*MessageView, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	if msgID == 0 {
		return nil, ErrNotFound
	}
	found, err := s.messages(ctx, []uint64{msgID})
	if len(found) == 0 && err == nil && s.ring.refresh(ctx) == nil { // it may be in a table that our copy of the ring does not have
		found, err = s.messages(ctx, []uint64{msgID})
	}
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("message %d: %w", msgID, ErrNotFound)
	}
	m := &found[0]
	if err := s.db.SelectContext(ctx, &m.Attempts, sqlMessageAttempts, msgID, began(msgID)); err != nil {
		return nil, public(err)
	}
	return m, nil
}

// began is an instant that a message's rows are not older than. The slack is for a database whose clock was set back: ids
// then run ahead of it. It costs one more partition.
func began(msgID uint64) time.Time { return id.Time(msgID).Add(-clockSlack) }

const clockSlack = 24 * time.Hour

// messages reads messages without their attempts, the newest first.
func (s *Store) messages(ctx context.Context, ids []uint64) (found []MessageView, err error) {
	err = s.onRing(ctx, func(r *ring) error {
		found, err = s.readMessages(ctx, fmt.Sprintf(r.messages, joinIDs(ids)), began(slices.Min(ids)))
		return err
	})
	now := s.Now()
	for i := range found {
		found[i].Status = Status(found[i].Tasks, now)
	}
	return found, public(err)
}

func (s *Store) readMessages(ctx context.Context, query string, began time.Time) (found []MessageView, err error) {
	rows, err := s.db.QueryContext(ctx, query, began)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var (
			t        TaskView
			finished sql.NullTime
			latency  int64
		)
		if err := scanTask(rows, &t.Task, &t.Place, &finished, &t.ProviderMsgID, &latency); err != nil {
			return nil, err
		}
		t.Finished, t.Latency = finished.Time, time.Duration(latency)*time.Millisecond
		if n := len(found); n == 0 || found[n-1].MsgID != t.MsgID {
			found = append(found, MessageView{MsgID: t.MsgID})
		}
		m := &found[len(found)-1]
		m.Tasks = append(m.Tasks, t)
	}
	return found, rows.Err()
}

// MessageByRequest finds the id of the message that a source's key stands for. ErrNotFound when the key is unknown or forgotten.
func (s *Store) MessageByRequest(ctx context.Context, source, requestID string) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	key := sha256.Sum256([]byte(requestID))
	var msgID uint64
	err := s.db.GetContext(ctx, &msgID, sqlByRequest, source, key[:])
	if errors.Is(err, sql.ErrNoRows) {
		return 0, fmt.Errorf("request %w", ErrNotFound)
	}
	return msgID, public(err)
}

// Status derives a message's status from its tasks; the view v_message does the same in SQL. Skipped tasks do not count,
// unless all are.
func Status(tasks []TaskView, now time.Time) string {
	var (
		count   [msg.Moved + 1]int
		counted int
		due     time.Time
	)
	for i := range tasks {
		t := &tasks[i]
		count[t.Status]++
		switch {
		case t.Status == msg.Sending || t.Status == msg.Unknown || (t.Status == msg.Ready && t.Attempt > 0):
			return "sending"
		case t.Status == msg.Ready && (due.IsZero() || t.Due.Before(due)):
			due = t.Due
		}
		if t.Status != msg.Skipped {
			counted++
		}
	}
	switch {
	case count[msg.Ready] > 0 && due.After(now):
		return "scheduled"
	case count[msg.Ready] > 0:
		return "dispatched"
	case counted == 0:
		return msg.Skipped.String()
	case count[msg.Success] == counted:
		return msg.Success.String()
	case count[msg.Success] > 0:
		return "partial"
	case count[msg.Cancelled] == counted:
		return msg.Cancelled.String()
	case count[msg.Expired] == counted:
		return msg.Expired.String()
	}
	return msg.Failed.String()
}
