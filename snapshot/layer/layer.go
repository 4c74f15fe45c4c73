package layer

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/snapshot"
)

// Layer is a handle on an immutable set of units. Its index is in memory and
// shared by all handles that Dup made; the descriptor is its own. All methods
// may be called at any time from any goroutine, except File's result, which is
// valid until Close.
type Layer struct {
	*core
	file   *os.File
	closed atomic.Bool
}

// core is what all handles of one layer share.
type core struct {
	id    string
	kind  Kind
	units uint64
	level uint32   // of merging, see Run
	raw   *rawInfo // a plain disk image, not a layer file

	mu      sync.Mutex
	frozen  *frozenTop // a disk's former top: its index is made on demand
	extents []Extent
	head    header // of the file, once it has one
	sealed  bool
}

// Open reads and checks the header and the index of a layer file. It uses
// positioned reads only, so the descriptor may be shared, and keeps f: Close
// closes it. If Open fails, f is left as it was.
//
// The index and the file's length are proved sound: every extent lies inside
// the file. The data itself is not read, see Verify.
func Open(f *os.File) (*Layer, error) {
	h, extents, _, err := load(f)
	if err != nil {
		return nil, fmt.Errorf("open layer (%s): %w", f.Name(), err)
	}
	return &Layer{file: f, core: &core{
		id: hex.EncodeToString(h.id[:]), kind: h.kind, units: h.units, level: h.level,
		extents: extents, head: h, sealed: true,
	}}, nil
}

// load reads everything but the data.
func load(f *os.File) (header, []Extent, []uint32, error) {
	size, err := regularSize(f)
	if err != nil {
		return header{}, nil, nil, err
	}
	page := make([]byte, DataOffset)
	if _, err := f.ReadAt(page, 0); errors.Is(err, io.EOF) {
		return header{}, nil, nil, fmt.Errorf("header: %w: %d bytes", snapshot.ErrTruncated, size)
	} else if err != nil {
		return header{}, nil, nil, err
	}
	h, err := decodeHeader(page)
	if err != nil {
		return header{}, nil, nil, err
	}
	switch {
	case uint64(size) < h.fileSize:
		return header{}, nil, nil, fmt.Errorf("%w: %d bytes of %d", snapshot.ErrTruncated, size, h.fileSize)
	case uint64(size) > h.fileSize:
		return header{}, nil, nil, fmt.Errorf("%w: %d bytes after the end", snapshot.ErrInvalid, uint64(size)-h.fileSize)
	}
	at := h.indexOffset()
	extents, sums, err := readIndex(io.NewSectionReader(f, at, int64(h.fileSize)-at), h)
	return h, extents, sums, err
}

func regularSize(f *os.File) (int64, error) {
	st, err := f.Stat()
	if err != nil {
		return 0, err
	}
	if !st.Mode().IsRegular() {
		return 0, fmt.Errorf("%w: not a regular file", snapshot.ErrInvalid)
	}
	return st.Size(), nil
}

// ID is the layer's identity, 16 bytes in hex: random for a layer file, a tag
// of the content for a raw image. Copies keep it.
func (l *Layer) ID() string { return l.id }

// Kind says whether the units are memory pages or disk blocks.
func (l *Layer) Kind() Kind { return l.kind }

// Units is the span of the layer in units of 4096 bytes.
func (l *Layer) Units() uint64 { return l.units }

// Raw reports whether the file is a plain disk image without header and index.
func (l *Layer) Raw() bool { return l.raw != nil }

// File is the layer's file, for mapping, reading or passing on. The caller
// must not write to it or close it.
func (l *Layer) File() *os.File { return l.file }

// Extents lists what the layer holds, sorted, not overlapping; shared by all
// handles, so not to be changed. For the former top of a disk the first call
// costs time in proportion to its blocks.
func (l *Layer) Extents() []Extent {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.extentsLocked()
}

func (c *core) extentsLocked() []Extent {
	if c.frozen != nil {
		c.extents = c.frozen.makeExtents()
		c.frozen = nil
	}
	return c.extents
}

// Spans lists the layer's data in as few runs as possible, for a layer of memory that
// has nothing below it: extents that lie in the file as they do in memory are one run,
// since between them are zeros in both, see Run.Write.
func (l *Layer) Spans() []Extent { return spans(l.Extents()) }

// Stored counts the units that have bytes in the file.
func (l *Layer) Stored() uint64 { return stored(l.Extents()) }

// Checksummed reports whether Verify can check the data: true for files that
// Copy wrote and for raw images whose checksum is known.
func (l *Layer) Checksummed() bool {
	if l.raw != nil {
		return l.raw.known() != ""
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.sealed && l.head.flags&flagChecksums != 0
}

// Dup returns another handle on the layer with a descriptor of its own.
func (l *Layer) Dup() (*Layer, error) {
	f, err := dupFile(l.file)
	if err != nil {
		return nil, fmt.Errorf("duplicate layer (%s): %w", l.id, err)
	}
	return &Layer{core: l.core, file: f}, nil
}

func dupFile(f *os.File) (*os.File, error) {
	// SyscallConn keeps the descriptor alive while it is duplicated.
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	fd := -1
	var dupErr error
	if err := raw.Control(func(old uintptr) {
		fd, dupErr = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 0)
	}); err != nil {
		return nil, err
	}
	if dupErr != nil {
		return nil, os.NewSyscallError("fcntl", dupErr)
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

// Close closes this handle's file. Other handles and mappings go on. Calling
// it again does nothing.
func (l *Layer) Close() error {
	if l.closed.Swap(true) {
		return nil
	}
	return l.file.Close()
}
