package archive

import (
	"bytes"
	"crypto/sha256"
	"encoding"
	"encoding/hex"
	"fmt"
	"hash/crc32"
	"io"
	"strconv"
	"strings"

	"github.com/forkvm/forkvm/snapshot"
)

// A chunk ends behind a page whose checksum has its lower bits zero, which is one
// in cutOdds, once it has minPages; it never has more than maxPages. So what is
// inserted or left out moves the cuts around it and no others.
const (
	pageSize = snapshot.UnitSize
	minPages = 8
	maxPages = 128
	cutOdds  = 32
	// MaxChunk is the length of the largest chunk, in bytes.
	MaxChunk = maxPages * pageSize
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Address is the SHA-256 of a chunk's bytes.
type Address [sha256.Size]byte

func (a Address) String() string { return hex.EncodeToString(a[:]) }

// Chunk is a part of a file: bytes with an address, or a run of zeros.
type Chunk struct {
	Length  int64
	Zero    bool
	Address Address // of what is not zeros
}

var _ encoding.TextMarshaler = Chunk{}

// MarshalText writes a chunk as its length and its address, or "zero".
func (c Chunk) MarshalText() ([]byte, error) {
	if c.Zero {
		return fmt.Appendf(nil, "%d zero", c.Length), nil
	}
	return fmt.Appendf(nil, "%d %s", c.Length, c.Address), nil
}

// UnmarshalText reads what MarshalText writes, and nothing else.
func (c *Chunk) UnmarshalText(text []byte) error {
	length, address, found := strings.Cut(string(text), " ")
	n, err := strconv.ParseInt(length, 10, 64)
	if !found || err != nil || n <= 0 || length[0] == '+' || length[0] == '0' {
		return fmt.Errorf("%w: chunk %.80q", snapshot.ErrInvalid, text)
	}
	*c = Chunk{Length: n, Zero: address == "zero"}
	if c.Zero {
		return nil
	}
	sum, err := hex.DecodeString(address)
	if err != nil || len(sum) != len(c.Address) || address != strings.ToLower(address) {
		return fmt.Errorf("%w: chunk %.80q", snapshot.ErrInvalid, text)
	}
	if n > MaxChunk {
		return fmt.Errorf("%w: chunk of %d bytes", snapshot.ErrTooLarge, n)
	}
	c.Address = Address(sum)
	return nil
}

// cut reads r to its end and calls add with one chunk after the other. The bytes
// are valid during the call only, and nil for zeros.
func cut(r io.Reader, add func(c Chunk, data []byte) error) error {
	buf := make([]byte, 0, MaxChunk)
	for {
		page := buf[len(buf) : len(buf)+pageSize]
		n, err := io.ReadFull(r, page)
		buf = buf[:len(buf)+n]
		end := err == io.EOF || err == io.ErrUnexpectedEOF
		if err != nil && !end {
			return err
		}
		pages := len(buf) / pageSize
		at := pages >= minPages && crc32.Checksum(page[:n], castagnoli)%cutOdds == 0
		if len(buf) > 0 && (end || at || pages == maxPages) {
			if err := add(chunkOf(buf)); err != nil {
				return err
			}
			buf = buf[:0]
		}
		if end {
			return nil
		}
	}
}

func chunkOf(data []byte) (Chunk, []byte) {
	if allZero(data) {
		return Chunk{Length: int64(len(data)), Zero: true}, nil
	}
	return Chunk{Length: int64(len(data)), Address: sha256.Sum256(data)}, data
}

var zeroPage [pageSize]byte

func allZero(b []byte) bool {
	for len(b) > 0 {
		n := min(len(b), pageSize)
		if !bytes.Equal(b[:n], zeroPage[:n]) {
			return false
		}
		b = b[n:]
	}
	return true
}

// appendChunk adds a chunk to a file's list, where runs of zeros are one.
func appendChunk(list []Chunk, c Chunk) []Chunk {
	if n := len(list); n > 0 && c.Zero && list[n-1].Zero {
		list[n-1].Length += c.Length
		return list
	}
	return append(list, c)
}
