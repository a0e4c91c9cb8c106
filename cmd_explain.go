package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"

	"github.com/spf13/cobra"

	"tidings/internal/catalog"
	"tidings/internal/explain"
	"tidings/store"
)

func (a *app) explainCommand() *cobra.Command {
	var (
		asJSON            bool
		requestID, source string
	)
	cmd := &cobra.Command{
		Use: "explain <message>", Short: "Tell why each task of a message is where it is, and what happens next", Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			var msgID uint64
			var err error
			switch {
			case (len(args) == 1) == (requestID != ""):
				return errors.New("name a message by its id, or by --request-id and its --source")
			case len(args) == 1:
				if msgID, err = strconv.ParseUint(args[0], 10, 64); err != nil {
					return fmt.Errorf("%q is no message id; a caller's own goes with --request-id", args[0])
				}
			}
			cfg, _, err := a.config(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			policies, err := cfg.policies()
			if err != nil {
				return err
			}
			return a.withStore(cmd, func(ctx context.Context, st *store.Store) error {
				if requestID != "" {
					if msgID, err = st.MessageByRequest(ctx, source, requestID); err != nil {
						return err
					}
				}
				m, err := st.Message(ctx, msgID)
				if err != nil {
					return err
				}
				tasks, err := explainer(cfg, st, policies, catalog.New(st)).Message(ctx, m, true)
				if err != nil {
					return err
				}
				return printExplanation(cmd.OutOrStdout(), m, tasks, asJSON)
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.Flags().StringVar(&requestID, "request-id", "", "of the message, in the place of its id")
	cmd.Flags().StringVar(&source, "source", store.DefaultSource, "the caller whose request it was")
	return cmd
}

func printExplanation(out io.Writer, m *store.MessageView, tasks []explain.Explained, asJSON bool) error {
	if asJSON {
		enc := json.NewEncoder(out)
		enc.SetEscapeHTML(false)
		enc.SetIndent("", "  ")
		return enc.Encode(map[string]any{"msg_id": strconv.FormatUint(m.MsgID, 10), "status": m.Status, "tasks": tasks})
	}
	fmt.Fprintf(out, "message %d: %s\n", m.MsgID, m.Status)
	for _, t := range tasks {
		fmt.Fprintf(out, "\n%s: %s\n  %s\n", t.Channel, t.Status, t.Why)
		for _, r := range t.Rows {
			fmt.Fprintf(out, "    %s WHERE %s:", r.Table, r.Where)
			for i, name := range slices.Sorted(maps.Keys(r.Columns)) {
				comma := ""
				if i > 0 {
					comma = ","
				}
				fmt.Fprintf(out, "%s %s=%v", comma, name, r.Columns[name])
			}
			fmt.Fprintln(out)
		}
	}
	return nil
}
