package archive

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/snapshot/store"
)

// A stream is a header and records: each chunk of a snapshot once, then the index.
const (
	magic       = "FORKVMAR"
	version     = 1
	headerSize  = 64
	recordSize  = 40
	recordChunk = 1
	recordIndex = 2
)

// header begins a stream and is valid or not by itself.
type header struct {
	id [16]byte // of the snapshot
}

func (h header) encode() []byte {
	b := make([]byte, headerSize)
	copy(b, magic)
	binary.LittleEndian.PutUint32(b[8:], version)
	copy(b[16:32], h.id[:])
	binary.LittleEndian.PutUint32(b[12:], crc32.Checksum(b, castagnoli))
	return b
}

func decodeHeader(b []byte) (h header, err error) {
	if string(b[:8]) != magic {
		return h, snapshot.ErrMagic
	}
	if v := binary.LittleEndian.Uint32(b[8:]); v != version {
		return h, fmt.Errorf("%w: %d, this build reads %d", snapshot.ErrVersion, v, version)
	}
	h.id = [16]byte(b[16:32])
	if string(h.encode()) != string(b) {
		return h, fmt.Errorf("header: %w", snapshot.ErrChecksum)
	}
	return h, nil
}

// record comes before a chunk or the index.
type record struct {
	kind   uint32
	length uint32  // of what follows
	sum    Address // a chunk's address; the SHA-256 of the index
}

func (r record) encode() []byte {
	b := make([]byte, recordSize)
	binary.LittleEndian.PutUint32(b, r.kind)
	binary.LittleEndian.PutUint32(b[4:], r.length)
	copy(b[8:], r.sum[:])
	return b
}

func decodeRecord(b []byte) (record, error) {
	r := record{
		kind:   binary.LittleEndian.Uint32(b),
		length: binary.LittleEndian.Uint32(b[4:]),
		sum:    Address(b[8:recordSize]),
	}
	limit := uint32(maxEncoded)
	switch r.kind {
	case recordChunk:
	case recordIndex:
		limit = MaxIndex
	default:
		return r, fmt.Errorf("%w: record of kind %d", snapshot.ErrInvalid, r.kind)
	}
	if r.length == 0 || r.length > limit {
		return r, fmt.Errorf("%w: record of %d bytes", snapshot.ErrTooLarge, r.length)
	}
	return r, nil
}

// Write exports a snapshot as a stream.
func Write(ctx context.Context, w io.Writer, s *store.Snapshot, progress func(bytes int64)) (Result, error) {
	c, err := newCodec()
	if err != nil {
		return Result{}, err
	}
	defer c.close()
	id, err := (&Index{ID: s.Manifest.ID}).id()
	if err != nil {
		return Result{}, fmt.Errorf("export snapshot (%s): %w", s.Manifest.Name, err)
	}
	if _, err := w.Write(header{id: id}.encode()); err != nil {
		return Result{}, fmt.Errorf("export snapshot (%s): %w", s.Manifest.Name, err)
	}
	return export(ctx, s, &streamWriter{w: w, codec: c}, progress)
}

type streamWriter struct {
	w     io.Writer
	codec *codec
}

func (s *streamWriter) put(a Address, data []byte) (int64, error) {
	b := s.codec.encode(data)
	return int64(len(b)), s.write(record{kind: recordChunk, length: uint32(len(b)), sum: a}, b)
}

func (s *streamWriter) putIndex(x *Index) error {
	b, err := x.Encode()
	if err != nil {
		return err
	}
	return s.write(record{kind: recordIndex, length: uint32(len(b)), sum: sha256.Sum256(b)}, b)
}

func (s *streamWriter) write(r record, b []byte) error {
	if _, err := s.w.Write(r.encode()); err != nil {
		return err
	}
	_, err := s.w.Write(b)
	return err
}

