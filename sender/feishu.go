package sender

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
)

// feishuProvider speaks to Feishu's custom bots: a message's receiver is the name of a configured bot.
// https://open.feishu.cn/document/client-docs/bot-v3/add-custom-bot
type feishuProvider struct {
	cfg    feishuConfig
	client *http.Client
}

type feishuConfig struct {
	Bots map[string]feishuBot `mapstructure:"bots"`
}

type feishuBot struct {
	URL    string `mapstructure:"url"`    // the bot's webhook address: whoever knows it can send
	Secret string `mapstructure:"secret"` // for bots with signature verification
}

// feishuLimit is the most bytes of a request that a bot takes.
const feishuLimit = 20 << 10

// Codes of a bot's answer (https://open.feishu.cn/document/client-docs/bot-v3/add-custom-bot, "错误码").
const (
	feishuOK        = 0
	feishuTooFast   = 11232
	feishuBadBody   = 9499
	feishuSignature = 19021
	feishuAddress   = 19022
	feishuKeyword   = 19024
)

func openFeishu(_ Env, settings Settings) (Provider, error) {
	p := &feishuProvider{client: newHTTPClient(&net.Dialer{Timeout: 10 * time.Second})}
	if err := decode(settings, &p.cfg); err != nil {
		return nil, err
	}
	if len(p.cfg.Bots) == 0 {
		return nil, errors.New("bots must name a bot with its url")
	}
	for name, bot := range p.cfg.Bots {
		u, err := url.Parse(bot.URL)
		if err != nil || u.Host == "" || (u.Scheme != "https" && u.Scheme != "http") {
			return nil, fmt.Errorf("bots.%s.url must be the bot's webhook address", name)
		}
	}
	return p, nil
}

// Traits: a custom bot recognises no repetition and tells nothing afterwards.
func (p *feishuProvider) Traits() Traits { return Traits{} }

func (p *feishuProvider) Close() error {
	p.client.CloseIdleConnections()
	return nil
}

// CheckReceiver takes names of configured bots. Configuration keys know no case, so names do not, either.
func (p *feishuProvider) CheckReceiver(receiver string) (string, error) {
	name := strings.ToLower(receiver)
	if _, ok := p.cfg.Bots[name]; !ok {
		return "", fmt.Errorf("is not the name of a configured bot; there are %s", strings.Join(p.names(), ", "))
	}
	return name, nil
}

