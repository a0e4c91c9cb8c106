package admit

import (
	"errors"
	"fmt"
	"net/mail"
	"strings"
	"unicode/utf8"

	"github.com/nyaruka/phonenumbers"
	"golang.org/x/net/idna"
	"golang.org/x/text/width"

	"tidings/internal/msg"
)

const (
	maxMailAddress = 254 // RFC 5321's path without its brackets
	maxLocalPart   = 64
	maxMailName    = 128 // characters
)

// normalise checks an address for a channel and gives the form that is stored. Errors do not repeat the address.
func normalise(channel msg.Channel, address, region string) (string, error) {
	address = strings.TrimSpace(address)
	if n := utf8.RuneCountInString(address); n > MaxReceiver {
		return "", fmt.Errorf("has %d characters, at most %d are kept", n, MaxReceiver)
	}
	if strings.ContainsFunc(address, isControl) {
		return "", errors.New("has a line break or another control character")
	}
	switch channel {
	case msg.Email:
		return mailAddress(address)
	case msg.SMS:
		return phoneNumber(address, region)
	}
	return address, nil
}

// phoneNumber gives a number in its international form (E.164), however it is written.
func phoneNumber(text, region string) (string, error) {
	number, err := phonenumbers.Parse(width.Narrow.String(text), region)
	if err != nil || !phonenumbers.IsPossibleNumber(number) {
		return "", errors.New("is not a phone number like +8613800000000")
	}
	return phonenumbers.Format(number, phonenumbers.E164), nil
}

// recipient is a stored receiver in a form that is the same however the address was written.
func recipient(channel msg.Channel, receiver string) string {
	if channel != msg.Email {
		return receiver
	}
	if a, err := mail.ParseAddress(receiver); err == nil {
		receiver = a.Address
	}
	return strings.ToLower(receiver)
}

// mailAddress takes `ann@example.com` and `Ann <ann@example.com>`. A domain in another script becomes its ASCII form.
func mailAddress(address string) (string, error) {
	a, err := mail.ParseAddress(address)
	if err != nil {
		return "", errors.New("is not an e-mail address like ann@example.com or \"Ann Lee\" <ann@example.com>")
	}
	at := strings.LastIndexByte(a.Address, '@')
	local, domain := a.Address[:at], a.Address[at+1:]
	if !isASCII(local) {
		return "", errors.New("has other than ASCII characters before the @; no provider here takes such addresses")
	}
	if strings.ContainsFunc(a.Name, isControl) {
		return "", errors.New("has a line break or another control character in the name")
	}
	if utf8.RuneCountInString(a.Name) > maxMailName {
		return "", fmt.Errorf("has a name of more than %d characters", maxMailName)
	}
	if !isASCII(domain) {
		if domain, err = idna.Lookup.ToASCII(domain); err != nil {
			return "", errors.New("has a domain that is none")
		}
	}
	if len(local) > maxLocalPart || len(local)+1+len(domain) > maxMailAddress {
		return "", fmt.Errorf("is longer than the %d characters of an e-mail address", maxMailAddress)
	}
	plain := mail.Address{Address: local + "@" + domain}
	bare := strings.Trim(plain.String(), "<>") // quotes a local part that needs it
	if a.Name == "" {
		return bare, nil
	}
	name := strings.Join(strings.Fields(a.Name), " ")
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(name) + `" <` + bare + `>`, nil
}

func isASCII(s string) bool {
	for i := range len(s) {
		if s[i] >= 0x80 {
			return false
		}
	}
	return true
}
