package virtiotest

import (
	"encoding/binary"
	"fmt"
	"time"

	"github.com/forkvm/forkvm/devices/virtio"
)

// Queue is the driver's side of a split queue. The exported fields may be
// changed before Driver.Describe, to place rings where they should not be.
type Queue struct {
	d           *Driver
	Index       uint32
	Size        uint16
	Descriptors uint64
	Driver      uint64
	Device      uint64

	eventIndex bool
	avail      uint16 // next entry of the available ring
	kicked     uint16 // avail at the last Kick
	used       uint16 // next entry of the used ring to look at
	free       []uint16
	chains     map[uint16][]uint16 // descriptors by head
}

// Descriptor is a raw entry of a descriptor table.
type Descriptor struct {
	Address uint64
	Length  uint32
	Flags   uint16
	Next    uint16
}

// Used is an entry of the used ring.
type Used struct {
	Head    uint32
	Written uint32
}

// Encode returns the descriptor as it is in memory.
func (d Descriptor) Encode() []byte {
	b := binary.LittleEndian.AppendUint64(nil, d.Address)
	b = binary.LittleEndian.AppendUint32(b, d.Length)
	b = binary.LittleEndian.AppendUint16(b, d.Flags)
	return binary.LittleEndian.AppendUint16(b, d.Next)
}

// Add makes one chain of the buffers available, without a notification, and
// returns its head.
func (q *Queue) Add(buffers ...Buffer) uint16 {
	q.d.tb.Helper()
	if len(buffers) > len(q.free) || len(buffers) == 0 {
		q.d.tb.Fatalf("add %d buffers to queue %d with %d free", len(buffers), q.Index, len(q.free))
	}
	ids := q.claim(len(buffers))
	for i, b := range buffers {
		d := Descriptor{Address: b.Address, Length: b.Length, Flags: flags(b)}
		if i+1 < len(buffers) {
			d.Flags |= virtio.DescriptorNext
			d.Next = ids[i+1]
		}
		q.WriteDescriptor(ids[i], d)
	}
	q.Publish(ids[0])
	return ids[0]
}

// AddIndirect makes the buffers available as an indirect chain.
func (q *Queue) AddIndirect(buffers ...Buffer) uint16 {
	q.d.tb.Helper()
	id := q.claim(1)[0]
	table := q.d.Alloc(virtio.DescriptorSize*len(buffers), 16)
	for i, b := range buffers {
		d := Descriptor{Address: b.Address, Length: b.Length, Flags: flags(b)}
		if i+1 < len(buffers) {
			d.Flags |= virtio.DescriptorNext
			d.Next = uint16(i + 1)
		}
		q.d.Fill(table+uint64(virtio.DescriptorSize*i), d.Encode())
	}
	q.WriteDescriptor(id, Descriptor{
		Address: table,
		Length:  uint32(virtio.DescriptorSize * len(buffers)),
		Flags:   virtio.DescriptorIndirect,
	})
	q.Publish(id)
	return id
}

func flags(b Buffer) uint16 {
	if b.Writable {
		return virtio.DescriptorWrite
	}
	return 0
}

func (q *Queue) claim(n int) []uint16 {
	at := len(q.free) - n
	ids := append([]uint16(nil), q.free[at:]...)
	q.free = q.free[:at]
	if q.chains == nil {
		q.chains = make(map[uint16][]uint16)
	}
	q.chains[ids[0]] = ids
	return ids
}

// WriteDescriptor writes an entry of the descriptor table as it is.
func (q *Queue) WriteDescriptor(i uint16, d Descriptor) {
	q.d.tb.Helper()
	q.d.Fill(q.Descriptors+uint64(i)*virtio.DescriptorSize, d.Encode())
}

// Publish makes chains available by their heads, whatever those are.
func (q *Queue) Publish(heads ...uint16) {
	q.d.tb.Helper()
	for _, head := range heads {
		q.store(q.Driver+4+2*uint64(q.avail%q.Size), head)
		q.avail++
	}
	q.SetAvailable(q.avail)
}

