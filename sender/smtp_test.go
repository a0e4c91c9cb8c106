package sender

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/emersion/go-sasl"
	"github.com/emersion/go-smtp"

	"tidings/internal/msg"
)

// mailServer is a real SMTP server that answers receivers by what their name says, and keeps the mails it took.
type mailServer struct {
	addr  string
	mu    sync.Mutex
	mails []receivedMail
	conns int
}

type receivedMail struct{ from, to, text string }

type mailSession struct {
	s        *mailServer
	from, to string
}

func (s *mailServer) NewSession(*smtp.Conn) (smtp.Session, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conns++
	return &mailSession{s: s}, nil
}

func (m *mailSession) AuthMechanisms() []string { return []string{sasl.Plain} }

func (m *mailSession) Auth(string) (sasl.Server, error) {
	return sasl.NewPlainServer(func(_, username, password string) error {
		if username != "shop" || password != "canary-password" {
			return errors.New("no")
		}
		return nil
	}), nil
}

func (m *mailSession) Mail(from string, _ *smtp.MailOptions) error { m.from = from; return nil }

func (m *mailSession) Rcpt(to string, _ *smtp.RcptOptions) error {
	name, _, _ := strings.Cut(to, "@")
	switch name {
	case "full":
		return &smtp.SMTPError{Code: 450, EnhancedCode: smtp.EnhancedCode{4, 2, 2}, Message: "mailbox of <" + to + "> is full"}
	case "nobody":
		return &smtp.SMTPError{Code: 550, EnhancedCode: smtp.EnhancedCode{5, 1, 1}, Message: "no such user: " + to}
	case "closing":
		return &smtp.SMTPError{Code: 421, EnhancedCode: smtp.EnhancedCode{4, 3, 2}, Message: "closing"}
	}
	m.to = to
	return nil
}

func (m *mailSession) Data(r io.Reader) error {
	text, err := io.ReadAll(r)
	if err != nil {
		return err
	}
	switch name, _, _ := strings.Cut(m.to, "@"); name {
	case "slow":
		time.Sleep(400 * time.Millisecond)
	case "spam":
		return &smtp.SMTPError{Code: 554, EnhancedCode: smtp.EnhancedCode{5, 7, 1}, Message: "looks like spam"}
	case "later":
		return &smtp.SMTPError{Code: 451, EnhancedCode: smtp.EnhancedCode{4, 7, 1}, Message: "greylisted"}
	}
	m.s.mu.Lock()
	defer m.s.mu.Unlock()
	m.s.mails = append(m.s.mails, receivedMail{m.from, m.to, string(text)})
	return nil
}

func (m *mailSession) Reset()        { m.from, m.to = "", "" }
func (m *mailSession) Logout() error { return nil }

func (s *mailServer) to(address string) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, m := range s.mails {
		if m.to == address {
			n++
		}
	}
	return n
}

