package nic

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/forkvm/forkvm/devices"
	"github.com/forkvm/forkvm/devices/virtio"
	"github.com/forkvm/forkvm/devices/virtio/virtiotest"
	"github.com/forkvm/forkvm/vmm/memory"
)

func subject(w *wire, queue int, request func(*virtiotest.Driver, int) virtiotest.Request) virtiotest.Subject {
	return virtiotest.Subject{
		DeviceID: virtio.DeviceNet,
		Queue:    queue,
		New: func(mem *memory.Memory, irq devices.Interrupt, state []byte) (virtiotest.Device, error) {
			return New(Config{Memory: mem, Interrupt: irq, Backend: w, MAC: testMAC, State: state})
		},
		Request: request,
	}
}

// Case F1 and F3 for both queues: the suite has the malformed chains and the register storms.
func TestContract(t *testing.T) {
	t.Run("transmit", func(t *testing.T) {
		virtiotest.Run(t, func(testing.TB) virtiotest.Subject {
			return subject(&wire{discard: true, state: "kept"}, queueTransmit, func(d *virtiotest.Driver, n int) virtiotest.Request {
				p := packed(header{}, pattern(60+n%100))
				at := d.Alloc(len(p), 1)
				d.Fill(at, p)
				return virtiotest.Request{
					Buffers: []virtiotest.Buffer{{Address: at, Length: headerSize}, {Address: at + headerSize, Length: uint32(len(p) - headerSize)}},
					Check: func(written uint32) error {
						if written != 0 {
							return fmt.Errorf("%d bytes written to a frame that was sent", written)
						}
						return nil
					},
				}
			})
		})
	})
	t.Run("receive", func(t *testing.T) {
		// A frame of 14 bytes fits each half of a request: what the suite spoils in one does not make it wait for more.
		frame := Frame{Data: pattern(ethernetHeader)}
		virtiotest.Run(t, func(testing.TB) virtiotest.Subject {
			return subject(&wire{endless: &frame}, queueReceive, func(d *virtiotest.Driver, _ int) virtiotest.Request {
				at := d.Alloc(80, 1)
				return virtiotest.Request{
					Buffers: []virtiotest.Buffer{{Address: at, Length: 40, Writable: true}, {Address: at + 40, Length: 40, Writable: true}},
					Check: func(written uint32) error {
						if written != headerSize+ethernetHeader || !bytes.Equal(d.Fetch(at+headerSize, ethernetHeader), frame.Data) {
							return fmt.Errorf("%d bytes: %x", written, d.Fetch(at, 40))
						}
						return nil
					},
				}
			})
		})
	})
}

// A device that is given another backend and address is, behind the restore, like a new one: the old one's frames and counts are not there.
func TestConnect(t *testing.T) {
	b := newBench(t, all)
	b.transmit(packed(header{}, pattern(60)))
	if err := b.device.Pause(); err != nil {
		t.Fatal(err)
	}
	state, err := b.device.Save()
	if err != nil {
		t.Fatal(err)
	}
	b.device.Disconnect()
	if err := b.device.Restore(state); err != nil {
		t.Fatal(err)
	}
	old, next, card := b.wire, &wire{}, MAC{2, 0, 0, 0, 0, 9}
	if err := b.device.Connect(next, MAC{1}); err == nil {
		t.Error("a card has the address of a group")
	}
	if err := b.device.Connect(next, card); err != nil {
		t.Fatal(err)
	}
	if err := b.device.Restore(state); err != nil {
		t.Fatal(err)
	}
	if err := b.device.Resume(); err != nil {
		t.Fatal(err)
	}
	b.transmit(packed(header{}, pattern(70)))
	buffers := b.offer(2000)
	next.give(Frame{Data: pattern(80)})
	if _, data, _ := b.collect(buffers); len(data) != 80 {
		t.Errorf("%d bytes came", len(data))
	}
	if sent := next.taken(); len(sent) != 1 || len(sent[0].Data) != 70 || len(old.taken()) != 1 || len(next.offloads) != 1 {
		t.Errorf("%d frames were sent, with %d negotiations", len(sent), len(next.offloads))
	}
	if c := b.device.Counters(); c.Sent != 1 || c.Received != 1 {
		t.Errorf("counted: %+v", c)
	}
	got := make([]byte, len(card))
	b.device.Read(virtio.RegConfig, got)
	if MAC(got) != card {
		t.Errorf("the driver reads %v", MAC(got))
	}
}

