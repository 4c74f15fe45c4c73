package memory

import "slices"

// A layer of more than largeLayer pages is not kept in private pages beside its
// file: a machine that has written all of its RAM would take twice the memory. It
// is written in parts, and of each part runs of longRun pages are mapped from the
// file, which gives the private pages back, before the next one is written.
const (
	largeLayer = 4096
	partPages  = 4096
	longRun    = 16
)

// storeLarge writes the layer's file in parts and returns what it mapped, also
// when it fails.
func (m *Memory) storeLarge(f *layerFile, p plan, source int) (mapped []piece, err error) {
	for rest := p.extents; len(rest) > 0; {
		var part []Extent
		part, rest = splitExtents(rest, partPages)
		if err := guard(func() error { return m.writePages(f, part) }); err != nil {
			return mapped, err
		}
		var long []piece
		for _, q := range inside(layerPieces(part, source), p.private) {
			if q.count >= longRun {
				long = append(long, q)
			}
		}
		left := m.replace(long)
		mapped = append(mapped, outside(long, rangesOf(left))...)
	}
	return mapped, nil
}

// splitExtents cuts the first pages off, at least one.
func splitExtents(extents []Extent, pages uint64) (first, rest []Extent) {
	for i, e := range extents {
		if e.Count < pages {
			pages -= e.Count
			continue
		}
		first = append(slices.Clip(extents[:i]), Extent{Start: e.Start, Count: pages, Offset: e.Offset})
		if e.Count == pages {
			return first, extents[i+1:]
		}
		tail := Extent{Start: e.Start + pages, Count: e.Count - pages, Offset: e.Offset}
		if e.Offset != ZeroExtent {
			tail.Offset += int64(pages * PageSize)
		}
		return first, append([]Extent{tail}, extents[i+1:]...)
	}
	return extents, nil
}

// owe notes pages that are mapped from the file of a layer that did not come
// about: the next one has to have them, although they are not private.
func (m *Memory) owe(pieces []piece) {
	if len(pieces) == 0 {
		return
	}
	for _, p := range pieces {
		m.owed = m.owed.set(p, m.pages)
		p.source = otherSource
		m.mapped = overlay(m.mapped, []piece{p}, appendApart)
	}
	m.view = slices.Clone(m.view) // what is mapped is not what it says any more
}
