package boot

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/forkvm/forkvm/vmm/boot/acpi"
	"github.com/forkvm/forkvm/vmm/memory"
)

var update = flag.Bool("update", false, "write the golden files anew")

const testSize = memory.MinSize

func newMemory(t testing.TB, size uint64) *memory.Memory {
	t.Helper()
	m, err := memory.New(memory.Config{Size: size})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m
}

// program describes a small ELF kernel; elf writes it down. What a test needs
// to be wrong it changes in the description or in the bytes.
type program struct {
	segments []programSegment
	notes    []byte
}

type programSegment struct {
	start, size uint64
	data        []byte
}

const kernelStart = 0x1000000

// goodProgram has a text segment at 16 MiB with the entry at its byte 16, and a
// data segment with zeros behind it.
func goodProgram() program {
	return program{
		segments: []programSegment{
			{start: kernelStart, size: 0x2000, data: bytes.Repeat([]byte{0x90}, 0x2000)},
			{start: kernelStart + 0x4800, size: 0x9000, data: []byte("data")},
		},
		notes: bytes.Join([][]byte{
			note("Linux", 1, []byte("6.12")),
			note("Xen", 6, []byte("linux\x00")),
			note("Xen", notePVHEntry, binary.LittleEndian.AppendUint64(nil, kernelStart+16)),
		}, nil),
	}
}

func note(name string, kind uint32, value []byte) []byte {
	pad := func(b []byte) []byte { return append(b, make([]byte, -len(b)&3)...) }
	b := binary.LittleEndian.AppendUint32(nil, uint32(len(name)+1))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(value)))
	b = binary.LittleEndian.AppendUint32(b, kind)
	return append(append(b, pad(append([]byte(name), 0))...), pad(bytes.Clone(value))...)
}

func (p program) elf() []byte {
	count := len(p.segments) + 1
	h := make([]byte, elfHeaderSize)
	copy(h, "\x7fELF\x02\x01\x01")
	binary.LittleEndian.PutUint16(h[16:], elfExecutable)
	binary.LittleEndian.PutUint16(h[18:], elfX8664)
	binary.LittleEndian.PutUint64(h[32:], elfHeaderSize)
	binary.LittleEndian.PutUint16(h[54:], programHeaderSize)
	binary.LittleEndian.PutUint16(h[56:], uint16(count))
	var body []byte
	bodyStart := uint64(elfHeaderSize + count*programHeaderSize)
	add := func(kind uint32, start, size uint64, data []byte) {
		ph := make([]byte, programHeaderSize)
		binary.LittleEndian.PutUint32(ph, kind)
		binary.LittleEndian.PutUint64(ph[8:], bodyStart+uint64(len(body)))
		binary.LittleEndian.PutUint64(ph[24:], start)
		binary.LittleEndian.PutUint64(ph[32:], uint64(len(data)))
		binary.LittleEndian.PutUint64(ph[40:], size)
		binary.LittleEndian.PutUint64(ph[48:], 4)
		h, body = append(h, ph...), append(body, data...)
	}
	for _, s := range p.segments {
		add(typeLoad, s.start, s.size, s.data)
	}
	add(typeNote, 0, uint64(len(p.notes)), p.notes)
	return append(h, body...)
}

func read(t *testing.T, m *memory.Memory, gpa uint64, n int) []byte {
	t.Helper()
	p := make([]byte, n)
	if err := m.ReadAt(p, gpa); err != nil {
		t.Fatal(err)
	}
	return p
}

func read64(t *testing.T, m *memory.Memory, gpa uint64) uint64 {
	t.Helper()
	return binary.LittleEndian.Uint64(read(t, m, gpa, 8))
}

func TestLoad(t *testing.T) {
	m := newMemory(t, testSize)
	// What was in memory does not show up in the kernel's zeros.
	if err := m.WriteAt(bytes.Repeat([]byte{0xff}, 0x9000), kernelStart+0x4800); err != nil {
		t.Fatal(err)
	}
	initrd := bytes.Repeat([]byte("initrd"), 1000)
	entry, err := Load(m, Config{
		Kernel:      bytes.NewReader(goodProgram().elf()),
		Initrd:      bytes.NewReader(initrd),
		InitrdSize:  int64(len(initrd)),
		CommandLine: "console=ttyS0",
		ACPI:        acpi.Config{CPUs: 1},
	})
	if err != nil {
		t.Fatal(err)
	}
	if entry.Address != kernelStart+16 {
		t.Errorf("entry %+v", entry)
	}
	for at, want := range map[uint64]string{
		kernelStart:                      strings.Repeat("\x90", 0x2000) + "\x00",
		kernelStart + 0x4800:             "data" + strings.Repeat("\x00", 0x9000-4),
		read64(t, m, entry.StartInfo+24): "console=ttyS0\x00",
		read64(t, m, entry.StartInfo+32): "RSD PTR ",
	} {
		if got := read(t, m, at, len(want)); string(got) != want {
			t.Errorf("at %#x: %.20q…", at, got)
		}
	}
	if magic := read64(t, m, entry.StartInfo); magic != 0x00000001_336ec578 {
		t.Errorf("start information begins %#x", magic)
	}
	if flagsModules := read64(t, m, entry.StartInfo+8); flagsModules != 1<<32 {
		t.Errorf("flags and modules: %#x", flagsModules)
	}
	module := read64(t, m, entry.StartInfo+16)
	start, size := read64(t, m, module), read64(t, m, module+8)
	if size != uint64(len(initrd)) || start%memory.PageSize != 0 || start+size > testSize || start+size < testSize-2*memory.PageSize {
		t.Errorf("initrd at %#x, %d bytes", start, size)
	}
	if !bytes.Equal(read(t, m, start, len(initrd)), initrd) {
		t.Error("initrd differs")
	}
}