func startMailServer(t testing.TB, edit func(*smtp.Server)) *mailServer {
	t.Helper()
	s := &mailServer{}
	server := smtp.NewServer(s)
	server.Domain, server.AllowInsecureAuth = "mail.test", true
	server.ErrorLog = discard{}
	if edit != nil {
		edit(server)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.addr = l.Addr().String()
	var done sync.WaitGroup
	done.Go(func() { server.Serve(l) })
	t.Cleanup(func() { server.Close(); done.Wait() })
	return s
}

type discard struct{}

func (discard) Printf(string, ...any) {}
func (discard) Println(...any)        {}

func openMail(t testing.TB, addr string, settings Settings) Provider {
	t.Helper()
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	all := Settings{"host": host, "port": port, "tls": "none", "from": "Shop <shop@example.com>", "hello": "client.test", "connect_timeout": "5s"}
	for key, value := range settings {
		all[key] = value
	}
	p, err := Open("smtp", Env{Name: "smtp"}, all)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

func mailTo(receiver string) *Message {
	m := mailMessage()
	m.Receiver = receiver
	return m
}

func sendWithin(p Provider, d time.Duration, m *Message) Verdict {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	return p.Send(ctx, m)
}

func TestSMTPDelivers(t *testing.T) {
	t.Parallel()
	s := startMailServer(t, withTLS(t))
	p := openMail(t, s.addr, Settings{"tls": "starttls", "tls_skip_verify": true, "username": "shop", "password": "canary-password", "reply_to": "help@example.com"})
	m := mailTo(`"Ann Lee" <ann@example.com>`)
	m.Text = "Hello\r\n.\r\n.hidden\r\nbye"
	if v := sendWithin(p, 5*time.Second, m); v.Kind != Success || !strings.Contains(v.ProviderMsgID, "OK") {
		t.Fatalf("verdict %+v", v)
	}
	got := s.mails[0]
	if got.from != "shop@example.com" || got.to != "ann@example.com" || !strings.Contains(got.text, "Message-ID: <42-email@example.com>") ||
		!strings.Contains(got.text, "Reply-To: <help@example.com>") || !strings.Contains(got.text, ".hidden") {
		t.Fatalf("mail %+v", got)
	}
}

// Each receiver's own outcome, on one kept connection, and nothing of a failed mail clings to the next.
func TestSMTPOutcomes(t *testing.T) {
	t.Parallel()
	s := startMailServer(t, nil)
	p := openMail(t, s.addr, Settings{"connections": 1})
	for _, tt := range []struct {
		to   string
		kind Kind
		code string
	}{
		{"ann@example.com", Success, ""},
		{"nobody@example.com", Permanent, "550"},
		{"full@example.com", Temporary, "450"},
		{"spam@example.com", Permanent, "554"},
		{"later@example.com", Temporary, "451"},
		{"bob@example.com", Success, ""},
	} {
		v := sendWithin(p, 5*time.Second, mailTo(tt.to))
		if v.Kind != tt.kind || v.Code != tt.code {
			t.Errorf("%s: %+v", tt.to, v)
		}
		if strings.Contains(v.Text, "@example") {
			t.Errorf("the verdict repeats the address: %s", v.Text)
		}
	}
	for range 19 {
		if v := sendWithin(p, 5*time.Second, mailTo("carl@example.com")); v.Kind != Success {
			t.Fatalf("after failures: %+v", v)
		}
	}
	if s.conns != 1 || s.to("carl@example.com") != 19 || s.to("ann@example.com") != 1 {
		t.Fatalf("%d connections, %d mails", s.conns, len(s.mails))
	}
	if v := sendWithin(p, 5*time.Second, mailTo("closing@example.com")); v.Kind != Temporary || v.Code != "421" {
		t.Errorf("421: %+v", v)
	}
	if v := sendWithin(p, 5*time.Second, mailTo("dora@example.com")); v.Kind != Success || s.conns != 2 {
		t.Errorf("after 421: %+v over %d connections", v, s.conns)
	}
}

func TestSMTPWrongPassword(t *testing.T) {
	t.Parallel()
	s := startMailServer(t, withTLS(t))
	p := openMail(t, s.addr, Settings{"tls": "starttls", "tls_skip_verify": true, "username": "shop", "password": "canary-wrong"})
	v := sendWithin(p, 5*time.Second, mailTo("ann@example.com"))
	if v.Kind != Temporary || v.Code != "454" && v.Code != "535" || strings.Contains(v.Text, "canary") {
		t.Fatalf("verdict %+v", v)
	}
}

func selfSigned(t testing.TB) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "mail.test"}, NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func withTLS(t testing.TB) func(*smtp.Server) {
	return func(s *smtp.Server) { s.TLSConfig = &tls.Config{Certificates: []tls.Certificate{selfSigned(t)}} }
}

// tlsFront speaks TLS to the client and passes on what it says: what a port 465 is.
func tlsFront(t testing.TB, addr string) string {
	t.Helper()
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{selfSigned(t)}})
	if err != nil {
		t.Fatal(err)
	}
	var done sync.WaitGroup
	t.Cleanup(func() { l.Close(); done.Wait() })
	done.Go(func() {
		for {
			front, err := l.Accept()
			if err != nil {
				return
			}
			back, err := net.Dial("tcp", addr)
			if err != nil {
				front.Close()
				return
			}
			done.Go(func() { io.Copy(back, front); back.Close() })
			done.Go(func() { io.Copy(front, back); front.Close() })
		}
	})
	return l.Addr().String()
}

func TestSMTPTLS(t *testing.T) {
	t.Parallel()
	plain := startMailServer(t, nil)
	secure := startMailServer(t, withTLS(t))
	implicit := startMailServer(t, func(s *smtp.Server) { s.LMTP = false })
	implicit.addr = tlsFront(t, implicit.addr)
	for _, tt := range []struct {
		name     string
		server   *mailServer
		settings Settings
		want     Kind
	}{
		{"starttls", secure, Settings{"tls": "starttls", "tls_skip_verify": true}, Success},
		{"starttls, unknown certificate", secure, Settings{"tls": "starttls"}, Temporary},
		{"starttls refused", plain, Settings{"tls": "starttls"}, Temporary},
		{"opportunistic, not offered", plain, Settings{"tls": "opportunistic"}, Success},
		{"tls with a login", implicit, Settings{"tls": "tls", "tls_skip_verify": true, "username": "shop", "password": "canary-password"}, Success},
		{"tls to a server without", plain, Settings{"tls": "tls", "connect_timeout": "1s"}, Temporary},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			p := openMail(t, tt.server.addr, tt.settings)
			if v := sendWithin(p, 3*time.Second, mailTo("ann@example.com")); v.Kind != tt.want {
				t.Fatalf("verdict %+v", v)
			}
		})
	}
}

