package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/mail"
	"os"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"tidings/internal/admit"
	"tidings/internal/catalog"
	"tidings/internal/explain"
	"tidings/internal/metrics"
	"tidings/internal/msg"
	"tidings/internal/policy"
	"tidings/internal/retention"
	"tidings/internal/submit"
	"tidings/queue"
	"tidings/sender"
	"tidings/server"
	"tidings/store"
)

func (a *app) serveCommand() *cobra.Command {
	return &cobra.Command{
		Use: "serve", Short: "Run the message centre (what tidings does without a command)", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, log, err := a.config(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			return serve(cmd.Context(), cfg, log)
		},
	}
}

// intakeGrace is what requests that are being answered get when the server stops.
const intakeGrace = 10 * time.Second

// serve wires the program up and runs it until ctx ends. What is set up first is torn down last, so that it stops in the
// direction in which messages flow: intake, claims, sends, settling, database.
func serve(ctx context.Context, cfg *Config, log *slog.Logger) error {
	log.Info("tidings starts", "version", fullVersion())
	listener, err := net.Listen("tcp", cfg.Listen) // first: a port that is taken should not cost a migration
	if err != nil {
		return fmt.Errorf("%w; --listen or TIDINGS_LISTEN names another address", err)
	}
	defer listener.Close()
	defer log.Info("stopped")
	dsn, stopDatabase, err := database(ctx, cfg, log)
	if err != nil {
		return err
	}
	defer stopDatabase()
	if _, err := store.Migrate(ctx, store.Config{DSN: dsn, MigratorDSN: cfg.MySQL.MigratorDSN, Log: log}); err != nil {
		return err
	}
	channels, closeProviders, err := openChannels(cfg, log)
	if err != nil {
		return err
	}
	defer closeProviders()
	for _, c := range channels {
		var names []string
		for _, p := range c.Providers {
			names = append(names, p.Name)
		}
		log.Info("channel", "channel", c.Channel, "providers", names)
	}
	var engine *queue.Engine
	counters := metrics.New(fullVersion(), commit)
	st, err := store.Open(ctx, store.Config{
		DSN: dsn, MigratorDSN: cfg.MySQL.MigratorDSN, Connections: cfg.MySQL.Connections, Lease: cfg.Queue.Lease, IdempotencyTTL: cfg.Idempotency.TTL,
		Delay:   store.DelayConfig{Slot: cfg.Delay.Slot, Slots: cfg.Delay.Slots, Shards: cfg.Delay.Shards, Lead: cfg.Delay.Lead},
		Version: version, Log: log, Metrics: counters, Wake: func(l msg.Lane, c msg.Channel, due time.Time) { engine.Wake(l, c, due) },
		Reserve: func(l msg.Lane, c msg.Channel, n int) store.Reservation { return engine.Reserve(l, c, n) },
	})
	if err != nil {
		return err
	}
	defer func() {
		if err := st.Close(); err != nil {
			log.Warn("the store did not close in order", "err", err)
		}
	}()
	if _, registered, err := st.Caller(ctx, ""); !registered && err == nil && !onLoopback(cfg.Listen) {
		return fmt.Errorf("listen %q lets others in, and no callers are registered: make a key first (tidings key create <source>), or listen on 127.0.0.1", cfg.Listen)
	}
	policies, err := cfg.policies()
	if err != nil {
		return err
	}
	templates := catalog.New(st)
	alarm, closeAlarm, err := openAlarm(cfg)
	if err != nil {
		return err
	}
	defer closeAlarm()
	if alarm == nil {
		log.Info("nobody is told of dead letters but in this log: see alarm in the configuration")
	}
	engine, err = queue.New(queue.Config{
		Store: st, Channels: channels, Policies: policies, Templates: templates, SendTimeout: cfg.Queue.SendTimeout, SettleBudget: cfg.Queue.SettleBudget, Log: log,
		Retries: cfg.Retry.MaxPerSecond, DegradeAfter: cfg.DegradeAfter, Alarm: alarm, Metrics: counters,
	})
	if err != nil {
		return err
	}
	engine.Start()
	defer func() {
		stop, cancel := context.WithTimeout(context.Background(), cfg.Shutdown.Grace)
		defer cancel()
		engine.Stop(stop)
	}()
	limits, err := frequencies(cfg)
	if err != nil {
		return err
	}
	admitter := &admit.Admitter{
		Policies: policies, Configured: configured(channels), Receiver: receivers(channels), Now: st.Now, Templates: templates.Usable,
		Frequency: limits.limits, Region: cfg.Phone.Region,
	}
	stopUpkeep, err := startUpkeep(ctx, cfg, st, admitter, counters, log)
	if err != nil {
		return err
	}
	defer stopUpkeep()
	api := server.New(server.Config{
		Store: st, Version: version, Log: log, Review: cfg.Templates.Review, Health: func() any { return engine.Health() },
		Provider: func(name string) bool { _, ok := cfg.Providers[name]; return ok }, Explain: explainer(cfg, st, policies, templates), Metrics: counters,
		Admit: admitter,
	})
	return listen(ctx, api, listener, log)
}

