package memory

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/linux"
)

const testSize = MinSize

// scanners are the ways to find private pages; every test of them runs with both.
var scanners = map[string]scanner{"ioctl": scanIoctl, "pagemap": scanPagemap}

func withScanners(t *testing.T, test func(t *testing.T, s scanner)) {
	for name, s := range scanners {
		t.Run(name, func(t *testing.T) {
			if name == "ioctl" {
				needScanIoctl(t)
			}
			test(t, s)
		})
	}
}

func needScanIoctl(t *testing.T) {
	t.Helper()
	m := newMemory(t, Config{Size: MinSize})
	if _, err := scanIoctl(m); err != nil {
		t.Skipf("PAGEMAP_SCAN needs Linux 6.7: %v", err)
	}
}

func newMemory(t testing.TB, c Config) *Memory {
	t.Helper()
	m, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

func freeze(t testing.TB, m *Memory) Layer {
	t.Helper()
	l, err := m.Freeze()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func dump(t testing.TB, m *Memory) []byte {
	t.Helper()
	var b bytes.Buffer
	b.Grow(int(m.Size()))
	if err := m.Dump(&b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// wantContents compares all of RAM, and names the first page that differs.
func wantContents(t testing.TB, m *Memory, want []byte) {
	t.Helper()
	got := dump(t, m)
	for n := 0; n < len(want); n += PageSize {
		if !bytes.Equal(got[n:n+PageSize], want[n:n+PageSize]) {
			t.Fatalf("page %d differs: starts %x, want %x", n/PageSize, got[n:n+8], want[n:n+8])
		}
	}
}

func pagesOf(extents []Extent) []uint64 {
	pages := []uint64{}
	for _, e := range extents {
		for n := e.Start; n < e.Start+e.Count; n++ {
			pages = append(pages, n)
		}
	}
	return pages
}

func wantPrivate(t testing.TB, m *Memory, want ...uint64) {
	t.Helper()
	extents, err := m.Private()
	if err != nil {
		t.Fatal(err)
	}
	if got := pagesOf(extents); !slices.Equal(got, want) {
		t.Fatalf("private pages %v, want %v", got, want)
	}
}

func write(t testing.TB, m *Memory, gpa uint64, p []byte) {
	t.Helper()
	if err := m.WriteAt(p, gpa); err != nil {
		t.Fatal(err)
	}
}

// patternFile is a file of n pages, each filled with its number plus seed.
func patternFile(t testing.TB, n int, seed byte) *os.File {
	t.Helper()
	f, err := linux.MemoryFile("pattern")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	for i := range n {
		if _, err := f.WriteAt(bytes.Repeat([]byte{byte(i) + seed}, PageSize), int64(i*PageSize)); err != nil {
			t.Fatal(err)
		}
	}
	return f
}

func openDescriptors(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

func truncate(t testing.TB, f *os.File, size int64) {
	t.Helper()
	if err := unix.Ftruncate(int(f.Fd()), size); err != nil {
		t.Fatal(err)
	}
}

func sscanRange(line []byte, start, end *uint64) (int, error) {
	return fmt.Sscanf(string(line), "%x-%x", start, end)
}
