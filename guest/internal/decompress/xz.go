package decompress

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"hash/crc64"
	"io"

	"github.com/ulikunitz/xz/lzma"
)

// The .xz container (file format 1.2.1) around LZMA2. It is read here, not by the library that decodes LZMA2, because kernels are
// compressed with a filter for x86 code in front, and because a header may not choose how much memory we use.
const (
	xzMagic       = "\xfd7zXZ\x00"
	xzFooterMagic = "YZ"
	filterX86     = 0x04
	filterLZMA2   = 0x21
)

var errXZ = errors.New("malformed xz data")

func malformed(what string) error { return fmt.Errorf("%w: %s", errXZ, what) }

// xzReader reads one or more streams, each of any number of blocks.
type xzReader struct {
	in     *counter
	flags  [2]byte    // of the current stream
	sizes  [][2]int64 // of its blocks: without padding, uncompressed
	block  io.Reader
	start  int64 // of the current block
	header xzBlockHeader
	check  hash.Hash
	out    int64 // bytes that the current block gave
	err    error
}

func newXZReader(b *bufio.Reader) (io.ReadCloser, error) {
	x := &xzReader{in: &counter{r: b}}
	if err := x.streamHeader(); err != nil {
		return nil, err
	}
	return io.NopCloser(x), nil
}

// counter counts what is read, so that padding and sizes can be checked.
type counter struct {
	r *bufio.Reader
	n int64
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	return n, err
}

func (c *counter) ReadByte() (byte, error) {
	b, err := c.r.ReadByte()
	if err == nil {
		c.n++
	}
	return b, err
}

func (x *xzReader) bytes(n int) ([]byte, error) {
	p := make([]byte, n)
	if _, err := io.ReadFull(x.in, p); err != nil {
		return nil, noEOF(err)
	}
	return p, nil
}

func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

func (x *xzReader) Read(p []byte) (int, error) {
	for x.err == nil {
		if x.block == nil {
			x.err = x.next()
			continue
		}
		n, err := x.block.Read(p)
		x.check.Write(p[:n])
		x.out += int64(n)
		if errors.Is(err, io.EOF) {
			x.block, err = nil, x.endBlock()
		}
		x.err = err
		if n > 0 || len(p) == 0 {
			return n, nil
		}
	}
	return 0, x.err
}

func (x *xzReader) streamHeader() error {
	p, err := x.bytes(12)
	if err != nil {
		return err
	}
	if string(p[:6]) != xzMagic || crc32.ChecksumIEEE(p[6:8]) != binary.LittleEndian.Uint32(p[8:]) {
		return malformed("stream header")
	}
	if p[6] != 0 || newCheck(p[7]) == nil {
		return &UnsupportedError{What: fmt.Sprintf("xz check type %d", p[7])}
	}
	x.flags, x.sizes = [2]byte(p[6:8]), nil
	return nil
}

// next begins the next block, or reads the end of the stream and the beginning of one that may follow.
func (x *xzReader) next() error {
	x.start = x.in.n
	size, err := x.in.ReadByte()
	if err != nil {
		return noEOF(err)
	}
	if size != 0 {
		return x.beginBlock(size)
	}
	if err := x.index(); err != nil {
		return err
	}
	for { // padding between streams: words of zero
		word, err := x.in.r.Peek(4)
		if len(word) == 0 && errors.Is(err, io.EOF) {
			return io.EOF
		}
		if !bytes.Equal(word, make([]byte, 4)) {
			return x.streamHeader()
		}
		x.in.r.Discard(4)
	}
}

func (x *xzReader) beginBlock(size byte) error {
	rest, err := x.bytes((int(size)+1)*4 - 1)
	if err != nil {
		return err
	}
	if x.header, err = parseBlockHeader(append([]byte{size}, rest...)); err != nil {
		return err
	}
	x.start = x.in.n
	x.check, x.out = newCheck(x.flags[1]), 0
	decoder, err := lzma.Reader2Config{DictCap: x.header.window}.NewReader2(x.in)
	if err != nil {
		return err
	}
	x.block = decoder
	if x.header.x86 {
		x.block = newX86Reader(decoder, x.header.x86Start)
	}
	return nil
}

func (x *xzReader) endBlock() error {
	packed := x.in.n - x.start
	if h := x.header; h.packed >= 0 && h.packed != packed || h.unpacked >= 0 && h.unpacked != x.out {
		return malformed("block size")
	}
	padding, err := x.bytes(int(-packed & 3))
	if err != nil {
		return err
	}
	if len(bytes.Trim(padding, "\x00")) > 0 {
		return malformed("block padding")
	}
	sum, err := x.bytes(x.check.Size())
	if err != nil {
		return err
	}
	if !bytes.Equal(sum, x.check.Sum(nil)) {
		return malformed("checksum of a block")
	}
	x.sizes = append(x.sizes, [2]int64{packed + int64(x.header.size+len(sum)), x.out})
	return nil
}

