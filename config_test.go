package main

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/spf13/viper"
)

func load(t *testing.T, text string) (*Config, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return loadConfig(viper.New(), path)
}

// config.yaml shows every setting with its default: loading it changes nothing.
func TestConfigFileShowsDefaults(t *testing.T) {
	shown, err := loadConfig(viper.New(), "config.yaml")
	if err != nil {
		t.Fatal(err)
	}
	plain, err := load(t, "")
	if err != nil {
		t.Fatal(err)
	}
	for name, channel := range shown.Channels { // settings whose default lies with the engine and the providers
		channel.Slots = 0
		shown.Channels[name] = channel
	}
	for name, settings := range shown.Providers {
		shown.Providers[name] = map[string]any{"type": settings["type"]}
	}
	if !reflect.DeepEqual(shown, plain) {
		t.Fatalf("config.yaml\n%+v\ndefaults\n%+v", shown, plain)
	}
	text, err := os.ReadFile("config.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for key := range defaults {
		if last := key[strings.LastIndexByte(key, '.')+1:]; !strings.Contains(string(text), last+":") {
			t.Errorf("config.yaml does not show %s", key)
		}
	}
}

func TestConfigRefuses(t *testing.T) {
	for _, tt := range []struct{ text, want string }{
		{"colour: red", "colour"},
		{"queue: {leese: 5s}", "leese"},
		{"queue: {lease: soon}", "lease"},
		{"queue: {lease: 20s}", "queue.lease"},
		{"queue: {send_timeout: -1s}", "queue.send_timeout"},
		{"listen: here", "listen"},
		{"log: {level: loud}", "log.level"},
		{"log: {format: xml}", "log.format"},
		{"mysql: {connections: 1}", "mysql.connections"},
		{"mysql: {dsn: garbage}", "mysql.dsn"},
		{"queue: {lease: 60}", "unit"},
		{"channels: {fax: {providers: [log]}}", "channels.fax"},
		{"channels: {sms: {providers: [nobody]}}", "nobody"},
		{"channels: {sms: {providers: [file]}}", "channels.sms.providers"},
		{"channels: {sms: {providers: [log, file]}}", "channels.sms.providers"},
		{"channels: {sms: {provider: log}}", "provider"},
		{"- a list", "config.yaml"},
		{"mysql: {dsn: x@/y, dsn_file: y}", "mysql.dsn_file"},
		{"mysql: {dsn_file: /does/not/exist}", "mysql.dsn_file"},
	} {
		if _, err := load(t, tt.text); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want a word of %s", tt.text, err, tt.want)
		}
	}
	if _, err := loadConfig(viper.New(), "/does/not/exist.yaml"); err == nil {
		t.Error("a file that is not there was loaded")
	}
}

func TestConfigOrder(t *testing.T) {
	t.Setenv("TIDINGS_QUEUE_LEASE", "90s")
	t.Setenv("TIDINGS_LOG_LEVEL", "warn")
	dsn := filepath.Join(t.TempDir(), "dsn")
	if err := os.WriteFile(dsn, []byte("user:secret@tcp(db:3306)/tidings\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("TIDINGS_MYSQL_DSN_FILE", dsn)
	cfg, err := load(t, "queue: {lease: 70s, send_timeout: 20s}\nchannels: {sms: {providers: [log]}}\n")
	if err != nil {
		t.Fatal(err)
	}
	if cfg.Queue.Lease != 90*time.Second || cfg.Queue.SendTimeout != 20*time.Second || cfg.Log.Level != "warn" {
		t.Errorf("environment over file over default: %+v %+v", cfg.Queue, cfg.Log)
	}
	if cfg.MySQL.DSN != "user:secret@tcp(db:3306)/tidings" {
		t.Errorf("dsn %q", cfg.MySQL.DSN)
	}
	if len(cfg.Channels) != 4 {
		t.Errorf("the file's channels replace the defaults': %v", cfg.Channels)
	}
}

// Every key can come from the environment, those of single providers too, and of providers that no file names.
func TestEnvironment(t *testing.T) {
	key := filepath.Join(t.TempDir(), "password")
	if err := os.WriteFile(key, []byte("canary\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, value := range map[string]string{
		"TIDINGS_PROVIDERS_RELAY_TYPE": "smtp", "TIDINGS_PROVIDERS_RELAY_HOST": "mail.example.com", "TIDINGS_PROVIDERS_RELAY_FROM": "shop@example.com",
		"TIDINGS_PROVIDERS_RELAY_USERNAME": "shop", "TIDINGS_PROVIDERS_RELAY_PASSWORD_FILE": key, "TIDINGS_PROVIDERS_RELAY_CONNECTIONS": "3",
		"TIDINGS_PROVIDERS_BOTS_TYPE": "feishu", "TIDINGS_PROVIDERS_BOTS_BOTS_OPS_URL": "https://open.feishu.cn/x", "TIDINGS_PROVIDERS_BOTS_BOTS_OPS_SECRET_FILE": key,
		"TIDINGS_CHANNELS_FEISHU_PROVIDERS": "bots",
		"TIDINGS_CHANNELS_EMAIL_PROVIDERS":  "relay", "TIDINGS_CHANNELS_EMAIL_SLOTS": "7", "TIDINGS_CHANNELS_SMS_PROVIDERS": "log", "TIDINGS_SHUTDOWN_GRACE": "5s",
	} {
		t.Setenv(name, value)
	}
	cfg, err := load(t, "")
	if err != nil {
		t.Fatal(err)
	}
	if got := cfg.Channels["email"]; !reflect.DeepEqual(got, ChannelConfig{Providers: []string{"relay"}, Slots: 7}) {
		t.Errorf("email: %+v", got)
	}
	if got := cfg.Providers["relay"]["password"]; got != "canary" || cfg.Providers["relay"]["host"] != "mail.example.com" {
		t.Errorf("relay: %v", cfg.Providers["relay"])
	}
	if cfg.Shutdown.Grace != 5*time.Second || len(cfg.Channels["sms"].Providers) != 1 {
		t.Errorf("%+v", cfg)
	}
	for _, name := range []string{"relay", "bots"} {
		if _, err := openProvider(name, cfg); err != nil {
			t.Error(err)
		}
	}
	if ops := cfg.Providers["bots"]["bots"].(map[string]any)["ops"]; !reflect.DeepEqual(ops, map[string]any{"url": "https://open.feishu.cn/x", "secret": "canary"}) {
		t.Errorf("bots: %v", ops)
	}
	t.Setenv("TIDINGS_PROVIDERS_RELAY_COLOUR", "red")
	if _, err := load(t, ""); err == nil || !strings.Contains(err.Error(), "TIDINGS_PROVIDERS_RELAY_COLOUR") {
		t.Errorf("an unknown variable: %v", err)
	}
}

func TestMask(t *testing.T) {
	settings := map[string]any{
		"mysql":     map[string]any{"dsn": "user:canary@tcp(db:3306)/tidings"},
		"providers": map[string]any{"relay": map[string]any{"host": "mail", "password": "canary", "dkim_key": "canary"}, "feishu": map[string]any{"bots": map[string]any{"ops": map[string]any{"url": "https://canary", "secret": "canary"}}}},
	}
	mask(settings)
	text := fmt.Sprint(settings)
	if strings.Contains(text, "canary") || !strings.Contains(text, "user:********@tcp(db:3306)/tidings") || !strings.Contains(text, "mail") {
		t.Fatal(text)
	}
}
