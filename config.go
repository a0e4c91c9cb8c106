package main

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/go-viper/mapstructure/v2"
	"github.com/nyaruka/phonenumbers"
	"github.com/spf13/viper"

	"tidings/internal/msg"
	"tidings/internal/policy"
	"tidings/sender"
)

// Config is the whole configuration. config.yaml explains every key.
type Config struct {
	Listen  string `mapstructure:"listen"`
	DataDir string `mapstructure:"data_dir"`
	Log     struct {
		Level  string `mapstructure:"level"`
		Format string `mapstructure:"format"`
	} `mapstructure:"log"`
	MySQL struct {
		DSN             string `mapstructure:"dsn"`
		DSNFile         string `mapstructure:"dsn_file"`
		MigratorDSN     string `mapstructure:"migrator_dsn"`
		MigratorDSNFile string `mapstructure:"migrator_dsn_file"`
		Connections     int    `mapstructure:"connections"`
	} `mapstructure:"mysql"`
	Queue struct {
		Lease        time.Duration `mapstructure:"lease"`
		SendTimeout  time.Duration `mapstructure:"send_timeout"`
		SettleBudget time.Duration `mapstructure:"settle_budget"`
	} `mapstructure:"queue"`
	Delay struct {
		Slot   time.Duration `mapstructure:"slot"`
		Slots  int           `mapstructure:"slots"`
		Shards int           `mapstructure:"shards"`
		Lead   time.Duration `mapstructure:"lead"`
	} `mapstructure:"delay"`
	// Retention: ages such as 90d or 36h, or forever.
	Retention struct {
		Record  string `mapstructure:"record"`
		Attempt string `mapstructure:"attempt"`
		Submit  string `mapstructure:"submit"`
		Stat    string `mapstructure:"stat"`
	} `mapstructure:"retention"`
	ArchiveDir  string `mapstructure:"archive_dir"`
	Idempotency struct {
		TTL time.Duration `mapstructure:"ttl"`
	} `mapstructure:"idempotency"`
	Templates struct {
		Review bool `mapstructure:"review"`
	} `mapstructure:"templates"`
	Client struct {
		Key     string `mapstructure:"key"`
		KeyFile string `mapstructure:"key_file"`
	} `mapstructure:"client"`
	Policies map[string]policy.Settings `mapstructure:"policies"`
	Retry    struct {
		MaxPerSecond float64 `mapstructure:"max_per_second"`
	} `mapstructure:"retry"`
	DegradeAfter time.Duration `mapstructure:"degrade_after"`
	Alarm        struct {
		Provider string        `mapstructure:"provider"`
		Receiver string        `mapstructure:"receiver"`
		Every    time.Duration `mapstructure:"every"`
		DigestAt string        `mapstructure:"digest_at"`
	} `mapstructure:"alarm"`
	// Frequency: category, channel or all → limits such as "1/1m, 5/24h".
	Frequency map[string]map[string]string `mapstructure:"frequency"`
	// FrequencySources: the same for single sources.
	FrequencySources map[string]map[string]map[string]string `mapstructure:"frequency_sources"`
	Phone            struct {
		Region string `mapstructure:"region"`
	} `mapstructure:"phone"`
	Shutdown struct {
		Grace time.Duration `mapstructure:"grace"`
	} `mapstructure:"shutdown"`
	Providers map[string]map[string]any `mapstructure:"providers"`
	Channels  map[string]ChannelConfig  `mapstructure:"channels"`
}

// ChannelConfig says how a channel is served.
type ChannelConfig struct {
	Providers []string `mapstructure:"providers"`
	Slots     int      `mapstructure:"slots"`
}