// faultyServer speaks SMTP by a script: at the named step it does something else.
func faultyServer(t testing.TB, step string, fault func(net.Conn)) (addr string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var conns sync.WaitGroup
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(func() { cancel(); l.Close(); conns.Wait() })
	conns.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			conns.Go(func() {
				defer context.AfterFunc(ctx, func() { conn.Close() })()
				defer conn.Close()
				speak(conn, step, fault)
			})
		}
	})
	return l.Addr().String()
}

func speak(conn net.Conn, step string, fault func(net.Conn)) {
	say := func(at, line string) bool {
		if at == step {
			fault(conn)
			return false
		}
		_, err := io.WriteString(conn, line)
		return err == nil
	}
	in := bufio.NewReader(conn)
	if !say("banner", "220-mail.test\r\n220-says much\r\n220 hello\r\n") {
		return
	}
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			return
		}
		verb := strings.ToUpper(strings.Fields(line + " x")[0])
		ok := true
		switch verb {
		case "EHLO", "HELO", "MAIL", "RCPT", "RSET", "NOOP":
			ok = say(verb, "250 ok\r\n")
		case "DATA":
			if ok = say(verb, "354 go on\r\n"); !ok {
				return
			}
			for line != ".\r\n" {
				if line, err = in.ReadString('\n'); err != nil {
					return
				}
			}
			ok = say("dot", "250 taken as 7\r\n")
		case "QUIT":
			io.WriteString(conn, "221 bye\r\n")
			return
		}
		if !ok {
			return
		}
	}
}

// At each step the server drops the line, hangs, or says nonsense without end. Before the final dot nothing was sent; after
// it nobody knows.
func TestSMTPFaultAtEachStep(t *testing.T) {
	t.Parallel()
	reply := func(text string) func(net.Conn) {
		return func(c net.Conn) { io.WriteString(c, text); io.Copy(io.Discard, c) }
	}
	faults := map[string]func(net.Conn){
		"drop": func(c net.Conn) { c.Close() },
		"hang": func(c net.Conn) { io.Copy(io.Discard, c) },
		"endless": func(c net.Conn) {
			for {
				if _, err := c.Write(bytes.Repeat([]byte("x"), 4096)); err != nil {
					return
				}
			}
		},
		"dripping": func(c net.Conn) {
			for _, err := c.Write([]byte("2")); err == nil; _, err = c.Write([]byte("2")) {
				time.Sleep(50 * time.Millisecond)
			}
		},
		"421": reply("421 closing\r\n"),
	}
	for _, step := range []string{"banner", "EHLO", "MAIL", "RCPT", "DATA", "dot"} {
		for name, fault := range faults {
			t.Run(step+" "+name, func(t *testing.T) {
				t.Parallel()
				want := Temporary
				if step == "dot" && name != "421" {
					want = Unknown
				}
				p := openMail(t, faultyServer(t, step, fault), Settings{"connect_timeout": "1s"})
				began := time.Now()
				v := sendWithin(p, time.Second, mailTo("ann@example.com"))
				if v.Kind != want {
					t.Errorf("verdict %+v, want %v", v, want)
				}
				if took := time.Since(began); took > 3*time.Second {
					t.Errorf("took %v", took)
				}
			})
		}
	}
}

// A 250 that was read is final, whatever happens to the connection then: there is no second mail.
func TestSMTPDropAfter250(t *testing.T) {
	t.Parallel()
	p := openMail(t, faultyServer(t, "dot", func(c net.Conn) { io.WriteString(c, "250 taken\r\n"); c.Close() }), nil)
	for range 3 { // each finds the kept connection dead and opens another
		if v := sendWithin(p, 2*time.Second, mailTo("ann@example.com")); v.Kind != Success {
			t.Fatalf("verdict %+v", v)
		}
	}
}

