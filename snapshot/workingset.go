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
const MaxWorkingSetSize = workingSetHeaderSize + workingSetEntrySize*MaxWorkingSetPages

const (
	workingSetMagic      = "FORKVMWS"
	workingSetVersion    = 1
	workingSetHeaderSize = 64
	workingSetEntrySize  = 16
)

// PageRange is a run of pages of a guest's RAM.
type PageRange struct{ Start, Count uint64 }

// WorkingSet is what a clone of a snapshot writes of its RAM before it is ready,
// as another clone has shown. It is a hint: it says which pages are worth to be
// there before they are written, and nothing about their contents.
type WorkingSet struct {
	// Snapshot is the id of the snapshot (Manifest.ID).
	Snapshot string
	// RAM is the size of the guest's RAM in pages.
	RAM uint64
	// Written ascends, and no two of its ranges overlap.
	Written []PageRange
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
	return nil
}

// Encode returns the bytes of the file, or an error for a set that is none.
func (w *WorkingSet) Encode() ([]byte, error) {
	id, err := hex.DecodeString(w.Snapshot)
	if err == nil && len(id) != 16 {
		err = fmt.Errorf("%w: id %q", ErrInvalid, w.Snapshot)
	}
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
	for _, r := range w.Written {
		b = binary.LittleEndian.AppendUint64(b, r.Start)
		b = binary.LittleEndian.AppendUint64(b, r.Count)
	}
	binary.LittleEndian.PutUint32(b[12:], headerSum(b))
	return b, nil
}

// DecodeWorkingSet decodes a whole file. Errors: ErrTruncated, ErrMagic,
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
	case binary.LittleEndian.Uint32(b[8:]) != workingSetVersion:
		return nil, fmt.Errorf("%w: %d, this build reads %d", ErrVersion, binary.LittleEndian.Uint32(b[8:]), workingSetVersion)
	case len(b) > MaxWorkingSetSize:
		return nil, ErrTooLarge
	case binary.LittleEndian.Uint32(b[12:]) != headerSum(b):
		return nil, ErrChecksum
	}
	entries := b[workingSetHeaderSize:]
	count := binary.LittleEndian.Uint64(b[40:])
	if len(entries)%workingSetEntrySize != 0 || count != uint64(len(entries)/workingSetEntrySize) {
		return nil, fmt.Errorf("%w: %d ranges in %d bytes", ErrInvalid, count, len(entries))
	}
	for _, reserved := range b[48:workingSetHeaderSize] {
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
	if err := w.check(); err != nil {
		return nil, err
	}
	return w, nil
}
