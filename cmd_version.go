package main

import (
	"fmt"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// Set by the linker, see the Makefile.
var (
	version = "dev"
	commit  = ""
)

// fullVersion is the version with the commit that the binary was built from.
func fullVersion() string {
	c := commit
	if info, ok := debug.ReadBuildInfo(); ok && c == "" {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" && len(s.Value) >= 12 {
				c = s.Value[:12]
			}
		}
	}
	if c == "" {
		return version
	}
	return fmt.Sprintf("%s (%s)", version, c)
}

func versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version", Args: cobra.NoArgs,
		Run: func(cmd *cobra.Command, _ []string) { fmt.Fprintln(cmd.OutOrStdout(), "tidings", fullVersion()) },
	}
}
