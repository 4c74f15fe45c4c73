package memory

import (
	"bytes"
	"reflect"
	"testing"

	"github.com/forkvm/forkvm/internal/linux"
)

// Pages that were populated hold what they held, are the memory's own, and leave
// the layer alone when they are written.
func TestPopulate(t *testing.T) {
	withScanners(t, func(t *testing.T, s scanner) {
		f, err := linux.MemoryFile("layer")
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		content := bytes.Repeat([]byte{7}, 8*PageSize)
		if _, err := f.Write(content); err != nil {
			t.Fatal(err)
		}
		m := newMemory(t, Config{Size: testSize, Layers: []Layer{{File: f, Extents: []Extent{{Start: 10, Count: 8}}}}})
		m.scan = s
		want := []PageRange{{Start: 9, Count: 3}, {Start: 17, Count: 1}}
		if err := m.Populate(want); err != nil {
			t.Fatal(err)
		}
		if own, err := m.Own(); err != nil || !reflect.DeepEqual(own, want) {
			t.Errorf("own pages %v, %v, want %v", own, err, want)
		}
		page := make([]byte, PageSize)
		if err := m.ReadAt(page, 10*PageSize); err != nil || !bytes.Equal(page, content[:PageSize]) {
			t.Errorf("page 10 changed: %v", err)
		}
		if err := m.WriteAt([]byte{1}, 17*PageSize); err != nil {
			t.Fatal(err)
		}
		if _, err := f.ReadAt(page, 7*PageSize); err != nil || !bytes.Equal(page, content[:PageSize]) {
			t.Errorf("the layer changed: %v", err)
		}
	})
}

func TestPopulateRefusals(t *testing.T) {
	m := newMemory(t, Config{Size: testSize})
	const pages = testSize / PageSize
	for _, r := range []PageRange{{pages, 1}, {pages - 1, 2}, {1, 1<<64 - 1}, {1<<64 - 1, 1}} {
		if err := m.Populate([]PageRange{r}); err == nil {
			t.Errorf("%v is accepted", r)
		}
	}
	if own, err := m.Own(); err != nil || len(own) != 0 {
		t.Errorf("own pages %v, %v", own, err)
	}
	if err := m.Populate([]PageRange{{pages - 1, 1}}); err != nil {
		t.Error(err)
	}
}

// A page that was copied because there were too many mappings was not written.
func TestOwnWithoutCopies(t *testing.T) {
	f, err := linux.MemoryFile("layer")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write(bytes.Repeat([]byte{7}, 64*PageSize)); err != nil {
		t.Fatal(err)
	}
	var extents []Extent
	for i := range uint64(64) {
		extents = append(extents, Extent{Start: 2 * i, Count: 1, Offset: int64(i * PageSize)})
	}
	m := newMemory(t, Config{Size: testSize, Layers: []Layer{{File: f, Extents: extents}}, Mappings: 20})
	if err := m.WriteAt([]byte{1}, 101*PageSize); err != nil {
		t.Fatal(err)
	}
	if own, err := m.Own(); err != nil || !reflect.DeepEqual(own, []PageRange{{Start: 101, Count: 1}}) {
		t.Errorf("own pages %v, %v", own, err)
	}
}