// A server that takes 90 s for the last 250 is given up at the deadline: nobody knows.
func TestSMTPSlowLast250(t *testing.T) {
	t.Parallel()
	p := openMail(t, faultyServer(t, "dot", func(c net.Conn) {
		c.SetReadDeadline(time.Now().Add(90 * time.Second))
		io.Copy(io.Discard, c)
		io.WriteString(c, "250 taken\r\n")
	}), nil)
	if v := sendWithin(p, 300*time.Millisecond, mailTo("ann@example.com")); v.Kind != Unknown {
		t.Fatalf("verdict %+v", v)
	}
}

func TestSMTPConnectionsAreShared(t *testing.T) {
	t.Parallel()
	s := startMailServer(t, nil)
	p := openMail(t, s.addr, Settings{"connections": 3})
	var wg sync.WaitGroup
	for i := range 60 {
		wg.Go(func() {
			if v := sendWithin(p, 10*time.Second, mailTo(fmt.Sprintf("u%d@example.com", i))); v.Kind != Success {
				t.Errorf("verdict %+v", v)
			}
		})
	}
	wg.Wait()
	if s.conns > 3 || len(s.mails) != 60 {
		t.Fatalf("%d connections, %d mails", s.conns, len(s.mails))
	}
}

func TestSMTPMarketingHeadersAndDKIM(t *testing.T) {
	t.Parallel()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	text := pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})
	s := startMailServer(t, nil)
	p := openMail(t, s.addr, Settings{
		"list_unsubscribe": "https://example.com/u?k={key}", "dkim_domain": "example.com", "dkim_selector": "s1", "dkim_key": string(text),
	})
	m := mailTo("ann@example.com")
	m.Attachments = []Attachment{{Filename: "räume \"1\".txt", ContentType: "text/plain", Content: []byte("attached")}}
	for _, category := range msg.Categories {
		m.Category = category
		if v := sendWithin(p, 5*time.Second, m); v.Kind != Success {
			t.Fatalf("verdict %+v", v)
		}
	}
	for i, category := range msg.Categories {
		got := s.mails[i].text
		if has := strings.Contains(got, "List-Unsubscribe: <https://example.com/u?k=42-email>") && strings.Contains(got, "List-Unsubscribe-Post: List-Unsubscribe=One-Click"); has != (category == msg.Marketing) {
			t.Errorf("%v: unsubscribe headers %v", category, has)
		}
		if !strings.Contains(got, "DKIM-Signature: ") || !strings.Contains(got, "d=example.com") {
			t.Errorf("%v is not signed", category)
		}
		if !strings.Contains(got, "YXR0YWNoZWQ=") {
			t.Errorf("%v has no attachment", category)
		}
	}
}

// A mail that had to wait for a connection for most of its time is not begun: cut off after the dot, nobody would know.
func TestSMTPBeginsNothingLate(t *testing.T) {
	t.Parallel()
	p := openMail(t, startMailServer(t, nil).addr, Settings{"connections": 1})
	var wg sync.WaitGroup
	var mu sync.Mutex
	kinds := map[Kind]int{}
	for range 6 {
		wg.Go(func() {
			v := sendWithin(p, 1300*time.Millisecond, mailTo("slow@example.com"))
			mu.Lock()
			kinds[v.Kind]++
			mu.Unlock()
		})
	}
	wg.Wait()
	if kinds[Unknown] != 0 || kinds[Success] == 0 || kinds[Busy] == 0 || kinds[Success]+kinds[Busy] != 6 {
		t.Fatalf("verdicts %v", kinds)
	}
}

// A local part that needs quotes keeps them in the conversation, and its refusal does not repeat it.
func TestSMTPQuotedLocalPart(t *testing.T) {
	t.Parallel()
	s := startMailServer(t, nil)
	p := openMail(t, s.addr, nil)
	if v := sendWithin(p, 5*time.Second, mailTo(`"john doe"@example.com`)); v.Kind != Success {
		t.Fatalf("verdict %+v", v)
	}
	if got := withoutAddresses(`user "john doe"@example.com is unknown, <a@b.c> too`); got != "user (address) is unknown, <(address)> too" {
		t.Fatal(got)
	}
}

func TestSMTPRefusesSettings(t *testing.T) {
	t.Parallel()
	good := Settings{"host": "localhost", "from": "a@example.com"}
	for key, value := range map[string]any{
		"host": "", "from": "nobody", "tls": "maybe", "port": 70000, "connections": 0, "username": "x", "reply_to": "x", "list_unsubscribe": "http://x", "dkim_domain": "x", "colour": "red",
	} {
		settings := Settings{}
		for k, v := range good {
			settings[k] = v
		}
		settings[key] = value
		if _, err := Open("smtp", Env{}, settings); err == nil {
			t.Errorf("%s: %v was accepted", key, value)
		}
	}
}
