package sender

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	stdmail "net/mail"
	"net/textproto"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/wneessen/go-mail"
	"github.com/wneessen/go-mail/smtp"
)

// smtpProvider hands e-mails to a mail server. It keeps connections and uses each for one mail at a time. The conversation
// is led step by step, because what a failure means depends on the step: before the final dot nothing was sent, after it
// nobody knows, and a 250 that was read is final.
type smtpProvider struct {
	cfg   smtpConfig
	from  *stdmail.Address
	mail  mailOptions
	slots chan struct{} // one for each connection that may be open

	mu   sync.Mutex
	idle []*smtpConn
}

type smtpConfig struct {
	Host            string        `mapstructure:"host"`
	Port            int           `mapstructure:"port"` // default: 587, with tls: tls 465, without tls 25
	TLS             string        `mapstructure:"tls"`  // starttls (default), tls, opportunistic, none
	TLSSkipVerify   bool          `mapstructure:"tls_skip_verify"`
	Username        string        `mapstructure:"username"`
	Password        string        `mapstructure:"password"`
	From            string        `mapstructure:"from"`
	ReplyTo         string        `mapstructure:"reply_to"`
	Hello           string        `mapstructure:"hello"` // the name that we greet with; default: the machine's
	Connections     int           `mapstructure:"connections"`
	ConnectTimeout  time.Duration `mapstructure:"connect_timeout"`
	ListUnsubscribe string        `mapstructure:"list_unsubscribe"` // an https URL for marketing mails; {key} becomes the task's key
	DKIMDomain      string        `mapstructure:"dkim_domain"`
	DKIMSelector    string        `mapstructure:"dkim_selector"`
	DKIMKey         string        `mapstructure:"dkim_key"` // PEM
}

// Limits of the conversation.
const (
	smtpIdle      = 30 * time.Second // a kept connection is not used again after this
	smtpProbe     = time.Second      // one that has rested longer is asked first whether it still lives
	smtpAnswers   = 256 << 10        // most bytes that a server may say during one mail
	smtpQuitDelay = time.Second
)

func openSMTP(_ Env, settings Settings) (Provider, error) {
	cfg := smtpConfig{TLS: "starttls", Connections: 10, ConnectTimeout: 10 * time.Second}
	if err := decode(settings, &cfg); err != nil {
		return nil, err
	}
	p := &smtpProvider{cfg: cfg}
	if err := p.check(); err != nil {
		return nil, err
	}
	p.slots = make(chan struct{}, p.cfg.Connections)
	return p, nil
}

func (p *smtpProvider) check() (err error) {
	cfg := &p.cfg
	if cfg.Host == "" {
		return errors.New("host must name the mail server")
	}
	defaultPort, ok := map[string]int{"starttls": 587, "opportunistic": 25, "tls": 465, "none": 25}[cfg.TLS]
	if !ok {
		return errors.New("tls must be starttls, tls, opportunistic or none")
	}
	if cfg.Port == 0 {
		cfg.Port = defaultPort
	}
	if cfg.Port < 1 || cfg.Port > 65535 || cfg.Connections < 1 || cfg.ConnectTimeout <= 0 {
		return errors.New("port, connections and connect_timeout must be positive")
	}
	if (cfg.Username == "") != (cfg.Password == "") {
		return errors.New("username and password go together")
	}
	if p.from, err = stdmail.ParseAddress(cfg.From); err != nil {
		return errors.New("from must be the sender's address, such as Shop <shop@example.com>")
	}
	if cfg.ReplyTo != "" {
		if p.mail.replyTo, err = stdmail.ParseAddress(cfg.ReplyTo); err != nil {
			return errors.New("reply_to must be an address")
		}
	}
	if cfg.Hello == "" {
		if cfg.Hello, err = os.Hostname(); err != nil {
			cfg.Hello = "localhost"
		}
	}
	if cfg.ListUnsubscribe != "" && !strings.HasPrefix(cfg.ListUnsubscribe, "https://") {
		return errors.New("list_unsubscribe must be an https URL")
	}
	p.mail.listUnsubscribe = cfg.ListUnsubscribe
	return p.checkDKIM()
}

