package main

import (
	"os/exec"
	"strings"
	"testing"
)

// What a user does from the command line beside a running server.
func TestCommands(t *testing.T) {
	t.Parallel()
	dir := worldDir(t)
	p := startTidings(t, dir, freeAddress(t), "")
	tidings := func(args ...string) (string, error) {
		cmd := exec.Command(binary, append(args, "--listen", strings.TrimPrefix(p.url, "http://"))...)
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	for _, tt := range []struct {
		args []string
		good bool
		want string
	}{
		{[]string{"send", "--to", "ann@example.com", "--subject", "Hello", "--text", "It works.", "--request-id", "r1", "--wait", "10s"}, true, `"status": "success"`},
		{[]string{"send", "--to", "ann@example.com", "--subject", "Hello", "--text", "It works.", "--request-id", "r1"}, true, `"duplicate": true`},
		{[]string{"send", "--to", "nobody", "--subject", "Hello", "--text", "x"}, false, `"field":"to"`},
		{[]string{"send", "--channel", "webhook", "--to", "https://127.0.0.1/x", "--text", "x"}, false, `is an internal address`},
		{[]string{"send", "--channel", "sms", "--to", "+8613800000000", "--text", "x"}, false, `channel_not_configured`},
		{[]string{"doctor"}, true, "ok     provider file: reachable"},
		{[]string{"config", "check"}, true, "good"},
		{[]string{"config", "show"}, true, "send_timeout: 30s"},
		{[]string{"version"}, true, "tidings dev"},
		{[]string{"fly"}, false, `unknown command "fly"`},
		{[]string{"bench", "nothing"}, false, `there is no scenario "nothing"`},
		{[]string{"--config", "nowhere.yaml"}, false, "nowhere.yaml"},
	} {
		out, err := tidings(tt.args...)
		if (err == nil) != tt.good || !strings.Contains(out, tt.want) {
			t.Errorf("tidings %s: %v\n%s", strings.Join(tt.args, " "), err, out)
		}
	}
	second := exec.Command(binary, "--listen", strings.TrimPrefix(p.url, "http://"))
	second.Dir = dir
	if out, err := second.CombinedOutput(); err == nil || !strings.Contains(string(out), "address already in use") {
		t.Errorf("a second server on one port: %v\n%s", err, out)
	}
}
