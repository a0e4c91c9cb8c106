package main

import (
	"context"
	"errors"
	"fmt"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"tidings/internal/retention"
	"tidings/store"
)

func (a *app) archiveCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "archive", Short: "Look at archived days of the history, and bring them back", Args: cobra.NoArgs}
	list := &cobra.Command{
		Use: "list", Short: "List the files in archive_dir", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, _, err := a.config(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			if cfg.ArchiveDir == "" {
				return errors.New("archive_dir is not set: days are dropped without an archive")
			}
			archives, err := retention.List(cfg.ArchiveDir)
			if err != nil {
				return err
			}
			w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
			fmt.Fprintln(w, "DAY (UTC)\tTABLE\tROWS\tBYTES\tFILE")
			for _, f := range archives {
				fmt.Fprintf(w, "%s-%s-%s\t%s\t%d\t%d\t%s\n", f.Day[:4], f.Day[4:6], f.Day[6:], f.Table, f.Rows, f.Bytes, f.Path)
			}
			return w.Flush()
		},
	}
	var table string
	restore := &cobra.Command{
		Use: "restore <file>", Short: "Bring an archived day back into a table of its own", Args: cobra.ExactArgs(1),
		Long: "Bring an archived day back into a table of its own, such as t_msg_record_20260901. It is made for it, has the columns of the history's\n" +
			"table, and is nobody's but yours: drop it when you have seen enough.",
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withStore(cmd, func(ctx context.Context, st *store.Store) error {
				name, rows, err := retention.Restore(ctx, st, args[0], table)
				if errors.Is(err, store.ErrExists) {
					return fmt.Errorf("%w: drop it, or name another by --table", err)
				}
				if err != nil {
					return err
				}
				fmt.Fprintf(cmd.OutOrStdout(), "%s: %d rows\n", name, rows)
				return nil
			})
		},
	}
	restore.Flags().StringVar(&table, "table", "", "the table to make (default: the history's table with the day)")
	cmd.AddCommand(list, restore)
	return cmd
}