func (p *smtpProvider) checkDKIM() error {
	cfg := &p.cfg
	given := 0
	for _, s := range []string{cfg.DKIMDomain, cfg.DKIMSelector, cfg.DKIMKey} {
		if s != "" {
			given++
		}
	}
	if given == 0 {
		return nil
	}
	if given < 3 {
		return errors.New("dkim_domain, dkim_selector and dkim_key go together")
	}
	key, err := mail.PrivKeyFromPEM([]byte(cfg.DKIMKey))
	if err != nil {
		return errors.New("dkim_key must be a private key in PEM")
	}
	p.mail.dkim = func() *mail.DKIMSigner { return mail.NewDKIMSigner(cfg.DKIMDomain, cfg.DKIMSelector, key) }
	return nil
}

// Traits: SMTP recognises no repetition. Its receivers may, by the Message-ID, but need not.
func (p *smtpProvider) Traits() Traits { return Traits{Concurrency: p.cfg.Connections} }

// Close says goodbye on the connections that rest.
func (p *smtpProvider) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.idle {
		c.net.SetDeadline(time.Now().Add(smtpQuitDelay))
		if c.smtp.Quit() != nil { // it may have gone already
			c.net.Close()
		}
	}
	p.idle = nil
	return nil
}

// Probe logs in and out.
func (p *smtpProvider) Probe(ctx context.Context) error {
	c, err := p.dial(ctx)
	if err != nil {
		return errors.New(plainCause(ctx, err))
	}
	defer c.net.Close()
	defer c.within(ctx)()
	_ = c.smtp.Quit() // the login has shown enough
	return nil
}

func (p *smtpProvider) Send(ctx context.Context, m *Message) Verdict {
	entered := time.Now()
	select {
	case p.slots <- struct{}{}:
		defer func() { <-p.slots }()
	case <-ctx.Done():
	}
	// A conversation that is cut off after the final dot leaves the outcome unknown: better not to begin one late.
	if late(ctx, entered) {
		return Verdict{Kind: Busy, Text: "no connection was free in time"}
	}
	out, err := buildMail(m, p.from, p.mail)
	if err != nil {
		return Verdict{Kind: Permanent, Text: err.Error()}
	}
	var text bytes.Buffer
	if _, err := out.WriteTo(&text); err != nil {
		return Verdict{Kind: Permanent, Text: "cannot build the mail: " + withoutAddresses(err.Error())}
	}
	to, err := stdmail.ParseAddress(m.Receiver)
	if err != nil {
		return Verdict{Kind: Permanent, Text: "the receiver is not an e-mail address"}
	}
	for {
		c, kept, err := p.connection(ctx)
		if err != nil {
			v := smtpVerdict(ctx, "connect", err, Temporary)
			v.Unsent = v.Kind == Temporary && !isReply(err) // a server that answers has said enough
			return v
		}
		v, err := c.deliver(ctx, path(p.from), path(to), text.Bytes())
		p.keep(c, err)
		// A kept connection that turns out to be dead has taken nothing: a fresh one is not another attempt.
		if kept && err != nil && errors.Is(err, errNotBegun) {
			continue
		}
		return v
	}
}

// late tells whether more than half of the time that there was has passed.
func late(ctx context.Context, entered time.Time) bool {
	deadline, ok := ctx.Deadline()
	return ctx.Err() != nil || (ok && time.Since(entered) > deadline.Sub(entered)/2)
}

// smtpConn is a connection to the server, used by one mail at a time.
type smtpConn struct {
	net  *boundedConn
	smtp *smtp.Client
	used time.Time
}