// defaults also lists every key that there is, but for those of single providers.
var defaults = map[string]any{
	"listen":                             "127.0.0.1:8080",
	"data_dir":                           "./data",
	"log.level":                          "info",
	"log.format":                         "text",
	"mysql.dsn":                          "",
	"mysql.dsn_file":                     "",
	"mysql.migrator_dsn":                 "",
	"mysql.migrator_dsn_file":            "",
	"mysql.connections":                  32,
	"queue.lease":                        time.Minute,
	"queue.send_timeout":                 30 * time.Second,
	"queue.settle_budget":                10 * time.Second,
	"delay.slot":                         24 * time.Hour,
	"delay.slots":                        4,
	"delay.shards":                       1,
	"delay.lead":                         time.Minute,
	"retention.record":                   "90d",
	"retention.attempt":                  "90d",
	"retention.submit":                   "90d",
	"retention.stat":                     "400d",
	"archive_dir":                        "",
	"idempotency.ttl":                    24 * time.Hour,
	"frequency.verification.all":         "1/1m",
	"frequency.notification.all":         "",
	"frequency.marketing.all":            "5/24h",
	"policies.verification.priority":     "high",
	"policies.verification.retry":        []string{"1s", "5s", "30s"},
	"policies.verification.jitter":       0.2,
	"policies.verification.expiry":       "5m",
	"policies.verification.unknown":      "ask_again",
	"policies.verification.unknown_wait": "30s",
	"policies.verification.degrade":      "switch",
	"policies.verification.alarm":        "now",
	"policies.notification.priority":     "middle",
	"policies.notification.retry":        []string{"10s", "1m", "5m", "30m"},
	"policies.notification.jitter":       0.2,
	"policies.notification.expiry":       "24h",
	"policies.notification.unknown":      "wait",
	"policies.notification.unknown_wait": "30s",
	"policies.notification.degrade":      "wait",
	"policies.notification.alarm":        "daily",
	"policies.marketing.priority":        "low",
	"policies.marketing.retry":           []string{"1m", "5m", "30m"},
	"policies.marketing.jitter":          0.2,
	"policies.marketing.expiry":          "6h",
	"policies.marketing.unknown":         "dead_letter",
	"policies.marketing.unknown_wait":    "30s",
	"policies.marketing.degrade":         "skip",
	"policies.marketing.alarm":           "daily",
	"retry.max_per_second":               1000,
	"degrade_after":                      30 * time.Second,
	"alarm.provider":                     "",
	"alarm.receiver":                     "",
	"alarm.every":                        time.Minute,
	"alarm.digest_at":                    "01:00Z",
	"phone.region":                       "CN",
	"templates.review":                   false,
	"client.key":                         "",
	"client.key_file":                    "",
	"shutdown.grace":                     30 * time.Second,
	"providers.file.type":                "file",
	"providers.log.type":                 "log",
	"providers.webhook.type":             "webhook",
	"channels.email.providers":           []string{"file"},
	"channels.log.providers":             []string{"log"},
	"channels.webhook.providers":         []string{"webhook"},
}

// defaultDatabase is that of a DSN that names none.
const defaultDatabase = "tidings"

const (
	envPrefix  = "TIDINGS"
	configFile = "config.yaml"
)

// loadConfig reads defaults, the file, the environment and flags, each over the one before, and checks the result. An
// empty path means config.yaml in the working directory, if there is one.
func loadConfig(v *viper.Viper, path string) (*Config, error) {
	for key, value := range defaults {
		v.SetDefault(key, value)
	}
	if _, err := os.Stat(configFile); path == "" && err == nil {
		path = configFile
	}
	if path != "" {
		v.SetConfigFile(path)
		if err := v.ReadInConfig(); err != nil {
			return nil, fmt.Errorf("configuration %s: %w", path, err)
		}
	}
	if err := bindEnvironment(v, os.Environ()); err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	var cfg Config
	if err := v.UnmarshalExact(&cfg); err != nil {
		return nil, fmt.Errorf("configuration: %w", plainKeys(err))
	}
	if err := cfg.readSecrets(); err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	if err := cfg.check(); err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	return &cfg, nil
}

// plainKeys says in plain words which keys the file should not have.
func plainKeys(err error) error {
	var unused *mapstructure.DecodeError
	if errors.As(err, &unused) {
		return fmt.Errorf("%s: %w", strings.ToLower(unused.Name()), unused.Unwrap())
	}
	return err
}

// readSecrets reads the values that are kept in files of their own.
func (c *Config) readSecrets() error {
	dsn := map[string]any{
		"dsn": c.MySQL.DSN, "dsn_file": c.MySQL.DSNFile, "migrator_dsn": c.MySQL.MigratorDSN, "migrator_dsn_file": c.MySQL.MigratorDSNFile,
	}
	if err := readFiles(dsn); err != nil {
		return fmt.Errorf("mysql.%w", err)
	}
	c.MySQL.DSN, _ = dsn["dsn"].(string)
	c.MySQL.MigratorDSN, _ = dsn["migrator_dsn"].(string)
	client := map[string]any{"key": c.Client.Key, "key_file": c.Client.KeyFile}
	if err := readFiles(client); err != nil {
		return fmt.Errorf("client.%w", err)
	}
	c.Client.Key, _ = client["key"].(string)
	for name, settings := range c.Providers {
		if err := readFiles(settings); err != nil {
			return fmt.Errorf("providers.%s.%w", name, err)
		}
	}
	return nil
}

