package sender

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"

	"tidings/internal/netguard"
)

// webhookProvider POSTs messages as JSON to URLs that callers choose, signed as Standard Webhooks says
// (https://www.standardwebhooks.com). webhook-id is the task's key: a receiver recognises a repetition by it.
type webhookProvider struct {
	cfg     webhookConfig
	signers []*standardwebhooks.Webhook
	client  *http.Client
}

type webhookConfig struct {
	Secret         string `mapstructure:"secret"`          // whsec_…; empty: requests are not signed
	PreviousSecret string `mapstructure:"previous_secret"` // signs as well, while receivers change over
	AllowInternal  bool   `mapstructure:"allow_internal"`  // http and internal addresses are fine
	UserAgent      string `mapstructure:"user_agent"`
}

// webhookBody is what a receiver gets.
type webhookBody struct {
	Type      string      `json:"type"` // message; alarm: of the place itself
	Timestamp time.Time   `json:"timestamp"`
	Data      webhookData `json:"data"`
}

type webhookData struct {
	MsgID    string `json:"msg_id,omitempty"`
	Category string `json:"category"`
	Subject  string `json:"subject,omitempty"`
	Text     string `json:"text,omitempty"`
}

func openWebhook(_ Env, settings Settings) (Provider, error) {
	cfg := webhookConfig{UserAgent: "tidings"}
	if err := decode(settings, &cfg); err != nil {
		return nil, err
	}
	dialer := netguard.Dialer()
	if cfg.AllowInternal {
		dialer = &net.Dialer{Timeout: 10 * time.Second}
	}
	p := &webhookProvider{cfg: cfg, client: newHTTPClient(dialer)}
	for name, secret := range map[string]string{"secret": cfg.Secret, "previous_secret": cfg.PreviousSecret} {
		if secret == "" {
			continue
		}
		signer, err := standardwebhooks.NewWebhook(secret)
		if err != nil {
			return nil, fmt.Errorf("%s must be whsec_ and base64", name) // the library's error may repeat it
		}
		p.signers = append(p.signers, signer)
	}
	if cfg.PreviousSecret != "" && cfg.Secret == "" {
		return nil, errors.New("previous_secret goes with secret")
	}
	return p, nil
}

func (p *webhookProvider) Traits() Traits { return Traits{Repeatable: true, Destinations: true} }

func (p *webhookProvider) Close() error {
	p.client.CloseIdleConnections()
	return nil
}

// CheckReceiver takes URLs that may be sent to.
func (p *webhookProvider) CheckReceiver(receiver string) (string, error) {
	if p.cfg.AllowInternal {
		return receiver, netguard.CheckAnyURL(receiver)
	}
	return receiver, netguard.CheckURL(receiver)
}

func (p *webhookProvider) Send(ctx context.Context, m *Message) Verdict {
	req, err := p.request(m, time.Now())
	if err != nil {
		return Verdict{Kind: Permanent, Text: err.Error()}
	}
	r := exchange(ctx, p.client, req, false)
	if errors.Is(r.err, netguard.ErrInternal) {
		return Verdict{Kind: Permanent, Code: "internal_address", Text: "the host's address lies inside the network, and allow_internal is off"}
	}
	if r.err != nil {
		return r.failed(ctx)
	}
	return statusVerdict(r, time.Now())
}

func (p *webhookProvider) request(m *Message, now time.Time) (*http.Request, error) {
	if _, err := p.CheckReceiver(m.Receiver); err != nil {
		return nil, fmt.Errorf("the receiver %w", err)
	}
	data := webhookBody{Type: "message", Timestamp: m.Created.UTC(), Data: webhookData{Category: m.Category.String(), Subject: m.Subject, Text: m.Text}}
	if m.MsgID == 0 {
		data.Type = "alarm"
	} else {
		data.Data.MsgID = strconv.FormatUint(m.MsgID, 10)
	}
	body, err := json.Marshal(data)
	if err != nil {
		return nil, err
	}
	target, err := url.Parse(m.Receiver)
	if err != nil {
		return nil, errors.New("the receiver is no URL")
	}
	target.Fragment = ""
	req, err := http.NewRequest(http.MethodPost, target.String(), bytes.NewReader(body))
	if err != nil {
		return nil, errors.New("the receiver is no URL")
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("User-Agent", p.cfg.UserAgent)
	req.Header.Set(standardwebhooks.HeaderWebhookID, m.Key)
	req.Header.Set(standardwebhooks.HeaderWebhookTimestamp, strconv.FormatInt(now.Unix(), 10))
	for _, signer := range p.signers {
		signature, err := signer.Sign(m.Key, now, body)
		if err != nil {
			return nil, errors.New("cannot sign")
		}
		if before := req.Header.Get(standardwebhooks.HeaderWebhookSignature); before != "" {
			signature = before + " " + signature
		}
		req.Header.Set(standardwebhooks.HeaderWebhookSignature, signature)
	}
	return req, nil
}