// connection takes a kept connection that still lives, or opens one.
func (p *smtpProvider) connection(ctx context.Context) (c *smtpConn, kept bool, err error) {
	for {
		p.mu.Lock()
		n := len(p.idle)
		if n == 0 {
			p.mu.Unlock()
			c, err = p.dial(ctx)
			return c, false, err
		}
		c = p.idle[n-1]
		p.idle = p.idle[:n-1]
		p.mu.Unlock()
		if rested := time.Since(c.used); rested < smtpIdle && (rested < smtpProbe || c.alive(ctx)) {
			return c, true, nil
		}
		c.net.Close()
	}
}

func (c *smtpConn) alive(ctx context.Context) bool {
	defer c.within(ctx)()
	return c.smtp.Noop() == nil
}

// keep puts a connection back when the server is ready for the next mail on it.
func (p *smtpProvider) keep(c *smtpConn, err error) {
	if err != nil {
		c.net.Close()
		return
	}
	c.used = time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.idle = append(p.idle, c)
}

func (p *smtpProvider) dial(ctx context.Context) (*smtpConn, error) {
	ctx, cancel := context.WithTimeout(ctx, p.cfg.ConnectTimeout)
	defer cancel()
	c := &smtpConn{}
	stop := func() bool { return true }
	client, err := mail.NewClient(p.cfg.Host, p.clientOptions(func(raw net.Conn) net.Conn {
		c.net = &boundedConn{Conn: raw, left: smtpAnswers}
		stop = context.AfterFunc(ctx, func() { raw.Close() })
		return c.net
	})...)
	if err != nil {
		return nil, err
	}
	c.smtp, err = client.DialToSMTPClientWithContext(ctx)
	if stopped := stop(); err == nil && !stopped {
		err = ctx.Err()
	}
	if err != nil {
		if c.net != nil {
			c.net.Close()
		}
		return nil, err
	}
	return c, nil
}

// clientOptions configure how a connection is opened. connected sees it before a word is said.
func (p *smtpProvider) clientOptions(connected func(net.Conn) net.Conn) []mail.Option {
	tlsConfig := &tls.Config{ServerName: p.cfg.Host, InsecureSkipVerify: p.cfg.TLSSkipVerify, MinVersion: tls.VersionTLS12}
	options := []mail.Option{
		mail.WithPort(p.cfg.Port), mail.WithTimeout(p.cfg.ConnectTimeout), mail.WithHELO(p.cfg.Hello), mail.WithTLSConfig(tlsConfig), mail.WithoutSMTPUTF8(),
		mail.WithDialContextFunc(func(ctx context.Context, network, address string) (net.Conn, error) {
			raw, err := (&net.Dialer{}).DialContext(ctx, network, address)
			if err != nil {
				return nil, err
			}
			if p.cfg.TLS != "tls" {
				return connected(raw), nil
			}
			return tls.Client(connected(raw), tlsConfig), nil
		}),
	}
	switch p.cfg.TLS {
	case "starttls":
		options = append(options, mail.WithTLSPolicy(mail.TLSMandatory))
	case "opportunistic":
		options = append(options, mail.WithTLSPolicy(mail.TLSOpportunistic))
	case "tls": // it is under the conversation already; only so does go-mail see that, and logs in
		options = append(options, mail.WithTLSPolicy(mail.TLSOpportunistic))
	default:
		options = append(options, mail.WithTLSPolicy(mail.NoTLS))
	}
	if p.cfg.Username != "" {
		options = append(options, mail.WithUsername(p.cfg.Username), mail.WithPassword(p.cfg.Password), mail.WithSMTPAuth(mail.SMTPAuthAutoDiscover))
	}
	return options
}

// within bounds the conversation by ctx, and by what the server may say.
func (c *smtpConn) within(ctx context.Context) (stop func()) {
	c.net.left = smtpAnswers
	if deadline, ok := ctx.Deadline(); ok {
		c.net.SetDeadline(deadline)
	} else {
		c.net.SetDeadline(time.Time{})
	}
	ran := make(chan struct{})
	after := context.AfterFunc(ctx, func() {
		c.net.SetDeadline(time.Unix(1, 0))
		close(ran)
	})
	return func() {
		if !after() {
			<-ran // or it would cut the next mail off
		}
	}
}

