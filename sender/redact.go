package sender

import (
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Words of a provider's answer that are taken out where the message has them, too: such as codes are, or long ones, or several in a
// row. Others are in everybody's language.
const (
	leastWord = 4  // characters; shorter ones tell nothing
	longWord  = 10 // characters
	mostText  = 512
)

// Redact takes out of a provider's words what they repeat of the message: a mail server may quote a subject, or a line that it
// dislikes, and the words go into tables and logs.
func Redact(v Verdict, m *Message) Verdict {
	v.Code, v.Text = redact(v.Code, m), redact(v.Text, m)
	return v
}

func redact(text string, m *Message) string {
	if text = clipText(text); text == "" {
		return text
	}
	said := []string{m.Receiver, m.Subject, m.Text, m.HTML}
	has := func(part string) bool {
		for _, s := range said {
			if strings.Contains(s, part) {
				return true
			}
		}
		return false
	}
	telling := func(word string) bool { // enough to be taken out alone
		return utf8.RuneCountInString(word) >= longWord || strings.ContainsFunc(word, unicode.IsDigit)
	}
	words := strings.Fields(text)
	bare, hide := make([]string, len(words)), make([]bool, len(words))
	for i, w := range words {
		bare[i] = strings.TrimFunc(w, func(r rune) bool { return !unicode.IsLetter(r) && !unicode.IsDigit(r) })
		hide[i] = utf8.RuneCountInString(bare[i]) >= leastWord && telling(bare[i]) && has(bare[i])
	}
	for i := 1; i < len(words); i++ {
		if bare[i-1] != "" && bare[i] != "" && len(bare[i-1])+len(bare[i]) >= longWord && has(bare[i-1]+" "+bare[i]) {
			hide[i-1], hide[i] = true, true
		}
	}
	var kept []string
	for i, w := range words {
		if !hide[i] {
			kept = append(kept, w)
		} else if n := len(kept); n == 0 || kept[n-1] != "…" {
			kept = append(kept, "…")
		}
	}
	return parts.ReplaceAllStringFunc(strings.Join(kept, " "), func(part string) string {
		if telling(part) && has(part) {
			return "…"
		}
		return part
	})
}

// parts of words, such as a code in code=4711.
var parts = regexp.MustCompile(`[\pL\pN]{4,}`)

func clipText(text string) string {
	if len(text) <= mostText {
		return text
	}
	return strings.ToValidUTF8(text[:mostText], "")
}
