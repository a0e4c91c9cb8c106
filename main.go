// Tidings is a message centre in one binary: business services hand it messages by HTTP, it keeps them in MySQL tables that
// are also its queue, and delivers them over e-mail and other channels.
package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/viper"
)

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

// Memory for speed: the process lives on few megabytes, so it may collect garbage less often than Go's default, which is set
// for large heaps. GOGC and GOMEMLIMIT in the environment win.
const (
	gcPercent   = 300
	memoryLimit = 256 << 20
)

func tuneMemory() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(memoryLimit)
	}
}

// run is the program as a function: it returns the exit code.
func run(args []string, stdout, stderr io.Writer) int {
	tuneMemory()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	root := rootCommand()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	if err := root.ExecuteContext(ctx); err != nil {
		fmt.Fprintln(stderr, "tidings:", err)
		return 1
	}
	return 0
}

// app is what the commands share: the flags' values, and the configuration that comes of them.
type app struct {
	viper *viper.Viper
	path  string // of the configuration file; empty: the default one
}

func rootCommand() *cobra.Command {
	a := &app{viper: viper.New()}
	serve := a.serveCommand()
	root := &cobra.Command{
		Use:   "tidings",
		Short: "A message centre on MySQL: accepts messages by HTTP, queues them in tables, delivers them by e-mail and more",
		Args:  cobra.NoArgs, SilenceUsage: true, SilenceErrors: true,
		RunE: serve.RunE,
	}
	flags := root.PersistentFlags()
	flags.StringVar(&a.path, "config", os.Getenv(envPrefix+"_CONFIG"), "configuration file (default: config.yaml here, if there is one)")
	for _, f := range []struct{ name, key, usage string }{
		{"data-dir", "data_dir", "directory for the private database and for files"},
		{"mysql-dsn", "mysql.dsn", "a server of yours: user:password@tcp(127.0.0.1:3306)/tidings (default: a private server in the data directory)"},
		{"log-level", "log.level", "debug, info, warn or error"},
		{"listen", "listen", "address of the HTTP server"},
	} {
		flags.String(f.name, "", f.usage)
		if err := a.viper.BindPFlag(f.key, flags.Lookup(f.name)); err != nil {
			panic(err) // the flag was made one line above
		}
	}
	root.AddCommand(serve, a.migrateCommand(), a.sendCommand(), a.keyCommand(), a.delayCommand(), a.laneCommand(), a.providerCommand(), a.deadCommand(), a.explainCommand(), a.alarmCommand(), a.statsCommand(), a.topCommand(), a.archiveCommand(), manCommand(), a.healthCommand(), a.doctorCommand(), a.configCommand(), versionCommand(), a.benchCommand())
	return root
}

// config loads the configuration and makes the logger that it asks for.
func (a *app) config(stderr io.Writer) (*Config, *slog.Logger, error) {
	cfg, err := loadConfig(a.viper, a.path)
	if err != nil {
		return nil, nil, err
	}
	level, err := logLevel(cfg.Log.Level)
	if err != nil {
		return nil, nil, err
	}
	options := &slog.HandlerOptions{Level: level}
	if cfg.Log.Format == "json" {
		return cfg, slog.New(slog.NewJSONHandler(stderr, options)), nil
	}
	return cfg, slog.New(slog.NewTextHandler(stderr, options)), nil
}
