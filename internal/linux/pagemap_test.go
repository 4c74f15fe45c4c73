package linux

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"
)

// Written pages are found; pages that were only read, whether backed by a file
// or by nothing, are not.
func TestScanPrivate(t *testing.T) {
	const page = HostPageSize
	f, err := MemoryFile("base")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(8 * page); err != nil {
		t.Fatal(err)
	}
	m, err := Reserve(16 * page)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Unmap()
	if err := m.MapFile(0, 8*page, f, 0); err != nil {
		t.Fatal(err)
	}
	sum := byte(0)
	for i := 0; i < 16*page; i += page {
		sum += m.Bytes()[i]
	}
	for _, i := range []int{1, 2, 9, 15} {
		m.Bytes()[i*page] = 1 + sum
	}
	p, err := OpenPagemap()
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	pages := map[uint64]bool{}
	start := uint64(m.Address())
	err = p.ScanPrivate(start, start+16*page, func(r AddressRange) {
		for a := r.Start; a < r.End; a += page {
			pages[(a-start)/page] = true
		}
	})
	if errors.Is(err, unix.ENOTTY) {
		t.Skip("PAGEMAP_SCAN needs Linux 6.7")
	}
	if err != nil {
		t.Fatal(err)
	}
	if len(pages) != 4 || !pages[1] || !pages[2] || !pages[9] || !pages[15] {
		t.Errorf("found %v", pages)
	}
	entries := make([]PagemapEntry, 16)
	if err := p.Read(start, entries); err != nil {
		t.Fatal(err)
	}
	for i, e := range entries {
		private := e.Present() && !e.File() && e.Exclusive()
		if private != pages[uint64(i)] {
			t.Errorf("page %d: word %#x, scan says private=%v", i, uint64(e), pages[uint64(i)])
		}
	}
}

// However many regions there are, each is reported once and in order, over the
// bounds of the kernel's buffer (512 regions) and ours.
func TestScanPrivateManyRegions(t *testing.T) {
	const page = HostPageSize
	p, err := OpenPagemap()
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	for _, regions := range []int{0, 1, 511, 512, 513, 1023, 1024, 1025, 1536, 1600, 2048, 2049, 3000} {
		for _, tail := range []int{0, 1, 5000} { // untouched pages behind the last region
			m, err := Reserve(uint64(2*regions+tail+1) * page)
			if err != nil {
				t.Fatal(err)
			}
			if err := m.Advise(0, m.Size(), unix.MADV_NOHUGEPAGE); err != nil && !errors.Is(err, unix.EINVAL) {
				t.Fatal(err)
			}
			for i := range regions {
				m.Bytes()[2*i*page] = 1
			}
			start, count := uint64(m.Address()), 0
			err = p.ScanPrivate(start, start+m.Size(), func(r AddressRange) {
				if want := start + uint64(2*count*page); r.Start != want || r.End != want+page {
					t.Fatalf("%d regions: number %d is %#x-%#x, want page %#x", regions, count, r.Start, r.End, want)
				}
				count++
			})
			if errors.Is(err, unix.ENOTTY) {
				t.Skip("PAGEMAP_SCAN needs Linux 6.7")
			}
			if err != nil || count != regions {
				t.Errorf("%d regions, tail %d: found %d, %v", regions, tail, count, err)
			}
			m.Unmap()
		}
	}
}
