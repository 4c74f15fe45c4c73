package blk

import "encoding/binary"

// Feature bits (section 5.2.3).
const (
	FeatureSizeMax     uint64 = 1 << 1
	FeatureSegMax      uint64 = 1 << 2
	FeatureReadOnly    uint64 = 1 << 5
	FeatureBlockSize   uint64 = 1 << 6
	FeatureFlush       uint64 = 1 << 9
	FeatureTopology    uint64 = 1 << 10
	FeatureDiscard     uint64 = 1 << 13
	FeatureWriteZeroes uint64 = 1 << 14
)

// Request types (section 5.2.6).
const (
	TypeIn          uint32 = 0
	TypeOut         uint32 = 1
	TypeFlush       uint32 = 4
	TypeGetID       uint32 = 8
	TypeDiscard     uint32 = 11
	TypeWriteZeroes uint32 = 13
)

// Status bytes (section 5.2.6).
const (
	StatusOK          byte = 0
	StatusIOError     byte = 1
	StatusUnsupported byte = 2
)

// SectorSize is the unit of all sector numbers, whatever the block size.
const SectorSize = 512

const (
	headerSize  = 16
	idSize      = 20
	rangeSize   = 16
	flagUnmap   = 1 // VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP
	queueSize   = 256
	maxSegments = queueSize - 2 // beside the header and the status
	maxSegment  = 1 << 20
	maxData     = maxSegments * maxSegment
	maxRanges   = 16
	// maxRangeSectors is 256 MiB.
	maxRangeSectors = 1 << 19

	// The layers under a disk keep blocks of 4 KiB; smaller writes cost a
	// read, so the guest is told.
	physicalBlock    = 4096
	sectorsPerBlock  = physicalBlock / SectorSize
	physicalExponent = 3 // 2^3 sectors
)

// space lays out struct virtio_blk_config (section 5.2.4) up to the fields
// for write-zeroes.
func space(sectors uint64) []byte {
	b := make([]byte, 60)
	le := binary.LittleEndian
	le.PutUint64(b[0:], sectors)
	le.PutUint32(b[8:], maxSegment)
	le.PutUint32(b[12:], maxSegments)
	// 16: geometry, not offered
	le.PutUint32(b[20:], SectorSize)
	b[24] = physicalExponent
	b[25] = 0                             // sectors from the start to the first aligned block
	le.PutUint16(b[26:], sectorsPerBlock) // smallest good I/O, in blocks of blk_size
	le.PutUint32(b[28:], 0)               // best I/O: no opinion
	// 32: writeback and 34: num_queues, not offered
	le.PutUint32(b[36:], maxRangeSectors)
	le.PutUint32(b[40:], maxRanges)
	le.PutUint32(b[44:], sectorsPerBlock) // alignment of discards
	le.PutUint32(b[48:], maxRangeSectors)
	le.PutUint32(b[52:], maxRanges)
	b[56] = 1 // write-zeroes may unmap
	return b
}

// header is the beginning of each request.
type header struct {
	kind   uint32
	sector uint64
}

func parseHeader(b *[headerSize]byte) header {
	return header{kind: binary.LittleEndian.Uint32(b[0:]), sector: binary.LittleEndian.Uint64(b[8:])}
}

// sectorRange is one entry of a discard or write-zeroes request.
type sectorRange struct {
	sector uint64
	count  uint32
	flags  uint32
}

func parseRange(b []byte) sectorRange {
	return sectorRange{
		sector: binary.LittleEndian.Uint64(b[0:]),
		count:  binary.LittleEndian.Uint32(b[8:]),
		flags:  binary.LittleEndian.Uint32(b[12:]),
	}
}
