package virtio

// Both sides tell each other when they want to hear of progress: with flags,
// or with the event index if that was negotiated (sections 2.7.7 and 2.7.10).

// askForKick asks the driver to notify when it makes the next chain
// available. The caller has to look at the available index once more: a
// driver that did not see this yet has not notified. The stores are atomic
// and with that full barriers, so that the look is not done before them.
func (q *Queue) askForKick() error {
	if q.eventIndex {
		return q.mem.WriteUint16(q.availEvent(), q.nextAvail)
	}
	q.quiet = false
	return q.mem.WriteUint16(q.device+ringFlags, 0)
}

// refuseKicks tells the driver that the device is looking by itself. With
// the event index nothing needs to be done: the index asked for last has
// passed.
func (q *Queue) refuseKicks() error {
	if q.eventIndex || q.quiet {
		return nil
	}
	q.quiet = true
	return q.mem.WriteUint16(q.device+ringFlags, usedNoNotify)
}

// needsInterrupt decides, once for all chains pushed since the last decision,
// whether the driver wants to hear of them. A driver that asks to hear looks
// at the used index afterwards, so what is read here, behind the barrier of
// Push, is either new enough or not needed.
func (q *Queue) needsInterrupt() (bool, error) {
	if !q.ready || q.signalled == q.nextUsed {
		return false, nil
	}
	before := q.signalled
	q.signalled = q.nextUsed
	if !q.eventIndex {
		flags, err := q.mem.ReadUint16(q.driver + ringFlags)
		return flags&availNoInterrupt == 0, err
	}
	event, err := q.mem.ReadUint16(q.usedEvent())
	return passed(event, before, q.nextUsed), err
}

// passed reports whether the step from index before to index now went over
// the entry event, in 16-bit arithmetic that wraps.
func passed(event, before, now uint16) bool {
	return now-event-1 < now-before
}

// usedEvent is where the driver says which used entry it wants to hear of:
// behind the available ring.
func (q *Queue) usedEvent() uint64 {
	return q.driver + ringEntries + 2*uint64(q.size)
}

// availEvent is where the device says which available entry it wants to hear
// of: behind the used ring.
func (q *Queue) availEvent() uint64 {
	return q.device + ringEntries + usedElemSize*uint64(q.size)
}
