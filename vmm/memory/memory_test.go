package memory

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func TestLayout(t *testing.T) {
	const gib = 1 << 30
	for _, c := range []struct {
		size uint64
		want []Region
	}{
		{size: MinSize, want: []Region{{Size: MinSize}}},
		{size: 3 * gib, want: []Region{{Size: 3 * gib}}},
		{size: 3*gib + sizeUnit, want: []Region{{Size: 3 * gib}, {GuestPhys: 4 * gib, Size: sizeUnit, Offset: 3 * gib}}},
		{size: 8 * gib, want: []Region{{Size: 3 * gib}, {GuestPhys: 4 * gib, Size: 5 * gib, Offset: 3 * gib}}},
		{size: 0},
		{size: MinSize - sizeUnit},
		{size: MinSize + PageSize},
		{size: MaxSize + sizeUnit},
		{size: ^uint64(0) &^ (sizeUnit - 1)},
	} {
		got, err := Layout(c.size)
		if c.want == nil {
			var bad *SizeError
			if !errors.As(err, &bad) || bad.Size != c.size {
				t.Errorf("%d bytes: error %v, want a SizeError", c.size, err)
			}
			continue
		}
		if err != nil || len(got) != len(c.want) {
			t.Fatalf("%d bytes: %v, %v", c.size, got, err)
		}
		for i := range got {
			if got[i] != c.want[i] {
				t.Errorf("%d bytes: region %d is %+v, want %+v", c.size, i, got[i], c.want[i])
			}
		}
	}
}

func TestLayersShowThrough(t *testing.T) {
	bottom, top := patternFile(t, 10, 1), patternFile(t, 10, 101)
	m := newMemory(t, Config{Size: testSize, Layers: []Layer{
		{File: bottom, Extents: []Extent{{Start: 0, Count: 6, Offset: 0}, {Start: 8, Count: 2, Offset: 8 * PageSize}}},
		{File: top, Extents: []Extent{{Start: 2, Count: 2, Offset: 0}, {Start: 4, Count: 1, Offset: ZeroExtent}, {Start: 9, Count: 3, Offset: 5 * PageSize}}},
		{Extents: []Extent{{Start: 10, Count: 1, Offset: ZeroExtent}}},
	}})
	want := []byte{1, 2, 101, 102, 0, 6, 0, 0, 9, 106, 0, 108, 0}
	for n, v := range want {
		var page [PageSize]byte
		if err := m.ReadAt(page[:], uint64(n)*PageSize); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(page[:], bytes.Repeat([]byte{v}, PageSize)) {
			t.Errorf("page %d starts with %d, want all %d", n, page[0], v)
		}
	}
	wantPrivate(t, m) // reading makes nothing private
}

