// Package proto is the wire protocol between the host and the guest agent:
// frames, messages, flow control and error words. Both sides import it; it
// knows neither processes nor sockets.
//
// A guest agent is frozen into every snapshot, so this protocol outlives the
// program that wrote it: the rules for extending it are part of it. They are in
// docs/guest-agent-protocol.md, together with the layout of each message.
package proto

// Name is what Hello.Protocol must say; it tells a stranger on the same port
// from a guest agent.
const Name = "forkvm-guest-agent"

// Port is the vsock port on which the guest agent listens.
const Port = 1024

// Versions of the protocol that this package speaks.
const (
	MinVersion = 1
	MaxVersion = 1
)

// Limits that both sides hold each other to.
const (
	// HeaderSize is the size in bytes of a frame header.
	HeaderSize = 8
	// MaxControl is the largest payload in bytes of a control frame.
	MaxControl = 1 << 20
	// MaxData is the largest payload in bytes of a Data frame.
	MaxData = 64 << 10
	// MaxCredit bounds the unused credit of one stream in bytes.
	MaxCredit = 1 << 30
)

// Streams of an operation. What is written to Stdin flows from the host to the
// guest, everything else from the guest to the host. A file travels on Stdin
// when it is put and on Stdout when it is read.
const (
	Stdin  uint16 = 1
	Stdout uint16 = 2
	Stderr uint16 = 3
)
