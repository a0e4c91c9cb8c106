package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"testing"
)

// A small form of what `tidings bench` measures: every message is sent and recorded once, and every figure is there.
func TestScenarios(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	names := []string{"post-1", "post-64", "post-64-quota", "bulk", "claimed", "handed-off", "burn-down", "latency", "snapshot-handed-off", "limits"}
	err := Run(context.Background(), Options{
		Scenarios: names, Messages: 1000, Payload: 50, JSON: true, Out: &out, Progress: io.Discard, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	var got report
	if err := json.Unmarshal(out.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	seen := map[string]Result{}
	for _, r := range got.Results {
		seen[r.Scenario] = r
		if r.PerSecond <= 0 || r.Seconds <= 0 {
			t.Errorf("%+v", r)
		}
	}
	for _, name := range []string{"post-1", "claimed", "latency-75", "snapshot-handed-off", "limits-fsync", "limits-insert-delete"} {
		if _, ok := seen[name]; !ok {
			t.Errorf("no result for %s", name)
		}
	}
	// A message costs at least its insert, its record, and one delete: the counters must be this run's.
	if c := seen["claimed"].Cost; c == nil || c.Inserted < 2 || c.Inserted > 4 || c.Updated < 0.5 || c.Deleted < 1 || c.RoundTrips <= 0 {
		t.Errorf("claimed: %+v", c)
	}
}
