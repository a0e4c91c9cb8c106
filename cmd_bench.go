package main

import (
	"log/slog"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"tidings/bench"
)

func (a *app) benchCommand() *cobra.Command {
	var o bench.Options
	var profile string
	cmd := &cobra.Command{
		Use: "bench [scenario…]", Short: "Measure this machine, with a private database of its own",
		Long: "Measures this machine: database, product and load together, with durable settings.\n\nScenarios:\n  " + strings.Join(bench.Names(), "\n  "),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.Scenarios, o.Out, o.Progress, o.Version = args, cmd.OutOrStdout(), cmd.ErrOrStderr(), fullVersion()
			o.Log = slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), &slog.HandlerOptions{Level: slog.LevelError}))
			stop, err := startProfile(profile)
			if err != nil {
				return err
			}
			defer stop()
			return bench.Run(cmd.Context(), o)
		},
	}
	flags := cmd.Flags()
	flags.BoolVar(&o.JSON, "json", false, "print JSON")
	flags.IntVar(&o.Messages, "messages", 0, "messages of each scenario (default: its own number)")
	flags.IntVar(&o.Payload, "payload", 200, "bytes of a message's text")
	flags.StringVar(&o.Dir, "dir", os.TempDir(), "where the database is made for the time of the run; use the disk that you want to measure")
	flags.StringVar(&profile, "cpuprofile", "", "write a CPU profile to this file")
	return cmd
}
