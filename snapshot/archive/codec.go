package archive

import (
	"crypto/sha256"
	"fmt"

	"github.com/klauspost/compress/zstd"

	"github.com/forkvm/forkvm/snapshot"
)

// First byte of an encoded chunk.
const (
	encodingPlain = 0
	encodingZstd  = 1
)

// maxEncoded is the length of the largest encoded chunk.
const maxEncoded = 1 + MaxChunk

// codec turns chunks into what is stored and back. It may be used from any
// goroutine.
type codec struct {
	encoder *zstd.Encoder
	decoder *zstd.Decoder
}

func newCodec() (*codec, error) {
	encoder, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1))
	if err != nil {
		return nil, fmt.Errorf("create compressor: %w", err)
	}
	// Whatever a frame says of itself, no more than a chunk's memory is used.
	decoder, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(MaxChunk), zstd.WithDecoderMaxWindow(MaxChunk))
	if err != nil {
		return nil, fmt.Errorf("create decompressor: %w", err)
	}
	return &codec{encoder: encoder, decoder: decoder}, nil
}

func (c *codec) close() {
	c.encoder.Close()
	c.decoder.Close()
}

// encode compresses a chunk, or leaves it plain where that is no longer.
func (c *codec) encode(data []byte) []byte {
	b := c.encoder.EncodeAll(data, []byte{encodingZstd})
	if len(b) > len(data) {
		b = append([]byte{encodingPlain}, data...)
	}
	return b
}

// decode returns a chunk's bytes if they are those of its address.
func (c *codec) decode(a Address, b []byte) ([]byte, error) {
	if len(b) == 0 {
		return nil, fmt.Errorf("chunk %s: %w", a, snapshot.ErrTruncated)
	}
	data := b[1:]
	switch b[0] {
	case encodingPlain:
	case encodingZstd:
		var err error
		if data, err = c.decoder.DecodeAll(b[1:], nil); err != nil {
			return nil, fmt.Errorf("chunk %s: %w: %v", a, snapshot.ErrChecksum, err)
		}
	default:
		return nil, fmt.Errorf("chunk %s: %w: encoding %d", a, snapshot.ErrInvalid, b[0])
	}
	if len(data) > MaxChunk {
		return nil, fmt.Errorf("chunk %s: %w: %d bytes", a, snapshot.ErrTooLarge, len(data))
	}
	if sha256.Sum256(data) != a {
		return nil, fmt.Errorf("chunk %s: %w", a, snapshot.ErrChecksum)
	}
	return data, nil
}
