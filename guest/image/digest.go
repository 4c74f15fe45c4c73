package image

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

const digestChunk = 64 << 10

// digest is FileInfo.Digest of the first size bytes of a file. Where the file system tells, holes are not read.
func digest(ctx context.Context, f *os.File, size int64) (string, error) {
	sum := sha256.New()
	buffer, zeros := make([]byte, digestChunk), make([]byte, digestChunk)
	for offset := int64(0); offset < size; offset += digestChunk {
		if err := ctx.Err(); err != nil {
			return "", err
		}
		data, err := nextData(f, offset)
		if err == io.EOF {
			break
		}
		if err != nil {
			return "", err
		}
		if offset = data - data%digestChunk; offset >= size {
			break
		}
		chunk := buffer[:min(digestChunk, size-offset)]
		if _, err := f.ReadAt(chunk, offset); err != nil {
			return "", err
		}
		if !bytes.Equal(chunk, zeros[:len(chunk)]) {
			binary.Write(sum, binary.LittleEndian, offset)
			sum.Write(chunk)
		}
	}
	return hex.EncodeToString(sum.Sum(nil)), nil
}

// nextData finds where data begins at or behind offset; io.EOF if there is none.
func nextData(f *os.File, offset int64) (int64, error) {
	at, err := f.Seek(offset, unix.SEEK_DATA)
	switch {
	case errors.Is(err, unix.ENXIO):
		return 0, io.EOF
	case errors.Is(err, unix.EINVAL): // the file system does not tell
		return offset, nil
	}
	return at, err
}
