package sender

import (
	"fmt"
	stdmail "net/mail"
	"strings"

	"github.com/wneessen/go-mail"
)

// buildMail makes the e-mail of a message. Date and Message-ID come from the task, so that every attempt makes the same
// mail and a receiver's server can recognise a repetition.
func buildMail(m *Message, from *stdmail.Address) (*mail.Msg, error) {
	to, err := stdmail.ParseAddress(m.Receiver)
	if err != nil {
		return nil, fmt.Errorf("the receiver is not an e-mail address") // the parser's own words repeat the address
	}
	if strings.ContainsAny(m.Subject, "\r\n\x00") {
		return nil, fmt.Errorf("the subject has line breaks")
	}
	out := mail.NewMsg(mail.WithNoDefaultUserAgent())
	out.FromMailAddress(from)
	out.ToMailAddress(to)
	out.SetGenHeaderPreformatted(mail.HeaderSubject, encodeHeader("Subject", m.Subject))
	out.SetDateWithValue(m.Created)
	out.SetMessageIDWithValue(m.Key + "@" + domainOf(from.Address))
	switch {
	case m.Text != "" && m.HTML != "":
		out.SetBodyString(mail.TypeTextPlain, m.Text)
		out.AddAlternativeString(mail.TypeTextHTML, m.HTML)
	case m.HTML != "":
		out.SetBodyString(mail.TypeTextHTML, m.HTML)
	default:
		out.SetBodyString(mail.TypeTextPlain, m.Text)
	}
	return out, nil
}

func domainOf(address string) string {
	_, domain, _ := strings.Cut(address, "@")
	return domain
}
