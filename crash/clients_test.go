package crash

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// accepted is a message that a client was told of.
type accepted struct {
	id       string
	request  string
	channels []string
	cancel   bool // it was cancelled, and we were told so before anything of it was tried
}

// ledger is what clients were told. Each entry is on the disk before the client's next request.
type ledger struct {
	mu      sync.Mutex
	all     map[string]*accepted // by message id
	byKey   map[string]string    // request id → message id
	refused atomic.Int64         // for a quota, before they were accepted
}

// load runs clients until stop is closed. What they send depends on the seed alone; when, on what happens.
func (r *rig) load(clients int, seed uint64, stop <-chan struct{}) (*ledger, *sync.WaitGroup) {
	l := &ledger{all: map[string]*accepted{}, byKey: map[string]string{}}
	var wg sync.WaitGroup
	hook := r.world.webhook(r.t)
	for i := range clients {
		file, err := os.Create(filepath.Join(r.dir, fmt.Sprint("ledger", i)))
		if err != nil {
			r.t.Fatal(err)
		}
		wg.Go(func() {
			defer file.Close()
			c := &client{rig: r, ledger: l, file: file, random: rand.New(rand.NewPCG(seed, uint64(i))), hook: hook, stop: stop, name: i, http: &http.Client{Timeout: 8 * time.Second}}
			defer c.later.Wait()
			for n := 0; c.one(n); n++ {
				time.Sleep(time.Duration(c.random.IntN(30)) * time.Millisecond)
			}
		})
	}
	return l, &wg
}

type client struct {
	*rig
	ledger *ledger
	file   *os.File
	random *rand.Rand
	hook   string
	stop   <-chan struct{}
	name   int
	http   *http.Client
	later  sync.WaitGroup // cancellations under way
	fileMu sync.Mutex
}

// write puts a line on the disk.
func (c *client) write(line string) {
	c.fileMu.Lock()
	defer c.fileMu.Unlock()
	if _, err := c.file.WriteString(line + "\n"); err != nil {
		c.t.Error(err)
	}
	if err := c.file.Sync(); err != nil {
		c.t.Error(err)
	}
}

// one sends a message until it is accepted. False: it is time to stop.
func (c *client) one(n int) bool {
	request := fmt.Sprintf("%d-%d", c.name, n)
	channels, to, more, cancelAfter := []string{"webhook"}, fmt.Sprintf(`{"webhook":%q}`, c.hook), "", time.Duration(-1)
	switch c.random.IntN(10) {
	case 0, 1:
		channels, to = []string{"email"}, `{"email":"ann@example.com"}`
	case 2:
		channels, to = []string{"webhook", "email", "log"}, fmt.Sprintf(`{"webhook":%q,"email":"ann@example.com","log":"x"}`, c.hook)
	case 3, 4, 5:
		delay := 1200 + c.random.IntN(12_000)
		if left, soon := slotEnds(); soon && c.proxy.held.on.Load() {
			delay = int(left.Milliseconds()) - 100
		}
		more = fmt.Sprintf(`,"delay":"%dms"`, delay)
	case 6:
		delay := 1500 + c.random.IntN(8000)
		more, cancelAfter = fmt.Sprintf(`,"delay":"%dms"`, delay), time.Duration(c.random.IntN(delay+500))*time.Millisecond
	case 7:
		channels, to = []string{"log"}, `{"log":"x"}`
	}
	category := []string{"verification", "notification", "marketing"}[c.random.IntN(3)]
	body := fmt.Sprintf(`{"channels":["%s"],"to":%s,"subject":"hi","text":"hello","request_id":"%s","category":"%s"%s}`, strings.Join(channels, `","`), to, request, category, more)
	both := c.random.IntN(20) == 0 // the same request at the same time at both
	for {
		select {
		case <-c.stop:
			return false
		default:
		}
		target := c.nodes[c.random.IntN(len(c.nodes))]
		if both {
			go c.post(c.nodes[0].url()+"/api/messages", body)
			target = c.nodes[1]
		}
		status, answer := c.post(target.url()+"/api/messages", body)
		switch status {
		case 200, 202:
			c.told(answer["msg_id"].(string), request, channels, cancelAfter)
			return true
		case 429:
			c.ledger.refused.Add(1)
			time.Sleep(50 * time.Millisecond)
		case 0, 503:
			time.Sleep(20 * time.Millisecond)
		default:
			c.t.Errorf("%d %v", status, answer)
			return false
		}
	}
}

func (c *client) told(id, request string, channels []string, cancelAfter time.Duration) {
	c.write(fmt.Sprintf("accepted %s %s %s", id, request, strings.Join(channels, ",")))
	a := &accepted{id: id, request: request, channels: channels}
	c.ledger.mu.Lock()
	if first, ok := c.ledger.byKey[request]; ok && first != id {
		c.t.Errorf("request %s is message %s, and was %s", request, id, first)
	}
	c.ledger.all[id], c.ledger.byKey[request] = a, id
	c.ledger.mu.Unlock()
	if cancelAfter < 0 {
		return
	}
	node := c.nodes[c.random.IntN(len(c.nodes))]
	c.later.Go(func() {
		time.Sleep(cancelAfter)
		status, answer := c.post(node.url()+"/api/messages/"+id+"/cancel", "")
		if status == 200 && answer["status"] == "cancelled" {
			c.write("cancelled " + id)
			c.ledger.mu.Lock()
			a.cancel = true
			c.ledger.mu.Unlock()
		} else if status == 404 && c.proxy.held.on.Load() { // in a table that is being swapped: docs/guarantees.md says when it is not seen
		} else if status != 200 && status != 409 && status != 503 && status != 0 {
			c.t.Errorf("cancel: %d %v", status, answer)
		}
	})
}

// post returns status 0 when no answer came.
func (c *client) post(url, body string) (status int, answer map[string]any) {
	res, err := c.http.Post(url, "application/json", strings.NewReader(body))
	if err != nil {
		return 0, nil
	}
	defer res.Body.Close()
	if json.NewDecoder(res.Body).Decode(&answer) != nil {
		return 0, nil
	}
	return res.StatusCode, answer
}

// limit sets a quota, so that some messages are charged for.
func (r *rig) limit(t testing.TB) {
	t.Helper()
	res, err := http.Post(r.nodes[0].url()+"/api/quotas", "application/json", strings.NewReader(`{"channel":"log","num":40,"unit":1000}`))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusCreated && res.StatusCode != http.StatusOK {
		t.Fatal(res.Status)
	}
}
