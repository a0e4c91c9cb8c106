package sender

import "testing"

// What a provider repeats of a message is taken out of its words, and its own words stay.
func TestRedact(t *testing.T) {
	t.Parallel()
	m := &Message{
		Receiver: "ann@example.com", Subject: "Your code", Text: "Your code is 482913. See https://shop.example/r/ab12cd for more, dear customer, the mailbox is open.", HTML: "<p>别人看不到的内容很重要啊</p>",
	}
	for text, want := range map[string]string{
		"":                                  "",
		"550 no such user":                  "550 no such user",
		"450 4.2.2 the mailbox is full":     "450 4.2.2 … is full",
		"mailbox full":                      "mailbox full",
		"spam: Your code is 482913 refused": "spam: Your code is … refused",
		"code=482913":                       "code=…",
		"code: 482913!":                     "code: …",
		"banned link https://shop.example/r/ab12cd in the body": "banned link … in the body",
		"no such user ann@example.com":                          "no such user …",
		"content 别人看不到的内容很重要啊 refused":                          "content … refused",
		"dear customer dear customer":                           "…",
	} {
		if got := redact(text, m); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
	if v := Redact(Verdict{Kind: Permanent, Code: "482913", Text: "482913"}, m); v.Code != "…" || v.Text != "…" || v.Kind != Permanent {
		t.Errorf("%+v", v)
	}
}
