// Package netguard keeps requests to addresses that callers choose away from the inside of the network: loopback, private
// and link-local addresses, cloud metadata. An address is refused by its text when it is accepted, and by the number that
// it resolves to when it is connected to, so that an answer of DNS that changes meanwhile gains nothing.
package netguard

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"strings"
	"syscall"
	"time"
)

// ErrInternal says that an address lies inside.
var ErrInternal = errors.New("is an internal address")

// CheckURL tells whether a caller may name a URL as a receiver: https to an outside host. It asks no DNS. Its errors do not
// repeat the URL.
func CheckURL(text string) error {
	u, err := url.Parse(text)
	if err != nil || u.Host == "" || u.Opaque != "" {
		return errors.New("is not a URL such as https://example.com/hook")
	}
	if u.Scheme != "https" {
		return errors.New("must begin with https://")
	}
	return checkParts(u)
}

// CheckAnyURL is CheckURL for networks whose owner lets messages go inside: http and internal hosts are fine.
func CheckAnyURL(text string) error {
	u, err := url.Parse(text)
	if err != nil || u.Host == "" || u.Opaque != "" || (u.Scheme != "https" && u.Scheme != "http") {
		return errors.New("is not a URL such as https://example.com/hook")
	}
	if u.User != nil {
		return errors.New("must not hold a user or a password")
	}
	return nil
}

func checkParts(u *url.URL) error {
	if u.User != nil {
		return errors.New("must not hold a user or a password")
	}
	host := strings.ToLower(strings.TrimRight(u.Hostname(), "."))
	if addr, err := netip.ParseAddr(host); err == nil {
		if !Outside(addr) {
			return ErrInternal
		}
		return nil
	}
	if host == "" || strings.ContainsAny(host, "%:\\ ") {
		return errors.New("has a host that is none")
	}
	// Old resolvers read 2130706433, 0177.0.0.1 and 0x7f.1 as addresses. A host whose last label is a number is no name.
	last := host[strings.LastIndexByte(host, '.')+1:]
	if isNumber(last) {
		return errors.New("has a host that is a number but no plain IP address")
	}
	for _, suffix := range []string{"localhost", "local", "internal", "lan", "intranet", "home.arpa"} {
		if host == suffix || strings.HasSuffix(host, "."+suffix) {
			return ErrInternal
		}
	}
	if !strings.Contains(host, ".") {
		return ErrInternal // a bare name is one of the own network
	}
	return nil
}

func isNumber(label string) bool {
	if rest, ok := strings.CutPrefix(label, "0x"); ok {
		label = strings.Trim(rest, "0123456789abcdef")
		return label == ""
	}
	return label != "" && strings.Trim(label, "0123456789") == ""
}

// inside lists what is not the public internet (IANA's special-purpose registries), as far as netip does not tell.
var inside = prefixes(
	"0.0.0.0/8", "100.64.0.0/10", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "240.0.0.0/4",
	"64:ff9b:1::/48", "100::/64", "2001:2::/48", "2001:db8::/32", "3fff::/20", "5f00::/16", "fec0::/10",
)

// embedding lists IPv6 ranges that carry an IPv4 address, and at which bit it begins.
var embedding = []struct {
	prefix netip.Prefix
	at     int
}{
	{netip.MustParsePrefix("64:ff9b::/96"), 12}, // NAT64
	{netip.MustParsePrefix("2002::/16"), 2},     // 6to4
	{netip.MustParsePrefix("::/96"), 12},        // IPv4-compatible
}

var teredo = netip.MustParsePrefix("2001::/32")

func prefixes(list ...string) (out []netip.Prefix) {
	for _, p := range list {
		out = append(out, netip.MustParsePrefix(p))
	}
	return out
}

// Outside tells whether an IP address lies on the public internet.
func Outside(addr netip.Addr) bool {
	if addr.Zone() != "" {
		return false
	}
	addr = addr.Unmap()
	if !addr.IsValid() || addr.IsUnspecified() || addr.IsLoopback() || addr.IsPrivate() || addr.IsLinkLocalUnicast() || addr.IsMulticast() || teredo.Contains(addr) {
		return false
	}
	for _, p := range inside {
		if p.Contains(addr) {
			return false
		}
	}
	for _, e := range embedding {
		if addr.Is6() && e.prefix.Contains(addr) {
			b := addr.As16()
			return Outside(netip.AddrFrom4([4]byte(b[e.at : e.at+4])))
		}
	}
	return true
}

// Dialer connects to outside addresses only. The check sees the address that is connected to, after DNS.
func Dialer() *net.Dialer {
	return &net.Dialer{
		Timeout: 10 * time.Second,
		ControlContext: func(_ context.Context, _, address string, _ syscall.RawConn) error {
			port, err := netip.ParseAddrPort(address)
			if err != nil {
				return fmt.Errorf("connect: %w", ErrInternal)
			}
			if !Outside(port.Addr()) {
				return fmt.Errorf("connect: %w", ErrInternal)
			}
			return nil
		},
	}
}
