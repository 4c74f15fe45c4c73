package ext4

import "encoding/binary"

// An extent maps a file's blocks to blocks of the image. The inode holds 4 of them, or points to up to 4 blocks with 340 each.
const (
	extentMagic    = 0xf30a
	maxExtentCount = 32768 // longer ones would be taken for unwritten
	extentsInInode = 4
	extentsInBlock = (BlockSize - 12) / 12
	maxExtents     = extentsInInode * extentsInBlock
	maxFileBlocks  = (maxExtents - maxHoles - 1) * maxExtentCount
)

type extent struct {
	logical uint32 // first block within the file
	count   uint32 // blocks
	start   uint64 // first block in the image
}

// appendExtent adds e at the end, as a continuation of the last one if it is one.
func appendExtent(list []extent, e extent) []extent {
	if len(list) > 0 {
		last := &list[len(list)-1]
		if last.logical+last.count == e.logical && last.start+uint64(last.count) == e.start && last.count+e.count <= maxExtentCount {
			last.count += e.count
			return list
		}
	}
	return append(list, e)
}

// extentsOf covers count blocks that lie in a row from start.
func extentsOf(start, count uint64) []extent {
	var list []extent
	for done := uint64(0); done < count; {
		n := min(count-done, maxExtentCount)
		list = append(list, extent{logical: uint32(done), count: uint32(n), start: start + done})
		done += n
	}
	return list
}

func blocksIn(list []extent) uint64 {
	total := uint64(0)
	for _, e := range list {
		total += uint64(e.count)
	}
	return total
}

// leafBlocks is how many blocks the extents need outside the inode.
func leafBlocks(extents int) uint64 {
	if extents <= extentsInInode {
		return 0
	}
	return divideUp(uint64(extents), extentsInBlock)
}

func putExtentHeader(p []byte, entries, limit, depth int) {
	binary.LittleEndian.PutUint16(p[0:], extentMagic)
	binary.LittleEndian.PutUint16(p[2:], uint16(entries))
	binary.LittleEndian.PutUint16(p[4:], uint16(limit))
	binary.LittleEndian.PutUint16(p[6:], uint16(depth))
}

func putExtents(p []byte, list []extent, limit int) {
	putExtentHeader(p, len(list), limit, 0)
	for i, e := range list {
		q := p[12+12*i:]
		binary.LittleEndian.PutUint32(q[0:], e.logical)
		binary.LittleEndian.PutUint16(q[4:], uint16(e.count))
		binary.LittleEndian.PutUint16(q[6:], uint16(e.start>>32))
		binary.LittleEndian.PutUint32(q[8:], uint32(e.start))
	}
}

// putExtentTree fills i_block: the extents themselves, or the leaves that hold them.
func putExtentTree(iblock []byte, list []extent, leaves []uint64) {
	if len(leaves) == 0 {
		putExtents(iblock, list, extentsInInode)
		return
	}
	putExtentHeader(iblock, len(leaves), extentsInInode, 1)
	for i, block := range leaves {
		q := iblock[12+12*i:]
		binary.LittleEndian.PutUint32(q[0:], list[i*extentsInBlock].logical)
		binary.LittleEndian.PutUint32(q[4:], uint32(block))
		binary.LittleEndian.PutUint16(q[8:], uint16(block>>32))
	}
}

// encodeLeaf is one block of extents with its checksum.
func encodeLeaf(list []extent, seed uint32) []byte {
	p := make([]byte, BlockSize)
	putExtents(p, list, extentsInBlock)
	tail := 12 + 12*extentsInBlock
	binary.LittleEndian.PutUint32(p[tail:], crc32c(seed, p[:tail]))
	return p
}
