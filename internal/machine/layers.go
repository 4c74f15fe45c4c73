package machine

import (
	"cmp"
	"context"
	"errors"
	"slices"

	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/snapshot/layer"
	"github.com/forkvm/forkvm/vmm/memory"
)

// memoryLayers holds the layers that a machine's memory consists of, except for
// what is written now, bottom first. It owns its handles.
type memoryLayers struct {
	sealed []*layer.Layer
	origin int    // how many of them the machine came with, or was reset to
	units  uint64 // pages of RAM
	// huge has some of the pages of the lower layers once more; nil if there are none.
	huge *HugePages
	// cut holds layers that were frozen and have no header yet. Writing it is
	// left for after the pause.
	cut []memory.Layer
}

// mappable returns the memory layers in the form that package memory takes. The
// two packages do not know each other: one knows files, the other mappings.
func (m *memoryLayers) mappable() []memory.Layer {
	layers := make([]memory.Layer, len(m.sealed))
	for i, l := range m.sealed {
		extents := l.Extents()
		if i == 0 {
			extents = l.Spans() // nothing lies below it
		}
		layers[i] = memory.Layer{File: l.File(), Extents: make([]memory.Extent, len(extents))}
		for j, e := range extents {
			layers[i].Extents[j] = memory.Extent(e)
		}
	}
	if m.huge != nil {
		layers = slices.Insert(layers, m.huge.Above, m.huge.layer())
	}
	return layers
}

// fitting returns ascending ranges, or if they are more than a working set can have, what of
// them the layers have: where nothing was, a guest that uses much memory uses other pages
// each time.
func (m *memoryLayers) fitting(ranges []memory.PageRange) []memory.PageRange {
	pages := uint64(0)
	for _, r := range ranges {
		pages += r.Count
	}
	if pages <= snapshot.MaxWorkingSetPages {
		return ranges
	}
	return m.storedAt(ranges)
}

// storedAt returns the pages of ascending ranges that the layers have contents of.
func (m *memoryLayers) storedAt(ranges []memory.PageRange) []memory.PageRange {
	var stored []memory.PageRange
	for _, l := range m.sealed {
		left := ranges
		for _, e := range l.Extents() {
			if e.Offset == layer.ZeroExtent {
				continue
			}
			for len(left) > 0 && left[0].Start+left[0].Count <= e.Start {
				left = left[1:]
			}
			for _, r := range left {
				start, end := max(r.Start, e.Start), min(r.Start+r.Count, e.Start+e.Count)
				if start >= end {
					break
				}
				stored = append(stored, memory.PageRange{Start: start, Count: end - start})
			}
		}
	}
	return joined(stored)
}

// joined sorts ranges and joins those that overlap or follow each other.
func joined(ranges []memory.PageRange) (list []memory.PageRange) {
	slices.SortFunc(ranges, func(a, b memory.PageRange) int { return cmp.Compare(a.Start, b.Start) })
	for _, r := range ranges {
		if n := len(list); n > 0 && list[n-1].Start+list[n-1].Count >= r.Start {
			last := &list[n-1]
			last.Count = max(last.Count, r.Start+r.Count-last.Start)
			continue
		}
		list = append(list, r)
	}
	return list
}

// reset puts memory back to the layers that the machine came with, and lets go of
// the others.
func (m *memoryLayers) reset(mem *memory.Memory) error {
	if err := mem.Reset(); err != nil {
		return err
	}
	err := closeLayers(m.sealed[m.origin:]...)
	m.sealed = m.sealed[:m.origin:m.origin]
	return errors.Join(err, m.dropCut())
}

// resetTo bases memory on the layers of a checkpoint, which it takes over, and on its
// huge pages.
func (m *memoryLayers) resetTo(mem *memory.Memory, c *Checkpoint) error {
	next := memoryLayers{sealed: c.Memory, origin: len(c.Memory), units: m.units}
	if c.HugePages != nil && c.HugePages.fits(next.origin, next.units) {
		next.huge = c.HugePages
	}
	if err := mem.ResetTo(next.mappable()); err != nil {
		return err
	}
	c.Memory = nil
	if next.huge != nil {
		c.HugePages = nil
	}
	err := m.Close()
	*m = next
	return err
}

// dropCut lets go of layers that were never sealed.
func (m *memoryLayers) dropCut() error {
	var errs []error
	for _, cut := range m.cut {
		errs = append(errs, cut.Close())
	}
	m.cut = nil
	return errors.Join(errs...)
}

// seal finishes the layers that a freeze left without header.
func (m *memoryLayers) seal() error {
	for len(m.cut) > 0 {
		if err := m.sealOne(m.cut[0]); err != nil {
			return err
		}
		m.cut = m.cut[1:]
	}
	return nil
}

func (m *memoryLayers) sealOne(cut memory.Layer) error {
	if len(cut.Extents) == 0 {
		return cut.Close() // nothing was written since the last time
	}
	extents := make([]layer.Extent, len(cut.Extents))
	for i, e := range cut.Extents {
		extents[i] = layer.Extent(e)
	}
	l, err := layer.Seal(cut.File, layer.SealOptions{Kind: layer.KindMemory, Units: m.units, Extents: extents})
	if err != nil {
		return err
	}
	m.sealed = append(m.sealed, l)
	return cut.Seal()
}

// compact merges layers that the machine has frozen since it began, so that
// hundreds of checkpoints do not make hundreds of layers, each with a descriptor
// here and in every clone. A snapshot's stack is merged by the same plan when it
// is stored, and finds here what it would make.
func (m *memoryLayers) compact(ctx context.Context) error {
	runs := layer.Plan(m.sealed[m.origin:])
	if !slices.ContainsFunc(runs, layer.Run.Merged) {
		return nil
	}
	runs[0].Bottom = m.origin == 0
	stack, old := slices.Clone(m.sealed[:m.origin]), []*layer.Layer(nil)
	var made []*layer.Layer
	for _, r := range runs {
		if !r.Merged() {
			stack = append(stack, r.Layers[0])
			continue
		}
		l, err := mergeRun(ctx, r)
		if err != nil {
			return errors.Join(err, closeLayers(made...))
		}
		stack, made, old = append(stack, l), append(made, l), append(old, r.Layers...)
	}
	m.sealed = stack
	return closeLayers(old...)
}

// mergeRun makes one layer, in a memory file, of several.
func mergeRun(ctx context.Context, r layer.Run) (*layer.Layer, error) {
	f, err := linux.MemoryFile("memory-layer")
	if err != nil {
		return nil, err
	}
	err = r.Write(ctx, f, layer.WriteOptions{})
	if err == nil {
		err = memory.Layer{File: f}.Seal()
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	l, err := layer.Open(f)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return l, nil
}

func (m *memoryLayers) Close() error {
	err := closeLayers(m.sealed...)
	m.sealed = nil
	return errors.Join(err, m.dropHuge(), m.dropCut())
}

func (m *memoryLayers) dropHuge() error {
	if m.huge == nil {
		return nil
	}
	err := m.huge.Close()
	m.huge = nil
	return err
}

func duplicate(layers []*layer.Layer) ([]*layer.Layer, error) {
	copies := make([]*layer.Layer, 0, len(layers))
	for _, l := range layers {
		dup, err := l.Dup()
		if err != nil {
			return nil, errors.Join(err, closeLayers(copies...))
		}
		copies = append(copies, dup)
	}
	return copies, nil
}
