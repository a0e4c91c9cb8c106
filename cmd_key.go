package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"tidings/internal/admit"
	"tidings/store"
)

// byCommand is who the audit names for what is done by command.
const byCommand = "command-line"

func (a *app) keyCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "key", Short: "Make, list and revoke callers' keys", Args: cobra.NoArgs}
	var role string
	create := &cobra.Command{
		Use: "create <source>", Short: "Make a key for a caller, and the caller if it is new; the key is shown once", Args: cobra.ExactArgs(1),
		Long: "Makes a key for a caller, and registers the caller if it is new: as an admin if it is the first, else as a sender.\n" +
			"From the first one on, every request needs a key, on every node within a second. A caller may have two valid keys\n" +
			"while it changes from one to the other.",
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withStore(cmd, func(ctx context.Context, st *store.Store) error {
				return createKey(ctx, st, cmd.OutOrStdout(), cmd.ErrOrStderr(), args[0], role)
			})
		},
	}
	create.Flags().StringVar(&role, "role", "", "sender or admin, for a new caller (default: admin for the first, else sender)")
	list := &cobra.Command{
		Use: "list", Short: "List callers and their keys, without the keys themselves", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withStore(cmd, func(ctx context.Context, st *store.Store) error { return listKeys(ctx, st, cmd.OutOrStdout()) })
		},
	}
	revoke := &cobra.Command{
		Use: "revoke <key-id>", Short: "Make a key worthless, on every node within a second", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withStore(cmd, func(ctx context.Context, st *store.Store) error {
				if err := st.RevokeKey(ctx, byCommand, "", args[0]); err != nil {
					return err
				}
				fmt.Fprintf(cmd.OutOrStdout(), "revoked %s\n", args[0])
				return nil
			})
		},
	}
	cmd.AddCommand(create, list, revoke)
	return cmd
}

// withStore runs a command on the database, the running server's if there is one.
func (a *app) withStore(cmd *cobra.Command, do func(context.Context, *store.Store) error) error {
	cfg, _, err := a.config(cmd.ErrOrStderr())
	if err != nil {
		return err
	}
	ctx, quiet := cmd.Context(), slog.New(slog.DiscardHandler)
	dsn, stop, err := database(ctx, cfg, quiet)
	if err != nil {
		return err
	}
	defer stop()
	if err := store.Prepare(ctx, store.Config{DSN: dsn, MigratorDSN: cfg.MySQL.MigratorDSN, Log: quiet}); err != nil {
		return err
	}
	st, err := store.Open(ctx, store.Config{DSN: dsn, MigratorDSN: cfg.MySQL.MigratorDSN, Connections: 4, Version: version, Command: true, Log: quiet})
	if err != nil {
		return err
	}
	return errors.Join(do(ctx, st), st.Close())
}

func createKey(ctx context.Context, st *store.Store, out, notes io.Writer, source, role string) error {
	if role != "" && role != store.RoleSender && role != store.RoleAdmin {
		return errors.New("--role must be sender or admin")
	}
	if !admit.ValidName(source) {
		return errors.New("a source " + admit.NameRule)
	}
	sources, err := st.Sources(ctx)
	if err != nil {
		return err
	}
	var known *store.Source
	for i := range sources {
		if sources[i].ID == source {
			known = &sources[i]
		}
	}
	switch {
	case known == nil && role == "" && len(sources) == 0:
		role = store.RoleAdmin
	case known == nil && role == "":
		role = store.RoleSender
	case known != nil && role != "" && role != known.Role:
		return fmt.Errorf("%s has the role %s already; change it by POST /api/sources/%s", source, known.Role, source)
	}
	if known == nil {
		if err := st.CreateSource(ctx, byCommand, store.Source{ID: source, Role: role}); err != nil {
			return err
		}
		fmt.Fprintf(notes, "registered %s as %s; keep its key, it is not shown again\n", source, role)
		if len(sources) == 0 {
			fmt.Fprintln(notes, "from now on every request needs a key: Authorization: Bearer …")
		}
	}
	key, _, err := st.CreateKey(ctx, byCommand, source)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, key)
	return nil
}

func listKeys(ctx context.Context, st *store.Store, out io.Writer) error {
	sources, err := st.Sources(ctx)
	if err != nil {
		return err
	}
	if len(sources) == 0 {
		fmt.Fprintln(out, "no callers are registered: those on this machine need no key")
		return nil
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "source\trole\tenabled\tkey id\tcreated\trevoked")
	for _, src := range sources {
		line := fmt.Sprintf("%s\t%s\t%t", src.ID, src.Role, src.Enabled)
		if len(src.Keys) == 0 {
			fmt.Fprintln(w, line+"\t-\t-\t-")
		}
		for _, k := range src.Keys {
			revoked := "-"
			if k.Revoked != nil {
				revoked = k.Revoked.Format(time.DateTime)
			}
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", line, k.ID, k.Created.Format(time.DateTime), revoked)
		}
	}
	return w.Flush()
}
