package boot

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// Why a kernel cannot be loaded. The errors of Load wrap these.
var (
	// ErrNotKernel: the file is no 64-bit ELF program for x86-64.
	ErrNotKernel = errors.New("not an x86-64 ELF kernel (vmlinux)")
	// ErrNoPVHEntry: the kernel cannot be started directly.
	ErrNoPVHEntry = errors.New("kernel without PVH entry (CONFIG_PVH)")
	// ErrTruncated: the file ends before what its headers announce.
	ErrTruncated = errors.New("file is cut short")
	// ErrTooBig: kernel, initrd or command line do not fit into the memory.
	ErrTooBig = errors.New("does not fit into guest memory")
	// ErrMalformed: the headers contradict themselves.
	ErrMalformed = errors.New("malformed kernel file")
)

// Limits on what a kernel file may announce. Linux has 5 program headers and
// some 500 bytes of notes.
const (
	maxProgramHeaders = 64
	maxNoteBytes      = 64 << 10
)

// Constants of the ELF specification, chapters 4 and 5.
const (
	elfHeaderSize     = 64
	programHeaderSize = 56
	elfExecutable     = 2
	elfX8664          = 62
	typeLoad          = 1
	typeNote          = 4
)

// notePVHEntry is XEN_ELFNOTE_PHYS32_ENTRY of Xen's elfnote.h.
const notePVHEntry = 18

// segment is a PT_LOAD program header: fileSize bytes from offset on belong at
// physical address start, with zeros behind them up to size bytes.
type segment struct {
	offset, fileSize uint64
	start, size      uint64
}

// executable is what matters of a kernel's headers.
type executable struct {
	segments []segment
	entry    uint32 // physical address of the PVH entry
}

// readExecutable reads and checks the headers, not whether the segments fit into
// a memory.
func readExecutable(r io.ReaderAt) (executable, error) {
	var x executable
	headers, err := programHeaders(r)
	if err != nil {
		return x, err
	}
	found := false
	for i := 0; i < len(headers); i += programHeaderSize {
		h := headers[i : i+programHeaderSize]
		s := segment{
			offset:   binary.LittleEndian.Uint64(h[8:]),
			start:    binary.LittleEndian.Uint64(h[24:]),
			fileSize: binary.LittleEndian.Uint64(h[32:]),
			size:     binary.LittleEndian.Uint64(h[40:]),
		}
		switch binary.LittleEndian.Uint32(h) {
		case typeLoad:
			if s.fileSize > s.size || s.start+s.size < s.start || s.offset+s.fileSize < s.offset {
				return x, fmt.Errorf("segment %d: %w", i/programHeaderSize, ErrMalformed)
			}
			if s.size > 0 {
				x.segments = append(x.segments, s)
			}
		case typeNote:
			alignment := binary.LittleEndian.Uint64(h[48:])
			entry, ok, err := readNotes(r, s, alignment)
			if err != nil {
				return x, err
			}
			if ok && !found {
				x.entry, found = entry, true
			}
		}
	}
	if !found {
		return x, ErrNoPVHEntry
	}
	if !x.contains(uint64(x.entry)) {
		return x, fmt.Errorf("entry %#x outside of all segments: %w", x.entry, ErrMalformed)
	}
	return x, nil
}

func (x *executable) contains(address uint64) bool {
	for _, s := range x.segments {
		if address-s.start < s.fileSize { // wraps for addresses below
			return true
		}
	}
	return false
}

// programHeaders returns the program headers of the file, a multiple of
// programHeaderSize bytes.
func programHeaders(r io.ReaderAt) ([]byte, error) {
	var h [elfHeaderSize]byte
	if err := readFull(r, h[:], 0); err != nil {
		if errors.Is(err, ErrTruncated) {
			return nil, ErrNotKernel
		}
		return nil, err
	}
	const class64, littleEndian = 2, 1
	if string(h[:4]) != "\x7fELF" {
		return nil, notELF(r)
	}
	if h[4] != class64 || h[5] != littleEndian ||
		binary.LittleEndian.Uint16(h[16:]) != elfExecutable || binary.LittleEndian.Uint16(h[18:]) != elfX8664 {
		return nil, ErrNotKernel
	}
	offset := binary.LittleEndian.Uint64(h[32:])
	size, count := binary.LittleEndian.Uint16(h[54:]), binary.LittleEndian.Uint16(h[56:])
	if size != programHeaderSize || count == 0 || count > maxProgramHeaders {
		return nil, fmt.Errorf("%d program headers of %d bytes: %w", count, size, ErrMalformed)
	}
	headers := make([]byte, int(count)*programHeaderSize)
	if err := readFull(r, headers, offset); err != nil {
		return nil, fmt.Errorf("program headers: %w", err)
	}
	return headers, nil
}

