package memory

import "sort"

// noSource is the source of pages that are zeros.
const noSource = -1

// piece says where the contents of a run of pages come from.
type piece struct {
	start, count uint64 // pages
	source       int    // index in Memory.sources, or noSource
	offset       int64  // in the source's file
}

func (p piece) end() uint64 { return p.start + p.count }

func (p piece) zero() bool { return p.source == noSource }

// from is the part of p that begins at page start.
func (p piece) from(start uint64) piece {
	skip := start - p.start
	p.start, p.count = start, p.count-skip
	if !p.zero() {
		p.offset += int64(skip * PageSize)
	}
	return p
}

// until is the part of p that ends before page end.
func (p piece) until(end uint64) piece {
	p.count = end - p.start
	return p
}

// continues reports whether q goes on where p ends, in pages and in contents.
func (p piece) continues(q piece) bool {
	return p.end() == q.start && p.source == q.source &&
		(p.zero() || p.offset+int64(p.count*PageSize) == q.offset)
}

// appendMerged appends p and joins it with the last piece if it continues it.
func appendMerged(pieces []piece, p piece) []piece {
	if n := len(pieces); n > 0 && pieces[n-1].continues(p) {
		pieces[n-1].count += p.count
		return pieces
	}
	return append(pieces, p)
}

// pieceAppend is how a result grows: appendMerged, or plain append where each
// piece stands for a mapping that the kernel may not have joined.
type pieceAppend func([]piece, piece) []piece

func appendApart(pieces []piece, p piece) []piece { return append(pieces, p) }

// overlay puts top over base. Both ascend; base covers every page that top does.
func overlay(base, top []piece, add pieceAppend) []piece {
	out := make([]piece, 0, len(base)+2*len(top))
	for _, b := range base {
		for len(top) > 0 && top[0].start < b.end() {
			t := top[0]
			if b.start < t.start {
				out = add(out, b.until(t.start))
			}
			if b.end() < t.end() {
				// The rest of t covers base pieces to come; it is added, whole,
				// with the last of them.
				b.count = 0
				break
			}
			out = add(out, t)
			top = top[1:]
			b = b.from(t.end())
		}
		if b.count > 0 {
			out = add(out, b)
		}
	}
	return out
}

// stacked is what layers come to that lie on each other, bottom first. Halves are put
// together: most layers have few pieces, and each would go through all that lies below.
func stacked(layers [][]piece) []piece {
	switch len(layers) {
	case 0:
		return nil
	case 1:
		return layers[0]
	}
	half := len(layers) / 2
	lower, upper := stacked(layers[:half]), stacked(layers[half:])
	return interleaved(outside(lower, rangesOf(upper)), upper)
}

// interleaved puts two ascending lists of pieces into one. No page is in both.
func interleaved(a, b []piece) []piece {
	out := make([]piece, 0, len(a)+len(b))
	for len(a) > 0 && len(b) > 0 {
		if b[0].start < a[0].start {
			a, b = b, a
		}
		out, a = append(out, a[0]), a[1:]
	}
	return append(append(out, a...), b...)
}

// find returns the index of the piece that has the page; pieces cover all pages.
func find(pieces []piece, page uint64) int {
	return sort.Search(len(pieces), func(i int) bool { return pieces[i].end() > page })
}

// layerPieces are the extents of a layer as pieces of the given source.
func layerPieces(extents []Extent, source int) []piece {
	pieces := make([]piece, 0, len(extents))
	for _, e := range extents {
		p := piece{start: e.Start, count: e.Count, source: source, offset: e.Offset}
		if e.Offset == ZeroExtent {
			p.source, p.offset = noSource, 0
		}
		pieces = appendMerged(pieces, p)
	}
	return pieces
}

// inside returns the parts of pieces that lie in the ranges. Both ascend.
func inside(pieces []piece, ranges []pageRange) []piece {
	out := make([]piece, 0, len(pieces))
	for _, p := range pieces {
		for len(ranges) > 0 && ranges[0].end <= p.start {
			ranges = ranges[1:]
		}
		for _, r := range ranges {
			if r.start >= p.end() {
				break
			}
			out = append(out, p.from(max(p.start, r.start)).until(min(p.end(), r.end)))
		}
	}
	return out
}
