package blk

import (
	"fmt"

	"github.com/forkvm/forkvm/devices"
)

// StateVersion is the version of State that this package writes and reads.
const StateVersion = 1

// State is what a block device saves beside its transport: what the guest
// knows about the disk, to refuse another one.
type State struct {
	Version  int    `json:"version"`
	Sectors  uint64 `json:"sectors"`
	ReadOnly bool   `json:"read_only"`
}

func (d *disk) state() State {
	return State{Version: StateVersion, Sectors: d.sectors, ReadOnly: d.readOnly}
}

// checkState refuses a state that was saved with another disk.
func (d *disk) checkState(data []byte) error {
	s, err := d.saved.Decode(data, devices.DecodeState[State])
	if err != nil {
		return fmt.Errorf("decode block device state: %w", err)
	}
	want := d.state()
	switch {
	case s.Version != want.Version:
		return fmt.Errorf("block device state has version %d, need %d", s.Version, want.Version)
	case s.Sectors != want.Sectors:
		return fmt.Errorf("disk has %d sectors, had %d when it was saved", want.Sectors, s.Sectors)
	case s.ReadOnly != want.ReadOnly:
		return fmt.Errorf("disk is read-only: %v, was when it was saved: %v", want.ReadOnly, s.ReadOnly)
	}
	return nil
}
