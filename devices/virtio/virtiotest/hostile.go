package virtiotest

import (
	"fmt"
	"time"

	"github.com/forkvm/forkvm/devices/virtio"
)

// Addresses that are no RAM, or not enough of it, in a guest of NewMemory.
const (
	endOfMemory = uint64(MemorySize)
	inHole      = uint64(0xd0000000)
	wraps       = ^uint64(0) - 15
)

// hostileCase is one thing that no driver may do. The attack is on a started
// queue; the device has to take the entry, ask for a reset or find nothing to
// do, soon and without harm.
type hostileCase struct {
	name   string
	attack func(b *bench, q *Queue)
	// refused: the device must ask for a reset.
	refused bool
}

func testHostile(b *bench) {
	for _, c := range hostileCases() {
		b.Start(allFeatures)
		q := b.queue()
		b.Do(q, b.request(0))
		c.attack(b, q)
		q.ForceKick()
		b.survives(c)
	}
	for _, place := range overlaps {
		b.overlap(place)
	}
	b.withoutIndirect()
}

// survives checks that the device comes to rest, in the state it should be in,
// and serves a polite driver after a reset.
func (b *bench) survives(c hostileCase) {
	b.Helper()
	// Far more than a walk of bounded length needs on a busy host.
	b.settle(b.queue(), 5*time.Second)
	needsReset := b.needsReset()
	switch {
	case c.refused && !needsReset:
		b.Errorf("%s: the device did not ask for a reset: %v", c.name, b.queue())
	case needsReset && b.ReadRegister(virtio.RegInterruptStatus)&virtio.InterruptConfigChange == 0:
		b.Errorf("%s: the device asks for a reset and does not say so", c.name)
	case !needsReset && b.queue().UsedIndex() != b.queue().avail:
		b.Errorf("%s: the entry was neither taken nor refused: %v", c.name, b.queue())
	}
	// A broken device can be saved and stays as it is.
	status := b.ReadRegister(virtio.RegStatus)
	b.restore(b.save())
	b.must(b.Device.Resume())
	if got := b.ReadRegister(virtio.RegStatus); got != status {
		b.Errorf("%s: status %#x was restored as %#x", c.name, status, got)
	}
	b.works()
}

// hostileCases is the list for the descriptors and the available ring.
func hostileCases() []hostileCase {
	cases := []hostileCase{
		{"self loop", func(b *bench, q *Queue) {
			q.WriteDescriptor(0, Descriptor{b.Alloc(16, 1), 16, virtio.DescriptorNext, 0})
			q.Publish(0)
		}, true},
		{"loop of two", func(b *bench, q *Queue) {
			q.WriteDescriptor(0, Descriptor{b.Alloc(16, 1), 16, virtio.DescriptorNext, 1})
			q.WriteDescriptor(1, Descriptor{b.Alloc(16, 1), 16, virtio.DescriptorNext, 0})
			q.Publish(0)
		}, true},
		{"next out of the table", func(b *bench, q *Queue) {
			q.WriteDescriptor(0, Descriptor{b.Alloc(16, 1), 16, virtio.DescriptorNext, q.Size})
			q.Publish(0)
		}, true},
		{"next far out of the table", func(b *bench, q *Queue) {
			q.WriteDescriptor(0, Descriptor{b.Alloc(16, 1), 16, virtio.DescriptorNext, 65535})
			q.Publish(0)
		}, true},
		{"head out of the table", func(_ *bench, q *Queue) { q.Publish(q.Size) }, true},
		{"head far out of the table", func(_ *bench, q *Queue) { q.Publish(65535) }, true},
		{"available index too far ahead", func(_ *bench, q *Queue) { q.SetAvailable(q.avail + q.Size + 1) }, true},
		{"available index behind", func(_ *bench, q *Queue) { q.SetAvailable(q.avail - 1) }, true},
		{"same head many times", func(b *bench, q *Queue) {
			head := q.Add(b.request(1).Buffers...)
			for range q.Size - 1 {
				q.Publish(head)
			}
		}, false},
		{"writable before readable", func(b *bench, q *Queue) {
			q.Add(Buffer{b.Alloc(16, 1), 16, true}, Buffer{b.Alloc(16, 1), 16, false})
		}, true},
		{"total of more than 4 GiB", func(_ *bench, q *Queue) {
			for i := range q.Size {
				d := Descriptor{0, MemorySize, virtio.DescriptorNext, i + 1}
				if i == q.Size-1 {
					d.Flags = 0
				}
				q.WriteDescriptor(i, d)
			}
			q.Publish(0)
		}, false},
		{"total of more than 4 GiB, writable", func(b *bench, q *Queue) {
			// The whole of RAM except for what the device needs to answer.
			for i := range q.Size {
				d := Descriptor{MemorySize / 2, MemorySize / 2, virtio.DescriptorNext | virtio.DescriptorWrite, i + 1}
				if i == 0 {
					d = Descriptor{b.Alloc(64, 16), 64, virtio.DescriptorNext, 1}
				}
				if i == q.Size-1 {
					d.Flags = virtio.DescriptorWrite
				}
				q.WriteDescriptor(i, d)
			}
			q.Publish(0)
		}, false},
	}
	cases = append(cases, bufferCases()...)
	return append(cases, indirectCases()...)
}

