package snapshot

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
)

const (
	// HugePageUnits is how many pages of a guest's RAM a huge page has.
	HugePageUnits = 512
	// HugePageSize is the size of a huge page in bytes.
	HugePageSize = HugePageUnits * UnitSize
	// MaxHugePages bounds what there is of a snapshot in huge pages: it takes that much
	// of the host's memory beside what the host's page cache has.
	MaxHugePages = 24
	// HugePagesHeaderSize is the length of what HugePages is decoded from, the
	// beginning of the file.
	HugePagesHeaderSize = hugePagesFixed + 8*MaxHugePages
)

const (
	hugePagesMagic   = "FORKVMHP"
	hugePagesVersion = 1
	hugePagesFixed   = 64
)

// HugePages is the header of a file that has some of a snapshot's memory once more,
// in memory of the host and in huge pages. Their contents are those of the layers.
type HugePages struct {
	// Snapshot is the id of the snapshot (Manifest.ID).
	Snapshot string
	// RAM is the size of the guest's RAM in pages.
	RAM uint64
	// Pages are the first pages of what each huge page has, ascending.
	Pages []uint64
}

// HugePageOffset is where the data of huge page number i begins in the file.
func HugePageOffset(i int) int64 { return int64(i+1) * HugePageSize }

// Size is the length of the file.
func (h *HugePages) Size() int64 { return HugePageOffset(len(h.Pages)) }

func checkHugePages(ram uint64, pages []uint64) error {
	if len(pages) > MaxHugePages {
		return fmt.Errorf("%w: more than %d huge pages", ErrTooLarge, MaxHugePages)
	}
	end := uint64(0)
	for _, page := range pages {
		if page%HugePageUnits != 0 || page < end || page >= ram || ram-page < HugePageUnits {
			return fmt.Errorf("%w: huge page at page %d", ErrInvalid, page)
		}
		end = page + HugePageUnits
	}
	return nil
}

// Encode returns the header, or an error for one that is none.
func (h *HugePages) Encode() ([]byte, error) {
	id, err := decodeID(h.Snapshot)
	if err == nil {
		err = checkHugePages(h.RAM, h.Pages)
	}
	if err != nil {
		return nil, fmt.Errorf("encode huge pages: %w", err)
	}
	b := make([]byte, HugePagesHeaderSize)
	copy(b, hugePagesMagic)
	binary.LittleEndian.PutUint32(b[8:], hugePagesVersion)
	binary.LittleEndian.PutUint64(b[16:], h.RAM)
	copy(b[24:], id)
	binary.LittleEndian.PutUint64(b[40:], uint64(len(h.Pages)))
	for i, page := range h.Pages {
		binary.LittleEndian.PutUint64(b[hugePagesFixed+8*i:], page)
	}
	binary.LittleEndian.PutUint32(b[12:], headerSum(b))
	return b, nil
}

// DecodeHugePages decodes a header. Errors: ErrTruncated, ErrMagic, ErrVersion,
// ErrChecksum, ErrTooLarge, ErrInvalid.
func DecodeHugePages(b []byte) (*HugePages, error) {
	h, err := decodeHugePages(b)
	if err != nil {
		return nil, fmt.Errorf("decode huge pages: %w", err)
	}
	return h, nil
}

func decodeHugePages(b []byte) (*HugePages, error) {
	switch {
	case len(b) != HugePagesHeaderSize:
		return nil, ErrTruncated
	case string(b[:8]) != hugePagesMagic:
		return nil, ErrMagic
	case binary.LittleEndian.Uint32(b[8:]) != hugePagesVersion:
		return nil, fmt.Errorf("%w: %d, this build reads %d", ErrVersion, binary.LittleEndian.Uint32(b[8:]), hugePagesVersion)
	case binary.LittleEndian.Uint32(b[12:]) != headerSum(b):
		return nil, ErrChecksum
	}
	count := binary.LittleEndian.Uint64(b[40:])
	if count > MaxHugePages {
		return nil, ErrTooLarge
	}
	used := hugePagesFixed + 8*count
	for _, unused := range append(b[48:hugePagesFixed:hugePagesFixed], b[used:]...) {
		if unused != 0 {
			return nil, fmt.Errorf("%w: reserved header bytes are set", ErrInvalid)
		}
	}
	h := &HugePages{
		Snapshot: hex.EncodeToString(b[24:40]),
		RAM:      binary.LittleEndian.Uint64(b[16:]),
		Pages:    decodePages(b[hugePagesFixed:used]),
	}
	if err := checkHugePages(h.RAM, h.Pages); err != nil {
		return nil, err
	}
	return h, nil
}

func decodePages(b []byte) []uint64 {
	var pages []uint64
	for ; len(b) > 0; b = b[8:] {
		pages = append(pages, binary.LittleEndian.Uint64(b))
	}
	return pages
}
