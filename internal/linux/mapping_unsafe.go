package linux

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Mapping is a range of this process's address space. One that Reserve made
// starts as anonymous private memory that reads as zeros, and its parts are
// mapped over one by one.
//
// The pointer it keeps stays valid until Unmap: the range is never
// moved, and replacing a part of it (MAP_FIXED) leaves no moment at which
// another mapping could get the addresses.
type Mapping struct {
	base unsafe.Pointer
	size uintptr
}

// privateFlags: without MAP_NORESERVE a host with strict accounting would
// charge every clone the full size of its RAM at once.
const privateFlags = unix.MAP_PRIVATE | unix.MAP_NORESERVE

const readWrite = unix.PROT_READ | unix.PROT_WRITE

// HugePageSize is the size in bytes of the pages that one entry of a page
// directory maps.
const HugePageSize = 2 << 20

// Reserve maps size bytes of anonymous private memory, readable and writable.
// Nothing is allocated before it is touched. What has room for huge pages begins
// where one may.
func Reserve(size uint64) (*Mapping, error) {
	m, err := reserve(size)
	if err != nil || size < HugePageSize || m.Address()%HugePageSize == 0 {
		return m, err
	}
	// Newer kernels only choose such addresses, and for some sizes.
	if err := m.Unmap(); err != nil {
		return nil, err
	}
	if m, err = reserve(size + HugePageSize); err != nil {
		return nil, err
	}
	before := -m.Address() % HugePageSize
	behind := HugePageSize - before
	wide := m.base
	m.base, m.size = unsafe.Add(wide, before), uintptr(size)
	if before > 0 {
		err = unix.MunmapPtr(wide, before)
	}
	if err := errors.Join(err, unix.MunmapPtr(unsafe.Add(m.base, size), behind)); err != nil {
		return nil, errors.Join(fmt.Errorf("unmap memory (%d bytes): %w", HugePageSize, err), m.Unmap())
	}
	return m, nil
}

func reserve(size uint64) (*Mapping, error) {
	base, err := unix.MmapPtr(-1, 0, nil, uintptr(size), readWrite, privateFlags|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("map memory (%d bytes): %w", size, err)
	}
	return &Mapping{base: base, size: uintptr(size)}, nil
}

// MapWindow maps the first length bytes of a file in memory to write to them:
// shared, and with every page there, so that writing neither faults nor fails. As
// many as fill huge pages become some, if the host has any: each costs a tenth of
// the small ones. EINVAL from a kernel before 5.14.
func MapWindow(f *os.File, length uint64) (*Mapping, error) {
	m, err := Reserve(length)
	if err != nil {
		return nil, err
	}
	if _, err := unix.MmapPtr(int(f.Fd()), 0, m.base, m.size, readWrite, unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
		return nil, errors.Join(fmt.Errorf("map file (%s, %d bytes): %w", f.Name(), length, err), m.Unmap())
	}
	m.makeHuge(length / HugePageSize)
	if err := m.Advise(0, length, unix.MADV_POPULATE_WRITE); err != nil {
		return nil, errors.Join(err, m.Unmap())
	}
	return m, nil
}

// makeHuge makes huge pages of the beginning of a file, as far as the host can.
func (m *Mapping) makeHuge(pages uint64) {
	for i := range pages {
		// One that has nothing is taken for cut off.
		if m.Advise(i*HugePageSize, uint64(os.Getpagesize()), unix.MADV_POPULATE_WRITE) != nil {
			return
		}
	}
	_ = m.Advise(0, pages*HugePageSize, unix.MADV_COLLAPSE)
}

// MapReadOnly maps the first length bytes of a file to read them. It does not
// stand in the way of a seal.
func MapReadOnly(f *os.File, length uint64) (*Mapping, error) {
	return mapWhole(f, length, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_POPULATE)
}

// Collapse makes length bytes of a file in memory, at an offset, huge pages of the
// host. All of them have to be there. It needs Linux 6.1, and huge pages that are not
// switched off.
func Collapse(f *os.File, offset int64, length uint64) error {
	m, err := Reserve(length)
	if err != nil {
		return err
	}
	err = m.MapFile(0, length, f, offset)
	if err == nil {
		err = m.Advise(0, length, unix.MADV_COLLAPSE)
	}
	return errors.Join(err, m.Unmap())
}

func mapWhole(f *os.File, length uint64, protection, flags int) (*Mapping, error) {
	base, err := unix.MmapPtr(int(f.Fd()), 0, nil, uintptr(length), protection, flags)
	if err != nil {
		return nil, fmt.Errorf("map file (%s, %d bytes): %w", f.Name(), length, err)
	}
	return &Mapping{base: base, size: uintptr(length)}, nil
}

// Size is the length of the whole range in bytes.
func (m *Mapping) Size() uint64 { return uint64(m.size) }

// Address is where the range starts in this process.
func (m *Mapping) Address() uintptr { return uintptr(m.base) }

// Bytes is the whole range. The slice must not be used after Unmap.
func (m *Mapping) Bytes() []byte { return unsafe.Slice((*byte)(m.base), m.size) }

// MapFile replaces length bytes at offset by a private, writable mapping of
// the file from fileOffset on. All three are multiples of the page size. The
// file needs to be open for reading only.
func (m *Mapping) MapFile(offset, length uint64, f *os.File, fileOffset int64) error {
	if err := m.mapFixed(offset, length, int(f.Fd()), fileOffset, privateFlags); err != nil {
		return fmt.Errorf("map file (%s, offset %d, %d bytes): %w", f.Name(), fileOffset, length, err)
	}
	return nil
}

// MapZero replaces length bytes at offset by fresh memory that reads as zeros.
func (m *Mapping) MapZero(offset, length uint64) error {
	if err := m.mapFixed(offset, length, -1, 0, privateFlags|unix.MAP_ANONYMOUS); err != nil {
		return fmt.Errorf("map zeros (%d bytes): %w", length, err)
	}
	return nil
}

func (m *Mapping) mapFixed(offset, length uint64, fd int, fileOffset int64, flags int) error {
	if err := m.check(offset, length); err != nil {
		return err
	}
	_, err := unix.MmapPtr(fd, fileOffset, unsafe.Add(m.base, offset), uintptr(length),
		readWrite, flags|unix.MAP_FIXED)
	return err
}

// Advise gives madvise(2) advice about length bytes at offset.
func (m *Mapping) Advise(offset, length uint64, advice int) error {
	if err := m.check(offset, length); err != nil {
		return fmt.Errorf("advise memory (advice %d): %w", advice, err)
	}
	if length == 0 {
		return nil
	}
	err := ignoringEINTR(func() error { return unix.Madvise(m.Bytes()[offset:offset+length], advice) })
	if err != nil {
		return fmt.Errorf("advise memory (advice %d, offset %d, %d bytes): %w", advice, offset, length, err)
	}
	return nil
}

// check is what keeps MAP_FIXED from hitting somebody else's memory.
func (m *Mapping) check(offset, length uint64) error {
	if m.base == nil {
		return os.ErrClosed
	}
	if offset > uint64(m.size) || length > uint64(m.size)-offset {
		return fmt.Errorf("range %d+%d outside of %d bytes: %w", offset, length, m.size, unix.EINVAL)
	}
	return nil
}

// Unmap gives the whole range back. The second call does nothing.
func (m *Mapping) Unmap() error {
	if m.base == nil {
		return nil
	}
	base, size := m.base, m.size
	m.base, m.size = nil, 0
	if err := unix.MunmapPtr(base, size); err != nil {
		return fmt.Errorf("unmap memory (%d bytes): %w", size, err)
	}
	return nil
}
