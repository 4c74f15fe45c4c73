package machine

import (
	"context"
	"os"
	"slices"
	"testing"

	"github.com/forkvm/forkvm/internal/testkit"
	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/vmm/memory"
)

// Hundreds of checkpoints leave a stack of few layers, with what the memory has,
// and give the descriptors of the merged ones back.
func TestLayersAreCompacted(t *testing.T) {
	testkit.NoLeaks(t)
	const size = memory.MinSize
	m, err := memory.New(memory.Config{Size: size})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	layers := memoryLayers{units: size / memory.PageSize}
	defer layers.Close()
	for n := range uint64(300) {
		for i := range uint64(5) {
			if err := m.WriteAt([]byte{byte(n) + 1, byte(n >> 8)}, (n*7+i*i*31)%(size/memory.PageSize)*memory.PageSize); err != nil {
				t.Fatal(err)
			}
		}
		cut, err := m.Freeze()
		if err != nil {
			t.Fatal(err)
		}
		layers.cut = append(layers.cut, cut)
		if err := layers.seal(); err != nil {
			t.Fatal(err)
		}
		if err := layers.compact(context.Background()); err != nil {
			t.Fatal(err)
		}
		if len(layers.sealed) > 40 {
			t.Fatalf("%d layers after %d checkpoints", len(layers.sealed), n+1)
		}
	}
	const written = (299*7 + 31) % (size / memory.PageSize)
	few, many := []memory.PageRange{{Start: written, Count: 2}}, []memory.PageRange{{Start: written, Count: snapshot.MaxWorkingSetPages + 1}}
	if got := layers.fitting(few); !slices.Equal(got, few) {
		t.Errorf("of %v fit %v", few, got)
	}
	if got := layers.fitting(many); !slices.Equal(got, layers.storedAt(many)) || len(got) == 0 || got[0].Start != written {
		t.Errorf("of %v fit %v", many, got)
	}
	var ram contents
	if err := m.Dump(&ram); err != nil {
		t.Fatal(err)
	}
	laidOver(t, layers.sealed, size).compare(t, "layers", ram)
	child, err := memory.New(memory.Config{Size: size, Layers: layers.mappable()})
	if err != nil {
		t.Fatal(err)
	}
	defer child.Close()
	var again contents
	if err := child.Dump(&again); err != nil {
		t.Fatal(err)
	}
	again.compare(t, "memory of a child", ram)
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil || len(entries) > 150 {
		t.Errorf("%d descriptors (%v)", len(entries), err)
	}
}
