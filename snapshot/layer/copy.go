package layer

import (
	"context"
	"fmt"
	"hash/crc32"
	"os"

	"github.com/forkvm/forkvm/snapshot"
)

// maxHole is how many pages may lie between two runs of pages for which a hole is
// left: a megabyte. A mapping less saves each clone some 20 microseconds; a page of a
// hole takes one of the host's page cache when a guest uses it, for all clones once.
const maxHole = ChunkSize / UnitSize

// Copy writes l as a layer file with data checksums into dst, which must be
// empty and stays the caller's. Units lie in the order of the memory or disk,
// free space inside the source is left out, so the copy has the fewest extents
// and is read in sequence. A raw image becomes a layer file too; its holes are
// not stored. ID and content stay the same. Nothing is synced.
func Copy(ctx context.Context, dst *os.File, l *Layer) error {
	return Run{Layers: []*Layer{l}, id: l.id}.Write(ctx, dst, WriteOptions{Checksums: true})
}

// bottomHoles is how many units of zeros may become a hole in a layer at the bottom.
func bottomHoles(k Kind) uint64 {
	if k == KindMemory {
		return maxHole
	}
	return 0 // a disk's layers are not mapped
}

// packing is what a layer file is to be made of.
type packing struct {
	segments index
	sources  []*Layer // by the segments' files
	// holes is how many units may lie between two segments for them to lie in the
	// file as in memory; 0 where something is below.
	holes     uint64
	checksums bool
}

// pack writes a layer file of identity c into an empty file, with the data in the
// order of the units.
func pack(ctx context.Context, dst *os.File, c *core, p packing) error {
	size, err := regularSize(dst)
	if err != nil {
		return err
	}
	if size != 0 {
		return fmt.Errorf("%w: destination is not empty", snapshot.ErrInvalid)
	}
	w := &packer{ctx: ctx, dst: dst, checksums: p.checksums, buf: make([]byte, 0, ChunkSize), at: DataOffset}
	packed := make([]Extent, 0, len(p.segments))
	next, end := int64(DataOffset), uint64(0) // in the file; of the last data's units
	for _, s := range p.segments {
		e := Extent{Start: s.start, Count: s.count, Offset: ZeroExtent}
		if s.offset != ZeroExtent {
			if gap := s.start - end; next > DataOffset && gap > 0 && gap <= p.holes {
				if err := w.skip(int64(gap) * UnitSize); err != nil {
					return err
				}
				next += int64(gap) * UnitSize
			}
			length := int64(s.count) * UnitSize
			if err := w.add(p.sources[s.file], s.offset, length); err != nil {
				return err
			}
			e.Offset = next
			next, end = next+length, s.end()
		}
		packed = appendExtent(packed, e)
	}
	if err := w.finish(); err != nil {
		return err
	}
	_, err = writeIndex(dst, c, uint64(next-DataOffset)/UnitSize, packed, w.sums, p.checksums)
	return err
}

// sourceExtents is Extents, for a raw image without its holes.
func (l *Layer) sourceExtents() ([]Extent, error) {
	if l.raw == nil {
		return l.Extents(), nil
	}
	var extents []Extent
	for off := int64(0); off < l.raw.size; {
		start, end, err := nextData(l.file, off, l.raw.size)
		if err != nil {
			return nil, err
		}
		if start >= l.raw.size {
			break
		}
		// Runs of data need not be aligned; off is, so that a unit which two
		// of them share is taken once.
		first, last := uint64(start)/UnitSize, uint64(end+UnitSize-1)/UnitSize
		extents = appendExtent(extents, Extent{Start: first, Count: last - first, Offset: int64(first) * UnitSize})
		off = int64(last) * UnitSize
	}
	return extents, nil
}

// readData reads stored bytes; past the end of a raw image are zeros.
func (l *Layer) readData(p []byte, off int64) error {
	if l.raw != nil {
		if n := max(0, l.raw.size-off); n < int64(len(p)) {
			clear(p[n:])
			p = p[:n]
		}
	}
	return readAtFull(l.file, p, off)
}

// packer writes source ranges one after the other, in chunks as the checksums
// want them, reading neighbours in one go.
type packer struct {
	ctx context.Context
	dst *os.File
	buf []byte // the chunk being filled
	at  int64  // where it goes

	checksums bool
	sums      []uint32

	src          *Layer // of the range not read yet
	from, length int64
}

func (w *packer) add(src *Layer, off, n int64) error {
	if w.length > 0 && w.src == src && w.from+w.length == off {
		w.length += n
		return nil
	}
	if err := w.drain(); err != nil {
		return err
	}
	w.src, w.from, w.length = src, off, n
	return nil
}

// drain moves the pending source range into chunks.
func (w *packer) drain() error {
	for w.length > 0 {
		n := min(w.length, int64(cap(w.buf)-len(w.buf)))
		piece := w.buf[len(w.buf) : int64(len(w.buf))+n]
		if err := w.src.readData(piece, w.from); err != nil {
			return err
		}
		w.buf = w.buf[:int64(len(w.buf))+n]
		w.from += n
		w.length -= n
		if len(w.buf) == cap(w.buf) {
			if err := w.flush(); err != nil {
				return err
			}
		}
	}
	return nil
}

// skip leaves n bytes of the file a hole, which counts as zeros in the checksums.
func (w *packer) skip(n int64) error {
	if err := w.drain(); err != nil {
		return err
	}
	for n > 0 {
		part := min(n, int64(cap(w.buf)-len(w.buf)))
		clear(w.buf[len(w.buf) : int64(len(w.buf))+part])
		w.buf = w.buf[:int64(len(w.buf))+part]
		n -= part
		if len(w.buf) == cap(w.buf) {
			if err := w.flush(); err != nil {
				return err
			}
		}
	}
	return nil
}

func (w *packer) flush() error {
	if len(w.buf) == 0 {
		return nil
	}
	if err := w.ctx.Err(); err != nil {
		return err
	}
	if err := writeSparse(w.dst, w.buf, w.at); err != nil {
		return err
	}
	if w.checksums {
		w.sums = append(w.sums, crc32.Checksum(w.buf, castagnoli))
	}
	w.at += int64(len(w.buf))
	w.buf = w.buf[:0]
	return nil
}

func (w *packer) finish() error {
	if err := w.drain(); err != nil {
		return err
	}
	return w.flush()
}

// writeSparse writes p, in which units of zeros become holes of a new file.
func writeSparse(f *os.File, p []byte, at int64) error {
	for len(p) > 0 {
		n := 0
		for n < len(p) && !isZero(p[n:n+UnitSize]) {
			n += UnitSize
		}
		if n > 0 {
			if _, err := f.WriteAt(p[:n], at); err != nil {
				return err
			}
		}
		n = min(n+UnitSize, len(p)) // behind the zeros that ended the run
		p, at = p[n:], at+int64(n)
	}
	return nil
}
