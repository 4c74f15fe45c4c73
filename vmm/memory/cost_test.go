package memory

import (
	"testing"
	"time"

	"github.com/forkvm/forkvm/internal/testkit"
)

// TestMemoryCosts prints what docs/cost-model.md says about memory: in the lab,
// where time is counted work.
func TestMemoryCosts(t *testing.T) {
	testkit.RequireKVM(t)
	const size, pages = 512 << 20, 1000
	per := func(d time.Duration, n int) float64 { return float64(d.Nanoseconds()) / 1000 / float64(n) }
	timed := func(fn func()) time.Duration {
		begun := time.Now()
		fn()
		return time.Since(begun)
	}
	dirty := func(m *Memory, v byte) {
		for n := range uint64(pages) {
			write(t, m, n*97*PageSize, []byte{v})
		}
	}
	frozen := func(m *Memory) time.Duration {
		var l Layer
		var err error
		d := timed(func() { l, err = m.Freeze() })
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Seal(); err != nil {
			t.Fatal(err)
		}
		l.Close()
		return d
	}
	m := newMemory(t, Config{Size: size})
	var prepare, prepared, plain, same time.Duration = 1 << 40, 1 << 40, 1 << 40, 1 << 40
	for v := range byte(6) {
		dirty(m, 2*v+1)
		plain = min(plain, frozen(m))
		dirty(m, 2*v+2)
		prepare = min(prepare, timed(func() {
			if err := m.PrepareFreeze(); err != nil {
				t.Fatal(err)
			}
		}))
		prepared = min(prepared, frozen(m))
		if err := m.PrepareFreeze(); err != nil { // maps what is compared with
			t.Fatal(err)
		}
		same = min(same, frozen(m))
	}
	t.Logf("prepare a freeze: %.2f µs a page", per(prepare, pages))
	t.Logf("freeze: %.2f µs a page", per(prepared, pages))
	t.Logf("freeze unprepared: %.2f µs a page", per(plain, pages))
	t.Logf("freeze of pages that have not changed since the last: %.2f µs a page", per(same, pages))

	m.lock()
	still := m.stillKept(m.kept[len(m.kept)-1].pieces)[:64]
	t.Logf("settle: %.1f µs a piece", per(timed(func() { m.settlePieces(still) }), len(still)))
	m.mu.Unlock()

	idle := newMemory(t, Config{Size: 8 << 30})
	t.Logf("freeze of nothing, 8 GiB: %v", frozen(idle))

	read := newMemory(t, Config{Size: size, Layers: []Layer{{File: patternFile(t, 20000, 1), Extents: []Extent{{Count: 20000}}}}})
	var page [1]byte
	for n := range uint64(20000) {
		read.ReadAt(page[:], n*PageSize)
	}
	frozen(read)
	t.Logf("look through the page tables: %.3f µs a page that was touched", per(frozen(read), 20000))

	for _, n := range []int{1000, 4000, 100_000} {
		layer := scattered(t, n, 2)
		var made *Memory
		d := timed(func() { made = newMemory(t, Config{Size: 1 << 30, Layers: []Layer{layer}}) })
		t.Logf("create from %d single pages: %v, %.2f µs each, %d mappings", n, d, per(d, n), len(made.mapped))
		made.Close()
	}

	over := newMemory(t, Config{Size: size, Layers: []Layer{{File: patternFile(t, 20000, 1), Extents: []Extent{{Count: 20000}}}}})
	d := timed(func() {
		for n := range uint64(32) {
			if err := over.Discard(n*512*PageSize, 512*PageSize); err != nil {
				t.Fatal(err)
			}
		}
	})
	t.Logf("discard 2 MiB over a layer: %.1f µs", per(d, 32))
	large := newMemory(t, Config{Size: size})
	for n := range uint64(40_000) {
		write(t, large, n*PageSize, []byte{1})
	}
	t.Logf("freeze of 40000 pages in a row: %.2f µs a page", per(frozen(large), 40_000))
}
