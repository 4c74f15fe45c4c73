package linux

import (
	"encoding/binary"
	"fmt"
	"os"
)

// HostPageSize is the size in bytes of the pages that Pagemap speaks of.
const HostPageSize = 4096

// AddressRange is the half-open range [Start, End) of addresses of this process.
type AddressRange struct{ Start, End uint64 }

// Pagemap is this process's /proc/self/pagemap. It is opened once, so that it
// still works after the process lost sight of /proc. One goroutine at a time may
// use it.
type Pagemap struct {
	file    *os.File
	regions []pageRegion // what a scan found, nil before the first
}

// OpenPagemap opens the calling process's page map.
func OpenPagemap() (*Pagemap, error) {
	f, err := os.Open("/proc/self/pagemap")
	if err != nil {
		return nil, fmt.Errorf("open page map: %w", err)
	}
	return &Pagemap{file: f}, nil
}

// Close closes the descriptor; idempotent.
func (p *Pagemap) Close() error {
	if p.file == nil {
		return nil
	}
	f := p.file
	p.file = nil
	return f.Close()
}

// PagemapEntry is one 64-bit word of /proc/<pid>/pagemap, see
// Documentation/admin-guide/mm/pagemap.rst.
type PagemapEntry uint64

// Present says that the page is in memory.
func (e PagemapEntry) Present() bool { return e>>63&1 != 0 }

// Swapped says that the page is in swap space.
func (e PagemapEntry) Swapped() bool { return e>>62&1 != 0 }

// File says that the page belongs to a file or to shared memory.
func (e PagemapEntry) File() bool { return e>>61&1 != 0 }

// Exclusive says that the page is mapped exactly once. The kernel's page of
// zeros never is.
func (e PagemapEntry) Exclusive() bool { return e>>56&1 != 0 }

// Read fills entries with the words of consecutive pages, the first of which
// is at address start (a multiple of the page size).
func (p *Pagemap) Read(start uint64, entries []PagemapEntry) error {
	raw := make([]byte, 8*len(entries))
	if _, err := p.file.ReadAt(raw, int64(start/HostPageSize*8)); err != nil {
		return fmt.Errorf("read page map (%#x, %d pages): %w", start, len(entries), err)
	}
	for i := range entries {
		entries[i] = PagemapEntry(binary.NativeEndian.Uint64(raw[8*i:]))
	}
	return nil
}