func TestLayerFileMayBeClosedAndRemoved(t *testing.T) {
	path := filepath.Join(t.TempDir(), "layer")
	if err := os.WriteFile(path, bytes.Repeat([]byte{7}, 2*PageSize), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	m := newMemory(t, Config{Size: testSize, Layers: []Layer{{File: f, Extents: []Extent{{Count: 2}}}}})
	f.Close()
	os.Remove(path)
	write(t, m, 1, []byte{9}) // the file was opened for reading only
	if v, err := m.ReadUint16(PageSize); v != 0x0707 || err != nil {
		t.Errorf("read %#x, %v", v, err)
	}
}

func TestBadLayers(t *testing.T) {
	f := patternFile(t, 4, 0)
	truncate(t, f, 4*PageSize-1)
	pipe, other, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer pipe.Close()
	defer other.Close()
	const pages = testSize / PageSize
	for name, c := range map[string]struct {
		file    *os.File
		extents []Extent
		extent  int
	}{
		"empty extent":       {f, []Extent{{Start: 1}}, 0},
		"out of order":       {f, []Extent{{Start: 1, Count: 1}, {Start: 0, Count: 1}}, 1},
		"overlap":            {f, []Extent{{Start: 0, Count: 2}, {Start: 1, Count: 1, Offset: ZeroExtent}}, 1},
		"beyond RAM":         {f, []Extent{{Start: pages - 1, Count: 2, Offset: ZeroExtent}}, 0},
		"count wraps":        {f, []Extent{{Start: 1, Count: ^uint64(0), Offset: ZeroExtent}}, 0},
		"start wraps":        {f, []Extent{{Start: ^uint64(0), Count: 1, Offset: ZeroExtent}}, 0},
		"negative offset":    {f, []Extent{{Count: 1, Offset: -PageSize}}, 0},
		"unaligned offset":   {f, []Extent{{Count: 1, Offset: 512}}, 0},
		"offset beyond file": {f, []Extent{{Count: 1, Offset: 1 << 62}}, 0},
		"last page cut":      {f, []Extent{{Count: 4}}, 0},
		"data without file":  {nil, []Extent{{Count: 1}}, 0},
		"not a file":         {pipe, nil, -1},
	} {
		before := openDescriptors(t)
		_, err := New(Config{Size: testSize, Layers: []Layer{{}, {File: c.file, Extents: c.extents}}})
		var bad *LayerError
		if !errors.As(err, &bad) || bad.Layer != 1 || bad.Extent != c.extent {
			t.Errorf("%s: error %v", name, err)
		}
		if after := openDescriptors(t); after != before {
			t.Errorf("%s: %d descriptors left open", name, after-before)
		}
	}
}

func TestLayerThatCannotBeRead(t *testing.T) {
	f, err := os.OpenFile(filepath.Join(t.TempDir(), "layer"), os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	truncate(t, f, PageSize)
	before := openDescriptors(t)
	if _, err := New(Config{Size: testSize, Layers: []Layer{{File: f, Extents: []Extent{{Count: 1}}}}}); !errors.Is(err, os.ErrPermission) {
		t.Errorf("error %v", err)
	}
	if after := openDescriptors(t); after != before {
		t.Errorf("%d descriptors left open", after-before)
	}
}

func TestClose(t *testing.T) {
	before := openDescriptors(t)
	m, err := New(Config{Size: testSize, Layers: []Layer{{File: patternFile(t, 1, 1), Extents: []Extent{{Count: 1}}}}})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := m.ReadUint32(0); !errors.Is(err, os.ErrClosed) {
		t.Errorf("read: %v", err)
	}
	if _, err := m.Freeze(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("freeze: %v", err)
	}
	if _, err := m.Private(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("private: %v", err)
	}
	if after := openDescriptors(t); after != before+1 { // the pattern file itself
		t.Errorf("%d descriptors left open", after-before-1)
	}
}

func FuzzCheckExtents(f *testing.F) {
	f.Add(uint64(0), uint64(1), int64(0), uint64(1), uint64(3), int64(ZeroExtent), uint64(8), int64(PageSize))
	f.Add(^uint64(0), uint64(1), int64(4096), uint64(1), ^uint64(0), int64(-4096), uint64(1<<28), int64(1<<40))
	f.Fuzz(func(t *testing.T, s1, c1 uint64, o1 int64, s2, c2 uint64, o2 int64, pages uint64, fileSize int64) {
		pages %= MaxSize/PageSize + 1
		fileSize &= 1<<62 - 1
		extents := []Extent{{s1, c1, o1}, {s2, c2, o2}}
		bad, reason := checkExtents(extents, pages, fileSize)
		if (bad < 0) != (reason == "") {
			t.Fatalf("extent %d bad because %q", bad, reason)
		}
		if bad >= 0 {
			return
		}
		if s1+c1 > s2 {
			t.Error("overlap accepted")
		}
		for _, e := range extents {
			if e.Count == 0 || e.Start >= pages || pages-e.Start < e.Count {
				t.Errorf("%+v accepted in %d pages", e, pages)
			}
			if e.Offset != ZeroExtent && (e.Offset < 0 || fileSize < e.Offset || uint64(fileSize-e.Offset)/PageSize < e.Count) {
				t.Errorf("%+v accepted in %d bytes", e, fileSize)
			}
		}
	})
}
