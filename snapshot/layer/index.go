package layer

// segment is a run of blocks whose data is in one file of a disk: file is an
// index into Disk.files.
type segment struct {
	start  uint64
	count  uint64
	offset int64 // ZeroExtent: zeros
	file   uint32
}

func (s segment) end() uint64 { return s.start + s.count }

// from returns the part of s at and after block.
func (s segment) from(block uint64) segment {
	skip := block - s.start
	s.start += skip
	s.count -= skip
	if s.offset != ZeroExtent {
		s.offset += int64(skip) * UnitSize
	}
	return s
}

// until returns the part of s before block.
func (s segment) until(block uint64) segment {
	s.count = block - s.start
	return s
}

// index is a flattened stack: sorted, not overlapping. Blocks between the
// segments read as zeros. A lookup costs the same for one layer and for fifty.
type index []segment

// flatten makes one index of a stack, bottom first. Stacks are merged
// pairwise, so that every extent is handled log(depth) times.
func flatten(layers []*Layer) index {
	merged := flattenRange(layers, 0)
	// Below the whole stack is nothing: zeros need no segment.
	out := merged[:0]
	for _, s := range merged {
		if s.offset != ZeroExtent {
			out = append(out, s)
		}
	}
	return out
}

func flattenRange(layers []*Layer, first uint32) index {
	switch len(layers) {
	case 0:
		return nil
	case 1:
		return indexOf(layers[0].Extents(), first)
	}
	half := len(layers) / 2
	return overlay(flattenRange(layers[:half], first), flattenRange(layers[half:], first+uint32(half)))
}

// indexOf is the index of one layer alone.
func indexOf(extents []Extent, file uint32) index {
	out := make(index, len(extents))
	for i, e := range extents {
		out[i] = segment{start: e.Start, count: e.Count, offset: e.Offset, file: file}
	}
	return out
}

// overlay returns what is seen of lower through upper.
func overlay(lower, upper index) index {
	out := make(index, 0, len(lower)+len(upper))
	for _, top := range upper {
		for len(lower) > 0 && lower[0].start < top.start {
			s := lower[0]
			if s.end() <= top.start {
				out = append(out, s)
				lower = lower[1:]
				continue
			}
			out = append(out, s.until(top.start))
			break
		}
		out = append(out, top)
		lower = skipTo(lower, top.end())
	}
	return append(out, lower...)
}

// skipTo drops what lies before block. It changes the first element that is
// left, which no other index shares: overlay's inputs are its own.
func skipTo(list index, block uint64) index {
	for len(list) > 0 && list[0].end() <= block {
		list = list[1:]
	}
	if len(list) > 0 && list[0].start < block {
		list[0] = list[0].from(block)
	}
	return list
}

// find returns the first segment that ends after block.
func (x index) find(block uint64) int {
	lo, hi := 0, len(x)
	for lo < hi {
		mid := int(uint(lo+hi) / 2)
		if x[mid].end() > block {
			hi = mid
		} else {
			lo = mid + 1
		}
	}
	return lo
}

// lookup says where block is and for how many blocks (at most limit) that goes
// on.
func (x index) lookup(block, limit uint64) segment {
	i := x.find(block)
	if i == len(x) || x[i].start >= block+limit {
		return segment{start: block, count: limit, offset: ZeroExtent}
	}
	if x[i].start > block {
		return segment{start: block, count: x[i].start - block, offset: ZeroExtent}
	}
	s := x[i].from(block)
	s.count = min(s.count, limit)
	return s
}
