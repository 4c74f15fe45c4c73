package nic

import (
	"encoding/json"
	"fmt"

	"github.com/forkvm/forkvm/devices"
)

// StateVersion is the version of State that this package writes and reads.
const StateVersion = 1

// State is what a network device saves beside its transport.
type State struct {
	Version int `json:"version"`
	// MTU is what the guest has read.
	MTU int `json:"mtu"`
	// Backend is what its backend saved.
	Backend json.RawMessage `json:"backend,omitempty"`
}

// checkState refuses a state that was saved with another link.
func (c *card) checkState(data []byte) (State, error) {
	s, err := c.saved.Decode(data, devices.DecodeState[State])
	if err != nil {
		return s, fmt.Errorf("decode network device state: %w", err)
	}
	switch {
	case s.Version != StateVersion:
		return s, fmt.Errorf("network device state has version %d, need %d", s.Version, StateVersion)
	case s.MTU != c.mtu:
		return s, fmt.Errorf("link has MTU %d, had %d when it was saved", c.mtu, s.MTU)
	}
	return s, nil
}
