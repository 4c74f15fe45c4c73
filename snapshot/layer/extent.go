package layer

import (
	"bytes"
	"fmt"

	"github.com/forkvm/forkvm/snapshot"
)

// ZeroExtent as an Extent's Offset says that its units read as zeros and have
// no bytes in the file.
const ZeroExtent = -1

// Extent is a run of units in a layer: Count units (of 4096 bytes) from unit
// Start of the memory or disk, whose bytes begin at Offset in the layer's
// file, or are zero (ZeroExtent).
type Extent struct {
	Start, Count uint64
	Offset       int64
}

// end is the first unit after the extent.
func (e Extent) end() uint64 { return e.Start + e.Count }

// extentChecker holds one extent after the other against the rules of an
// index: sorted, not overlapping, inside the span, data inside the file's data
// area (so that a mapping of it never reaches past the end of the file).
type extentChecker struct {
	units   uint64
	dataEnd int64
	last    uint64
}

func (c *extentChecker) next(e Extent) error {
	if e.Count == 0 || e.Count > c.units || e.Start > c.units-e.Count {
		return fmt.Errorf("%w: units %d+%d of %d", snapshot.ErrInvalid, e.Start, e.Count, c.units)
	}
	if e.Start < c.last {
		return fmt.Errorf("%w: unit %d is out of order", snapshot.ErrInvalid, e.Start)
	}
	c.last = e.end()
	if e.Offset == ZeroExtent {
		return nil
	}
	// Count is at most maxUnits, so the product cannot overflow.
	if e.Offset < DataOffset || e.Offset%UnitSize != 0 || e.Offset > c.dataEnd-int64(e.Count)*UnitSize {
		return fmt.Errorf("%w: data at %d, %d units, outside the file's data", snapshot.ErrInvalid, e.Offset, e.Count)
	}
	return nil
}

// appendExtent adds e to a sorted list, joined with the last one where both
// are one run.
func appendExtent(list []Extent, e Extent) []Extent {
	if n := len(list); n > 0 {
		last := &list[n-1]
		if last.end() == e.Start {
			bothZero := last.Offset == ZeroExtent && e.Offset == ZeroExtent
			oneRun := last.Offset != ZeroExtent && e.Offset == last.Offset+int64(last.Count)*UnitSize
			if bothZero || oneRun {
				last.Count += e.Count
				return list
			}
		}
	}
	return append(list, e)
}

// spans joins data extents over the holes that lie between them in the file as they
// do in memory.
func spans(extents []Extent) []Extent {
	var out []Extent
	for _, e := range extents {
		if e.Offset == ZeroExtent {
			continue
		}
		if n := len(out); n > 0 {
			last := &out[n-1]
			if e.Offset-last.Offset == int64(e.Start-last.Start)*UnitSize {
				last.Count = e.end() - last.Start
				continue
			}
		}
		out = append(out, e)
	}
	return out
}

// stored counts the units that have bytes in the file.
func stored(extents []Extent) (n uint64) {
	for _, e := range extents {
		if e.Offset != ZeroExtent {
			n += e.Count
		}
	}
	return n
}

var zeroUnit [UnitSize]byte

func isZero(unit []byte) bool { return bytes.Equal(unit, zeroUnit[:]) }
