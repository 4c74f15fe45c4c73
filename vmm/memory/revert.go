package memory

import (
	"cmp"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/linux"
)

// maxReverted is how many private pages a reset keeps at most: 8 MiB. As long as
// there is room for a quarter more, a page stays for maxIdle lives that do not write
// it, and one reset gives maxGivenBack of them back: each costs time, and twice as
// much if it is needed after all.
const (
	maxReverted  = 2048
	maxIdle      = 8
	maxGivenBack = 16
)

// revertedPage is a private page that a reset has left with the contents that view
// says.
type revertedPage struct {
	page uint64
	idle int // lives in a row that have not changed it
	// missed says that it was given back before, and private again in the next life: the
	// guest writes there what is there.
	missed bool
}

// revertLocked gives these private pages the contents that view says. There are two
// ways. A page that is given back costs a fault, and a copy in the host kernel, when
// it is written again, which is many times the cost of copying its contents into it
// here; and most pages that a guest writes in one life it writes in the next: the
// kernel's own data, the guest agent's. So pages are copied and kept, within bounds,
// and one that has not been changed for some lives is given back. One life is not
// enough: what a guest writes is often what was there. Where it always is, that shows
// when the page has been given back, and it is not done again.
func (m *Memory) revertLocked(private []pageRange) error {
	r := reverter{m: m, was: m.reverted, gone: m.givenBack, room: maxReverted - len(m.reverted)}
	r.crowded = len(m.reverted) > maxReverted*3/4
	r.unused, m.unused = m.unused, false
	r.kept = make([]revertedPage, 0, min(maxReverted, countPages(private)))
	err := guard(func() error { return r.revert(private) })
	m.reverted, m.givenBack = r.kept, r.idle
	return err
}

// wasReverted reports whether a reset has left page n private.
func (m *Memory) wasReverted(n uint64) bool {
	_, found := slices.BinarySearchFunc(m.reverted, n, func(p revertedPage, n uint64) int { return cmp.Compare(p.page, n) })
	return found
}

// revertedRanges are the pages that resets have left private.
func (m *Memory) revertedRanges() (ranges []pageRange) {
	for _, p := range m.reverted {
		ranges = appendRange(ranges, p.page, p.page+1)
	}
	return ranges
}

// reverter is one pass over the private pages, in ascending order.
type reverter struct {
	m       *Memory
	was     []revertedPage // the pages kept so far that are still ahead
	gone    []uint64       // those given back by the last reset that are still ahead
	kept    []revertedPage // the pages kept now
	idle    []uint64       // those that are given back now
	room    int            // for more pages
	crowded bool           // there is little
	unused  bool           // see Memory.unused
	spare   pageRange      // pages to be given back
}

func (r *reverter) revert(private []pageRange) error {
	at := find(r.m.view, 0) // where in view the ranges are gone through
	for _, p := range private {
		for p.start < p.end {
			for r.m.view[at].end() <= p.start {
				at++
			}
			from := r.m.view[at].from(p.start)
			from = from.until(min(from.end(), p.end))
			if err := r.piece(from); err != nil {
				return err
			}
			p.start = from.end()
		}
	}
	return r.giveBack(pageRange{})
}

// piece gives private pages their contents, which are those of the piece of view.
func (r *reverter) piece(p piece) error {
	original := zeroPage[:]
	if !p.zero() {
		file, end := r.m.originalOf(p.source), uint64(p.offset)+p.count*PageSize
		if end > uint64(len(file)) {
			return r.withoutOriginal(p)
		}
		original = file[p.offset:end]
	}
	pages := r.m.ram[p.start*PageSize : p.end()*PageSize]
	for n := p.start; n < p.end(); n++ {
		if err := r.page(n, pages[:PageSize], original[:PageSize]); err != nil {
			return err
		}
		pages = pages[PageSize:]
		if !p.zero() {
			original = original[PageSize:]
		}
	}
	return nil
}

