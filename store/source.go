package store

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"database/sql"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jmoiron/sqlx"
)

// Roles of sources.
const (
	RoleSender = "sender"
	RoleAdmin  = "admin"
)

// Source is a caller.
type Source struct {
	ID       string    `db:"source_id"`
	Name     string    `db:"name"`
	Role     string    `db:"role"`
	Enabled  bool      `db:"enabled"`
	Created  time.Time `db:"create_time"`
	Modified time.Time `db:"modify_time"`
	Keys     []Key     `db:"-"`
}

// Admin tells whether the source sees and administers everything.
func (s Source) Admin() bool { return s.Role == RoleAdmin }

// Key is what is known of a caller's key. The key itself is known to the caller only.
type Key struct {
	ID       string     `db:"key_id"`
	SourceID string     `db:"source_id"`
	Hash     []byte     `db:"key_hash"`
	Created  time.Time  `db:"create_time"`
	Revoked  *time.Time `db:"revoke_time"`
}

// Errors of sources and keys.
var (
	ErrExists   = errors.New("exists already")
	ErrKeysFull = errors.New("the source has two valid keys: revoke one first")
)

const (
	maxKeys   = 2 // valid at a time
	keyPrefix = "tidings_"

	sqlSources      = `SELECT /* tidings:sources */ source_id, name, role, enabled, create_time, modify_time FROM t_source ORDER BY source_id`
	sqlKeysOfAll    = `SELECT /* tidings:source-keys */ key_id, source_id, key_hash, create_time, revoke_time FROM t_source_key ORDER BY create_time, key_id`
	sqlLockSource   = `SELECT /* tidings:source-lock */ source_id FROM t_source WHERE source_id = ? FOR UPDATE`
	sqlNewSource    = `INSERT /* tidings:source-new */ INTO t_source (source_id, name, role, enabled, create_time, modify_time) VALUES (?, ?, ?, 1, UTC_TIMESTAMP(3), UTC_TIMESTAMP(3))`
	sqlUpdateSource = `UPDATE /* tidings:source-update */ t_source SET name = COALESCE(?, name), role = COALESCE(?, role), enabled = COALESCE(?, enabled), modify_time = UTC_TIMESTAMP(3) WHERE source_id = ?`
	sqlCountKeys    = `SELECT /* tidings:key-count */ COUNT(*) FROM t_source_key WHERE source_id = ? AND revoke_time IS NULL`
	sqlNewKey       = `INSERT /* tidings:key-new */ INTO t_source_key (key_id, source_id, key_hash, create_time) VALUES (?, ?, ?, UTC_TIMESTAMP(3))`
	sqlRevokeKey    = `UPDATE /* tidings:key-revoke */ t_source_key SET revoke_time = UTC_TIMESTAMP(3) WHERE key_id = ? AND revoke_time IS NULL`
	sqlKeySource    = `SELECT /* tidings:key-source */ source_id FROM t_source_key WHERE key_id = ?`
)

// SourceChange says what of a source is to change; nil: nothing.
type SourceChange struct {
	Name    *string
	Role    *string
	Enabled *bool
}

// Sources lists the callers with their keys.
func (s *Store) Sources(ctx context.Context) ([]Source, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	var (
		sources []Source
		keys    []Key
	)
	if err := s.db.SelectContext(ctx, &sources, sqlSources); err != nil {
		return nil, public(err)
	}
	if err := s.db.SelectContext(ctx, &keys, sqlKeysOfAll); err != nil {
		return nil, public(err)
	}
	bySource := map[string][]Key{}
	for _, k := range keys {
		bySource[k.SourceID] = append(bySource[k.SourceID], k)
	}
	for i := range sources {
		sources[i].Keys = bySource[sources[i].ID]
	}
	return sources, nil
}

// Source finds a caller. ErrNotFound when there is none of that id.
func (s *Store) Source(ctx context.Context, id string) (*Source, error) {
	sources, err := s.Sources(ctx)
	for i := range sources {
		if sources[i].ID == id {
			return &sources[i], nil
		}
	}
	if err == nil {
		err = fmt.Errorf("source %w", ErrNotFound)
	}
	return nil, err
}

// CreateSource registers a caller. ErrExists when the id is taken.
func (s *Store) CreateSource(ctx context.Context, by string, src Source) error {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	defer s.callers.refresh(ctx)
	err := s.tx(ctx, func(tx *sqlx.Tx) error {
		if _, err := tx.ExecContext(ctx, sqlNewSource, src.ID, src.Name, src.Role); err != nil {
			return err
		}
		return audit(ctx, tx, by, "source.create", src.ID, "role "+src.Role)
	})
	if isDuplicate(err) {
		return fmt.Errorf("source %q: %w", src.ID, ErrExists)
	}
	return public(err)
}

