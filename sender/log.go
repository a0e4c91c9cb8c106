package sender

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"sync"
	"time"
)

// logProvider prints messages instead of sending them, for trials: receiver and content included.
type logProvider struct {
	cfg logConfig
	out io.Writer
	mu  sync.Mutex
}

type logConfig struct {
	Print bool          `mapstructure:"print"` // one line of JSON a message on standard output
	Delay time.Duration `mapstructure:"delay"` // how long sending pretends to take
}

func openLog(_ Env, settings Settings) (Provider, error) {
	p := &logProvider{cfg: logConfig{Print: true}, out: os.Stdout}
	if err := decode(settings, &p.cfg); err != nil {
		return nil, err
	}
	if p.cfg.Delay < 0 {
		return nil, fmt.Errorf("delay must not be negative")
	}
	return p, nil
}

func (p *logProvider) Traits() Traits { return Traits{Repeatable: true} }

func (p *logProvider) Close() error { return nil }

func (p *logProvider) Send(ctx context.Context, m *Message) Verdict {
	if p.cfg.Delay > 0 {
		select {
		case <-time.After(p.cfg.Delay):
		case <-ctx.Done():
			return Verdict{Kind: Busy, Text: "interrupted before it was printed"}
		}
	}
	if !p.cfg.Print {
		return Verdict{Kind: Success}
	}
	line, err := json.Marshal(struct {
		Time     time.Time `json:"time"`
		Key      string    `json:"key"`
		Channel  string    `json:"channel"`
		Receiver string    `json:"receiver"`
		Subject  string    `json:"subject,omitempty"`
		Text     string    `json:"text,omitempty"`
		HTML     string    `json:"html,omitempty"`
		Attempt  int       `json:"attempt"`
	}{time.Now().UTC(), m.Key, m.Channel.String(), m.Receiver, m.Subject, m.Text, m.HTML, m.Attempt})
	if err != nil {
		return Verdict{Kind: Permanent, Text: err.Error()}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, err := p.out.Write(append(line, '\n')); err != nil { // one write a line: a kill cuts none in two
		return Verdict{Kind: Temporary, Text: "cannot print: " + err.Error()}
	}
	return Verdict{Kind: Success}
}
