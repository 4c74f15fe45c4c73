package virtio

import "encoding/binary"

// descriptor is one entry of a descriptor table (section 2.7.5), copied out
// of guest memory.
type descriptor struct {
	address uint64
	length  uint32
	flags   uint16
	next    uint16
}

// table is where a walk reads descriptors: the queue's own table or an
// indirect one. entries is below 2^28.
type table struct {
	address  uint64
	entries  uint32
	indirect bool
}

// walk collects the buffers of the chain that begins at c.head. Each
// descriptor is copied once; what it says is checked on the copy. At most
// q.max descriptors are followed, so loops end.
func (q *Queue) walk(c *Chain) error {
	t := table{address: q.descriptors, entries: uint32(q.size)}
	index := uint32(c.head)
	for steps := 0; steps < int(q.max); steps++ {
		d, err := q.descriptor(t, index)
		if err != nil {
			return err
		}
		if d.flags&DescriptorIndirect != 0 {
			if t, err = q.indirectTable(t, d); err != nil {
				return err
			}
			// The table is not a buffer and does not count as a step.
			index, steps = 0, steps-1
			continue
		}
		if err := q.addSegment(c, d); err != nil {
			return err
		}
		if d.flags&DescriptorNext == 0 {
			return nil
		}
		index = uint32(d.next)
	}
	return q.violation("chain at %d has more than %d descriptors or a loop", c.head, q.max)
}

func (q *Queue) descriptor(t table, index uint32) (descriptor, error) {
	if index >= t.entries {
		return descriptor{}, q.violation("descriptor %d in a table of %d", index, t.entries)
	}
	var b [DescriptorSize]byte
	if err := q.mem.ReadAt(b[:], t.address+DescriptorSize*uint64(index)); err != nil {
		return descriptor{}, err
	}
	return descriptor{
		address: binary.LittleEndian.Uint64(b[0:]),
		length:  binary.LittleEndian.Uint32(b[8:]),
		flags:   binary.LittleEndian.Uint16(b[12:]),
		next:    binary.LittleEndian.Uint16(b[14:]),
	}, nil
}

// indirectTable is the table that d refers to. Section 2.7.5.3: it may follow
// ordinary descriptors, is the last of them, has no indirect descriptors of
// its own, and the write flag beside it means nothing.
func (q *Queue) indirectTable(from table, d descriptor) (table, error) {
	switch {
	case !q.indirect:
		return table{}, q.violation("indirect descriptor was not negotiated")
	case from.indirect:
		return table{}, q.violation("indirect descriptor in an indirect table")
	case d.flags&DescriptorNext != 0:
		return table{}, q.violation("indirect descriptor with a next one")
	case d.length == 0 || d.length%DescriptorSize != 0:
		return table{}, q.violation("indirect table of %d bytes", d.length)
	}
	if err := q.mem.Check(d.address, uint64(d.length)); err != nil {
		return table{}, q.violation("indirect table: %v", err)
	}
	return table{address: d.address, entries: d.length / DescriptorSize, indirect: true}, nil
}

// addSegment adds a buffer; an empty one is legal and dropped.
func (q *Queue) addSegment(c *Chain, d descriptor) error {
	to := &c.readable
	if d.flags&DescriptorWrite != 0 {
		to = &c.writable
	} else if c.writable.length != 0 {
		return q.violation("readable buffer after a writable one in chain %d", c.head)
	}
	if d.length == 0 {
		return nil
	}
	if err := q.mem.Check(d.address, uint64(d.length)); err != nil {
		return q.violation("buffer of chain %d: %v", c.head, err)
	}
	to.add(Segment{Address: d.address, Length: d.length})
	return nil
}
