//go:build race

package queue_test

// raceEnabled: the race detector makes everything several times slower.
const raceEnabled = true
