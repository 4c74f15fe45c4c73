package balloon

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/forkvm/forkvm/devices"
	"github.com/forkvm/forkvm/devices/virtio"
	"github.com/forkvm/forkvm/devices/virtio/virtiotest"
	"github.com/forkvm/forkvm/vmm/memory"
)

func TestContract(t *testing.T) {
	for name, queue := range map[string]int{"inflate": inflateQueue, "report": reportingQueue} {
		t.Run(name, func(t *testing.T) {
			virtiotest.Run(t, func(testing.TB) virtiotest.Subject {
				return virtiotest.Subject{
					DeviceID: virtio.DeviceBalloon,
					Queue:    queue,
					New: func(mem *memory.Memory, irq devices.Interrupt, state []byte) (virtiotest.Device, error) {
						return New(Config{ID: "balloon0", Memory: mem, Interrupt: irq, State: state})
					},
					Request: func(d *virtiotest.Driver, n int) virtiotest.Request {
						if queue == inflateQueue {
							return inflation(d, n)
						}
						return report(d, n)
					},
				}
			})
		})
	}
}

// pagesAt fills n pages of guest memory and returns the address.
func pagesAt(d *virtiotest.Driver, n int) uint64 {
	address := d.Alloc(n*PageSize, PageSize)
	d.Fill(address, bytes.Repeat([]byte{0xa5}, n*PageSize))
	return address
}

// inflation names two pages next to each other and one elsewhere.
func inflation(d *virtiotest.Driver, n int) virtiotest.Request {
	address := pagesAt(d, 3)
	numbers := binary.LittleEndian.AppendUint32(nil, uint32(address/PageSize))
	numbers = binary.LittleEndian.AppendUint32(numbers, uint32(address/PageSize)+1)
	list := d.Alloc(len(numbers), 4)
	d.Fill(list, numbers)
	return virtiotest.Request{
		Buffers: []virtiotest.Buffer{{Address: list, Length: uint32(len(numbers))}},
		Check: func(written uint32) error {
			if written != 0 {
				return fmt.Errorf("%d bytes written", written)
			}
			return wantPages(d, address, 0, 0, 0xa5)
		},
	}
}

// report has two pages in one buffer, or one in each of two. What the suite cuts
// into buffers of less than a page stays what it is.
func report(d *virtiotest.Driver, n int) virtiotest.Request {
	address := pagesAt(d, 2)
	buffers := []virtiotest.Buffer{{Address: address, Length: 2 * PageSize, Writable: true}}
	if n%2 == 1 {
		buffers = []virtiotest.Buffer{
			{Address: address, Length: PageSize, Writable: true},
			{Address: address + PageSize, Length: PageSize, Writable: true},
		}
	}
	return virtiotest.Request{
		Buffers: buffers,
		Check: func(written uint32) error {
			if written != 0 {
				return fmt.Errorf("%d bytes written", written)
			}
			for at := uint64(0); at < 2*PageSize; at += PageSize {
				if wantPages(d, address+at, 0) != nil && wantPages(d, address+at, 0xa5) != nil {
					return fmt.Errorf("page at %#x is neither zeros nor what it was", address+at)
				}
			}
			return nil
		},
	}
}

func wantPages(d *virtiotest.Driver, address uint64, values ...byte) error {
	for i, v := range values {
		if page := d.Fetch(address+uint64(i)*PageSize, PageSize); !bytes.Equal(page, bytes.Repeat([]byte{v}, PageSize)) {
			return fmt.Errorf("page %d at %#x starts with %x, want %#x", i, address, page[:4], v)
		}
	}
	return nil
}

func newDriver(t testing.TB, mem *memory.Memory, state []byte) (*virtiotest.Driver, *Device) {
	t.Helper()
	irq := virtiotest.NewInterrupt()
	dev, err := New(Config{ID: "balloon0", Memory: mem, Interrupt: irq, State: state,
		Report: func(err error) { t.Errorf("reported %v", err) }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dev.Close() })
	if err := dev.Resume(); err != nil {
		t.Fatal(err)
	}
	return virtiotest.NewDriver(t, mem, dev, irq), dev
}

