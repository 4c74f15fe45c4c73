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
	if run, n := d.piece(len(p), off); n == len(p) {
		return n, d.readPiece(p, run, off%UnitSize, false)
	}
	if len(d.files.sources) <= maxWindows && withoutFaults(func() { done, err = d.readPieces(p, off, true) }) {
		return done, err
	}
	// Reading a file says what is wrong with it.
	return d.readPieces(p, off, false)
}

func (d *Disk) readPieces(p []byte, off int64, windows bool) (done int, err error) {
	for done < len(p) {
		run, n := d.piece(len(p)-done, off)
		if err := d.readPiece(p[done:done+n], run, off%UnitSize, windows); err != nil {
			return done, err
		}
		done += n
		off += int64(n)
	}
	return done, nil
}

// piece says where the bytes from off on are, and how many of n that goes for.
func (d *Disk) piece(n int, off int64) (run segment, bytes int) {
	in := off % UnitSize
	run = d.lookup(uint64(off)/UnitSize, uint64(in+int64(n)+UnitSize-1)/UnitSize)
	return run, int(min(int64(run.count)*UnitSize-in, int64(n)))
}

// readPiece reads what lies in one run, from byte in of its first block on.
func (d *Disk) readPiece(p []byte, run segment, in int64, windows bool) error {
	if run.offset == ZeroExtent {
		clear(p)
		return nil
	}
	s := d.files.sources[run.file]
	if windows && run.count <= windowUnits && d.files.frozen(run.file) && s.copyAt(p, run.offset+in) {
		return nil
	}
	return s.read(p, run.offset+in)
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
