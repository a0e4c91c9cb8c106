package main

import (
	"fmt"
	"io"
	"log/slog"
	"strings"

	"github.com/go-sql-driver/mysql"
	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"
)

func (a *app) configCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "config", Short: "Check or show the configuration"}
	cmd.AddCommand(&cobra.Command{
		Use: "check", Short: "Tell whether the configuration is good, and name what is not (exit code 1)", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, _, err := a.config(io.Discard)
			if err != nil {
				return err
			}
			_, closeAll, err := openChannels(cfg, slog.New(slog.DiscardHandler))
			if err != nil {
				return err
			}
			closeAll()
			_, closeAlarm, err := openAlarm(cfg)
			if err != nil {
				return err
			}
			closeAlarm()
			fmt.Fprintln(cmd.OutOrStdout(), "the configuration is good")
			return nil
		},
	}, &cobra.Command{
		Use: "show", Short: "Print the configuration in force, secrets masked", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if _, _, err := a.config(io.Discard); err != nil {
				return err
			}
			settings := a.viper.AllSettings()
			mask(settings)
			enc := yaml.NewEncoder(cmd.OutOrStdout())
			enc.SetIndent(2)
			return enc.Encode(settings)
		},
	})
	return cmd
}

const masked = "********"

// secretKeys are the settings whose values nobody is to see. A bot's url is one: who knows it can send.
var secretKeys = map[string]bool{"password": true, "secret": true, "previous_secret": true, "dkim_key": true, "url": true, "key": true}

// mask replaces secrets, however deep they lie.
func mask(settings map[string]any) {
	for key, value := range settings {
		switch v := value.(type) {
		case map[string]any:
			mask(v)
		case string:
			if v != "" && (key == "dsn" || key == "migrator_dsn") {
				settings[key] = maskDSN(v)
			} else if v != "" && secretKeys[key] {
				settings[key] = masked
			}
		}
	}
}

func maskDSN(dsn string) string {
	cfg, err := mysql.ParseDSN(dsn)
	if err != nil {
		return masked
	}
	if cfg.Passwd != "" {
		cfg.Passwd = masked
	}
	return strings.TrimSuffix(cfg.FormatDSN(), "?")
}
