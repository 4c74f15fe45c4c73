package memory

import (
	"errors"
	"fmt"
	"os"

	"github.com/forkvm/forkvm/internal/linux"
)

// ZeroExtent is the Offset of an extent whose pages are all zeros and take no
// room in the file.
const ZeroExtent = -1

// DataStart is where page data begins in a layer file that Freeze makes. The
// bytes before it are left for the header of whoever keeps the file.
const DataStart = PageSize

// Extent is a run of pages of RAM.
type Extent struct {
	Start  uint64 // number of the first page
	Count  uint64 // pages, at least 1
	Offset int64  // where the first page's bytes are in the file, a multiple of PageSize; or ZeroExtent
}

// Layer is an immutable set of pages. A page that is in no extent is the layer's
// below. The extents ascend and do not overlap.
type Layer struct {
	File    *os.File // may be nil if all extents are zeros
	Extents []Extent

	window *linux.Mapping // how Freeze filled the file, nil if it wrote to it
}

// Seal forbids any further change of the file of a layer that Freeze made. Before,
// a header and an index can be written around the data, and what is behind them cut
// off; whoever has done that calls Seal, and only then shares the file.
func (l Layer) Seal() error {
	if err := l.unmap(); err != nil {
		return err
	}
	return linux.AddSeals(l.File, linux.SealWrite|linux.SealGrow|linux.SealShrink|linux.SealSeal)
}

// Close closes the layer's file. Memories made from the layer keep their own
// hold on it.
func (l Layer) Close() error {
	err := l.unmap()
	if l.File == nil {
		return err
	}
	return errors.Join(err, l.File.Close())
}

func (l Layer) unmap() error {
	if l.window == nil {
		return nil
	}
	return l.window.Unmap()
}

// LayerError says what is wrong with a layer given to New.
type LayerError struct {
	Layer  int // index in Config.Layers
	Extent int // index in the layer's extents, -1 for the layer as a whole
	Reason string
}

func (e *LayerError) Error() string {
	if e.Extent < 0 {
		return fmt.Sprintf("use memory layer (%d): %s", e.Layer, e.Reason)
	}
	return fmt.Sprintf("use memory layer (%d, extent %d): %s", e.Layer, e.Extent, e.Reason)
}

// checkExtents holds extents, which come from files, against a RAM of pages
// pages and a file of fileSize bytes. What passes can be mapped and read
// without ever reaching outside of either. A bad extent is returned by its
// index with the reason; -1 means that all are good.
func checkExtents(extents []Extent, pages uint64, fileSize int64) (bad int, reason string) {
	next := uint64(0) // first page that the next extent may have
	for i, e := range extents {
		switch {
		case e.Count == 0:
			return i, "empty"
		case e.Start < next:
			return i, "overlaps the one before or is out of order"
		case e.Start >= pages || e.Count > pages-e.Start:
			return i, fmt.Sprintf("pages %d+%d are outside of a memory of %d pages", e.Start, e.Count, pages)
		}
		next = e.Start + e.Count
		if e.Offset == ZeroExtent {
			continue
		}
		// Count is at most MaxSize/PageSize here, so its bytes fit an int64.
		length := int64(e.Count * PageSize)
		switch {
		case e.Offset < 0 || e.Offset%PageSize != 0:
			return i, fmt.Sprintf("file offset %d is not that of a page", e.Offset)
		case e.Offset > fileSize || length > fileSize-e.Offset:
			return i, fmt.Sprintf("bytes %d+%d are outside of a file of %d bytes", e.Offset, length, fileSize)
		}
	}
	return -1, ""
}

// checkLayer validates layer number i of a configuration.
func checkLayer(i int, l Layer, pages uint64) error {
	fileSize := int64(0)
	if l.File != nil {
		info, err := l.File.Stat()
		if err != nil {
			return fmt.Errorf("use memory layer (%d): %w", i, err)
		}
		if !info.Mode().IsRegular() {
			return &LayerError{Layer: i, Extent: -1, Reason: "not a regular file"}
		}
		fileSize = info.Size()
	}
	if bad, reason := checkExtents(l.Extents, pages, fileSize); bad >= 0 {
		return &LayerError{Layer: i, Extent: bad, Reason: reason}
	}
	return nil
}
