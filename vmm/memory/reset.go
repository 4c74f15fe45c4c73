package memory

import (
	"fmt"
	"os"
)

// Reset puts the contents back to those of the layers that the memory was made
// from, or that ResetTo gave it last. What was written since is gone, frozen or
// not; layers that Freeze returned are their owners'. The mapping stays where it
// is, and so does everything in it that nobody wrote: as long as nothing was
// frozen, only private pages are touched.
//
// Nobody may access guest memory meanwhile. After an error the contents are
// undefined, and the memory is good for nothing but Close.
func (m *Memory) Reset() error {
	m.lock()
	defer m.mu.Unlock()
	if err := m.resetLocked(); err != nil {
		return fmt.Errorf("reset memory: %w", err)
	}
	return nil
}

// ResetTo is Reset to other layers, bottom first, for memory of the same size.
// Layers that the memory was based on are recognised by their files; what comes
// from them stays mapped. Errors as New's and Reset's; after a *LayerError
// nothing has changed.
func (m *Memory) ResetTo(layers []Layer) error {
	for i, l := range layers {
		if err := checkLayer(i, l, m.pages); err != nil {
			return err
		}
	}
	m.lock()
	defer m.mu.Unlock()
	if m.closed.Load() {
		return m.errClosed("reset")
	}
	m.rebaseLocked(layers)
	if err := m.resetLocked(); err != nil {
		return fmt.Errorf("reset memory: %w", err)
	}
	return nil
}

// Unused says that nobody has used the memory since its last reset, of which the next one
// makes no conclusions then: a page that has not changed was not idle.
func (m *Memory) Unused() {
	m.lock()
	defer m.mu.Unlock()
	m.unused = true
}

// resetLocked makes the contents those of origin.
func (m *Memory) resetLocked() error {
	if m.closed.Load() {
		return os.ErrClosed
	}
	private, err := m.scan(m)
	if err != nil {
		return err
	}
	var rest []piece
	if &m.view[0] != &m.origin.view[0] { // otherwise nothing was mapped since
		if private, rest, err = m.mapAgain(private); err != nil {
			return err
		}
	}
	if err := m.revertLocked(private); err != nil {
		return err
	}
	for _, p := range rest {
		if err := m.copyIn(p); err != nil {
			return err
		}
	}
	m.markCopied(rest)
	return nil
}

// mapAgain maps what origin has and is not mapped, or copies it into private pages where
// that costs less. It returns which of the private pages are still to be reverted, and
// what found no room for mappings.
func (m *Memory) mapAgain(private []pageRange) (left []pageRange, rest []piece, err error) {
	if err := m.closeFrozen(); err != nil {
		return nil, nil, err
	}
	m.view = m.origin.view
	hot := m.origin.hot()
	again, warm := m.cheaperCopied(differing(m.origin.under, m.mapped), private)
	// What is hot has other contents than what lies under it.
	warm = interleaved(outside(warm, rangesOf(hot)), hot)
	if rest, err = m.place(again); err != nil {
		return nil, nil, err
	}
	m.mapped, m.copied = joined(m.mapped), nil
	closeAll(m.sources[len(m.origin.files):])
	m.sources = m.sources[:len(m.origin.files)]
	placed := outside(again, rangesOf(rest))
	if err := m.adviseAgain(placed); err != nil {
		return nil, nil, err
	}
	private = without(private, rangesOf(placed)) // where something is mapped now nothing is
	return private, outside(rest, rangesOf(hot)), m.warm(warm, private)
}

// A mapping costs as much as copying some pages into private pages of their own, or many
// into such as there are, and the private pages that it takes away cost faults later.
const (
	mappingCost = 25 // in microseconds, as below, see docs/cost-model.md
	copyCost    = 10 // of a page that is not private
	rewriteCost = 1  // of one that is
)

// cheaperCopied divides pieces into those to map and those that are copied, because most
// of their pages are private already.
func (m *Memory) cheaperCopied(pieces []piece, private []pageRange) (mapped, copied []piece) {
	for _, p := range pieces {
		if p.count < mappingCost/rewriteCost {
			own := countPieces(inside([]piece{p}, private))
			if own*rewriteCost+(p.count-own)*copyCost < mappingCost {
				copied = append(copied, p)
				continue
			}
		}
		mapped = append(mapped, p)
	}
	return mapped, copied
}

// adviseAgain sets what holds for RAM after many pieces were mapped anew.
func (m *Memory) adviseAgain(pieces []piece) error {
	for _, p := range pieces {
		if p.zero() {
			if err := m.refuseHugePages(pageRange{p.start, p.end()}); err != nil {
				return err
			}
		}
	}
	return m.keepOutOfDumps(pageRange{0, m.pages})
}

// rebaseLocked makes the stack of layers the origin. What is mapped stays as it
// is, known by the new numbers of its sources.
func (m *Memory) rebaseLocked(layers []Layer) {
	numbers := make(map[int]int) // of sources, old to new
	var stack [][]piece
	number := 0
	for _, l := range layers {
		source := noSource
		if l.File != nil {
			source = number
			if was := m.sourceOf(l.File); was != noSource {
				numbers[was] = source
			}
			number++
		}
		stack = append(stack, layerPieces(l.Extents, source))
	}
	m.mapped = renumbered(m.mapped, numbers)
	m.renumberOriginals(numbers)
	closeAll(m.sources)
	m.sources = make([]*os.File, number)
	m.origin = newOrigin(m.pages, stack, filesOf(layers))
}

// sourceOf returns the number of the source that has this file, noSource if none
// has.
func (m *Memory) sourceOf(layer *os.File) int {
	info, err := layer.Stat()
	if err != nil {
		return noSource
	}
	for i := range m.sources {
		f := m.sources[i]
		if f == nil && i < len(m.origin.files) {
			f = m.origin.files[i]
		}
		if f == nil {
			continue // a former layer that is only mapped
		}
		if have, err := f.Stat(); err == nil && os.SameFile(info, have) {
			return i
		}
	}
	return noSource
}

func closeAll(files []*os.File) {
	for _, f := range files {
		if f != nil {
			f.Close()
		}
	}
}

// otherSource stands for a source that is mapped somewhere and has no number
// any more: nothing that is wanted comes from it.
const otherSource = -2

// flatSource stands for a file that the memory was flattened into when it was
// made: it has the origin's contents.
const flatSource = -3

func renumbered(pieces []piece, numbers map[int]int) []piece {
	out := make([]piece, len(pieces))
	for i, p := range pieces {
		if !p.zero() {
			number, ok := numbers[p.source]
			if !ok {
				number = otherSource
			}
			p.source = number
		}
		out[i] = p
	}
	return out
}

// differing returns the parts of want, which is the origin's view, where have is
// something else. Both cover the same pages.
func differing(want, have []piece) []piece {
	var out []piece
	for _, w := range want {
		for len(have) > 0 && have[0].start < w.end() {
			h := have[0]
			start, end := max(w.start, h.start), min(w.end(), h.end())
			part, is := w.from(start).until(end), h.from(start)
			if is.source != flatSource && (part.source != is.source || !part.zero() && part.offset != is.offset) {
				out = appendMerged(out, part)
			}
			if h.end() > w.end() {
				break
			}
			have = have[1:]
		}
	}
	return out
}

// joined merges what continues each other. The kernel has done the same to the
// mappings, once adviseAgain has made their flags equal.
func joined(pieces []piece) []piece {
	var out []piece
	for _, p := range pieces {
		out = appendMerged(out, p)
	}
	return out
}
