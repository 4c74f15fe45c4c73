package memory

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/linux"
)

// DefaultMappings is how many mappings one memory uses at most. Linux allows a
// process 65,530 (vm.max_map_count), which several VMs may have to share.
const DefaultMappings = 8192

// Config says what a memory is made of.
type Config struct {
	Size uint64 // bytes, see Layout
	// Layers are bottom first; none: all zeros. New duplicates the descriptors it
	// needs; Reset needs the files themselves, as long as it may be called.
	Layers []Layer
	// Mappings bounds the number of host mappings, 0 means DefaultMappings. Where
	// there are most of them, what would exceed it is copied into a file of its
	// own and mapped from there.
	Mappings int
}

// Memory is the RAM of one VM. The package comment says who may call what.
type Memory struct {
	size    uint64
	pages   uint64
	regions []Region
	mapping *linux.Mapping
	ram     []byte  // all of the mapping
	base    uintptr // its address
	closed  atomic.Bool

	mu      sync.Mutex // guards what follows, see lock; never held during an access
	pagemap *linux.Pagemap
	scan    scanner
	budget  int
	// sources are the layers' files, nil where only mappings use it any more.
	sources []*os.File
	// origin is where Reset goes back to.
	origin originState
	// view is what the memory contains apart from private pages that were
	// written. It covers all pages and is merged.
	view []piece
	// mapped is what is really mapped below the private pages, one piece per
	// mapping. It differs from view where contents were copied to keep the
	// number of mappings within the budget.
	mapped []piece
	// copied are the pages where the two differ: private pages that start out
	// with the contents that view says. nil until there are any.
	copied bitmap
	// discarded are the pages that Discard made zeros since the last freeze,
	// although a layer has something there. nil until there are any.
	discarded bitmap
	// owed are pages that a failed freeze has mapped: they are changed, though not
	// private. nil until there are any.
	owed bitmap
	// kept are the copied pages that Freeze left where they are, by the layer
	// that has them, oldest first. windows are the files of some of these layers,
	// mapped to be compared with.
	kept    []keptPages
	windows map[int]*linux.Mapping // by source
	// cold is how many pages are copied, or a few more: those that were kept and not
	// written since.
	cold int
	// frozen is what the last freeze left to do, nil if that is done. lock does it.
	frozen *frozen
	// prepared is the file for the next layer, nil if there is none.
	prepared *layerFile
	// reverted are private pages with the contents that view says, from a reset;
	// some may have been written or mapped over since. givenBack are those that the last
	// reset did not keep any longer. originals are files of origin that a reset copies
	// from.
	reverted  []revertedPage // ascending
	givenBack []uint64       // ascending
	// unused: nobody has used the memory since it was reset, see Unused.
	unused    bool
	originals []*linux.Mapping
}

// New makes a memory whose contents are the layers' on top of zeros, without
// reading them: a page is fetched when it is first touched. The layers must not
// change as long as the memory exists. Errors: *SizeError, *LayerError, or a
// system error.
func New(config Config) (*Memory, error) {
	regions, err := Layout(config.Size)
	if err != nil {
		return nil, err
	}
	m := &Memory{
		size:    config.Size,
		pages:   config.Size / PageSize,
		regions: regions,
		budget:  config.Mappings,
	}
	if m.budget == 0 {
		m.budget = DefaultMappings
	}
	for i, l := range config.Layers {
		if err := checkLayer(i, l, m.pages); err != nil {
			return nil, err
		}
	}
	if err := m.construct(config.Layers); err != nil {
		m.Close()
		return nil, err
	}
	return m, nil
}

func (m *Memory) construct(layers []Layer) (err error) {
	if m.mapping, err = linux.Reserve(m.size); err != nil {
		return err
	}
	m.ram, m.base = m.mapping.Bytes(), m.mapping.Address()
	if err := m.refuseHugePages(pageRange{0, m.pages}); err != nil {
		return err
	}
	if m.pagemap, err = linux.OpenPagemap(); err != nil {
		return err
	}
	if m.scan, err = chooseScanner(m); err != nil {
		return err
	}
	all := []piece{{count: m.pages, source: noSource}}
	m.view, m.mapped = all, all
	var stack [][]piece
	for _, l := range layers {
		source, err := m.addSource(l)
		if err != nil {
			return err
		}
		stack = append(stack, layerPieces(l.Extents, source))
	}
	m.origin = newOrigin(m.pages, stack, filesOf(layers))
	m.view = m.origin.view
	if err := m.fill(); err != nil {
		return err
	}
	return m.keepOutOfDumps(pageRange{0, m.pages})
}

