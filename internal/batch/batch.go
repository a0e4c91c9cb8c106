// Package batch shares one costly call among many callers by natural batching: an idle batcher flushes a single item at
// once, and what arrives while a flush runs makes up the next one. There is no timer, so a lone item never waits.
package batch

import (
	"context"
	"sync"
)

// Batcher gathers items and hands them to a flush function. Make it with New.
type Batcher[T any] struct {
	limits  Limits
	size    func(T) int
	flush   func([]T)
	in      chan T
	full    chan struct{} // a whole batch waits
	wg      sync.WaitGroup
	closing chan struct{}
	once    sync.Once
}

// Limits bounds a batch.
type Limits struct {
	Items     int // most items of a batch
	Bytes     int // most bytes of a batch; a bigger item goes alone
	Parallel  int // flushes that may run at the same time
	Helpers   int // flushes that may run besides those, but only of whole batches: small ones cost more each
	QueueSize int // items that may wait; Add blocks beyond it
}

// New starts a batcher. size tells an item's bytes; flush is called with at least one item, from Limits.Parallel
// goroutines, and owns the slice until it returns.
func New[T any](limits Limits, size func(T) int, flush func([]T)) *Batcher[T] {
	b := &Batcher[T]{
		limits: limits, size: size, flush: flush,
		in: make(chan T, limits.QueueSize), full: make(chan struct{}, max(limits.Helpers, 1)), closing: make(chan struct{}),
	}
	for range limits.Parallel {
		b.wg.Go(b.run)
	}
	for range limits.Helpers {
		b.wg.Go(b.help)
	}
	return b
}

// Add queues an item. It blocks while the queue is full, until ctx ends or the batcher is closed; false says that the
// item was not taken.
func (b *Batcher[T]) Add(ctx context.Context, item T) bool {
	select {
	case <-b.closing:
		return false
	default:
	}
	select {
	case b.in <- item:
		if len(b.in) >= b.limits.Items {
			select {
			case b.full <- struct{}{}:
			default:
			}
		}
		return true
	case <-ctx.Done():
		return false
	case <-b.closing:
		return false
	}
}

// Len tells how many items wait for a flush.
func (b *Batcher[T]) Len() int { return len(b.in) }

// Close flushes what waits and returns when all flushes are done. The callers of Add must have stopped before, or their
// item may be left behind.
func (b *Batcher[T]) Close() {
	b.once.Do(func() { close(b.closing) })
	b.wg.Wait()
}

func (b *Batcher[T]) run() {
	var held *T // taken from the queue, but too big for the batch before
	for {
		var first T
		if held != nil {
			first, held = *held, nil
		} else {
			select {
			case first = <-b.in:
			case <-b.closing:
				select { // closed: what still waits is flushed, then the goroutine ends
				case first = <-b.in:
				default:
					return
				}
			}
		}
		var items []T
		items, held = b.gather(first)
		b.flush(items)
	}
}

// help flushes whole batches that wait while the others are busy.
func (b *Batcher[T]) help() {
	for {
		select {
		case <-b.full:
		case <-b.closing:
			return
		}
		for len(b.in) >= b.limits.Items {
			select {
			case first := <-b.in:
				items, left := b.gather(first)
				b.flush(items)
				if left != nil {
					b.flush([]T{*left})
				}
			default:
			}
		}
	}
}

// gather takes what waits, within the limits. It returns an item that no longer fitted.
func (b *Batcher[T]) gather(first T) (items []T, left *T) {
	items = append(items, first)
	bytes := b.size(first)
	for len(items) < b.limits.Items {
		select {
		case item := <-b.in:
			bytes += b.size(item)
			if bytes > b.limits.Bytes {
				return items, &item
			}
			items = append(items, item)
		default:
			return items, nil
		}
	}
	return items, nil
}
