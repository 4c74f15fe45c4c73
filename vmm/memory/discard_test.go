package memory

import (
	"bytes"
	"errors"
	"os"
	"slices"
	"testing"
)

func TestDiscard(t *testing.T) {
	withScanners(t, func(t *testing.T, s scanner) {
		m := newMemory(t, Config{Size: testSize, Layers: []Layer{
			{File: patternFile(t, 8, 1), Extents: []Extent{{Start: 0, Count: 8}}}}})
		m.scan = s
		write(t, m, 2*PageSize, []byte("over data"))
		write(t, m, 20*PageSize, []byte("over zeros"))
		want := dump(t, m)
		// Only whole pages go: 1 to 4, and 20 to 21.
		for _, r := range [][2]uint64{{PageSize - 100, 4*PageSize + 200}, {20 * PageSize, 2*PageSize + 5}, {30*PageSize + 1, PageSize}} {
			if err := m.Discard(r[0], r[1]); err != nil {
				t.Fatal(err)
			}
		}
		clear(want[1*PageSize : 5*PageSize])
		clear(want[20*PageSize : 22*PageSize])
		wantContents(t, m, want)
		wantPrivate(t, m)
		write(t, m, 3*PageSize, []byte("used again"))
		copy(want[3*PageSize:], "used again")
		layer := freeze(t, m)
		if want := []Extent{{1, 2, ZeroExtent}, {3, 1, DataStart}, {4, 1, ZeroExtent}}; !slices.Equal(layer.Extents, want) {
			t.Errorf("extents %+v, want %+v", layer.Extents, want)
		}
		wantContents(t, m, want)
		if again := freeze(t, m); len(again.Extents) != 0 {
			t.Errorf("nothing was written, but the next layer has %+v", again.Extents)
		}
	})
}

// Pages that would take more mappings than there may be keep their contents.
func TestDiscardWithoutMappings(t *testing.T) {
	m := newMemory(t, Config{Size: testSize, Mappings: 3, Layers: []Layer{
		{File: patternFile(t, 8, 1), Extents: []Extent{{Start: 4, Count: 8}}}}})
	want := dump(t, m)
	if err := m.Discard(6*PageSize, 2*PageSize); err != nil {
		t.Fatal(err)
	}
	wantContents(t, m, want)
	if err := m.Discard(0, 16*PageSize); err != nil { // needs none, it saves two
		t.Fatal(err)
	}
	wantContents(t, m, make([]byte, testSize))
}

func TestDiscardOutside(t *testing.T) {
	m := newMemory(t, Config{Size: testSize})
	var notRAM *RangeError
	for _, r := range [][2]uint64{{testSize, PageSize}, {testSize - PageSize, 2 * PageSize}, {^uint64(0) - PageSize + 1, PageSize}, {0, ^uint64(0)}} {
		if err := m.Discard(r[0], r[1]); !errors.As(err, &notRAM) {
			t.Errorf("discard %#x+%#x: %v", r[0], r[1], err)
		}
	}
	m.Close()
	if err := m.Discard(0, PageSize); !errors.Is(err, os.ErrClosed) {
		t.Errorf("discard in a closed memory: %v", err)
	}
}

// Pages are discarded while others are written and read.
func TestDiscardIsConcurrent(t *testing.T) {
	m := newMemory(t, Config{Size: testSize, Layers: []Layer{
		{File: patternFile(t, 64, 1), Extents: []Extent{{Start: 0, Count: 64}}}}})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := range 2000 {
			if err := m.Discard(uint64(i%64)*PageSize, PageSize); err != nil {
				t.Error(err)
			}
		}
	}()
	page := bytes.Repeat([]byte{7}, PageSize)
	for i := range 2000 {
		write(t, m, uint64(100+i%64)*PageSize, page)
		m.ReadAt(page, uint64(i%64)*PageSize)
		page = bytes.Repeat([]byte{7}, PageSize)
	}
	<-done
	for i := range uint64(64) {
		got := make([]byte, PageSize)
		m.ReadAt(got, (100+i)*PageSize)
		if !bytes.Equal(got, page) {
			t.Fatalf("page %d was written and is something else", 100+i)
		}
	}
}
