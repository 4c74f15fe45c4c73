package ext4

import (
	"encoding/binary"
	"hash/crc32"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// crc32c is the CRC as the kernel computes it: no inversion before and after, so that a result seeds the next.
func crc32c(seed uint32, p []byte) uint32 { return ^crc32.Update(^seed, castagnoli, p) }

func crc32cUint32(seed, v uint32) uint32 {
	var b [4]byte
	binary.LittleEndian.PutUint32(b[:], v)
	return crc32c(seed, b[:])
}

// fileSystemSeed starts the checksum of everything but the superblock.
func fileSystemSeed(uuid [16]byte) uint32 { return crc32c(^uint32(0), uuid[:]) }

// inodeSeed starts the checksum of an inode and of the blocks that only it refers to. Our inodes have generation 0.
func inodeSeed(seed, number uint32) uint32 { return crc32cUint32(crc32cUint32(seed, number), 0) }
