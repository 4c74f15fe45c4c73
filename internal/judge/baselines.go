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
	mu    sync.Mutex
	known map[baseline]client.Survey
	order []baseline // the oldest first
}

// baseline says of what a survey is.
type baseline struct {
	snapshot string // its id
	look     [sha256.Size]byte
}

// maxBaselines bounds what is remembered: some ten kilobytes each.
const maxBaselines = 256

// of names the survey of a snapshot; false if it is not one to remember.
func (b *Baselines) of(snapshot string, l client.Look) (baseline, bool) {
	if b == nil || snapshot == "" {
		return baseline{}, false
	}
	text, err := json.Marshal(l)
	return baseline{snapshot, sha256.Sum256(text)}, err == nil
}

func (b *Baselines) find(key baseline) (client.Survey, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s, ok := b.known[key]
	return s, ok
}

func (b *Baselines) keep(key baseline, s client.Survey) {
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
