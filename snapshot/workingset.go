package snapshot

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
)

// MaxWorkingSetPages bounds a working set: each clone gets pages of its own for
// all of it, 8 MiB at most.
const MaxWorkingSetPages = 2048

// MaxWorkingSetSize is the length of the longest file, in which no two pages are
// neighbours.
const MaxWorkingSetSize = workingSetHeaderSize + workingSetEntrySize*MaxWorkingSetPages + workingSetReadSize*MaxHugePages

const (
	workingSetMagic      = "FORKVMWS"
	workingSetVersion    = 2
	workingSetHeaderSize = 64
	workingSetEntrySize  = 16
	workingSetReadSize   = 8
)

// PageRange is a run of pages of a guest's RAM.
type PageRange struct{ Start, Count uint64 }

// WorkingSet is what a clone of a snapshot uses of its RAM before it is ready,
// as another clone has shown. It is a hint: it says which pages are worth to be
// there before they are used, and nothing about their contents.
type WorkingSet struct {
	// Snapshot is the id of the snapshot (Manifest.ID).
	Snapshot string
	// RAM is the size of the guest's RAM in pages.
	RAM uint64
	// Written ascends, and no two of its ranges overlap.
	Written []PageRange
	// Read has the first pages of at most MaxHugePages huge pages' worth of RAM that
	// are read and not written, ascending.
	Read []uint64
}

// check holds the ranges against the limit and the size of RAM.
func (w *WorkingSet) check() error {
	var end, pages uint64
	for _, r := range w.Written {
		if r.Count == 0 || r.Start < end || r.Start >= w.RAM || r.Count > w.RAM-r.Start {
			return fmt.Errorf("%w: %d pages from page %d on", ErrInvalid, r.Count, r.Start)
		}
		end = r.Start + r.Count
		if pages += min(r.Count, MaxWorkingSetPages+1); pages > MaxWorkingSetPages {
			return fmt.Errorf("%w: more than %d pages", ErrTooLarge, MaxWorkingSetPages)
		}
	}
	return checkHugePages(w.RAM, w.Read)
}

// Encode returns the bytes of the file, or an error for a set that is none.
func (w *WorkingSet) Encode() ([]byte, error) {
	id, err := decodeID(w.Snapshot)
	if err == nil {
		err = w.check()
	}
	if err != nil {
		return nil, fmt.Errorf("encode working set: %w", err)
	}
	b := make([]byte, workingSetHeaderSize, workingSetHeaderSize+workingSetEntrySize*len(w.Written))
	copy(b, workingSetMagic)
	binary.LittleEndian.PutUint32(b[8:], workingSetVersion)
	binary.LittleEndian.PutUint64(b[16:], w.RAM)
	copy(b[24:], id)
	binary.LittleEndian.PutUint64(b[40:], uint64(len(w.Written)))
	binary.LittleEndian.PutUint64(b[48:], uint64(len(w.Read)))
	for _, r := range w.Written {
		b = binary.LittleEndian.AppendUint64(b, r.Start)
		b = binary.LittleEndian.AppendUint64(b, r.Count)
	}
	for _, page := range w.Read {
		b = binary.LittleEndian.AppendUint64(b, page)
	}
	binary.LittleEndian.PutUint32(b[12:], headerSum(b))
	return b, nil
}

func decodeID(id string) ([]byte, error) {
	b, err := hex.DecodeString(id)
	if err == nil && len(b) != 16 {
		err = fmt.Errorf("%w: id %q", ErrInvalid, id)
	}
	return b, err
}

// DecodeWorkingSet decodes a whole file. One of an earlier version is invalid: it
// can be recorded again. Errors: ErrTruncated, ErrMagic,
// ErrVersion, ErrTooLarge, ErrChecksum, ErrInvalid.
func DecodeWorkingSet(b []byte) (*WorkingSet, error) {
	w, err := decodeWorkingSet(b)
	if err != nil {
		return nil, fmt.Errorf("decode working set: %w", err)
	}
	return w, nil
}

func decodeWorkingSet(b []byte) (*WorkingSet, error) {
	switch {
	case len(b) < workingSetHeaderSize:
		return nil, ErrTruncated
	case string(b[:8]) != workingSetMagic:
		return nil, ErrMagic
	case binary.LittleEndian.Uint32(b[8:]) > workingSetVersion:
		return nil, fmt.Errorf("%w: %d, this build reads %d", ErrVersion, binary.LittleEndian.Uint32(b[8:]), workingSetVersion)
	case len(b) > MaxWorkingSetSize:
		return nil, ErrTooLarge
	case binary.LittleEndian.Uint32(b[12:]) != headerSum(b):
		return nil, ErrChecksum
	case binary.LittleEndian.Uint32(b[8:]) != workingSetVersion:
		return nil, fmt.Errorf("%w: of version %d", ErrInvalid, binary.LittleEndian.Uint32(b[8:]))
	}
	entries := b[workingSetHeaderSize:]
	count, read := binary.LittleEndian.Uint64(b[40:]), binary.LittleEndian.Uint64(b[48:])
	if count > MaxWorkingSetPages || read > MaxHugePages || uint64(len(entries)) != count*workingSetEntrySize+read*workingSetReadSize {
		return nil, fmt.Errorf("%w: %d ranges and %d huge pages in %d bytes", ErrInvalid, count, read, len(entries))
	}
	for _, reserved := range b[56:workingSetHeaderSize] {
		if reserved != 0 {
			return nil, fmt.Errorf("%w: reserved header bytes are set", ErrInvalid)
		}
	}
	w := &WorkingSet{
		Snapshot: hex.EncodeToString(b[24:40]),
		RAM:      binary.LittleEndian.Uint64(b[16:]),
		Written:  make([]PageRange, count),
	}
	for i := range w.Written {
		e := entries[workingSetEntrySize*i:]
		w.Written[i] = PageRange{Start: binary.LittleEndian.Uint64(e), Count: binary.LittleEndian.Uint64(e[8:])}
	}
	w.Read = decodePages(entries[count*workingSetEntrySize:])
	if err := w.check(); err != nil {
		return nil, err
	}
	return w, nil
}
