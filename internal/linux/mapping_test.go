package linux

import (
	"bytes"
	"testing"
)

// A window is as long as was asked for, wherever its huge pages end, and is the file.
func TestMapWindow(t *testing.T) {
	for _, length := range []uint64{4096, HugePageSize, 2*HugePageSize + 3*4096} {
		f, err := MemoryFile("window")
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if err := f.Truncate(int64(length)); err != nil {
			t.Fatal(err)
		}
		m, err := MapWindow(f, length)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(m.Bytes(), make([]byte, length)) {
			t.Errorf("%d bytes: not all zeros", length)
		}
		for at := uint64(0); at < length; at += 4096 {
			m.Bytes()[at] = byte(at>>12) + 1
		}
		want := bytes.Clone(m.Bytes())
		if err := m.Unmap(); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, length)
		if _, err := f.ReadAt(got, 0); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%d bytes: the file has something else: %v", length, err)
		}
		if err := AddSeals(f, SealWrite|SealGrow|SealShrink|SealSeal); err != nil {
			t.Errorf("%d bytes: %v", length, err)
		}
	}
}
