package blk

import (
	"bytes"
	"fmt"
	"sync"
)

// ram is a disk in memory that knows what would survive a power cut, and
// checks that the device keeps to the contract of Backend.
type ram struct {
	mu      sync.Mutex
	size    int64 // may be larger than data, for huge disks
	data    []byte
	stable  []byte // data at the last flush
	flushes int
	calls   int
	err     error         // returned by all calls if not nil
	gate    chan struct{} // if not nil, reads wait until it is closed
}

func newRAM(size int) *ram {
	return &ram{size: int64(size), data: make([]byte, size), stable: make([]byte, size)}
}

// pattern fills the disk so that each sector differs.
func (r *ram) pattern() *ram {
	for i := range r.data {
		r.data[i] = byte(i/SectorSize*7 + i)
	}
	return r
}

func (r *ram) call(off, n int64) error {
	r.calls++
	if off < 0 || n <= 0 || off%SectorSize != 0 || off > r.size || n > r.size-off {
		panic(fmt.Sprintf("backend called for %d bytes at %d of %d", n, off, r.size))
	}
	return r.err
}

func (r *ram) ReadAt(p []byte, off int64) (int, error) {
	if r.gate != nil {
		<-r.gate
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	// Buffers of one request need not be whole sectors.
	if err := r.call(off/SectorSize*SectorSize, int64(len(p))); err != nil {
		return 0, err
	}
	if off < int64(len(r.data)) {
		return copy(p, r.data[off:]), nil
	}
	clear(p)
	return len(p), nil
}

func (r *ram) WriteAt(p []byte, off int64) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.call(off/SectorSize*SectorSize, int64(len(p))); err != nil {
		return 0, err
	}
	return copy(r.data[off:], p), nil
}

func (r *ram) Flush() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err != nil {
		return r.err
	}
	r.flushes++
	r.stable = bytes.Clone(r.data)
	return nil
}

// Discard fills with a mark, so that tests see where it was.
func (r *ram) Discard(off, n int64) error { return r.fill(off, n, 0xdd) }

func (r *ram) WriteZeroes(off, n int64) error { return r.fill(off, n, 0) }

func (r *ram) fill(off, n int64, with byte) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.call(off, n); err != nil {
		return err
	}
	copy(r.data[off:], bytes.Repeat([]byte{with}, int(n)))
	return nil
}

func (r *ram) Size() int64 { return r.size }

// snapshot returns the contents.
func (r *ram) snapshot() []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	return bytes.Clone(r.data)
}

// put changes the contents from the host's side.
func (r *ram) put(sector uint64, p []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	copy(r.data[sector*SectorSize:], p)
}

// setError lets all calls fail from now on, or work again with nil.
func (r *ram) setError(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.err = err
}

// flushed returns the number of flushes and what is stable.
func (r *ram) flushed() (int, []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.flushes, bytes.Clone(r.stable)
}

// isStable reports whether all that was written would survive a power cut.
func (r *ram) isStable() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return bytes.Equal(r.stable, r.data)
}

func (r *ram) callCount() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.calls
}
