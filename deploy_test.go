package main

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// systemd finds no fault with the unit, the binary at its place being taken for granted.
func TestUnit(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("deploy/tidings.service")
	if err != nil {
		t.Fatal(err)
	}
	unit := strings.Replace(string(text), "/usr/bin/tidings", binary, 1)
	unit = strings.Replace(unit, "Documentation=man:tidings(1)\n", "", 1) // the page comes with the package
	path := filepath.Join(t.TempDir(), "tidings.service")
	if err := os.WriteFile(path, []byte(unit), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("systemd-analyze", "verify", path).CombinedOutput(); err != nil || strings.Contains(string(out), "tidings.service") {
		t.Errorf("%v\n%s", err, out)
	}
}

// Every command has a manual page, and each shell its completion.
func TestManualAndCompletion(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if out, err := command(t, dir, "man", "--dir", "pages"); err != nil {
		t.Fatalf("%v %s", err, out)
	}
	for _, name := range []string{"tidings", "tidings-dead-requeue", "tidings-top", "tidings-archive-restore"} {
		page, err := os.ReadFile(filepath.Join(dir, "pages", name+".1"))
		if err != nil || !bytes.Contains(page, []byte(".SH SYNOPSIS")) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		if out, err := command(t, dir, "completion", shell); err != nil || !strings.Contains(out, "tidings") {
			t.Errorf("%s: %v", shell, err)
		}
	}
	if out, err := command(t, dir, "__complete", "dead", "re"); err != nil || !strings.Contains(out, "requeue") {
		t.Errorf("%v %s", err, out)
	}
}

// top shows a table on a terminal, and lines elsewhere; rates are those of the time between two looks.
func TestTop(t *testing.T) {
	t.Parallel()
	db := startDB(t)
	dir, address := worldDir(t), freeAddress(t)
	p := startTidings(t, dir, address, "mysql: {dsn: \""+db.DSN("tidings")+"\"}\nlog: {level: error}\nproviders: {log: {type: log, delay: 1s}}\nchannels: {log: {providers: [log], slots: 2}}\n")
	if out, err := command(t, dir, "lane", "pause", "low", "--reason", "a sale"); err != nil {
		t.Fatalf("%v %s", err, out)
	}
	await(t, "the lane to stand still", 10*time.Second, func() bool { return strings.Contains(verbose(t, p.url), `"lane":"low","weight":10,"paused":true`) })
	for _, priority := range []string{"low", "middle", "middle", "middle", "middle", "middle"} {
		if status, answer, _ := post(p.url, `{"channels":["log"],"to":"x","text":"hi","priority":"`+priority+`"}`); status != 202 {
			t.Fatalf("%d %v", status, answer)
		}
	}
	out, err := command(t, dir, "top", "--once")
	if err != nil || !regexp.MustCompile(`(?s)tidings at .* UTC: 1 processes, 0 dead letters, scheduled sends 0s late\nlane low is paused: a sale\n.*LANE +CHANNEL +READY +WAITING +SENDING +UNKNOWN +OLDEST.*middle +log +\d+ +0 +\d+ +0 .*low +log +1 +0 +0 +0 `).MatchString(out) {
		t.Errorf("%v\n%s", err, out)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Second)
	defer cancel()
	cmd := exec.Command(binary, "top", "--every", "500ms")
	cmd.Dir = dir
	var lines bytes.Buffer
	cmd.Stdout = &lines
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	<-ctx.Done()
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("interrupted: %v", err)
	}
	text := lines.String()
	if strings.Contains(text, "\x1b") || !regexp.MustCompile(`(?m)^\S+Z processes=1 dead=0 scheduled_late=0s paused="low" sent="log \d+/s"$`).MatchString(text) ||
		!regexp.MustCompile(`(?m)^\S+Z lane=low channel=log ready=1 waiting=0 sending=0 unknown=0 oldest=\S+$`).MatchString(text) {
		t.Error(text)
	}
	if out, err := command(t, dir, "top", "--every", "1ms"); err == nil {
		t.Errorf("looked every millisecond: %s", out)
	}
}
