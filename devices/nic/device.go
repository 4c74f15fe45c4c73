// Package nic is the virtio network device (section 5.1 of virtio 1.2, which all section numbers here refer to): one pair of
// queues, mergeable receive buffers, checksum and segmentation offloads in both directions. What is at the other end of the
// wire is a Backend's business.
//
// # Inside
//
// Everything runs on the transport's worker goroutine: a frame of the guest is copied out, checked and handed to Backend.Send,
// which does not block; a frame for the guest stays in the backend, whose queue is bounded, until the guest has buffers for it.
// A frame that the backend makes while it is called leads to Wake and not to a call back, so there are no loops.
//
// A pause stops the worker between two frames.
package nic

import (
	"fmt"

	"github.com/forkvm/forkvm/devices"
	"github.com/forkvm/forkvm/devices/virtio"
	"github.com/forkvm/forkvm/vmm/memory"
)

const (
	queueReceive = iota // to the guest
	queueTransmit

	queueSize = 256
)

// Sizes of what IP packets a link carries, in bytes.
const (
	DefaultMTU = 1500
	MinMTU     = 1280 // of IPv6
	MaxMTU     = 9000
)

// MAC is the address of a network card.
type MAC [6]byte

func (m MAC) String() string {
	return fmt.Sprintf("%02x:%02x:%02x:%02x:%02x:%02x", m[0], m[1], m[2], m[3], m[4], m[5])
}

// Valid says whether a card can have the address: it is one of a single station.
func (m MAC) Valid() bool { return m != MAC{} && m[0]&1 == 0 }

// Config is what a network device is made of.
type Config struct {
	// ID names the device, "nic0" when empty.
	ID string
	// Memory is the guest's RAM, Interrupt the device's line, Backend the other end of the wire. Required.
	Memory    *memory.Memory
	Interrupt devices.Interrupt
	Backend   Backend
	// MAC is the card's address. A driver that found another one in the memory image goes on with that until somebody in the
	// guest changes it.
	MAC MAC
	// MTU is DefaultMTU when 0. It is part of the state.
	MTU int
	// Report is virtio.Config.Report, may be nil.
	Report func(error)
	// State is what Save returned, nil for a cold device.
	State []byte
}

// Device is a network device: a devices.Device and, for its register window, a devices.Handler.
type Device struct {
	*virtio.Transport
	card *card
}

// New returns a paused device.
func New(c Config) (*Device, error) {
	if c.ID == "" {
		c.ID = "nic0"
	}
	if c.MTU == 0 {
		c.MTU = DefaultMTU
	}
	switch {
	case c.Backend == nil:
		return nil, fmt.Errorf("create network device (%s): no backend", c.ID)
	case !c.MAC.Valid():
		return nil, fmt.Errorf("create network device (%s): %v is not the address of one station", c.ID, c.MAC)
	case c.MTU < MinMTU || c.MTU > MaxMTU:
		return nil, fmt.Errorf("create network device (%s): MTU %d, not %d to %d", c.ID, c.MTU, MinMTU, MaxMTU)
	}
	k := newCard(c.Backend, c.MTU)
	t, err := virtio.New(virtio.Config{
		ID:         c.ID,
		DeviceID:   virtio.DeviceNet,
		Features:   features,
		QueueSizes: []uint16{queueSize, queueSize},
		Space:      space(c.MAC, c.MTU),
		Memory:     c.Memory,
		Interrupt:  c.Interrupt,
		Device:     k,
		Report:     c.Report,
		State:      c.State,
	})
	if err != nil {
		return nil, err
	}
	k.wake = t.Wake
	c.Backend.Attach(t.Wake)
	return &Device{t, k}, nil
}

// Disconnect takes the backend away, which is the caller's again: the guest's frames go nowhere. The device is paused.
func (d *Device) Disconnect() { d.card.backend = nowhere{} }

// Connect gives a paused device another backend and another address, as New does, for a life that begins with the Restore that has to follow.
// Nothing of the life before is counted.
func (d *Device) Connect(b Backend, mac MAC) error {
	if !mac.Valid() {
		return fmt.Errorf("connect network device (%s): %v is not the address of one station", d.ID(), mac)
	}
	d.card.backend, d.card.counters = b, counters{}
	d.SetSpace(space(mac, d.card.mtu))
	b.Attach(d.Wake)
	return nil
}

// Counters returns what has become of frames so far.
func (d *Device) Counters() Counters { return d.card.counters.read() }