// check validates values and the relations between them. It names every faulty key.
func (c *Config) check() error {
	var errs []error
	fault := func(key, format string, args ...any) {
		errs = append(errs, fmt.Errorf("%s %s", key, fmt.Sprintf(format, args...)))
	}
	if _, _, err := net.SplitHostPort(c.Listen); err != nil {
		fault("listen", "must be host:port, such as 127.0.0.1:8080")
	}
	if _, err := logLevel(c.Log.Level); err != nil {
		fault("log.level", "must be debug, info, warn or error")
	}
	if c.Log.Format != "text" && c.Log.Format != "json" {
		fault("log.format", "must be text or json")
	}
	if _, err := mysql.ParseDSN(c.MySQL.DSN); c.MySQL.DSN != "" && err != nil {
		fault("mysql.dsn", "is not a DSN such as user:password@tcp(127.0.0.1:3306)/tidings") // the parser's words may repeat it
	}
	if _, err := mysql.ParseDSN(c.MySQL.MigratorDSN); c.MySQL.MigratorDSN != "" && err != nil {
		fault("mysql.migrator_dsn", "is not a DSN such as user:password@tcp(127.0.0.1:3306)/tidings")
	}
	if a, err := mysql.ParseDSN(c.MySQL.MigratorDSN); c.MySQL.MigratorDSN != "" && err == nil {
		if b, err := mysql.ParseDSN(c.MySQL.DSN); err == nil && cmp.Or(a.DBName, defaultDatabase) != cmp.Or(b.DBName, defaultDatabase) {
			fault("mysql.migrator_dsn", "must name the database of mysql.dsn")
		}
	}
	if c.MySQL.MigratorDSN != "" && c.MySQL.DSN == "" {
		fault("mysql.migrator_dsn", "goes with mysql.dsn: the private database has one account")
	}
	if c.MySQL.Connections < 4 {
		fault("mysql.connections", "must be at least 4")
	}
	for key, value := range map[string]time.Duration{
		"queue.lease": c.Queue.Lease, "queue.send_timeout": c.Queue.SendTimeout, "queue.settle_budget": c.Queue.SettleBudget,
		"idempotency.ttl": c.Idempotency.TTL, "shutdown.grace": c.Shutdown.Grace,
	} {
		if value < time.Millisecond {
			fault(key, "must be a duration with a unit, such as 90s or 10m, and at least 1ms")
		}
	}
	if c.Queue.Lease <= c.Queue.SendTimeout+c.Queue.SettleBudget {
		fault("queue.lease", "(%v) must be longer than queue.send_timeout (%v) and queue.settle_budget (%v) together, or tasks are sent twice",
			c.Queue.Lease, c.Queue.SendTimeout, c.Queue.SettleBudget)
	}
	c.checkDelay(fault)
	if info, err := os.Stat(c.ArchiveDir); c.ArchiveDir != "" && err == nil && !info.IsDir() {
		fault("archive_dir", "is no directory")
	}
	if _, err := c.ages(); err != nil {
		errs = append(errs, err)
	}
	if c.Retry.MaxPerSecond < 1 || c.Retry.MaxPerSecond > 1e6 {
		fault("retry.max_per_second", "must be between 1 and 1000000")
	}
	if c.DegradeAfter < time.Second {
		fault("degrade_after", "must be at least 1s")
	}
	c.checkAlarm(fault)
	if _, err := c.policies(); err != nil {
		errs = append(errs, err)
	}
	c.checkProviders(fault)
	if _, err := frequencies(c); err != nil {
		errs = append(errs, err)
	}
	if !phonenumbers.GetSupportedRegions()[c.Phone.Region] {
		fault("phone.region", "must be a region of two letters, such as CN")
	}
	for name, channel := range c.Channels {
		c.checkChannel(name, channel, fault)
	}
	slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return errors.Join(errs...)
}

