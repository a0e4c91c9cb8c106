package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"
)

func (a *app) alarmCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "alarm", Short: "Try out how people are told of dead letters", Args: cobra.NoArgs}
	cmd.AddCommand(&cobra.Command{
		Use: "test", Short: "Deliver an alarm that tells of nothing", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, _, err := a.config(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			alarm, closeAlarm, err := openAlarm(cfg)
			if err != nil {
				return err
			}
			defer closeAlarm()
			if alarm == nil {
				return errors.New("no alarm is configured: set alarm.provider and alarm.receiver")
			}
			if err := alarm.Test(cmd.Context()); err != nil {
				return fmt.Errorf("not delivered by %s: %w", alarm.Name, err)
			}
			fmt.Fprintf(cmd.OutOrStdout(), "delivered by %s\n", alarm.Name)
			return nil
		},
	})
	return cmd
}
