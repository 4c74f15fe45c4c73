package vsock

import "encoding/binary"

// Values of the socket device (virtio 1.2, section 5.10).
const (
	// HostCID is the address of the host in every guest.
	HostCID = 2
	// FirstGuestCID is the lowest address a guest can have.
	FirstGuestCID = 3
	// headerSize is the length of struct virtio_vsock_hdr.
	headerSize = 44

	typeStream = 1

	featureStream = 1 << 0 // VIRTIO_VSOCK_F_STREAM

	eventTransportReset = 0
	eventSize           = 4
)

// operation is what a packet is for (5.10.6).
type operation uint16

const (
	opRequest       operation = 1
	opResponse      operation = 2
	opReset         operation = 3
	opShutdown      operation = 4
	opData          operation = 5
	opCreditUpdate  operation = 6
	opCreditRequest operation = 7
)

// Flags of a shutdown packet. They speak of the sender of the packet.
const (
	shutdownReceive = 1 << 0 // it will not receive any more
	shutdownSend    = 1 << 1 // it will not send any more
	shutdownBoth    = shutdownReceive | shutdownSend
)

// header is struct virtio_vsock_hdr. The last two fields ride on every packet of a connection: how much its sender can buffer,
// and how many bytes, modulo 2^32, it has taken out of its buffer since the connection began.
type header struct {
	sourceCID       uint64
	destinationCID  uint64
	sourcePort      uint32
	destinationPort uint32
	length          uint32 // bytes of data behind the header
	socketType      uint16
	operation       operation
	flags           uint32
	bufferSize      uint32
	forwarded       uint32
}

func (h *header) decode(p *[headerSize]byte) {
	le := binary.LittleEndian
	h.sourceCID = le.Uint64(p[0:])
	h.destinationCID = le.Uint64(p[8:])
	h.sourcePort = le.Uint32(p[16:])
	h.destinationPort = le.Uint32(p[20:])
	h.length = le.Uint32(p[24:])
	h.socketType = le.Uint16(p[28:])
	h.operation = operation(le.Uint16(p[30:]))
	h.flags = le.Uint32(p[32:])
	h.bufferSize = le.Uint32(p[36:])
	h.forwarded = le.Uint32(p[40:])
}

func (h *header) encode(p *[headerSize]byte) {
	le := binary.LittleEndian
	le.PutUint64(p[0:], h.sourceCID)
	le.PutUint64(p[8:], h.destinationCID)
	le.PutUint32(p[16:], h.sourcePort)
	le.PutUint32(p[20:], h.destinationPort)
	le.PutUint32(p[24:], h.length)
	le.PutUint16(p[28:], h.socketType)
	le.PutUint16(p[30:], uint16(h.operation))
	le.PutUint32(p[32:], h.flags)
	le.PutUint32(p[36:], h.bufferSize)
	le.PutUint32(p[40:], h.forwarded)
}

// reset is the answer that ends the connection h speaks of, or pretends to.
func (h *header) reset() header {
	return header{
		sourceCID:       h.destinationCID,
		destinationCID:  h.sourceCID,
		sourcePort:      h.destinationPort,
		destinationPort: h.sourcePort,
		socketType:      h.socketType,
		operation:       opReset,
	}
}
