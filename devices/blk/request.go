package blk

import (
	"errors"
	"fmt"
	"io"

	"github.com/forkvm/forkvm/devices/virtio"
)

// errRequest marks a request that the guest got wrong: answered with IOERR and
// not reported, since the host is fine.
var errRequest = errors.New("bad request")

// errUnsupported marks a request that the device does not do.
var errUnsupported = errors.New("unsupported request")

// request is one chain on its way. Layout (section 5.2.6): 16 bytes of header,
// then data to write, all readable; data that is read and, as the very last
// byte, the status, all writable. Where buffers begin and end means nothing.
type request struct {
	*virtio.Chain
	header
	// filled counts the writable bytes before the status that hold data; at
	// most maxData.
	filled uint64
}

// answer does what the chain asks for and writes the status. It returns how
// many bytes from the beginning of the writable buffers were written. An error
// is one of guest memory, not of the request.
func (d *disk) answer(c *virtio.Chain) (uint32, error) {
	if c.WritableLen() == 0 {
		// Nowhere to say what happened, so nothing happens.
		return 0, nil
	}
	r := request{Chain: c}
	code := status(d.do(&r))
	at := c.WritableLen() - 1
	if err := c.WriteAt([]byte{code}, at); err != nil {
		return 0, err
	}
	if r.filled == at {
		return uint32(at + 1), nil
	}
	// The status is behind a gap, which the used length cannot express; it
	// may only count bytes that have been written (section 2.7.8.2).
	return uint32(r.filled), nil
}

func status(err error) byte {
	switch {
	case err == nil:
		return StatusOK
	case errors.Is(err, errUnsupported):
		return StatusUnsupported
	}
	return StatusIOError
}

// do reads the header and does the request.
func (d *disk) do(r *request) error {
	var b [headerSize]byte
	if err := r.ReadAt(b[:], 0); err != nil {
		return fmt.Errorf("%w: no header", errRequest)
	}
	r.header = parseHeader(&b)
	switch r.kind {
	case TypeIn:
		return d.read(r)
	case TypeOut:
		return d.write(r)
	case TypeFlush:
		return d.flush(r)
	case TypeGetID:
		return d.getID(r)
	case TypeDiscard:
		return d.ranges(r, FeatureDiscard, "discard", d.backend.Discard)
	case TypeWriteZeroes:
		return d.ranges(r, FeatureWriteZeroes, "write zeroes to", d.backend.WriteZeroes)
	}
	return errUnsupported
}

func (d *disk) read(r *request) error {
	n := r.WritableLen() - 1
	off, err := d.locate(r.sector, n, maxData)
	if err != nil {
		return err
	}
	err = r.AccessWritable(0, n, func(p []byte) error {
		if err := d.backendRead(p, off); err != nil {
			return err
		}
		off += int64(len(p))
		r.filled += uint64(len(p))
		return nil
	})
	if err != nil {
		d.fail("read", r.sector, err)
	}
	return err
}

func (d *disk) write(r *request) error {
	n := r.ReadableLen() - headerSize
	off, err := d.locate(r.sector, n, maxData)
	if err != nil {
		return err
	}
	if d.readOnly {
		return fmt.Errorf("%w: disk is read-only", errRequest)
	}
	err = r.AccessReadable(headerSize, n, func(p []byte) error {
		if err := d.backendWrite(p, off); err != nil {
			return err
		}
		off += int64(len(p))
		return nil
	})
	if err != nil {
		d.fail("write", r.sector, err)
		return err
	}
	return d.writeThrough(r)
}

func (d *disk) flush(r *request) error {
	if d.features&FeatureFlush == 0 {
		return errUnsupported
	}
	return d.sync(r)
}

// writeThrough makes a change stable at once for a driver that has no means to
// ask for it (section 5.2.6.2).
func (d *disk) writeThrough(r *request) error {
	if d.features&FeatureFlush != 0 {
		return nil
	}
	return d.sync(r)
}

func (d *disk) sync(r *request) error {
	if d.readOnly {
		return nil
	}
	if err := d.backend.Flush(); err != nil {
		d.fail("flush", r.sector, err)
		return err
	}
	return nil
}

// getID gives the serial number, which is padded with zeros and not
// terminated.
func (d *disk) getID(r *request) error {
	if r.WritableLen()-1 < idSize {
		return fmt.Errorf("%w: %d bytes for an id", errRequest, r.WritableLen()-1)
	}
	r.filled = idSize
	return r.WriteAt(d.serial[:], 0)
}

// ranges does a discard or a write-zeroes, whose data is a list of ranges. All
// of them are checked before the first is touched.
func (d *disk) ranges(r *request, feature uint64, verb string, do func(off, n int64) error) error {
	if d.features&feature == 0 {
		return errUnsupported
	}
	list, err := d.parseRanges(r)
	if err != nil {
		return err
	}
	for _, x := range list {
		if err := do(int64(x.sector)*SectorSize, int64(x.count)*SectorSize); err != nil {
			d.fail(verb, x.sector, err)
			return err
		}
	}
	return d.writeThrough(r)
}

func (d *disk) parseRanges(r *request) ([]sectorRange, error) {
	n := r.ReadableLen() - headerSize
	if n == 0 || n%rangeSize != 0 || n > maxRanges*rangeSize {
		return nil, fmt.Errorf("%w: %d bytes of ranges", errRequest, n)
	}
	b := make([]byte, n)
	if err := r.ReadAt(b, headerSize); err != nil {
		return nil, err
	}
	var list []sectorRange
	for ; len(b) > 0; b = b[rangeSize:] {
		x := parseRange(b)
		// Section 5.2.6.2: unknown flags, and for a discard the unmap flag as
		// well, are not supported. Whether write-zeroes unmaps is up to the
		// backend; zeros are read in either case.
		if x.flags&^flagUnmap != 0 || x.flags&flagUnmap != 0 && r.kind == TypeDiscard {
			return nil, errUnsupported
		}
		if _, err := d.locate(x.sector, uint64(x.count)*SectorSize, maxRangeSectors*SectorSize); err != nil {
			return nil, err
		}
		list = append(list, x)
	}
	return list, nil
}

// locate returns where on the disk n bytes from a sector are, if they are
// whole sectors, at least one, at most limit bytes, and on the disk.
func (d *disk) locate(sector, n, limit uint64) (int64, error) {
	switch {
	case n == 0 || n%SectorSize != 0 || n > limit:
		return 0, fmt.Errorf("%w: %d bytes", errRequest, n)
	// As distances: sector+count may wrap.
	case sector > d.sectors || n/SectorSize > d.sectors-sector:
		return 0, fmt.Errorf("%w: %d bytes at sector %d of %d", errRequest, n, sector, d.sectors)
	}
	return int64(sector) * SectorSize, nil
}

func (d *disk) backendRead(p []byte, off int64) error {
	n, err := d.backend.ReadAt(p, off)
	return whole(n, err, len(p))
}

func (d *disk) backendWrite(p []byte, off int64) error {
	n, err := d.backend.WriteAt(p, off)
	return whole(n, err, len(p))
}

// whole makes an error of a transfer that was cut short. io.EOF beside a
// complete transfer is none: an io.ReaderAt may say so at the end.
func whole(n int, err error, want int) error {
	if n == want && (err == nil || errors.Is(err, io.EOF)) {
		return nil
	}
	if err == nil {
		err = io.ErrUnexpectedEOF
	}
	return fmt.Errorf("%d of %d bytes: %w", n, want, err)
}