func (p *feishuProvider) names() (names []string) {
	for name := range p.cfg.Bots {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// Probe connects to the bots' hosts.
func (p *feishuProvider) Probe(ctx context.Context) error {
	for name, bot := range p.cfg.Bots {
		if err := probeURL(ctx, bot.URL); err != nil {
			return fmt.Errorf("bot %s: %w", name, err)
		}
	}
	return nil
}

func (p *feishuProvider) Send(ctx context.Context, m *Message) Verdict {
	name, err := p.CheckReceiver(m.Receiver)
	if err != nil {
		return Verdict{Kind: Permanent, Text: "the receiver is not the name of a configured bot"}
	}
	bot := p.cfg.Bots[name]
	body, err := feishuBody(m, bot.Secret, time.Now())
	if err != nil {
		return Verdict{Kind: Permanent, Text: err.Error()}
	}
	req, err := http.NewRequest(http.MethodPost, bot.URL, bytes.NewReader(body))
	if err != nil {
		return Verdict{Kind: Permanent, Text: "the bot's url is no URL"}
	}
	req.Header.Set("Content-Type", "application/json; charset=utf-8")
	r := exchange(ctx, p.client, req, true)
	if r.status == 0 || (r.err != nil && r.status == http.StatusOK) { // no answer, or none of the code that it was to hold
		return r.failed(ctx)
	}
	if r.status != http.StatusOK {
		return feishuStatus(r)
	}
	return feishuCode(r.body)
}

type feishuRequest struct {
	Timestamp string        `json:"timestamp,omitempty"`
	Sign      string        `json:"sign,omitempty"`
	Kind      string        `json:"msg_type"`
	Content   feishuContent `json:"content"`
}

type feishuContent struct {
	Text string                `json:"text,omitempty"`
	Post map[string]feishuPost `json:"post,omitempty"`
}

type feishuPost struct {
	Title   string         `json:"title"`
	Content [][]feishuText `json:"content"`
}

type feishuText struct {
	Tag  string `json:"tag"`
	Text string `json:"text"`
}

// feishuBody makes a text, or a post where there is a subject.
func feishuBody(m *Message, secret string, now time.Time) ([]byte, error) {
	r := feishuRequest{Kind: "text", Content: feishuContent{Text: m.Text}}
	if m.Subject != "" {
		r.Kind = "post"
		r.Content = feishuContent{Post: map[string]feishuPost{"zh_cn": {Title: m.Subject, Content: [][]feishuText{{{"text", m.Text}}}}}}
	}
	if secret != "" {
		r.Timestamp = strconv.FormatInt(now.Unix(), 10)
		r.Sign = feishuSign(r.Timestamp, secret)
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(r); err != nil {
		return nil, err
	}
	body := bytes.TrimRight(b.Bytes(), "\n")
	if len(body) > feishuLimit {
		return nil, fmt.Errorf("takes %d bytes, a bot takes %d", len(body), feishuLimit)
	}
	return body, nil
}

// feishuSign uses the secret as part of the key, and signs nothing: so the bot's manual says.
func feishuSign(timestamp, secret string) string {
	mac := hmac.New(sha256.New, []byte(timestamp+"\n"+secret))
	return base64.StdEncoding.EncodeToString(mac.Sum(nil))
}

// feishuStatus judges a status other than 200. What a gateway says (502, 504) comes after the request was passed on, and a bot
// recognises no repetition.
func feishuStatus(r reply) Verdict {
	v := statusVerdict(r, time.Now())
	switch r.status {
	case http.StatusInternalServerError, http.StatusBadGateway, http.StatusGatewayTimeout, http.StatusRequestTimeout:
		v.Kind = Unknown
		return v
	}
	if r.status >= 200 && r.status < 300 {
		return Verdict{Kind: Unknown, Code: strconv.Itoa(r.status), Text: "answered " + strconv.Itoa(r.status)}
	}
	if r.status >= 400 && r.status < 500 && v.Kind == Temporary {
		var a feishuAnswer
		if json.Unmarshal(r.body, &a) == nil && a.Code == feishuTooFast {
			return Verdict{Kind: Busy, Code: strconv.Itoa(a.Code), Text: "too many messages for the bot"}
		}
		return Verdict{Kind: Permanent, Code: strconv.Itoa(r.status), Text: "answered " + strconv.Itoa(r.status)}
	}
	return v
}

type feishuAnswer struct {
	Code   int    `json:"code"`
	Status *int   `json:"StatusCode"` // how older bots call the code
	Msg    string `json:"msg"`
}

// feishuCode reads the code inside an HTTP 200.
func feishuCode(body []byte) Verdict {
	a := feishuAnswer{Code: -1}
	err := json.Unmarshal(body, &a)
	if a.Code < 0 && a.Status != nil {
		a.Code = *a.Status
	}
	if err != nil || a.Code < 0 {
		return Verdict{Kind: Unknown, Text: "the answer cannot be read"}
	}
	code, text := strconv.Itoa(a.Code), withoutAddresses(a.Msg)
	switch a.Code {
	case feishuOK:
		return Verdict{Kind: Success}
	case feishuTooFast:
		return Verdict{Kind: Busy, Code: code, Text: "too many messages for the bot"}
	case feishuBadBody, feishuSignature, feishuAddress, feishuKeyword:
		return Verdict{Kind: Permanent, Code: code, Text: text}
	}
	return Verdict{Kind: Temporary, Code: code, Text: text}
}

// probeURL connects to a URL's host.
func probeURL(ctx context.Context, text string) error {
	u, err := url.Parse(text)
	if err != nil {
		return errors.New("its url is no URL")
	}
	port := u.Port()
	if port == "" {
		port = map[string]string{"https": "443", "http": "80"}[u.Scheme]
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", net.JoinHostPort(u.Hostname(), port))
	if err != nil {
		return errors.New(plainCause(ctx, err))
	}
	return conn.Close()
}
