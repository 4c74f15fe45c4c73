package memory

import (
	"encoding/binary"
	"sync/atomic"
	"unsafe"
)

// The functions below make pointers into ram, which is mapped memory that the
// garbage collector neither moves nor frees; it stays mapped until Close. Each
// indexes the slice first, so that a position outside of it cannot become a
// pointer, and ram starts at a page boundary, so that a position is aligned
// when it is a multiple of the size. The host is little-endian, as x86-64 and
// arm64 Linux are.

func pointer32(ram []byte, at uint64) *uint32 { return (*uint32)(unsafe.Pointer(&ram[at])) }

func pointer64(ram []byte, at uint64) *uint64 { return (*uint64)(unsafe.Pointer(&ram[at])) }

// load16 reads the aligned word around the number, since there are no atomic
// operations on 16 bits.
func load16(ram []byte, at uint64) uint16 {
	if at%2 != 0 {
		return binary.LittleEndian.Uint16(ram[at:])
	}
	word := atomic.LoadUint32(pointer32(ram, at&^3))
	return uint16(word >> (8 * (at & 2)))
}

func load32(ram []byte, at uint64) uint32 {
	if at%4 != 0 {
		return binary.LittleEndian.Uint32(ram[at:])
	}
	return atomic.LoadUint32(pointer32(ram, at))
}

func load64(ram []byte, at uint64) uint64 {
	if at%8 != 0 {
		return binary.LittleEndian.Uint64(ram[at:])
	}
	return atomic.LoadUint64(pointer64(ram, at))
}

// store16 exchanges the aligned word around the number. The other half of the
// word may be the guest's, who may write it at any time: hence the comparison.
func store16(ram []byte, at uint64, v uint16) {
	if at%2 != 0 {
		binary.LittleEndian.PutUint16(ram[at:], v)
		return
	}
	p, shift := pointer32(ram, at&^3), 8*(at&2)
	for {
		old := atomic.LoadUint32(p)
		if atomic.CompareAndSwapUint32(p, old, old&^(0xffff<<shift)|uint32(v)<<shift) {
			return
		}
	}
}

func store32(ram []byte, at uint64, v uint32) {
	if at%4 != 0 {
		binary.LittleEndian.PutUint32(ram[at:], v)
		return
	}
	atomic.StoreUint32(pointer32(ram, at), v)
}

func store64(ram []byte, at uint64, v uint64) {
	if at%8 != 0 {
		binary.LittleEndian.PutUint64(ram[at:], v)
		return
	}
	atomic.StoreUint64(pointer64(ram, at), v)
}
