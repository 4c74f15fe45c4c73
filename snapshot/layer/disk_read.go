package layer

import "fmt"

// ReadAt fills p from off. A range that is not wholly inside the disk is
// ErrRange and reads nothing; there are no short reads without an error.
func (d *Disk) ReadAt(p []byte, off int64) (int, error) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if err := d.check(off, int64(len(p))); err != nil {
		return 0, fmt.Errorf("read disk: %w", err)
	}
	n, err := d.readLocked(p, off)
	if err != nil {
		return n, fmt.Errorf("read disk: %w", err)
	}
	return n, nil
}

// readLocked reads in runs of blocks that lie together in one file. p may
// reach into the last block behind the end of the disk.
func (d *Disk) readLocked(p []byte, off int64) (done int, err error) {
	for done < len(p) {
		block, in := uint64(off)/UnitSize, off%UnitSize
		want := (uint64(in) + uint64(len(p)-done) + UnitSize - 1) / UnitSize
		run := d.lookup(block, want)
		n := int(min(int64(run.count)*UnitSize-in, int64(len(p)-done)))
		piece := p[done : done+n]
		if run.offset == ZeroExtent {
			clear(piece)
		} else if err := d.files.sources[run.file].read(piece, run.offset+in); err != nil {
			return done, err
		}
		done += n
		off += int64(n)
	}
	return done, nil
}

// read fills p; behind the end of a raw image are zeros.
func (s source) read(p []byte, off int64) error {
	if s.raw != 0 {
		if n := max(0, s.raw-off); n < int64(len(p)) {
			clear(p[n:])
			p = p[:n]
		}
	}
	return readAtFull(s.file, p, off)
}

// lookup says where block is and for how many blocks (at most limit, at least
// one) that goes on.
func (d *Disk) lookup(block, limit uint64) segment {
	if p, ok := d.places.get(block); ok {
		return segment{
			start: block, count: d.places.together(block, limit, p),
			offset: p.offset(), file: p.file(),
		}
	}
	limit = d.places.absent(block, limit)
	zero, n := d.zeros.run(block, limit)
	if zero {
		return segment{start: block, count: n, offset: ZeroExtent}
	}
	return d.base().lookup(block, n)
}