func TestMemoryMapIsGolden(t *testing.T) {
	for _, size := range []uint64{32 << 20, 512 << 20, 3 << 30, 8 << 30} {
		regions, err := memory.Layout(size)
		if err != nil {
			t.Fatal(err)
		}
		var text strings.Builder
		next := uint64(0)
		for _, r := range MemoryMap(regions) {
			if r.Start < next || r.Size == 0 {
				t.Errorf("%d bytes: range at %#x overlaps or is empty", size, r.Start)
			}
			next = r.Start + r.Size
			fmt.Fprintf(&text, "%012x-%012x %d\n", r.Start, next, r.Type)
		}
		path := filepath.Join("testdata", fmt.Sprintf("memorymap-%dM", size>>20))
		if *update {
			if err := os.WriteFile(path, []byte(text.String()), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if want, err := os.ReadFile(path); err != nil || string(want) != text.String() {
			t.Errorf("%s (%v) differs from\n%s", path, err, &text)
		}
	}
}

func TestLoadAbove4GiB(t *testing.T) {
	m := newMemory(t, 6<<30)
	e, err := Load(m, Config{
		Kernel: bytes.NewReader(goodProgram().elf()), Initrd: strings.NewReader("x"), InitrdSize: 1, ACPI: acpi.Config{CPUs: 4},
	})
	if err != nil {
		t.Fatal(err)
	}
	if start := read64(t, m, read64(t, m, e.StartInfo+16)); start != 1<<31-memory.PageSize {
		t.Errorf("initrd at %#x", start)
	}
	entries := binary.LittleEndian.Uint32(read(t, m, e.StartInfo+48, 4))
	last := read64(t, m, e.StartInfo+40) + uint64(entries-1)*mapEntrySize
	if start, size := read64(t, m, last), read64(t, m, last+8); start != 4<<30 || size != 3<<30 {
		t.Errorf("last range at %#x, %#x bytes", start, size)
	}
}

func TestBadKernels(t *testing.T) {
	patched := func(offset int, b ...byte) []byte {
		k := goodProgram().elf()
		copy(k[offset:], b)
		return k
	}
	with := func(f func(p *program)) []byte {
		p := goodProgram()
		f(&p)
		return p.elf()
	}
	const header1 = elfHeaderSize + programHeaderSize // of the data segment
	bz := make([]byte, 0x1000)
	copy(bz[0x202:], "HdrS")
	for name, c := range map[string]struct {
		kernel []byte
		want   error
		says   string
	}{
		"empty":            {nil, ErrNotKernel, ""},
		"text":             {[]byte(strings.Repeat("no kernel\n", 100)), ErrNotKernel, ""},
		"bzImage":          {bz, ErrNotKernel, "bzImage"},
		"32 bits":          {patched(4, 1), ErrNotKernel, ""},
		"big-endian":       {patched(5, 2), ErrNotKernel, ""},
		"shared library":   {patched(16, 3), ErrNotKernel, ""},
		"arm64":            {patched(18, 183), ErrNotKernel, ""},
		"no headers":       {patched(56, 0, 0), ErrMalformed, ""},
		"many headers":     {patched(56, 0xff, 0xff), ErrMalformed, ""},
		"odd headers":      {patched(54, 55), ErrMalformed, ""},
		"headers far away": {patched(32, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff), ErrTruncated, ""},
		"cut in headers":   {goodProgram().elf()[:100], ErrTruncated, ""},
		"cut in segment":   {goodProgram().elf()[:0x1000], ErrTruncated, ""},
		"no note":          {with(func(p *program) { p.notes = nil }), ErrNoPVHEntry, "CONFIG_PVH"},
		"other notes":      {with(func(p *program) { p.notes = note("Xen", 6, []byte("linux")) }), ErrNoPVHEntry, ""},
		"other owner":      {with(func(p *program) { p.notes = note("Zen", notePVHEntry, make([]byte, 8)) }), ErrNoPVHEntry, ""},
		"note cut short":   {with(func(p *program) { p.notes = p.notes[:len(p.notes)-1] }), ErrNoPVHEntry, ""},
		"huge notes":       {with(func(p *program) { p.notes = make([]byte, maxNoteBytes+1) }), ErrMalformed, ""},
		"odd entry":        {with(func(p *program) { p.notes = note("Xen", notePVHEntry, make([]byte, 3)) }), ErrMalformed, ""},
		"entry too high":   {with(func(p *program) { p.notes = note("Xen", notePVHEntry, bytes.Repeat([]byte{1}, 8)) }), ErrMalformed, ""},
		"entry elsewhere":  {with(func(p *program) { p.notes = note("Xen", notePVHEntry, make([]byte, 4)) }), ErrMalformed, ""},
		"segment at zero":  {with(func(p *program) { p.segments[1].start = 0 }), ErrMalformed, "1 MiB"},
		"segment too high": {with(func(p *program) { p.segments[1].start = testSize - 8 }), ErrTooBig, ""},
		"segment in hole":  {with(func(p *program) { p.segments[1].start = 3 << 30 }), ErrTooBig, ""},
		"segment wraps":    {with(func(p *program) { p.segments[1].start = ^uint64(0) - 8 }), ErrMalformed, ""},
		"size wraps":       {with(func(p *program) { p.segments[1].size = ^uint64(0) }), ErrMalformed, ""},
		"more file":        {with(func(p *program) { p.segments[1].size = 3 }), ErrMalformed, ""},
		"offset wraps":     {patched(header1+8, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff), ErrMalformed, ""},
		"offset far away":  {patched(header1+8, 0, 0, 0, 0, 0, 0, 0, 0x7f), ErrTruncated, ""},
	} {
		m := newMemory(t, testSize)
		_, err := Load(m, Config{Kernel: bytes.NewReader(c.kernel), ACPI: acpi.Config{CPUs: 1}})
		if !errors.Is(err, c.want) || !strings.Contains(fmt.Sprint(err), c.says) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}

func TestBadInputsBesideTheKernel(t *testing.T) {
	good := Config{Kernel: bytes.NewReader(goodProgram().elf()), ACPI: acpi.Config{CPUs: 1}}
	for name, c := range map[string]struct {
		change func(c *Config)
		want   error
	}{
		"initrd cut short": {func(c *Config) { c.Initrd, c.InitrdSize = strings.NewReader("abc"), 4 }, ErrTruncated},
		"initrd too big":   {func(c *Config) { c.Initrd, c.InitrdSize = strings.NewReader(""), testSize-kernelStart }, ErrTooBig},
		"initrd huge":      {func(c *Config) { c.Initrd, c.InitrdSize = strings.NewReader(""), 1<<63-1 }, ErrTooBig},
		"initrd negative":  {func(c *Config) { c.Initrd, c.InitrdSize = strings.NewReader(""), -1 }, ErrTooBig},
		"long command":     {func(c *Config) { c.CommandLine = strings.Repeat("x", MaxCommandLine+1) }, ErrTooBig},
		"zero in command":  {func(c *Config) { c.CommandLine = "a\x00b" }, nil},
		"no processors":    {func(c *Config) { c.ACPI.CPUs = 0 }, nil},
	} {
		config := good
		c.change(&config)
		_, err := Load(newMemory(t, testSize), config)
		if err == nil || c.want != nil && !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
	good.CommandLine = strings.Repeat("x", MaxCommandLine)
	if _, err := Load(newMemory(t, testSize), good); err != nil {
		t.Errorf("longest command line: %v", err)
	}
}

// Whatever the file says, the kernel ends up above the first MiB or not at all.
func FuzzLoadKernel(f *testing.F) {
	f.Add(goodProgram().elf())
	small := program{
		segments: []programSegment{{start: kernelMin, size: 64, data: make([]byte, 32)}},
		notes:    note("Xen", notePVHEntry, binary.LittleEndian.AppendUint32(nil, kernelMin)),
	}
	f.Add(small.elf())
	m := newMemory(f, testSize)
	f.Fuzz(func(t *testing.T, kernel []byte) {
		r := bytes.NewReader(kernel)
		x, err := readExecutable(r)
		if err != nil {
			return
		}
		end, err := loadKernel(m, r, x)
		if err != nil {
			return
		}
		if uint64(x.entry) < kernelMin || uint64(x.entry) >= end || end > testSize {
			t.Fatalf("entry %#x, end %#x", x.entry, end)
		}
		private, err := m.Private()
		if err != nil {
			t.Fatal(err)
		}
		if len(private) > 0 && private[0].Start < kernelMin/memory.PageSize {
			t.Fatalf("page %d was written", private[0].Start)
		}
	})
}
