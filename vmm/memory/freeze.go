package memory

import (
	"cmp"
	"slices"

	"golang.org/x/sys/unix"
)

// Freeze makes a layer of all pages that were written since the memory was made
// or last frozen, and makes that layer part of what the memory is based on: the
// VM and whoever is made from the layer share the pages. Contents do not change.
//
// The layer's file is a memory file, the caller's to close, with data from
// DataStart on in page order, sealed against shrinking; see Layer.Seal. Pages of
// zeros are not stored: they become zero extents where something lies below, and
// nothing otherwise. The same goes for pages that Discard gave back.
//
// Nobody may write guest memory meanwhile. On an error nothing has changed.
func (m *Memory) Freeze() (Layer, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	plan, err := m.planLocked()
	if err != nil {
		return Layer{}, err
	}
	layer, source, mapped, err := m.storeLocked(plan)
	if err != nil {
		return Layer{}, err
	}
	m.adoptLocked(plan, layer, source, mapped)
	return layer, nil
}

// adoptLocked bases the memory on the new layer. None of its steps changes what
// the memory contains, so what cannot be mapped is left out.
//
// The pages stay private on purpose. Mapping the layer over a single page costs
// more than ten times as much as finding out next time that the page is still the
// same, and one that was written once is likely to be written again, which costs
// a fault and a copy if it was mapped. So it is mapped when it has not changed for
// some freezes. Only what is in mapped has been mapped before.
func (m *Memory) adoptLocked(p plan, layer Layer, source int, mapped []piece) {
	pieces := layerPieces(layer.Extents, source)
	m.view = overlay(m.view, pieces, appendMerged)
	m.discarded, m.owed = nil, nil
	private := outside(inside(pieces, p.private), rangesOf(mapped))
	private = append(private, m.dropZeros(p.dropped)...)
	byStart(private)
	m.keep(source, private)
	m.settle()
}

// replace maps pieces over private pages that have the same contents, and returns
// those that it could not map.
func (m *Memory) replace(pieces []piece) (rest []piece) {
	rest, _ = m.place(pieces)
	for _, p := range pieces {
		_ = m.advisePiece(p) // advice has no bearing on contents
	}
	return rest
}

// dropZeros gives back written zeros over zeros where zeros are what is mapped;
// elsewhere something older shows through when a private page goes. It returns
// what it leaves private: of many ranges the longest go.
func (m *Memory) dropZeros(ranges []pageRange) (left []piece) {
	const most = 16
	slices.SortFunc(ranges, func(a, b pageRange) int { return cmp.Compare(b.end-b.start, a.end-a.start) })
	for i, r := range ranges {
		for _, under := range within(m.mapped, r) {
			if !under.zero() || i >= most ||
				m.mapping.Advise(under.start*PageSize, under.count*PageSize, unix.MADV_DONTNEED) != nil {
				left = append(left, piece{start: under.start, count: under.count, source: noSource})
			}
		}
	}
	return left
}