// bufferCases spoil one buffer of a legal request at a time: its address, its
// length, its direction.
func bufferCases() []hostileCase {
	type spoil struct {
		name    string
		change  func(*Buffer)
		refused bool
	}
	spoils := []spoil{
		{"address 0", func(x *Buffer) { x.Address = 0 }, false},
		{"over the end of memory", func(x *Buffer) { x.Address, x.Length = endOfMemory-1, max(2, x.Length) }, true},
		{"at the end of memory", func(x *Buffer) { x.Address, x.Length = endOfMemory, max(1, x.Length) }, true},
		{"in a hole", func(x *Buffer) { x.Address, x.Length = inHole, max(1, x.Length) }, true},
		{"wrapping", func(x *Buffer) { x.Address, x.Length = wraps, max(32, x.Length) }, true},
		{"at the last byte", func(x *Buffer) { x.Address, x.Length = ^uint64(0), 1 }, true},
		{"length 0", func(x *Buffer) { x.Length = 0 }, false},
		{"length 1", func(x *Buffer) { x.Length = 1 }, false},
		{"length 3", func(x *Buffer) { x.Length = 3 }, false},
		{"one byte short", func(x *Buffer) { x.Length-- }, false},
		{"length 2^32-1", func(x *Buffer) { x.Length = 0xffffffff }, true},
		{"wrong direction", func(x *Buffer) { x.Writable = !x.Writable }, false},
	}
	var cases []hostileCase
	for _, s := range spoils {
		for i := range 3 {
			cases = append(cases, hostileCase{
				name:    fmt.Sprintf("buffer %d: %s", i, s.name),
				refused: s.refused,
				attack: func(b *bench, q *Queue) {
					r := b.request(1)
					s.change(&r.Buffers[min(i, len(r.Buffers)-1)])
					q.Add(r.Buffers...)
				},
			})
		}
	}
	whole := func(name string, change func(r []Buffer) []Buffer) {
		cases = append(cases, hostileCase{name: name, attack: func(b *bench, q *Queue) {
			q.Add(change(b.request(1).Buffers)...)
		}})
	}
	whole("first buffer only", func(r []Buffer) []Buffer { return r[:1] })
	whole("last buffer only", func(r []Buffer) []Buffer { return r[len(r)-1:] })
	for _, s := range []struct {
		name   string
		change func(*Buffer)
	}{
		{"no lengths", func(x *Buffer) { x.Length = 0 }},
		{"nothing writable", func(x *Buffer) { x.Writable = false }},
		{"nothing readable", func(x *Buffer) { x.Writable = true }},
		{"all in one place", func(x *Buffer) { x.Address = 4096 }},
	} {
		whole(s.name, func(r []Buffer) []Buffer {
			for i := range r {
				s.change(&r[i])
			}
			return r
		})
	}
	for _, s := range []struct {
		name string
		at   func(q *Queue) uint64
	}{
		{"descriptors", func(q *Queue) uint64 { return q.Descriptors }},
		{"driver ring", func(q *Queue) uint64 { return q.Driver }},
		{"device ring", func(q *Queue) uint64 { return q.Device }},
	} {
		cases = append(cases, hostileCase{name: "data on the " + s.name, attack: func(b *bench, q *Queue) {
			r := b.request(1).Buffers
			for i := range r {
				// Zero-length buffers would leave the ring alone.
				if r[i].Writable {
					r[i].Address = s.at(q)
				}
			}
			q.Add(r...)
			// The ring is not what it was: whatever is found there is fine,
			// as long as the device can be stopped.
			q.ForceKick()
			b.settle(q, 20*time.Millisecond)
			b.Start(allFeatures)
		}})
	}
	return cases
}

