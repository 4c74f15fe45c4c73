package virtio

import (
	"fmt"

	"github.com/forkvm/forkvm/vmm/memory"
)

// Segment is one buffer of a chain in guest-physical memory. A segment that a
// Chain holds is not empty and lies in one region of RAM.
type Segment struct {
	Address uint64
	Length  uint32
}

// Chain is one request: the buffers that the device may read, followed by
// those that it may write. Where one buffer ends and the next begins means
// nothing (section 2.7.4), so offsets count through all buffers of a kind.
//
// A Chain belongs to its Queue again after Push or Undo and must not be used
// then.
type Chain struct {
	mem      *memory.Memory
	queue    int
	head     uint16
	readable parts
	writable parts
}

// parts is the buffers of one kind. The sum of lengths cannot overflow: a
// chain has at most MaxQueueSize segments of less than 4 GiB.
type parts struct {
	segments []Segment
	length   uint64
}

func (p *parts) add(s Segment) {
	p.segments = append(p.segments, s)
	p.length += uint64(s.Length)
}

func (p *parts) reset() {
	p.segments = p.segments[:0]
	p.length = 0
}

// Head is the index of the chain's first descriptor, the driver's name for
// the request.
func (c *Chain) Head() uint16 { return c.head }

// ReadableLen is the number of bytes the device may read.
func (c *Chain) ReadableLen() uint64 { return c.readable.length }

// WritableLen is the number of bytes the device may write.
func (c *Chain) WritableLen() uint64 { return c.writable.length }

// ReadAt copies len(p) bytes from offset off of the readable buffers. It
// refuses a range that is not there completely with a *ProtocolError.
func (c *Chain) ReadAt(p []byte, off uint64) error {
	return c.each(&c.readable, "readable", off, uint64(len(p)), func(gpa, at, n uint64) error {
		return c.mem.ReadAt(p[at:at+n], gpa)
	})
}

// WriteAt copies p to offset off of the writable buffers. It refuses a range
// that is not there completely with a *ProtocolError and writes nothing then.
func (c *Chain) WriteAt(p []byte, off uint64) error {
	return c.each(&c.writable, "writable", off, uint64(len(p)), func(gpa, at, n uint64) error {
		return c.mem.WriteAt(p[at:at+n], gpa)
	})
}

// AccessReadable lends the n readable bytes from off to fn, piece by piece
// and in order, without a copy. A piece is valid until fn returns, and the
// guest may change it meanwhile: data may be moved from it, but not
// interpreted in place. The first error of fn ends the walk.
func (c *Chain) AccessReadable(off, n uint64, fn func(p []byte) error) error {
	return c.each(&c.readable, "readable", off, n, func(gpa, _, n uint64) error {
		return c.mem.Access(gpa, n, fn)
	})
}

// AccessWritable is AccessReadable for the bytes that the device may write.
func (c *Chain) AccessWritable(off, n uint64, fn func(p []byte) error) error {
	return c.each(&c.writable, "writable", off, n, func(gpa, _, n uint64) error {
		return c.mem.Access(gpa, n, fn)
	})
}

// EachWritable calls fn for each writable buffer, in order, with its
// guest-physical address and its length: for a device to which the buffers are
// what the request is about. They are RAM; their contents are not looked at.
func (c *Chain) EachWritable(fn func(gpa, n uint64) error) error {
	return c.each(&c.writable, "writable", 0, c.writable.length, func(gpa, _, n uint64) error {
		return fn(gpa, n)
	})
}

// each calls fn for the pieces of [off, off+n): their guest-physical address,
// their distance from off and their length.
func (c *Chain) each(p *parts, kind string, off, n uint64, fn func(gpa, at, n uint64) error) error {
	if off > p.length || n > p.length-off {
		return &ProtocolError{Queue: c.queue, Reason: fmt.Sprintf(
			"request %d has %d %s bytes, need %d at %d", c.head, p.length, kind, n, off)}
	}
	var at uint64
	for _, s := range p.segments {
		if at == n {
			break
		}
		length := uint64(s.Length)
		if off >= length {
			off -= length
			continue
		}
		piece := min(length-off, n-at)
		if err := fn(s.Address+off, at, piece); err != nil {
			return err
		}
		at += piece
		off = 0
	}
	return nil
}
