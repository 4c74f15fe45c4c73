package memory

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/linux"
)

// layerFile is the file of a layer in the making.
type layerFile struct {
	file *os.File
	// window is the beginning of the file, mapped with all of its pages there:
	// copying into it costs a tenth of writing, most of which goes into finding
	// pages. nil if there is none.
	window *linux.Mapping
}

func newLayerFile() (*layerFile, error) {
	f, err := linux.MemoryFile("memory-layer")
	if err != nil {
		return nil, err
	}
	return &layerFile{file: f}, nil
}

func (f *layerFile) close() error {
	if f.window == nil {
		return f.file.Close()
	}
	return errors.Join(f.window.Unmap(), f.file.Close())
}

// PrepareFreeze does ahead what a Freeze soon after would have to do while the
// guest stands still: it finds out how many pages there will be, roughly, and
// gets the room for them. Unlike Freeze, it may be called while others access
// guest memory. Freeze works without it.
func (m *Memory) PrepareFreeze() error {
	m.lock()
	defer m.mu.Unlock()
	m.mapKept()
	changed, err := m.changedLocked()
	if err != nil {
		return err
	}
	pages := countPages(changed)
	if pages < worthPreparing || pages > largeLayer {
		return nil
	}
	return m.prepareLocked(wholeHugePages(DataStart + (pages+pages/8+worthPreparing)*PageSize))
}

// wholeHugePages makes a size up to one in huge pages, where the room for small ones would
// cost more. What is too much of a file is cut off behind the pause, see Layer.Seal.
func wholeHugePages(size uint64) uint64 {
	if rest := size % linux.HugePageSize; rest > linux.HugePageSize/4 {
		size += linux.HugePageSize - rest
	}
	return size
}

// worthPreparing is the number of pages from which on getting room for them
// ahead pays.
const worthPreparing = 64

func (m *Memory) prepareLocked(size uint64) error {
	if m.prepared != nil {
		if m.prepared.window.Size() >= size {
			return nil
		}
		if err := m.dropPrepared(); err != nil {
			return err
		}
	}
	f, err := newLayerFile()
	if err != nil {
		return err
	}
	if err = f.file.Truncate(int64(size)); err == nil {
		f.window, err = linux.MapWindow(f.file, size)
	}
	if err != nil {
		f.close()
		if errors.Is(err, unix.EINVAL) {
			return nil // an old kernel; writing does without
		}
		return fmt.Errorf("prepare memory layer (%d bytes): %w", size, err)
	}
	m.prepared = f
	return nil
}

func (m *Memory) dropPrepared() error {
	f := m.prepared
	m.prepared = nil
	if f == nil {
		return nil
	}
	return f.close()
}

// storeLocked writes the planned layer's file and takes hold of it as a source. Of
// a large layer, mapped are the pages that are mapped from the file already.
func (m *Memory) storeLocked(p plan) (layer Layer, source int, mapped []piece, err error) {
	f := m.prepared
	m.prepared = nil
	if f == nil {
		if f, err = newLayerFile(); err != nil {
			return Layer{}, 0, nil, err
		}
	}
	layer = Layer{File: f.file, Extents: p.extents, window: f.window}
	defer func() {
		if err != nil {
			m.owe(mapped)
			layer.Close()
		}
	}()
	if source, err = m.addSource(layer); err != nil {
		return layer, 0, nil, err
	}
	if countPages(p.private) > largeLayer {
		mapped, err = m.storeLarge(f, p, source)
	} else {
		err = guard(func() error { return m.writePages(f, p.extents) })
	}
	// A prepared file may be too long, which is nothing to see to now; one without
	// data is too short.
	if err == nil && f.window == nil {
		err = f.file.Truncate(p.bytes)
	}
	if err != nil {
		m.releaseSources(source, nil)
		return layer, 0, mapped, fmt.Errorf("store memory layer (%d bytes): %w", p.bytes, err)
	}
	return layer, source, mapped, nil
}

// maxVectors bounds the parts of one vectored write. The kernel takes far more,
// but looks at all that are left for every page that it writes.
const maxVectors = 8

// writePages fills the file with the data extents, straight from guest memory.
// Their offsets follow each other.
func (m *Memory) writePages(f *layerFile, extents []Extent) error {
	var window []byte
	if f.window != nil {
		window = f.window.Bytes()
	}
	var vectors [][]byte
	var at int64 // where the first of vectors goes
	for _, e := range extents {
		if e.Offset == ZeroExtent {
			continue
		}
		offset, data := e.Offset, m.ram[e.Start*PageSize:(e.Start+e.Count)*PageSize]
		if offset < int64(len(window)) {
			n := copy(window[offset:], data)
			offset, data = offset+int64(n), data[n:]
		}
		if len(data) == 0 {
			continue
		}
		if len(vectors) == 0 {
			at = offset
		}
		if vectors = append(vectors, data); len(vectors) == maxVectors {
			if err := writeVectors(f.file, vectors, at); err != nil {
				return err
			}
			vectors = vectors[:0]
		}
	}
	return writeVectors(f.file, vectors, at)
}

// writeVectors writes all of the vectors, however little the kernel takes at a
// time.
func writeVectors(f *os.File, vectors [][]byte, offset int64) error {
	for len(vectors) > 0 {
		n, err := unix.Pwritev(int(f.Fd()), vectors, offset)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return fmt.Errorf("write memory layer (offset %d): %w", offset, err)
		}
		offset += int64(n)
		vectors = advance(vectors, n)
	}
	return nil
}
