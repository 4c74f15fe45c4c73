package platform

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"sync"

	"github.com/forkvm/forkvm/devices"
	"github.com/forkvm/forkvm/vmm/memory"
)

// GUID is a VM generation id as it lies in guest memory. To the guest it is 128 random bits; equal values mean that time
// went straight on, a new value means that this machine is a copy.
type GUID [16]byte

// NewGUID returns a random generation id (a version 4 UUID in the byte order of EFI).
func NewGUID() GUID {
	var g GUID
	rand.Read(g[:]) // never fails, it ends the program instead
	g[7] = g[7]&0x0f | 0x40
	g[8] = g[8]&0x3f | 0x80
	return g
}

// GenerationIDConfig describes a VM generation id device.
type GenerationIDConfig struct {
	// ID is the key in the saved state, "vmgenid0" when empty.
	ID string
	// Memory is the guest's. Required.
	Memory *memory.Memory
	// Interrupt is the line that makes the guest's event device notify the VM_GEN_COUNTER driver. Required.
	Interrupt devices.Interrupt
	// Address is where the guest finds the id, as guest-physical address: 8-byte aligned, in memory that the guest's memory
	// map does not give to the guest as usable.
	Address uint64
	// GUID is the id of a cold start. With State it is ignored: the id that guest memory holds stays until Renew.
	GUID GUID
	// State is the saved state to continue from, nil for a cold start.
	State []byte
}

// GenerationID tells a guest that it is a copy ("Virtual Machine Generation ID", Microsoft, and Linux drivers/virt/vmgenid).
//
// Whether a restore is a copy is for the host to decide. To start a clone: construct the device from its state, Renew
// while everything is paused, restore the interrupt controllers, Resume this device last. The interrupt then follows all
// other state and cannot be overwritten by it, and the new id is in memory before the first instruction runs.
type GenerationID struct {
	id        string
	memory    *memory.Memory
	interrupt devices.Interrupt
	address   uint64

	mu      sync.Mutex // guards what is below, and memory at address; held while the interrupt is triggered
	saved   devices.Remembered[generationState]
	guid    GUID
	pending bool // the guest has not been interrupted for guid
	running bool
	closed  bool
}

// generationState is the saved form of a GenerationID, version 1.
type generationState struct {
	Version int    `json:"version"`
	GUID    []byte `json:"guid"`
	Pending bool   `json:"pending"`
}

// NewGenerationID returns a paused device. On a cold start it writes the id into guest memory; from state it changes nothing.
func NewGenerationID(config GenerationIDConfig) (*GenerationID, error) {
	if config.ID == "" {
		config.ID = "vmgenid0"
	}
	switch {
	case config.Memory == nil:
		return nil, fmt.Errorf("create generation id (%s): no memory", config.ID)
	case config.Interrupt == nil:
		return nil, fmt.Errorf("create generation id (%s): no interrupt", config.ID)
	case config.Address%8 != 0:
		return nil, fmt.Errorf("create generation id (%s): address %#x is not 8-byte aligned", config.ID, config.Address)
	}
	g := &GenerationID{
		id:        config.ID,
		memory:    config.Memory,
		interrupt: config.Interrupt,
		address:   config.Address,
		guid:      config.GUID,
	}
	if config.State != nil {
		if err := g.restoreLocked(config.State); err != nil {
			return nil, err
		}
		return g, nil
	}
	if err := g.memory.WriteAt(g.guid[:], g.address); err != nil {
		return nil, fmt.Errorf("create generation id (%s): %w", config.ID, err)
	}
	return g, nil
}

// Restore implements devices.Device. Guest memory has the id that the state has: it is restored before, as for the constructor.
func (g *GenerationID) Restore(raw []byte) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case g.closed:
		return fmt.Errorf("restore generation id (%s): %w", g.id, ErrClosed)
	case g.running:
		return fmt.Errorf("restore generation id (%s): not paused", g.id)
	}
	return g.restoreLocked(raw)
}

func (g *GenerationID) restoreLocked(raw []byte) error {
	state, err := decodeState(g.id, &g.saved, raw)
	if err != nil {
		return err
	}
	if state.Version != 1 {
		return fmt.Errorf("restore generation id (%s): state version %d, want 1", g.id, state.Version)
	}
	if len(state.GUID) != len(g.guid) {
		return fmt.Errorf("restore generation id (%s): %d bytes, want %d", g.id, len(state.GUID), len(g.guid))
	}
	var probe GUID
	if err := g.memory.ReadAt(probe[:], g.address); err != nil {
		return fmt.Errorf("restore generation id (%s): %w", g.id, err)
	}
	g.guid = GUID(state.GUID)
	g.pending = state.Pending
	return nil
}

// ID returns the key of the saved state.
func (g *GenerationID) ID() string { return g.id }

// Current returns the id that the guest sees.
func (g *GenerationID) Current() GUID {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.guid
}

// Renew writes a new id into guest memory and interrupts the guest: at once when the device runs, in Resume when it is
// paused.
func (g *GenerationID) Renew(guid GUID) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return fmt.Errorf("renew generation id (%s): %w", g.id, ErrClosed)
	}
	if err := g.memory.WriteAt(guid[:], g.address); err != nil {
		return fmt.Errorf("renew generation id (%s): %w", g.id, err)
	}
	g.guid = guid
	g.pending = true
	if !g.running {
		return nil
	}
	return g.notifyLocked()
}

// Resume interrupts the guest if it does not know of the current id.
func (g *GenerationID) Resume() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return fmt.Errorf("resume generation id (%s): %w", g.id, ErrClosed)
	}
	if g.pending {
		if err := g.notifyLocked(); err != nil {
			return err
		}
	}
	g.running = true
	return nil
}

// notifyLocked triggers the interrupt. From then on it is part of the interrupt controller's state.
func (g *GenerationID) notifyLocked() error {
	if err := g.interrupt.Trigger(); err != nil {
		return fmt.Errorf("interrupt for generation id (%s): %w", g.id, err)
	}
	g.pending = false
	return nil
}

// Pause keeps back interrupts until Resume.
func (g *GenerationID) Pause() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.running = false
	return nil
}

// Save returns the id and whether the guest still has to be told of it.
func (g *GenerationID) Save() ([]byte, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return json.Marshal(generationState{Version: 1, GUID: g.guid[:], Pending: g.pending})
}

// Close makes Renew and Resume fail.
func (g *GenerationID) Close() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.running, g.closed = false, true
	return nil
}