// startUpkeep takes requests by SQL and lets go of what is too old, until ctx ends or stop is called.
func startUpkeep(ctx context.Context, cfg *Config, st *store.Store, admitter *admit.Admitter, counters *metrics.Metrics, log *slog.Logger) (stop func(), err error) {
	ages, err := cfg.ages()
	if err != nil {
		return nil, err
	}
	if cfg.ArchiveDir != "" { // it has addresses and content: nobody else's
		if err := os.MkdirAll(cfg.ArchiveDir, 0o700); err != nil {
			return nil, fmt.Errorf("archive_dir: %w", err)
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	intake := &submit.Intake{Store: st, Admit: admitter, Log: log, Metrics: counters}
	keeper := &retention.Keeper{Store: st, Log: log, Ages: ages, ArchiveDir: cfg.ArchiveDir}
	running.Go(func() { intake.Run(ctx) })
	running.Go(func() { keeper.Run(ctx) })
	return func() { cancel(); running.Wait() }, nil
}

// listen answers requests until ctx ends, and then those that have begun.
func listen(ctx context.Context, api *server.Server, listener net.Listener, log *slog.Logger) error {
	httpServer := api.Listener()
	failed := make(chan error, 1)
	go func() { failed <- httpServer.Serve(listener) }()
	log.Info("ready", "api", "http://"+listener.Addr().String()+"/api/messages", "description", "http://"+listener.Addr().String()+"/openapi.json")
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
	}
	log.Info("stopping: intake first, then sends, then the database")
	stop, cancel := context.WithTimeout(context.Background(), intakeGrace)
	defer cancel()
	if err := httpServer.Shutdown(stop); err != nil {
		log.Warn("requests were cut off", "err", err)
		httpServer.Close()
	}
	if err := <-failed; !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// openChannels makes all providers, so that a fault in one shows at the start, and the channels that they serve.
func openChannels(cfg *Config, log *slog.Logger) (channels []queue.Channel, closeAll func(), err error) {
	open := map[string]sender.Provider{}
	closeAll = func() {
		for name, p := range open {
			if err := p.Close(); err != nil {
				log.Warn("the provider did not close in order", "provider", name, "err", err)
			}
		}
	}
	for name := range cfg.Providers {
		if open[name], err = openProvider(name, cfg); err != nil {
			delete(open, name)
			closeAll()
			return nil, nil, err
		}
	}
	for _, c := range msg.Channels {
		settings := cfg.Channels[c.String()]
		if len(settings.Providers) == 0 {
			continue
		}
		channel := queue.Channel{Channel: c, Slots: settings.Slots}
		for _, name := range settings.Providers {
			limits, _, _ := providerLimits(cfg.Providers[name]) // checked with the configuration
			channel.Providers = append(channel.Providers, queue.Provider{Name: name, Provider: open[name], Limits: limits})
		}
		channels = append(channels, channel)
	}
	return channels, closeAll, nil
}

func openProvider(name string, cfg *Config) (sender.Provider, error) {
	_, settings, _ := providerLimits(cfg.Providers[name])
	kind, _ := cfg.Providers[name]["type"].(string)
	p, err := sender.Open(kind, sender.Env{Name: name, DataDir: cfg.DataDir}, settings)
	if err != nil {
		return nil, fmt.Errorf("providers.%s: %w", name, err)
	}
	return p, nil
}

// openAlarm makes the provider that tells people of dead letters; nil: none is configured.
func openAlarm(cfg *Config) (*queue.Alarm, func(), error) {
	name := cfg.Alarm.Provider
	if name == "" {
		return nil, func() {}, nil
	}
	p, err := openProvider(name, cfg)
	if err != nil {
		return nil, nil, err
	}
	kind, _ := cfg.Providers[name]["type"].(string)
	limits, _, _ := providerLimits(cfg.Providers[name]) // checked with the configuration
	digest, _ := digestAt(cfg.Alarm.DigestAt)           // the same
	a := &queue.Alarm{
		Name: name, Provider: p, Channel: sender.ChannelOf(kind), Receiver: cfg.Alarm.Receiver, Every: cfg.Alarm.Every, DigestAt: digest, Timeout: limits.Timeout,
	}
	if a.Receiver, err = checkAlarmReceiver(p, a); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("alarm.receiver %w", err), p.Close())
	}
	return a, func() { p.Close() }, nil
}

