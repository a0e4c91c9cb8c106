package crash

import (
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
)

func number(t testing.TB, name string, fallback int) int {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return fallback
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return n
}

// One round is one fault. Without CRASH_FAULTS they come in turn, so that each comes once; with it they are drawn from those named.
func TestCrash(t *testing.T) {
	seed := uint64(number(t, "CRASH_SEED", int(time.Now().UnixNano()&(1<<40-1))))
	t.Logf("CRASH_SEED=%d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	rounds := number(t, "CRASH_ROUNDS", len(allFaults))
	var named []string
	if text := os.Getenv("CRASH_FAULTS"); text != "" {
		named = strings.Split(text, ",")
	}
	r := newRig(t, random, "")
	r.limit(t)
	stop := make(chan struct{})
	l, clients := r.load(number(t, "CRASH_CLIENTS", 8), seed, stop)
	w := r.watch()
	for i := range rounds {
		r.sleep(300*time.Millisecond, 1500*time.Millisecond)
		name := allFaults[i%len(allFaults)]
		if named != nil {
			name = named[random.IntN(len(named))]
		}
		if faults[name] == nil {
			t.Fatalf("there is no fault %q", name)
		}
		r.hit(name)
		if t.Failed() {
			t.Logf("after round %d: %s", i+1, name)
			break
		}
	}
	time.Sleep(time.Second)
	close(stop)
	clients.Wait()
	v := r.judge(l)
	w.end()
	v.looks, v.illegal = w.looks, w.illegal
	counts := map[string]int{}
	for _, s := range r.faults {
		counts[s.what]++
	}
	t.Logf("%d faults: %v; %d commits cut off, %d inserts just before a swap", len(r.faults), counts, r.proxy.cuts.Load(), r.proxy.held.passed.Load())
	t.Logf("%v", v)
	if v.bad() {
		t.Error("what was promised was not kept")
	}
	if got := r.written(); got < v.accepted {
		t.Errorf("the ledgers have %d, the clients %d", got, v.accepted)
	}
	if v.accepted < 20*len(r.faults) {
		t.Errorf("only %d messages were accepted: the test shows little", v.accepted)
	}
}
