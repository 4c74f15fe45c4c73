package memory

import "fmt"

// PageSize is the unit of layers and of the private-page scan, in bytes.
const PageSize = 4096

const (
	sizeUnit = 2 << 20
	// MinSize is the smallest RAM size, in bytes, that a kernel boots with.
	MinSize = 32 << 20
	// MaxSize is the largest RAM size in bytes; it keeps RAM below the 46
	// physical address bits that every host with nested paging has.
	MaxSize = 1 << 40

	// Guest-physical addresses from 3 GiB to 4 GiB belong to devices, the
	// interrupt controllers and the reset vector.
	lowEnd    = 3 << 30
	highStart = 4 << 30
)

// Region is a stretch of guest-physical addresses that is RAM. Sizes and
// addresses are in bytes.
type Region struct {
	GuestPhys uint64 // first guest-physical address
	Size      uint64
	Offset    uint64 // position in the RAM's own numbering; Offset/PageSize is the first page's number
}

// SizeError says why a RAM size is not possible.
type SizeError struct {
	Size   uint64
	Reason string
}

func (e *SizeError) Error() string {
	return fmt.Sprintf("lay out memory (%d bytes): %s", e.Size, e.Reason)
}

// Layout returns the regions of a RAM of size bytes: from address 0 up to
// 3 GiB, the rest from 4 GiB on. A size that is not a multiple of 2 MiB or not
// between MinSize and MaxSize gives a *SizeError.
func Layout(size uint64) ([]Region, error) {
	switch {
	case size%sizeUnit != 0:
		return nil, &SizeError{Size: size, Reason: "not a multiple of 2 MiB"}
	case size < MinSize:
		return nil, &SizeError{Size: size, Reason: "less than 32 MiB"}
	case size > MaxSize:
		return nil, &SizeError{Size: size, Reason: "more than 1 TiB"}
	case size <= lowEnd:
		return []Region{{Size: size}}, nil
	}
	return []Region{
		{Size: lowEnd},
		{GuestPhys: highStart, Size: size - lowEnd, Offset: lowEnd},
	}, nil
}
