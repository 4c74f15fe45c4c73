package virtio_test

import (
	"encoding/binary"
	"os"
	"testing"

	"github.com/forkvm/forkvm/devices/virtio"
	"github.com/forkvm/forkvm/devices/virtio/virtiotest"
	"github.com/forkvm/forkvm/vmm/memory"
)

// operation encodes one register write for FuzzTransport.
func operation(b []byte, offset uint16, value uint32) []byte {
	b = binary.LittleEndian.AppendUint16(b, offset)
	return binary.LittleEndian.AppendUint32(b, value)
}

// politeDriver is a complete initialisation in operations.
func politeDriver() []byte {
	var b []byte
	b = operation(b, virtio.RegStatus, 1)
	b = operation(b, virtio.RegStatus, 3)
	b = operation(b, virtio.RegDriverFeaturesSel, 1)
	b = operation(b, virtio.RegDriverFeatures, 1)
	b = operation(b, virtio.RegStatus, 11)
	for i := range uint32(2) {
		b = operation(b, virtio.RegQueueSel, i)
		b = operation(b, virtio.RegQueueNum, 4)
		b = operation(b, virtio.RegQueueDescLow, 0x10000)
		b = operation(b, virtio.RegQueueDriverLow, 0x20000)
		b = operation(b, virtio.RegQueueDeviceLow, 0x30000)
		b = operation(b, virtio.RegQueueReady, 1)
	}
	b = operation(b, virtio.RegStatus, 15)
	return operation(b, virtio.RegQueueNotify, 0)
}

// FuzzTransport writes registers, six bytes an operation. Whatever state that
// leads to can be paused, saved and restored to the same, and a polite driver
// is served after a reset.
func FuzzTransport(f *testing.F) {
	polite := politeDriver()
	f.Add(polite)
	f.Add(polite[:len(polite)/2])
	f.Add(operation(polite, virtio.RegStatus, 0))
	f.Add(operation(polite, virtio.RegStatus, 128|15))
	f.Add(operation(polite[:60], virtio.RegQueueReady, 1))
	f.Fuzz(func(t *testing.T, operations []byte) {
		s := newSetup(t, func(c *virtio.Config) { c.Report = nil })
		for ; len(operations) >= 6; operations = operations[6:] {
			offset := uint64(binary.LittleEndian.Uint16(operations)) % virtio.WindowSize
			s.WriteRegister(offset, binary.LittleEndian.Uint32(operations[2:]))
			s.ReadRegister(offset)
		}
		state := s.save(t)
		e := &echo{}
		irq := virtiotest.NewInterrupt()
		dev, err := virtio.New(echoConfig(e, s.Memory, irq, state))
		if err != nil {
			t.Fatalf("a driver got here and it cannot be restored: %v\n%s", err, state)
		}
		defer dev.Close()
		again, err := dev.Save()
		if err != nil || string(again) != string(state) {
			t.Fatalf("saved again as\n%s\nwas\n%s (%v)", again, state, err)
		}
		if err := dev.Resume(); err != nil {
			t.Fatal(err)
		}
		s.Attach(dev, irq)
		s.Start(all)
		s.Do(s.Queues[0], echoRequest(s.Driver, 0))
	})
}

// FuzzState restores from noise: it is refused, or the device can be run,
// paused and saved, and serves a polite driver.
func FuzzState(f *testing.F) {
	golden, err := os.ReadFile("testdata/state.json")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(golden)
	f.Add([]byte(`{"version":1,"device_id":42,"queues":[{},{}],"device":{"version":1}}`))
	f.Add([]byte(`{"version":1,"device_id":42,"status":255,"queues":[{"ready":true},{}],"device":{"version":1}}`))
	f.Add([]byte(`{"version":2}`))
	mem, err := memory.New(memory.Config{Size: virtiotest.MemorySize})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { mem.Close() })
	f.Fuzz(func(t *testing.T, state []byte) {
		irq := virtiotest.NewInterrupt()
		dev, err := virtio.New(echoConfig(&echo{}, mem, irq, state))
		if err != nil {
			return
		}
		defer dev.Close()
		if _, err := dev.Save(); err != nil {
			t.Fatal(err)
		}
		if err := dev.Resume(); err != nil {
			t.Fatal(err)
		}
		d := virtiotest.NewDriver(t, mem, dev, irq)
		d.WriteRegister(virtio.RegQueueNotify, 0)
		if err := dev.Pause(); err != nil {
			t.Fatal(err)
		}
		if err := dev.Resume(); err != nil {
			t.Fatal(err)
		}
		d.Start(all)
		d.Do(d.Queues[0], echoRequest(d, 0))
	})
}

// BenchmarkRoundTrip is one request from the driver's kick to its interrupt.
func BenchmarkRoundTrip(b *testing.B) {
	s := newSetup(b, nil)
	s.Start(all)
	r := echoRequest(s.Driver, 0)
	b.ReportAllocs()
	for b.Loop() {
		s.Do(s.Queues[0], r)
	}
}
