package layer

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"strings"

	"github.com/forkvm/forkvm/snapshot"
)

// SealOptions describe a layer whose data is already in its file.
type SealOptions struct {
	Kind Kind
	// Units is the span of the whole memory or disk, in units of 4096 bytes.
	Units uint64
	// Extents say where each unit's data is: sorted, offsets from DataOffset
	// on and multiples of 4096. They are kept.
	Extents []Extent
	// ID is 16 bytes in hex; "" makes a random one.
	ID string
	// Checksums makes Seal read the data and store its checksums. Without
	// them, as for a memfd that only lives as long as its machines, Verify
	// has nothing to check the data with; Copy adds them.
	Checksums bool
}

// Seal turns a file with data into a layer file: it writes the index after the
// last unit of data that an extent names, cuts the file there, and writes the
// header last, so that a file whose sealing was interrupted is none. The file
// is kept as Open keeps it. Nothing is synced.
func Seal(f *os.File, o SealOptions) (*Layer, error) {
	if o.ID == "" {
		o.ID = snapshot.NewID()
	}
	size, err := regularSize(f)
	if err != nil {
		return nil, fmt.Errorf("seal layer (%s): %w", o.ID, err)
	}
	if err := checkExtents(o, size); err != nil {
		return nil, fmt.Errorf("seal layer (%s): %w", o.ID, err)
	}
	c := &core{id: o.ID, kind: o.Kind, units: o.Units, extents: o.Extents}
	if err := c.writeLocked(f, o.Checksums); err != nil {
		return nil, fmt.Errorf("seal layer (%s): %w", o.ID, err)
	}
	return &Layer{core: c, file: f}, nil
}

func checkExtents(o SealOptions, size int64) error {
	if o.Units == 0 || o.Units > maxUnits {
		return fmt.Errorf("%w: %d units", snapshot.ErrInvalid, o.Units)
	}
	check := extentChecker{units: o.Units, dataEnd: size}
	for i, e := range o.Extents {
		if err := check.next(e); err != nil {
			return fmt.Errorf("extent %d: %w", i, err)
		}
	}
	return nil
}

// Seal writes the index and header of a disk's former top into its file, which
// Disk.Freeze leaves for later to keep the pause short. It must be done before
// the file is given to another process. Layers that have a header, and raw
// images, are left alone. The file's data is not touched, so a disk may go on
// reading it.
func (l *Layer) Seal() error {
	if l.raw != nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.sealed {
		return nil
	}
	if err := l.writeLocked(l.file, false); err != nil {
		return fmt.Errorf("seal layer (%s): %w", l.id, err)
	}
	return nil
}

// writeLocked writes index and header around the data in f.
func (c *core) writeLocked(f *os.File, checksums bool) error {
	extents := c.extentsLocked()
	end := int64(DataOffset)
	for _, e := range extents {
		if e.Offset != ZeroExtent {
			end = max(end, e.Offset+int64(e.Count)*UnitSize)
		}
	}
	data := uint64(end-DataOffset) / UnitSize
	var sums []uint32
	if checksums {
		var err error
		if sums, err = sumData(context.Background(), f, data); err != nil {
			return err
		}
	}
	head, err := writeIndex(f, c, data, extents, sums, checksums)
	if err != nil {
		return err
	}
	c.head, c.sealed = head, true
	return nil
}

// writeIndex finishes a layer file with data units of data.
func writeIndex(f *os.File, c *core, data uint64, extents []Extent, sums []uint32, checksums bool) (header, error) {
	id, err := parseID(c.id)
	if err != nil {
		return header{}, err
	}
	index := encodeIndex(extents, sums)
	h := header{
		kind: c.kind, id: id, units: c.units, level: c.level, data: data,
		extents: uint64(len(extents)), chunks: uint64(len(sums)),
		indexSum: crc32.Checksum(index, castagnoli),
	}
	if checksums {
		h.flags |= flagChecksums
	}
	h.fileSize = uint64(h.indexOffset()) + uint64(len(index))
	if err := h.check(); err != nil {
		return header{}, err
	}
	// What lies behind the last data is free slots at most.
	if err := f.Truncate(h.indexOffset()); err != nil {
		return header{}, err
	}
	if _, err := f.WriteAt(index, h.indexOffset()); err != nil {
		return header{}, err
	}
	if _, err := f.WriteAt(h.encode(), 0); err != nil {
		return header{}, err
	}
	return h, nil
}

