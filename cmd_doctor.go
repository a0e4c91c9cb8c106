package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"tidings/sender"
	"tidings/store"
)

func (a *app) doctorCommand() *cobra.Command {
	return &cobra.Command{
		Use: "doctor", Short: "Tell in plain words what is wrong or risky with database, queue and providers (exit code 1: something is wrong)", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, _, err := a.config(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			return a.withStore(cmd, func(ctx context.Context, st *store.Store) error { return doctor(ctx, st, cfg, cmd.OutOrStdout()) })
		},
	}
}

const probeTime = 10 * time.Second

func doctor(ctx context.Context, st *store.Store, cfg *Config, out io.Writer) error {
	findings, err := st.Diagnose(ctx)
	if err != nil {
		return err
	}
	room, err := headroom(ctx, st, cfg)
	if err != nil {
		return err
	}
	findings = append(findings, room...)
	findings = append(findings, probeProviders(ctx, cfg)...)
	if alarm, closeAlarm, err := openAlarm(cfg); err != nil {
		findings = append(findings, store.Finding{Level: store.Wrong, What: "alarm", Detail: err.Error()})
	} else if alarm != nil {
		findings = append(findings, store.Finding{Level: store.Fine, What: "alarm", Detail: "by " + alarm.Name + "; tidings alarm test delivers one"})
		closeAlarm()
	}
	if cfg.Alarm.Provider == "" {
		findings = append(findings, store.Finding{Level: store.Risky, What: "alarm", Detail: "nobody is told of dead letters but in the log: see alarm in the configuration"})
	}
	wrong := 0
	for _, f := range findings {
		fmt.Fprintf(out, "%-6s %s: %s\n", [...]string{"ok", "risky", "WRONG"}[f.Level], f.What, f.Detail)
		if f.Level == store.Wrong {
			wrong++
		}
	}
	if wrong > 0 {
		return errors.New("something is wrong, see above")
	}
	return nil
}

// probeProviders tells which providers that a channel uses can be reached.
func probeProviders(ctx context.Context, cfg *Config) (findings []store.Finding) {
	used := map[string]bool{}
	for _, c := range cfg.Channels {
		for _, p := range c.Providers {
			used[p] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(used)) {
		findings = append(findings, probeProvider(ctx, name, cfg))
	}
	return findings
}

func probeProvider(ctx context.Context, name string, cfg *Config) store.Finding {
	what := "provider " + name
	p, err := openProvider(name, cfg)
	if err != nil {
		return store.Finding{Level: store.Wrong, What: what, Detail: err.Error()}
	}
	defer p.Close()
	prober, ok := p.(sender.Prober)
	if !ok {
		return store.Finding{Level: store.Fine, What: what, Detail: "nothing to reach before there is a message"}
	}
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	if err := prober.Probe(ctx); err != nil {
		return store.Finding{Level: store.Wrong, What: what, Detail: err.Error()}
	}
	return store.Finding{Level: store.Fine, What: what, Detail: "reachable"}
}
