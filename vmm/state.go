package vmm

import (
	"encoding/binary"
	"fmt"

	"github.com/forkvm/forkvm/kvm"
	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/vmm/cpu"
)

// Names of the sections that a machine's state consists of. Devices add
// deviceSection + their ID.
const (
	vcpuSection    = "vcpu/"
	irqchipSection = "irqchip/"
	pitSection     = "pit"
	clockSection   = "clock"
	deviceSection  = "device/"
)

// DeviceSection is the name of the section with the state of the device of this
// ID.
func DeviceSection(id string) string { return deviceSection + id }

// Save returns the state of a paused machine, without its memory and disks:
// vCPUs first, since reading a vCPU can still change the controllers, then
// interrupt controllers, timer and clock, then the devices.
func (m *Machine) Save() (*snapshot.State, error) {
	m.op.Lock()
	defer m.op.Unlock()
	if err := m.expect(phasePaused); err != nil {
		return nil, fmt.Errorf("save machine: %w", err)
	}
	s := &snapshot.State{}
	if err := m.saveVCPUs(s); err != nil {
		return nil, fmt.Errorf("save machine: %w", err)
	}
	if err := m.saveControllers(s); err != nil {
		return nil, fmt.Errorf("save machine: %w", err)
	}
	for _, d := range m.devices {
		data, err := d.Save()
		if err != nil {
			return nil, fmt.Errorf("save machine: device %s: %w", d.ID(), err)
		}
		if err := s.Add(DeviceSection(d.ID()), data); err != nil {
			return nil, fmt.Errorf("save machine: %w", err)
		}
	}
	return s, nil
}

func (m *Machine) saveVCPUs(s *snapshot.State) error {
	for _, v := range m.vcpus {
		state, err := m.policy.Save(v.fd)
		if err != nil {
			return fmt.Errorf("vcpu %d: %w", v.index, err)
		}
		data, err := state.MarshalBinary()
		if err != nil {
			return fmt.Errorf("vcpu %d: %w", v.index, err)
		}
		if err := s.Add(fmt.Sprintf("%s%d", vcpuSection, v.index), data); err != nil {
			return err
		}
	}
	return nil
}

// pitState is what of kvm.PITState is kept; the rest is padding.
type pitState struct {
	Channels [3]kvm.PITChannelState
	Flags    uint32
}

func (m *Machine) saveControllers(s *snapshot.State) error {
	for id := range uint32(kvm.NRIRQChips) {
		chip, err := m.vm.IRQChip(id)
		if err != nil {
			return err
		}
		if err := s.Add(fmt.Sprintf("%s%d", irqchipSection, id), chip.Chip[:]); err != nil {
			return err
		}
	}
	pit, err := m.vm.PIT()
	if err != nil {
		return err
	}
	if err := add(s, pitSection, pitState{Channels: pit.Channels, Flags: pit.Flags}); err != nil {
		return err
	}
	clock, err := m.vm.Clock()
	if err != nil {
		return err
	}
	return add(s, clockSection, clock.Clock)
}

// Restore gives a new machine the state that Save returned, of this or another
// process. The devices have been constructed with their sections before. The
// state is not trusted: what does not fit is an error, and the machine is good
// for nothing but Close then.
func (m *Machine) Restore(s *snapshot.State) error {
	m.op.Lock()
	defer m.op.Unlock()
	if err := m.expect(phaseNew); err != nil {
		return fmt.Errorf("restore machine: %w", err)
	}
	if err := m.restore(s); err != nil {
		return fmt.Errorf("restore machine: %w", err)
	}
	m.setPhase(phasePaused)
	return nil
}

// restore sets vCPUs and controllers.
func (m *Machine) restore(s *snapshot.State) error {
	for _, v := range m.vcpus {
		if err := m.restoreVCPU(s, v); err != nil {
			return fmt.Errorf("vcpu %d: %w", v.index, err)
		}
	}
	return m.restoreControllers(s)
}

// Reset gives a paused machine that has run the state that Save returned, of this
// machine or of another one with the same devices. Memory and disks have been put
// back before. Nothing of what the guest did is left over: a vCPU is only parked
// when its last exit is completed, and what was asked of a device has been
// answered or is forgotten with its queues. The one thing that may still be on its
// way is an edge of an interrupt line, which KVM delivers from a work queue: the
// guest's driver finds nothing to do for it.
//
// After an error the machine is good for nothing but Close.
func (m *Machine) Reset(s *snapshot.State) error {
	m.op.Lock()
	defer m.op.Unlock()
	if err := m.expect(phasePaused); err != nil {
		return fmt.Errorf("reset machine: %w", err)
	}
	if err := m.policy.Rewind(m.vcpus[0].fd); err != nil {
		return fmt.Errorf("reset machine: %w", err)
	}
	if err := m.restore(s); err != nil {
		return fmt.Errorf("reset machine: %w", err)
	}
	for _, d := range m.devices {
		data, err := section(s, DeviceSection(d.ID()))
		if err == nil {
			err = d.Restore(data)
		}
		if err != nil {
			return fmt.Errorf("reset machine: device %s: %w", d.ID(), err)
		}
	}
	return nil
}

func (m *Machine) restoreVCPU(s *snapshot.State, v *vcpu) error {
	data, err := section(s, fmt.Sprintf("%s%d", vcpuSection, v.index))
	if err != nil {
		return err
	}
	var state cpu.State
	if err := state.UnmarshalBinary(data); err != nil {
		return err
	}
	return m.policy.Restore(v.fd, &state)
}

// restoreControllers comes after the vCPUs: setting a local APIC can change what
// the I/O APIC still has to deliver.
func (m *Machine) restoreControllers(s *snapshot.State) error {
	for id := range uint32(kvm.NRIRQChips) {
		chip := kvm.IRQChip{ChipID: id}
		if err := get(s, fmt.Sprintf("%s%d", irqchipSection, id), &chip.Chip); err != nil {
			return err
		}
		if err := m.vm.SetIRQChip(chip); err != nil {
			return err
		}
	}
	var pit pitState
	if err := get(s, pitSection, &pit); err != nil {
		return err
	}
	if err := m.vm.SetPIT(kvm.PITState{Channels: pit.Channels, Flags: pit.Flags}); err != nil {
		return err
	}
	// The guest's monotonic time goes on where it stopped. What time it is in
	// the world is set by whoever renews the guest's identity.
	var clock kvm.ClockData
	if err := get(s, clockSection, &clock.Clock); err != nil {
		return err
	}
	return m.vm.SetClock(clock.Frozen())
}

func section(s *snapshot.State, name string) ([]byte, error) {
	data, ok := s.Get(name)
	if !ok {
		return nil, fmt.Errorf("state has no section %q", name)
	}
	return data, nil
}

// add stores a structure of the kernel's ABI, which has a fixed size and no
// pointers, as its little-endian bytes.
func add(s *snapshot.State, name string, v any) error {
	data, err := binary.Append(nil, binary.LittleEndian, v)
	if err != nil {
		return fmt.Errorf("encode section %q: %w", name, err)
	}
	return s.Add(name, data)
}

func get(s *snapshot.State, name string, v any) error {
	data, err := section(s, name)
	if err != nil {
		return err
	}
	n, err := binary.Decode(data, binary.LittleEndian, v)
	if err != nil {
		return fmt.Errorf("decode section %q: %w", name, err)
	}
	if n != len(data) {
		return fmt.Errorf("decode section %q: %d bytes too many", name, len(data)-n)
	}
	return nil
}
