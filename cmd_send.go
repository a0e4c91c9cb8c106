package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"tidings/internal/admit"
	"tidings/internal/msg"
)

func (a *app) sendCommand() *cobra.Command {
	var (
		r      admit.Request
		to     []string
		params []string
		dryRun bool
		wait   time.Duration
	)
	cmd := &cobra.Command{
		Use: "send", Short: "Send a message through the running server", Args: cobra.NoArgs,
		Example: `  tidings send --to "Ann Lee <ann@example.com>" --subject Hello --text "It works." --wait 10s`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, _, err := a.config(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			if wait < 0 || wait > maxSendWait {
				return fmt.Errorf("--wait must be at most %v", maxSendWait)
			}
			if r.To, err = addresses(to); err != nil {
				return err
			}
			if r.Params, err = variables(params); err != nil {
				return err
			}
			c := client{base: localURL(cfg.Listen), key: cfg.Client.Key}
			return c.send(cmd.Context(), cmd.OutOrStdout(), &r, dryRun, wait)
		},
	}
	flags := cmd.Flags()
	flags.StringSliceVar(&r.Channels, "channel", []string{"email"}, "the channel, or several")
	flags.StringArrayVar(&to, "to", nil, "the receiver; channel=address for one of several channels")
	flags.StringVar(&r.TemplateID, "template", "", "a template instead of subject and text")
	flags.StringArrayVar(&params, "param", nil, "a variable of the template: name=text, or name:=JSON")
	flags.BoolVar(&dryRun, "dry-run", false, "check and render only")
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

// maxSendWait is what the server waits at most.
const maxSendWait = time.Minute

// addresses makes the request's `to` of the flags: one address, or channel=address pairs.
func addresses(flags []string) (any, error) {
	if len(flags) == 0 {
		return "", nil
	}
	if len(flags) == 1 {
		if channel, _, ok := strings.Cut(flags[0], "="); !ok || !isChannel(channel) {
			return flags[0], nil
		}
	}
	to := map[string]any{}
	for _, flag := range flags {
		channel, address, ok := strings.Cut(flag, "=")
		if !ok || !isChannel(channel) {
			return nil, fmt.Errorf("--to %q must be channel=address where there are several", flag)
		}
		to[channel] = address
	}
	return to, nil
}

func isChannel(name string) bool {
	_, err := msg.ParseChannel(name)
	return err == nil
}

// variables makes params of the flags.
func variables(flags []string) (admit.Raw, error) {
	if len(flags) == 0 {
		return nil, nil
	}
	params := map[string]any{}
	for _, flag := range flags {
		name, text, ok := strings.Cut(flag, "=")
		raw, isJSON := strings.CutSuffix(name, ":")
		switch {
		case !ok || raw == "":
			return nil, fmt.Errorf("--param %q must be name=text or name:=JSON", flag)
		case !isJSON:
			params[name] = text
		case !json.Valid([]byte(text)):
			return nil, fmt.Errorf("--param %q is not JSON after :=", flag)
		default:
			params[raw] = json.RawMessage(text)
		}
	}
	return json.Marshal(params)
}

// client speaks to the running server.
type client struct{ base, key string }

// send posts a request and prints the answer. An answer other than 2xx is an error that holds it.
func (c client) send(ctx context.Context, out io.Writer, r *admit.Request, dryRun bool, wait time.Duration) error {
	body, err := json.Marshal(r)
	if err != nil {
		return err
	}
	path := "/api/messages"
	if dryRun {
		path += "?dry_run=true"
	}
	answer, err := c.call(ctx, http.MethodPost, path, body)
	if err != nil {
		return err
	}
	if wait > 0 && !dryRun {
		var sent struct {
			MsgID string `json:"msg_id"`
		}
		if err := json.Unmarshal(answer, &sent); err != nil {
			return err
		}
		if answer, err = c.call(ctx, http.MethodGet, fmt.Sprintf("/api/messages/%s?wait=%s", sent.MsgID, wait), nil); err != nil {
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

func (c client) call(ctx context.Context, method, path string, body []byte) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, c.base+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	if c.key != "" {
		req.Header.Set("Authorization", "Bearer "+c.key)
	}
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
