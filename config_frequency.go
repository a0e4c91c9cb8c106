package main

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"tidings/internal/msg"
	"tidings/internal/window"
)

// frequencyTable says how often recipients may hear of a source.
type frequencyTable struct {
	general map[frequencyKey][]window.Limit
	sources map[string]map[frequencyKey][]window.Limit // by lower-case id: viper keeps keys in lower case
}

// frequencyKey is a category and a channel; channel 0 stands for each channel that is not named.
type frequencyKey struct {
	category msg.Category
	channel  msg.Channel
}

// limits finds what holds for a message: the source's own limits for the category and channel before the general ones, a named
// channel before all.
func (t *frequencyTable) limits(source string, category msg.Category, channel msg.Channel) []window.Limit {
	for _, table := range []map[frequencyKey][]window.Limit{t.sources[strings.ToLower(source)], t.general} {
		for _, k := range []frequencyKey{{category, channel}, {category, 0}} {
			if limits, ok := table[k]; ok {
				return limits
			}
		}
	}
	return nil
}

// frequencies reads the limits of the configuration.
func frequencies(c *Config) (*frequencyTable, error) {
	t := &frequencyTable{sources: map[string]map[frequencyKey][]window.Limit{}}
	var errs []error
	var err error
	if t.general, err = frequencySection("frequency", c.Frequency); err != nil {
		errs = append(errs, err)
	}
	for source, section := range c.FrequencySources {
		if t.sources[strings.ToLower(source)], err = frequencySection("frequency_sources."+source, section); err != nil {
			errs = append(errs, err)
		}
	}
	return t, errors.Join(errs...)
}

func frequencySection(name string, section map[string]map[string]string) (map[frequencyKey][]window.Limit, error) {
	table := map[frequencyKey][]window.Limit{}
	var errs []error
	for categoryName, channels := range section {
		category, err := msg.ParseCategory(categoryName)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s.%s is no category: verification, notification or marketing", name, categoryName))
			continue
		}
		for channelName, text := range channels {
			channel := msg.Channel(0)
			if channelName != "all" {
				if channel, err = msg.ParseChannel(channelName); err != nil {
					errs = append(errs, fmt.Errorf("%s.%s.%s is no channel, nor all", name, categoryName, channelName))
					continue
				}
			}
			if table[frequencyKey{category, channel}], err = parseLimits(text); err != nil {
				errs = append(errs, fmt.Errorf("%s.%s.%s %w", name, categoryName, channelName, err))
			}
		}
	}
	return table, errors.Join(errs...)
}

// parseLimits reads "5/24h, 1/1m". Nothing is no limit.
func parseLimits(text string) (limits []window.Limit, err error) {
	for part := range strings.SplitSeq(text, ",") {
		if part = strings.TrimSpace(part); part == "" {
			continue
		}
		number, span, _ := strings.Cut(part, "/")
		num, err := strconv.Atoi(strings.TrimSpace(number))
		unit, spanErr := time.ParseDuration(strings.TrimSpace(span))
		if err != nil || spanErr != nil || num < 1 || num > 1_000_000 || unit < time.Millisecond || unit > 366*24*time.Hour {
			return nil, fmt.Errorf("must be limits such as 5/24h, separated by commas, or empty for none")
		}
		if slices.ContainsFunc(limits, func(l window.Limit) bool { return l.Unit.Milliseconds() == unit.Milliseconds() }) {
			return nil, fmt.Errorf("has two limits for the same span")
		}
		limits = append(limits, window.Limit{Num: num, Unit: unit})
	}
	return limits, nil
}
