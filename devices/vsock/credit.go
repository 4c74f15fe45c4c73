package vsock

const (
	// receiveBuffer is what a guest may send on one connection before the host has taken it: the bound of a connection's
	// memory here.
	receiveBuffer = 256 << 10
	// maxPacketData is the most data in one packet to the guest. Its buffer may hold less.
	maxPacketData = 64 << 10
	// packetOverhead is what a packet costs the guest besides its data. The protocol counts data only, but Linux takes its
	// bookkeeping (about 600 bytes a packet) out of the same buffer and, since 6.12.92, resets a connection that exceeds it.
	packetOverhead = 1024
	// eagerCredit is what a guest is trusted to take before it has said so.
	eagerCredit = 8 << 10
	// leastCredit is the credit below which it is better to wait for more than to send a sliver.
	leastCredit = 1024
)

// sendCredit is how much may still be sent to the guest on one connection. The counters run modulo 2^32; only their
// differences mean anything (5.10.6.3).
type sendCredit struct {
	bufferSize uint32 // the guest's, as it last said
	forwarded  uint32 // what its reader took, as it last said
	sent       uint32
	// inFlight has the value of sent after each packet that the reader has not taken completely, oldest first.
	inFlight []uint32
}

// update takes the numbers of a packet from the guest. They may be nonsense, which costs nobody but the guest.
func (c *sendCredit) update(bufferSize, forwarded uint32) {
	c.bufferSize, c.forwarded = bufferSize, forwarded
	done := 0
	for done < len(c.inFlight) && int32(forwarded-c.inFlight[done]) >= 0 {
		done++
	}
	if done == len(c.inFlight) {
		c.inFlight = c.inFlight[:0]
	} else if done > 0 {
		c.inFlight = c.inFlight[:copy(c.inFlight, c.inFlight[done:])]
	}
}

// available returns how many bytes the next packet may have.
func (c *sendCredit) available() uint32 {
	used := uint64(c.sent - c.forwarded)
	size := uint64(c.bufferSize)
	if used >= size {
		return 0
	}
	overhead := packetOverhead * uint64(len(c.inFlight)+1)
	if used+overhead+leastCredit <= size {
		return uint32(size - used - overhead)
	}
	if used == 0 {
		// A very small buffer, and it is empty: waiting would be for ever.
		return c.bufferSize
	}
	return 0
}

// spend notes a packet with n bytes of data.
func (c *sendCredit) spend(n uint32) {
	c.sent += n
	c.inFlight = append(c.inFlight, c.sent)
}

// receiveCredit is how much the guest may still send on one connection. Data that came and was not forwarded is in the
// connection's buffer, so its length is the credit in use.
type receiveCredit struct {
	forwarded uint32
	announced uint32 // forwarded, as the guest last heard
}

// due reports whether the guest should hear of forwarded bytes. A quarter of the buffer keeps a sender from stalling and
// costs one small packet in 64 KiB.
func (c *receiveCredit) due() bool {
	return c.forwarded-c.announced >= receiveBuffer/4
}