// What the guest reports or puts into the balloon is zeros, over a snapshot's
// layer too, takes no memory, and is stored by no freeze.
func TestPagesAreGivenBack(t *testing.T) {
	base := virtiotest.NewMemory(t)
	const first, pages = 8 << 20, 600
	if err := base.WriteAt(bytes.Repeat([]byte{0x11}, pages*PageSize), first); err != nil {
		t.Fatal(err)
	}
	layer, err := base.Freeze()
	if err != nil {
		t.Fatal(err)
	}
	defer layer.Close()
	mem, err := memory.New(memory.Config{Size: virtiotest.MemorySize, Layers: []memory.Layer{layer}})
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	d, dev := newDriver(t, mem, nil)
	d.Start(^uint64(0))
	d.Fill(first, bytes.Repeat([]byte{0x22}, pages/2*PageSize)) // half of them private

	d.Do(d.Queues[reportingQueue], virtiotest.Request{Buffers: []virtiotest.Buffer{
		{Address: first, Length: 512 * PageSize, Writable: true}}})
	list := d.Alloc(4, 4)
	d.Fill(list, binary.LittleEndian.AppendUint32(nil, first/PageSize+512))
	d.Do(d.Queues[inflateQueue], virtiotest.Request{Buffers: []virtiotest.Buffer{{Address: list, Length: 4}}})

	if err := wantPages(d, first+510*PageSize, 0, 0, 0, 0x11); err != nil {
		t.Error(err)
	}
	private, err := mem.Private()
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range private {
		if e.Start+e.Count > first/PageSize && e.Start < first/PageSize+pages {
			t.Errorf("pages %d+%d are private", e.Start, e.Count)
		}
	}
	cut, err := mem.Freeze()
	if err != nil {
		t.Fatal(err)
	}
	defer cut.Close()
	found := false
	for _, e := range cut.Extents {
		if e.Start == first/PageSize {
			found = e.Count == 513 && e.Offset == memory.ZeroExtent
		}
	}
	if !found {
		t.Errorf("extents %+v, want zeros for %d+513", cut.Extents, first/PageSize)
	}
	if s := dev.Stats(); s.Reported != 512*PageSize || s.Inflated != 1 {
		t.Errorf("stats %+v", s)
	}
}

func TestTarget(t *testing.T) {
	mem := virtiotest.NewMemory(t)
	d, dev := newDriver(t, mem, nil)
	d.Start(^uint64(0))
	dev.SetTarget(100)
	if reason := d.AwaitInterrupt(); reason&virtio.InterruptConfigChange == 0 {
		t.Errorf("interrupt status %#x", reason)
	}
	target := func(dev virtiotest.Device) uint32 {
		var b [4]byte
		dev.Read(virtio.RegConfig, b[:])
		return binary.LittleEndian.Uint32(b[:])
	}
	if got := target(dev); got != 100 {
		t.Errorf("the guest reads a target of %d", got)
	}
	if err := dev.Pause(); err != nil {
		t.Fatal(err)
	}
	state, err := dev.Save()
	if err != nil {
		t.Fatal(err)
	}
	_, clone := newDriver(t, mem, state)
	if got := target(clone); got != 100 || clone.Stats().Target != 100 {
		t.Errorf("the clone's guest reads a target of %d", got)
	}
}

func TestBadState(t *testing.T) {
	mem := virtiotest.NewMemory(t)
	_, dev := newDriver(t, mem, nil)
	dev.Pause()
	state, err := dev.Save()
	if err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{`{"version":2,"target":0}`, `{"version":1,"target":-1}`, `{"version":1,"other":0}`, `null`, `[]`} {
		s := bytes.Replace(state, []byte(`{"version":1,"target":0}`), []byte(bad), 1)
		if d, err := New(Config{ID: "balloon0", Memory: mem, Interrupt: virtiotest.NewInterrupt(), State: s}); err == nil {
			d.Close()
			t.Errorf("state %s was accepted", bad)
		}
	}
}

// FuzzAddresses has a hostile driver name any pages and ranges. What it names may
// become zeros, in its own memory; the device goes on.
func FuzzAddresses(f *testing.F) {
	f.Add([]byte{0, 0, 0, 0, 255, 255, 255, 255}, uint64(0), uint32(4096))
	f.Add([]byte{0xff, 0x1f, 0, 0, 0, 0x20, 0, 0, 1}, uint64(virtiotest.MemorySize-4096), uint32(4096))
	f.Add([]byte{}, uint64(0xd0000000), uint32(1<<31))
	f.Add([]byte{1, 2, 3}, ^uint64(4095), uint32(8192))
	mem := virtiotest.NewMemory(f)
	f.Fuzz(func(t *testing.T, numbers []byte, address uint64, length uint32) {
		irq := virtiotest.NewInterrupt()
		dev, err := New(Config{ID: "balloon0", Memory: mem, Interrupt: irq})
		if err != nil {
			t.Fatal(err)
		}
		defer dev.Close()
		if err := dev.Resume(); err != nil {
			t.Fatal(err)
		}
		d := virtiotest.NewDriver(t, mem, dev, irq)
		d.Start(^uint64(0))
		if n := min(len(numbers), 1<<16); n > 0 {
			list := d.Alloc(n, 1)
			d.Fill(list, numbers[:n])
			d.Queues[inflateQueue].Add(virtiotest.Buffer{Address: list, Length: uint32(n)})
			d.Queues[inflateQueue].ForceKick()
		}
		d.Queues[reportingQueue].Add(virtiotest.Buffer{Address: address, Length: length, Writable: true})
		d.Queues[reportingQueue].ForceKick()
		if err := dev.Pause(); err != nil {
			t.Fatal(err)
		}
		if err := dev.Resume(); err != nil {
			t.Fatal(err)
		}
		d.Start(^uint64(0))
		d.Do(d.Queues[reportingQueue], report(d, 0))
	})
}
