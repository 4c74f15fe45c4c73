package layer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
)

// Compact merges some former tops, and what was merged of them before, if Plan
// says so: at most one merger for each call. dst, an empty file, becomes the merged
// layer's; it is taken over if used says so. The disk's content does not change.
//
// The merger is written while requests go on. They wait at the end, for some ten
// nanoseconds for each block of it. Handles on the merged layers that Dup made stay
// valid.
func (d *Disk) Compact(ctx context.Context, dst *os.File) (used bool, err error) {
	run := d.toMerge()
	if !run.Merged() {
		return false, nil
	}
	if err := d.compact(ctx, dst, run); err != nil {
		return false, fmt.Errorf("compact disk: %w", err)
	}
	return true, nil
}

func (d *Disk) compact(ctx context.Context, dst *os.File, run Run) error {
	if err := checkTop(dst); err != nil {
		return err
	}
	if err := run.Write(ctx, dst, WriteOptions{}); err != nil {
		return err
	}
	merged, err := Open(dst)
	if err != nil {
		return err
	}
	return d.exchange(run.Layers, merged)
}

// Compactable reports whether Compact has something to merge.
func (d *Disk) Compactable() bool { return d.toMerge().Merged() }

// toMerge returns the first run of the former tops that has to be merged, or one
// of nothing.
func (d *Disk) toMerge() Run {
	d.mu.RLock()
	closed, given := d.closed, d.given
	former := slices.Clone(d.layers[given:])
	d.mu.RUnlock()
	if closed {
		return Run{}
	}
	runs := Plan(former)
	i := slices.IndexFunc(runs, Run.Merged)
	if i < 0 {
		return Run{}
	}
	runs[i].Bottom = i == 0 && given == 0
	return runs[i]
}

// errChanged: the disk was reset or closed while its layers were merged.
var errChanged = errors.New("the layers are not the disk's any more")

// exchange puts a layer in the place of those that it was merged of. A sync that
// runs, and what it has not covered, may concern their files: the next one is the
// merged layer's.
func (d *Disk) exchange(parts []*Layer, merged *Layer) error {
	d.syncs.flush.Lock()
	defer d.syncs.flush.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	former := d.layers[d.given:]
	first := slices.Index(former, parts[0])
	last := slices.Index(former, parts[len(parts)-1])
	if d.closed || first < 0 || last < first {
		return errChanged
	}
	old := slices.Clone(former[first : last+1]) // with empty ones, which no plan has
	number, gone := d.files.merge(first, len(old), merged.file)
	for _, e := range merged.Extents() {
		if e.Offset != ZeroExtent {
			d.places.move(e.Start, e.Count, gone, newPlace(number, uint64(e.Offset)/UnitSize))
		}
	}
	first += d.given
	d.layers = slices.Replace(slices.Clone(d.layers), first, first+len(old), merged)
	d.syncs.exchange(old, merged.file)
	d.gone.Go(closer(old))
	return nil
}

// exchange notes that a file has the content of some layers.
func (s *syncState) exchange(old []*Layer, merged *os.File) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.former = slices.DeleteFunc(s.former, func(f *os.File) bool {
		return slices.ContainsFunc(old, func(l *Layer) bool { return l.file == f })
	})
	s.former = append(s.former, merged)
}
