package memory

import (
	"errors"

	"github.com/forkvm/forkvm/internal/linux"
)

// keptPages are private pages that have the contents of a layer, unless they were
// written since.
type keptPages struct {
	source int // of the layer
	pieces []piece
}

// Bounds of what Freeze keeps from one to the one after next: layers, since each
// takes a descriptor, and pages, since each takes twice its memory and is compared
// in the pause. What is above them is mapped, oldest first, but not all of it in
// one pause: settleRuns pieces, or more when there is twice as much as there should
// be: an eighth of the pages above that, or what is left of a layer.
const (
	maxKeptLayers = 16
	maxKeptPages  = 2048
	settleRuns    = 8

	// maxStuckLayers bounds the layers of which pages are kept because there is
	// no room for mappings.
	maxStuckLayers = 64
)

// keep notes that pieces of the layer stay in private pages.
func (m *Memory) keep(source int, pieces []piece) {
	if len(pieces) == 0 {
		m.releaseSources(source, nil)
		return
	}
	m.markCopied(pieces)
	m.kept = append(m.kept, keptPages{source: source, pieces: pieces})
}

// uncopy notes that pages were written since they were kept.
func (m *Memory) uncopy(ranges []pageRange) {
	if m.copied == nil {
		return
	}
	for _, r := range ranges {
		for n := r.start; n < r.end; n++ {
			word, bit := &m.copied[n/64], uint64(1)<<(n%64)
			m.cold -= int(*word & bit >> (n % 64))
			*word &^= bit
		}
	}
}

// settle maps kept pages, oldest layer first, until the bounds hold or the effort
// for one freeze is spent. The pages of the layer that is being frozen are not among
// the kept ones yet, and are left alone.
func (m *Memory) settle() {
	cold := m.cold
	effort := max(settleRuns, (cold-2*maxKeptPages)/8)
	for len(m.kept) > 0 && (len(m.kept) >= maxKeptLayers || cold > maxKeptPages) {
		oldest := &m.kept[0]
		still := m.stillKept(oldest.pieces)
		n := min(effort, len(still))
		if len(m.kept) >= 2*maxKeptLayers {
			n = len(still)
		}
		cold -= int(countPieces(still[:n]))
		rest := m.settlePieces(still[:n])
		effort = max(0, effort-n)
		if rest = append(rest, still[n:]...); len(rest) > 0 {
			oldest.pieces = rest
			break
		}
		m.dropOldest()
	}
	for len(m.kept) >= maxStuckLayers {
		m.forgetOldest()
	}
}

// settlePieces maps pieces that are in private pages, from a file of the memory's
// own: mapped from the layer's, a few pages of it would hold all of it in the
// host's memory for as long as the machine lives. If there are too many mappings,
// the memory is flattened where it is crowded most. What even then finds no room
// is returned.
func (m *Memory) settlePieces(pieces []piece) (rest []piece) {
	chosen, rest := m.choose(pieces)
	if m.flatten(rangesOf(chosen), otherSource, m.readRAM) != nil {
		return pieces
	}
	if len(rest) == 0 {
		return nil
	}
	windows := m.crowded(nil, m.flatTarget())
	if len(windows) == 0 || m.flatten(windows, otherSource, m.readRAM) != nil {
		return rest
	}
	again := outside(rest, windows)
	chosen, rest = m.choose(again)
	if m.flatten(rangesOf(chosen), otherSource, m.readRAM) != nil {
		return again
	}
	return rest
}

func rangesOf(pieces []piece) []pageRange {
	ranges := make([]pageRange, len(pieces))
	for i, p := range pieces {
		ranges[i] = pageRange{p.start, p.end()}
	}
	return ranges
}

// forgetOldest gives up on the oldest layer: what is still kept of it counts as
// written, and goes into the next layer once more.
func (m *Memory) forgetOldest() {
	for _, p := range m.stillKept(m.kept[0].pieces) {
		m.copied.clear(p)
	}
	m.dropOldest()
}

// stillKept returns what is left of pieces: a page that was written since is in a
// newer layer, and one that was discarded in none.
func (m *Memory) stillKept(pieces []piece) []piece {
	var still []piece
	for _, p := range pieces {
		for _, v := range within(m.view, pageRange{p.start, p.end()}) {
			if v.source != p.source {
				continue
			}
			for n := v.start; n < v.end(); n++ {
				if m.copied.has(n) {
					still = appendMerged(still, v.from(n).until(n+1))
				}
			}
		}
	}
	return still
}

// dropOldest lets go of the oldest layer's file, of which nothing is kept any
// more.
func (m *Memory) dropOldest() {
	source := m.kept[0].source
	m.kept = m.kept[1:]
	if w := m.windows[source]; w != nil {
		_ = w.Unmap()
		delete(m.windows, source)
	}
	if f := m.sources[source]; f != nil {
		f.Close()
		m.sources[source] = nil
	}
}

// mapKept maps the files of layers of which pages are kept. Where that fails they
// are read instead.
func (m *Memory) mapKept() {
	for _, k := range m.kept {
		if k.source == noSource || m.windows[k.source] != nil {
			continue
		}
		f := m.sources[k.source]
		if f == nil && k.source < len(m.origin.files) {
			f = m.origin.files[k.source]
		}
		if f == nil {
			continue
		}
		info, err := f.Stat()
		if err != nil || info.Size() == 0 {
			continue
		}
		w, err := linux.MapReadOnly(f, uint64(info.Size()))
		if err != nil {
			continue
		}
		if m.windows == nil {
			m.windows = make(map[int]*linux.Mapping)
		}
		m.windows[k.source] = w
	}
}

// closeFrozen gives back what freezes left behind, apart from the sources.
func (m *Memory) closeFrozen() error {
	errs := []error{m.dropPrepared()}
	for _, w := range m.windows {
		errs = append(errs, w.Unmap())
	}
	m.kept, m.windows, m.discarded, m.owed = nil, nil, nil, nil
	return errors.Join(errs...)
}

func countPieces(pieces []piece) (pages uint64) {
	for _, p := range pieces {
		pages += p.count
	}
	return pages
}

func countPages(ranges []pageRange) (pages uint64) {
	for _, r := range ranges {
		pages += r.end - r.start
	}
	return pages
}