// ReadID reads the beginning of a stream and returns the ID of its snapshot.
func ReadID(r io.Reader) (string, error) {
	b := make([]byte, headerSize)
	if err := readFull(r, b); err != nil {
		return "", fmt.Errorf("read archive: header: %w", err)
	}
	h, err := decodeHeader(b)
	if err != nil {
		return "", fmt.Errorf("read archive: %w", err)
	}
	return hex.EncodeToString(h.id[:]), nil
}

// Unpack reads what follows in a stream after ReadID into the directory. Of chunks
// that are there already it looks at nothing but the address; if r can seek, they
// are not even read. When the stream ends too early (snapshot.ErrTruncated), the
// chunks that came are in the directory, and another Unpack skips them.
func (d *Directory) Unpack(ctx context.Context, r io.Reader, id string, progress func(bytes int64)) (*Index, Result, error) {
	u := unpacker{ctx: ctx, dir: d, r: r, progress: progress}
	x, err := u.all()
	if err == nil && x.ID != id {
		err = fmt.Errorf("%w: the index is of snapshot %s, the header of %s", snapshot.ErrInvalid, x.ID, id)
	}
	if err == nil {
		err = d.putIndex(x)
	}
	if err != nil {
		return nil, u.result, fmt.Errorf("read archive: %w", err)
	}
	return x, u.result, nil
}

type unpacker struct {
	ctx      context.Context
	dir      *Directory
	r        io.Reader
	progress func(bytes int64) // may be nil
	result   Result
}

func (u *unpacker) all() (*Index, error) {
	head := make([]byte, recordSize)
	for {
		if u.ctx.Err() != nil {
			return nil, context.Cause(u.ctx)
		}
		if err := readFull(u.r, head); err != nil {
			return nil, err
		}
		rec, err := decodeRecord(head)
		if err != nil {
			return nil, err
		}
		if rec.kind == recordIndex {
			return u.index(rec)
		}
		if err := u.chunk(rec); err != nil {
			return nil, err
		}
		if u.progress != nil {
			u.progress(recordSize + int64(rec.length))
		}
	}
}

func (u *unpacker) chunk(rec record) error {
	u.result.Chunks++
	if u.dir.has(rec.sum) {
		return skip(u.r, int64(rec.length))
	}
	b := make([]byte, rec.length)
	if err := readFull(u.r, b); err != nil {
		return err
	}
	if _, err := u.dir.codec.decode(rec.sum, b); err != nil {
		return err
	}
	took, err := u.dir.putEncoded(rec.sum, b)
	u.result.NewChunks++
	u.result.NewBytes += took
	return err
}

func (u *unpacker) index(rec record) (*Index, error) {
	// Memory grows with what is really there.
	b, err := io.ReadAll(io.LimitReader(u.r, int64(rec.length)))
	if err != nil {
		return nil, err
	}
	if len(b) < int(rec.length) {
		return nil, fmt.Errorf("index: %w", snapshot.ErrTruncated)
	}
	if sha256.Sum256(b) != rec.sum {
		return nil, fmt.Errorf("index: %w", snapshot.ErrChecksum)
	}
	if n, err := u.r.Read(make([]byte, 1)); n > 0 || !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%w: bytes after the index: %v", snapshot.ErrInvalid, err)
	}
	x, err := DecodeIndex(b)
	if err != nil {
		return nil, err
	}
	u.result.Files = len(x.Files)
	for _, f := range x.Files {
		u.result.Bytes += f.Bytes
	}
	return x, nil
}

// skip moves over n bytes.
func skip(r io.Reader, n int64) error {
	if s, ok := r.(io.Seeker); ok {
		// One less, and then one read: seeking beyond the end is no error.
		if _, err := s.Seek(n-1, io.SeekCurrent); err == nil {
			return readFull(r, make([]byte, 1))
		}
	}
	if _, err := io.CopyN(io.Discard, r, n); errors.Is(err, io.EOF) {
		return snapshot.ErrTruncated
	} else if err != nil {
		return err
	}
	return nil
}

func readFull(r io.Reader, b []byte) error {
	_, err := io.ReadFull(r, b)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return snapshot.ErrTruncated
	}
	return err
}
