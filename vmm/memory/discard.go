package memory

import (
	"golang.org/x/sys/unix"
)

// Discard makes the whole pages within the n bytes at guest-physical address gpa
// zeros, and gives back what they took: the pages are neither private afterwards
// nor stored by the next Freeze. Pages for which that would take more mappings
// than the memory may have keep their contents.
//
// Unlike Freeze, Discard may be called while others access guest memory. The range
// has to be RAM, as for an access. Errors: *RangeError, os.ErrClosed, or the
// system's.
func (m *Memory) Discard(gpa, n uint64) error {
	at, err := m.locate(gpa, n)
	if err != nil {
		return err
	}
	r := pageRange{start: (at + PageSize - 1) / PageSize, end: (at + n) / PageSize}
	if r.start >= r.end {
		return nil
	}
	m.lock()
	defer m.mu.Unlock()
	if m.closed.Load() {
		return m.errClosed("discard")
	}
	return m.discardLocked(r)
}

func (m *Memory) discardLocked(r pageRange) error {
	zeros := piece{start: r.start, count: r.end - r.start, source: noSource}
	if !allZero(within(m.mapped, r)) {
		// Something older would show through if only the private pages went.
		mapped := overlay(m.mapped, []piece{zeros}, appendApart)
		if len(mapped) > m.budget && len(mapped) > len(m.mapped) {
			return nil
		}
		if err := m.mapPiece(zeros); err != nil {
			return ignoreTooMany(err)
		}
		m.mapped = mapped
		if err := m.advisePiece(zeros); err != nil {
			return err
		}
	} else if err := m.mapping.Advise(r.start*PageSize, zeros.count*PageSize, unix.MADV_DONTNEED); err != nil {
		return err
	}
	m.copied.clear(zeros)
	for _, p := range within(m.view, r) {
		if !p.zero() {
			m.discarded = m.discarded.set(p, m.pages)
		}
	}
	if !allZero(within(m.view, r)) {
		m.view = overlay(m.view, []piece{zeros}, appendMerged)
	}
	return nil
}

// within returns the parts of pieces that lie in the range.
func within(pieces []piece, r pageRange) []piece {
	var parts []piece
	for i := find(pieces, r.start); i < len(pieces) && pieces[i].start < r.end; i++ {
		p := pieces[i]
		if p.start < r.start {
			p = p.from(r.start)
		}
		if p.end() > r.end {
			p = p.until(r.end)
		}
		parts = append(parts, p)
	}
	return parts
}

func allZero(pieces []piece) bool {
	for _, p := range pieces {
		if !p.zero() {
			return false
		}
	}
	return true
}
