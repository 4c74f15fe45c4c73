package layer

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"io"
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/snapshot"
)

// rawInfo is what a raw image has instead of a header.
type rawInfo struct {
	size int64

	mu       sync.Mutex
	checksum string // "" while nobody has computed it
}

func (r *rawInfo) known() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.checksum
}

// RawOptions say what is known about a raw image beforehand.
type RawOptions struct {
	// ID that the image must have; "" accepts any.
	ID string
	// Checksum of the content as RawChecksum returns it; "" if unknown. On opening
	// it is held against samples of the content, all of it is Verify's business.
	Checksum string
	// Checked says that who hands the file over has held it against ID already,
	// so that its samples need not be read again.
	Checked bool
}

// OpenRaw makes a plain disk image usable as the bottom layer of a disk. Its
// size must be a multiple of 512 bytes and not zero: a device has whole
// sectors, and cutting a tail off or inventing one is not done silently. The
// rest of the last 4096 bytes reads as zeros.
//
// The ID is a tag of the size and of sampled content: enough to notice another
// file in its place, not to notice a flipped bit. The file is kept as Open
// keeps it.
func OpenRaw(f *os.File) (*Layer, error) { return OpenRawWith(f, RawOptions{}) }

// OpenRawWith is OpenRaw for an image that is already known.
func OpenRawWith(f *os.File, o RawOptions) (*Layer, error) {
	size, err := regularSize(f)
	if err != nil {
		return nil, fmt.Errorf("open disk image (%s): %w", f.Name(), err)
	}
	if size == 0 || size%512 != 0 || size > maxUnits*UnitSize {
		return nil, fmt.Errorf("open disk image (%s): %w: %d bytes, a disk has a positive multiple of 512: extend it with `truncate -s %%512`",
			f.Name(), snapshot.ErrInvalid, size)
	}
	id, err := o.identify(f, size)
	if err != nil {
		return nil, fmt.Errorf("open disk image (%s): %w", f.Name(), err)
	}
	units := uint64(size+UnitSize-1) / UnitSize
	return &Layer{file: f, core: &core{
		id: id, kind: KindDisk, units: units,
		raw:     &rawInfo{size: size, checksum: o.Checksum},
		extents: []Extent{{Start: 0, Count: units, Offset: 0}},
	}}, nil
}

// identify returns the image's ID. An image that is known already is looked at
// only as far as it takes to notice another one.
func (o RawOptions) identify(f *os.File, size int64) (string, error) {
	if o.ID != "" {
		if _, err := parseID(o.ID); err != nil || o.Checked {
			return o.ID, err
		}
		if _, want, ok := strings.Cut(o.Checksum, "/"); ok {
			return o.ID, checkSamples(f, size, want)
		}
	}
	id, err := rawTag(f, size)
	if err == nil && o.ID != "" && o.ID != id {
		err = fmt.Errorf("%w: content tag %s, want %s", snapshot.ErrChecksum, id, o.ID)
	}
	return id, err
}

// rawTag is the ID of an image that nothing is known of.
func rawTag(f *os.File, size int64) (string, error) {
	h := sha256.New()
	io.WriteString(h, "forkvm raw image v1")
	err := writeSamples(h, f, size)
	return hex.EncodeToString(h.Sum(nil)[:16]), err
}

// checkSamples compares the samples with their checksum: hashing them as rawTag
// does would be the dearest part of a clone's start.
func checkSamples(f *os.File, size int64, want string) error {
	got, err := sampleSum(f, size)
	if err == nil && got != want {
		err = fmt.Errorf("%w: samples %s, want %s", snapshot.ErrChecksum, got, want)
	}
	return err
}

func sampleSum(f *os.File, size int64) (string, error) {
	h := crc32.New(castagnoli)
	err := writeSamples(h, f, size)
	return fmt.Sprintf("%08x", h.Sum32()), err
}

