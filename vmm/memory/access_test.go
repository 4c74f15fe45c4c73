package memory

import (
	"bytes"
	"errors"
	"os"
	"sync"
	"testing"
)

// RAM with a hole costs nothing to reserve, so the real layout is tested.
func TestAccessStaysInRAM(t *testing.T) {
	const gib = 1 << 30
	m := newMemory(t, Config{Size: 4 * gib})
	for _, c := range []struct {
		gpa, n uint64
		ok     bool
	}{
		{0, 1, true},
		{3*gib - 8, 8, true},
		{3*gib - 8, 9, false}, // into the hole
		{3 * gib, 1, false},
		{4*gib - 1, 1, false},
		{4*gib - 1, 2, false}, // out of the hole
		{4 * gib, 8, true},
		{5*gib - 8, 8, true},
		{5*gib - 8, 16, false},
		{5 * gib, 1, false},
		{^uint64(0), 1, false},
		{^uint64(0) - 7, 16, false}, // wraps around to RAM at 0
		{8, ^uint64(0), false},
		{4*gib + 8, ^uint64(0) - 4, false},
		{0, 0, true},
		{3 * gib, 0, false},
	} {
		err := m.Check(c.gpa, c.n)
		var outside *RangeError
		if (err == nil) != c.ok || err != nil && !errors.As(err, &outside) {
			t.Errorf("%#x, %d bytes: %v", c.gpa, c.n, err)
		}
		if err != nil && (outside.Address != c.gpa || outside.Length != c.n) {
			t.Errorf("%#x, %d bytes: error says %v", c.gpa, c.n, err)
		}
		if c.n > 64 {
			continue
		}
		p := make([]byte, c.n)
		called := false
		for name, got := range map[string]error{
			"ReadAt":  m.ReadAt(p, c.gpa),
			"WriteAt": m.WriteAt(p, c.gpa),
			"Access": m.Access(c.gpa, c.n, func(q []byte) error {
				called = true
				if len(q) != int(c.n) || cap(q) != int(c.n) {
					t.Errorf("%#x: lent %d bytes with room for %d", c.gpa, len(q), cap(q))
				}
				return nil
			}),
		} {
			if (got == nil) != c.ok {
				t.Errorf("%s(%#x, %d bytes): %v", name, c.gpa, c.n, got)
			}
		}
		if called != c.ok {
			t.Errorf("Access(%#x, %d bytes): called %v", c.gpa, c.n, called)
		}
	}
}

func TestNumbers(t *testing.T) {
	m := newMemory(t, Config{Size: testSize})
	for at := uint64(64); at < 80; at++ { // every alignment
		clear := bytes.Repeat([]byte{0xee}, 32)
		write(t, m, 56, clear)
		if err := m.WriteUint16(at, 0x1234); err != nil {
			t.Fatal(err)
		}
		if v, err := m.ReadUint16(at); v != 0x1234 || err != nil {
			t.Errorf("16 bits at %d: %#x, %v", at, v, err)
		}
		got := make([]byte, 4)
		m.ReadAt(got, at-1)
		if !bytes.Equal(got, []byte{0xee, 0x34, 0x12, 0xee}) {
			t.Errorf("16 bits at %d: memory is %x", at, got)
		}
		m.WriteUint32(at, 0x12345678)
		if v, err := m.ReadUint32(at); v != 0x12345678 || err != nil {
			t.Errorf("32 bits at %d: %#x, %v", at, v, err)
		}
		got = make([]byte, 6)
		m.ReadAt(got, at-1)
		if !bytes.Equal(got, []byte{0xee, 0x78, 0x56, 0x34, 0x12, 0xee}) {
			t.Errorf("32 bits at %d: memory is %x", at, got)
		}
		m.WriteUint64(at, 0x0123456789abcdef)
		if v, err := m.ReadUint64(at); v != 0x0123456789abcdef || err != nil {
			t.Errorf("64 bits at %d: %#x, %v", at, v, err)
		}
		got = make([]byte, 10)
		m.ReadAt(got, at-1)
		if !bytes.Equal(got, []byte{0xee, 0xef, 0xcd, 0xab, 0x89, 0x67, 0x45, 0x23, 0x01, 0xee}) {
			t.Errorf("64 bits at %d: memory is %x", at, got)
		}
	}
	var outside *RangeError
	for n, err := range map[int]error{
		2: m.WriteUint16(testSize-1, 0), 4: m.WriteUint32(testSize-3, 0), 8: m.WriteUint64(testSize-7, 0),
	} {
		if !errors.As(err, &outside) || outside.Length != uint64(n) {
			t.Errorf("%d bytes over the end of RAM: %v", n, err)
		}
	}
}

