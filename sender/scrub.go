package sender

import (
	"regexp"
	"strings"
)

var addressLike = regexp.MustCompile(`("[^"]*"|[^\s<>"'(),;:]+)@[^\s<>"'(),;]+`)

// withoutAddresses takes what looks like an e-mail address or a URL out of a text that somebody else wrote: a server's words go
// into tables and logs, and servers like to repeat whom they refuse.
func withoutAddresses(text string) string {
	text = urlLike.ReplaceAllString(text, "(url)")
	return addressLike.ReplaceAllString(strings.TrimSpace(text), "(address)")
}

var urlLike = regexp.MustCompile(`https?://\S+`)
