package vmm

import (
	"errors"
	"fmt"
)

// Pause stops the guest: first the vCPUs, so that nothing new is asked of the
// devices, then the devices, so that nothing touches guest memory or a backend.
// When it returns nil the machine can be saved and its memory frozen. Pausing a
// paused machine does nothing. If a device cannot settle, the machine goes on
// and the error is returned.
func (m *Machine) Pause() error {
	m.op.Lock()
	defer m.op.Unlock()
	if err := m.expect(phaseRunning, phasePaused); err != nil {
		return fmt.Errorf("pause machine: %w", err)
	}
	if m.expect(phasePaused) == nil {
		return nil
	}
	m.stopVCPUs()
	for i := len(m.devices) - 1; i >= 0; i-- {
		if err := m.devices[i].Pause(); err != nil {
			err = fmt.Errorf("pause machine: device %s: %w", m.devices[i].ID(), err)
			return errors.Join(err, m.resumeFrom(i))
		}
	}
	m.setPhase(phasePaused)
	if err := m.expect(phasePaused); err != nil {
		return fmt.Errorf("pause machine: %w", err)
	}
	return nil
}

// Resume lets a paused guest go on: devices first, which look through all their
// queues once, then the vCPUs. Resuming a running machine does nothing.
func (m *Machine) Resume() error {
	m.op.Lock()
	defer m.op.Unlock()
	if err := m.expect(phaseRunning, phasePaused); err != nil {
		return fmt.Errorf("resume machine: %w", err)
	}
	if m.expect(phaseRunning) == nil {
		return nil
	}
	if err := m.resumeFrom(0); err != nil {
		return fmt.Errorf("resume machine: %w", err)
	}
	m.setPhase(phaseRunning)
	return nil
}

// resumeFrom resumes the devices from an index on and runs the vCPUs. A device
// that cannot resume ends the machine: the guest would wait for it for ever.
func (m *Machine) resumeFrom(index int) error {
	for _, d := range m.devices[index:] {
		if err := d.Resume(); err != nil {
			err = fmt.Errorf("device %s: %w", d.ID(), err)
			m.End(ReasonHostError, err.Error())
			return err
		}
	}
	for _, v := range m.vcpus {
		// Tells a guest that uses kvmclock that it was stopped, so that its
		// watchdogs do not take the pause for a hang. A guest without it is no
		// error.
		if _, err := v.fd.KVMClockCtrl(); err != nil {
			m.End(ReasonHostError, err.Error())
			return err
		}
		v.ask(vcpuRunning)
	}
	return nil
}

// stopVCPUs asks all vCPUs first and waits for all of them afterwards, so that
// the pause lasts as long as the slowest one and not as all together.
func (m *Machine) stopVCPUs() {
	for _, v := range m.vcpus {
		v.ask(vcpuParked)
	}
	for _, v := range m.vcpus {
		v.wait()
	}
}

// Paused reports whether the guest stands still and can go on.
func (m *Machine) Paused() bool { return m.expect(phasePaused) == nil }