// sumData computes the checksum of each chunk of data.
func sumData(ctx context.Context, f *os.File, units uint64) ([]uint32, error) {
	sums := make([]uint32, 0, chunksOf(units))
	buf := make([]byte, min(ChunkSize, units*UnitSize))
	end := DataOffset + int64(units)*UnitSize
	for off := int64(DataOffset); off < end; off += ChunkSize {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		chunk := buf[:min(ChunkSize, end-off)]
		if err := readAtFull(f, chunk, off); err != nil {
			return nil, err
		}
		sums = append(sums, crc32.Checksum(chunk, castagnoli))
	}
	return sums, nil
}

// ErrNoChecksums: the layer's data was stored without checksums, so Verify
// could check only its header and index.
var ErrNoChecksums = errors.New("layer has no data checksums")

// Verify reads the whole file again and reports the first difference from what
// was written: header, index or data. It returns ErrNoChecksums when only the
// data could not be checked.
func (l *Layer) Verify(ctx context.Context) error {
	err := l.verify(ctx)
	if err != nil {
		return fmt.Errorf("verify layer (%s): %w", l.id, err)
	}
	return nil
}

func (l *Layer) verify(ctx context.Context) error {
	if l.raw != nil {
		return l.verifyRaw(ctx)
	}
	l.mu.Lock()
	sealed, head := l.sealed, l.head
	l.mu.Unlock()
	if !sealed {
		return ErrNoChecksums
	}
	h, extents, sums, err := load(l.file)
	if err != nil {
		return err
	}
	if h != head {
		return fmt.Errorf("%w: the file holds another layer now", snapshot.ErrChecksum)
	}
	if h.flags&flagChecksums == 0 {
		return ErrNoChecksums
	}
	got, err := sumData(ctx, l.file, h.data)
	if err != nil {
		return err
	}
	for i, sum := range sums {
		if got[i] != sum {
			return fmt.Errorf("data at %d: %w", DataOffset+i*ChunkSize, snapshot.ErrChecksum)
		}
	}
	if h.kind == KindMemory {
		return verifyHoles(l.file, extents)
	}
	return nil
}

// verifyHoles checks that what Spans takes for holes is zeros.
func verifyHoles(f *os.File, extents []Extent) error {
	var unit [UnitSize]byte
	at := 0
	for _, s := range spans(extents) {
		for n := s.Start; n < s.end(); n++ {
			for extents[at].end() <= n {
				at++
			}
			if e := extents[at]; e.Start <= n && e.Offset != ZeroExtent {
				n = e.end() - 1
				continue
			}
			off := s.Offset + int64(n-s.Start)*UnitSize
			if err := readAtFull(f, unit[:], off); err != nil {
				return err
			}
			if !isZero(unit[:]) {
				return fmt.Errorf("data at %d: %w: it belongs to no unit", off, snapshot.ErrInvalid)
			}
		}
	}
	return nil
}

func (l *Layer) verifyRaw(ctx context.Context) error {
	want := l.raw.known()
	if want == "" {
		return ErrNoChecksums
	}
	size, err := regularSize(l.file)
	if err != nil {
		return err
	}
	if size != l.raw.size {
		return fmt.Errorf("%w: %d bytes, want %d", snapshot.ErrTruncated, size, l.raw.size)
	}
	got, err := rawChecksum(ctx, l.file, size)
	if err != nil {
		return err
	}
	// Earlier builds stored the first part alone.
	if got != want && !strings.HasPrefix(got, want+"/") {
		return fmt.Errorf("content %s, want %s: %w", got, want, snapshot.ErrChecksum)
	}
	return nil
}
