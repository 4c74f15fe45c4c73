package devices

import (
	"bytes"
	"math"
	"sync"
	"testing"
)

// recorder remembers the last access and answers reads with its mark.
type recorder struct {
	mark   byte
	offset uint64
	wrote  []byte
}

func (r *recorder) Read(offset uint64, data []byte) {
	r.offset = offset
	for i := range data {
		data[i] = r.mark
	}
}

func (r *recorder) Write(offset uint64, data []byte) {
	r.offset, r.wrote = offset, bytes.Clone(data)
}

func TestRegister(t *testing.T) {
	type span struct{ base, size uint64 }
	there := []span{{0x1000, 0x1000}, {0x3000, 0x1000}, {math.MaxUint64 - 7, 8}}
	cases := []struct {
		name string
		span span
		ok   bool
	}{
		{"before all", span{0, 0x1000}, true},
		{"between", span{0x2000, 0x1000}, true},
		{"one byte between", span{0x2fff, 1}, true},
		{"after", span{0x4000, 1}, true},
		{"empty", span{0x8000, 0}, false},
		{"wraps", span{math.MaxUint64, 2}, false},
		{"same", span{0x1000, 0x1000}, false},
		{"inside", span{0x1800, 1}, false},
		{"around", span{0x0fff, 0x1002}, false},
		{"over the end", span{0x1fff, 1}, false},
		{"over the beginning", span{0x2001, 0x1000}, false},
		{"around two", span{0, 0x8000}, false},
		{"last byte of all", span{math.MaxUint64, 1}, false},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			b := NewBus()
			for _, s := range there {
				if err := b.Register(s.base, s.size, &recorder{}); err != nil {
					t.Fatal(err)
				}
			}
			if err := b.Register(c.span.base, c.span.size, &recorder{}); (err == nil) != c.ok {
				t.Errorf("Register(%#x, %#x) = %v", c.span.base, c.span.size, err)
			}
		})
	}
	if err := NewBus().Register(0, 1, nil); err == nil {
		t.Error("a nil handler was registered")
	}
}

func TestAccess(t *testing.T) {
	b := NewBus()
	low, high, top := &recorder{mark: 1}, &recorder{mark: 2}, &recorder{mark: 3}
	for _, r := range []struct {
		base, size uint64
		h          Handler
	}{{0x2000, 0x1000, high}, {0x1000, 0x1000, low}, {math.MaxUint64 - 3, 4, top}} {
		if err := b.Register(r.base, r.size, r.h); err != nil {
			t.Fatal(err)
		}
	}
	cases := []struct {
		name   string
		addr   uint64
		n      int
		want   *recorder
		offset uint64
	}{
		{"first byte", 0x1000, 1, low, 0},
		{"odd width", 0x1001, 3, low, 1},
		{"last bytes", 0x1ff8, 8, low, 0xff8},
		{"whole window", 0x2000, 0x1000, high, 0},
		{"top of the address space", math.MaxUint64 - 1, 2, top, 2},
		{"over a border between two windows", 0x1ffe, 4, nil, 0},
		{"over the end", 0x2fff, 2, nil, 0},
		{"from before", 0x0fff, 2, nil, 0},
		{"wraps", math.MaxUint64, 2, nil, 0},
		{"nobody below", 0, 4, nil, 0},
		{"nobody above", 0x3000, 4, nil, 0},
		{"empty", 0x1000, 0, nil, 0},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			got := make([]byte, c.n)
			if ok := b.Read(c.addr, got); ok != (c.want != nil) {
				t.Fatalf("Read = %v", ok)
			}
			mark := byte(0xff)
			if c.want != nil {
				mark = c.want.mark
			}
			if want := bytes.Repeat([]byte{mark}, c.n); !bytes.Equal(got, want) {
				t.Errorf("read % x, want % x", got, want)
			}
			if ok := b.Write(c.addr, got); ok != (c.want != nil) {
				t.Fatalf("Write = %v", ok)
			}
			if c.want != nil && (c.want.offset != c.offset || !bytes.Equal(c.want.wrote, got)) {
				t.Errorf("wrote % x at %#x, want % x at %#x", c.want.wrote, c.want.offset, got, c.offset)
			}
		})
	}
}

// TestRegisterDuringAccess is for the race detector: lookups go on while
// windows are added.
func TestRegisterDuringAccess(t *testing.T) {
	b := NewBus()
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for i := range uint64(2000) {
				b.Read(i*7%0x10000, make([]byte, 4))
			}
		})
	}
	for i := range uint64(64) {
		if err := b.Register((i*37%64)*0x100, 0x100, zeros{}); err != nil {
			t.Error(err)
		}
	}
	wg.Wait()
	for i := range uint64(64) {
		if !b.Write(i*0x100+0xfc, make([]byte, 4)) {
			t.Errorf("window %d is gone", i)
		}
	}
}

type zeros struct{}

func (zeros) Read(_ uint64, data []byte) { clear(data) }
func (zeros) Write(uint64, []byte)       {}

func BenchmarkBusRead(b *testing.B) {
	bus := NewBus()
	for i := range uint64(16) {
		if err := bus.Register(0xd0000000+i*0x1000, 0x1000, zeros{}); err != nil {
			b.Fatal(err)
		}
	}
	data := make([]byte, 4)
	b.ReportAllocs()
	for b.Loop() {
		bus.Read(0xd0007060, data)
	}
}
