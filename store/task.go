package store

import (
	"database/sql"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"tidings/internal/msg"
)

// Task is one message on one channel, as a queue table holds it.
type Task struct {
	MsgID           uint64
	Channel         msg.Channel
	SourceID        string
	RequestID       string // the caller's key; empty: none
	BatchID         string
	Category        msg.Category
	Lane            msg.Lane
	Receiver        string
	TemplateID      string
	TemplateVersion uint32
	Params          json.RawMessage // nil: none
	Content         json.RawMessage // a Content; nil when a template is used
	Status          msg.State
	Attempt         int // attempts so far, the running one included
	AttemptLimit    int
	Owner           string
	Due             time.Time
	Next            time.Time
	Expire          time.Time
	Provider        string
	LastError       string
	Created         time.Time
	// LeaseEnd is when this process's claim ends, by its own monotonic clock; a little before the row says so.
	LeaseEnd time.Time
}

// Content is what a message without a template says.
type Content struct {
	Subject string `json:"subject,omitempty"`
	Text    string `json:"text,omitempty"`
	HTML    string `json:"html,omitempty"`
	// Attachments go with e-mails. JSON has their content in base64.
	Attachments []Attachment `json:"attachments,omitempty"`
}

// Attachment is a file of a message.
type Attachment struct {
	Filename    string `json:"filename"`
	ContentType string `json:"content_type"`
	Content     []byte `json:"content"`
}

// Key is the task's name on the outside.
func (t *Task) Key() string { return msg.TaskKey(t.MsgID, t.Channel) }

// bytes is about what the task takes in a statement.
func (t *Task) bytes() int {
	return 512 + len(t.Content) + len(t.Params) + len(t.Receiver) + len(t.RequestID) + len(t.LastError)
}

// taskColumns are the columns that all task tables share, in the order of scanTask and taskArgs.
const taskColumns = `msg_id, channel, source_id, request_id, batch_id, category, priority, receiver, template_id, template_version,
	params, content, status, attempt, attempt_limit, owner, due_time, next_time, expire_time, provider, last_error, create_time`

type scanner interface{ Scan(...any) error }

func scanTask(rows scanner, t *Task, more ...any) error {
	var (
		category, lane  string
		params, content sql.RawBytes
	)
	if r, ok := rows.(*sql.Row); ok { // RawBytes need Rows: a Row is closed before they are read
		return fmt.Errorf("scanTask wants rows, not %T", r)
	}
	dest := []any{
		&t.MsgID, &t.Channel, &t.SourceID, &t.RequestID, &t.BatchID, &category, &lane, &t.Receiver, &t.TemplateID, &t.TemplateVersion,
		&params, &content, &t.Status, &t.Attempt, &t.AttemptLimit, &t.Owner, &t.Due, &t.Next, &t.Expire, &t.Provider, &t.LastError, &t.Created,
	}
	if err := rows.Scan(append(dest, more...)...); err != nil {
		return err
	}
	if params != nil {
		t.Params = append(json.RawMessage{}, params...)
	}
	if content != nil {
		t.Content = append(json.RawMessage{}, content...)
	}
	var err error
	if t.Category, err = msg.ParseCategory(category); err != nil {
		return err
	}
	t.Lane, err = msg.ParseLane(lane)
	return err
}

// jsonArg passes a JSON value as text: the driver would mark bytes as binary, which JSON columns refuse.
func jsonArg(v json.RawMessage) any {
	if v == nil {
		return nil
	}
	return string(v)
}

func queueTable(l msg.Lane) string { return "t_msg_queue_" + l.String() }

// values writes n groups of placeholders, one a row.
func values(b *strings.Builder, group string, n int) {
	for i := range n {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(group)
	}
}

// idList writes the tasks' message ids as literals, see joinIDs.
func idList(tasks []Task) string {
	ids := make([]uint64, len(tasks))
	for i := range tasks {
		ids[i] = tasks[i].MsgID
	}
	return joinIDs(ids)
}

// joinIDs writes ids as literals: numbers need no escaping, and a list of hundreds costs less this way.
func joinIDs(ids []uint64) string {
	b := make([]byte, 0, 20*len(ids))
	for i, id := range ids {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendUint(b, id, 10)
	}
	return string(b)
}
