package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"time"

	"tidings/internal/msg"
	"tidings/store"
)

// postQuota is post with limits that are counted and never reached.
func (r *rig) postQuota(ctx context.Context, n int) (Result, error) {
	for _, source := range []string{"default", ""} {
		if err := r.store.CreateQuota(ctx, "bench", &store.Quota{SourceID: source, Channel: msg.Log, Num: 1_000_000_000, UnitMS: 60_000}); err != nil {
			return Result{}, err
		}
	}
	return r.post(ctx, n, 64)
}

// bulk sends all messages in one request.
func (r *rig) bulk(ctx context.Context, n int) (Result, error) {
	if err := r.start(n); err != nil {
		return Result{}, err
	}
	address, stop, err := r.serve()
	if err != nil {
		return Result{}, err
	}
	defer stop()
	read, write := io.Pipe()
	go func() {
		out := bufio.NewWriterSize(write, 64<<10)
		for i := range n {
			fmt.Fprintf(out, `{"channels":["log"],"to":"+8613800000000","subject":"Your order","text":"%s","request_id":"%d"}`+"\n", r.text, i)
		}
		write.CloseWithError(out.Flush())
	}()
	before, most := residentMiB(), 0
	started := time.Now()
	res, err := http.Post("http://"+address+"/api/messages/bulk", "application/x-ndjson", read)
	if err != nil {
		return Result{}, err
	}
	defer res.Body.Close()
	var last struct {
		Done               bool
		Accepted, Rejected int
	}
	lines := bufio.NewScanner(res.Body)
	for lines.Scan() {
		if err := json.Unmarshal(lines.Bytes(), &last); err != nil {
			return Result{}, err
		}
		r.accepted.Store(int64(last.Accepted))
		most = max(most, residentMiB())
	}
	took := time.Since(started)
	if !last.Done || last.Accepted != n {
		return Result{}, fmt.Errorf("%d of %d accepted, the last line was %q", last.Accepted, n, lines.Text())
	}
	if err := r.finish(ctx, n); err != nil {
		return Result{}, err
	}
	result := Result{Messages: n, Seconds: took.Seconds(), PerSecond: float64(n) / took.Seconds()}
	result.Note = fmt.Sprintf("accepted; all recorded after %.0f s; memory %d MiB before, at most %d", time.Since(started).Seconds(), before, most)
	return result, r.check(ctx, n)
}
