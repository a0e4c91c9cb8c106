package crash

import (
	"bytes"
	"io"
	"math/rand/v2"
	"net"
	"regexp"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// proxy stands between the nodes and the database. It can stand still, and cut a connection after a COMMIT has gone to the server and
// before its answer has come back.
type proxy struct {
	net.Listener
	target string // the server's socket
	still  atomic.Pointer[chan struct{}]
	cut    atomic.Int64 // in 100 commits
	cuts   atomic.Int64 // so far
	late   atomic.Bool  // scheduled messages reach their tables seconds after they were sent, and swaps of tables, too
	held   holds        // scheduled messages that wait for the swap of their table
	mu     sync.Mutex
	open   map[net.Conn]bool
	done   sync.WaitGroup
}

// holds keeps statements that insert into delay tables at the end of a slot until the table is about to be swapped: they come after the
// look that found it drained. Longer than their callers wait they are not kept.
type holds struct {
	on      atomic.Bool
	mu      sync.Mutex
	waiting map[string][]func() // by table: lets one pass
	passed  atomic.Int64        // that came just before a swap
}

// slotEnds tells how soon the slot of now is over, as long as what is scheduled for its last moment is put into its table still, and a
// caller waits until the table is swapped.
func slotEnds() (left time.Duration, soon bool) {
	left = slot - time.Duration(time.Now().UnixNano())%slot
	return left, left > lead+200*time.Millisecond && left < lead+900*time.Millisecond
}

const callersWait = 4600 * time.Millisecond

var (
	delayInsert = regexp.MustCompile(`INTO (t_msg_delay_\d+_\d+) `)
	delaySwap   = regexp.MustCompile(`tidings:delay-swap \*/ TABLE (t_msg_delay_\d+_\d+) TO`)
)

func (h *holds) insert(tables [][][]byte) {
	c := make(chan struct{})
	pass := sync.OnceFunc(func() { close(c) })
	h.mu.Lock()
	if h.waiting == nil {
		h.waiting = map[string][]func(){}
	}
	for _, table := range tables {
		h.waiting[string(table[1])] = append(h.waiting[string(table[1])], pass)
	}
	h.mu.Unlock()
	select {
	case <-c:
		h.passed.Add(1)
	case <-time.After(callersWait):
	}
}

func (h *holds) swap(table string) {
	h.mu.Lock()
	waiting := h.waiting[table]
	delete(h.waiting, table)
	h.mu.Unlock()
	for _, pass := range waiting {
		pass()
	}
	if len(waiting) > 0 {
		time.Sleep(300 * time.Millisecond) // until they are committed
	}
}

func newProxy(t testing.TB, target string) *proxy {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{Listener: l, target: target, open: map[net.Conn]bool{}}
	p.done.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			p.done.Go(func() { p.serve(client) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		p.release()
		p.mu.Lock()
		for c := range p.open {
			c.Close()
		}
		p.mu.Unlock()
		p.done.Wait()
	})
	return p
}

// stall makes a black hole of the proxy: nothing passes until release.
func (p *proxy) stall() {
	c := make(chan struct{})
	p.still.Store(&c)
}

func (p *proxy) release() {
	if c := p.still.Swap(nil); c != nil {
		close(*c)
	}
}

func (p *proxy) wait() {
	if c := p.still.Load(); c != nil {
		<-*c
	}
}

func (p *proxy) keep(c net.Conn) func() {
	p.mu.Lock()
	p.open[c] = true
	p.mu.Unlock()
	return func() {
		c.Close()
		p.mu.Lock()
		delete(p.open, c)
		p.mu.Unlock()
	}
}

func (p *proxy) serve(client net.Conn) {
	defer p.keep(client)()
	server, err := net.Dial("unix", p.target)
	if err != nil {
		return
	}
	defer p.keep(server)()
	var cutNext atomic.Bool // the next answer does not reach the client
	p.done.Go(func() {
		p.copy(server, client, func(b []byte) bool {
			if bytes.Contains(b, []byte("COMMIT")) && rand.Int64N(100) < p.cut.Load() {
				cutNext.Store(true)
			}
			if p.held.on.Load() {
				if m := delaySwap.FindSubmatch(b); m != nil {
					p.held.swap(string(m[1]))
				} else if _, soon := slotEnds(); soon {
					if tables := delayInsert.FindAllSubmatch(b, -1); tables != nil {
						p.held.insert(tables)
					}
				}
			}
			switch {
			case !p.late.Load():
			case bytes.Contains(b, []byte("tidings:delay-swap")):
				time.Sleep(2*time.Second + rand.N(2*time.Second))
			case bytes.Contains(b, []byte("tidings:delay-survey")): // who looks finds what has come meanwhile
				time.Sleep(rand.N(1500 * time.Millisecond))
			case bytes.Contains(b, []byte("INTO t_msg_delay_")) && rand.IntN(3) == 0:
				time.Sleep(5*time.Second + rand.N(4*time.Second)) // longer than its caller waits
			}
			return true
		})
		server.Close()
	})
	p.copy(client, server, func([]byte) bool {
		if cutNext.Load() {
			p.cuts.Add(1)
			return false
		}
		return true
	})
}

// copy passes bytes on as long as pass says so.
func (p *proxy) copy(to io.Writer, from io.Reader, pass func([]byte) bool) {
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		if n > 0 {
			p.wait()
			if !pass(buffer[:n]) {
				return
			}
			if _, err := to.Write(buffer[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}
