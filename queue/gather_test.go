package queue_test

import (
	"fmt"
	"strings"
	"testing"

	dto "github.com/prometheus/client_model/go"

	"tidings/internal/metrics"
)

func families(t testing.TB, m *metrics.Metrics) []*dto.MetricFamily {
	t.Helper()
	found, err := m.Gatherer().Gather()
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// gather reads all figures by name and labels; of histograms, how many were observed.
func gather(t testing.TB, m *metrics.Metrics) map[string]float64 {
	t.Helper()
	got := map[string]float64{}
	for _, f := range families(t, m) {
		for _, x := range f.GetMetric() {
			var labels []string
			for _, l := range x.GetLabel() {
				value := l.GetValue()
				if l.GetName() == "goversion" {
					value = "*"
				}
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), value))
			}
			value := x.GetCounter().GetValue() + x.GetGauge().GetValue() + float64(x.GetHistogram().GetSampleCount())
			got[f.GetName()+"{"+strings.Join(labels, ",")+"}"] = value
		}
	}
	return got
}
