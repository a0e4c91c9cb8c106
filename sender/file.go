package sender

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	stdmail "net/mail"
	"os"
	"path/filepath"
)

// fileProvider writes e-mails as .eml files instead of sending them: what the first try shows, and what tests read. A file
// is named after the task, so another attempt replaces it by the same mail.
type fileProvider struct {
	dir  string
	from *stdmail.Address
}

type fileConfig struct {
	Dir  string `mapstructure:"dir"`  // default: mail, below data_dir
	From string `mapstructure:"from"` // the sender's address
}

func openFile(env Env, settings Settings) (Provider, error) {
	cfg := fileConfig{Dir: "mail", From: "Tidings <tidings@localhost>"}
	if err := decode(settings, &cfg); err != nil {
		return nil, err
	}
	from, err := stdmail.ParseAddress(cfg.From)
	if err != nil {
		return nil, fmt.Errorf("from: %w", err)
	}
	if !filepath.IsAbs(cfg.Dir) {
		cfg.Dir = filepath.Join(env.DataDir, cfg.Dir)
	}
	return &fileProvider{dir: cfg.Dir, from: from}, nil
}

func (p *fileProvider) Traits() Traits { return Traits{Repeatable: true} }

func (p *fileProvider) Close() error { return nil }

func (p *fileProvider) Send(ctx context.Context, m *Message) Verdict {
	if ctx.Err() != nil {
		return Verdict{Kind: Busy, Text: "interrupted before it was written"}
	}
	out, err := buildMail(m, p.from, mailOptions{})
	if err != nil {
		return Verdict{Kind: Permanent, Text: err.Error()}
	}
	var text bytes.Buffer
	if _, err := out.WriteTo(&text); err != nil {
		return Verdict{Kind: Permanent, Text: "cannot build the mail: " + err.Error()}
	}
	path := filepath.Join(p.dir, m.Key+".eml")
	if err := writeAtomically(path, text.Bytes()); err != nil {
		return Verdict{Kind: Temporary, Text: reason(err)}
	}
	return Verdict{Kind: Success, ProviderMsgID: filepath.Base(path)}
}

// writeAtomically makes a file that is whole or not there, whatever ends the process.
func writeAtomically(path string, content []byte) error {
	f, err := createIn(filepath.Dir(path))
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
	}
	return err
}

// createIn makes a file in a directory that is made when it is missing: opening a provider, or checking a configuration,
// leaves nothing behind. Only the last directory is closed to others; a private database may live beside it.
func createIn(dir string) (*os.File, error) {
	f, err := os.CreateTemp(dir, ".writing-*")
	if !errors.Is(err, os.ErrNotExist) {
		return f, err
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return nil, err
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	return os.CreateTemp(dir, ".writing-*")
}

// reason is an operating system's word without the path.
func reason(err error) string {
	var path *os.PathError
	if errors.As(err, &path) {
		return "cannot write the file: " + path.Err.Error()
	}
	return "cannot write the file"
}

// Probe writes nothing, but would.
func (p *fileProvider) Probe(context.Context) error {
	f, err := createIn(p.dir)
	if err != nil {
		return errors.New(reason(err))
	}
	return errors.Join(f.Close(), os.Remove(f.Name()))
}
