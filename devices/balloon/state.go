package balloon

import (
	"encoding/json"
	"fmt"

	"github.com/forkvm/forkvm/devices"
)

// StateVersion is the version of State that this package writes and reads.
const StateVersion = 1

// State is what a balloon saves beside its transport. The pages in it are the
// guest's business: to the host they are zeros like any other.
type State struct {
	Version int    `json:"version"`
	Target  uint32 `json:"target"` // pages
}

func (b *balloon) Save() (json.RawMessage, error) {
	return json.Marshal(State{Version: StateVersion, Target: b.target.Load()})
}

func (b *balloon) Restore(data json.RawMessage) error {
	s, err := b.saved.Decode(data, devices.DecodeState[State])
	if err != nil {
		return fmt.Errorf("decode balloon state: %w", err)
	}
	if s.Version != StateVersion {
		return fmt.Errorf("balloon state has version %d, need %d", s.Version, StateVersion)
	}
	b.target.Store(s.Target)
	return nil
}
