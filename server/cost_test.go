package server_test

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/go-chi/chi/v5"

	"tidings/internal/admit"
	"tidings/internal/msg"
	"tidings/internal/policy"
	"tidings/internal/testdb"
	"tidings/server"
	"tidings/store"
)

const sample = `{"channels":["log"],"to":"+8613800000000","subject":"Your order","text":"Your order 20261130-000042 has left our warehouse and will arrive tomorrow between 9 and 12."}`

// bare is the route as chi and encoding/json alone would have it: what the description, strict decoding and one form of
// error cost is the difference.
func bare(s *store.Store, a *admit.Admitter) http.Handler {
	router := chi.NewMux()
	router.Post("/api/messages", func(w http.ResponseWriter, r *http.Request) {
		var in admit.Request
		decoder := json.NewDecoder(io.LimitReader(r.Body, 1<<20))
		decoder.DisallowUnknownFields()
		if err := decoder.Decode(&in); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		checked, err := a.Check(r.Context(), server.DefaultSource, &in)
		if err != nil || len(checked.Problems) > 0 {
			w.WriteHeader(http.StatusUnprocessableEntity)
			json.NewEncoder(w).Encode(checked.Problems)
			return
		}
		accepted, err := s.Enqueue(r.Context(), checked.Message)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		out := server.Sent{MsgID: strconv.FormatUint(accepted.MsgID, 10), Status: "dispatched", Tasks: []server.SentTask{{Channel: "log", Status: "ready"}}}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusAccepted)
		json.NewEncoder(w).Encode(out)
	})
	return router
}

// BenchmarkPost compares the route with a bare one, from 64 connections, each message committed.
func BenchmarkPost(b *testing.B) {
	for _, kind := range []string{"bare", "huma"} {
		b.Run(kind, func(b *testing.B) {
			s := testdb.Open(b, store.Config{})
			a := &admit.Admitter{Policies: policy.Defaults(), Now: s.Now, Configured: func(c msg.Channel) bool { return c == msg.Log }}
			handler := bare(s, a)
			if kind == "huma" {
				handler = server.New(server.Config{Store: s, Admit: a})
			}
			ts := httptest.NewServer(handler)
			defer ts.Close()
			client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}
			defer client.CloseIdleConnections()
			b.SetParallelism(32)
			b.ResetTimer()
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					res, err := client.Post(ts.URL+"/api/messages", "application/json", strings.NewReader(sample))
					if err != nil {
						b.Error(err)
						return
					}
					io.Copy(io.Discard, res.Body)
					res.Body.Close()
					if res.StatusCode != http.StatusAccepted {
						b.Errorf("status %d", res.StatusCode)
						return
					}
				}
			})
		})
	}
}

// BenchmarkDecode is the handler alone: a request that is refused for its channel passes everything but the store.
func BenchmarkDecode(b *testing.B) {
	a := &admit.Admitter{Policies: policy.Defaults(), Now: time.Now, Configured: func(msg.Channel) bool { return false }}
	for kind, handler := range map[string]http.Handler{"bare": bare(nil, a), "huma": server.New(server.Config{Admit: a})} {
		b.Run(kind, func(b *testing.B) {
			b.ReportAllocs()
			for range b.N {
				req := httptest.NewRequest("POST", "/api/messages", strings.NewReader(sample))
				req.Host = "localhost"
				req.Header.Set("Content-Type", "application/json")
				handler.ServeHTTP(httptest.NewRecorder(), req)
			}
		})
	}
}
