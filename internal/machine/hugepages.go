package machine

import (
	"fmt"
	"os"

	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/vmm/memory"
)

// HugePages is a file that has some of the pages of a stack of memory layers once
// more, in huge pages of the host (snapshot.HugePages). Mapped from there they take the
// guest one fault instead of hundreds. What they contain is what the layers do.
type HugePages struct {
	File *os.File
	// Above is how many layers of the stack, from the bottom up, the file stands for.
	Above int

	header *snapshot.HugePages
}

// OpenHugePages reads the header of a file, which the result takes over if there is no
// error.
func OpenHugePages(f *os.File, above int) (*HugePages, error) {
	b := make([]byte, snapshot.HugePagesHeaderSize)
	if _, err := f.ReadAt(b, 0); err != nil {
		return nil, fmt.Errorf("open huge pages: %w", err)
	}
	header, err := snapshot.DecodeHugePages(b)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("open huge pages: %w", err)
	}
	if !info.Mode().IsRegular() || info.Size() != header.Size() {
		return nil, fmt.Errorf("open huge pages: %w", snapshot.ErrTruncated)
	}
	return &HugePages{File: f, Above: above, header: header}, nil
}

// Of reports whether the pages are those of the snapshot.
func (h *HugePages) Of(m *snapshot.Manifest) bool {
	return h.header.Snapshot == m.ID && h.header.RAM == m.Guest.MemoryBytes/memory.PageSize
}

// fits reports whether they can stand for layers of such a stack.
func (h *HugePages) fits(layers int, pages uint64) bool {
	return h.Above > 0 && h.Above <= layers && h.header.RAM == pages
}

// layer is the pages as a layer that lies on those that it stands for.
func (h *HugePages) layer() memory.Layer {
	l := memory.Layer{File: h.File}
	for i, page := range h.header.Pages {
		e := memory.Extent{Start: page, Count: snapshot.HugePageUnits, Offset: snapshot.HugePageOffset(i)}
		l.Extents = append(l.Extents, e)
	}
	return l
}

// Dup returns the pages with a handle of its own.
func (h *HugePages) Dup() (*HugePages, error) {
	f, err := linux.Duplicate(h.File)
	if err != nil {
		return nil, err
	}
	return &HugePages{File: f, Above: h.Above, header: h.header}, nil
}

// Close closes the file.
func (h *HugePages) Close() error { return h.File.Close() }
