package layer

import "slices"

// ReadUnits fills p, whole units, with what a stack of layers, bottom first, has from
// unit start on. It is for a few reads; a Disk finds its way faster.
func ReadUnits(stack []*Layer, start uint64, p []byte) error {
	end := start + uint64(len(p)/UnitSize)
	clear(p) // below the stack are zeros
	for _, l := range stack {
		extents := l.Extents()
		first, _ := slices.BinarySearchFunc(extents, start, func(e Extent, unit uint64) int {
			if e.end() <= unit {
				return -1
			}
			return 1
		})
		for _, e := range extents[first:] {
			if e.Start >= end {
				break
			}
			from, to := max(e.Start, start), min(e.end(), end)
			part := p[(from-start)*UnitSize : (to-start)*UnitSize]
			if e.Offset == ZeroExtent {
				clear(part)
			} else if err := l.readData(part, e.Offset+int64(from-e.Start)*UnitSize); err != nil {
				return err
			}
		}
	}
	return nil
}
