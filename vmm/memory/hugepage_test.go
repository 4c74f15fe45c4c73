package memory

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"reflect"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/linux"
)

const hugeTestSize = MinSize

// hugeFile is a file of patterns with count huge pages, or a skipped test.
func hugeFile(t *testing.T, count int, seed byte) *os.File {
	t.Helper()
	f := patternFile(t, count*HugePage, seed)
	err := linux.Collapse(f, 0, uint64(count)*linux.HugePageSize)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOMEM) || errors.Is(err, unix.EAGAIN) {
		t.Skipf("this host makes no huge pages: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// Of a file's huge pages a clone has what was written, page by page, and no more.
func TestHugePages(t *testing.T) {
	withScanners(t, func(t *testing.T, s scanner) {
		base := Layer{File: patternFile(t, 4*HugePage, 1), Extents: []Extent{{Count: 4 * HugePage}}}
		huge := Layer{File: hugeFile(t, 3, 2), Extents: []Extent{{Start: HugePage, Count: 3 * HugePage}}}
		m := newMemory(t, Config{Size: hugeTestSize, Layers: []Layer{base, huge}})
		m.scan = s
		before := dump(t, m) // touches all of it
		wantHuge(t, m, 3)
		wantPrivate(t, m)

		write(t, m, (HugePage+7)*PageSize, []byte("written"))
		if err := m.Populate([]PageRange{{Start: 2 * HugePage, Count: 1}}); err != nil {
			t.Fatal(err)
		}
		wantHuge(t, m, 1)
		if own, err := m.Own(); err != nil || !reflect.DeepEqual(own, []PageRange{{HugePage + 7, 1}, {2 * HugePage, 1}}) {
			t.Errorf("own pages %v, %v", own, err)
		}
		want := bytes.Clone(before)
		copy(want[(HugePage+7)*PageSize:], "written")
		wantContents(t, m, want)

		layers := []Layer{base, huge, freeze(t, m)}
		child := newMemory(t, Config{Size: hugeTestSize, Layers: layers})
		wantContents(t, child, want)
		reset(t, m)
		wantContents(t, m, before)
		resetTo(t, m, base)
		wantHuge(t, m, 0)
		resetTo(t, m, base, huge)
		wantContents(t, m, before)
		wantHuge(t, m, 3)
	})
}

// What is read a lot and not written is worth a huge page.
func TestReadOnly(t *testing.T) {
	base := Layer{File: patternFile(t, 5*HugePage, 1), Extents: []Extent{{Count: 5 * HugePage}}}
	m := newMemory(t, Config{Size: hugeTestSize, Layers: []Layer{base}})
	read := func(page uint64, touches int) {
		for i := range touches {
			if err := m.ReadAt(make([]byte, 1), (page+uint64(i)*aroundFault)*PageSize); err != nil {
				t.Fatal(err)
			}
		}
	}
	read(0, 10)
	read(HugePage, 1)
	read(2*HugePage, 8)
	read(3*HugePage, 20)
	read(4*HugePage, 9)
	read(5*HugePage, 30) // zeros
	write(t, m, (2*HugePage+99)*PageSize, []byte("x"))
	if pages, err := m.ReadOnly(8); err != nil || !reflect.DeepEqual(pages, []uint64{0, 3 * HugePage, 4 * HugePage}) {
		t.Errorf("got %v, %v", pages, err)
	}
	if pages, err := m.ReadOnly(2); err != nil || !reflect.DeepEqual(pages, []uint64{0, 3 * HugePage}) {
		t.Errorf("got %v, %v of at most 2", pages, err)
	}
}

// wantHuge checks how many huge pages of files are mapped.
func wantHuge(t *testing.T, m *Memory, want int) {
	t.Helper()
	if n := fileHugePages(t, m); n != want {
		t.Errorf("%d huge pages are mapped, want %d", n, want)
	}
}

// fileHugePages counts the mapped huge pages of files in memory (Linux's
// ShmemPmdMapped).
func fileHugePages(t *testing.T, m *Memory) (n int) {
	t.Helper()
	all, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	ours := false
	for line := range bytes.Lines(all) {
		var start, end uint64
		if found, _ := sscanRange(line, &start, &end); found == 2 {
			ours = start >= uint64(m.base) && end <= uint64(m.base)+m.size
		}
		var kilobytes int
		if found, _ := fmt.Sscanf(string(line), "ShmemPmdMapped: %d kB", &kilobytes); found == 1 && ours {
			n += kilobytes << 10 / linux.HugePageSize
		}
	}
	return n
}
