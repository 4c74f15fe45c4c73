// Package decompress reads the compressed forms in which kernels, their modules and root file systems come.
package decompress

import (
	"bufio"
	"bytes"
	"compress/bzip2"
	"compress/gzip"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
)

// Format is a compressed form, or None.
type Format string

// The forms, by the name of the program that makes them.
const (
	None  Format = "none"
	Gzip  Format = "gzip"
	Bzip2 Format = "bzip2"
	XZ    Format = "xz"
	LZ4   Format = "lz4"
	Zstd  Format = "zstd"
	LZMA  Format = "lzma" // recognized, to be named in the error
	LZO   Format = "lzo"  // recognized, to be named in the error
)

// MaxWindow bounds the memory that a compressed file can make its reader use. The kernel's own files use up to 128 MiB.
const MaxWindow = 256 << 20

var magics = []struct {
	format Format
	magic  string
}{
	{Gzip, "\x1f\x8b"},
	{Bzip2, "BZh"},
	{XZ, xzMagic},
	{LZ4, "\x04\x22\x4d\x18"},
	{LZ4, "\x02\x21\x4c\x18"}, // the legacy frame, which Linux uses
	{Zstd, "\x28\xb5\x2f\xfd"},
	{LZMA, "\x5d\x00\x00"},
	{LZO, "\x89LZO\x00\x0d\x0a\x1a\x0a"},
}

// Detect says what form begins with these bytes; 9 are enough.
func Detect(head []byte) Format {
	for _, m := range magics {
		if bytes.HasPrefix(head, []byte(m.magic)) {
			return m.format
		}
	}
	return None
}

// UnsupportedError names a form that is recognized but cannot be read.
type UnsupportedError struct{ What string }

func (e *UnsupportedError) Error() string { return e.What + " is not supported" }

// NewReader finds out the form and returns a reader of what is in it; a file in no known form is read as it is. Close frees the
// reader's memory and leaves r alone.
func NewReader(r io.Reader) (io.ReadCloser, Format, error) {
	b := bufio.NewReaderSize(r, 64<<10)
	head, err := b.Peek(9)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, None, err
	}
	format := Detect(head)
	reader, err := open(format, b)
	if err != nil {
		return nil, format, fmt.Errorf("read %s: %w", format, err)
	}
	return reader, format, nil
}

func open(format Format, b *bufio.Reader) (io.ReadCloser, error) {
	switch format {
	case Gzip:
		return gzip.NewReader(b)
	case Bzip2:
		return io.NopCloser(bzip2.NewReader(b)), nil
	case XZ:
		return newXZReader(b)
	case LZ4:
		return io.NopCloser(lz4.NewReader(b)), nil
	case Zstd:
		z, err := zstd.NewReader(b, zstd.WithDecoderMaxWindow(MaxWindow), zstd.WithDecoderConcurrency(1))
		if err != nil {
			return nil, err
		}
		return z.IOReadCloser(), nil
	case LZMA, LZO:
		return nil, &UnsupportedError{What: "compression " + string(format)}
	default:
		return io.NopCloser(b), nil
	}
}

// All decompresses p into memory. More than limit bytes are an error.
func All(p []byte, limit int64) ([]byte, error) {
	r, format, err := NewReader(bytes.NewReader(p))
	if err != nil {
		return nil, err
	}
	defer r.Close()
	out, err := ReadAll(r, limit)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", format, err)
	}
	return out, nil
}

// ErrTooLong says that there was more than the caller wanted to take.
var ErrTooLong = errors.New("content is longer than allowed")

// ReadAll reads r to its end. More than limit bytes are ErrTooLong.
func ReadAll(r io.Reader, limit int64) ([]byte, error) {
	out, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(out)) > limit {
		return nil, ErrTooLong
	}
	return out, nil
}
