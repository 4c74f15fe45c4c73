package blk

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/forkvm/forkvm/devices"
	"github.com/forkvm/forkvm/devices/virtio"
	"github.com/forkvm/forkvm/devices/virtio/virtiotest"
	"github.com/forkvm/forkvm/vmm/memory"
)

const all = ^uint64(0)

// TestContract alternates between writes and reads of what was written.
func TestContract(t *testing.T) {
	virtiotest.Run(t, func(testing.TB) virtiotest.Subject {
		backend := newRAM(1 << 20)
		return virtiotest.Subject{
			DeviceID: virtio.DeviceBlock,
			New: func(mem *memory.Memory, irq devices.Interrupt, state []byte) (virtiotest.Device, error) {
				return New(Config{ID: "blk0", Memory: mem, Interrupt: irq, Backend: backend, State: state})
			},
			Request: func(d *virtiotest.Driver, n int) virtiotest.Request {
				sector := uint64(n) % 100 * 8
				// No two bytes near each other are equal, nor two sectors.
				want := make([]byte, 4096)
				for i := range want {
					want[i] = byte(i*7 + i/256 + n)
				}
				r := newRequest(d, TypeOut, sector, want, 0)
				if n%2 == 1 {
					backend.put(sector, want)
					r = newRequest(d, TypeIn, sector, nil, 4096)
				}
				return virtiotest.Request{Buffers: r.buffers, Check: func(written uint32) error {
					return r.check(written, StatusOK, want)
				}}
			},
		}
	})
}

// testRequest is a request in guest memory.
type testRequest struct {
	d       *virtiotest.Driver
	buffers []virtiotest.Buffer
	data    uint64 // where data is read to
	length  int
	status  uint64
}

// newRequest builds header, data to write, space for data to read, status.
func newRequest(d *virtiotest.Driver, kind uint32, sector uint64, out []byte, in int) testRequest {
	h := binary.LittleEndian.AppendUint32(nil, kind)
	h = binary.LittleEndian.AppendUint32(h, 0)
	h = binary.LittleEndian.AppendUint64(h, sector)
	r := testRequest{d: d, length: in, data: d.Alloc(in, 16), status: d.Alloc(1, 1)}
	add := func(address uint64, n int, writable bool) {
		if n > 0 {
			r.buffers = append(r.buffers, virtiotest.Buffer{Address: address, Length: uint32(n), Writable: writable})
		}
	}
	place := func(p []byte) uint64 {
		address := d.Alloc(len(p), 16)
		d.Fill(address, p)
		return address
	}
	add(place(h), len(h), false)
	add(place(out), len(out), false)
	add(r.data, in, true)
	add(r.status, 1, true)
	d.Fill(r.status, []byte{0xaa})
	return r
}

// check compares the outcome. want is the data read; nil for a request that
// reads none.
func (r testRequest) check(written uint32, status byte, want []byte) error {
	if got := r.d.Fetch(r.status, 1)[0]; got != status {
		return fmt.Errorf("status %d, want %d", got, status)
	}
	if status == StatusOK && written != uint32(r.length)+1 {
		return fmt.Errorf("%d bytes written, want %d", written, r.length+1)
	}
	if r.length > 0 && want != nil && !bytes.Equal(r.d.Fetch(r.data, r.length), want) {
		return errors.New("wrong data")
	}
	return nil
}

// guest is a started driver of a disk.
type guest struct {
	*virtiotest.Driver
	t       *testing.T
	backend *ram

	mu     sync.Mutex
	errors []error
}

// report takes an error from the device's goroutine.
func (g *guest) report(err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.errors = append(g.errors, err)
}

// reported returns all errors so far.
func (g *guest) reported() []error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.errors)
}

func newGuest(t *testing.T, backend *ram, features uint64, change func(*Config)) *guest {
	t.Helper()
	virtiotest.CheckLeaks(t)
	g := &guest{t: t, backend: backend}
	irq := virtiotest.NewInterrupt()
	c := Config{
		ID: "blk0", Memory: virtiotest.NewMemory(t), Interrupt: irq, Backend: backend,
		OnError: g.report,
	}
	if change != nil {
		change(&c)
	}
	dev, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dev.Close() })
	if err := dev.Resume(); err != nil {
		t.Fatal(err)
	}
	g.Driver = virtiotest.NewDriver(t, c.Memory, dev, irq)
	g.Start(features)
	return g
}

