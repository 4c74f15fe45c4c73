package layer

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash/crc32"
	"io"

	"github.com/forkvm/forkvm/snapshot"
)

const (
	// UnitSize is the size of a memory page and of a disk block, in bytes.
	UnitSize = snapshot.UnitSize
	// DataOffset is where a layer file's data begins: the header has the
	// first unit.
	DataOffset = UnitSize
	// ChunkSize is how much data one checksum covers, in bytes.
	ChunkSize = 1 << 20

	maxUnits = snapshot.MaxUnits

	magic      = "FORKVMLY"
	version    = 1
	extentSize = 24
	sumSize    = 4
	// headerUsed is the part of the header page that has a meaning.
	headerUsed = 96

	flagChecksums = 1 << 0
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Kind says what the units of a layer are.
type Kind uint32

// Memory pages and disk blocks never mix in a stack.
const (
	KindMemory Kind = 1
	KindDisk   Kind = 2
)

func (k Kind) String() string {
	switch k {
	case KindMemory:
		return "memory"
	case KindDisk:
		return "disk"
	}
	return fmt.Sprintf("kind %d", uint32(k))
}

// header is the decoded first page of a layer file.
type header struct {
	kind     Kind
	flags    uint32
	id       [16]byte
	units    uint64 // span of the layer
	data     uint64 // units of data in the file, from DataOffset on
	extents  uint64
	chunks   uint64 // data checksums: one per ChunkSize of data, or none
	fileSize uint64
	indexSum uint32
	level    uint32 // see Run
}

func (h header) indexOffset() int64 { return DataOffset + int64(h.data)*UnitSize }

func (h header) encode() []byte {
	b := make([]byte, DataOffset)
	copy(b, magic)
	le := binary.LittleEndian
	le.PutUint32(b[8:], version)
	le.PutUint32(b[16:], uint32(h.kind))
	le.PutUint32(b[20:], h.flags)
	copy(b[24:40], h.id[:])
	le.PutUint64(b[40:], h.units)
	le.PutUint64(b[48:], h.data)
	le.PutUint64(b[56:], h.extents)
	le.PutUint64(b[64:], h.chunks)
	le.PutUint64(b[72:], h.fileSize)
	le.PutUint32(b[80:], h.indexSum)
	le.PutUint32(b[84:], UnitSize)
	le.PutUint32(b[88:], ChunkSize)
	le.PutUint32(b[92:], h.level)
	le.PutUint32(b[12:], headerSum(b))
	return b
}

// headerSum is the CRC-32C of the header page with its own checksum, the four
// bytes at offset 12, counted as zero.
func headerSum(b []byte) uint32 {
	sum := crc32.Update(0, castagnoli, b[:12])
	sum = crc32.Update(sum, castagnoli, []byte{0, 0, 0, 0})
	return crc32.Update(sum, castagnoli, b[16:DataOffset])
}

// decodeHeader checks the header page alone, in the order magic, version,
// checksum, content.
func decodeHeader(b []byte) (header, error) {
	if len(b) < DataOffset {
		return header{}, fmt.Errorf("header: %w", snapshot.ErrTruncated)
	}
	le := binary.LittleEndian
	if string(b[:8]) != magic {
		return header{}, snapshot.ErrMagic
	}
	if v := le.Uint32(b[8:]); v != version {
		return header{}, fmt.Errorf("%w: %d, this build reads %d", snapshot.ErrVersion, v, version)
	}
	if le.Uint32(b[12:]) != headerSum(b) {
		return header{}, fmt.Errorf("header: %w", snapshot.ErrChecksum)
	}
	h := header{
		kind:     Kind(le.Uint32(b[16:])),
		flags:    le.Uint32(b[20:]),
		id:       [16]byte(b[24:40]),
		units:    le.Uint64(b[40:]),
		data:     le.Uint64(b[48:]),
		extents:  le.Uint64(b[56:]),
		chunks:   le.Uint64(b[64:]),
		fileSize: le.Uint64(b[72:]),
		indexSum: le.Uint32(b[80:]),
		level:    le.Uint32(b[92:]),
	}
	if le.Uint32(b[84:]) != UnitSize || le.Uint32(b[88:]) != ChunkSize {
		return header{}, fmt.Errorf("header: %w: units of %d, chunks of %d bytes", snapshot.ErrInvalid, le.Uint32(b[84:]), le.Uint32(b[88:]))
	}
	if !bytes.Equal(b[headerUsed:DataOffset], zeroUnit[headerUsed:]) {
		return header{}, fmt.Errorf("header: %w: reserved bytes are set", snapshot.ErrInvalid)
	}
	return h, h.check()
}

// check holds the fields against each other. Afterwards no arithmetic on them
// can overflow.
func (h header) check() error {
	if h.kind != KindMemory && h.kind != KindDisk {
		return fmt.Errorf("header: %w: %v", snapshot.ErrInvalid, h.kind)
	}
	if h.flags&^flagChecksums != 0 {
		return fmt.Errorf("header: %w: flags %#x", snapshot.ErrInvalid, h.flags)
	}
	if h.level > maxLevel {
		return fmt.Errorf("header: %w: level %d", snapshot.ErrInvalid, h.level)
	}
	if h.units == 0 || h.units > maxUnits || h.data > maxUnits || h.extents > h.units {
		return fmt.Errorf("header: %w: %d units, %d of data, %d extents", snapshot.ErrInvalid, h.units, h.data, h.extents)
	}
	var chunks uint64
	if h.flags&flagChecksums != 0 {
		chunks = chunksOf(h.data)
	}
	if h.chunks != chunks {
		return fmt.Errorf("header: %w: %d data checksums, need %d", snapshot.ErrInvalid, h.chunks, chunks)
	}
	if want := DataOffset + h.data*UnitSize + h.extents*extentSize + h.chunks*sumSize; h.fileSize != want {
		return fmt.Errorf("header: %w: file of %d bytes, need %d", snapshot.ErrInvalid, h.fileSize, want)
	}
	return nil
}

func chunksOf(units uint64) uint64 {
	return (units*UnitSize + ChunkSize - 1) / ChunkSize
}

// encodeIndex returns the bytes that follow the data.
func encodeIndex(extents []Extent, sums []uint32) []byte {
	b := make([]byte, 0, len(extents)*extentSize+len(sums)*sumSize)
	le := binary.LittleEndian
	for _, e := range extents {
		b = le.AppendUint64(b, e.Start)
		b = le.AppendUint64(b, e.Count)
		b = le.AppendUint64(b, uint64(e.Offset))
	}
	for _, sum := range sums {
		b = le.AppendUint32(b, sum)
	}
	return b
}

// readIndex reads the index that h describes from r. Memory grows with what
// was read and found sound, so that a sparse file with a large extent count
// costs nothing.
func readIndex(r io.Reader, h header) ([]Extent, []uint32, error) {
	sum := crc32.New(castagnoli)
	r = io.TeeReader(r, sum)
	buf := make([]byte, 2730*extentSize)
	var extents []Extent
	check := extentChecker{units: h.units, dataEnd: h.indexOffset()}
	for left := h.extents; left > 0; {
		n := min(left, uint64(len(buf)/extentSize))
		chunk := buf[:n*extentSize]
		if err := readFull(r, chunk); err != nil {
			return nil, nil, err
		}
		extents = append(extents, make([]Extent, n)...)
		fresh := extents[uint64(len(extents))-n:]
		for i := range fresh {
			fresh[i] = decodeExtent(chunk[i*extentSize:])
			if err := check.next(fresh[i]); err != nil {
				return nil, nil, fmt.Errorf("index extent %d: %w", h.extents-left+uint64(i), err)
			}
		}
		left -= n
	}
	var sums []uint32
	for left := h.chunks; left > 0; {
		n := min(left, uint64(len(buf)/sumSize))
		chunk := buf[:n*sumSize]
		if err := readFull(r, chunk); err != nil {
			return nil, nil, err
		}
		for ; len(chunk) > 0; chunk = chunk[sumSize:] {
			sums = append(sums, binary.LittleEndian.Uint32(chunk))
		}
		left -= n
	}
	if sum.Sum32() != h.indexSum {
		return nil, nil, fmt.Errorf("index: %w", snapshot.ErrChecksum)
	}
	return extents, sums, nil
}

func readFull(r io.Reader, b []byte) error {
	_, err := io.ReadFull(r, b)
	if err == io.EOF || err == io.ErrUnexpectedEOF {
		return fmt.Errorf("index: %w", snapshot.ErrTruncated)
	}
	return err
}

func decodeExtent(b []byte) Extent {
	le := binary.LittleEndian
	return Extent{Start: le.Uint64(b), Count: le.Uint64(b[8:]), Offset: int64(le.Uint64(b[16:]))}
}

func parseID(id string) (out [16]byte, err error) {
	b, err := hex.DecodeString(id)
	if err != nil || len(b) != len(out) {
		return out, fmt.Errorf("%w: layer id %.40q is not 16 bytes in hex", snapshot.ErrInvalid, id)
	}
	return [16]byte(b), nil
}
