package admit

import (
	"testing"

	"tidings/internal/msg"
)

// One number is one receiver, however it is written.
func TestPhoneNumbers(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"+8613800138000", "008613800138000", "13800138000", " +86 138 0013 8000 ", "+86-138-0013-8000", "＋８６１３８００１３８０００", "１３８００１３８０００", "+86 (138) 0013 8000"} {
		if got, err := normalise(msg.SMS, text, "CN"); err != nil || got != "+8613800138000" {
			t.Errorf("%q: %q, %v", text, got, err)
		}
	}
	for text, want := range map[string]string{"+44 20 7946 0958": "+442079460958", "+1 (650) 253-0000": "+16502530000"} {
		if got, err := normalise(msg.SMS, text, "CN"); err != nil || got != want {
			t.Errorf("%q: %q, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "nonsense", "12", "+", "+999999999999999999999", "tel:", "+86 138 0013 8000\r\nX: y", "+86x"} {
		if got, err := normalise(msg.SMS, text, "CN"); err == nil {
			t.Errorf("%q is taken for %q", text, got)
		}
	}
	if got, err := normalise(msg.SMS, "020 7946 0958", "GB"); err != nil || got != "+442079460958" {
		t.Errorf("%q, %v", got, err)
	}
}

// What limits count by does not depend on case, names, or the script of the domain.
func TestRecipient(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"ann@bücher.example", "Ann@xn--bcher-kva.example", "\"Ann Lee\" <ANN@BÜCHER.example>"} {
		stored, err := normalise(msg.Email, text, "CN")
		if err != nil {
			t.Fatal(err)
		}
		if got := recipient(msg.Email, stored); got != "ann@xn--bcher-kva.example" {
			t.Errorf("%q is counted as %q", text, got)
		}
	}
	if got := recipient(msg.Feishu, "Ops"); got != "Ops" {
		t.Errorf("a bot is counted as %q", got)
	}
}