// notELF tells the compressed kernel that distributions ship from other files:
// it has "HdrS" at 0x202 (Linux, Documentation/arch/x86/boot.rst).
func notELF(r io.ReaderAt) error {
	var magic [4]byte
	if readFull(r, magic[:], 0x202) == nil && string(magic[:]) == "HdrS" {
		return fmt.Errorf("compressed kernel (bzImage), unpack it first: %w", ErrNotKernel)
	}
	return ErrNotKernel
}

// readNotes looks through a note segment for the PVH entry.
func readNotes(r io.ReaderAt, s segment, alignment uint64) (entry uint32, ok bool, err error) {
	if s.fileSize > maxNoteBytes {
		return 0, false, fmt.Errorf("%d bytes of notes: %w", s.fileSize, ErrMalformed)
	}
	notes := make([]byte, s.fileSize)
	if err := readFull(r, notes, s.offset); err != nil {
		return 0, false, fmt.Errorf("notes: %w", err)
	}
	if alignment != 8 {
		alignment = 4 // also written as 0 and 1
	}
	for {
		name, kind, value, rest, more := nextNote(notes, alignment)
		if !more {
			return 0, false, nil
		}
		if kind == notePVHEntry && string(bytes.TrimRight(name, "\x00")) == "Xen" {
			return pvhEntry(value)
		}
		notes = rest
	}
}

// pvhEntry is the note's value, written in 4 or 8 bytes.
func pvhEntry(value []byte) (uint32, bool, error) {
	var entry uint64
	switch len(value) {
	case 4:
		entry = uint64(binary.LittleEndian.Uint32(value))
	case 8:
		entry = binary.LittleEndian.Uint64(value)
	default:
		return 0, false, fmt.Errorf("PVH entry of %d bytes: %w", len(value), ErrMalformed)
	}
	if entry >= 1<<32 {
		return 0, false, fmt.Errorf("PVH entry %#x above 4 GiB: %w", entry, ErrMalformed)
	}
	return uint32(entry), true, nil
}

// nextNote splits the first note off. It ends at anything that is not a whole
// note, as there is padding at the end of such segments.
func nextNote(b []byte, alignment uint64) (name []byte, kind uint32, value, rest []byte, ok bool) {
	const header = 12
	if len(b) < header {
		return nil, 0, nil, nil, false
	}
	nameSize := uint64(binary.LittleEndian.Uint32(b))
	valueSize := uint64(binary.LittleEndian.Uint32(b[4:]))
	kind = binary.LittleEndian.Uint32(b[8:])
	align := func(n uint64) uint64 { return (n + alignment - 1) &^ (alignment - 1) }
	valueStart := align(header + nameSize) // all terms are below 2^33
	end := valueStart + valueSize
	if end > uint64(len(b)) {
		return nil, 0, nil, nil, false
	}
	next := min(align(end), uint64(len(b)))
	return b[header : header+nameSize], kind, b[valueStart:end], b[next:], true
}

// readFull fills p from offset on. A file that ends before gives ErrTruncated.
func readFull(r io.ReaderAt, p []byte, offset uint64) error {
	if offset+uint64(len(p)) > 1<<63-1 || offset > 1<<63-1 {
		return ErrTruncated // no file is that long
	}
	n, err := r.ReadAt(p, int64(offset))
	if n == len(p) {
		return nil
	}
	if err == nil || errors.Is(err, io.EOF) {
		return ErrTruncated
	}
	return err
}
