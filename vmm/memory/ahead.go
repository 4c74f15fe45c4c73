package memory

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// PageRange is a run of pages of guest RAM.
type PageRange struct{ Start, Count uint64 }

// Own returns the pages that the memory has to itself, in ascending ranges: those
// that were written, also with what they had held before. Anybody may write guest
// memory meanwhile.
func (m *Memory) Own() ([]PageRange, error) {
	m.lock()
	defer m.mu.Unlock()
	if m.closed.Load() {
		return nil, m.errClosed("scan")
	}
	own, err := m.scan(m)
	if err != nil {
		return nil, err
	}
	// Pages that were copied, for want of mappings or because they are hot, have not
	// been written.
	own = without(own, m.copied.ranges())
	ranges := make([]PageRange, len(own))
	for i, r := range own {
		ranges[i] = PageRange{Start: r.start, Count: r.end - r.start}
	}
	return ranges, nil
}

// Populate gives the memory pages of its own, with the contents that they have, as
// if each was written, but without a fault for each. It is for pages that will be
// written anyway: from now on they count as written, but for those that a reset has left
// private, with which there is nothing to do. The ranges ascend. It needs Linux 5.14. What
// was populated before an error stays.
func (m *Memory) Populate(ranges []PageRange) error {
	m.lock()
	defer m.mu.Unlock()
	if m.closed.Load() {
		return m.errClosed("populate")
	}
	wanted := make([]pageRange, len(ranges))
	for i, r := range ranges {
		if r.Start >= m.pages || r.Count > m.pages-r.Start {
			return fmt.Errorf("populate memory: %d pages from page %d on: RAM has %d", r.Count, r.Start, m.pages)
		}
		wanted[i] = pageRange{r.Start, r.Start + r.Count}
	}
	for _, r := range without(without(wanted, m.copied.ranges()), m.revertedRanges()) {
		if err := m.mapping.Advise(r.start*PageSize, (r.end-r.start)*PageSize, unix.MADV_POPULATE_WRITE); err != nil {
			return err
		}
	}
	return nil
}
