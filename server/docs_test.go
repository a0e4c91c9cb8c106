package server_test

import (
	"bytes"
	"io"
	"os"
	"regexp"
	"strings"
	"testing"

	"tidings/server"
	"tidings/store"
)

// docs/errors.md is made from the code's table: UPDATE_DOCS=1 (make docs) writes it anew.
func TestErrorCodes(t *testing.T) {
	t.Parallel()
	var want bytes.Buffer
	if err := server.WriteErrorCodes(&want); err != nil {
		t.Fatal(err)
	}
	const path = "../docs/errors.md"
	if os.Getenv("UPDATE_DOCS") != "" {
		if err := os.WriteFile(path, want.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil || !bytes.Equal(got, want.Bytes()) {
		t.Fatalf("docs/errors.md is not what the code says (%v): make docs", err)
	}
}

// The viewer comes whole out of the binary: every address that its page loads from is here, and answers.
func TestViewer(t *testing.T) {
	t.Parallel()
	b := setup(t, store.Config{})
	get := func(path string) (string, int) {
		res, err := b.http.Get(b.url + path)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		body, err := io.ReadAll(res.Body)
		if err != nil {
			t.Fatal(err)
		}
		return string(body), res.StatusCode
	}
	page, status := get("/docs/")
	if status != 200 || !strings.Contains(page, "/openapi.json") {
		t.Fatalf("%d %s", status, page)
	}
	loaded := regexp.MustCompile(`(?:src|href)="([^"]+)"`).FindAllStringSubmatch(page, -1)
	if len(loaded) < 2 {
		t.Fatalf("the page loads nothing: %s", page)
	}
	for _, m := range loaded {
		path := m[1]
		if strings.Contains(path, "//") {
			t.Errorf("the page loads %s from elsewhere", path)
			continue
		}
		if !strings.HasPrefix(path, "/") {
			path = "/docs/" + path
		}
		if _, status := get(path); status != 200 {
			t.Errorf("%s answers %d", path, status)
		}
	}
	if _, status := get("/docs"); status != 200 {
		t.Errorf("/docs answers %d", status)
	}
}
