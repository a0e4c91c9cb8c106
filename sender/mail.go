package sender

import (
	"bytes"
	"errors"
	"fmt"
	stdmail "net/mail"
	"net/url"
	"strings"

	"github.com/wneessen/go-mail"

	"tidings/internal/msg"
)

// mailOptions are what an e-mail gets beyond its message.
type mailOptions struct {
	replyTo         *stdmail.Address
	listUnsubscribe string                  // for marketing; {key} becomes the task's key
	dkim            func() *mail.DKIMSigner // a signer of its own for each mail
}

// buildMail makes the e-mail of a message. Date and Message-ID come from the task, so that every attempt makes the same
// mail and a receiver's server can recognise a repetition.
func buildMail(m *Message, from *stdmail.Address, o mailOptions) (*mail.Msg, error) {
	to, err := stdmail.ParseAddress(m.Receiver)
	if err != nil {
		return nil, fmt.Errorf("the receiver is not an e-mail address") // the parser's own words repeat the address
	}
	if strings.ContainsAny(m.Subject, "\r\n\x00") {
		return nil, fmt.Errorf("the subject has line breaks")
	}
	options := []mail.MsgOption{mail.WithNoDefaultUserAgent()}
	if o.dkim != nil {
		options = append(options, mail.WithDKIM(o.dkim()))
	}
	out := mail.NewMsg(options...)
	out.FromMailAddress(from)
	out.ToMailAddress(to)
	out.SetGenHeaderPreformatted(mail.HeaderSubject, encodeHeader("Subject", m.Subject))
	out.SetDateWithValue(m.Created)
	out.SetMessageIDWithValue(m.Key + "@" + domainOf(from.Address))
	if o.replyTo != nil {
		out.ReplyToMailAddress(o.replyTo)
	}
	if o.listUnsubscribe != "" && m.Category == msg.Marketing {
		link := strings.ReplaceAll(o.listUnsubscribe, "{key}", url.QueryEscape(m.Key))
		if err := out.SetListUnsubscribeOneClick(link); err != nil {
			return nil, errors.New("list_unsubscribe is no https URL")
		}
	}
	switch {
	case m.Text != "" && m.HTML != "":
		out.SetBodyString(mail.TypeTextPlain, m.Text)
		out.AddAlternativeString(mail.TypeTextHTML, m.HTML)
	case m.HTML != "":
		out.SetBodyString(mail.TypeTextHTML, m.HTML)
	default:
		out.SetBodyString(mail.TypeTextPlain, m.Text)
	}
	for _, a := range m.Attachments {
		if err := out.AttachReader(a.Filename, bytes.NewReader(a.Content), mail.WithFileContentType(mail.ContentType(a.ContentType))); err != nil {
			return nil, errors.New("cannot attach a file")
		}
	}
	return out, nil
}

func domainOf(address string) string {
	_, domain, _ := strings.Cut(address, "@")
	return domain
}