// Two ring indices can share a 32-bit word, one written by each side.
func TestWriteUint16KeepsItsNeighbour(t *testing.T) {
	m := newMemory(t, Config{Size: testSize})
	var done sync.WaitGroup
	for _, at := range []uint64{0, 2} {
		done.Go(func() {
			for i := range 20000 {
				m.WriteUint16(at, uint16(i))
				if v, _ := m.ReadUint16(at); v != uint16(i) {
					t.Errorf("at %d: read %d after writing %d", at, v, i)
					return
				}
			}
		})
	}
	done.Wait()
}

// The layer file is cut while the memory is in use: the device that touches a
// lost page gets an error, and so does a freeze; the process lives.
func TestBackingStoreLost(t *testing.T) {
	f := patternFile(t, 64, 1)
	m := newMemory(t, Config{Size: testSize, Layers: []Layer{{File: f, Extents: []Extent{{Count: 64}}}}})
	write(t, m, 0, []byte{42})
	truncate(t, f, 0)
	const lost = 32 * PageSize
	buf := make([]byte, 3*PageSize)
	for name, access := range map[string]func() error{
		"ReadAt":      func() error { return m.ReadAt(buf, lost) },
		"WriteAt":     func() error { return m.WriteAt(buf, lost) },
		"ReadUint16":  func() error { _, err := m.ReadUint16(lost); return err },
		"ReadUint32":  func() error { _, err := m.ReadUint32(lost); return err },
		"ReadUint64":  func() error { _, err := m.ReadUint64(lost); return err },
		"WriteUint16": func() error { return m.WriteUint16(lost, 1) },
		"WriteUint32": func() error { return m.WriteUint32(lost, 1) },
		"WriteUint64": func() error { return m.WriteUint64(lost+1, 1) },
		"Access":      func() error { return m.Access(lost, 8, func(p []byte) error { p[0]++; return nil }) },
		"Dump":        func() error { return m.Dump(&bytes.Buffer{}) },
	} {
		if err := access(); !errors.Is(err, ErrBackingLost) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if v, err := m.ReadUint16(0); v&0xff != 42 && err == nil {
		t.Errorf("own page: %d, %v", v, err)
	}
	err := m.Access(lost, PageSize, func(p []byte) error { _, err := os.Stdin.Stat(); _ = p; return err })
	if err != nil {
		t.Errorf("lending alone must not touch the page: %v", err)
	}
}

// Faults elsewhere and ordinary panics are not ours to hide.
func TestAccessLetsPanicsPass(t *testing.T) {
	m := newMemory(t, Config{Size: testSize})
	for name, fn := range map[string]func([]byte) error{
		"panic":       func([]byte) error { panic("mine") },
		"nil pointer": func([]byte) error { var p *int; *p = 1; return nil },
		"index":       func(p []byte) error { n := len(p); p[n] = 1; return nil },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s was swallowed", name)
				}
			}()
			m.Access(0, 8, fn)
		}()
	}
	want := errors.New("mine")
	if err := m.Access(0, 8, func([]byte) error { return want }); err != want {
		t.Errorf("Access returns %v", err)
	}
}

func BenchmarkReadUint16(b *testing.B) {
	m := newMemory(b, Config{Size: testSize})
	for b.Loop() {
		m.ReadUint16(4096)
	}
}

func BenchmarkReadAt4096(b *testing.B) {
	m := newMemory(b, Config{Size: testSize})
	buf := make([]byte, 4096)
	for b.Loop() {
		m.ReadAt(buf, 8192)
	}
}
