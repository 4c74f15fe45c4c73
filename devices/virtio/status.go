package virtio

import "fmt"

// statusOrder is the way a driver takes through initialisation (section
// 3.1.1). A bit is accepted only after those before it.
var statusOrder = [...]uint32{StatusAcknowledge, StatusDriver, StatusFeaturesOK, StatusDriverOK}

// writeStatus follows a write to the Status register. It returns when the
// change has happened: after a reset nothing of the driver's memory is in use.
func (t *Transport) writeStatus(value uint32) {
	t.acquire()
	defer t.work.Unlock()
	if value == 0 {
		t.reset()
		return
	}
	if t.advance(value) {
		t.activate()
	}
}

// advance takes the status bits over that are due and reports whether
// DRIVER_OK is among them. A write that would clear a bit is no legal step
// (section 2.1.1) and changes nothing. The work lock is held.
func (t *Transport) advance(value uint32) (activate bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	// DEVICE_NEEDS_RESET is the device's; the driver writes it back or not.
	value |= t.regs.status & StatusNeedsReset
	if t.regs.status&^value != 0 || t.regs.status&StatusFailed != 0 {
		return false
	}
	if value&StatusFailed != 0 {
		t.regs.status |= StatusFailed
		t.running = false
		return false
	}
	for _, bit := range statusOrder {
		if value&bit == 0 {
			break
		}
		if t.regs.status&bit != 0 {
			continue
		}
		// The driver reads back whether its features were accepted.
		if bit == StatusFeaturesOK && !t.featuresAcceptable() {
			break
		}
		t.regs.status |= bit
		activate = bit == StatusDriverOK
	}
	return activate
}

// featuresAcceptable: only what is offered, and not without VERSION_1, which
// a version 2 transport cannot do without (section 6.2).
func (t *Transport) featuresAcceptable() bool {
	return t.regs.driverFeatures&^t.offered() == 0 && t.regs.driverFeatures&FeatureVersion1 != 0
}

func (t *Transport) offered() uint64 {
	return t.config.Features | transportFeatures
}

// activate begins to work for the driver. The work lock is held.
func (t *Transport) activate() {
	t.mu.Lock()
	features := t.regs.driverFeatures
	broken := t.regs.status&StatusNeedsReset != 0
	t.mu.Unlock()
	if broken {
		t.interrupt(InterruptConfigChange)
		return
	}
	for _, q := range t.queues {
		q.indirect = features&FeatureIndirectDescriptors != 0
		q.eventIndex = features&FeatureEventIndex != 0
	}
	t.active = true
	if err := t.device.Activate(features, t.queues); err != nil {
		t.fail(fmt.Errorf("activate: %w", err))
		return
	}
	t.running = true
	t.lookAtEverything()
}

// lookAtEverything makes the worker scan all queues without a notification:
// drivers fill queues before DRIVER_OK, and a notification that was delivered
// before a pause may not have been served.
func (t *Transport) lookAtEverything() {
	t.woken.Store(true)
	t.pending.Store(1<<len(t.queues) - 1)
	t.rouse()
}

// reset puts everything back to where a driver begins (sections 2.4 and
// 4.2.2.1). The work lock is held, so no handler runs.
func (t *Transport) reset() {
	if t.active {
		t.device.Reset()
	}
	t.active, t.running = false, false
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, q := range t.queues {
		q.reset()
	}
	t.regs = registers{generation: t.regs.generation, space: t.regs.space}
	t.pending.Store(0)
	t.woken.Store(false)
	t.interruptStatus.Store(0)
	t.failure.Store(nil)
}
