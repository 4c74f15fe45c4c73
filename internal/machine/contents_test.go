package machine

import (
	"bytes"
	"io"
	"testing"

	"github.com/forkvm/forkvm/snapshot/layer"
	"github.com/forkvm/forkvm/vmm/memory"
)

type page [memory.PageSize]byte

// contents are the pages of a memory or the blocks of a disk, byte for byte; nil for
// zeros.
type contents []*page

// Write takes bytes in order, whole pages but for the last.
func (c *contents) Write(p []byte) (int, error) {
	for at := 0; at < len(p); at += memory.PageSize {
		*c = append(*c, newPage(p[at:min(len(p), at+memory.PageSize)]))
	}
	return len(p), nil
}

var zeros page

func newPage(b []byte) *page {
	if bytes.Equal(b, zeros[:len(b)]) {
		return nil
	}
	p := new(page)
	copy(p[:], b)
	return p
}

// ramOf copies a machine's memory, through the door that devices use.
func ramOf(t *testing.T, m *Machine) (c contents) {
	t.Helper()
	if err := m.memory.Dump(&c); err != nil {
		t.Fatal(err)
	}
	return c
}

// diskOf copies a machine's first disk, as its guest would read it.
func diskOf(t *testing.T, m *Machine) (c contents) {
	t.Helper()
	flat := io.NewSectionReader(m.disks[0], 0, m.disks[0].Size())
	if _, err := io.CopyBuffer(struct{ io.Writer }{&c}, struct{ io.Reader }{flat}, make([]byte, 256<<10)); err != nil {
		t.Fatal(err)
	}
	return c
}

// laidOver reads a stack of layers in the plainest way there is.
func laidOver(t *testing.T, layers []*layer.Layer, size int64) contents {
	t.Helper()
	c := make(contents, (size+memory.PageSize-1)/memory.PageSize)
	buf := make([]byte, 256<<10)
	for _, l := range layers {
		for _, e := range l.Extents() {
			e.Count = min(e.Count, uint64(len(c))-e.Start)
			if e.Offset < 0 {
				clear(c[e.Start : e.Start+e.Count])
				continue
			}
			data := io.NewSectionReader(l.File(), e.Offset, int64(e.Count)*memory.PageSize)
			for at := e.Start; at < e.Start+e.Count; {
				n, err := io.ReadFull(data, buf[:min(uint64(len(buf)), (e.Start+e.Count-at)*memory.PageSize)])
				if err != nil && err != io.ErrUnexpectedEOF { // the end of a raw image
					t.Fatal(err)
				}
				var part contents
				part.Write(buf[:n])
				at += uint64(copy(c[at:], part))
			}
		}
	}
	return c
}

// differing returns the numbers of the pages that differ.
func (c contents) differing(o contents) (pages []int) {
	for n := range max(len(c), len(o)) {
		if n >= len(c) || n >= len(o) || c[n] != o[n] && (c[n] == nil || o[n] == nil || *c[n] != *o[n]) {
			pages = append(pages, n)
		}
	}
	return pages
}

// compare names the first pages that differ.
func (c contents) compare(t *testing.T, what string, want contents) {
	t.Helper()
	if pages := c.differing(want); len(pages) > 0 {
		t.Errorf("%s: %d pages differ: %#x …", what, len(pages), pages[:min(5, len(pages))])
	}
}
