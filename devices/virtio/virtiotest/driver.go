package virtiotest

import (
	"encoding/binary"
	"fmt"
	"testing"
	"time"

	"github.com/forkvm/forkvm/devices"
	"github.com/forkvm/forkvm/devices/virtio"
	"github.com/forkvm/forkvm/vmm/memory"
)

// MemorySize is the RAM that NewMemory gives a guest.
const MemorySize = 32 << 20

// patience is how long the driver waits for a device before the test fails.
// It is meant for a stuck device, not for a slow host.
const patience = 20 * time.Second

// allFeatures is what the driver asks for if it is offered.
const allFeatures = ^uint64(0)

// Device is what is tested: a virtio device as its package's constructor
// returns it.
type Device interface {
	devices.Device
	devices.Handler
}

// Driver is the guest's side of one device. It is not safe for concurrent
// use. Its methods end the test when the device does not do what it must.
type Driver struct {
	tb        testing.TB
	Memory    *memory.Memory
	Device    Device
	Interrupt *Interrupt
	// Features is what was negotiated last.
	Features uint64
	// Queues are those set up since the last reset.
	Queues []*Queue
	next   uint64 // guest-physical address that Alloc gives out next
	resets uint64
	free   uint64 // the same when initialisation ended: behind the rings
}

// NewMemory returns MemorySize bytes of zeroed guest RAM that are closed at
// the end of the test.
func NewMemory(tb testing.TB) *memory.Memory {
	tb.Helper()
	mem, err := memory.New(memory.Config{Size: MemorySize})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := mem.Close(); err != nil {
			tb.Error(err)
		}
	})
	return mem
}

// NewDriver returns a driver that has not touched the device yet.
func NewDriver(tb testing.TB, mem *memory.Memory, dev Device, irq *Interrupt) *Driver {
	return &Driver{tb: tb, Memory: mem, Device: dev, Interrupt: irq, next: 1 << 20}
}

// Attach lets the driver go on with another device on the same memory, as a
// guest does that was saved and restored.
func (d *Driver) Attach(dev Device, irq *Interrupt) {
	d.Device, d.Interrupt = dev, irq
}

// ReadRegister reads a 32-bit register.
func (d *Driver) ReadRegister(offset uint64) uint32 {
	var b [4]byte
	d.Device.Read(offset, b[:])
	return binary.LittleEndian.Uint32(b[:])
}

// WriteRegister writes a 32-bit register.
func (d *Driver) WriteRegister(offset uint64, value uint32) {
	var b [4]byte
	binary.LittleEndian.PutUint32(b[:], value)
	d.Device.Write(offset, b[:])
}

// WriteAddress writes a 64-bit address to a pair of registers.
func (d *Driver) WriteAddress(low uint64, address uint64) {
	d.WriteRegister(low, uint32(address))
	d.WriteRegister(low+4, uint32(address>>32))
}

// Reset resets the device and forgets the queues and all memory given out.
func (d *Driver) Reset() {
	d.tb.Helper()
	d.WriteRegister(virtio.RegStatus, 0)
	if got := d.ReadRegister(virtio.RegStatus); got != 0 {
		d.tb.Fatalf("status after reset is %#x", got)
	}
	d.Queues = nil
	// The next rings are elsewhere: a device that remembers the old ones shows.
	d.resets++
	d.next = 1<<20 + d.resets%16<<14
}

// Offered returns the features that the device offers.
func (d *Driver) Offered() uint64 {
	d.WriteRegister(virtio.RegDeviceFeaturesSel, 0)
	low := d.ReadRegister(virtio.RegDeviceFeatures)
	d.WriteRegister(virtio.RegDeviceFeaturesSel, 1)
	return uint64(d.ReadRegister(virtio.RegDeviceFeatures))<<32 | uint64(low)
}

// AddStatus sets a status bit, as drivers do, and returns the status.
func (d *Driver) AddStatus(bit uint32) uint32 {
	d.WriteRegister(virtio.RegStatus, d.ReadRegister(virtio.RegStatus)|bit)
	return d.ReadRegister(virtio.RegStatus)
}

// SelectFeatures writes the features the driver wants.
func (d *Driver) SelectFeatures(features uint64) {
	for i := range uint32(2) {
		d.WriteRegister(virtio.RegDriverFeaturesSel, i)
		d.WriteRegister(virtio.RegDriverFeatures, uint32(features>>(32*i)))
	}
}

// Negotiate resets the device and goes on to FEATURES_OK with those of the
// wanted features that are offered.
func (d *Driver) Negotiate(want uint64) {
	d.tb.Helper()
	d.Reset()
	d.AddStatus(virtio.StatusAcknowledge)
	d.AddStatus(virtio.StatusDriver)
	d.Features = d.Offered() & (want | virtio.FeatureVersion1)
	d.SelectFeatures(d.Features)
	if got := d.AddStatus(virtio.StatusFeaturesOK); got&virtio.StatusFeaturesOK == 0 {
		d.tb.Fatalf("features %#x refused, status %#x", d.Features, got)
	}
}

