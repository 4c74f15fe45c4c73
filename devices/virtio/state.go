package virtio

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/forkvm/forkvm/devices"
)

// StateVersion is the version of State that this package writes and reads.
const StateVersion = 1

// errWasBroken is the failure of a device that was saved with one. The cause
// was reported then and is not carried on: it would be text from a file.
var errWasBroken = errors.New("it asked for a reset when it was saved")

// maxState bounds a saved state; ours are a few hundred bytes a queue.
const maxState = 1 << 20

// State is the saved form of a Transport and its device. It holds what the
// driver told the device in registers; the rings and all indices that the
// guest sees are in guest memory.
type State struct {
	Version           int             `json:"version"`
	DeviceID          uint32          `json:"device_id"`
	Status            uint32          `json:"status"`
	InterruptStatus   uint32          `json:"interrupt_status"`
	ConfigGeneration  uint32          `json:"config_generation"`
	DriverFeatures    uint64          `json:"driver_features"`
	DeviceFeaturesSel uint32          `json:"device_features_sel"`
	DriverFeaturesSel uint32          `json:"driver_features_sel"`
	QueueSel          uint32          `json:"queue_sel"`
	SHMSel            uint32          `json:"shm_sel"`
	Queues            []QueueState    `json:"queues"`
	Device            json.RawMessage `json:"device,omitempty"`
}

// QueueState is the saved form of a Queue. Chains are never in flight in a
// saved state, so NextAvail and NextUsed are equal.
type QueueState struct {
	Size        uint16 `json:"size"`
	Ready       bool   `json:"ready"`
	Descriptors uint64 `json:"descriptors"`
	Driver      uint64 `json:"driver"`
	Device      uint64 `json:"device"`
	NextAvail   uint16 `json:"next_avail"`
	NextUsed    uint16 `json:"next_used"`
}

// Save implements devices.Device.
func (t *Transport) Save() ([]byte, error) {
	t.life.Lock()
	defer t.life.Unlock()
	if t.worker != nil {
		return nil, fmt.Errorf("save virtio device (%s): not paused", t.config.ID)
	}
	t.acquire()
	defer t.work.Unlock()
	for i, q := range t.queues {
		if q.held != 0 {
			return nil, fmt.Errorf("save virtio device (%s): queue %d: %d chains in flight", t.config.ID, i, q.held)
		}
	}
	own, err := t.device.Save()
	if err != nil {
		return nil, fmt.Errorf("save virtio device (%s): %w", t.config.ID, err)
	}
	s := t.state()
	s.Device = own
	return json.Marshal(s)
}

// Restore implements devices.Device.
func (t *Transport) Restore(state []byte) error {
	t.life.Lock()
	defer t.life.Unlock()
	if t.worker != nil || t.closed.Load() {
		return fmt.Errorf("restore virtio device (%s): not paused", t.config.ID)
	}
	t.acquire()
	t.reset()
	t.work.Unlock()
	if err := t.restore(state); err != nil {
		return fmt.Errorf("restore virtio device (%s): %w", t.config.ID, err)
	}
	return nil
}

// state is the transport's part of the saved state.
func (t *Transport) state() State {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := State{
		Version:           StateVersion,
		DeviceID:          t.config.DeviceID,
		Status:            t.regs.status,
		InterruptStatus:   t.interruptStatus.Load(),
		ConfigGeneration:  t.regs.generation,
		DriverFeatures:    t.regs.driverFeatures,
		DeviceFeaturesSel: t.regs.deviceFeaturesSel,
		DriverFeaturesSel: t.regs.driverFeaturesSel,
		QueueSel:          t.regs.queueSel,
		SHMSel:            t.regs.shmSel,
		Queues:            make([]QueueState, len(t.queues)),
	}
	for i, q := range t.queues {
		s.Queues[i] = QueueState{
			Size:        q.size,
			Ready:       q.ready,
			Descriptors: q.descriptors,
			Driver:      q.driver,
			Device:      q.device,
			NextAvail:   q.nextAvail,
			NextUsed:    q.nextUsed,
		}
	}
	return s
}

// restore puts a new transport, or one that was reset, where the saved one was. It does so as a
// driver would, with register writes, and then compares: a state that no
// driver could have brought about is refused.
func (t *Transport) restore(data []byte) error {
	want, err := t.saved.Decode(data, decodeState)
	if err != nil {
		return err
	}
	if err := t.checkState(want); err != nil {
		return err
	}
	if err := t.device.Restore(want.Device); err != nil {
		return err
	}
	if d, ok := t.device.(SpaceDevice); ok {
		t.mu.Lock()
		copy(t.regs.space, d.Space())
		t.mu.Unlock()
	}
	t.replay(want)
	return compareState(t.state(), want)
}

