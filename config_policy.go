package main

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/go-viper/mapstructure/v2"

	"tidings/internal/msg"
	"tidings/internal/policy"
	"tidings/queue"
)

// policies are the categories' policies as configured. The error names every faulty key.
func (c *Config) policies() (*policy.Set, error) {
	set := policy.Defaults()
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(c.Policies)) {
		category, err := msg.ParseCategory(name)
		if err != nil {
			errs = append(errs, fmt.Errorf("policies.%s is no category: there are verification, notification and marketing", name))
			continue
		}
		p, faults := set[category].With(c.Policies[name])
		for _, f := range faults {
			errs = append(errs, fmt.Errorf("policies.%s.%w", name, f))
		}
		set[category] = p
	}
	return set, errors.Join(errs...)
}

// providerLimits reads what all types of providers have in common, and returns the type's own settings without it.
func providerLimits(settings map[string]any) (limits queue.Limits, own map[string]any, err error) {
	common, own := map[string]any{}, map[string]any{}
	for key, value := range settings {
		if slices.Contains(limitKeys, key) {
			common[key] = value
		} else if key != "type" {
			own[key] = value
		}
	}
	decoder, err := mapstructure.NewDecoder(&mapstructure.DecoderConfig{
		Result: &limits, ErrorUnused: true, WeaklyTypedInput: true, DecodeHook: mapstructure.StringToTimeDurationHookFunc(),
	})
	if err == nil {
		err = decoder.Decode(common)
	}
	for key, value := range map[string]float64{
		"rate": limits.Rate, "burst": float64(limits.Burst), "concurrency": float64(limits.Concurrency),
		"timeout": float64(limits.Timeout), "slow": float64(limits.Slow), "breaker_open": float64(limits.BreakerOpen),
	} {
		if value < 0 {
			err = errors.Join(err, fmt.Errorf("%s must not be negative", key))
		}
	}
	if math.IsNaN(limits.Rate) || math.IsInf(limits.Rate, 0) {
		err = errors.Join(err, errors.New("rate must be a number"))
	}
	for key, value := range map[string]time.Duration{"timeout": limits.Timeout, "slow": limits.Slow, "breaker_open": limits.BreakerOpen} {
		if value > 0 && value < time.Millisecond {
			err = errors.Join(err, fmt.Errorf("%s must be a duration with a unit, such as 500ms or 10s", key))
		}
	}
	return limits, own, err
}

// limitKeys are the settings that every type of provider has.
var limitKeys = []string{"rate", "burst", "concurrency", "timeout", "slow", "breaker_open"}
