package main

import (
	"slices"
	"testing"
	"time"

	"tidings/internal/msg"
	"tidings/internal/window"
)

func TestFrequencies(t *testing.T) {
	t.Parallel()
	cfg := Config{
		Frequency:        map[string]map[string]string{"verification": {"all": "1/1m"}, "marketing": {"all": "5/24h", "sms": "3/24h, 1/1h", "log": ""}},
		FrequencySources: map[string]map[string]map[string]string{"shop": {"marketing": {"all": "10/24h"}}},
	}
	table, err := frequencies(&cfg)
	if err != nil {
		t.Fatal(err)
	}
	day := func(n int) []window.Limit { return []window.Limit{{Num: n, Unit: 24 * time.Hour}} }
	for _, tt := range []struct {
		source   string
		category msg.Category
		channel  msg.Channel
		want     []window.Limit
	}{
		{"bank", msg.Verification, msg.SMS, []window.Limit{{Num: 1, Unit: time.Minute}}},
		{"bank", msg.Marketing, msg.Email, day(5)},
		{"bank", msg.Marketing, msg.SMS, []window.Limit{{Num: 3, Unit: 24 * time.Hour}, {Num: 1, Unit: time.Hour}}},
		{"bank", msg.Marketing, msg.Log, nil},
		{"bank", msg.Notification, msg.SMS, nil},
		{"Shop", msg.Marketing, msg.SMS, day(10)},
		{"shop", msg.Verification, msg.Email, []window.Limit{{Num: 1, Unit: time.Minute}}},
	} {
		if got := table.limits(tt.source, tt.category, tt.channel); !slices.Equal(got, tt.want) {
			t.Errorf("%+v: %v", tt, got)
		}
	}
	for _, bad := range []string{"5", "5/", "x/1m", "0/1m", "5/1", "-1/1m", "5/1m/1h", "5 per day", "1/60s, 5/1m"} {
		if _, err := parseLimits(bad); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
	if _, err := frequencies(&Config{Frequency: map[string]map[string]string{"spam": {"all": "1/1m"}, "marketing": {"fax": "1/1m"}}}); err == nil {
		t.Error("an unknown category and channel are taken")
	}
}
