package archive

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"github.com/forkvm/forkvm/snapshot"
)

// Schema names the version of an index.
const Schema = "forkvm/archive/v1"

const (
	// MaxIndex is the size of the largest index, in bytes.
	MaxIndex = 256 << 20
	maxFiles = 1 << 16
	// maxFileBytes bounds a file: a layer of all that a disk can have.
	maxFileBytes = snapshot.MaxUnits * snapshot.UnitSize * 2
)

// Index says which chunks make the files of a snapshot.
type Index struct {
	Schema string `json:"schema"`
	Name   string `json:"name"`
	ID     string `json:"id"` // the snapshot's
	Files  []File `json:"files"`
}

// File is one file of a snapshot: its chunks, one after the other.
type File struct {
	Name   string  `json:"name"`
	Bytes  int64   `json:"bytes"`
	Chunks []Chunk `json:"chunks"`
}

// Encode checks the index and returns the bytes of its file.
func (x *Index) Encode() ([]byte, error) {
	if err := x.validate(); err != nil {
		return nil, fmt.Errorf("encode archive index (%.200s): %w", x.Name, err)
	}
	b, err := json.MarshalIndent(x, "", " ")
	if err != nil {
		return nil, fmt.Errorf("encode archive index (%s): %w", x.Name, err)
	}
	if len(b) >= MaxIndex {
		return nil, fmt.Errorf("encode archive index (%s): %d bytes: %w", x.Name, len(b), snapshot.ErrTooLarge)
	}
	return append(b, '\n'), nil
}

// DecodeIndex reads an index. What it accepts names files, and chunks of lengths
// that add up to theirs; whether the chunks are there is another matter.
func DecodeIndex(b []byte) (*Index, error) {
	x, err := decodeIndex(b)
	if err != nil {
		return nil, fmt.Errorf("decode archive index: %w", err)
	}
	return x, nil
}

func decodeIndex(b []byte) (*Index, error) {
	if len(b) > MaxIndex {
		return nil, fmt.Errorf("%d bytes: %w", len(b), snapshot.ErrTooLarge)
	}
	var head struct {
		Schema string `json:"schema"`
	}
	if err := json.Unmarshal(b, &head); err != nil {
		return nil, fmt.Errorf("%w: %v", snapshot.ErrMagic, err)
	}
	if !strings.HasPrefix(head.Schema, "forkvm/archive/") {
		return nil, snapshot.ErrMagic
	}
	if head.Schema != Schema {
		return nil, fmt.Errorf("%w: %.64q, this build reads %q", snapshot.ErrVersion, head.Schema, Schema)
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	x := new(Index)
	if err := dec.Decode(x); err != nil {
		return nil, fmt.Errorf("%w: %w", snapshot.ErrInvalid, err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return nil, fmt.Errorf("%w: bytes after the object", snapshot.ErrInvalid)
	}
	return x, x.validate()
}

func (x *Index) validate() error {
	if err := snapshot.CheckName(x.Name); err != nil {
		return fmt.Errorf("name: %w", err)
	}
	if _, err := x.id(); err != nil {
		return err
	}
	if len(x.Files) > maxFiles {
		return fmt.Errorf("%w: %d files", snapshot.ErrTooLarge, len(x.Files))
	}
	seen := make(map[string]bool, len(x.Files))
	for i := range x.Files {
		f := &x.Files[i]
		if err := f.validate(); err != nil {
			return fmt.Errorf("file %.200q: %w", f.Name, err)
		}
		if seen[f.Name] {
			return fmt.Errorf("file %.200q: %w: named twice", f.Name, snapshot.ErrInvalid)
		}
		seen[f.Name] = true
	}
	return nil
}

// id is the snapshot's as bytes.
func (x *Index) id() (id [16]byte, err error) {
	b, err := hex.DecodeString(x.ID)
	if err != nil || len(b) != len(id) || x.ID != strings.ToLower(x.ID) {
		return id, fmt.Errorf("id: %w: not 32 lower-case hex digits", snapshot.ErrInvalid)
	}
	return [16]byte(b), nil
}

func (f *File) validate() error {
	if err := snapshot.CheckName(f.Name); err != nil {
		return err
	}
	if f.Bytes < 0 || f.Bytes > maxFileBytes {
		return fmt.Errorf("%w: %d bytes", snapshot.ErrTooLarge, f.Bytes)
	}
	left := f.Bytes
	for _, c := range f.Chunks {
		if c.Length <= 0 || c.Length > left || !c.Zero && c.Length > MaxChunk {
			return fmt.Errorf("%w: a chunk of %d bytes where %d are left", snapshot.ErrInvalid, c.Length, left)
		}
		left -= c.Length
	}
	if left != 0 {
		return fmt.Errorf("%w: %d bytes of %d are in no chunk", snapshot.ErrInvalid, left, f.Bytes)
	}
	return nil
}

// file returns the entry of a name, nil if there is none.
func (x *Index) file(name string) *File {
	for i := range x.Files {
		if x.Files[i].Name == name {
			return &x.Files[i]
		}
	}
	return nil
}
