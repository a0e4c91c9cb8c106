package crash

import (
	"bufio"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/emersion/go-smtp"
)

// delivery is what a provider did with a request.
type delivery struct {
	at      time.Time
	verdict string // taken: and said so; hung: taken, and never said so; refused
}

// world is what is at the other end: what each provider saw, by the task's key. It is also written to a log that only grows.
type world struct {
	mu   sync.Mutex
	seen map[string][]delivery
	log  *os.File
}

func newWorld(t testing.TB, dir string) *world {
	f, err := os.OpenFile(filepath.Join(dir, "deliveries"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return &world{seen: map[string][]delivery{}, log: f}
}

// ask says what is done with a request for a key: most are taken, some fail once or always, some are taken without an answer.
func (w *world) ask(key string) string {
	h := fnv.New32a()
	h.Write([]byte(key))
	class := h.Sum32() % 100
	w.mu.Lock()
	defer w.mu.Unlock()
	before := len(w.seen[key])
	verdict := "taken"
	switch {
	case class < 3:
		verdict = "refused"
	case class < 12 && before < 2:
		verdict = "refused"
	case class < 14:
		verdict = "gone"
	case class < 16 && before == 0:
		verdict = "hung"
	case class < 20:
		verdict = "slow"
	}
	if verdict != "slow" {
		w.noteLocked(key, delivery{time.Now(), verdict})
	}
	return verdict
}

func (w *world) note(key string, d delivery) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.noteLocked(key, d)
}

func (w *world) noteLocked(key string, d delivery) {
	w.seen[key] = append(w.seen[key], d)
	fmt.Fprintf(w.log, "%d %s %s\n", d.at.UnixNano(), key, d.verdict)
}

// late takes a request shortly before its time is over. Whether its sender still waits then tells what he knows.
func (w *world) late(key string, gone func() bool) {
	d := delivery{time.Now(), "taken"}
	time.Sleep(slow)
	if gone() {
		d.verdict = "hung"
	}
	w.note(key, d)
}

const (
	hang = 2500 * time.Millisecond // longer than a send may take
	slow = 1150 * time.Millisecond // shorter
)

func (w *world) webhook(t testing.TB) string {
	s := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		switch w.ask(r.Header.Get("webhook-id")) {
		case "refused":
			rw.WriteHeader(http.StatusInternalServerError)
		case "gone":
			rw.WriteHeader(http.StatusGone)
		case "hung":
			time.Sleep(hang)
		case "slow":
			w.late(r.Header.Get("webhook-id"), func() bool { return r.Context().Err() != nil })
		}
	}))
	t.Cleanup(s.Close)
	return s.URL
}

type mailbox struct{ w *world }

type mailSession struct{ w *world }

func (m mailbox) NewSession(*smtp.Conn) (smtp.Session, error) { return &mailSession{m.w}, nil }
func (*mailSession) Reset()                                   {}
func (*mailSession) Logout() error                            { return nil }
func (*mailSession) Mail(string, *smtp.MailOptions) error     { return nil }
func (*mailSession) Rcpt(string, *smtp.RcptOptions) error     { return nil }

var mailKey = regexp.MustCompile(`(?i)message-id: <(\d+-email)@`)

func (m *mailSession) Data(r io.Reader) error {
	body, err := io.ReadAll(r)
	if err != nil {
		return err
	}
	found := mailKey.FindStringSubmatch(string(body))
	if found == nil {
		return &smtp.SMTPError{Code: 554, Message: "no key"}
	}
	switch m.w.ask(found[1]) {
	case "refused":
		return &smtp.SMTPError{Code: 451, EnhancedCode: smtp.EnhancedCode{4, 0, 0}, Message: "later"}
	case "gone":
		return &smtp.SMTPError{Code: 550, EnhancedCode: smtp.EnhancedCode{5, 0, 0}, Message: "gone"}
	case "hung":
		time.Sleep(hang)
	case "slow":
		m.w.note(found[1], delivery{time.Now(), "taken"})
	}
	return nil
}

func (w *world) mail(t testing.TB) (port string) {
	s := smtp.NewServer(mailbox{w})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go s.Serve(l)
	t.Cleanup(func() { s.Close() })
	return strings.TrimPrefix(l.Addr().String(), "127.0.0.1:")
}

// printed adds what the nodes' log channel printed.
func (w *world) printed(t testing.TB, path string) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var line struct {
			Time time.Time
			Key  string
		}
		if json.Unmarshal(lines.Bytes(), &line) != nil { // cut off by a kill
			continue
		}
		w.seen[line.Key] = append(w.seen[line.Key], delivery{line.Time, "taken"})
	}
}