// checkAlarmReceiver gives the form in which the provider takes the receiver.
func checkAlarmReceiver(p sender.Provider, a *queue.Alarm) (string, error) {
	if checker, ok := p.(sender.ReceiverChecker); ok {
		return checker.CheckReceiver(a.Receiver)
	}
	if a.Channel == msg.Email {
		if _, err := mail.ParseAddress(a.Receiver); err != nil {
			return "", errors.New("is no e-mail address")
		}
	}
	return a.Receiver, nil
}

// explainer knows the channels' providers as they are configured.
func explainer(cfg *Config, st *store.Store, policies *policy.Set, templates *catalog.Catalog) *explain.Explainer {
	return &explain.Explainer{
		Store: st, DegradeAfter: cfg.DegradeAfter,
		Policy: func(ctx context.Context, t *store.Task) policy.Policy { return templates.Policy(ctx, policies, t) },
		Chain: func(c msg.Channel) (chain []explain.Provider) {
			for _, name := range cfg.Channels[c.String()].Providers {
				limits, _, _ := providerLimits(cfg.Providers[name])
				chain = append(chain, explain.Provider{Name: name, Rate: limits.Rate, BreakerOpen: cmp.Or(limits.BreakerOpen, queue.DefaultBreakerOpen)})
			}
			return chain
		},
	}
}

// receivers asks the providers that know their receivers.
func receivers(channels []queue.Channel) func(msg.Channel, string) (string, error) {
	checkers := map[msg.Channel][]sender.ReceiverChecker{}
	for _, c := range channels {
		for _, p := range c.Providers {
			if checker, ok := p.Provider.(sender.ReceiverChecker); ok {
				checkers[c.Channel] = append(checkers[c.Channel], checker)
			}
		}
	}
	return func(c msg.Channel, receiver string) (_ string, err error) {
		for _, checker := range checkers[c] { // each of the chain must be able to serve it
			if receiver, err = checker.CheckReceiver(receiver); err != nil {
				return "", err
			}
		}
		return receiver, nil
	}
}

func configured(channels []queue.Channel) func(msg.Channel) bool {
	has := map[msg.Channel]bool{}
	for _, c := range channels {
		has[c.Channel] = true
	}
	return func(c msg.Channel) bool { return has[c] }
}