// Start initialises the device with the wanted features and all of its queues
// in their largest size, up to DRIVER_OK.
func (d *Driver) Start(want uint64) {
	d.tb.Helper()
	d.Negotiate(want)
	for i := range uint32(64) {
		d.WriteRegister(virtio.RegQueueSel, i)
		limit := d.ReadRegister(virtio.RegQueueNumMax)
		if limit == 0 {
			break
		}
		d.SetupQueue(i, uint16(limit))
	}
	d.Go()
}

// Go sets DRIVER_OK.
func (d *Driver) Go() {
	d.tb.Helper()
	want := virtio.StatusAcknowledge | virtio.StatusDriver | virtio.StatusFeaturesOK | virtio.StatusDriverOK
	if got := d.AddStatus(virtio.StatusDriverOK); got != want {
		d.tb.Fatalf("status at the end of initialisation is %#x, want %#x", got, want)
	}
	d.free = d.next
}

// Recycle takes back all memory that was given out since Go. No request may be
// under way.
func (d *Driver) Recycle() { d.next = d.free }

// SetupQueue places a queue of n entries in memory and makes it ready. Queues
// are set up in the order of their indices.
func (d *Driver) SetupQueue(index uint32, n uint16) *Queue {
	d.tb.Helper()
	q := d.PlaceQueue(index, n)
	if !d.Describe(q) {
		d.tb.Fatalf("queue %d of size %d is not ready", index, n)
	}
	d.Queues = append(d.Queues, q)
	return q
}

// PlaceQueue chooses memory for a queue of n entries and clears it, without a
// word to the device.
func (d *Driver) PlaceQueue(index uint32, n uint16) *Queue {
	d.tb.Helper()
	q := &Queue{
		d:           d,
		Index:       index,
		Size:        n,
		Descriptors: d.Alloc(virtio.DescriptorSize*int(n), 16),
		Driver:      d.Alloc(int(virtio.DriverRingSize(n)), 2),
		Device:      d.Alloc(int(virtio.DeviceRingSize(n)), 4),
		eventIndex:  d.Features&virtio.FeatureEventIndex != 0,
	}
	for i := range n {
		q.free = append(q.free, n-1-i)
	}
	return q
}

// Describe writes the registers of a queue and reports whether the device
// says that it is ready.
func (d *Driver) Describe(q *Queue) bool {
	d.WriteRegister(virtio.RegQueueSel, q.Index)
	d.WriteRegister(virtio.RegQueueNum, uint32(q.Size))
	d.WriteAddress(virtio.RegQueueDescLow, q.Descriptors)
	d.WriteAddress(virtio.RegQueueDriverLow, q.Driver)
	d.WriteAddress(virtio.RegQueueDeviceLow, q.Device)
	d.WriteRegister(virtio.RegQueueReady, 1)
	return d.ReadRegister(virtio.RegQueueReady) == 1
}

// Alloc gives out n zeroed bytes of guest memory.
func (d *Driver) Alloc(n, alignment int) uint64 {
	d.tb.Helper()
	address := (d.next + uint64(alignment) - 1) &^ (uint64(alignment) - 1)
	d.next = address + uint64(n)
	d.Fill(address, make([]byte, n))
	return address
}

// Fill writes to guest memory.
func (d *Driver) Fill(address uint64, p []byte) {
	d.tb.Helper()
	if err := d.Memory.WriteAt(p, address); err != nil {
		d.tb.Fatal(err)
	}
}

// Fetch reads n bytes of guest memory.
func (d *Driver) Fetch(address uint64, n int) []byte {
	d.tb.Helper()
	p := make([]byte, n)
	if err := d.Memory.ReadAt(p, address); err != nil {
		d.tb.Fatal(err)
	}
	return p
}

// AwaitInterrupt waits for an edge, acknowledges what InterruptStatus says and
// returns it.
func (d *Driver) AwaitInterrupt() uint32 {
	d.tb.Helper()
	select {
	case <-d.Interrupt.C():
	case <-time.After(patience):
		d.tb.Fatalf("no interrupt from %s, status %#x", d.Device.ID(), d.ReadRegister(virtio.RegStatus))
	}
	return d.Acknowledge()
}

// Acknowledge reads InterruptStatus and acknowledges what it says.
func (d *Driver) Acknowledge() uint32 {
	reason := d.ReadRegister(virtio.RegInterruptStatus)
	d.WriteRegister(virtio.RegInterruptACK, reason)
	return reason
}

// Do makes one request in the queue, waits for it and checks it.
func (d *Driver) Do(q *Queue, r Request) {
	d.tb.Helper()
	q.Add(r.Buffers...)
	q.Kick()
	d.check(r, q.Wait())
}

func (d *Driver) check(r Request, u Used) {
	d.tb.Helper()
	if r.Check == nil {
		return
	}
	if err := r.Check(u.Written); err != nil {
		d.tb.Errorf("request %d came back wrong: %v", u.Head, err)
	}
}

// Buffer is one descriptor's worth of guest memory.
type Buffer struct {
	Address  uint64
	Length   uint32
	Writable bool
}

// Request is a legal request and what is right when it comes back.
type Request struct {
	Buffers []Buffer
	// Check, if not nil, looks at guest memory after the device gave the
	// request back with written bytes.
	Check func(written uint32) error
}

// String is for test output.
func (b Buffer) String() string {
	mode := "r"
	if b.Writable {
		mode = "w"
	}
	return fmt.Sprintf("%s[%#x+%#x]", mode, b.Address, b.Length)
}
