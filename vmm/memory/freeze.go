package memory

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/linux"
)

// Freeze makes a layer of all pages that were written since the memory was made
// or last frozen, and makes that layer part of what the memory is based on: the
// VM and whoever is made from the layer share the pages. Contents do not change.
//
// The layer's file is a memory file, the caller's to close, with data from
// DataStart on in page order, sealed against shrinking; see Layer.Seal. Pages of
// zeros are not stored: they become zero extents where something lies below, and
// nothing otherwise.
//
// Nobody may write guest memory meanwhile. On an error nothing has changed.
func (m *Memory) Freeze() (Layer, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	plan, err := m.planLocked()
	if err != nil {
		return Layer{}, err
	}
	layer, source, err := m.storeLocked(plan)
	if err != nil {
		return Layer{}, err
	}
	m.adoptLocked(plan, layer, source)
	return layer, nil
}

// plan is what Freeze does with each changed page.
type plan struct {
	extents []Extent    // of the new layer
	bytes   int64       // size of its file
	dropped []pageRange // zeros over zeros
}

func (m *Memory) planLocked() (plan, error) {
	changed, err := m.changedLocked()
	if err != nil {
		return plan{}, err
	}
	p := plan{bytes: DataStart}
	err = m.guard(func() error {
		for _, r := range changed {
			for n := r.start; n < r.end; n++ {
				p.add(n, isZero(m.page(n)), m.view)
			}
		}
		return nil
	})
	return p, err
}

func (p *plan) add(n uint64, zero bool, view []piece) {
	switch {
	case !zero:
		p.extend(Extent{Start: n, Count: 1, Offset: p.bytes})
		p.bytes += PageSize
	case view[find(view, n)].zero():
		p.dropped = appendRange(p.dropped, n, n+1)
	default:
		p.extend(Extent{Start: n, Count: 1, Offset: ZeroExtent})
	}
}

func (p *plan) extend(e Extent) {
	if n := len(p.extents); n > 0 {
		last := &p.extents[n-1]
		if last.Start+last.Count == e.Start && (last.Offset == ZeroExtent) == (e.Offset == ZeroExtent) {
			last.Count++ // data is packed, so the file goes on as the pages do
			return
		}
	}
	p.extents = append(p.extents, e)
}

// storeLocked writes the planned layer's file and takes hold of it as a source.
func (m *Memory) storeLocked(p plan) (layer Layer, source int, err error) {
	f, err := linux.MemoryFile("memory-layer")
	if err != nil {
		return Layer{}, 0, err
	}
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	if err := f.Truncate(p.bytes); err != nil {
		return Layer{}, 0, fmt.Errorf("size memory layer (%d bytes): %w", p.bytes, err)
	}
	if err := m.writePages(f, p.extents); err != nil {
		return Layer{}, 0, err
	}
	if err := linux.AddSeals(f, linux.SealShrink); err != nil {
		return Layer{}, 0, err
	}
	layer = Layer{File: f, Extents: p.extents}
	source, err = m.addSource(layer)
	return layer, source, err
}

// maxVectors is the kernel's bound on the parts of one vectored write.
const maxVectors = 1024

// writePages writes the data extents, whose offsets follow each other, straight
// from guest memory.
func (m *Memory) writePages(f *os.File, extents []Extent) error {
	var vectors [][]byte
	offset := int64(DataStart)
	for _, e := range extents {
		if e.Offset == ZeroExtent {
			continue
		}
		vectors = append(vectors, m.ram[e.Start*PageSize:(e.Start+e.Count)*PageSize])
		if len(vectors) == maxVectors {
			n, err := writeVectors(f, vectors, offset)
			if err != nil {
				return err
			}
			offset, vectors = offset+n, vectors[:0]
		}
	}
	_, err := writeVectors(f, vectors, offset)
	return err
}

// writeVectors writes all of the vectors, however little the kernel takes at a
// time, and returns their length.
func writeVectors(f *os.File, vectors [][]byte, offset int64) (written int64, err error) {
	for len(vectors) > 0 {
		n, err := unix.Pwritev(int(f.Fd()), vectors, offset+written)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return written, fmt.Errorf("write memory layer (offset %d): %w", offset+written, err)
		}
		written += int64(n)
		for len(vectors) > 0 && n >= len(vectors[0]) {
			n -= len(vectors[0])
			vectors = vectors[1:]
		}
		if n > 0 {
			vectors[0] = vectors[0][n:]
		}
	}
	return written, nil
}

// adoptLocked bases the memory on the new layer. None of its steps changes what
// the memory contains, so what cannot be mapped is left out: those pages stay
// private, with the contents that the layer has too.
func (m *Memory) adoptLocked(p plan, layer Layer, source int) {
	pieces := layerPieces(layer.Extents, source)
	m.view = overlay(m.view, pieces, appendMerged)
	rest, _ := m.place(pieces)
	m.markCopied(rest)
	m.releaseSources(source, rest)
	for _, r := range p.dropped {
		m.dropZeros(r)
	}
	_ = m.advise() // advice has no bearing on contents either
}

// dropZeros gives back written zeros over zeros where zeros are what is mapped.
// Elsewhere something older shows through when a private page goes.
func (m *Memory) dropZeros(r pageRange) {
	for start := r.start; start < r.end; {
		under := m.mapped[find(m.mapped, start)]
		end := min(r.end, under.end())
		if under.zero() {
			_ = m.mapping.Advise(start*PageSize, (end-start)*PageSize, unix.MADV_DONTNEED)
		}
		start = end
	}
}
