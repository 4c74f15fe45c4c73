package memory

import (
	"cmp"
	"fmt"
	"io"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// originState is what a memory begins with and Reset goes back to.
type originState struct {
	view []piece
	// under is view without the pages that are hot: what is to be mapped.
	under []piece
	// files are the layers' own, by the numbers that their sources have in view.
	files []*os.File
}

// A page of a small run in one of the newest layers is hot: a machine wrote it a short
// while ago, and most such pages (the kernel's own data, the guest agent's) are
// written again soon. Mapping the run costs more than twenty microseconds, and the
// write a fault and a copy on top; so hot pages are copied into private pages.
const (
	hotRun   = 8    // pages
	maxHot   = 1024 // pages
	hotReads = 64   // runs in one read
)

// newOrigin is what a stack of layers comes to, bottom first.
func newOrigin(pages uint64, stack [][]piece, files []*os.File) originState {
	all := []piece{{count: pages, source: noSource}}
	o := originState{view: all, files: files}
	if len(stack) == 0 {
		o.under = all
		return o
	}
	bottom, upper := overlay(all, stack[0], appendMerged), stacked(stack[1:])
	o.view = overlay(bottom, upper, appendMerged)
	hot := chooseHot(o.view, stack[max(0, len(stack)-1-maxKeptLayers)])
	o.under = overlay(bottom, outside(upper, hot), appendMerged)
	return o
}

// chooseHot picks small runs of view that come from a layer above the lower one, the
// smallest first.
func chooseHot(view, lower []piece) []pageRange {
	var small []piece
	for _, p := range view {
		if !p.zero() && p.count <= hotRun && p.source > sourceOfAny(lower) {
			small = append(small, p)
		}
	}
	slices.SortStableFunc(small, func(a, b piece) int { return cmp.Compare(a.count, b.count) })
	n, room := 0, uint64(maxHot)
	for n < len(small) && small[n].count <= room {
		room -= small[n].count
		n++
	}
	small = small[:n]
	byStart(small)
	return rangesOf(small)
}

// sourceOfAny is where a layer's data comes from.
func sourceOfAny(pieces []piece) int {
	for _, p := range pieces {
		if !p.zero() {
			return p.source
		}
	}
	return noSource
}

// mappable is what is to be mapped over zeros.
func (o *originState) mappable() []piece {
	var data []piece
	for _, p := range o.under {
		if !p.zero() {
			data = append(data, p)
		}
	}
	return data
}

// hot is what is to be copied.
func (o *originState) hot() []piece { return differing(o.view, o.under) }

// warm makes hot pages private, and keeps them like those that a freeze has left so. What is
// private already gets its contents when it is reverted.
func (m *Memory) warm(hot []piece, private []pageRange) error {
	for _, pieces := range bySource(outside(hot, private)) {
		if err := m.copyPieces(pieces); err != nil {
			return err
		}
	}
	m.markCopied(hot)
	for _, pieces := range bySource(hot) {
		if source := pieces[0].source; source != noSource {
			byStart(pieces)
			m.kept = append(m.kept, keptPages{source: source, pieces: pieces})
		}
	}
	return nil
}

// bySource divides pieces by where they come from, in the order of the files.
func bySource(pieces []piece) (parts [][]piece) {
	sorted := slices.Clone(pieces)
	slices.SortStableFunc(sorted, func(a, b piece) int {
		return cmp.Or(cmp.Compare(a.source, b.source), cmp.Compare(a.offset, b.offset))
	})
	for len(sorted) > 0 {
		n := 1
		for n < len(sorted) && sorted[n].source == sorted[0].source {
			n++
		}
		parts = append(parts, sorted[:n:n])
		sorted = sorted[n:]
	}
	return parts
}

// copyPieces reads pieces of one source, in the order of its file, into private pages.
func (m *Memory) copyPieces(pieces []piece) error {
	for len(pieces) > 0 {
		var vectors [][]byte
		n := 0
		for n < len(pieces) && n < hotReads && (n == 0 || follows(pieces[n-1], pieces[n])) {
			vectors = append(vectors, m.ram[pieces[n].start*PageSize:pieces[n].end()*PageSize])
			n++
		}
		var err error
		if n == 1 {
			err = m.copyIn(pieces[0])
		} else {
			err = readVectors(m.file(pieces[0].source), vectors, pieces[0].offset)
		}
		if err != nil {
			return err
		}
		pieces = pieces[n:]
	}
	return nil
}

// follows reports whether q's contents lie right behind p's in the file.
func follows(p, q piece) bool {
	return !p.zero() && p.offset+int64(p.count*PageSize) == q.offset
}

// readVectors fills all of the vectors, however little the kernel gives at a time.
func readVectors(f *os.File, vectors [][]byte, offset int64) error {
	for len(vectors) > 0 {
		n, err := unix.Preadv(int(f.Fd()), vectors, offset)
		if err == unix.EINTR {
			continue
		}
		if err == nil && n == 0 {
			err = fmt.Errorf("%w: %w", ErrBackingLost, io.ErrUnexpectedEOF) // it was long enough when it was checked
		}
		if err != nil {
			return fmt.Errorf("read memory layer (%s, offset %d): %w", f.Name(), offset, err)
		}
		offset += int64(n)
		vectors = advance(vectors, n)
	}
	return nil
}

// advance leaves out the first n bytes of the vectors.
func advance(vectors [][]byte, n int) [][]byte {
	for len(vectors) > 0 && n >= len(vectors[0]) {
		n -= len(vectors[0])
		vectors = vectors[1:]
	}
	if n > 0 {
		vectors[0] = vectors[0][n:]
	}
	return vectors
}

func filesOf(layers []Layer) (files []*os.File) {
	for _, l := range layers {
		if l.File != nil {
			files = append(files, l.File)
		}
	}
	return files
}