// Case D1: what the guest leaves undone reaches the backend as it was negotiated, or is dropped and counted.
func TestTransmit(t *testing.T) {
	long := pattern(60000)
	tests := []struct {
		name     string
		features uint64
		raw      []byte
		want     *Frame
		counter  func(Counters) uint64
	}{
		{"plain", all, packed(header{}, pattern(60)), &Frame{Data: pattern(60)}, nil},
		{"addresses only", all, packed(header{}, pattern(14)), &Frame{Data: pattern(14)}, nil},
		{"as long as the link", all, packed(header{}, pattern(1518)), &Frame{Data: pattern(1518)}, nil},
		{"longer than the link", all, packed(header{}, pattern(1519)), nil, func(c Counters) uint64 { return c.TooLong }},
		{"longer than any", all, packed(header{}, pattern(maxFrame+1)), nil, func(c Counters) uint64 { return c.TooLong }},
		{"13 bytes", all, packed(header{}, pattern(13)), nil, func(c Counters) uint64 { return c.Malformed }},
		{"no frame", all, packed(header{}, nil), nil, func(c Counters) uint64 { return c.Malformed }},
		{"half a header", all, make([]byte, 3), nil, func(c Counters) uint64 { return c.Malformed }},
		{"checksum", all, packed(header{flags: 1, checksumStart: 34, checksumOffset: 16}, pattern(60)),
			&Frame{Data: pattern(60), NeedsChecksum: true, ChecksumStart: 34, ChecksumOffset: 16}, nil},
		{"checksum at the end", all, packed(header{flags: 1, checksumStart: 42, checksumOffset: 16}, pattern(60)),
			&Frame{Data: pattern(60), NeedsChecksum: true, ChecksumStart: 42, ChecksumOffset: 16}, nil},
		{"checksum behind the end", all, packed(header{flags: 1, checksumStart: 43, checksumOffset: 16}, pattern(60)), nil,
			func(c Counters) uint64 { return c.Lied }},
		{"checksum far away", all, packed(header{flags: 1, checksumStart: 0xffff, checksumOffset: 0xffff}, pattern(60)), nil,
			func(c Counters) uint64 { return c.Lied }},
		{"checksum not negotiated", all &^ FeatureChecksum, packed(header{flags: 1, checksumStart: 34, checksumOffset: 16}, pattern(60)), nil,
			func(c Counters) uint64 { return c.Lied }},
		{"segments", all, packed(header{flags: 1, segmentation: 1, headerLength: 54, segmentSize: 1460, checksumStart: 34, checksumOffset: 16}, long),
			&Frame{Data: long, NeedsChecksum: true, ChecksumStart: 34, ChecksumOffset: 16, Segmentation: TCPv4, HeaderLength: 54, SegmentSize: 1460}, nil},
		{"segments of IPv6", all, packed(header{flags: 1, segmentation: 4, headerLength: 74, segmentSize: 1440, checksumStart: 54, checksumOffset: 16}, long),
			&Frame{Data: long, NeedsChecksum: true, ChecksumStart: 54, ChecksumOffset: 16, Segmentation: TCPv6, HeaderLength: 74, SegmentSize: 1440}, nil},
		{"segments not negotiated", all &^ FeatureHostTSO4, packed(header{flags: 1, segmentation: 1, headerLength: 54, segmentSize: 1460, checksumStart: 34, checksumOffset: 16}, long), nil,
			func(c Counters) uint64 { return c.Lied }},
		{"segments without checksums", all &^ FeatureChecksum, packed(header{segmentation: 1, headerLength: 54, segmentSize: 1460}, long), nil,
			func(c Counters) uint64 { return c.Lied }},
		{"segments of no bytes", all, packed(header{flags: 1, segmentation: 1, headerLength: 54, checksumStart: 34, checksumOffset: 16}, long), nil,
			func(c Counters) uint64 { return c.Lied }},
		{"headers longer than the frame", all, packed(header{flags: 1, segmentation: 1, headerLength: 61, segmentSize: 1, checksumStart: 34, checksumOffset: 16}, pattern(60)), nil,
			func(c Counters) uint64 { return c.Lied }},
		{"segments of UDP", all, packed(header{flags: 1, segmentation: 3, headerLength: 42, segmentSize: 1400, checksumStart: 34, checksumOffset: 6}, long), nil,
			func(c Counters) uint64 { return c.Lied }},
		{"segments with congestion marks", all, packed(header{flags: 1, segmentation: 0x81, headerLength: 54, segmentSize: 1460, checksumStart: 34, checksumOffset: 16}, long), nil,
			func(c Counters) uint64 { return c.Lied }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, tt.features)
			b.transmit(tt.raw)
			got := b.wire.taken()
			switch {
			case tt.want == nil:
				if len(got) != 0 || tt.counter(b.device.Counters()) != 1 {
					t.Errorf("%d frames sent, counters %+v", len(got), b.device.Counters())
				}
			case len(got) != 1:
				t.Fatalf("%d frames sent, counters %+v", len(got), b.device.Counters())
			default:
				if err := sameFrame(got[0], *tt.want); err != nil {
					t.Error(err)
				}
			}
			if err := b.alive(); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestReceive(t *testing.T) {
	b := newBench(t, all)
	buffers := b.offer(2000, 2000, 2000, 2000, 2000)
	b.wire.give(
		Frame{Data: pattern(60)},
		Frame{Data: pattern(4500), NeedsChecksum: true, ChecksumStart: 34, ChecksumOffset: 16, Segmentation: TCPv4, SegmentSize: 1460, HeaderLength: 54},
		Frame{Data: pattern(1514)},
	)
	h, data, used := b.collect(buffers)
	if (h != header{flags: headerDataValid, buffers: 1}) || !bytes.Equal(data, pattern(60)) {
		t.Errorf("got %+v with %d bytes", h, len(data))
	}
	buffers = buffers[used:]
	h, data, used = b.collect(buffers)
	want := header{flags: headerNeedsChecksum, segmentation: segmentTCPv4, headerLength: 54, segmentSize: 1460, checksumStart: 34, checksumOffset: 16, buffers: 3}
	if h != want || !bytes.Equal(data, pattern(4500)) {
		t.Errorf("got %+v with %d bytes", h, len(data))
	}
	buffers = buffers[used:]
	if h, data, _ = b.collect(buffers); h.buffers != 1 || !bytes.Equal(data, pattern(1514)) {
		t.Errorf("got %+v with %d bytes", h, len(data))
	}
	if c := b.device.Counters(); c.Received != 3 || c.Undeliverable != 0 {
		t.Errorf("counters %+v", c)
	}
}

// A frame for which there are not enough buffers waits, and no buffer is lost meanwhile.
func TestReceiveWaitsForBuffers(t *testing.T) {
	for _, features := range []uint64{all, all &^ virtio.FeatureEventIndex} {
		b := newBench(t, features)
		b.wire.give(Frame{Data: pattern(3000)}, Frame{Data: pattern(61)})
		buffers := b.offer(1000)
		buffers = append(buffers, b.offer(1000)...)
		if b.wire.left() != 2 {
			t.Error("a frame went without enough buffers")
		}
		buffers = append(buffers, b.offer(8, 1100, 100)...)
		h, data, used := b.collect(buffers)
		if h.buffers != 4 || !bytes.Equal(data, pattern(3000)) {
			t.Fatalf("got %+v with %d bytes", h, len(data))
		}
		if h, data, _ = b.collect(buffers[used:]); h.buffers != 1 || !bytes.Equal(data, pattern(61)) {
			t.Errorf("got %+v with %d bytes", h, len(data))
		}
	}
}

// What a guest can never take is dropped, and it keeps its buffers.
func TestReceiveUndeliverable(t *testing.T) {
	tests := []struct {
		name     string
		features uint64
		frame    Frame
		buffers  []int
	}{
		{"too long for one buffer", all &^ FeatureMergeableBuffers, Frame{Data: pattern(1514)}, []int{1000, 1000}},
		{"checksum not negotiated", all &^ FeatureGuestChecksum, Frame{Data: pattern(60), NeedsChecksum: true, ChecksumStart: 34, ChecksumOffset: 16}, []int{2000}},
		{"segments not negotiated", all &^ FeatureGuestTSO6, Frame{Data: pattern(3000), NeedsChecksum: true, Segmentation: TCPv6, SegmentSize: 1000}, []int{2000, 2000}},
		{"segments without checksums", all &^ FeatureGuestChecksum, Frame{Data: pattern(3000), NeedsChecksum: true, Segmentation: TCPv4, SegmentSize: 1000}, []int{2000, 2000}},
		{"too long for all buffers", all, Frame{Data: pattern(1514)}, slicesOf(2, queueSize)},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, tt.features)
			buffers := b.offer(tt.buffers...)
			b.wire.give(tt.frame)
			b.eventually("the frame is dropped", func() bool { return b.device.Counters().Undeliverable == 1 })
			if tt.buffers[0] < headerSize {
				return
			}
			b.wire.give(Frame{Data: pattern(60)})
			if _, data, _ := b.collect(buffers); !bytes.Equal(data, pattern(60)) {
				t.Errorf("the next frame has %d bytes", len(data))
			}
		})
	}
}

