package memory

import (
	"cmp"
	"errors"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/linux"
)

// pageRange is the pages from start up to, not including, end.
type pageRange struct{ start, end uint64 }

// scanner finds the private pages of a memory, in ascending ranges that do not
// touch. Both scanners find the same.
type scanner func(m *Memory) ([]pageRange, error)

// chooseScanner tries PAGEMAP_SCAN on one page; a kernel before 6.7 gets the
// slower way.
func chooseScanner(m *Memory) (scanner, error) {
	start := uint64(m.base)
	err := m.pagemap.ScanPrivate(start, start+PageSize, func(linux.AddressRange) {})
	switch {
	case err == nil:
		return scanIoctl, nil
	case errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.EINVAL):
		return scanPagemap, nil
	}
	return nil, err
}

// scanIoctl lets the kernel pick the pages (PAGEMAP_SCAN).
func scanIoctl(m *Memory) ([]pageRange, error) {
	base := uint64(m.base)
	var ranges []pageRange
	err := m.pagemap.ScanPrivate(base, base+m.size, func(r linux.AddressRange) {
		ranges = appendRange(ranges, (r.Start-base)/PageSize, (r.End-base)/PageSize)
	})
	return ranges, err
}

// scanPagemap reads a word per page and picks here.
func scanPagemap(m *Memory) ([]pageRange, error) {
	base := uint64(m.base)
	entries := make([]linux.PagemapEntry, min(m.pages, 1<<15))
	var ranges []pageRange
	for first := uint64(0); first < m.pages; first += uint64(len(entries)) {
		entries = entries[:min(uint64(len(entries)), m.pages-first)]
		if err := m.pagemap.Read(base+first*PageSize, entries); err != nil {
			return nil, err
		}
		for i, e := range entries {
			if n := first + uint64(i); m.isPrivate(n, e) {
				ranges = appendRange(ranges, n, n+1)
			}
		}
	}
	return ranges, nil
}

// isPrivate decides about page n by its page-map word. The kernel does not show
// an unprivileged process which page frame it is, so the shared page of zeros,
// which stands in for anonymous memory that was read but never written, has to be
// told from a written page by other marks: it is not exclusive, and zero.
func (m *Memory) isPrivate(n uint64, e linux.PagemapEntry) bool {
	switch {
	case e.File() || !e.Present() && !e.Swapped():
		return false
	case e.Swapped() || e.Exclusive():
		return true
	}
	return !isZero(m.page(n))
}

func appendRange(ranges []pageRange, start, end uint64) []pageRange {
	if n := len(ranges); n > 0 && ranges[n-1].end == start {
		ranges[n-1].end = end
		return ranges
	}
	return append(ranges, pageRange{start, end})
}

// without returns the parts of ranges that lie outside of others. Both ascend.
func without(ranges, others []pageRange) []pageRange {
	var out []pageRange
	for _, r := range ranges {
		for len(others) > 0 && others[0].start < r.end {
			o := others[0]
			if o.start > r.start {
				out = append(out, pageRange{r.start, o.start})
			}
			r.start = max(r.start, o.end)
			if o.end > r.end {
				break
			}
			others = others[1:]
		}
		if r.start < r.end {
			out = append(out, r)
		}
	}
	return out
}

var zeroPage [PageSize]byte

func isZero(page []byte) bool { return samePage(page, zeroPage[:]) }

// changedLocked returns the pages that were written since the last freeze: the
// private ones, without those that are private only because they were copied
// instead of mapped, or kept by a reset, and that still have the contents they came
// with; and those that are owed. mu is held.
func (m *Memory) changedLocked() ([]pageRange, error) {
	if m.closed.Load() {
		return nil, m.errClosed("scan")
	}
	changed, err := m.scan(m)
	if err == nil && (m.copied != nil || m.reverted != nil) {
		changed, err = m.withoutUnchanged(changed)
	}
	if err != nil || m.owed == nil {
		return changed, err
	}
	return joinRanges(append(changed, without(m.owed.ranges(), changed)...)), nil
}

func joinRanges(ranges []pageRange) []pageRange {
	slices.SortFunc(ranges, func(a, b pageRange) int { return cmp.Compare(a.start, b.start) })
	var out []pageRange
	for _, r := range ranges {
		out = appendRange(out, r.start, r.end)
	}
	return out
}

func (m *Memory) withoutUnchanged(private []pageRange) ([]pageRange, error) {
	changed := make([]pageRange, 0, len(private))
	err := guard(func() (err error) {
		at := 0 // in view, which the ranges are gone through along with
		for _, r := range private {
			for r.start < r.end {
				for m.view[at].end() <= r.start {
					at++
				}
				part := m.view[at].from(r.start)
				part = part.until(min(part.end(), r.end))
				if changed, err = m.appendChanged(changed, part); err != nil {
					return err
				}
				r.start = part.end()
			}
		}
		return nil
	})
	return changed, err
}

// appendChanged adds the pages of p, a part of view, that are not copied or kept
// pages with the contents that p says.
func (m *Memory) appendChanged(changed []pageRange, p piece) ([]pageRange, error) {
	window := m.window(p.source)
	for n := p.start; n < p.end(); n++ {
		same := false
		if m.copied.has(n) || m.wasReverted(n) {
			offset := p.offset + int64((n-p.start)*PageSize)
			switch {
			case p.zero():
				same = isZero(m.page(n))
			case offset+PageSize <= int64(len(window)):
				same = samePage(m.page(n), window[offset:offset+PageSize])
			default:
				var err error
				if same, err = m.equalsFile(n, p.from(n)); err != nil {
					return nil, err
				}
			}
		}
		if !same {
			changed = appendRange(changed, n, n+1)
		}
	}
	return changed, nil
}

// window is a source's file if it is mapped beside the memory, or nil.
func (m *Memory) window(source int) []byte {
	if w := m.windows[source]; w != nil {
		return w.Bytes()
	}
	if source >= 0 && source < len(m.originals) && m.originals[source] != nil {
		return m.originals[source].Bytes()
	}
	return nil
}

// equalsFile compares page n with the first page of p in its file.
func (m *Memory) equalsFile(n uint64, p piece) (bool, error) {
	var original [PageSize]byte
	if err := m.readSource(p, original[:]); err != nil {
		return false, err
	}
	return samePage(m.page(n), original[:]), nil
}

// Private returns the pages that were written since the memory was made or
// frozen, whatever was written to them. The extents' offsets are 0 and mean
// nothing. Nobody may write guest memory meanwhile.
func (m *Memory) Private() ([]Extent, error) {
	m.lock()
	defer m.mu.Unlock()
	changed, err := m.changedLocked()
	if err != nil {
		return nil, err
	}
	extents := make([]Extent, len(changed))
	for i, r := range changed {
		extents[i] = Extent{Start: r.start, Count: r.end - r.start}
	}
	return extents, nil
}
