package sender

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"strconv"
	"sync/atomic"
	"time"
)

// Limits of what is read of an answer.
const (
	maxAnswer     = 64 << 10
	maxHeaders    = 64 << 10
	maxRetryAfter = 24 * time.Hour
)

// newHTTPClient makes a client for a provider: no redirects, no proxy from the environment, no unpacking of compressed
// answers (a small one could unpack to any size), bounded headers.
func newHTTPClient(dialer *net.Dialer) *http.Client {
	return &http.Client{
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Transport: &http.Transport{
			DialContext: dialer.DialContext, DisableCompression: true, MaxResponseHeaderBytes: maxHeaders,
			TLSHandshakeTimeout: 10 * time.Second, MaxIdleConns: 100, MaxIdleConnsPerHost: 10, IdleConnTimeout: 30 * time.Second, ForceAttemptHTTP2: true,
		},
	}
}

// reply is what came back of a request.
type reply struct {
	status int
	header http.Header
	body   []byte // at most maxAnswer
	left   bool   // the request had left, or may have, when err came
	err    error
}

// exchange sends a request once. It notices whether the request left: a failure before that is no attempt at all for the
// other side, one after it leaves the outcome unknown.
func exchange(ctx context.Context, client *http.Client, req *http.Request, wantBody bool) reply {
	var left atomic.Bool
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{WroteHeaders: func() { left.Store(true) }})
	req = req.WithContext(ctx)
	req.GetBody = nil // without it net/http cannot send the request again on another connection
	res, err := client.Do(req)
	if err != nil {
		return reply{left: left.Load(), err: err}
	}
	defer res.Body.Close()
	r := reply{status: res.StatusCode, header: res.Header, left: true}
	if wantBody {
		r.body, r.err = io.ReadAll(io.LimitReader(res.Body, maxAnswer+1))
		if r.err == nil && len(r.body) > maxAnswer {
			r.err = errors.New("the answer is too long")
		}
	}
	return r
}

// failed is the verdict on a request without an answer.
func (r reply) failed(ctx context.Context) Verdict {
	if r.left {
		return Verdict{Kind: Unknown, Text: "no answer: " + plainCause(ctx, r.err)}
	}
	return Verdict{Kind: Temporary, Text: "cannot connect: " + plainCause(ctx, r.err), Unsent: true}
}

// plainCause says why a call failed without naming where to: net/http's errors repeat the URL, which may be a secret.
func plainCause(ctx context.Context, err error) string {
	var (
		wrapped *url.Error
		dns     *net.DNSError
		op      *net.OpError
	)
	if errors.As(err, &wrapped) {
		err = wrapped.Err
	}
	switch {
	case ctx.Err() != nil || errors.Is(err, context.DeadlineExceeded):
		return "time is over"
	case errors.As(err, &dns):
		if dns.IsNotFound {
			return "the host has no address"
		}
		return "the host's address cannot be found out now"
	case errors.As(err, &op) && op.Err != nil:
		return op.Op + ": " + withoutAddresses(op.Err.Error())
	}
	return withoutAddresses(err.Error())
}

// retryAfter reads the header, in seconds or as a date; 0: there is none.
func retryAfter(header http.Header, now time.Time) time.Duration {
	value := header.Get("Retry-After")
	if seconds, err := strconv.ParseInt(value, 10, 64); err == nil {
		return bounded(time.Duration(min(max(seconds, 0), int64(maxRetryAfter/time.Second))) * time.Second)
	}
	if at, err := http.ParseTime(value); err == nil {
		return bounded(at.Sub(now))
	}
	return 0
}

func bounded(d time.Duration) time.Duration { return min(max(d, 0), maxRetryAfter) }

// statusVerdict judges an HTTP status of a receiver that is not ours to know: 2xx is success, and what asks to come back is
// heeded. A 503 that does not ask is what a proxy says whose server is down. Any other failure may be mended over there, so it
// is worth another attempt.
func statusVerdict(r reply, now time.Time) Verdict {
	code := strconv.Itoa(r.status)
	switch {
	case r.status >= 200 && r.status < 300:
		return Verdict{Kind: Success}
	case r.status == http.StatusTooManyRequests || (r.status == http.StatusServiceUnavailable && r.header.Get("Retry-After") != ""):
		return Verdict{Kind: Busy, Code: code, Text: "answered " + code, RetryAfter: retryAfter(r.header, now)}
	case r.status == http.StatusGone:
		return Verdict{Kind: Permanent, Code: code, Text: "answered 410: gone for good"}
	case r.status >= 300 && r.status < 400:
		return Verdict{Kind: Temporary, Code: code, Text: "answered " + code + ": redirects are not followed"}
	}
	return Verdict{Kind: Temporary, Code: code, Text: "answered " + code}
}
