package store

import (
	"context"
	"sync"
	"time"
)

// mirror is a copy of small tables that every request asks: sources with their keys, quotas. It is at most a second old. One
// caller brings it up to date, the others wait for it only where the copy is older than it may be.
type mirror[T any] struct {
	load func(context.Context) (T, error)

	mu      sync.Mutex
	copy    T
	loaded  time.Time     // when the load of the copy began
	loading chan struct{} // closed when the load under way ends; nil: none is
	retry   time.Time     // not before, after a failure
}

const (
	mirrorFresh = 500 * time.Millisecond
	mirrorOld   = 900 * time.Millisecond
	mirrorLoad  = time.Second
)

// get returns the copy and how old it is: older than a second only while the database does not answer.
func (m *mirror[T]) get(ctx context.Context) (T, time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	age := time.Since(m.loaded)
	switch {
	case age < mirrorFresh || time.Now().Before(m.retry) || (m.loading != nil && age < mirrorOld):
	case m.loading != nil:
		loading := m.loading
		m.mu.Unlock()
		select {
		case <-loading:
		case <-ctx.Done():
		}
		m.mu.Lock()
	default:
		m.loading = make(chan struct{})
		m.mu.Unlock()
		m.refresh(context.WithoutCancel(ctx))
		m.mu.Lock()
		close(m.loading)
		m.loading = nil
	}
	return m.copy, time.Since(m.loaded)
}

// refresh makes a new copy: what this process has changed holds here at once. Of two that overlap, the one begun later stays.
func (m *mirror[T]) refresh(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, mirrorLoad)
	defer cancel()
	began := time.Now()
	fresh, err := m.load(ctx)
	m.mu.Lock()
	defer m.mu.Unlock()
	if err != nil {
		m.retry = time.Now().Add(mirrorFresh)
		return err
	}
	if began.After(m.loaded) {
		m.copy, m.loaded = fresh, began
	}
	return nil
}
