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

// Save returns the state of a paused machine, without its memory and disks, for
// Restore and Reset.
func (m *Machine) Save() (*snapshot.State, error) {
	s, err := m.Capture()
	if err != nil {
		return nil, err
	}
	return s.State()
}

// Captured is the state of a machine as KVM and the devices gave it.
type Captured struct {
	vcpus   []*cpu.State
	chips   [kvm.NRIRQChips]kvm.IRQChip
	pit     kvm.PITState
	clock   kvm.ClockData
	devices []capturedDevice
}

type capturedDevice struct {
	id   string
	data []byte
}

// Capture is the part of Save for which the machine has to stand still: vCPUs first,
// since reading a vCPU can still change the controllers, then interrupt controllers,
// timer and clock, then the devices.
func (m *Machine) Capture() (*Captured, error) {
	m.op.Lock()
	defer m.op.Unlock()
	if err := m.expect(phasePaused); err != nil {
		return nil, fmt.Errorf("save machine: %w", err)
	}
	s := &Captured{}
	if err := m.capture(s); err != nil {
		return nil, fmt.Errorf("save machine: %w", err)
	}
	return s, nil
}

func (m *Machine) capture(s *Captured) (err error) {
	for _, v := range m.vcpus {
		state, err := m.policy.Save(v.fd)
		if err != nil {
			return fmt.Errorf("vcpu %d: %w", v.index, err)
		}
		s.vcpus = append(s.vcpus, state)
	}
	for id := range s.chips {
		if s.chips[id], err = m.vm.IRQChip(uint32(id)); err != nil {
			return err
		}
	}
	if s.pit, err = m.vm.PIT(); err != nil {
		return err
	}
	if s.clock, err = m.vm.Clock(); err != nil {
		return err
	}
	for _, d := range m.devices {
		data, err := d.Save()
		if err != nil {
			return fmt.Errorf("device %s: %w", d.ID(), err)
		}
		s.devices = append(s.devices, capturedDevice{d.ID(), data})
	}
	return nil
}

// pitState is what of kvm.PITState is kept; the rest is padding.
type pitState struct {
	Channels [3]kvm.PITChannelState
	Flags    uint32
}

// State is the form in which a state is kept.
func (c *Captured) State() (*snapshot.State, error) {
	s := &snapshot.State{}
	if err := c.encode(s); err != nil {
		return nil, fmt.Errorf("save machine: %w", err)
	}
	return s, nil
}

func (c *Captured) encode(s *snapshot.State) error {
	for i, v := range c.vcpus {
		data, err := v.MarshalBinary()
		if err != nil {
			return fmt.Errorf("vcpu %d: %w", i, err)
		}
		if err := s.Add(fmt.Sprintf("%s%d", vcpuSection, i), data); err != nil {
			return err
		}
	}
	for id := range c.chips {
		if err := s.Add(fmt.Sprintf("%s%d", irqchipSection, id), c.chips[id].Chip[:]); err != nil {
			return err
		}
	}
	if err := add(s, pitSection, pitState{Channels: c.pit.Channels, Flags: c.pit.Flags}); err != nil {
		return err
	}
	if err := add(s, clockSection, c.clock.Clock); err != nil {
		return err
	}
	for _, d := range c.devices {
		if err := s.Add(DeviceSection(d.id), d.data); err != nil {
			return err
		}
	}
	return nil
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
	d, err := m.decode(s)
	if err != nil {
		return err
	}
	for i, v := range m.vcpus {
		if err := m.policy.Restore(v.fd, &d.vcpus[i]); err != nil {
			return fmt.Errorf("vcpu %d: %w", v.index, err)
		}
	}
	return m.restoreControllers(d)
}

// Reset gives a paused machine that has run the state that Save returned, of this
// machine or of another one with the same devices. Memory and disks have been put
// back before. Nothing of what the guest did is left over: a vCPU is only parked
// when its last exit is completed, what was asked of a device has been answered or is
// forgotten with its queues, and the interrupt of an answer is in the controllers.
//
// The state is not changed by anybody afterwards. After an error the machine is good
// for nothing but Close.
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

// restoreControllers comes after the vCPUs: setting a local APIC can change what
// the I/O APIC still has to deliver.
func (m *Machine) restoreControllers(d *decoded) error {
	for _, chip := range d.chips {
		if err := m.vm.SetIRQChip(chip); err != nil {
			return err
		}
	}
	if err := m.vm.SetPIT(d.pit); err != nil {
		return err
	}
	// The guest's monotonic time goes on where it stopped. What time it is in
	// the world is set by whoever renews the guest's identity.
	return m.vm.SetClock(d.clock.Frozen())
}

// decoded is a state's part that is KVM's. The machine keeps the last one, since it
// is reset to the same state again and again.
type decoded struct {
	from  *snapshot.State
	vcpus []cpu.State
	chips [kvm.NRIRQChips]kvm.IRQChip
	pit   kvm.PITState
	clock kvm.ClockData
}

// decode reads a state, which nobody changes afterwards. op is held.
func (m *Machine) decode(s *snapshot.State) (*decoded, error) {
	if d := m.decoded; d != nil && d.from == s {
		return d, nil
	}
	d := &decoded{from: s, vcpus: make([]cpu.State, len(m.vcpus))}
	for i := range d.vcpus {
		data, err := section(s, fmt.Sprintf("%s%d", vcpuSection, i))
		if err == nil {
			err = d.vcpus[i].UnmarshalBinary(data)
		}
		if err != nil {
			return nil, fmt.Errorf("vcpu %d: %w", i, err)
		}
	}
	for id := range d.chips {
		name := fmt.Sprintf("%s%d", irqchipSection, id)
		data, err := section(s, name)
		if err != nil {
			return nil, err
		}
		d.chips[id].ChipID = uint32(id)
		if len(data) != copy(d.chips[id].Chip[:], data) || len(data) != len(d.chips[id].Chip) {
			return nil, fmt.Errorf("decode section %q: %d bytes, need %d", name, len(data), len(d.chips[id].Chip))
		}
	}
	var pit pitState
	if err := get(s, pitSection, &pit); err != nil {
		return nil, err
	}
	d.pit = kvm.PITState{Channels: pit.Channels, Flags: pit.Flags}
	if err := get(s, clockSection, &d.clock.Clock); err != nil {
		return nil, err
	}
	m.decoded = d
	return d, nil
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
