package nic

import (
	"encoding/json"
	"sync/atomic"
)

// Backend is the other end of a card's wire. The device calls one method at a time, except for Attach from its constructor's
// goroutine, and none while it is paused. No method blocks.
type Backend interface {
	// Attach says how the device is woken when a frame for the guest has come: from any goroutine, also from within Send.
	// It comes once, after Restore.
	Attach(wake func())
	// SetOffloads says what frames for the guest may leave to it. It comes before the first frame and whenever a driver begins.
	SetOffloads(Offloads)
	// Send takes a frame of the guest, which is good until it returns. What cannot be taken is dropped.
	Send(Frame)
	// Next returns the frame that is due for the guest, the same one until Taken. The device may find it again after a
	// pause. False: there is none.
	Next() (Frame, bool)
	// Taken removes the frame that Next returned.
	Taken()
	// Save returns what a clone has to know of the guest's connections, nil for nothing.
	Save() (json.RawMessage, error)
	// Restore forgets everything that was the guest's and takes what Save returned instead. It is hostile input.
	Restore(state json.RawMessage) error
}

// Offloads is what frames for the guest may leave undone.
type Offloads struct {
	Checksum   bool // of TCP and UDP
	TCP4, TCP6 bool // segmentation; only with Checksum
}

// Segmentation is what kind of segments a frame is to be cut into.
type Segmentation uint8

// Kinds of segments.
const (
	Whole Segmentation = iota // as it is
	TCPv4
	TCPv6
)

// Frame is an Ethernet frame and what is still to be done to it.
type Frame struct {
	// Data is the frame from its destination address on, without a checksum of its own.
	Data []byte
	// NeedsChecksum: the transport's checksum covers the pseudo header only. The sum of Data from ChecksumStart on belongs
	// to ChecksumOffset bytes behind that. Both lie within Data.
	NeedsChecksum                 bool
	ChecksumStart, ChecksumOffset uint16
	// Segmentation other than Whole: segments of SegmentSize bytes, above 0, behind HeaderLength bytes of headers, which
	// lie within Data. It comes with NeedsChecksum only.
	Segmentation              Segmentation
	SegmentSize, HeaderLength uint16
}

// Segments is how many packets the frame becomes.
func (f *Frame) Segments() int {
	if f.Segmentation == Whole {
		return 1
	}
	return Segments(len(f.Data)-int(f.HeaderLength), f.SegmentSize)
}

// Segments is how many segments of a size, which is above 0, carry so many bytes: at least one.
func Segments(bytes int, size uint16) int {
	return max((bytes+int(size)-1)/int(size), 1)
}

// Counters say what has become of frames.
type Counters struct {
	Sent     uint64 `json:"sent"`     // by the guest, to the backend
	Received uint64 `json:"received"` // by the guest
	// Frames of the guest that were dropped: without room for header and addresses, longer than the link carries, or with an
	// offload that was not negotiated or does not fit the frame.
	Malformed uint64 `json:"malformed"`
	TooLong   uint64 `json:"too_long"`
	Lied      uint64 `json:"lied"`
	// Undeliverable are frames of the backend that the guest cannot take: its buffers are too small, or it has not agreed to
	// what is left undone.
	Undeliverable uint64 `json:"undeliverable"`
}

// counters are Counters as the worker counts and others read them.
type counters struct {
	sent, received, malformed, tooLong, lied, undeliverable atomic.Uint64
}

func (c *counters) read() Counters {
	return Counters{
		Sent: c.sent.Load(), Received: c.received.Load(),
		Malformed: c.malformed.Load(), TooLong: c.tooLong.Load(), Lied: c.lied.Load(),
		Undeliverable: c.undeliverable.Load(),
	}
}