// indirectCases break the rules of section 2.7.5.3.
func indirectCases() []hostileCase {
	table := func(name string, address, length uint64, flags uint16) hostileCase {
		return hostileCase{name, func(_ *bench, q *Queue) {
			q.WriteDescriptor(0, Descriptor{address, uint32(length), virtio.DescriptorIndirect | flags, 1})
			q.WriteDescriptor(1, Descriptor{4096, 16, 0, 0})
			q.Publish(0)
		}, true}
	}
	entries := func(name string, refused bool, table ...Descriptor) hostileCase {
		return hostileCase{name, func(b *bench, q *Queue) {
			at := b.Alloc(virtio.DescriptorSize*len(table), 16)
			for i, d := range table {
				b.Fill(at+uint64(virtio.DescriptorSize*i), d.Encode())
			}
			q.WriteDescriptor(0, Descriptor{at, uint32(virtio.DescriptorSize * len(table)), virtio.DescriptorIndirect, 0})
			q.Publish(0)
		}, refused}
	}
	return []hostileCase{
		table("indirect table of no bytes", 4096, 0, 0),
		table("indirect table of 15 bytes", 4096, 15, 0),
		table("indirect table of 17 bytes", 4096, 17, 0),
		table("indirect table of 4 GiB", 4096, 0xfffffff0, 0),
		table("indirect table over the end of memory", endOfMemory-16, 32, 0),
		table("indirect table in a hole", inHole, 16, 0),
		table("indirect table that wraps", wraps, 32, 0),
		table("indirect with a next", 4096, 16, virtio.DescriptorNext),
		entries("indirect in indirect", true, Descriptor{4096, 16, virtio.DescriptorIndirect, 0}),
		entries("indirect loop", true, Descriptor{4096, 16, virtio.DescriptorNext, 0}),
		entries("indirect next out of the table", true, Descriptor{4096, 16, virtio.DescriptorNext, 1}),
		entries("indirect with a bad address", true, Descriptor{inHole, 16, 0, 0}),
		entries("indirect with an empty buffer", false, Descriptor{4096, 0, 0, 0}),
	}
}

// overlaps are places for rings that make them the same memory.
var overlaps = []struct {
	name  string
	place func(q *Queue)
}{
	{"driver ring is device ring", func(q *Queue) { q.Driver = q.Device }},
	{"descriptors are driver ring", func(q *Queue) { q.Driver = q.Descriptors }},
	{"descriptors are device ring", func(q *Queue) { q.Device = q.Descriptors }},
	{"all the same", func(q *Queue) { q.Device, q.Driver = q.Descriptors, q.Descriptors }},
	{"device ring on the available index", func(q *Queue) { q.Device = q.Driver &^ 3 }},
}

// overlap lets rings lie on each other. The device may find anything in them.
func (b *bench) overlap(c struct {
	name  string
	place func(q *Queue)
}) {
	b.Helper()
	b.Negotiate(allFeatures)
	q := b.PlaceQueue(uint32(b.Subject.Queue), b.maxSize(b.Subject.Queue))
	c.place(q)
	if !b.Describe(q) {
		b.Errorf("%s: the ring was refused", c.name)
		return
	}
	b.AddStatus(virtio.StatusDriverOK)
	for i := range q.Size {
		q.WriteDescriptor(i, Descriptor{q.Descriptors, 64, uint16(i) & 3, i + 1})
	}
	for i := range uint16(16) {
		q.Publish(i)
		q.ForceKick()
	}
	b.settle(q, 20*time.Millisecond)
	b.works()
}

func (b *bench) maxSize(queue int) uint16 {
	b.WriteRegister(virtio.RegQueueSel, uint32(queue))
	return uint16(b.ReadRegister(virtio.RegQueueNumMax))
}

// withoutIndirect uses an indirect descriptor that was not negotiated.
func (b *bench) withoutIndirect() {
	b.Helper()
	b.Start(allFeatures &^ virtio.FeatureIndirectDescriptors)
	b.queue().AddIndirect(b.request(0).Buffers...)
	b.queue().ForceKick()
	b.survives(hostileCase{name: "indirect not negotiated", refused: true})
}
