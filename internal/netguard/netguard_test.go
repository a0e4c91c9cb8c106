package netguard

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"
)

func TestCheckURL(t *testing.T) {
	t.Parallel()
	for _, ok := range []string{
		"https://example.com/hook", "https://example.com:8443/a?b=c#d", "https://EXAMPLE.com.", "https://93.184.216.34/x", "https://[2606:2800:220:1::1]/", "https://a.b.example.org",
		"https://127.0.0.1.example.com/", "https://xn--r8jz45g.jp/",
	} {
		if err := CheckURL(ok); err != nil {
			t.Errorf("%s: %v", ok, err)
		}
	}
	for _, bad := range []string{
		"http://example.com/", "ftp://example.com/", "example.com", "", "https://", "https:///x", "https:example.com",
		"https://localhost/", "https://localhost./", "https://LOCALHOST:8080/", "https://a.localhost/", "https://metadata.google.internal/", "https://intranet/", "https://printer.local/",
		"https://127.0.0.1/", "https://127.0.0.1./", "https://127.1/", "https://2130706433/", "https://0x7f000001/", "https://0x7f.0.0.1/", "https://0177.0.0.1/", "https://017700000001/",
		"https://0.0.0.0/", "https://0/", "https://10.0.0.1/", "https://172.16.0.1/", "https://192.168.1.1/", "https://169.254.169.254/latest/meta-data", "https://100.64.0.1/", "https://198.18.0.1/",
		"https://[::1]/", "https://[::]/", "https://[::ffff:127.0.0.1]/", "https://[::ffff:7f00:1]/", "https://[::127.0.0.1]/", "https://[fe80::1]/", "https://[fe80::1%25eth0]/", "https://[fc00::1]/", "https://[fd00:ec2::254]/",
		"https://[64:ff9b::7f00:1]/", "https://[64:ff9b::a9fe:a9fe]/", "https://[2002:7f00:1::]/", "https://[2001:0:53aa::1]/", "https://224.0.0.1/", "https://255.255.255.255/", "https://[ff02::1]/",
		"https://good@127.0.0.1/", "https://user:password@example.com/", "https://example.com@127.0.0.1/", "https://exa mple.com/", "https://example.com\\@127.0.0.1/", "https://%31%32%37.0.0.1/",
		"https://1.2.3.4.5/", "https://1.2.3/", "https://example.123/",
	} {
		if err := CheckURL(bad); err == nil {
			t.Errorf("%s was accepted", bad)
		}
	}
}

func TestOutside(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]bool{
		"8.8.8.8": true, "2606:4700::1111": true, "64:ff9b::808:808": true, "2002:808:808::1": true,
		"::ffff:10.0.0.1": false, "::ffff:8.8.8.8": true, "0.1.2.3": false, "fe80::1": false, "192.0.2.1": false,
	} {
		if got := Outside(netip.MustParseAddr(text)); got != want {
			t.Errorf("%s: outside %v", text, got)
		}
	}
	if Outside(netip.Addr{}) {
		t.Error("no address at all is outside")
	}
}

// A name that resolves inside is refused when it is connected to, whatever it resolved to before.
func TestDialerRefusesInside(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	for _, host := range []string{"127.0.0.1", "localhost", "::1", "0.0.0.0", "::ffff:127.0.0.1", "2130706433", "0x7f000001", "0177.0.0.1", "127.1"} {
		conn, err := Dialer().DialContext(context.Background(), "tcp", net.JoinHostPort(host, port))
		if err == nil {
			conn.Close()
			t.Errorf("%s was connected to", host)
		}
	}
	_, err = Dialer().DialContext(context.Background(), "tcp", l.Addr().String())
	if !errors.Is(err, ErrInternal) {
		t.Errorf("the reason is lost: %v", err)
	}
	l.(*net.TCPListener).SetDeadline(time.Unix(1, 0))
	if conn, err := l.Accept(); err == nil {
		conn.Close()
		t.Error("a connection arrived")
	}
}