// slicesOf returns n sizes: one that holds a header, and small ones.
func slicesOf(size, n int) []int {
	sizes := []int{headerSize}
	for len(sizes) < n {
		sizes = append(sizes, size)
	}
	return sizes
}

// A buffer without room for a header comes back empty.
func TestReceiveTinyBuffer(t *testing.T) {
	b := newBench(t, all)
	buffers := b.offer(3, 100)
	b.wire.give(Frame{Data: pattern(60)})
	if u := b.rx.Wait(); u.Written != 0 {
		t.Errorf("%d bytes written to a buffer of 3", u.Written)
	}
	if _, data, _ := b.collect(buffers[1:]); !bytes.Equal(data, pattern(60)) {
		t.Errorf("got %d bytes", len(data))
	}
}

func TestOffloads(t *testing.T) {
	for features, want := range map[uint64]Offloads{
		all:                            {Checksum: true, TCP4: true, TCP6: true},
		all &^ FeatureGuestTSO4:        {Checksum: true, TCP6: true},
		all &^ FeatureGuestChecksum:    {},
		all &^ FeatureMergeableBuffers: {Checksum: true, TCP4: true, TCP6: true},
	} {
		b := newBench(t, features)
		if got := b.wire.offloads; len(got) != 1 || got[0] != want {
			t.Errorf("features %#x: backend hears %+v, want %+v", features, got, want)
		}
		// A device that goes on in another process tells the new backend.
		if err := b.device.Pause(); err != nil {
			t.Fatal(err)
		}
		state, err := b.device.Save()
		if err != nil {
			t.Fatal(err)
		}
		w := &wire{}
		clone, err := New(Config{Memory: b.Memory, Interrupt: virtiotest.NewInterrupt(), Backend: w, MAC: MAC{2, 0, 0, 0, 0, 9}, State: state})
		if err != nil {
			t.Fatal(err)
		}
		if len(w.offloads) != 1 || w.offloads[0] != want {
			t.Errorf("features %#x: the clone's backend hears %+v, want %+v", features, w.offloads, want)
		}
		if err := clone.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestSpace(t *testing.T) {
	b := newBench(t, all)
	p := make([]byte, 12)
	b.device.Read(virtio.RegConfig, p)
	if want := []byte{2, 0, 0, 0, 0, 1, 1, 0, 1, 0, 0xdc, 5}; !bytes.Equal(p, want) {
		t.Errorf("configuration space is %x, want %x", p, want)
	}
}

func TestNewRefuses(t *testing.T) {
	mem, irq := virtiotest.NewMemory(t), virtiotest.NewInterrupt()
	for name, tt := range map[string]struct {
		config Config
		want   string
	}{
		"no backend":   {Config{MAC: testMAC}, "no backend"},
		"no address":   {Config{Backend: &wire{}}, "00:00:00:00:00:00 is not"},
		"multicast":    {Config{Backend: &wire{}, MAC: MAC{1, 0, 0, 0, 0, 1}}, "01:00:00:00:00:01 is not"},
		"short MTU":    {Config{Backend: &wire{}, MAC: testMAC, MTU: 1279}, "MTU 1279"},
		"long MTU":     {Config{Backend: &wire{}, MAC: testMAC, MTU: 9001}, "MTU 9001"},
		"other MTU":    {Config{Backend: &wire{}, MAC: testMAC, MTU: 9000, State: stateOf(t)}, "MTU 9000, had 1500"},
		"other device": {Config{Backend: &wire{}, MAC: testMAC, State: []byte(`{"version":1,"device_id":4}`)}, "device"},
	} {
		tt.config.Memory, tt.config.Interrupt = mem, irq
		if _, err := New(tt.config); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: error %v, want %q", name, err, tt.want)
		}
	}
}

func stateOf(t *testing.T) []byte {
	t.Helper()
	dev, err := New(Config{Memory: virtiotest.NewMemory(t), Interrupt: virtiotest.NewInterrupt(), Backend: &wire{}, MAC: testMAC})
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	state, err := dev.Save()
	if err != nil {
		t.Fatal(err)
	}
	return state
}