// fill gives the fresh mapping the contents that view says.
func (m *Memory) fill() error {
	data, hot := m.origin.mappable(), m.origin.hot()
	if len(overlay(m.mapped, data, appendApart)) > m.limit(len(data)) {
		windows := m.crowded(data, m.flatTarget())
		if err := m.flatten(windows, flatSource, m.readView); err != nil {
			return err
		}
		data, hot = outside(data, windows), outside(hot, windows)
	}
	rest, err := m.place(data)
	if err != nil {
		return err
	}
	for _, p := range rest {
		if err := m.copyIn(p); err != nil {
			return err
		}
	}
	m.markCopied(rest)
	if err := m.warm(hot, nil); err != nil {
		return err
	}
	m.releaseSources(0, append(rest, hot...))
	return nil
}

// addSource takes the layer's file; noSource if it has no data.
func (m *Memory) addSource(l Layer) (int, error) {
	if l.File == nil {
		return noSource, nil
	}
	f, err := linux.Duplicate(l.File)
	if err != nil {
		return noSource, err
	}
	m.sources = append(m.sources, f)
	return len(m.sources) - 1, nil
}

// refuseHugePages is for anonymous memory. A huge page would be private as a whole
// after a write to any part of it, and 512 pages would go into the next layer instead
// of one. Where a file is mapped the kernel takes a huge page of the file apart
// before it makes a page private, so these may be huge, see hugepage.go.
func (m *Memory) refuseHugePages(r pageRange) error {
	err := m.mapping.Advise(r.start*PageSize, (r.end-r.start)*PageSize, unix.MADV_NOHUGEPAGE)
	if errors.Is(err, unix.EINVAL) { // a kernel without huge pages
		return nil
	}
	return err
}

// advisePiece sets what holds for RAM for what was mapped anew, since mappings do
// not inherit it.
func (m *Memory) advisePiece(p piece) error {
	r := pageRange{p.start, p.end()}
	if p.zero() {
		if err := m.refuseHugePages(r); err != nil {
			return err
		}
	}
	return m.keepOutOfDumps(r)
}

// keepOutOfDumps: guest RAM is large and holds the user's data, which has no place
// in a core dump.
func (m *Memory) keepOutOfDumps(r pageRange) error {
	return m.mapping.Advise(r.start*PageSize, (r.end-r.start)*PageSize, unix.MADV_DONTDUMP)
}

// Size is the RAM's size in bytes.
func (m *Memory) Size() uint64 { return m.size }

// Regions returns the guest-physical layout, in ascending order.
func (m *Memory) Regions() []Region { return append([]Region(nil), m.regions...) }

// HostAddress is where a region (an index into Regions) is mapped in this
// process, for the hypervisor's memory slot. It stays the same until Close.
func (m *Memory) HostAddress(region int) uintptr {
	return m.base + uintptr(m.regions[region].Offset)
}

// Close unmaps the memory. Accesses that begin later fail with os.ErrClosed;
// those that are under way, and a virtual machine that still uses the mapping,
// are the caller's mistake. Idempotent.
func (m *Memory) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed.Store(true)
	var errs []error
	if m.mapping != nil {
		errs = append(errs, m.mapping.Unmap())
	}
	m.dropOriginals()
	if m.pagemap != nil {
		errs = append(errs, m.pagemap.Close())
	}
	errs = append(errs, m.closeFrozen())
	for _, f := range m.sources {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	m.sources = nil
	return errors.Join(errs...)
}

// page is the host's view of page number n, for use under guard.
func (m *Memory) page(n uint64) []byte {
	return m.ram[n*PageSize : (n+1)*PageSize : (n+1)*PageSize]
}

func (m *Memory) errClosed(verb string) error {
	return fmt.Errorf("%s memory: %w", verb, os.ErrClosed)
}