// Limits of the delay tables: one statement looks at all of them.
const (
	mostDelayTables = 256
	mostShards      = 32
	leastSlot       = 10 * time.Second
	mostSlot        = 366 * 24 * time.Hour
)

func (c *Config) checkDelay(fault func(key, format string, args ...any)) {
	d := c.Delay
	if d.Slot < leastSlot || d.Slot > mostSlot || d.Slot%time.Second != 0 {
		fault("delay.slot", "must be whole seconds between %v and %v", leastSlot, mostSlot)
	}
	if d.Shards < 1 || d.Shards > mostShards {
		fault("delay.shards", "must be between 1 and %d", mostShards)
	}
	if d.Slots < 2 || d.Slots*d.Shards > mostDelayTables {
		fault("delay.slots", "must be at least 2, and with delay.shards make %d tables at most", mostDelayTables)
	}
	if d.Lead < time.Second || d.Lead >= d.Slot {
		fault("delay.lead", "must be at least 1s, and shorter than delay.slot")
	}
}

func (c *Config) checkProviders(fault func(key, format string, args ...any)) {
	for name, settings := range c.Providers {
		limits, _, err := providerLimits(settings)
		if err != nil {
			fault("providers."+name, "%v", err)
		}
		if limits.Timeout != 0 && c.Queue.Lease <= limits.Timeout+c.Queue.SettleBudget {
			fault("providers."+name+".timeout", "and queue.settle_budget must be shorter together than queue.lease, or tasks are sent twice")
		}
		if kind, _ := settings["type"].(string); !slices.Contains(sender.Types(), kind) {
			fault("providers."+name+".type", "must be one of %s", strings.Join(sender.Types(), ", "))
		}
	}
}

func (c *Config) checkAlarm(fault func(key, format string, args ...any)) {
	a := c.Alarm
	if _, ok := c.Providers[a.Provider]; a.Provider != "" && !ok {
		fault("alarm.provider", "names %q, which is not under providers", a.Provider)
	}
	if (a.Provider == "") != (a.Receiver == "") {
		fault("alarm.receiver", "and alarm.provider go together")
	}
	if a.Every < time.Second {
		fault("alarm.every", "must be at least 1s")
	}
	if _, err := digestAt(a.DigestAt); err != nil {
		fault("alarm.digest_at", "must be a time of day with an offset, such as 09:00+08:00 or 01:00Z")
	}
}

// digestAt reads a time of day as the time since midnight, UTC.
func digestAt(text string) (time.Duration, error) {
	t, err := time.Parse("15:04Z07:00", text)
	if err != nil {
		return 0, err
	}
	t = t.UTC()
	return time.Duration(t.Hour())*time.Hour + time.Duration(t.Minute())*time.Minute, nil
}

func (c *Config) checkChannel(name string, channel ChannelConfig, fault func(key, format string, args ...any)) {
	ch, err := msg.ParseChannel(name)
	if err != nil {
		fault("channels."+name, "is no channel; there are %v", msg.Channels)
		return
	}
	if channel.Slots < 0 {
		fault("channels."+name+".slots", "must not be negative")
	}
	for i, p := range channel.Providers {
		if slices.Index(channel.Providers, p) < i {
			fault("channels."+name+".providers", "names %q a second time", p)
		}
	}
	for _, p := range channel.Providers {
		settings, ok := c.Providers[p]
		if !ok {
			fault("channels."+name+".providers", "names %q, which is not under providers", p)
			continue
		}
		kind, _ := settings["type"].(string)
		if slices.Contains(sender.Types(), kind) && !sender.Serves(kind, ch) {
			fault("channels."+name+".providers", "names %q, whose type %s does not serve this channel", p, kind)
		}
	}
}

// onLoopback tells whether only this machine reaches an address.
func onLoopback(listen string) bool {
	host, _, err := net.SplitHostPort(listen)
	ip := net.ParseIP(host)
	return err == nil && (host == "localhost" || (ip != nil && ip.IsLoopback()))
}

// localURL is where a command on this machine finds the server.
func localURL(listen string) string {
	host, port, err := net.SplitHostPort(listen)
	if ip := net.ParseIP(host); err == nil && (host == "" || (ip != nil && ip.IsUnspecified())) {
		listen = net.JoinHostPort("127.0.0.1", port)
	}
	return "http://" + listen
}

func logLevel(name string) (level slog.Level, err error) {
	err = level.UnmarshalText([]byte(name))
	return level, err
}
