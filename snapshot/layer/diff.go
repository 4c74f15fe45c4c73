package layer

import (
	"bytes"
	"context"
	"fmt"
)

// Range is a run of units.
type Range struct{ Start, Count uint64 }

// Diff returns the units that read differently in two stacks, in order. What
// comes from the same layer in both is not read; what does not is compared, so
// that units written with what they held before are no difference. Beyond its
// layers a stack is zeros.
func Diff(ctx context.Context, a, b []*Layer) ([]Range, error) {
	c := &comparison{ctx: ctx, a: stackReader{layers: a}, b: stackReader{layers: b}}
	x, y := flatten(a), flatten(b)
	for at := uint64(0); len(x) > 0 || len(y) > 0; {
		x, y = skipTo(x, at), skipTo(y, at)
		// A piece that is one segment, or nothing, on either side.
		s, t := x.lookup(at, maxUnits), y.lookup(at, maxUnits)
		n := min(s.count, t.count)
		if err := c.compare(s, t, n); err != nil {
			return nil, fmt.Errorf("compare units %d+%d: %w", at, n, err)
		}
		at += n
	}
	return c.found, nil
}

// stackReader reads the units of segments.
type stackReader struct {
	layers []*Layer
	buf    []byte
}

// id is where a segment comes from, "" for zeros.
func (r *stackReader) id(s segment) string {
	if s.offset == ZeroExtent {
		return ""
	}
	return r.layers[s.file].id
}

// read returns n units from the one at skip in s.
func (r *stackReader) read(s segment, skip, n uint64) ([]byte, error) {
	if r.buf == nil {
		r.buf = make([]byte, ChunkSize)
	}
	b := r.buf[:n*UnitSize]
	if s.offset == ZeroExtent {
		clear(b)
		return b, nil
	}
	return b, r.layers[s.file].readData(b, s.offset+int64(skip)*UnitSize)
}

type comparison struct {
	ctx   context.Context
	a, b  stackReader
	found []Range
}

// compare looks at n units that begin both segments.
func (c *comparison) compare(s, t segment, n uint64) error {
	if c.a.id(s) == c.b.id(t) {
		return nil
	}
	for done := uint64(0); done < n; {
		if err := c.ctx.Err(); err != nil {
			return err
		}
		count := min(n-done, ChunkSize/UnitSize)
		left, err := c.a.read(s, done, count)
		if err != nil {
			return err
		}
		right, err := c.b.read(t, done, count)
		if err != nil {
			return err
		}
		for i := range count {
			if !bytes.Equal(left[i*UnitSize:(i+1)*UnitSize], right[i*UnitSize:(i+1)*UnitSize]) {
				c.add(s.start + done + i)
			}
		}
		done += count
	}
	return nil
}

func (c *comparison) add(unit uint64) {
	if n := len(c.found); n > 0 && c.found[n-1].Start+c.found[n-1].Count == unit {
		c.found[n-1].Count++
		return
	}
	c.found = append(c.found, Range{unit, 1})
}
