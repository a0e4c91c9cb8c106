package crash

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"testing"
	"time"
)

// A thousand connections that send a byte now and then, half of them in the headers, half in a body, do not keep others from being
// answered; and they are cut off.
func TestSlowloris(t *testing.T) {
	r := newRig(t, rand.New(rand.NewPCG(1, 1)), "")
	address := r.nodes[0].address
	const n = 1000
	conns := make([]net.Conn, n)
	for i := range conns {
		c, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		begin := "GET /api/messages HTTP/1.1\r\nHost: localhost\r\nX-"
		if i%2 == 1 {
			begin = "POST /api/messages HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n{"
		}
		if _, err := io.WriteString(c, begin); err != nil {
			t.Fatal(err)
		}
		conns[i] = c
	}
	ask := func(method, path, body string) time.Duration {
		t.Helper()
		began := time.Now()
		client := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}} // each in a connection of its own
		req, err := http.NewRequest(method, r.nodes[0].url()+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		res, err := client.Do(req)
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		defer res.Body.Close()
		if res.StatusCode != http.StatusOK {
			t.Errorf("%s: %s", path, res.Status)
		}
		return time.Since(began)
	}
	var took []time.Duration
	for i := range 100 {
		for _, c := range conns[i*10 : i*10+10] {
			fmt.Fprint(c, "x")
		}
		took = append(took, ask("GET", "/livez", ""))
	}
	slices.Sort(took)
	t.Logf("/livez beside %d slow connections: p50 %v, p90 %v, slowest %v", n, took[50], took[90], took[99])
	if took[90] > 200*time.Millisecond {
		t.Errorf("/livez takes %v", took[90])
	}
	ask("GET", "/readyz", "")
	// Headers that do not end are cut off after ten seconds, bodies after thirty.
	open := 0
	for i, c := range conns {
		c.SetReadDeadline(time.Now().Add(map[bool]time.Duration{true: 20 * time.Second, false: 45 * time.Second}[i%2 == 0]))
		if _, err := io.Copy(io.Discard, c); err != nil {
			if timeout, ok := err.(net.Error); ok && timeout.Timeout() {
				open++
			}
		}
		if open > 0 {
			break
		}
	}
	if open > 0 {
		t.Error("slow connections are not cut off")
	}
}
