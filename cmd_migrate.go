package main

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/spf13/cobra"

	"tidings/internal/localdb"
	"tidings/store"
)

func (a *app) migrateCommand() *cobra.Command {
	return &cobra.Command{
		Use: "migrate", Short: "Make the database and its tables, or bring them up to this version (serve does it, too)", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, log, err := a.config(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			dsn, stop, err := database(cmd.Context(), cfg, log)
			if err != nil {
				return err
			}
			defer stop()
			applied, err := store.Migrate(cmd.Context(), store.Config{DSN: dsn, MigratorDSN: cfg.MySQL.MigratorDSN, Log: log})
			if err != nil {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), "the database is up to date (%d migrations applied)\n", applied)
			return nil
		},
	}
}

// database is the server to work with: the configured one, or a private one in the data directory, which stop ends.
func database(ctx context.Context, cfg *Config, log *slog.Logger) (dsn string, stop func(), err error) {
	if cfg.MySQL.DSN != "" {
		return cfg.MySQL.DSN, func() {}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	server, err := localdb.Start(ctx, localdb.Config{Dir: cfg.DataDir, Log: log})
	if err != nil {
		return "", nil, err
	}
	log.Info("using a private database; set mysql.dsn (TIDINGS_MYSQL_DSN) for a server of your own",
		"look_inside", "mariadb --socket="+server.Socket()+" tidings")
	return server.DSN("tidings"), server.Stop, nil
}
