package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// promtool is what `make test` has fetched, or what is on the machine.
func promtool(t testing.TB) string {
	t.Helper()
	own, err := filepath.Abs("bin/promtool")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(own); err == nil {
		return own
	}
	found, err := exec.LookPath("promtool")
	if err != nil {
		t.Fatal("there is no promtool: make setup-promtool")
	}
	return found
}

// The alert rules are well made, and each has a unit test in which it fires, and one in which it does not.
func TestAlertRules(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"check", "rules", "alerts.yml"}, {"test", "rules", "alerts_test.yml"}} {
		cmd := exec.Command(promtool(t), args...)
		cmd.Dir = "docs/monitoring"
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("promtool %v: %v\n%s", args, err, out)
		}
	}
	rules, tests := readDoc(t, "alerts.yml"), readDoc(t, "alerts_test.yml")
	names := regexp.MustCompile(`- alert: (\w+)`).FindAllStringSubmatch(rules, -1)
	if len(names) < 15 {
		t.Fatalf("%d rules", len(names))
	}
	runbook, err := os.ReadFile("docs/runbook.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range names {
		if !strings.Contains(string(runbook), "`"+m[1]+"`") {
			t.Errorf("docs/runbook.md does not say what to do about %s", m[1])
		}
		for _, want := range []string{" fires", " is silent"} {
			if !strings.Contains(tests, "name: "+m[1]+want+"\n") {
				t.Errorf("no test that %s%s", m[1], want)
			}
		}
	}
}

func readDoc(t testing.TB, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("docs/monitoring", name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// What rules, dashboard and documentation name is what the program tells, and it tells nothing that the documentation does not name.
func TestMetricNames(t *testing.T) {
	t.Parallel()
	p := startTidings(t, worldDir(t), freeAddress(t), "log: {level: error}\nproviders: {log: {type: log, print: false}}\n")
	status, answer, _ := post(p.url, `{"channels":["log"],"to":"x","text":"hi"}`)
	if status != 202 {
		t.Fatalf("%d %v", status, answer)
	}
	if status, answer, _ := post(p.url, `{}`); status != 422 {
		t.Fatalf("%d %v", status, answer)
	}
	if s := statusOf(t, p.url, answer["msg_id"].(string), "10s"); s != "success" {
		t.Fatal(s)
	}
	res, err := http.Get(p.url + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	text := readAll(t, res)
	told := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^# TYPE (\w+) (\w+)`).FindAllStringSubmatch(text, -1) {
		told[m[1]] = true
		if m[2] == "histogram" {
			for _, end := range []string{"_bucket", "_sum", "_count"} {
				told[m[1]+end] = true
			}
		}
	}
	// These appear when there is something to tell.
	for _, name := range []string{"tidings_db_retries_total", "tidings_alarms_total", "tidings_messages_rejected_total"} {
		told[name] = true
	}
	documented := readDoc(t, "README.md")
	for name := range told {
		base := strings.NewReplacer("_bucket", "", "_sum", "", "_count", "").Replace(name)
		if strings.HasPrefix(name, "tidings_") && !strings.Contains(documented, "`"+base) {
			t.Errorf("docs/monitoring/README.md does not name %s", base)
		}
	}
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal([]byte(readDoc(t, "dashboard.json")), &dashboard); err != nil || len(dashboard.Panels) < 10 {
		t.Fatalf("dashboard: %v, %d panels", err, len(dashboard.Panels))
	}
	expressions := regexp.MustCompile(`expr: .*`).FindAllString(readDoc(t, "alerts.yml"), -1)
	for _, panel := range dashboard.Panels {
		for _, target := range panel.Targets {
			expressions = append(expressions, target.Expr)
		}
	}
	for _, e := range expressions {
		for _, name := range regexp.MustCompile(`\b(tidings|go_sql|process)_\w+`).FindAllString(e, -1) {
			if !told[name] {
				t.Errorf("%s is not told, and asked for in %s", name, e)
			}
		}
	}
	// What Prometheus itself finds wrong with them.
	lint := exec.Command(promtool(t), "check", "metrics")
	lint.Stdin = strings.NewReader(text)
	if out, err := lint.CombinedOutput(); err != nil {
		t.Errorf("promtool check metrics: %v\n%s", err, out)
	}
	if !strings.Contains(text, fmt.Sprintf("tidings_build_info{commit=%q", "")) {
		t.Errorf("no build info")
	}
}