// do makes a request and returns its status and the data it read.
func (g *guest) do(kind uint32, sector uint64, out []byte, in int) (byte, []byte) {
	g.t.Helper()
	r := newRequest(g.Driver, kind, sector, out, in)
	q := g.Queues[0]
	q.Add(r.buffers...)
	q.Kick()
	q.Wait()
	return g.Fetch(r.status, 1)[0], g.Fetch(r.data, in)
}

// expect makes a request and compares its status.
func (g *guest) expect(want byte, kind uint32, sector uint64, out []byte, in int) []byte {
	g.t.Helper()
	status, data := g.do(kind, sector, out, in)
	if status != want {
		g.t.Errorf("type %d at sector %d: status %d, want %d", kind, sector, status, want)
	}
	return data
}

// ranges encodes a discard or write-zeroes payload.
func ranges(list ...sectorRange) []byte {
	var b []byte
	for _, x := range list {
		b = binary.LittleEndian.AppendUint64(b, x.sector)
		b = binary.LittleEndian.AppendUint32(b, x.count)
		b = binary.LittleEndian.AppendUint32(b, x.flags)
	}
	return b
}

// TestC6Sizes: odd sizes are refused with the size in the message, and
// capacity is right beyond 2 TiB.
func TestC6Sizes(t *testing.T) {
	for _, c := range []struct {
		size    int64
		sectors uint64
		ok      bool
	}{
		{0, 0, true},
		{511, 0, false},
		{512, 1, true},
		{513, 0, false},
		{123456789, 0, false},
		{2<<40 + 512, 1<<32 + 1, true},
		{-512, 0, false},
	} {
		t.Run(fmt.Sprint(c.size), func(t *testing.T) {
			dev, err := New(Config{
				ID: "blk0", Memory: virtiotest.NewMemory(t), Interrupt: virtiotest.NewInterrupt(),
				Backend: &ram{size: c.size},
			})
			if !c.ok {
				if err == nil || !strings.Contains(err.Error(), fmt.Sprint(c.size)) {
					t.Errorf("error is %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			var b [8]byte
			dev.Read(virtio.RegConfig, b[:])
			if got := binary.LittleEndian.Uint64(b[:]); got != c.sectors {
				t.Errorf("capacity is %d sectors, want %d", got, c.sectors)
			}
		})
	}
}

func TestC6Requests(t *testing.T) {
	const sectors = 64
	last := ranges(sectorRange{sectors - 1, 1, 0})
	buffer := make([]byte, SectorSize)
	cases := []struct {
		name   string
		kind   uint32
		sector uint64
		out    []byte
		in     int
		want   byte
	}{
		{"read last sector", TypeIn, sectors - 1, nil, 512, StatusOK},
		{"read all", TypeIn, 0, nil, sectors * 512, StatusOK},
		{"read over the end", TypeIn, sectors - 1, nil, 1024, StatusIOError},
		{"read at capacity", TypeIn, sectors, nil, 512, StatusIOError},
		{"read nothing at capacity", TypeIn, sectors, nil, 0, StatusIOError},
		{"read at 2^64-1", TypeIn, math.MaxUint64, nil, 512, StatusIOError},
		{"read at 2^63", TypeIn, 1 << 63, nil, 512, StatusIOError},
		{"read where the byte offset wraps", TypeIn, 1 << 55, nil, 512, StatusIOError},
		{"read nothing", TypeIn, 0, nil, 0, StatusIOError},
		{"read 511", TypeIn, 0, nil, 511, StatusIOError},
		{"read 513", TypeIn, 0, nil, 513, StatusIOError},
		{"write last sector", TypeOut, sectors - 1, buffer, 0, StatusOK},
		{"write at capacity", TypeOut, sectors, buffer, 0, StatusIOError},
		{"write at 2^64-1", TypeOut, math.MaxUint64, buffer, 0, StatusIOError},
		{"write nothing", TypeOut, 0, nil, 0, StatusIOError},
		{"write 511", TypeOut, 0, buffer[:511], 0, StatusIOError},
		{"write 513", TypeOut, 0, make([]byte, 513), 0, StatusIOError},
		{"flush", TypeFlush, 0, nil, 0, StatusOK},
		{"flush ignores the sector", TypeFlush, math.MaxUint64, nil, 0, StatusOK},
		{"id", TypeGetID, 0, nil, 20, StatusOK},
		{"id in 10 bytes", TypeGetID, 0, nil, 10, StatusIOError},
		{"id in 4096 bytes", TypeGetID, 0, nil, 4096, StatusOK},
		{"discard", TypeDiscard, 0, last, 0, StatusOK},
		{"discard without a range", TypeDiscard, 0, nil, 0, StatusIOError},
		{"discard with half a range", TypeDiscard, 0, last[:8], 0, StatusIOError},
		{"discard two", TypeDiscard, 0, ranges(sectorRange{0, 1, 0}, sectorRange{8, 2, 0}), 0, StatusOK},
		{"discard too many", TypeDiscard, 0, bytes.Repeat(last, maxRanges+1), 0, StatusIOError},
		{"discard nothing", TypeDiscard, 0, ranges(sectorRange{0, 0, 0}), 0, StatusIOError},
		{"discard over the end", TypeDiscard, 0, ranges(sectorRange{sectors - 1, 2, 0}), 0, StatusIOError},
		{"discard that wraps", TypeDiscard, 0, ranges(sectorRange{math.MaxUint64, 2, 0}), 0, StatusIOError},
		{"discard 2^32-1", TypeDiscard, 0, ranges(sectorRange{0, math.MaxUint32, 0}), 0, StatusIOError},
		{"discard with unmap", TypeDiscard, 0, ranges(sectorRange{0, 1, 1}), 0, StatusUnsupported},
		{"discard with an unknown flag", TypeDiscard, 0, ranges(sectorRange{0, 1, 2}), 0, StatusUnsupported},
		{"zero", TypeWriteZeroes, 0, last, 0, StatusOK},
		{"zero with unmap", TypeWriteZeroes, 0, ranges(sectorRange{3, 2, 1}), 0, StatusOK},
		{"zero with an unknown flag", TypeWriteZeroes, 0, ranges(sectorRange{0, 1, 0x80000001}), 0, StatusUnsupported},
		{"zero without a range", TypeWriteZeroes, 0, nil, 0, StatusIOError},
		{"zero that wraps", TypeWriteZeroes, 0, ranges(sectorRange{math.MaxUint64 - 1, 4, 0}), 0, StatusIOError},
		{"zero: second range is bad", TypeWriteZeroes, 0, ranges(sectorRange{0, 1, 0}, sectorRange{sectors, 1, 0}), 0, StatusIOError},
		{"zero: second range has a bad flag", TypeWriteZeroes, 0, ranges(sectorRange{0, 1, 0}, sectorRange{1, 1, 4}), 0, StatusUnsupported},
		{"secure erase", 14, 0, last, 0, StatusUnsupported},
		{"scsi", 2, 0, nil, 512, StatusUnsupported},
		{"lifetime", 10, 0, nil, 512, StatusUnsupported},
		{"type 99", 99, 0, nil, 512, StatusUnsupported},
		{"type 2^32-1", math.MaxUint32, 0, buffer, 0, StatusUnsupported},
		{"legacy barrier bit", TypeOut | 1<<31, 0, buffer, 0, StatusUnsupported},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			g := newGuest(t, newRAM(sectors*SectorSize).pattern(), all, nil)
			before := g.backend.snapshot()
			g.expect(c.want, c.kind, c.sector, c.out, c.in)
			if c.want != StatusOK && !bytes.Equal(before, g.backend.snapshot()) {
				t.Error("a refused request changed the disk")
			}
			if errs := g.reported(); len(errs) != 0 {
				t.Errorf("a request of the guest was reported as the host's error: %v", errs)
			}
			// Whatever that was, the next one works.
			if got := g.expect(StatusOK, TypeIn, 5, nil, 512); !bytes.Equal(got, before[5*512:6*512]) {
				t.Error("the next request read wrong data")
			}
		})
	}
}

// TestC6HugeRequest: more than 4 GiB in one request, in range of a large disk.
func TestC6HugeRequest(t *testing.T) {
	backend := &ram{size: 1 << 40}
	g := newGuest(t, backend, all, nil)
	r := newRequest(g.Driver, TypeIn, 0, nil, 512)
	buffers := r.buffers[:1:1]
	for range 250 {
		buffers = append(buffers, virtiotest.Buffer{Address: 8 << 20, Length: 20 << 20, Writable: true})
	}
	q := g.Queues[0]
	q.Add(append(buffers, r.buffers[2])...)
	q.Kick()
	if u := q.Wait(); u.Written != 0 {
		t.Errorf("%d bytes written", u.Written)
	}
	if err := r.check(0, StatusIOError, nil); err != nil {
		t.Error(err)
	}
	if calls := backend.callCount(); calls != 0 {
		t.Errorf("%d calls of the backend", calls)
	}
}

func TestReadOnly(t *testing.T) {
	g := newGuest(t, newRAM(8192).pattern(), all, func(c *Config) { c.ReadOnly = true })
	if g.Features&FeatureReadOnly == 0 || g.Features&(FeatureDiscard|FeatureWriteZeroes) != 0 {
		t.Errorf("features of a read-only disk are %#x", g.Features)
	}
	before := g.backend.snapshot()
	if got := g.expect(StatusOK, TypeIn, 1, nil, 512); !bytes.Equal(got, before[512:1024]) {
		t.Error("read wrong data")
	}
	g.expect(StatusIOError, TypeOut, 0, make([]byte, 512), 0)
	g.expect(StatusUnsupported, TypeDiscard, 0, ranges(sectorRange{0, 1, 0}), 0)
	g.expect(StatusUnsupported, TypeWriteZeroes, 0, ranges(sectorRange{0, 1, 0}), 0)
	g.expect(StatusOK, TypeFlush, 0, nil, 0)
	if flushes, _ := g.backend.flushed(); flushes != 0 || !bytes.Equal(before, g.backend.snapshot()) {
		t.Error("the disk was touched")
	}
}

func TestSerial(t *testing.T) {
	for _, serial := range []string{"", "disk-1", "12345678901234567890"} {
		g := newGuest(t, newRAM(512), all, func(c *Config) { c.Serial = serial })
		got := g.expect(StatusOK, TypeGetID, 0, nil, 20)
		if string(bytes.TrimRight(got, "\x00")) != serial {
			t.Errorf("serial is %q, want %q", got, serial)
		}
	}
	for _, serial := range []string{"123456789012345678901", "line\nfeed", "é"} {
		_, err := New(Config{ID: "blk0", Memory: virtiotest.NewMemory(t), Interrupt: virtiotest.NewInterrupt(), Backend: newRAM(512), Serial: serial})
		if err == nil {
			t.Errorf("serial %q was accepted", serial)
		}
	}
}

// TestC1Flush: at each completed flush all that was written before is stable,
// and there is one flush of the backend for each of the guest.
func TestC1Flush(t *testing.T) {
	g := newGuest(t, newRAM(64*SectorSize), all, nil)
	for n := range byte(20) {
		g.expect(StatusOK, TypeOut, uint64(n), bytes.Repeat([]byte{n + 1}, SectorSize), 0)
		g.expect(StatusOK, TypeFlush, 0, nil, 0)
		if flushes, _ := g.backend.flushed(); flushes != int(n)+1 {
			t.Fatalf("%d flushes after %d", flushes, n+1)
		}
		if !g.backend.isStable() {
			t.Fatalf("flush %d completed with unstable data", n)
		}
	}
	// In one batch: the flush covers the write in front of it.
	q := g.Queues[0]
	write := newRequest(g.Driver, TypeOut, 40, bytes.Repeat([]byte{0x77}, SectorSize), 0)
	flush := newRequest(g.Driver, TypeFlush, 0, nil, 0)
	q.Add(write.buffers...)
	q.Add(flush.buffers...)
	q.Kick()
	q.Wait()
	q.Wait()
	if _, stable := g.backend.flushed(); stable[40*SectorSize] != 0x77 {
		t.Error("the flush overtook a write")
	}
}

// TestC1WriteThrough: a driver without the flush feature is told that a write
// is done when it is stable.
func TestC1WriteThrough(t *testing.T) {
	g := newGuest(t, newRAM(64*SectorSize), all&^FeatureFlush, nil)
	for n := range byte(4) {
		g.expect(StatusOK, TypeOut, uint64(n), bytes.Repeat([]byte{n + 1}, SectorSize), 0)
		if !g.backend.isStable() {
			t.Fatal("write completed with unstable data")
		}
	}
	g.expect(StatusOK, TypeWriteZeroes, 0, ranges(sectorRange{0, 1, 0}), 0)
	if !g.backend.isStable() {
		t.Error("write-zeroes completed with unstable data")
	}
	g.expect(StatusUnsupported, TypeFlush, 0, nil, 0)
}

func TestRanges(t *testing.T) {
	g := newGuest(t, newRAM(64*SectorSize).pattern(), all, nil)
	want := g.backend.snapshot()
	copy(want[8*512:], make([]byte, 16*512))
	copy(want[40*512:], make([]byte, 512))
	g.expect(StatusOK, TypeWriteZeroes, 0, ranges(sectorRange{8, 16, 0}, sectorRange{40, 1, 1}), 0)
	if !bytes.Equal(g.backend.snapshot(), want) {
		t.Error("write-zeroes did not zero exactly its ranges")
	}
	copy(want[63*512:], bytes.Repeat([]byte{0xdd}, 512))
	g.expect(StatusOK, TypeDiscard, 0, ranges(sectorRange{63, 1, 0}), 0)
	if !bytes.Equal(g.backend.snapshot(), want) {
		t.Error("discard did not reach exactly its range")
	}
	// Without the features the types are unknown.
	g = newGuest(t, newRAM(512), all&^(FeatureDiscard|FeatureWriteZeroes), nil)
	g.expect(StatusUnsupported, TypeDiscard, 0, ranges(sectorRange{0, 1, 0}), 0)
	g.expect(StatusUnsupported, TypeWriteZeroes, 0, ranges(sectorRange{0, 1, 0}), 0)
}

// TestLayouts: any cut of the same bytes into buffers gives the same result,
// also where header and data or data and status share a buffer.
func TestLayouts(t *testing.T) {
	g := newGuest(t, newRAM(64*SectorSize), all, nil)
	q := g.Queues[0]
	data := bytes.Repeat([]byte("forkvm.."), 128)
	header := binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, uint64(TypeOut)), 2)
	for _, cuts := range [][]int{{}, {16}, {1}, {15}, {17}, {8, 16, 528}, {100, 101, 102, 103}, {1039}} {
		g.backend.put(0, make([]byte, 64*SectorSize))
		whole := append(bytes.Clone(header), data...)
		address, status := g.Alloc(len(whole), 1), g.Alloc(1, 1)
		g.Fill(address, whole)
		var buffers []virtiotest.Buffer
		from := 0
		for _, to := range append(cuts, len(whole)) {
			buffers = append(buffers, virtiotest.Buffer{Address: address + uint64(from), Length: uint32(to - from)})
			from = to
		}
		q.Add(append(buffers, virtiotest.Buffer{Address: status, Length: 1, Writable: true})...)
		q.Kick()
		q.Wait()
		if got := g.backend.snapshot()[1024:2048]; !bytes.Equal(got, data) || g.Fetch(status, 1)[0] != StatusOK {
			t.Errorf("cut at %v: wrong data or status", cuts)
		}
	}
	// Data and status in one buffer.
	h := g.Alloc(16, 1)
	g.Fill(h, binary.LittleEndian.AppendUint64(make([]byte, 8), 2))
	in := g.Alloc(1025, 1)
	g.Fill(in+1024, []byte{0xaa})
	q.Add(virtiotest.Buffer{Address: h, Length: 16}, virtiotest.Buffer{Address: in, Length: 1025, Writable: true})
	q.Kick()
	if u := q.Wait(); u.Written != 1025 {
		t.Errorf("%d bytes written, want 1025", u.Written)
	}
	if got := g.Fetch(in, 1025); !bytes.Equal(got[:1024], data) || got[1024] != StatusOK {
		t.Error("wrong data or status where they share a buffer")
	}
}

