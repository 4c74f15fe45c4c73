package memory

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"testing"
)

// Small runs of a layer on another one are copied instead of mapped. Nobody can tell
// but by the number of mappings.
func TestHotPages(t *testing.T) {
	withScanners(t, func(t *testing.T, s scanner) {
		const runs, long = 100, 64
		base := Layer{File: patternFile(t, 2048, 1), Extents: []Extent{{Start: 0, Count: 2048}}}
		m := newMemory(t, Config{Size: testSize, Layers: []Layer{base}})
		for i := range uint64(runs) {
			write(t, m, 16*i*PageSize, bytes.Repeat([]byte{byte(i) + 1}, PageSize*int(1+i%3)))
		}
		write(t, m, 1700*PageSize, bytes.Repeat([]byte{9}, long*PageSize))
		write(t, m, 1900*PageSize, make([]byte, PageSize)) // zeros over the base
		layers := []Layer{base, freeze(t, m)}
		before := dump(t, m)

		child := newMemory(t, Config{Size: testSize, Layers: layers})
		child.scan = s
		if n := kernelMappings(t, child); n > 8 {
			t.Errorf("%d mappings for a layer of %d small runs", n, runs)
		}
		for life := range 3 {
			wantContents(t, child, before)
			wantPrivate(t, child)
			if l := freeze(t, child); len(l.Extents) != 0 {
				t.Fatalf("life %d: nothing was written, but a layer has %+v", life, l.Extents)
			}
			write(t, child, 16*PageSize, []byte("hot"))
			write(t, child, 1701*PageSize, []byte("cold"))
			wantPrivate(t, child, 16, 1701)
			if life > 0 {
				if err := child.Discard(32*PageSize, PageSize); err != nil {
					t.Fatal(err)
				}
				if err := child.PrepareFreeze(); err != nil {
					t.Fatal(err)
				}
				after := dump(t, child)
				grandchild := newMemory(t, Config{Size: testSize, Layers: append(layers[:2:2], freeze(t, child))})
				wantContents(t, grandchild, after)
			}
			reset(t, child)
		}
		// From another stack to this one and back.
		resetTo(t, child, base)
		resetTo(t, child, layers...)
		wantContents(t, child, before)
		wantPrivate(t, child)
	})
}

// There are bounds to what is copied: pages, and layers that have them.
func TestHotPagesAreBounded(t *testing.T) {
	config := Config{Size: testSize, Layers: []Layer{{File: patternFile(t, 1, 1), Extents: []Extent{{Count: 1}}}}}
	m := newMemory(t, config)
	for i := range uint64(2 * maxKeptLayers) {
		for page := i; page < testSize/PageSize; page += 2 * maxKeptLayers {
			write(t, m, page*PageSize, []byte{byte(i) + 1})
		}
		config.Layers = append(config.Layers, freeze(t, m))
	}
	want := dump(t, m)
	child := newMemory(t, config)
	wantContents(t, child, want)
	if n := child.copied.count(); n == 0 || n > maxHot {
		t.Errorf("%d pages are copied", n)
	}
	if n := len(child.kept); n > maxKeptLayers {
		t.Errorf("pages of %d layers are kept", n)
	}
}

// Any number of layers come to what they would one by one.
func TestStackedLayers(t *testing.T) {
	const pages = 300
	r := rand.New(rand.NewPCG(8, 13))
	for range 200 {
		var stack [][]piece
		for source := range r.IntN(9) {
			var layer []piece
			for at := uint64(r.IntN(30)); at < pages; at += uint64(r.IntN(20)) {
				p := piece{start: at, count: min(uint64(1+r.IntN(25)), pages-at), source: source, offset: int64(at) * PageSize}
				if r.IntN(5) == 0 {
					p.source, p.offset = noSource, 0
				}
				layer = append(layer, p)
				at += p.count
			}
			stack = append(stack, layer)
		}
		bottom := []piece{{count: pages, source: noSource}}
		want := bottom
		for _, layer := range stack {
			want = overlay(want, layer, appendMerged)
		}
		if got := overlay(bottom, stacked(stack), appendMerged); !slices.Equal(got, want) {
			t.Fatalf("%d layers come to %+v, one by one to %+v", len(stack), got, want)
		}
	}
}
