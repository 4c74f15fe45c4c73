package ext4

import (
	"bytes"
	"fmt"
	"io"
)

const (
	// chunkSize is how much data is read at once, and the smallest run of zeros that becomes a hole.
	chunkSize = 64 << 10
	// maxHoles bounds the extents that holes cost; a file with more is stored with its zeros.
	maxHoles = 512
)

var zeros [chunkSize]byte

// writeData reads a file's content and writes it to newly allocated blocks.
func (w *Writer) writeData(n *Node, r io.Reader) error {
	if uint64(n.size) > maxFileBlocks*BlockSize {
		return &LimitError{What: fmt.Sprintf("file of %d bytes is not possible", n.size)}
	}
	for offset := int64(0); offset < n.size; offset += chunkSize {
		chunk := w.buffer[:min(chunkSize, n.size-offset)]
		if _, err := io.ReadFull(r, chunk); err != nil {
			if err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return fmt.Errorf("read content at %d: %w", offset, err)
		}
		if bytes.Equal(chunk, zeros[:len(chunk)]) && len(n.extents) < maxHoles {
			continue
		}
		if err := w.writeChunk(n, uint32(offset/BlockSize), chunk); err != nil {
			return err
		}
	}
	return nil
}

func (w *Writer) writeChunk(n *Node, logical uint32, chunk []byte) error {
	count := divideUp(uint64(len(chunk)), BlockSize)
	start, err := w.allocate(count)
	if err != nil {
		return err
	}
	padded := chunk[:count*BlockSize] // the buffer is a whole number of blocks
	clear(padded[len(chunk):])
	if err := w.writeBlocks(start, padded); err != nil {
		return err
	}
	n.extents = appendExtent(n.extents, extent{logical: logical, count: uint32(count), start: start})
	if len(n.extents) > maxExtents {
		return &LimitError{What: fmt.Sprintf("file in more than %d pieces", maxExtents)}
	}
	return nil
}
