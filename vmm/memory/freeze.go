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
// DataStart on in page order and room of any length behind it, not sealed; see
// Layer.Seal. Pages of zeros are not stored: they become zero extents where
// something lies below, and nothing otherwise. The same goes for pages that Discard
// gave back.
//
// Nobody may write guest memory meanwhile. On an error nothing has changed.
func (m *Memory) Freeze() (Layer, error) {
	m.lock()
	defer m.mu.Unlock()
	plan, err := m.planLocked()
	if err != nil {
		return Layer{}, err
	}
	layer, source, mapped, err := m.storeLocked(plan)
	if err != nil {
		return Layer{}, err
	}
	for _, ranges := range [][]pageRange{plan.private, plan.dropped} {
		m.uncopy(ranges)
	}
	m.settle()
	m.frozen = &frozen{
		extents: layer.Extents,
		source:  source,
		private: plan.private,
		mapped:  mapped,
		left:    m.dropZeros(plan.dropped),
	}
	return layer, nil
}

// frozen is what is left to do of a freeze when the guest runs again, since it
// changes nothing but what is known about the memory.
type frozen struct {
	extents []Extent // of the layer
	source  int
	private []pageRange // pages that are in extents and were private
	mapped  []piece     // those of them that are mapped now
	left    []piece     // private zeros over zeros
}

// lock takes mu and does what the last freeze left to do.
func (m *Memory) lock() {
	m.mu.Lock()
	m.adoptLocked()
}

// adoptLocked bases the memory on the layer of the last freeze.
//
// The pages stay private on purpose. Mapping the layer over a single page costs
// more than ten times as much as finding out next time that the page is still the
// same, and one that was written once is likely to be written again, which costs
// a fault and a copy if it was mapped. So it is mapped when it has not changed for
// some freezes. Only what is in mapped has been mapped before.
func (m *Memory) adoptLocked() {
	f := m.frozen
	if f == nil {
		return
	}
	m.frozen = nil
	pieces := layerPieces(f.extents, f.source)
	m.view = overlay(m.view, pieces, appendMerged)
	m.discarded, m.owed = nil, nil
	private := outside(inside(pieces, f.private), rangesOf(f.mapped))
	private = append(private, f.left...)
	byStart(private)
	m.keep(f.source, private)
	m.cold = int(m.copied.count())
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
// what it leaves private: of many ranges the longest go. Short ones stay, as other
// pages do that were written: a guest's kernel clears the same pages again.
func (m *Memory) dropZeros(ranges []pageRange) (left []piece) {
	const most = 16
	slices.SortFunc(ranges, func(a, b pageRange) int { return cmp.Compare(b.end-b.start, a.end-a.start) })
	for i, r := range ranges {
		for _, under := range within(m.mapped, r) {
			if !under.zero() || i >= most || under.count < longRun ||
				m.mapping.Advise(under.start*PageSize, under.count*PageSize, unix.MADV_DONTNEED) != nil {
				left = append(left, piece{start: under.start, count: under.count, source: noSource})
			}
		}
	}
	return left
}
