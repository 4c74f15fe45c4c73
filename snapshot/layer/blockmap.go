package layer

import (
	"maps"
	"math/bits"
	"slices"
)

// place says where a block's data is: the file's index in Disk.files above,
// the offset in units of 4096 below. It is never 0, since the first unit of a
// top file is its header.
type place uint64

const (
	placeUnitBits = 44
	maxPlaceUnit  = 1<<placeUnitBits - 1
)

func newPlace(file uint32, unit uint64) place { return place(uint64(file)<<placeUnitBits | unit) }
func (p place) file() uint32                  { return uint32(p >> placeUnitBits) }
func (p place) unit() uint64                  { return uint64(p) & maxPlaceUnit }
func (p place) offset() int64                 { return int64(p.unit()) * UnitSize }

// blockMap maps blocks to places, 8 bytes a block, in leaves of 64 blocks that
// exist where something was written. The zero value is empty.
type blockMap struct {
	leaves map[uint64]*mapLeaf
}

const mapLeafBlocks = 64

type mapLeaf struct {
	present uint64
	place   [mapLeafBlocks]place
}

func (m *blockMap) get(block uint64) (place, bool) {
	l := m.leaves[block/mapLeafBlocks]
	if l == nil {
		return 0, false
	}
	p := l.place[block%mapLeafBlocks]
	return p, p != 0
}

// set puts count blocks from block on at consecutive places.
func (m *blockMap) set(block, count uint64, p place) {
	if m.leaves == nil {
		m.leaves = make(map[uint64]*mapLeaf)
	}
	var l *mapLeaf
	for i := range count {
		b := block + i
		if l == nil || b%mapLeafBlocks == 0 {
			if l = m.leaves[b/mapLeafBlocks]; l == nil {
				l = new(mapLeaf)
				m.leaves[b/mapLeafBlocks] = l
			}
		}
		l.place[b%mapLeafBlocks] = p + place(i)
		l.present |= 1 << (b % mapLeafBlocks)
	}
}

// move gives those of count blocks from block on that are in one of the files from
// the place that they have in another: consecutive ones from p on.
func (m *blockMap) move(block, count uint64, from map[uint32]bool, p place) {
	for i := range count {
		l := m.leaves[(block+i)/mapLeafBlocks]
		if at := (block + i) % mapLeafBlocks; l != nil && l.place[at] != 0 && from[l.place[at].file()] {
			l.place[at] = p + place(i)
		}
	}
}

// absent returns for how many blocks (at most limit) nothing is mapped.
func (m *blockMap) absent(block, limit uint64) uint64 {
	if len(m.leaves) == 0 {
		return limit
	}
	for n := uint64(0); n < limit; {
		at := (block + n) % mapLeafBlocks
		l := m.leaves[(block+n)/mapLeafBlocks]
		if l == nil {
			n += mapLeafBlocks - at
			continue
		}
		if rest := l.present >> at; rest != 0 {
			return min(n+uint64(bits.TrailingZeros64(rest)), limit)
		}
		n += mapLeafBlocks - at
	}
	return limit
}

// together returns for how many blocks (at most limit) the places follow p,
// which is block's.
func (m *blockMap) together(block, limit uint64, p place) uint64 {
	var l *mapLeaf
	for n := uint64(0); n < limit; n++ {
		at := (block + n) % mapLeafBlocks
		if l == nil || at == 0 {
			if l = m.leaves[(block+n)/mapLeafBlocks]; l == nil {
				return n
			}
		}
		if l.place[at] != p+place(n) {
			return n
		}
	}
	return limit
}

// take removes the blocks [from, to) and calls f for each, in order.
func (m *blockMap) take(from, to uint64, f func(block uint64, p place)) {
	for _, key := range m.keys(from, to) {
		l := m.leaves[key]
		first := key * mapLeafBlocks
		for rest := l.present; rest != 0; rest &= rest - 1 {
			at := uint64(bits.TrailingZeros64(rest))
			if first+at < from || first+at >= to {
				continue
			}
			f(first+at, l.place[at])
			l.place[at] = 0
			l.present &^= 1 << at
		}
		if l.present == 0 {
			delete(m.leaves, key)
		}
	}
}

// keys lists the leaves that may hold blocks of [from, to), sorted. It looks
// at as many keys as there are leaves or as the range has, whichever is less:
// a discard of terabytes costs what was written.
func (m *blockMap) keys(from, to uint64) []uint64 {
	if from >= to || len(m.leaves) == 0 {
		return nil
	}
	first, last := from/mapLeafBlocks, (to-1)/mapLeafBlocks
	var keys []uint64
	if last-first < uint64(len(m.leaves)) {
		for key := first; key <= last; key++ {
			if m.leaves[key] != nil {
				keys = append(keys, key)
			}
		}
		return keys
	}
	for key := range maps.Keys(m.leaves) {
		if key >= first && key <= last {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	return keys
}