// UpdateSource changes what is given. ErrNotFound when there is no such caller.
func (s *Store) UpdateSource(ctx context.Context, by, id string, change SourceChange) error {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	defer s.callers.refresh(ctx)
	var detail []string
	if change.Name != nil {
		detail = append(detail, "name")
	}
	if change.Role != nil {
		detail = append(detail, "role "+*change.Role)
	}
	if change.Enabled != nil {
		detail = append(detail, fmt.Sprintf("enabled %t", *change.Enabled))
	}
	return public(s.tx(ctx, func(tx *sqlx.Tx) error {
		if err := lockSource(ctx, tx, id); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, sqlUpdateSource, change.Name, change.Role, change.Enabled, id); err != nil {
			return err
		}
		return audit(ctx, tx, by, "source.update", id, strings.Join(detail, ", "))
	}))
}

func lockSource(ctx context.Context, tx *sqlx.Tx, id string) error {
	var found string
	err := tx.GetContext(ctx, &found, sqlLockSource, id)
	if errors.Is(err, sql.ErrNoRows) {
		return fmt.Errorf("source %w", ErrNotFound)
	}
	return err
}

// CreateKey makes a key for a caller, and returns it: the only time that anybody sees it. ErrNotFound, ErrKeysFull.
func (s *Store) CreateKey(ctx context.Context, by, source string) (key string, info Key, err error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	defer s.callers.refresh(ctx)
	var secret [32]byte
	var name [6]byte
	rand.Read(secret[:])
	rand.Read(name[:])
	info = Key{ID: hex.EncodeToString(name[:]), SourceID: source, Created: s.Now()}
	key = keyPrefix + info.ID + "_" + base64.RawURLEncoding.EncodeToString(secret[:])
	hash := sha256.Sum256([]byte(key)) // of 256 random bits: nothing slower is needed
	err = s.tx(ctx, func(tx *sqlx.Tx) error {
		if err := lockSource(ctx, tx, source); err != nil { // so that two callers cannot both make the second key
			return err
		}
		var valid int
		if err := tx.GetContext(ctx, &valid, sqlCountKeys, source); err != nil {
			return err
		}
		if valid >= maxKeys {
			return ErrKeysFull
		}
		if _, err := tx.ExecContext(ctx, sqlNewKey, info.ID, source, hash[:]); err != nil {
			return err
		}
		return audit(ctx, tx, by, "key.create", source, info.ID)
	})
	if err != nil {
		return "", Key{}, public(err)
	}
	return key, info, nil
}

// RevokeKey makes a key worthless, on every node within a second. source, when given, must be the key's. ErrNotFound when
// there is no such key; a key that was revoked before stays so.
func (s *Store) RevokeKey(ctx context.Context, by, source, keyID string) error {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.Timeout)
	defer cancel()
	defer s.callers.refresh(ctx)
	return public(s.tx(ctx, func(tx *sqlx.Tx) error {
		var owner string
		err := tx.GetContext(ctx, &owner, sqlKeySource, keyID)
		if errors.Is(err, sql.ErrNoRows) || (err == nil && source != "" && owner != source) {
			return fmt.Errorf("key %w", ErrNotFound)
		}
		if err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, sqlRevokeKey, keyID); err != nil {
			return err
		}
		return audit(ctx, tx, by, "key.revoke", owner, keyID)
	}))
}

// callers is what keys are looked up in.
type callers struct {
	byHash     map[[sha256.Size]byte]Source
	byID       map[string]Source
	registered bool // whether there are sources at all
}

// callersStale is how long the copy serves while the database does not answer: requests then fail for a better reason.
const callersStale = 30 * time.Second

// Caller finds the source that a key names. registered tells whether there are sources at all: while there are none, no key is
// needed. ErrNotFound when the key opens nothing.
func (s *Store) Caller(ctx context.Context, key string) (src Source, registered bool, err error) {
	c, age := s.callers.get(ctx)
	if age > callersStale {
		return Source{}, true, fmt.Errorf("sources: %w", ErrUnavailable)
	}
	if !c.registered {
		return Source{}, false, nil
	}
	src, ok := c.byHash[sha256.Sum256([]byte(key))]
	if !ok || !src.Enabled {
		return Source{}, true, fmt.Errorf("key %w", ErrNotFound)
	}
	return src, true, nil
}

// DefaultSource is the caller of all messages as long as none is registered.
const DefaultSource = "default"

// MaySend tells whether messages of a source are accepted, whatever its keys: it is registered and enabled, or none is and it is
// DefaultSource.
func (s *Store) MaySend(ctx context.Context, source string) (bool, error) {
	c, age := s.callers.get(ctx)
	if age > callersStale {
		return false, fmt.Errorf("sources: %w", ErrUnavailable)
	}
	if !c.registered {
		return source == DefaultSource, nil
	}
	return c.byID[source].Enabled, nil
}

func (s *Store) loadCallers(ctx context.Context) (callers, error) {
	sources, err := s.Sources(ctx)
	c := callers{byHash: map[[sha256.Size]byte]Source{}, byID: map[string]Source{}, registered: len(sources) > 0}
	for _, src := range sources {
		c.byID[src.ID] = src
		for _, k := range src.Keys {
			if k.Revoked == nil && len(k.Hash) == sha256.Size {
				c.byHash[[sha256.Size]byte(k.Hash)] = src
			}
		}
	}
	return c, err
}
