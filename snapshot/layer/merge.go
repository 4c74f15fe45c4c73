package layer

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"slices"
)

const (
	// MergeWidth is how many small layers in a row become one.
	MergeWidth = 16
	// MergeUnits is the size, in units with data, above which a layer is never
	// merged: writing it again would cost more than one more layer does.
	MergeUnits = 8192
	// maxLevel is the level of layers that are not merged again.
	maxLevel = 2
)

// Run is a part of a stack that is stored as one layer: a layer as it is, or
// the merger of several that follow each other.
type Run struct {
	Layers []*Layer // bottom first; one, or those to be merged
	// Bottom says that nothing lies below the run.
	Bottom bool
	id     string
	// level is 0 for a layer that was frozen, and one more than its parts' for a
	// merged one. It travels in the layer's header, so that a stack which begins
	// with merged layers is planned like the one that they were made of.
	level uint32
}

// ID is the identity of the layer that the run is stored as. That of a merged
// layer is made from its parts', so that two who merge the same layers make the
// same layer.
func (r Run) ID() string { return r.id }

// Merged reports whether the run has to be merged.
func (r Run) Merged() bool { return len(r.Layers) > 1 }

// Plan says how a stack, bottom first, is stored so that it stays short however
// many layers it has. Layers without content are left out. Each MergeWidth layers
// in a row become one, and so do each MergeWidth of these. A large layer (see
// MergeUnits) or a raw image is left alone, and what small layers lie below it
// become one. So above the topmost large layer are less than 2 * MergeWidth
// layers, and one more for each MergeWidth² that were frozen.
//
// The plan of a stack that grew begins like the plan before: what was merged
// once is found again. It is in the order of the stack.
func Plan(stack []*Layer) []Run {
	var runs []Run
	for _, l := range stack {
		extents := l.Extents()
		if len(extents) == 0 {
			continue
		}
		if l.level == 0 && (l.Raw() || stored(extents) > MergeUnits) {
			runs = append(settle(runs), Run{Layers: []*Layer{l}, id: l.id, level: maxLevel})
			continue
		}
		runs = append(runs, Run{Layers: []*Layer{l}, id: l.id, level: l.level})
		for {
			level := runs[len(runs)-1].level
			if trailing(runs, func(r Run) bool { return r.level == level }) < MergeWidth {
				break
			}
			runs = collapse(runs, MergeWidth, level+1)
		}
	}
	return runs
}

// settle makes the small layers at the top into one that is not merged again.
func settle(runs []Run) []Run {
	tail := trailing(runs, func(Run) bool { return true })
	if tail < 2 {
		return runs
	}
	return collapse(runs, tail, maxLevel)
}

// trailing counts the runs at the top that can be merged and are like that.
func trailing(runs []Run, like func(Run) bool) int {
	n := 0
	for n < len(runs) && runs[len(runs)-1-n].level < maxLevel && like(runs[len(runs)-1-n]) {
		n++
	}
	return n
}

// collapse makes the n topmost runs into one.
func collapse(runs []Run, n int, level uint32) []Run {
	rest, top := runs[:len(runs)-n], runs[len(runs)-n:]
	sum := sha256.New()
	io.WriteString(sum, "forkvm merged layer v1")
	merged := Run{level: level}
	for _, r := range top {
		io.WriteString(sum, r.id)
		merged.Layers = append(merged.Layers, r.Layers...)
	}
	merged.id = hex.EncodeToString(sum.Sum(nil)[:16])
	return append(slices.Clip(rest), merged)
}

// WriteOptions say how a run is written.
type WriteOptions struct {
	// Checksums of the data: not needed in a file that only lives as long as its
	// machines, see SealOptions.
	Checksums bool
}

// Write writes the run as one layer file into dst, which must be empty and stays the
// caller's. A layer stays what it is, see Copy. Of several it becomes what is seen of
// them from above, zeros included where they hide what lies below. In a layer of memory
// at the bottom what lies between two runs of pages, and so is zeros, becomes a hole of
// the file if it is short: Spans then has one span for both. Nothing is synced.
func (r Run) Write(ctx context.Context, dst *os.File, o WriteOptions) error {
	if err := r.write(ctx, dst, o); err != nil {
		return fmt.Errorf("write %d layers as one (%s): %w", len(r.Layers), r.id, err)
	}
	return nil
}

func (r Run) write(ctx context.Context, dst *os.File, o WriteOptions) error {
	c, p := r.Layers[0].core, packing{sources: r.Layers, checksums: o.Checksums}
	if r.Merged() {
		c = &core{id: r.id, kind: c.kind, level: r.level}
		for _, l := range r.Layers {
			c.units = max(c.units, l.units)
		}
		p.segments = flattenRange(r.Layers, 0)
	} else {
		extents, err := r.Layers[0].sourceExtents()
		if err != nil {
			return err
		}
		p.segments = indexOf(extents, 0)
	}
	if r.Bottom {
		p.holes = bottomHoles(c.kind)
	}
	return pack(ctx, dst, c, p)
}
