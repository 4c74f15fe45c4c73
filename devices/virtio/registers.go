package virtio

import "encoding/binary"

// Read answers a guest's read in the window. What the specification does not
// define (other widths than 32 bits or unaligned reads of a register,
// write-only and absent registers, bytes behind the configuration space)
// reads as zero.
func (t *Transport) Read(offset uint64, data []byte) {
	clear(data)
	if offset >= RegConfig {
		t.readSpace(offset-RegConfig, data)
		return
	}
	if len(data) == 4 && offset%4 == 0 {
		binary.LittleEndian.PutUint32(data, t.readRegister(offset))
	}
}

// Write follows a guest's write in the window. What the specification does
// not define, and what is not allowed in the present status, is ignored. No
// device has a field in its configuration space that a driver may write.
//
// Writes to Status and QueueReady wait for the request that the device is
// working on; all others do not wait.
func (t *Transport) Write(offset uint64, data []byte) {
	if t.closed.Load() || offset >= RegConfig || len(data) != 4 || offset%4 != 0 {
		return
	}
	t.writeRegister(offset, binary.LittleEndian.Uint32(data))
}

func (t *Transport) readSpace(offset uint64, data []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if offset < uint64(len(t.regs.space)) {
		copy(data, t.regs.space[offset:])
	}
}

func (t *Transport) readRegister(offset uint64) uint32 {
	if offset == RegInterruptStatus {
		return t.interruptStatus.Load()
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	switch offset {
	case RegMagicValue:
		return magicValue
	case RegVersion:
		return mmioVersion
	case RegDeviceID:
		return t.config.DeviceID
	case RegVendorID:
		return vendorID
	case RegDeviceFeatures:
		return word(t.offered(), t.regs.deviceFeaturesSel)
	case RegQueueNumMax:
		if q := t.selected(); q != nil {
			return uint32(q.max)
		}
	case RegQueueReady:
		if q := t.selected(); q != nil && q.ready {
			return 1
		}
	case RegStatus:
		return t.regs.status
	case RegSHMLenLow, RegSHMLenHigh, RegSHMBaseLow, RegSHMBaseHigh:
		// No device has shared memory; a region that is not there has
		// length -1 (section 4.2.2).
		return 0xffffffff
	case RegConfigGeneration:
		return t.regs.generation
	}
	return 0
}

func (t *Transport) writeRegister(offset uint64, value uint32) {
	switch offset {
	case RegQueueNotify:
		t.Notify(value)
	case RegInterruptACK:
		t.interruptStatus.And(^value)
	case RegStatus:
		t.writeStatus(value)
	case RegQueueReady:
		t.writeQueueReady(value)
	default:
		t.mu.Lock()
		defer t.mu.Unlock()
		t.writePlain(offset, value)
	}
}

// writePlain follows writes that do no more than to keep a value. mu is held.
func (t *Transport) writePlain(offset uint64, value uint32) {
	switch offset {
	case RegDeviceFeaturesSel:
		t.regs.deviceFeaturesSel = value
	case RegDriverFeaturesSel:
		t.regs.driverFeaturesSel = value
	case RegDriverFeatures:
		// Fixed once they are agreed on (section 3.1.1, step 5).
		if t.stage() == StatusAcknowledge|StatusDriver {
			setWord(&t.regs.driverFeatures, t.regs.driverFeaturesSel, value)
		}
	case RegQueueSel:
		t.regs.queueSel = value
	case RegSHMSel:
		t.regs.shmSel = value
	default:
		t.writeQueue(offset, value)
	}
}

// writeQueue changes the description of the selected queue, if that is open
// to change. mu is held.
func (t *Transport) writeQueue(offset uint64, value uint32) {
	q := t.selected()
	if q == nil || q.ready || !t.queuesOpen() {
		return
	}
	switch offset {
	case RegQueueNum:
		if validQueueSize(value, q.max) {
			q.size = uint16(value)
		}
	case RegQueueDescLow, RegQueueDescHigh:
		setWord(&q.descriptors, uint32(offset-RegQueueDescLow)/4, value)
	case RegQueueDriverLow, RegQueueDriverHigh:
		setWord(&q.driver, uint32(offset-RegQueueDriverLow)/4, value)
	case RegQueueDeviceLow, RegQueueDeviceHigh:
		setWord(&q.device, uint32(offset-RegQueueDeviceLow)/4, value)
	}
}

// writeQueueReady opens or closes the selected queue. A queue with an
// unusable ring stays closed and the device asks for a reset, because drivers
// do not read the register back.
func (t *Transport) writeQueueReady(value uint32) {
	t.acquire()
	defer t.work.Unlock()
	if err := t.setQueueReady(value); err != nil {
		t.fail(err)
	}
}

func (t *Transport) setQueueReady(value uint32) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	q := t.selected()
	switch {
	case q == nil:
	case value == 0:
		// Allowed at any time: the driver takes its memory back.
		q.stop()
	case value == 1 && !q.ready && t.queuesOpen():
		if err := q.checkRing(); err != nil {
			return err
		}
		q.ready = true
	}
	return nil
}

// stage is the status without what the device said. mu is held.
func (t *Transport) stage() uint32 {
	return t.regs.status &^ StatusNeedsReset
}

// queuesOpen: queues are set up between FEATURES_OK and DRIVER_OK (section
// 3.1.1, step 7). mu is held.
func (t *Transport) queuesOpen() bool {
	return t.stage() == StatusAcknowledge|StatusDriver|StatusFeaturesOK
}

// selected is the queue that QueueSel names, nil if there is none. mu is held.
func (t *Transport) selected() *Queue {
	if t.regs.queueSel >= uint32(len(t.queues)) {
		return nil
	}
	return t.queues[t.regs.queueSel]
}

// word returns the 32 bits number i of value; there are no bits beyond 64.
func word(value uint64, i uint32) uint32 {
	if i > 1 {
		return 0
	}
	return uint32(value >> (32 * i))
}

// setWord replaces the 32 bits number i of *value.
func setWord(value *uint64, i, to uint32) {
	if i > 1 {
		return
	}
	*value = *value&^(0xffffffff<<(32*i)) | uint64(to)<<(32*i)
}
