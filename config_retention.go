package main

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"tidings/internal/retention"
)

// forever is the age of what is never dropped.
const forever = "forever"

// leastAge keeps a slip (90 for 90d would be no duration; 90m is one) from emptying the history.
const leastAge = time.Hour

// ages reads how long things are kept.
func (c *Config) ages() (ages retention.Ages, err error) {
	for _, a := range []struct {
		key, text string
		into      *time.Duration
	}{
		{"record", c.Retention.Record, &ages.Record},
		{"attempt", c.Retention.Attempt, &ages.Attempt},
		{"submit", c.Retention.Submit, &ages.Submit},
		{"stat", c.Retention.Stat, &ages.Stat},
	} {
		age, bad := parseAge(a.text)
		if bad != nil {
			err = errors.Join(err, fmt.Errorf("retention.%s must be an age of at least %v such as 90d or 36h, or %s", a.key, leastAge, forever))
		}
		*a.into = age
	}
	return ages, err
}

// parseAge reads a duration that may be in days; 0: forever.
func parseAge(text string) (age time.Duration, err error) {
	if text == forever {
		return 0, nil
	}
	if number, ok := strings.CutSuffix(text, "d"); ok {
		days, err := strconv.Atoi(number)
		if err != nil || days < 1 || days > 36500 {
			return 0, errors.New("no number of days")
		}
		return time.Duration(days) * 24 * time.Hour, nil
	}
	if age, err = time.ParseDuration(text); err == nil && age < leastAge {
		err = errors.New("too short")
	}
	return age, err
}
