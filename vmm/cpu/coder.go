package cpu

import (
	"encoding/binary"
	"fmt"
	"io"
)

// A coder appends values to data, or takes them from its front. The same code
// describes a format in both directions, so that they cannot differ. After the
// first error it does nothing.
type coder struct {
	data   []byte
	decode bool
	err    error
}

func (c *coder) fail(err error) {
	if c.err == nil {
		c.err = err
	}
}

// bytes is for a fixed number of them.
func (c *coder) bytes(p []byte) {
	switch {
	case c.err != nil:
	case !c.decode:
		c.data = append(c.data, p...)
	case len(c.data) < len(p):
		c.fail(io.ErrUnexpectedEOF)
	default:
		c.data = c.data[copy(p, c.data):]
	}
}

func (c *coder) u8(v *uint8) {
	p := [1]byte{*v}
	c.bytes(p[:])
	*v = p[0]
}

func (c *coder) u16(v *uint16) {
	var p [2]byte
	binary.LittleEndian.PutUint16(p[:], *v)
	c.bytes(p[:])
	*v = binary.LittleEndian.Uint16(p[:])
}

func (c *coder) u32(v *uint32) {
	var p [4]byte
	binary.LittleEndian.PutUint32(p[:], *v)
	c.bytes(p[:])
	*v = binary.LittleEndian.Uint32(p[:])
}

func (c *coder) u64(v *uint64) {
	var p [8]byte
	binary.LittleEndian.PutUint64(p[:], *v)
	c.bytes(p[:])
	*v = binary.LittleEndian.Uint64(p[:])
}

// count is a number of things, each at least size bytes long in data. It is
// checked against what is there before anything is allocated.
func (c *coder) count(n, limit, size int) int {
	v := uint32(n)
	c.u32(&v)
	if c.err == nil && uint64(v) > uint64(limit) {
		c.fail(fmt.Errorf("%d entries, at most %d are possible", v, limit))
	}
	if c.err == nil && c.decode && uint64(v)*uint64(size) > uint64(len(c.data)) {
		c.fail(io.ErrUnexpectedEOF)
	}
	if c.err != nil {
		return 0
	}
	return int(v)
}

// blob is a length and that many bytes.
func (c *coder) blob(p *[]byte) {
	n := c.count(len(*p), maxBlob, 1)
	if c.decode && n > 0 {
		*p = make([]byte, n)
	}
	if c.err == nil {
		c.bytes(*p)
	}
}

// list is a number and that many elements, none of which is shorter than
// eight bytes.
func list[E any](c *coder, p *[]E, visit func(*coder, *E)) {
	const shortest = 8
	n := c.count(len(*p), maxEntries, shortest)
	if c.decode && n > 0 {
		*p = make([]E, n)
	}
	for i := range *p {
		if c.err != nil {
			return
		}
		visit(c, &(*p)[i])
	}
}