// withoutOriginal is for contents that are not at hand.
func (r *reverter) withoutOriginal(p piece) error {
	for n := p.start; n < p.end(); n++ {
		var err error
		if r.m.copied.has(n) {
			err = r.m.copyIn(p.from(n).until(n + 1))
		} else {
			err = r.giveBack(pageRange{n, n + 1})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// page gives private page n its contents.
func (r *reverter) page(n uint64, page, original []byte) error {
	kept, was := r.wasKept(n)
	pinned := r.m.copied.has(n)
	switch {
	case !was && !pinned && r.room <= 0:
		return r.giveBack(pageRange{n, n + 1})
	case (was || pinned) && samePage(page, original):
		if !r.unused {
			kept.idle++
		}
	default:
		copy(page, original)
		kept.idle = 0
	}
	switch {
	case pinned:
		return nil
	case r.isSpare(kept):
		r.idle = append(r.idle, n)
		return r.giveBack(pageRange{n, n + 1})
	case !was:
		r.room--
	}
	r.kept = append(r.kept, kept)
	return nil
}

// isSpare decides whether a page is given back.
func (r *reverter) isSpare(p revertedPage) bool {
	if r.unused {
		return false
	}
	if r.crowded {
		return p.idle > 0
	}
	return p.idle >= maxIdle && !p.missed && len(r.idle) < maxGivenBack
}

// wasKept returns what is known of page n. Pages are asked for in ascending order.
func (r *reverter) wasKept(n uint64) (p revertedPage, was bool) {
	for len(r.was) > 0 && r.was[0].page < n {
		r.was = r.was[1:]
	}
	if len(r.was) > 0 && r.was[0].page == n {
		return r.was[0], true
	}
	for len(r.gone) > 0 && r.gone[0] < n {
		r.gone = r.gone[1:]
	}
	return revertedPage{page: n, missed: len(r.gone) > 0 && r.gone[0] == n}, false
}

// giveBack collects neighbours, so that they go in one call.
func (r *reverter) giveBack(p pageRange) error {
	if p.start == r.spare.end && p.end > 0 {
		r.spare.end = p.end
		return nil
	}
	now := r.spare
	r.spare = p
	if now.start == now.end {
		return nil
	}
	return r.m.mapping.Advise(now.start*PageSize, (now.end-now.start)*PageSize, unix.MADV_DONTNEED)
}

// originalOf returns a source's file, mapped for reading once more beside the
// memory, where nothing is private. It is empty if that cannot be had.
func (m *Memory) originalOf(source int) []byte {
	for len(m.originals) <= source {
		m.originals = append(m.originals, nil)
	}
	if m.originals[source] == nil {
		m.originals[source] = mapWhole(m.file(source))
	}
	return m.originals[source].Bytes()
}

// mapWhole maps a file as far as it has whole pages. What comes of an error is an
// empty mapping.
func mapWhole(f *os.File) *linux.Mapping {
	none := &linux.Mapping{}
	info, err := f.Stat()
	if err != nil {
		return none
	}
	size := uint64(info.Size()) &^ (PageSize - 1)
	whole, err := linux.Reserve(size)
	if err != nil {
		return none
	}
	if whole.MapFile(0, size, f, 0) != nil || whole.Advise(0, size, unix.MADV_DONTDUMP) != nil {
		_ = whole.Unmap()
		return none
	}
	return whole
}

// renumberOriginals keeps the mappings of the sources that have new numbers, and drops the
// others.
func (m *Memory) renumberOriginals(numbers map[int]int) {
	was := m.originals
	m.originals = nil
	for old, o := range was {
		number, stays := numbers[old]
		if o == nil || !stays {
			continue
		}
		for len(m.originals) <= number {
			m.originals = append(m.originals, nil)
		}
		m.originals[number], was[old] = o, nil
	}
	unmapAll(was)
}

func (m *Memory) dropOriginals() {
	unmapAll(m.originals)
	m.originals = nil
}

func unmapAll(mappings []*linux.Mapping) {
	for _, o := range mappings {
		if o != nil {
			_ = o.Unmap()
		}
	}
}
