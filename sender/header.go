package sender

import (
	"encoding/base64"
	"strings"
	"unicode/utf8"
)

// Limits of RFC 2047 and RFC 5322.
const (
	headerLine = 76 // characters of a line with encoded-words
	wordFrame  = len("=?UTF-8?b?" + "?=")
)

// encodeHeader makes the value of an unstructured header so that it reads back exactly. Short printable ASCII stays as it is;
// any other text is written as encoded-words of whole characters (RFC 2047, section 5). go-mail's own way folds ASCII at its
// spaces and loses one where two meet the fold, and lets text that looks like an encoded-word pass. name counts for the
// first line's length and is short.
func encodeHeader(name, value string) string {
	if isPlain(value) && len(name)+2+len(value) <= headerLine {
		return value
	}
	var words []string
	for indent := len(name) + 2; len(value) > 0; indent = 1 {
		room := (headerLine - indent - wordFrame) / 4 * 3 // bytes, as base64 writes them
		n := 0
		for n < len(value) {
			_, size := utf8.DecodeRuneInString(value[n:])
			if n+size > room {
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
