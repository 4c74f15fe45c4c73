// Package stream has bytes for tests of connections: cheap to make and to check on both ends, and so long without a
// repetition that what is lost, doubled or exchanged shows.
package stream

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"time"
)

// Source is an endless Reader. Two of the same seed have the same bytes, however they are read.
type Source struct {
	state uint64
	rest  []byte // of the last word
	word  [8]byte
}

// New returns a Source.
func New(seed uint64) *Source { return &Source{state: seed} }

// Read implements io.Reader.
func (s *Source) Read(p []byte) (int, error) {
	n := copy(p, s.rest)
	s.rest = s.rest[n:]
	for n < len(p) {
		s.state = s.state*6364136223846793005 + 1442695040888963407
		if len(p)-n >= len(s.word) {
			binary.LittleEndian.PutUint64(p[n:], s.state)
			n += len(s.word)
			continue
		}
		binary.LittleEndian.PutUint64(s.word[:], s.state)
		m := copy(p[n:], s.word[:])
		s.rest, n = s.word[m:], n+m
	}
	return n, nil
}

// Send writes so many bytes of a Source in pieces of random sizes up to chunk, and returns how many were written.
func Send(w io.Writer, s *Source, size int64, chunk int) (sent int64, err error) {
	sizes := rand.New(rand.NewPCG(uint64(size), uint64(chunk)))
	p := make([]byte, chunk)
	for sent < size && err == nil {
		piece := p[:min(size-sent, int64(1+sizes.IntN(chunk)))]
		_, _ = s.Read(piece)
		var n int
		n, err = w.Write(piece)
		sent += int64(n)
	}
	return sent, err
}

// Checker is a Writer that takes the bytes of a Source and no others.
type Checker struct {
	source *Source
	want   []byte
	n      int64
}

// NewChecker returns a Checker of the Source with that seed.
func NewChecker(seed uint64) *Checker { return &Checker{source: New(seed)} }

// Count is how many bytes were right.
func (c *Checker) Count() int64 { return c.n }

// Write implements io.Writer.
func (c *Checker) Write(p []byte) (int, error) {
	if cap(c.want) < len(p) {
		c.want = make([]byte, len(p))
	}
	want := c.want[:len(p)]
	_, _ = c.source.Read(want)
	if !bytes.Equal(p, want) {
		at := 0
		for p[at] == want[at] {
			at++
		}
		return at, fmt.Errorf("wrong byte at %d of the stream", c.n+int64(at))
	}
	c.n += int64(len(p))
	return len(p), nil
}

// pieceSize is what Receive reads at once.
const pieceSize = 64 << 10

// Receive reads so many bytes into a Checker, or up to the end if that comes before, with a pause after each 64 KiB.
func Receive(r io.Reader, c *Checker, size int64, pause time.Duration) error {
	p := make([]byte, pieceSize)
	for got := int64(0); got < size; {
		piece := p[:min(size-got, pieceSize)]
		n, err := io.ReadFull(r, piece)
		got += int64(n)
		if _, wrong := c.Write(piece[:n]); wrong != nil {
			return wrong
		}
		if err == io.EOF || err == io.ErrUnexpectedEOF {
			return nil
		}
		if err != nil {
			return err
		}
		time.Sleep(pause)
	}
	return nil
}
