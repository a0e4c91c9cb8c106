package sender

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"mime/quotedprintable"
	stdmail "net/mail"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"go.uber.org/goleak"

	"tidings/internal/msg"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var created = time.Date(2026, 11, 30, 9, 30, 0, 0, time.UTC)

func mailMessage() *Message {
	return &Message{
		Key: "42-email", MsgID: 42, Channel: msg.Email, Receiver: `"Ann Lee" <ann@example.com>`,
		Subject: "Your order", Text: "It is on its way.", Attempt: 1, Created: created,
	}
}

func openFiles(t *testing.T, settings Settings) (Provider, string) {
	t.Helper()
	dir := t.TempDir()
	p, err := Open("file", Env{Name: "file", DataDir: dir}, settings)
	if err != nil {
		t.Fatal(err)
	}
	return p, filepath.Join(dir, "mail")
}

// wordLimit matches each encoded-word, which RFC 2047 limits to 75 characters.
var encodedWord = regexp.MustCompile(`=\?[^?]+\?[bBqQ]\?[^?]*\?=`)

// checkStrictly reads a mail as a strict receiver would: lines end in CRLF and hold at most 998 characters, headers are
// ASCII, each encoded-word is short and holds whole characters, and the headers are exactly those meant.
func checkStrictly(t *testing.T, text []byte) *stdmail.Message {
	t.Helper()
	head, _, ok := bytes.Cut(text, []byte("\r\n\r\n"))
	if !ok {
		t.Fatal("no end of the headers")
	}
	if bytes.Contains(bytes.ReplaceAll(text, []byte("\r\n"), nil), []byte("\n")) || bytes.Contains(bytes.ReplaceAll(text, []byte("\r\n"), nil), []byte("\r")) {
		t.Error("a line that does not end in CRLF")
	}
	for _, line := range bytes.Split(text, []byte("\r\n")) {
		if len(line) > 998 {
			t.Errorf("a line of %d characters", len(line))
		}
	}
	for _, line := range strings.Split(string(head), "\r\n") {
		for i := range len(line) {
			if line[i] < 0x20 && line[i] != '\t' || line[i] > 0x7e {
				t.Errorf("byte %#x in the header line %q", line[i], line)
			}
		}
		if len(line) > 78 {
			t.Errorf("a header line of %d characters: %q", len(line), line)
		}
	}
	for _, word := range encodedWord.FindAllString(string(head), -1) {
		if len(word) > 75 {
			t.Errorf("an encoded-word of %d characters", len(word))
		}
		if decoded, err := new(mime.WordDecoder).Decode(word); err != nil || !utf8.ValidString(decoded) {
			t.Errorf("encoded-word %q: %v", word, err)
		}
	}
	m, err := stdmail.ReadMessage(bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	meant := map[string]bool{"Date": true, "Mime-Version": true, "Message-Id": true, "Subject": true, "From": true, "To": true, "Content-Transfer-Encoding": true, "Content-Type": true}
	for name, values := range m.Header {
		if !meant[name] || len(values) != 1 {
			t.Errorf("header %s: %q", name, values)
		}
	}
	return m
}

func TestFileWritesMail(t *testing.T) {
	t.Parallel()
	p, dir := openFiles(t, Settings{"from": "商店 <shop@example.com>"})
	m := mailMessage()
	m.HTML = "<p>It is on its way.</p>"
	for range 2 { // another attempt replaces the file by the same mail
		if v := p.Send(context.Background(), m); v.Kind != Success || v.ProviderMsgID != "42-email.eml" {
			t.Fatalf("verdict %+v", v)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 {
		t.Fatalf("%v, %v", entries, err)
	}
	text, err := os.ReadFile(filepath.Join(dir, "42-email.eml"))
	if err != nil {
		t.Fatal(err)
	}
	got := checkStrictly(t, text)
	if id := got.Header.Get("Message-Id"); id != "<42-email@example.com>" {
		t.Errorf("Message-ID %s", id)
	}
	if date, err := got.Header.Date(); err != nil || !date.Equal(created) {
		t.Errorf("date %v, %v", date, err)
	}
	from, err := got.Header.AddressList("From")
	if err != nil || from[0].Name != "商店" {
		t.Errorf("from %v, %v", from, err)
	}
	kind, params, err := mime.ParseMediaType(got.Header.Get("Content-Type"))
	if err != nil || kind != "multipart/alternative" {
		t.Fatalf("content type %s, %v", kind, err)
	}
	parts := multipart.NewReader(got.Body, params["boundary"])
	for _, want := range []string{m.Text, m.HTML} {
		part, err := parts.NextPart()
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(part) // multipart decodes quoted-printable itself
		if err != nil || string(body) != want {
			t.Errorf("part %q, want %q, %v", body, want, err)
		}
	}
}

// Headers read back exactly as they were meant, and no text gets out of its field.
func TestHeadersAreExact(t *testing.T) {
	t.Parallel()
	for _, subject := range []string{
		"Your order", strings.Repeat("漢", 300) + strings.Repeat("😀", 100), strings.Repeat("x", 998), strings.Repeat("word ", 190) + "end",
		"two  spaces  and  more  " + strings.Repeat("ab  cd  ", 20) + "end", " lead and trail ", "=?UTF-8?q?=41?= stays", "e\u0301 combining", "👨‍👩‍👧‍👦 family",
		"tab\tinside", "naïve café", "\"quoted\", and, commas", "(comment) <angle> @at",
	} {
		m := mailMessage()
		m.Subject = subject
		got := checkStrictly(t, build(t, m))
		decoded, err := new(mime.WordDecoder).DecodeHeader(got.Header.Get("Subject"))
		if err != nil || decoded != subject {
			t.Errorf("subject %.60q reads back as %.60q, %v", subject, decoded, err)
		}
	}
	for name, stored := range map[string]string{
		"O'Brien, Pat":                    `"O'Brien, Pat" <ann@example.com>`,
		`say "hi" \ bye`:                  `"say \"hi\" \\ bye" <ann@example.com>`,
		"张三":                              `"张三" <ann@example.com>`,
		strings.Repeat("漢", 128):          `"` + strings.Repeat("漢", 128) + `" <ann@example.com>`,
		strings.Repeat("name ", 25) + "x": `"` + strings.Repeat("name ", 25) + `x" <ann@example.com>`,
		"":                                "ann@example.com",
	} {
		m := mailMessage()
		m.Receiver = stored
		got := checkStrictly(t, build(t, m))
		to, err := got.Header.AddressList("To")
		if err != nil || len(to) != 1 || to[0].Name != name || to[0].Address != "ann@example.com" {
			t.Errorf("receiver %.60q reads back as %v, %v", stored, to, err)
		}
	}
}

func build(t *testing.T, m *Message) []byte {
	t.Helper()
	out, err := buildMail(m, &stdmail.Address{Name: "Shop", Address: "shop@example.com"}, mailOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if _, err := out.WriteTo(&b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// Texts read back exactly, but for line ends, which mail has in one form only.
func TestBodiesAreExact(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"hi", "漢字 😀", "a\r\nb\r\n", ".\r\n.\r\nFrom me", strings.Repeat("long ", 5000), "= =20 =\r\n", "trailing spaces   \r\n\tand tabs\t\r\n"} {
		m := mailMessage()
		m.Text = text
		got := checkStrictly(t, build(t, m))
		body, err := io.ReadAll(quotedprintable.NewReader(got.Body))
		if err != nil || strings.TrimSuffix(string(body), "\r\n") != strings.TrimSuffix(text, "\r\n") {
			t.Errorf("text %.60q reads back as %.60q, %v", text, body, err)
		}
	}
}

// What should have been refused at acceptance still gets nowhere near a header.
func TestNoInjection(t *testing.T) {
	t.Parallel()
	p, _ := openFiles(t, nil)
	for _, edit := range []func(*Message){
		func(m *Message) { m.Subject = "a\r\nBcc: b@example.com" },
		func(m *Message) { m.Subject = "a\nb" },
		func(m *Message) { m.Subject = "a\x00" },
		func(m *Message) { m.Receiver = "a@example.com\r\nBcc: b@example.com" },
		func(m *Message) { m.Receiver = "not an address secret-canary" },
	} {
		m := mailMessage()
		edit(m)
		v := p.Send(context.Background(), m)
		if v.Kind != Permanent {
			t.Errorf("%q %q: %+v", m.Subject, m.Receiver, v)
		}
		if strings.Contains(v.Text, "canary") {
			t.Errorf("the verdict repeats the address: %s", v.Text)
		}
	}
}

func TestFileCannotWrite(t *testing.T) {
	t.Parallel()
	p, dir := openFiles(t, nil)
	if err := os.WriteFile(dir, nil, 0o600); err != nil { // a file where the directory should be
		t.Fatal(err)
	}
	v := p.Send(context.Background(), mailMessage())
	if v.Kind != Temporary || strings.Contains(v.Text, dir) {
		t.Fatalf("verdict %+v", v)
	}
}

func TestLog(t *testing.T) {
	t.Parallel()
	p, err := Open("log", Env{Name: "log"}, Settings{"delay": "1h", "print": false})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if v := p.Send(ctx, mailMessage()); v.Kind != Busy {
		t.Fatalf("interrupted: %+v", v)
	}
	var out bytes.Buffer
	printing := &logProvider{cfg: logConfig{Print: true}, out: &out}
	if v := printing.Send(context.Background(), mailMessage()); v.Kind != Success {
		t.Fatalf("verdict %+v", v)
	}
	if line := out.String(); strings.Count(line, "\n") != 1 || !strings.Contains(line, `"key":"42-email"`) || !strings.Contains(line, "It is on its way.") {
		t.Fatalf("printed %q", line)
	}
}

func TestOpenRefuses(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		kind     string
		settings Settings
		want     string
	}{
		{"pigeon", nil, "pigeon"},
		{"log", Settings{"colour": "red"}, "colour"},
		{"log", Settings{"delay": "-1s"}, "delay"},
		{"file", Settings{"from": "nobody"}, "from"},
	} {
		if _, err := Open(tt.kind, Env{DataDir: t.TempDir()}, tt.settings); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s %v: %v", tt.kind, tt.settings, err)
		}
	}
}

func FuzzHeader(f *testing.F) {
	for _, seed := range []string{"", "plain", "漢字", "=?UTF-8?q?x?=", "a  b", strings.Repeat("x", 300)} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, value string) {
		if !utf8.ValidString(value) || strings.ContainsAny(value, "\r\n\x00") {
			return // refused before
		}
		encoded := encodeHeader("Subject", value)
		for _, line := range strings.Split(encoded, "\r\n ") {
			if len(line) > 76 || strings.ContainsAny(line, "\r\n") {
				t.Fatalf("line %q", line)
			}
		}
		decoded, err := new(mime.WordDecoder).DecodeHeader(strings.ReplaceAll(encoded, "\r\n ", " "))
		if err != nil || decoded != value {
			t.Fatalf("%q reads back as %q, %v", value, decoded, err)
		}
	})
}

func ExampleKind() {
	fmt.Println(Temporary, Permanent, Busy, Unknown, Success)
	// Output: temporary permanent busy unknown success
}