// path is an address as SMTP wants it: in angle brackets, and with quotes around a local part that needs them.
func path(a *stdmail.Address) string { return (&stdmail.Address{Address: a.Address}).String() }

// errNotBegun marks a failure of the first command: the server has taken nothing of the mail.
var errNotBegun = errors.New("the mail was not begun")

// deliver leads one mail through the conversation. An error says that the connection cannot be used again; the verdict
// stands by itself.
func (c *smtpConn) deliver(ctx context.Context, from, to string, text []byte) (Verdict, error) {
	defer c.within(ctx)()
	if err := c.smtp.Mail(from); err != nil {
		if !isReply(err) || replyCode(err) == codeClosing {
			return smtpVerdict(ctx, "MAIL", err, Temporary), errors.Join(errNotBegun, err)
		}
		return c.refused(ctx, "MAIL", err)
	}
	if err := c.smtp.Rcpt(to); err != nil {
		return c.refused(ctx, "RCPT", err)
	}
	data, err := c.smtp.Data()
	if err != nil {
		return c.refused(ctx, "DATA", err)
	}
	if _, err := data.Write(text); err != nil { // the final dot has not been written
		return smtpVerdict(ctx, "the text", err, Temporary), err
	}
	if err := data.Close(); err != nil {
		v := smtpVerdict(ctx, "the final dot", err, Unknown)
		if isReply(err) && replyCode(err) != codeClosing {
			return v, nil
		}
		return v, err
	}
	v := Verdict{Kind: Success}
	if d, ok := data.(*smtp.DataCloser); ok {
		v.ProviderMsgID = withoutAddresses(d.ServerResponse())
	}
	return v, nil
}

// refused answers a failure before the text. After a reply the connection is cleaned for the next mail.
func (c *smtpConn) refused(ctx context.Context, step string, err error) (Verdict, error) {
	v := smtpVerdict(ctx, step, err, Temporary)
	if !isReply(err) || replyCode(err) == codeClosing {
		return v, err
	}
	return v, c.smtp.Reset()
}

// Reply codes that mean something of their own.
const (
	codeClosing     = 421 // the server closes the connection
	codeLoginNeeded = 530
	codeLoginFailed = 535
)

func isReply(err error) bool {
	var reply *textproto.Error
	return errors.As(err, &reply)
}

func replyCode(err error) int {
	var reply *textproto.Error
	if errors.As(err, &reply) {
		return reply.Code
	}
	return 0
}

// smtpVerdict judges a failure: a reply of the server by its code, silence by the step that it came at.
func smtpVerdict(ctx context.Context, step string, err error, silence Kind) Verdict {
	var reply *textproto.Error
	if !errors.As(err, &reply) {
		return Verdict{Kind: silence, Text: step + ": " + plainCause(ctx, err)}
	}
	v := Verdict{Kind: Temporary, Code: strconv.Itoa(reply.Code), Text: fmt.Sprintf("%s: %d %s", step, reply.Code, withoutAddresses(reply.Msg))}
	// Before a receiver is named, a refusal is about us: a login, a quota, a suspended sender. It is no fault of the message.
	aboutUs := step == "connect" || step == "MAIL" || reply.Code == codeLoginNeeded || reply.Code == codeLoginFailed
	if reply.Code >= 500 && !aboutUs {
		v.Kind = Permanent
	}
	return v
}

// boundedConn ends a server's speech after a number of bytes: lines have no length limit of their own.
type boundedConn struct {
	net.Conn
	left int
}

func (c *boundedConn) Read(b []byte) (int, error) {
	if c.left <= 0 {
		return 0, errors.New("the server says too much")
	}
	n, err := c.Conn.Read(b[:min(len(b), c.left)])
	c.left -= n
	return n, err
}
