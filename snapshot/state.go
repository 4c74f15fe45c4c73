package snapshot

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
)

// Limits of the state file. A 32-vCPU guest with every device needs a few
// megabytes; anything beyond the limits is damage or an attack.
const (
	MaxStateSize = 64 << 20
	MaxSections  = 1024
	MaxSectionID = 64
)

const (
	stateMagic      = "FORKVMST"
	stateVersion    = 1
	stateHeaderSize = 64
	stateEntrySize  = 80
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Section is one named piece of saved state. ID is 1 to 64 bytes of
// [a-zA-Z0-9._:/-], unique in its state. Data is opaque to this package.
type Section struct {
	ID   string
	Data []byte
}

// State is the ordered content of a state file. The zero value is an empty
// state, ready for Add.
type State struct {
	Sections []Section
}

// Add appends a section. The data is kept, not copied.
func (s *State) Add(id string, data []byte) error {
	if err := checkSectionID(id); err != nil {
		return fmt.Errorf("add state section (%q): %w", id, err)
	}
	if _, ok := s.Get(id); ok {
		return fmt.Errorf("add state section (%s): %w: already there", id, ErrInvalid)
	}
	s.Sections = append(s.Sections, Section{ID: id, Data: data})
	return nil
}

// Get returns the data of the section named id.
func (s *State) Get(id string) ([]byte, bool) {
	for _, section := range s.Sections {
		if section.ID == id {
			return section.Data, true
		}
	}
	return nil, false
}

// Encode returns the bytes of the state file. It fails when a limit is
// exceeded or a section's name is invalid or used twice.
func (s *State) Encode() ([]byte, error) {
	if len(s.Sections) > MaxSections {
		return nil, fmt.Errorf("encode state: %d sections: %w", len(s.Sections), ErrTooLarge)
	}
	total := stateHeaderSize + stateEntrySize*len(s.Sections)
	seen := make(map[string]bool, len(s.Sections))
	for _, section := range s.Sections {
		if err := checkSectionID(section.ID); err != nil {
			return nil, fmt.Errorf("encode state section (%q): %w", section.ID, err)
		}
		if seen[section.ID] {
			return nil, fmt.Errorf("encode state section (%s): %w: used twice", section.ID, ErrInvalid)
		}
		seen[section.ID] = true
		if len(section.Data) > MaxStateSize-total {
			return nil, fmt.Errorf("encode state section (%s): %w", section.ID, ErrTooLarge)
		}
		total += len(section.Data)
	}

	out := make([]byte, stateHeaderSize, total)
	for _, section := range s.Sections {
		var entry [stateEntrySize]byte
		copy(entry[:MaxSectionID], section.ID)
		binary.LittleEndian.PutUint64(entry[64:], uint64(len(section.Data)))
		binary.LittleEndian.PutUint32(entry[72:], crc32.Checksum(section.Data, castagnoli))
		out = append(out, entry[:]...)
	}
	table := crc32.Checksum(out[stateHeaderSize:], castagnoli)
	for _, section := range s.Sections {
		out = append(out, section.Data...)
	}
	StateHeader{Length: uint64(total), Sections: uint32(len(s.Sections)), table: table}.encode(out[:stateHeaderSize])
	return out, nil
}

// StateHeader is what the first 64 bytes of a state file say about the rest.
type StateHeader struct {
	Length   uint64 // bytes of the whole file
	Sections uint32
	table    uint32 // CRC-32C of the section table
}

func (h StateHeader) encode(b []byte) {
	copy(b, stateMagic)
	binary.LittleEndian.PutUint32(b[8:], stateVersion)
	binary.LittleEndian.PutUint64(b[16:], h.Length)
	binary.LittleEndian.PutUint32(b[24:], h.Sections)
	binary.LittleEndian.PutUint32(b[28:], h.table)
	binary.LittleEndian.PutUint32(b[12:], headerSum(b))
}

// headerSum is the CRC-32C of a header whose own checksum, the four bytes at
// offset 12, counts as zero.
func headerSum(b []byte) uint32 {
	sum := crc32.Update(0, castagnoli, b[:12])
	sum = crc32.Update(sum, castagnoli, []byte{0, 0, 0, 0})
	return crc32.Update(sum, castagnoli, b[16:])
}

// DecodeStateHeader checks the header of a state file without the rest: magic,
// version, checksum, limits, in this order (ErrMagic, ErrVersion, ErrChecksum,
// ErrTooLarge). Bytes after the first 64 are ignored.
func DecodeStateHeader(b []byte) (StateHeader, error) {
	if len(b) < stateHeaderSize {
		return StateHeader{}, ErrTruncated
	}
	b = b[:stateHeaderSize]
	if string(b[:8]) != stateMagic {
		return StateHeader{}, ErrMagic
	}
	if v := binary.LittleEndian.Uint32(b[8:]); v != stateVersion {
		return StateHeader{}, fmt.Errorf("%w: %d, this build reads %d", ErrVersion, v, stateVersion)
	}
	if binary.LittleEndian.Uint32(b[12:]) != headerSum(b) {
		return StateHeader{}, fmt.Errorf("%w: header", ErrChecksum)
	}
	h := StateHeader{
		Length:   binary.LittleEndian.Uint64(b[16:]),
		Sections: binary.LittleEndian.Uint32(b[24:]),
		table:    binary.LittleEndian.Uint32(b[28:]),
	}
	for _, reserved := range b[32:] {
		if reserved != 0 {
			return StateHeader{}, fmt.Errorf("%w: reserved header bytes are set", ErrInvalid)
		}
	}
	if h.Length > MaxStateSize || h.Sections > MaxSections {
		return StateHeader{}, fmt.Errorf("%w: %d bytes in %d sections", ErrTooLarge, h.Length, h.Sections)
	}
	if h.Length < stateHeaderSize+stateEntrySize*uint64(h.Sections) {
		return StateHeader{}, fmt.Errorf("%w: %d bytes cannot hold %d sections", ErrInvalid, h.Length, h.Sections)
	}
	return h, nil
}

// ReadState reads a state file of size bytes from r. The header is read and
// checked alone, and its length compared with size, before the rest is read.
func ReadState(r io.ReaderAt, size int64) (*State, error) {
	var head [stateHeaderSize]byte
	if n, err := r.ReadAt(head[:], 0); n < len(head) {
		if err == nil || errors.Is(err, io.EOF) {
			err = ErrTruncated
		}
		return nil, fmt.Errorf("read state: %w", err)
	}
	h, err := DecodeStateHeader(head[:])
	if err != nil {
		return nil, fmt.Errorf("read state: %w", err)
	}
	if err := h.checkSize(size); err != nil {
		return nil, fmt.Errorf("read state: %w", err)
	}
	b := make([]byte, h.Length)
	if n, err := r.ReadAt(b, 0); n < len(b) {
		return nil, fmt.Errorf("read state: %w: %v", ErrTruncated, err)
	}
	return DecodeState(b)
}

func (h StateHeader) checkSize(size int64) error {
	switch {
	case size < 0 || uint64(size) < h.Length:
		return fmt.Errorf("%w: %d bytes of %d", ErrTruncated, size, h.Length)
	case uint64(size) > h.Length:
		return fmt.Errorf("%w: %d bytes after the end", ErrInvalid, uint64(size)-h.Length)
	}
	return nil
}

// DecodeState decodes a whole state file. The sections refer to b.
func DecodeState(b []byte) (*State, error) {
	h, err := DecodeStateHeader(b)
	if err != nil {
		return nil, fmt.Errorf("decode state: %w", err)
	}
	if err := h.checkSize(int64(len(b))); err != nil {
		return nil, fmt.Errorf("decode state: %w", err)
	}
	table := b[stateHeaderSize:][:stateEntrySize*int(h.Sections)]
	if crc32.Checksum(table, castagnoli) != h.table {
		return nil, fmt.Errorf("decode state: %w: section table", ErrChecksum)
	}
	state := &State{Sections: make([]Section, 0, h.Sections)}
	seen := make(map[string]bool, h.Sections)
	rest := b[stateHeaderSize+len(table):]
	for i := range int(h.Sections) {
		section, err := decodeSection(table[i*stateEntrySize:][:stateEntrySize], rest)
		if err != nil {
			return nil, fmt.Errorf("decode state section (%d): %w", i, err)
		}
		if seen[section.ID] {
			return nil, fmt.Errorf("decode state section (%s): %w: used twice", section.ID, ErrInvalid)
		}
		seen[section.ID] = true
		rest = rest[len(section.Data):]
		state.Sections = append(state.Sections, section)
	}
	if len(rest) != 0 {
		return nil, fmt.Errorf("decode state: %w: %d bytes belong to no section", ErrInvalid, len(rest))
	}
	return state, nil
}

// decodeSection reads one table entry whose data starts at rest[0].
func decodeSection(entry, rest []byte) (Section, error) {
	name := entry[:MaxSectionID]
	end := 0
	for end < len(name) && name[end] != 0 {
		end++
	}
	for _, pad := range name[end:] {
		if pad != 0 {
			return Section{}, fmt.Errorf("%w: name goes on after its end", ErrInvalid)
		}
	}
	id := string(name[:end])
	if err := checkSectionID(id); err != nil {
		return Section{}, err
	}
	if binary.LittleEndian.Uint32(entry[76:]) != 0 {
		return Section{}, fmt.Errorf("%w: reserved entry bytes are set", ErrInvalid)
	}
	length := binary.LittleEndian.Uint64(entry[64:])
	if length > math.MaxInt32 || length > uint64(len(rest)) {
		return Section{}, fmt.Errorf("%w: %s has %d bytes of %d", ErrInvalid, id, length, len(rest))
	}
	data := rest[:length:length]
	if crc32.Checksum(data, castagnoli) != binary.LittleEndian.Uint32(entry[72:]) {
		return Section{}, fmt.Errorf("%w: section %s", ErrChecksum, id)
	}
	return Section{ID: id, Data: data}, nil
}

func checkSectionID(id string) error {
	if id == "" || len(id) > MaxSectionID {
		return fmt.Errorf("%w: section name of %d bytes", ErrInvalid, len(id))
	}
	for i := range len(id) {
		if c := id[i]; !isWord(c) && c != ':' && c != '/' {
			return fmt.Errorf("%w: byte %#02x in a section name", ErrInvalid, c)
		}
	}
	return nil
}
