package main

import (
	"encoding/json"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/viper"

	"tidings/internal/msg"
	"tidings/internal/policy"
)

// Lanes and providers are steered by command while the program runs, and /readyz?verbose tells.
func TestSteering(t *testing.T) {
	t.Parallel()
	dir := worldDir(t)
	p := startTidings(t, dir, freeAddress(t), "providers: {log: {type: log, rate: 500, concurrency: 30, timeout: 5s}, spare: {type: log}}\nchannels: {log: {providers: [log, spare], slots: 10}}\n")
	command := func(want string, args ...string) {
		t.Helper()
		cmd := exec.Command(binary, args...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), want) {
			t.Errorf("%v: %v %s, want %q", args, err, out, want)
		}
	}
	refused := func(want string, args ...string) {
		t.Helper()
		cmd := exec.Command(binary, args...)
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), want) {
			t.Errorf("%v: %v %s, want %q", args, err, out, want)
		}
	}
	command("high", "lane", "list")
	command("too much", "lane", "pause", "middle", "--reason", "too much")
	command("30", "lane", "weight", "low", "30")
	command("moving", "provider", "pause", "spare", "--reason", "moving")
	refused("there are high, middle and low", "lane", "pause", "urgent")
	refused("between 1 and 1000", "lane", "weight", "low", "0")
	refused("between 1 and 1000", "lane", "weight", "low", "much")
	refused(`no provider "none"`, "provider", "pause", "none")
	var body []byte
	await(t, "all that was set", 2*time.Second, func() bool {
		res, err := http.Get(p.url + "/readyz?verbose")
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		body, _ = io.ReadAll(res.Body)
		return strings.Contains(string(body), `"provider":"spare","usable":false,"paused":true`)
	})
	for _, want := range []string{`"lane":"middle","weight":20,"paused":true`, `"lane":"low","weight":30`, `"provider":"log","usable":true`, `"rate":500`, `"slots":40`} {
		if !strings.Contains(string(body), want) {
			t.Errorf("readyz has no %s: %s", want, body)
		}
	}
	_, answer, _ := post(p.url, `{"channels":["log"],"to":"x","text":"hi"}`)
	id := answer["msg_id"].(string)
	if status := statusOf(t, p.url, id, "1s"); status != "dispatched" {
		t.Errorf("in a paused lane: %s", status)
	}
	command("middle", "lane", "resume", "middle")
	if status := statusOf(t, p.url, id, "10s"); status != "success" {
		t.Errorf("after the pause: %s", status)
	}
}

func statusOf(t *testing.T, url, id, wait string) string {
	t.Helper()
	res, err := http.Get(url + "/api/messages/" + id + "?wait=" + wait)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	var m struct{ Status string }
	if err := json.NewDecoder(res.Body).Decode(&m); err != nil {
		t.Fatal(err)
	}
	return m.Status
}

func TestPoliciesAreConfigured(t *testing.T) {
	t.Parallel()
	load := func(text string) (*policy.Set, error) {
		path := filepath.Join(t.TempDir(), "config.yaml")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		cfg, err := loadConfig(viper.New(), path)
		if err != nil {
			return nil, err
		}
		return cfg.policies()
	}
	set, err := load("policies: {marketing: {retry: [2m], degrade: wait}, verification: {expiry: 10m, unknown: dead_letter, alarm: none}}\n")
	if err != nil {
		t.Fatal(err)
	}
	want := policy.Defaults()
	want[msg.Marketing].Retry, want[msg.Marketing].Attempts, want[msg.Marketing].Degrade = []time.Duration{2 * time.Minute}, 2, policy.Wait
	want[msg.Verification].Expiry, want[msg.Verification].Unknown, want[msg.Verification].Alarm = 10*time.Minute, policy.BuryUnknown, policy.AlarmNone
	for c := range want {
		got, _ := json.Marshal(set[c])
		expected, _ := json.Marshal(want[c])
		if string(got) != string(expected) {
			t.Errorf("%s: %s\nwant %s", msg.Category(c), got, expected)
		}
	}
	if set, err := load("policies: {verification: {retry: [1s], attempts: 4}}\n"); err != nil || set[msg.Verification].Attempts != 4 || len(set[msg.Verification].Retry) != 1 {
		t.Errorf("%+v %v", set, err)
	}
	if plain, err := load("log: {level: info}\n"); err != nil {
		t.Fatal(err)
	} else if got, _ := json.Marshal(plain); string(got) != func() string { b, _ := json.Marshal(policy.Defaults()); return string(b) }() {
		t.Errorf("without a word in the file: %s", got)
	}
	for text, fault := range map[string]string{
		"policies: {urgent: {expiry: 1m}}\n":                       "policies.urgent is no category",
		"policies: {marketing: {expiry: 1ms, degrade: perhaps}}\n": "policies.marketing.degrade must be one of",
		"policies: {marketing: {retry: [0s]}}\n":                   "policies.marketing.retry must be waits",
		"policies: {marketing: {jitter: 1.5}}\n":                   "policies.marketing.jitter",
		"policies: {marketing: {color: red}}\n":                    "color",
		"retry: {max_per_second: 0}\n":                             "retry.max_per_second",
		"degrade_after: 1ms\n":                                     "degrade_after",
		"providers: {log: {type: log, rate: -1}}\n":                "providers.log rate must not be negative",
		"providers: {log: {type: log, timeout: 55s}}\n":            "providers.log.timeout",
		"providers: {log: {type: log, breaker_open: 10}}\n":        "breaker_open must be a duration with a unit",
		"channels: {log: {providers: [log, log]}}\n":               `channels.log.providers names "log" a second time`,
		"providers: {log: {type: log, rate: .nan}}\n":              "rate must be a number",
		"providers: {log: {type: log, timeout: 10}}\n":             "timeout must be a duration with a unit",
		"providers: {log: {type: log, rate: fast}}\n":              "providers.log",
	} {
		if _, err := load(text); err == nil || !strings.Contains(err.Error(), fault) {
			t.Errorf("%s: %v, want %s", text, err, fault)
		}
	}
}