// decodeState reads exactly one object with exactly our fields.
func decodeState(data []byte) (State, error) {
	if len(data) > maxState {
		return State{}, fmt.Errorf("decode state: %d bytes, at most %d", len(data), maxState)
	}
	s, err := devices.DecodeState[State](data)
	if err != nil {
		return s, fmt.Errorf("decode state: %w", err)
	}
	return s, nil
}

// checkState refuses what replay cannot find out.
func (t *Transport) checkState(s State) error {
	switch {
	case s.Version != StateVersion:
		return fmt.Errorf("state has version %d, need %d", s.Version, StateVersion)
	case s.DeviceID != t.config.DeviceID:
		return fmt.Errorf("state is of device type %d, need %d", s.DeviceID, t.config.DeviceID)
	case len(s.Queues) != len(t.queues):
		return fmt.Errorf("state has %d queues, need %d", len(s.Queues), len(t.queues))
	case s.InterruptStatus&^(InterruptUsedBuffer|InterruptConfigChange) != 0:
		return fmt.Errorf("interrupt status %#x", s.InterruptStatus)
	}
	for i, q := range s.Queues {
		if q.NextAvail != q.NextUsed {
			return fmt.Errorf("queue %d has chains in flight: %d taken, %d given back", i, q.NextAvail, q.NextUsed)
		}
		if q.NextAvail != 0 && (!q.Ready || s.Status&StatusDriverOK == 0) {
			return fmt.Errorf("queue %d has made progress but is not in use", i)
		}
	}
	return nil
}

// replay goes through the registers in the order of section 3.1.1.
func (t *Transport) replay(s State) {
	for _, bit := range statusOrder[:2] {
		t.replayStatus(s, bit)
	}
	for i := range uint32(2) {
		t.writeRegister(RegDriverFeaturesSel, i)
		t.writeRegister(RegDriverFeatures, word(s.DriverFeatures, i))
	}
	t.replayStatus(s, StatusFeaturesOK)
	for i, q := range s.Queues {
		t.replayQueue(uint32(i), q)
	}
	t.resetOnly(s)
	t.replayStatus(s, StatusDriverOK)
	t.replayStatus(s, StatusFailed)

	t.writeRegister(RegDeviceFeaturesSel, s.DeviceFeaturesSel)
	t.writeRegister(RegDriverFeaturesSel, s.DriverFeaturesSel)
	t.writeRegister(RegQueueSel, s.QueueSel)
	t.writeRegister(RegSHMSel, s.SHMSel)
	t.interruptStatus.Store(s.InterruptStatus)
	t.mu.Lock()
	t.regs.generation = s.ConfigGeneration
	t.mu.Unlock()
}

// replayStatus sets one more status bit if the saved status has it.
func (t *Transport) replayStatus(s State, bit uint32) {
	if s.Status&bit != 0 {
		t.writeRegister(RegStatus, t.readRegister(RegStatus)|bit)
	}
}

// replayQueue sets one queue up and puts the indices, which no register has,
// where they were.
func (t *Transport) replayQueue(i uint32, s QueueState) {
	t.writeRegister(RegQueueSel, i)
	t.writeRegister(RegQueueNum, uint32(s.Size))
	for j := range uint32(2) {
		t.writeRegister(RegQueueDescLow+4*uint64(j), word(s.Descriptors, j))
		t.writeRegister(RegQueueDriverLow+4*uint64(j), word(s.Driver, j))
		t.writeRegister(RegQueueDeviceLow+4*uint64(j), word(s.Device, j))
	}
	if !s.Ready {
		return
	}
	t.writeRegister(RegQueueReady, 1)
	q := t.queues[i]
	q.nextAvail, q.nextUsed, q.signalled = s.NextAvail, s.NextUsed, s.NextUsed
}

// resetOnly brings a saved need for a reset back before DRIVER_OK, so that the
// device is not activated for a driver that it had given up on.
func (t *Transport) resetOnly(s State) {
	if s.Status&StatusNeedsReset == 0 || t.Failure() != nil {
		return
	}
	t.work.Lock()
	defer t.work.Unlock()
	t.fail(errWasBroken)
}

// compareState refuses a state that replay did not lead to.
func compareState(got, want State) error {
	for _, f := range []struct {
		name      string
		got, want uint64
	}{
		{"status", uint64(got.Status), uint64(want.Status)},
		{"driver features", got.DriverFeatures, want.DriverFeatures},
	} {
		if f.got != f.want {
			return fmt.Errorf("state is not reachable: %s is %#x, not %#x", f.name, f.got, f.want)
		}
	}
	for i := range want.Queues {
		if got.Queues[i] != want.Queues[i] {
			return fmt.Errorf("state is not reachable: queue %d is %+v, not %+v", i, got.Queues[i], want.Queues[i])
		}
	}
	return nil
}
