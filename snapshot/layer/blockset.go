package layer

import (
	"iter"
	"maps"
	"math/bits"
	"slices"
)

// blockSet is a set of block numbers that stays small for long runs and for
// few blocks: a bitmap in leaves of 4096 blocks, where full leaves are shared.
// The zero value is an empty set.
type blockSet struct {
	leaves map[uint64]*setLeaf
}

const setLeafBlocks = 4096

type setLeaf [setLeafBlocks / 64]uint64

// fullLeaf stands for every leaf with all bits set; it is never written to.
var fullLeaf = func() *setLeaf {
	l := new(setLeaf)
	for i := range l {
		l[i] = ^uint64(0)
	}
	return l
}()

func (s *blockSet) empty() bool { return len(s.leaves) == 0 }

func (s *blockSet) has(block uint64) bool {
	l := s.leaves[block/setLeafBlocks]
	return l != nil && l[block%setLeafBlocks/64]&(1<<(block%64)) != 0
}

// add puts the blocks [from, to) into the set.
func (s *blockSet) add(from, to uint64) {
	if s.leaves == nil {
		s.leaves = make(map[uint64]*setLeaf)
	}
	for from < to {
		key, lo := from/setLeafBlocks, from%setLeafBlocks
		hi := min(setLeafBlocks, lo+to-from)
		switch l := s.leaves[key]; {
		case lo == 0 && hi == setLeafBlocks:
			s.leaves[key] = fullLeaf
		case l == fullLeaf:
		default:
			if l == nil {
				l = new(setLeaf)
				s.leaves[key] = l
			}
			l.mask(lo, hi, func(word *uint64, m uint64) { *word |= m })
		}
		from += hi - lo
	}
}

// remove takes the blocks [from, to) out of the set.
func (s *blockSet) remove(from, to uint64) {
	for from < to && len(s.leaves) > 0 {
		key, lo := from/setLeafBlocks, from%setLeafBlocks
		hi := min(setLeafBlocks, lo+to-from)
		from += hi - lo
		l := s.leaves[key]
		if l == nil {
			continue
		}
		if l == fullLeaf {
			l = new(setLeaf)
			*l = *fullLeaf
			s.leaves[key] = l
		}
		l.mask(lo, hi, func(word *uint64, m uint64) { *word &^= m })
		if *l == (setLeaf{}) {
			delete(s.leaves, key)
		}
	}
}

// mask calls f for each word of l with bits in [lo, hi).
func (l *setLeaf) mask(lo, hi uint64, f func(word *uint64, m uint64)) {
	for lo < hi {
		n := min(64-lo%64, hi-lo)
		m := ^uint64(0) >> (64 - n) << (lo % 64)
		f(&l[lo/64], m)
		lo += n
	}
}

// run returns whether block is in the set and for how many blocks (at most
// limit) the answer stays the same.
func (s *blockSet) run(block, limit uint64) (in bool, n uint64) {
	if s.empty() {
		return false, limit
	}
	in = s.has(block)
	for n < limit {
		at := block + n
		l := s.leaves[at/setLeafBlocks]
		if l == nil || l == fullLeaf {
			if (l == fullLeaf) != in {
				break
			}
			n += setLeafBlocks - at%setLeafBlocks
			continue
		}
		word := l[at%setLeafBlocks/64]
		if in {
			word = ^word
		}
		same := min(uint64(bits.TrailingZeros64(word>>(at%64))), 64-at%64)
		n += same
		if at%64+same < 64 {
			break
		}
	}
	return in, min(n, limit)
}

// runs yields the set's maximal runs per leaf, sorted.
func (s *blockSet) runs() iter.Seq2[uint64, uint64] {
	return func(yield func(start, count uint64) bool) {
		for _, key := range slices.Sorted(maps.Keys(s.leaves)) {
			block, end := key*setLeafBlocks, (key+1)*setLeafBlocks
			for block < end {
				in, n := s.run(block, end-block)
				if in && !yield(block, n) {
					return
				}
				block += n
			}
		}
	}
}
