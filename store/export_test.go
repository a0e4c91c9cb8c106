package store

// Sabotage lets a test change the statements of every packet before they are sent.
func (s *Store) Sabotage(change func([]string) []string) { s.sabotage = change }
