package ext4

import (
	"bytes"
	"encoding/binary"
)

const groupInodeZeroed = 4 // the inode table needs no zeroing

// writeGroups writes both bitmaps of each group, and the descriptors that refer to them.
func (f *finisher) writeGroups() error {
	l := &f.layout
	table := make([]byte, descriptorBlocks(l.groups)*BlockSize)
	for group := range l.groups {
		blocks, inodes := f.blockBitmap(group), f.inodeBitmap(group)
		if !bytes.Equal(blocks, zeros[:BlockSize]) {
			if err := f.writeBlocks(l.blockBitmaps+group, blocks); err != nil {
				return err
			}
		}
		if err := f.writeBlocks(l.inodeBitmaps+group, inodes); err != nil {
			return err
		}
		f.putDescriptor(table[group*descriptorSize:][:descriptorSize], group, blocks, inodes)
	}
	return f.writeBlocks(1, table)
}

// setBits marks positions first to end-1, cut to what the bitmap of one group has.
func setBits(bitmap []byte, base, first, end uint64, value bool) {
	first, end = max(first, base), min(end, base+uint64(len(bitmap))*8)
	for i := first; i < end; i++ {
		if bit := byte(1) << ((i - base) % 8); value {
			bitmap[(i-base)/8] |= bit
		} else {
			bitmap[(i-base)/8] &^= bit
		}
	}
}

func (f *finisher) blockBitmap(group uint64) []byte {
	bitmap, base := make([]byte, BlockSize), group*blocksPerGroup
	setBits(bitmap, base, 0, 1+descriptorBlocks(f.layout.groups), true)
	setBits(bitmap, base, f.data, f.layout.end, true)
	for _, e := range f.freed {
		setBits(bitmap, base, e.start, e.start+uint64(e.count), false)
	}
	setBits(bitmap, base, f.layout.blocks, f.layout.groups*blocksPerGroup, true) // behind the end of the image
	return bitmap
}

func (f *finisher) inodeBitmap(group uint64) []byte {
	bitmap := make([]byte, BlockSize)
	setBits(bitmap, 0, 0, f.usedInodes(group), true)
	setBits(bitmap, 0, f.layout.inodesPerGroup, blocksPerGroup, true) // behind the end of the table
	return bitmap
}

// usedInodes counts from the front: numbers are given out without gaps.
func (f *finisher) usedInodes(group uint64) uint64 {
	first := group * f.layout.inodesPerGroup
	return min(max(uint64(f.inodes), first)-first, f.layout.inodesPerGroup)
}

// freeBits counts what is not marked as used.
func freeBits(bitmap []byte) uint64 {
	free := uint64(0)
	for _, b := range bitmap {
		for ; b != 0xff; b |= b + 1 {
			free++
		}
	}
	return free
}

func (f *finisher) putDescriptor(p []byte, group uint64, blocks, inodes []byte) {
	l := &f.layout
	split := func(low, high int, v uint64) {
		binary.LittleEndian.PutUint32(p[low:], uint32(v))
		binary.LittleEndian.PutUint32(p[high:], uint32(v>>32))
	}
	split16 := func(low, high int, v uint64) {
		binary.LittleEndian.PutUint16(p[low:], uint16(v))
		binary.LittleEndian.PutUint16(p[high:], uint16(v>>16))
	}
	split(0, 32, l.blockBitmaps+group)
	split(4, 36, l.inodeBitmaps+group)
	split(8, 40, l.inodeTables+group*l.tableBlocks())
	free := l.inodesPerGroup - f.usedInodes(group)
	split16(12, 44, freeBits(blocks))
	split16(14, 46, free)
	split16(16, 48, f.dirs[group])
	split16(28, 50, free) // never used so far: the same ones
	binary.LittleEndian.PutUint16(p[18:], groupInodeZeroed)
	split16(24, 56, uint64(crc32c(f.seed, blocks)))
	split16(26, 58, uint64(crc32c(f.seed, inodes[:l.inodesPerGroup/8])))
	sum := crc32c(crc32cUint32(f.seed, uint32(group)), p)
	binary.LittleEndian.PutUint16(p[30:], uint16(sum))
}