// SetAvailable writes the available index, whatever that is.
func (q *Queue) SetAvailable(index uint16) {
	q.d.tb.Helper()
	q.avail = index
	q.store(q.Driver+2, index)
}

// UsedIndex is how many chains the device has given back, modulo 2^16.
func (q *Queue) UsedIndex() uint16 { return q.load(q.Device + 2) }

// AvailEvent is the available index that the device asked to hear of.
func (q *Queue) AvailEvent() uint16 { return q.load(q.Device + 4 + 8*uint64(q.Size)) }

// UsedFlags is the device's flags, 1 for "do not notify".
func (q *Queue) UsedFlags() uint16 { return q.load(q.Device) }

// SuppressInterrupts tells the device not to interrupt (sections 2.7.7), with
// the event index by asking for an entry that is far away.
func (q *Queue) SuppressInterrupts() {
	if q.eventIndex {
		q.store(q.usedEvent(), q.used+0x8000)
		return
	}
	q.store(q.Driver, 1)
}

// Kick notifies the device unless it asked not to be, and reports whether it
// did.
func (q *Queue) Kick() bool {
	before := q.kicked
	q.kicked = q.avail
	wanted := q.UsedFlags()&1 == 0
	if q.eventIndex {
		wanted = q.avail-q.AvailEvent()-1 < q.avail-before
	}
	if wanted {
		q.ForceKick()
	}
	return wanted
}

// ForceKick notifies the device.
func (q *Queue) ForceKick() {
	q.d.WriteRegister(virtio.RegQueueNotify, q.Index)
}

// Poll takes the next chain that the device gave back, if there is one.
func (q *Queue) Poll() (Used, bool) {
	if q.UsedIndex() == q.used {
		return Used{}, false
	}
	entry := q.d.Fetch(q.Device+4+8*uint64(q.used%q.Size), 8)
	q.used++
	u := Used{binary.LittleEndian.Uint32(entry), binary.LittleEndian.Uint32(entry[4:])}
	if ids, ok := q.chains[uint16(u.Head)]; ok && u.Head <= 0xffff {
		delete(q.chains, uint16(u.Head))
		q.free = append(q.free, ids...)
	}
	return u, true
}

// Wait returns the next chain that the device gives back. It asks for an
// interrupt and relies on it.
func (q *Queue) Wait() Used {
	q.d.tb.Helper()
	deadline := time.After(patience)
	for {
		if u, ok := q.pollAndArm(); ok {
			return u
		}
		select {
		case <-q.d.Interrupt.C():
			q.d.Acknowledge()
		case <-deadline:
			q.d.tb.Fatalf("nothing came back: %v", q)
		}
	}
}

// pollAndArm asks for an interrupt for the next chain and looks once more, as
// section 2.7.10 demands.
func (q *Queue) pollAndArm() (Used, bool) {
	if u, ok := q.Poll(); ok {
		return u, true
	}
	if q.eventIndex {
		q.store(q.usedEvent(), q.used)
	} else {
		q.store(q.Driver, 0)
	}
	return q.Poll()
}

func (q *Queue) usedEvent() uint64 { return q.Driver + 4 + 2*uint64(q.Size) }

func (q *Queue) load(address uint64) uint16 {
	q.d.tb.Helper()
	v, err := q.d.Memory.ReadUint16(address)
	if err != nil {
		q.d.tb.Fatal(err)
	}
	return v
}

func (q *Queue) store(address uint64, v uint16) {
	q.d.tb.Helper()
	if err := q.d.Memory.WriteUint16(address, v); err != nil {
		q.d.tb.Fatal(err)
	}
}

// String says where both sides are.
func (q *Queue) String() string {
	return fmt.Sprintf("queue %d: available %d, used %d, seen %d, device status %#x",
		q.Index, q.avail, q.UsedIndex(), q.used, q.d.ReadRegister(virtio.RegStatus))
}