// writeSamples writes the size, the first 64 KiB (partition tables, superblocks
// with their UUIDs and times), 16 blocks spread evenly and the last 4 KiB.
func writeSamples(h hash.Hash, f *os.File, size int64) error {
	h.Write(binary.LittleEndian.AppendUint64(nil, uint64(size)))
	buf := make([]byte, 64<<10)
	sample := func(off int64, n int) error {
		n = int(min(int64(n), size-off))
		if _, err := f.ReadAt(buf[:n], off); err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		h.Write(binary.LittleEndian.AppendUint64(nil, uint64(off)))
		h.Write(buf[:n])
		return nil
	}
	if err := sample(0, len(buf)); err != nil {
		return err
	}
	blocks := size / UnitSize
	for i := range int64(16) {
		if err := sample(blocks/16*i*UnitSize, UnitSize); err != nil {
			return err
		}
	}
	return sample(max(0, size-UnitSize), UnitSize)
}

// KnownChecksum is the checksum of a raw image's content if it is known, else
// "". It reads nothing.
func (l *Layer) KnownChecksum() string {
	if l.raw == nil {
		return ""
	}
	return l.raw.known()
}

// RawChecksum returns the checksum of a raw image's whole content, reading it
// (but not its holes) the first time if it is not known. It has two parts. The
// first is the CRC-32C over, for each 1 MiB chunk that is not all zeros, the
// chunk's index (u64) and CRC-32C (u32), so that holes and written zeros count
// the same. The second is that of the samples which opening looks at.
func (l *Layer) RawChecksum(ctx context.Context) (string, error) {
	if l.raw == nil {
		return "", fmt.Errorf("checksum layer (%s): %w: not a raw image", l.id, snapshot.ErrInvalid)
	}
	if sum := l.raw.known(); sum != "" {
		return sum, nil
	}
	sum, err := rawChecksum(ctx, l.file, l.raw.size)
	if err != nil {
		return "", fmt.Errorf("checksum layer (%s): %w", l.id, err)
	}
	l.raw.mu.Lock()
	l.raw.checksum = sum
	l.raw.mu.Unlock()
	return sum, nil
}

func rawChecksum(ctx context.Context, f *os.File, size int64) (string, error) {
	sum := crc32.New(castagnoli)
	buf := make([]byte, ChunkSize)
	zero := make([]byte, ChunkSize)
	for off := int64(0); off < size; {
		if err := ctx.Err(); err != nil {
			return "", err
		}
		data, _, err := nextData(f, off, size)
		if err != nil {
			return "", err
		}
		if data >= size {
			break
		}
		off = data / ChunkSize * ChunkSize
		n := min(ChunkSize, size-off)
		if err := readAtFull(f, buf[:n], off); err != nil {
			return "", err
		}
		if !bytes.Equal(buf[:n], zero[:n]) {
			var entry [12]byte
			binary.LittleEndian.PutUint64(entry[:], uint64(off/ChunkSize))
			binary.LittleEndian.PutUint32(entry[8:], crc32.Checksum(buf[:n], castagnoli))
			sum.Write(entry[:])
		}
		off += n
	}
	samples, err := sampleSum(f, size)
	return fmt.Sprintf("crc32c:%08x/%s", sum.Sum32(), samples), err
}

// nextData finds the first run of data at or after off: [start, end). Without
// any, start is size. File systems that know no holes have one run.
func nextData(f *os.File, off, size int64) (start, end int64, err error) {
	start, err = seek(f, off, unix.SEEK_DATA)
	if errors.Is(err, unix.ENXIO) {
		return size, size, nil
	}
	if errors.Is(err, unix.EINVAL) {
		return off, size, nil
	}
	if err != nil {
		return 0, 0, err
	}
	end, err = seek(f, start, unix.SEEK_HOLE)
	if err != nil {
		return 0, 0, err
	}
	return min(start, size), min(end, size), nil
}

// seek moves the shared file position, which nothing here relies on.
func seek(f *os.File, off int64, whence int) (int64, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return 0, err
	}
	var pos int64
	var seekErr error
	if err := raw.Control(func(fd uintptr) { pos, seekErr = unix.Seek(int(fd), off, whence) }); err != nil {
		return 0, err
	}
	return pos, seekErr
}

// readAtFull fills b from off. A file that ends before is damage: its size was
// checked when it was opened.
func readAtFull(f io.ReaderAt, b []byte, off int64) error {
	n, err := f.ReadAt(b, off)
	if n == len(b) {
		return nil
	}
	if err == nil || errors.Is(err, io.EOF) {
		return fmt.Errorf("%w: it shrank while in use", snapshot.ErrTruncated)
	}
	return err
}
