package memory

import (
	"fmt"
)

// RangeError says that a guest-physical range is not RAM, or not all of it.
type RangeError struct {
	Address uint64 // guest-physical
	Length  uint64 // bytes
}

func (e *RangeError) Error() string {
	return fmt.Sprintf("access guest memory (%#x, %d bytes): not in RAM", e.Address, e.Length)
}

// Check returns nil if the n bytes at guest-physical address gpa are RAM and in
// one region, as every access demands, and a *RangeError otherwise.
func (m *Memory) Check(gpa, n uint64) error {
	_, err := m.locate(gpa, n)
	return err
}

// locate translates a guest-physical range to a position in ram. Regions never
// touch, so a range that leaves one leaves RAM.
func (m *Memory) locate(gpa, n uint64) (uint64, error) {
	if m.closed.Load() {
		return 0, m.errClosed("access")
	}
	for i := range m.regions {
		r := &m.regions[i]
		// The subtraction wraps for addresses below the region and makes them
		// too large.
		if at := gpa - r.GuestPhys; at < r.Size && n <= r.Size-at {
			return r.Offset + at, nil
		}
	}
	return 0, &RangeError{Address: gpa, Length: n}
}

// ReadAt fills p from guest-physical address gpa. The guest may write at the
// same time: what p holds afterwards is a copy that does not change any more,
// but not a consistent one. Errors: *RangeError, ErrBackingLost, os.ErrClosed;
// with a *RangeError nothing was copied.
func (m *Memory) ReadAt(p []byte, gpa uint64) (err error) {
	at, err := m.locate(gpa, uint64(len(p)))
	if err != nil {
		return err
	}
	defer m.endAccess(beginAccess(), &err)
	copy(p, m.ram[at:])
	return nil
}

// WriteAt copies p to guest-physical address gpa. Errors as ReadAt's.
func (m *Memory) WriteAt(p []byte, gpa uint64) (err error) {
	at, err := m.locate(gpa, uint64(len(p)))
	if err != nil {
		return err
	}
	defer m.endAccess(beginAccess(), &err)
	copy(m.ram[at:], p)
	return nil
}

// Access lends the n bytes at guest-physical address gpa to fn. The slice is the
// guest's memory itself, valid only until fn returns, and can change under fn's
// eyes: it is for handing to a system call, not for parsing. Errors as ReadAt's,
// and what fn returns.
func (m *Memory) Access(gpa, n uint64, fn func(p []byte) error) (err error) {
	at, err := m.locate(gpa, n)
	if err != nil {
		return err
	}
	defer m.endAccess(beginAccess(), &err)
	return fn(m.ram[at : at+n : at+n])
}

// ReadUint16 reads a little-endian number. Like its siblings it is atomic and
// sequentially consistent with the other atomic accesses if gpa is a multiple of
// the number's size; otherwise it is a plain copy. Errors as ReadAt's.
func (m *Memory) ReadUint16(gpa uint64) (v uint16, err error) {
	at, err := m.locate(gpa, 2)
	if err != nil {
		return 0, err
	}
	defer m.endAccess(beginAccess(), &err)
	return load16(m.ram, at), nil
}

// ReadUint32 reads a little-endian number, see ReadUint16.
func (m *Memory) ReadUint32(gpa uint64) (v uint32, err error) {
	at, err := m.locate(gpa, 4)
	if err != nil {
		return 0, err
	}
	defer m.endAccess(beginAccess(), &err)
	return load32(m.ram, at), nil
}

// ReadUint64 reads a little-endian number, see ReadUint16.
func (m *Memory) ReadUint64(gpa uint64) (v uint64, err error) {
	at, err := m.locate(gpa, 8)
	if err != nil {
		return 0, err
	}
	defer m.endAccess(beginAccess(), &err)
	return load64(m.ram, at), nil
}

// WriteUint16 writes a little-endian number, see ReadUint16. An atomic write is
// also a full barrier: reads that follow are not done before it.
func (m *Memory) WriteUint16(gpa uint64, v uint16) (err error) {
	at, err := m.locate(gpa, 2)
	if err != nil {
		return err
	}
	defer m.endAccess(beginAccess(), &err)
	store16(m.ram, at, v)
	return nil
}

// WriteUint32 writes a little-endian number, see WriteUint16.
func (m *Memory) WriteUint32(gpa uint64, v uint32) (err error) {
	at, err := m.locate(gpa, 4)
	if err != nil {
		return err
	}
	defer m.endAccess(beginAccess(), &err)
	store32(m.ram, at, v)
	return nil
}

// WriteUint64 writes a little-endian number, see WriteUint16.
func (m *Memory) WriteUint64(gpa uint64, v uint64) (err error) {
	at, err := m.locate(gpa, 8)
	if err != nil {
		return err
	}
	defer m.endAccess(beginAccess(), &err)
	store64(m.ram, at, v)
	return nil
}