// index reads the list of blocks that ends a stream, compares it with what was read, and reads the footer.
func (x *xzReader) index() error {
	start := x.in.n - 1
	sum := crc32.NewIEEE()
	sum.Write([]byte{0})
	tee := &byteTee{in: x.in, sum: sum}
	count, err := readVarint(tee)
	if err != nil || count != int64(len(x.sizes)) {
		return malformed("number of blocks")
	}
	for _, size := range x.sizes {
		for _, want := range size {
			if got, err := readVarint(tee); err != nil || got != want {
				return malformed("index of blocks")
			}
		}
	}
	for (x.in.n-start)%4 != 0 {
		if b, err := tee.ReadByte(); err != nil || b != 0 {
			return malformed("padding of the index")
		}
	}
	p, err := x.bytes(4 + 12)
	if err != nil {
		return err
	}
	le, footer := binary.LittleEndian, p[4:]
	if le.Uint32(p) != sum.Sum32() {
		return malformed("checksum of the index")
	}
	size := x.in.n - 12 - start
	if string(footer[10:]) != xzFooterMagic || le.Uint32(footer) != crc32.ChecksumIEEE(footer[4:10]) ||
		[2]byte(footer[8:10]) != x.flags || (int64(le.Uint32(footer[4:]))+1)*4 != size {
		return malformed("stream footer")
	}
	return nil
}

type byteTee struct {
	in  io.ByteReader
	sum hash.Hash
}

func (t *byteTee) ReadByte() (byte, error) {
	b, err := t.in.ReadByte()
	if err == nil {
		t.sum.Write([]byte{b})
	}
	return b, err
}

// readVarint reads a number of up to 63 bits, 7 to a byte.
func readVarint(r io.ByteReader) (int64, error) {
	value := int64(0)
	for shift := 0; shift < 63; shift += 7 {
		b, err := r.ReadByte()
		if err != nil {
			return 0, noEOF(err)
		}
		if b == 0 && shift > 0 {
			return 0, malformed("number")
		}
		value |= int64(b&0x7f) << shift
		if b < 0x80 {
			return value, nil
		}
	}
	return 0, malformed("number")
}

// xzBlockHeader is what a block says about itself.
type xzBlockHeader struct {
	size             int
	packed, unpacked int64 // -1 if not said
	window           int
	x86              bool
	x86Start         uint32
}

func parseBlockHeader(p []byte) (xzBlockHeader, error) {
	h := xzBlockHeader{size: len(p), packed: -1, unpacked: -1}
	body := p[:len(p)-4]
	if crc32.ChecksumIEEE(body) != binary.LittleEndian.Uint32(p[len(p)-4:]) {
		return h, malformed("checksum of a block header")
	}
	flags, r := body[1], bytes.NewReader(body[2:])
	for _, field := range []struct {
		bit byte
		to  *int64
	}{{0x40, &h.packed}, {0x80, &h.unpacked}} {
		if flags&field.bit == 0 {
			continue
		}
		var err error
		if *field.to, err = readVarint(r); err != nil {
			return h, err
		}
	}
	count := int(flags&3) + 1
	for i := range count {
		if err := h.filter(r, i == count-1); err != nil {
			return h, err
		}
	}
	return h, nil
}

// filter reads one filter's description. The last one must be LZMA2.
func (h *xzBlockHeader) filter(r *bytes.Reader, last bool) error {
	id, err := readVarint(r)
	if err != nil {
		return err
	}
	length, err := readVarint(r)
	if err != nil {
		return err
	}
	if length > int64(r.Len()) {
		return malformed("filter properties")
	}
	properties := make([]byte, length)
	io.ReadFull(r, properties)
	switch {
	case id == filterLZMA2 && last && length == 1:
		return h.lzma2(properties[0])
	case id == filterX86 && !last && !h.x86 && (length == 0 || length == 4):
		h.x86 = true
		if length == 4 {
			h.x86Start = binary.LittleEndian.Uint32(properties)
		}
		return nil
	}
	return &UnsupportedError{What: fmt.Sprintf("xz filter %#x", id)}
}

func (h *xzBlockHeader) lzma2(property byte) error {
	if property > 40 {
		return malformed("dictionary size")
	}
	window := int64(2|property&1) << (property/2 + 11)
	if window > MaxWindow {
		return &UnsupportedError{What: fmt.Sprintf("xz dictionary of %d MiB", window>>20)}
	}
	h.window = int(window)
	return nil
}

// newCheck makes the check that the stream flags name; nil if it is not known.
func newCheck(id byte) hash.Hash {
	switch id {
	case 0:
		return noCheck{}
	case 1:
		return reversed{crc32.NewIEEE()}
	case 4:
		return reversed{crc64.New(crc64.MakeTable(crc64.ECMA))}
	case 10:
		return sha256.New()
	}
	return nil
}

// reversed gives a CRC with its low byte first, as xz stores it.
type reversed struct{ hash.Hash }

func (r reversed) Sum(p []byte) []byte {
	sum := r.Hash.Sum(nil)
	for i := range sum {
		p = append(p, sum[len(sum)-1-i])
	}
	return p
}

type noCheck struct{}

func (noCheck) Write(p []byte) (int, error) { return len(p), nil }
func (noCheck) Sum(p []byte) []byte         { return p }
func (noCheck) Reset()                      {}
func (noCheck) Size() int                   { return 0 }
func (noCheck) BlockSize() int              { return 1 }
