package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// manCommand writes the manual, which is the commands' own help. (The completion command is cobra's.)
func manCommand() *cobra.Command {
	var dir string
	cmd := &cobra.Command{
		Use: "man", Short: "Write manual pages, one a command", Args: cobra.NoArgs,
		Example: "  tidings man --dir /usr/local/share/man/man1 && man tidings",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := os.MkdirAll(dir, 0o755); err != nil {
				return err
			}
			root := cmd.Root()
			root.DisableAutoGenTag = true
			if err := doc.GenManTree(root, &doc.GenManHeader{Section: "1", Source: "Tidings " + version}, dir); err != nil {
				return err
			}
			fmt.Fprintln(cmd.ErrOrStderr(), "wrote the pages to", dir)
			return nil
		},
	}
	cmd.Flags().StringVar(&dir, "dir", "", "directory to write to")
	if err := cmd.MarkFlagRequired("dir"); err != nil {
		panic(err) // the flag was made one line above
	}
	return cmd
}