// TestC5BackendFails: the guest gets IOERR, the host gets the cause, and the
// device goes on when the backend does.
func TestC5BackendFails(t *testing.T) {
	g := newGuest(t, newRAM(64*SectorSize), all, nil)
	g.backend.setError(syscall.ENOSPC)
	sector := make([]byte, SectorSize)
	g.expect(StatusIOError, TypeOut, 3, sector, 0)
	g.expect(StatusIOError, TypeFlush, 0, nil, 0)
	g.expect(StatusIOError, TypeIn, 3, nil, SectorSize)
	g.expect(StatusIOError, TypeWriteZeroes, 0, ranges(sectorRange{0, 1, 0}), 0)
	errs := g.reported()
	if len(errs) != 4 {
		t.Fatalf("%d errors reported, want 4", len(errs))
	}
	for _, err := range errs {
		if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "blk0") {
			t.Errorf("reported %v", err)
		}
	}
	g.backend.setError(nil)
	g.expect(StatusOK, TypeOut, 3, sector, 0)
}

// TestC2PauseDuringRequest: a pause waits for the request that is with the
// backend; if that takes too long the device stays as it was.
func TestC2PauseDuringRequest(t *testing.T) {
	backend := newRAM(64 * SectorSize).pattern()
	backend.gate = make(chan struct{})
	g := newGuest(t, backend, all, func(c *Config) { c.DrainTimeout = 20 * time.Millisecond })
	q := g.Queues[0]
	var requests []testRequest
	for n := range uint64(3) {
		r := newRequest(g.Driver, TypeIn, n, nil, SectorSize)
		q.Add(r.buffers...)
		requests = append(requests, r)
	}
	q.ForceKick()
	// The worker may not have taken the first request yet.
	var err error
	for range 100 {
		if err = g.Device.Pause(); err != nil {
			break
		}
		if err := g.Device.Resume(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Millisecond)
	}
	if err == nil || !strings.Contains(err.Error(), "in flight") {
		t.Fatalf("pause with a request in flight: %v", err)
	}
	if _, err := g.Device.Save(); err == nil {
		t.Error("a running device was saved")
	}
	close(backend.gate)
	for n, r := range requests {
		q.Wait()
		if err := r.check(513, StatusOK, backend.data[n*512:(n+1)*512]); err != nil {
			t.Error(err)
		}
	}
	if err := g.Device.Pause(); err != nil {
		t.Fatal(err)
	}
}

// TestRestoreRefuses: a disk that the guest did not have.
func TestRestoreRefuses(t *testing.T) {
	g := newGuest(t, newRAM(64*SectorSize), all, nil)
	if err := g.Device.Pause(); err != nil {
		t.Fatal(err)
	}
	state, err := g.Device.Save()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name     string
		sectors  int
		readOnly bool
		state    string
		want     string
	}{
		{"smaller", 63, false, string(state), "63 sectors"},
		{"larger", 65, false, string(state), "65 sectors"},
		{"read-only", 64, true, string(state), ""},
		{"version", 64, false, strings.Replace(string(state), `"device":{"version":1`, `"device":{"version":2`, 1), "version 2"},
		{"no disk state", 64, false, strings.Replace(string(state), `"device":{"version":1,"sectors":64,"read_only":false}`, `"device":null`, 1), "version 0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := New(Config{
				ID: "blk0", Memory: g.Memory, Interrupt: virtiotest.NewInterrupt(),
				Backend: newRAM(c.sectors * SectorSize), ReadOnly: c.readOnly, State: []byte(c.state),
			})
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error is %v, want one with %q", err, c.want)
			}
		})
	}
}
