package layer

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/snapshot"
)

// Errors of a Disk beside the host's own, which keep their errno.
var (
	// ErrRange: the request is not inside the disk; nothing was done.
	ErrRange = errors.New("outside the disk")
	// ErrReadOnly: the disk has no writable top; nothing was done. It is also
	// EROFS.
	ErrReadOnly = fmt.Errorf("disk is read-only: %w", unix.EROFS)
)

// DiskConfig describes a disk. Size is in bytes, a positive multiple of 512;
// no layer may be larger. Beyond the layers the disk is zeros.
type DiskConfig struct {
	Size     int64
	Layers   []*Layer // bottom first
	Top      *os.File // empty, read-write; nil for a read-only disk
	ReadOnly bool     // refuse writes
}

// Disk is a stack of read-only layers and a writable top, seen as one array of
// bytes. It may be used by any number of goroutines at once; a request that
// races with another on the same bytes sees them before or after it, per
// block of 4096.
//
// The map from blocks to the top's file is in memory only: a disk lives as
// long as its process, and becomes durable as part of a snapshot.
//
// A disk holds one descriptor for each layer and one for the top. A stack has at
// most snapshot.MaxLayers layers; a freeze beyond that is refused. Compact merges
// former tops, so that one that is frozen often stays far below.
type Disk struct {
	size     int64
	blocks   uint64
	readOnly bool

	// mu is held shared while blocks that exist are read or overwritten, and
	// exclusively while the maps below change.
	mu     sync.RWMutex
	closed bool
	layers []*Layer // the stack: given ones and former tops
	given  int      // how many of them are not former tops
	files  fileTable
	// base returns the layers that the disk was made with, flattened: when it is
	// first asked, since many a clone never looks at its disk.
	base func() index
	// What was written or zeroed since then, in the top and in former tops: a
	// block is in one of the two, or neither. Freezing leaves both as they
	// are, which makes it constant-time and keeps lookups independent of the
	// number of layers.
	places blockMap
	zeros  blockSet
	top    top
	whole  [UnitSize]byte // a block that is written in part, on its way

	syncs syncState
	gone  sync.WaitGroup // closes files that Reset threw away
}

// NewDisk makes a disk. It takes over the layers and the top, and Close closes
// them; if it fails they stay the caller's.
func NewDisk(c DiskConfig) (*Disk, error) {
	if err := c.check(); err != nil {
		return nil, fmt.Errorf("create disk: %w", err)
	}
	d := &Disk{
		size:     c.Size,
		blocks:   uint64(c.Size+UnitSize-1) / UnitSize,
		readOnly: c.ReadOnly || c.Top == nil,
		syncs:    syncState{datasync: unix.Fdatasync},
	}
	d.setLayers(c.Layers)
	d.files = newFileTable(c.Layers, c.Top)
	return d, nil
}

// setLayers makes these the layers that the disk is based on.
func (d *Disk) setLayers(layers []*Layer) {
	d.layers, d.given = append([]*Layer(nil), layers...), len(layers)
	given := d.layers
	d.base = sync.OnceValue(func() index { return flatten(given) })
}

func (c DiskConfig) check() error {
	if c.Size <= 0 || c.Size%512 != 0 || c.Size > maxUnits*UnitSize {
		return fmt.Errorf("%w: size of %d bytes, a disk has a positive multiple of 512", snapshot.ErrInvalid, c.Size)
	}
	if len(c.Layers) > snapshot.MaxLayers {
		return fmt.Errorf("%w: %d layers", snapshot.ErrTooLarge, len(c.Layers))
	}
	blocks := uint64(c.Size+UnitSize-1) / UnitSize
	for _, l := range c.Layers {
		if l.kind != KindDisk {
			return fmt.Errorf("layer (%s): %w: holds %v", l.id, snapshot.ErrInvalid, l.kind)
		}
		if l.units > blocks || l.raw != nil && l.raw.size > c.Size {
			return fmt.Errorf("layer (%s): %w: larger than the disk of %d bytes", l.id, snapshot.ErrInvalid, c.Size)
		}
	}
	if c.Top == nil && !c.ReadOnly {
		return fmt.Errorf("%w: a writable disk needs a top file", snapshot.ErrInvalid)
	}
	if c.Top != nil {
		return checkTop(c.Top)
	}
	return nil
}

func checkTop(f *os.File) error {
	size, err := regularSize(f)
	if err != nil {
		return fmt.Errorf("top file (%s): %w", f.Name(), err)
	}
	if size != 0 {
		return fmt.Errorf("top file (%s): %w: not empty", f.Name(), snapshot.ErrInvalid)
	}
	return nil
}

// Size is the disk's size in bytes.
func (d *Disk) Size() int64 { return d.size }

// ReadOnly reports whether writes are refused.
func (d *Disk) ReadOnly() bool { return d.readOnly }

// Usage is what a disk costs now.
type Usage struct {
	Layers     int    // below the top
	TopBlocks  uint64 // blocks of 4096 with data in the top
	TopBytes   int64  // space that the top's file occupies
	IndexBytes int64  // memory for the maps, roughly
}

// Usage reports the disk's cost.
func (d *Disk) Usage() (Usage, error) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if d.closed {
		return Usage{}, os.ErrClosed
	}
	u := Usage{
		Layers:     len(d.layers),
		IndexBytes: int64(len(d.base()))*32 + int64(len(d.places.leaves))*(8*mapLeafBlocks+64) + int64(len(d.zeros.leaves))*64 + int64(cap(d.top.owner))*8,
	}
	if d.files.top == nil {
		return u, nil
	}
	u.TopBlocks = uint64(len(d.top.owner))
	for _, run := range d.top.free {
		u.TopBlocks -= run.count
	}
	st, err := d.files.top.Stat()
	if err != nil {
		return Usage{}, fmt.Errorf("stat disk top: %w", err)
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok {
		u.TopBytes = sys.Blocks * 512
	}
	return u, nil
}

// Stack returns the disk's layers, bottom first, former tops included. They
// stay the disk's: use Dup to keep one beyond Close.
func (d *Disk) Stack() []*Layer {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return append([]*Layer(nil), d.layers...)
}

// Close closes the layers and the top after the requests that run. Later
// requests fail with os.ErrClosed. Calling it again does nothing.
func (d *Disk) Close() error {
	defer d.gone.Wait()
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil
	}
	d.closed = true
	d.files.unmap()
	var errs []error
	if d.files.top != nil {
		errs = append(errs, d.files.top.Close())
	}
	for _, l := range d.layers {
		errs = append(errs, l.Close())
	}
	return errors.Join(errs...)
}

// check holds a request against the disk; the lock is held.
func (d *Disk) check(off, n int64) error {
	if d.closed {
		return os.ErrClosed
	}
	if off < 0 || n < 0 || off > d.size || n > d.size-off {
		return fmt.Errorf("bytes %d+%d of %d: %w", off, n, d.size, ErrRange)
	}
	return nil
}
