package platform

import (
	"encoding/json"
	"fmt"
	"sync/atomic"

	"github.com/forkvm/forkvm/devices"
)

// Ports and values of the power registers, for the FADT and the \_S5 object (ACPI 6.5, 4.8.3.7 and 4.8.3.6).
const (
	SleepControlPort = 0x600
	SleepStatusPort  = 0x601
	ResetPort        = 0x604
	ResetValue       = 0x01
	// SleepTypeSoftOff is the SLP_TYP value that \_S5 names.
	SleepTypeSoftOff = 5
	// KeyboardControllerPort is where a kernel without a usable FADT asks the keyboard controller for a reset.
	KeyboardControllerPort = 0x64
	// PanicPort is the pvpanic device's only register.
	PanicPort = 0x505
)

const (
	sleepEnable       = 1 << 5
	sleepTypeShift    = 2
	sleepTypeMask     = 7
	keyboardResetLine = 0xfe // pulse output line 0, which is wired to the CPU's reset

	panicPanicked    = 1 << 0
	panicCrashLoaded = 1 << 1
)

// Event is something the guest tells its machine.
type Event int

const (
	EventShutdown    Event = iota + 1 // the guest turned itself off
	EventReset                        // the guest asked for a reset
	EventPanicked                     // the guest kernel panicked and stays down
	EventCrashLoaded                  // the guest kernel panicked and runs its crash kernel now
)

func (e Event) String() string {
	switch e {
	case EventShutdown:
		return "shutdown"
	case EventReset:
		return "reset"
	case EventPanicked:
		return "panicked"
	case EventCrashLoaded:
		return "crash loaded"
	}
	return fmt.Sprintf("event %d", int(e))
}

// PowerConfig describes the power and panic registers.
type PowerConfig struct {
	// ID is the key in the saved state, "power0" when empty.
	ID string
	// OnEvent is told what the guest did, at most once for each kind of event. It runs on the thread of the vCPU that
	// wrote the register: it must not block and must not wait for that vCPU. Required.
	OnEvent func(Event)
	// State is the saved state to continue from, nil for a cold start.
	State []byte
}

// Power is how a guest ends: the sleep and reset registers of hardware-reduced ACPI, the reset command of the keyboard
// controller, and pvpanic. It has no state that a guest could tell from a fresh one; it implements devices.Device so that
// the machine's list of devices is complete.
type Power struct {
	id      string
	onEvent func(Event)
	sent    [EventCrashLoaded + 1]atomic.Bool
	saved   devices.Remembered[powerState]
}

// powerState is the saved form of a Power, version 1.
type powerState struct {
	Version int `json:"version"`
}

// NewPower returns a device that is ready; there is nothing to resume.
func NewPower(config PowerConfig) (*Power, error) {
	if config.ID == "" {
		config.ID = "power0"
	}
	if config.OnEvent == nil {
		return nil, fmt.Errorf("create power registers (%s): no event function", config.ID)
	}
	p := &Power{id: config.ID, onEvent: config.OnEvent}
	if config.State != nil {
		if err := p.Restore(config.State); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// Register puts the registers on a port bus.
func (p *Power) Register(bus *devices.Bus) error {
	for _, window := range []struct {
		port    uint64
		handler devices.Handler
	}{
		{SleepControlPort, register{write: p.writeSleepControl}},
		{SleepStatusPort, register{}},
		{ResetPort, register{write: p.writeReset}},
		{KeyboardControllerPort, register{write: p.writeKeyboardController}},
		{PanicPort, register{value: panicPanicked | panicCrashLoaded, write: p.writePanic}},
	} {
		if err := bus.Register(window.port, 1, window.handler); err != nil {
			return fmt.Errorf("register power registers (%s): %w", p.id, err)
		}
	}
	return nil
}

// register is one byte-wide port with a constant value and a reaction. The status registers read 0: sleep status because
// this machine never wakes up, the keyboard controller's because then its input buffer is empty and a reset command may
// follow at once.
type register struct {
	value byte
	write func(value byte)
}

func (r register) Read(_ uint64, data []byte) {
	for i := range data {
		data[i] = r.value
	}
}

func (r register) Write(_ uint64, data []byte) {
	if r.write != nil && len(data) > 0 {
		r.write(data[0])
	}
}

func (p *Power) writeSleepControl(value byte) {
	if value&sleepEnable != 0 && value>>sleepTypeShift&sleepTypeMask == SleepTypeSoftOff {
		p.send(EventShutdown)
	}
}

func (p *Power) writeReset(value byte) {
	if value == ResetValue {
		p.send(EventReset)
	}
}

func (p *Power) writeKeyboardController(value byte) {
	if value == keyboardResetLine {
		p.send(EventReset)
	}
}

func (p *Power) writePanic(value byte) {
	if value&panicPanicked != 0 {
		p.send(EventPanicked)
	}
	if value&panicCrashLoaded != 0 {
		p.send(EventCrashLoaded)
	}
}

// send passes an event on the first time it happens: a guest that writes a register in a loop is one event.
func (p *Power) send(event Event) {
	if !p.sent[event].Swap(true) {
		p.onEvent(event)
	}
}

// ID returns the key of the saved state.
func (p *Power) ID() string { return p.id }

// Resume does nothing: the device acts on guest accesses only.
func (p *Power) Resume() error { return nil }

// Pause does nothing: without a running vCPU there is no access.
func (p *Power) Pause() error { return nil }

// Save returns a version and nothing else.
func (p *Power) Save() ([]byte, error) { return json.Marshal(powerState{Version: 1}) }

// Restore makes the device one that has sent no event.
func (p *Power) Restore(data []byte) error {
	state, err := decodeState(p.id, &p.saved, data)
	if err != nil {
		return err
	}
	if state.Version != 1 {
		return fmt.Errorf("restore power registers (%s): state version %d, want 1", p.id, state.Version)
	}
	for i := range p.sent {
		p.sent[i].Store(false)
	}
	return nil
}

// Close does nothing.
func (p *Power) Close() error { return nil }
