package judge

import (
	"crypto/sha256"
	"encoding/json"
	"sync"

	"github.com/forkvm/forkvm/agent/client"
)

// Baselines remember what clean machines of snapshots are like, which is the same
// each time: a survey of each is enough for all who judge. The zero value is ready for
// use, by any number of goroutines.
type Baselines struct {
	// Dir, if set, is a directory in which they are kept for other processes, too. It is
	// made when there is something to keep. Whoever can write there decides what passes
	// for untouched.
	Dir string

	mu    sync.Mutex
	known map[baseline]client.Survey
	order []baseline // the oldest first
}

// baseline says of what a survey is.
type baseline [sha256.Size]byte

const (
	// maxBaselines bounds what is remembered, and what is kept: some ten kilobytes each.
	maxBaselines = 256
	// baselineVersion is of what a survey has, and of the form in which it is kept.
	baselineVersion = 1
)

// of names the survey of a snapshot, which has this id; false if it is not one to
// remember.
func (b *Baselines) of(snapshot string, l client.Look) (baseline, bool) {
	if b == nil || snapshot == "" {
		return baseline{}, false
	}
	text, err := json.Marshal(struct {
		Version  int
		Snapshot string
		Look     client.Look
	}{baselineVersion, snapshot, l})
	return sha256.Sum256(text), err == nil
}

func (b *Baselines) find(key baseline) (s client.Survey, found bool) {
	b.mu.Lock()
	s, found = b.known[key]
	b.mu.Unlock()
	if !found && b.Dir != "" {
		if s, found = baselineFiles(b.Dir).find(key); found {
			b.remember(key, s)
		}
	}
	return s, found
}

func (b *Baselines) keep(key baseline, s client.Survey) {
	b.remember(key, s)
	if b.Dir != "" {
		// Without it the next process looks for itself.
		_ = baselineFiles(b.Dir).keep(key, s)
	}
}

func (b *Baselines) remember(key baseline, s client.Survey) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, have := b.known[key]; have {
		return
	}
	if b.known == nil {
		b.known = map[baseline]client.Survey{}
	}
	if len(b.order) == maxBaselines {
		delete(b.known, b.order[0])
		b.order = b.order[1:]
	}
	b.known[key] = s
	b.order = append(b.order, key)
}
