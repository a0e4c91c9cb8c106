package sender

import (
	"encoding/base64"
	"strings"
	"unicode/utf8"
)

// Limits of RFC 2047 and RFC 5322.
const (
	encodedWordBytes = 45 // of UTF-8 in an encoded-word: 12 of frame and 60 of base64 make 72, below the 75 allowed
	headerLine       = 76
)

// encodeHeader makes the value of an unstructured header so that it reads back exactly. Short printable ASCII stays as it is;
// any other text is written as encoded-words of whole characters (RFC 2047, section 5). go-mail's own way folds ASCII at its
// spaces and loses one where two meet the fold, and lets text that looks like an encoded-word pass. name counts for the
// first line's length.
func encodeHeader(name, value string) string {
	if isPlain(value) && len(name)+2+len(value) <= headerLine {
		return value
	}
	var words []string
	for len(value) > 0 {
		n := 0
		for n < len(value) {
			_, size := utf8.DecodeRuneInString(value[n:])
			if n+size > encodedWordBytes {
				break
			}
			n += size
		}
		words = append(words, "=?UTF-8?b?"+base64.StdEncoding.EncodeToString([]byte(value[:n]))+"?=")
		value = value[n:]
	}
	return strings.Join(words, "\r\n ")
}

// isPlain tells text that needs no encoding and cannot be taken for an encoded-word.
func isPlain(value string) bool {
	for i := range len(value) {
		if value[i] < 0x20 || value[i] > 0x7e {
			return false
		}
	}
	return !strings.Contains(value, "=?") && strings.TrimSpace(value) == value && !strings.Contains(value, "  ")
}
