package ext4

import (
	"encoding/binary"
	"time"
)

// Inode flags.
const (
	flagExtents = 0x80000
)

const (
	extraSize       = 32              // bytes of the inode behind the first 128 that are fields
	xattrArea       = 128 + extraSize // where extended attributes begin
	fastSymlinkSize = 60              // shorter targets lie in i_block
)

// encodeInode is the inode as it lies in the table.
func (n *Node) encodeInode(seed uint32) []byte {
	p := make([]byte, inodeSize)
	le := binary.LittleEndian
	a := &n.attributes
	le.PutUint16(p[0:], typeBits[n.kind]|a.Mode&0o7777)
	le.PutUint16(p[2:], uint16(a.UID))
	le.PutUint32(p[4:], uint32(n.size))
	le.PutUint16(p[24:], uint16(a.GID))
	le.PutUint16(p[26:], n.linkCount())
	sectors := n.usedBlocks() * (BlockSize / 512)
	le.PutUint32(p[28:], uint32(sectors))
	n.putBlockMap(p)
	le.PutUint32(p[104:], uint32(n.xattrsAt))
	le.PutUint32(p[108:], uint32(n.size>>32))
	le.PutUint16(p[116:], uint16(sectors>>32))
	le.PutUint16(p[118:], uint16(n.xattrsAt>>32))
	le.PutUint16(p[120:], uint16(a.UID>>16))
	le.PutUint16(p[122:], uint16(a.GID>>16))
	le.PutUint16(p[128:], extraSize)
	seconds, extra := encodeTime(a.ModTime)
	for _, at := range [...]struct{ seconds, extra int }{{8, 140}, {12, 132}, {16, 136}, {144, 148}} { // access, change, content, creation
		le.PutUint32(p[at.seconds:], seconds)
		le.PutUint32(p[at.extra:], extra)
	}
	if len(n.xattrs) > 0 && n.xattrsAt == 0 {
		putXattrsInInode(p[xattrArea:], n.xattrs)
	}
	sealInode(p, inodeSeed(seed, n.number))
	return p
}

// sealInode fills in the checksum of an inode whose checksum fields are zero.
func sealInode(p []byte, seed uint32) {
	sum := crc32c(seed, p)
	binary.LittleEndian.PutUint16(p[124:], uint16(sum))
	binary.LittleEndian.PutUint16(p[130:], uint16(sum>>16))
}

// putBlockMap fills i_block and the flag that says how to read it.
func (n *Node) putBlockMap(p []byte) {
	le, iblock := binary.LittleEndian, p[40:100]
	switch n.kind {
	case CharacterDevice, BlockDevice:
		if n.major < 256 && n.minor < 256 {
			le.PutUint32(iblock, n.major<<8|n.minor)
		} else {
			le.PutUint32(iblock[4:], n.minor&0xff|n.major<<8|n.minor&^0xff<<12)
		}
	case Fifo, Socket:
	case Symlink:
		if n.size < fastSymlinkSize {
			copy(iblock, n.target)
			return
		}
		fallthrough
	default:
		le.PutUint32(p[32:], flagExtents)
		putExtentTree(iblock, n.extents, n.leaves)
	}
}

// linkCount is i_links_count: one for each name, and for directories also "." and each subdirectory's "..". A directory with more
// than fit says 1, which means unknown (feature dir_nlink).
func (n *Node) linkCount() uint16 {
	if n.kind != Directory {
		return uint16(n.links)
	}
	if count := 2 + n.subdirectories(); count < 65000 {
		return uint16(count)
	}
	return 1
}

func (n *Node) usedBlocks() uint64 {
	count := blocksIn(n.extents) + uint64(len(n.leaves))
	if n.xattrsAt != 0 {
		count++
	}
	return count
}

// encodeTime splits a time into the old 32-bit seconds and the word with two more bits of seconds and the nanoseconds.
func encodeTime(t time.Time) (seconds, extra uint32) {
	const first, last = -1 << 31, 1<<34 - 1<<31 - 1
	s, ns := t.Unix(), t.Nanosecond()
	if s < first {
		s, ns = first, 0
	}
	if s > last {
		s, ns = last, 0
	}
	epoch := uint32((s-int64(int32(s)))>>32) & 3
	return uint32(s), epoch | uint32(ns)<<2
}
