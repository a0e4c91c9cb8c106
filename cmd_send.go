package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/spf13/cobra"

	"tidings/internal/admit"
)

func (a *app) sendCommand() *cobra.Command {
	var (
		r       admit.Request
		channel string
		to      string
		wait    time.Duration
	)
	cmd := &cobra.Command{
		Use: "send", Short: "Send a message through the running server", Args: cobra.NoArgs,
		Example: `  tidings send --to "Ann Lee <ann@example.com>" --subject Hello --text "It works." --wait 10s`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, _, err := a.config(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			r.Channels, r.To = []string{channel}, to
			return sendMessage(cmd.Context(), cmd.OutOrStdout(), "http://"+cfg.Listen, &r, wait)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&channel, "channel", "email", "the channel")
	flags.StringVar(&to, "to", "", "the receiver")
	flags.StringVar(&r.Subject, "subject", "", "the subject")
	flags.StringVar(&r.Text, "text", "", "the text")
	flags.StringVar(&r.HTML, "html", "", "the text as HTML, for e-mail")
	flags.StringVar(&r.Category, "category", "", "verification, notification or marketing")
	flags.StringVar(&r.Priority, "priority", "", "high, middle or low")
	flags.StringVar(&r.RequestID, "request-id", "", "the key by which a repetition is recognised")
	flags.StringVar(&r.TTL, "ttl", "", "do not send later than this, such as 10m")
	flags.DurationVar(&wait, "wait", 0, "wait up to this long for the message's end, and print it")
	return cmd
}

// sendMessage posts a request and prints the answer. An answer other than 2xx is an error that holds it.
func sendMessage(ctx context.Context, out io.Writer, base string, r *admit.Request, wait time.Duration) error {
	body, err := json.Marshal(r)
	if err != nil {
		return err
	}
	answer, err := call(ctx, http.MethodPost, base+"/api/messages", body)
	if err != nil {
		return err
	}
	if wait > 0 {
		var sent struct {
			MsgID string `json:"msg_id"`
		}
		if err := json.Unmarshal(answer, &sent); err != nil {
			return err
		}
		if answer, err = call(ctx, http.MethodGet, fmt.Sprintf("%s/api/messages/%s?wait=%s", base, sent.MsgID, wait), nil); err != nil {
			return err
		}
	}
	var pretty bytes.Buffer
	if err := json.Indent(&pretty, answer, "", "  "); err != nil {
		return err
	}
	_, err = pretty.WriteTo(out)
	return err
}

func call(ctx context.Context, method, url string, body []byte) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, fmt.Errorf("no answer; does `tidings serve` run? %w", err)
	}
	defer res.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(res.Body, 16<<20))
	if err != nil {
		return nil, err
	}
	if res.StatusCode >= 300 {
		return nil, errors.New(res.Status + "\n" + string(bytes.TrimSpace(answer)))
	}
	return answer, nil
}
