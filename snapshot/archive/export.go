package archive

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/snapshot/layer"
	"github.com/forkvm/forkvm/snapshot/store"
)

// Result is what an export or import came to.
type Result struct {
	Files  int
	Bytes  int64 // of the files, zeros included
	Chunks int   // different ones that are not zeros
	// NewChunks of these were not there, and took NewBytes.
	NewChunks int
	NewBytes  int64
}

// sink takes a snapshot's chunks and then its index.
type sink interface {
	// put stores a chunk unless it is there, and returns the space that it took.
	put(a Address, data []byte) (int64, error)
	putIndex(x *Index) error
}

// Export adds a snapshot to the directory. Chunks that are there already cost
// nothing, whichever snapshot they came with; an export that was interrupted goes
// on where it was.
func (d *Directory) Export(ctx context.Context, s *store.Snapshot, progress func(bytes int64)) (Result, error) {
	unlock, err := d.lock(unix.LOCK_SH)
	if err != nil {
		return Result{}, fmt.Errorf("export snapshot (%s): %w", s.Manifest.Name, err)
	}
	defer unlock()
	return export(ctx, s, d, progress)
}

func export(ctx context.Context, s *store.Snapshot, to sink, progress func(bytes int64)) (Result, error) {
	e := exporter{ctx: ctx, to: to, progress: progress, seen: map[Address]bool{}}
	if err := e.snapshot(s); err != nil {
		return e.result, fmt.Errorf("export snapshot (%s): %w", s.Manifest.Name, err)
	}
	return e.result, nil
}

type exporter struct {
	ctx      context.Context
	to       sink
	progress func(bytes int64) // may be nil
	seen     map[Address]bool
	index    Index
	result   Result
}

func (e *exporter) snapshot(s *store.Snapshot) error {
	e.index = Index{Schema: Schema, Name: s.Manifest.Name, ID: s.Manifest.ID}
	manifest, err := s.Manifest.Encode()
	if err != nil {
		return err
	}
	state, err := s.State.Encode()
	if err != nil {
		return err
	}
	if err := e.bytes(snapshot.ManifestFile, manifest); err != nil {
		return err
	}
	if err := e.bytes(s.Manifest.State.File, state); err != nil {
		return err
	}
	if err := e.stack(s.Manifest.Memory, s.Memory); err != nil {
		return err
	}
	for i, d := range s.Disks {
		if err := e.stack(s.Manifest.Disks[i].Layers, d.Layers); err != nil {
			return err
		}
	}
	return e.to.putIndex(&e.index)
}

func (e *exporter) stack(refs []snapshot.LayerRef, stack []*layer.Layer) error {
	for i, l := range stack {
		if e.index.file(refs[i].File) != nil {
			continue // in two stacks
		}
		if err := e.sparse(refs[i].File, l.File(), refs[i].Bytes); err != nil {
			return err
		}
	}
	return nil
}

func (e *exporter) bytes(name string, b []byte) error {
	f := File{Name: name, Bytes: int64(len(b))}
	if err := cut(bytes.NewReader(b), e.adder(&f)); err != nil {
		return fmt.Errorf("file %s: %w", name, err)
	}
	e.add(f)
	return nil
}

// sparse exports a file, whose holes are not read.
func (e *exporter) sparse(name string, from *os.File, size int64) error {
	f := File{Name: name, Bytes: size}
	add := e.adder(&f)
	for at := int64(0); at < size; {
		data, hole, err := nextData(from, at, size)
		if err != nil {
			return fmt.Errorf("file %s: %w", name, err)
		}
		if data > at {
			if err := add(Chunk{Length: data - at, Zero: true}, nil); err != nil {
				return err
			}
		}
		if err := cut(io.NewSectionReader(from, data, hole-data), add); err != nil {
			return fmt.Errorf("file %s: %w", name, err)
		}
		at = hole
	}
	e.add(f)
	return nil
}

func (e *exporter) add(f File) {
	e.index.Files = append(e.index.Files, f)
	e.result.Files++
	e.result.Bytes += f.Bytes
}

// adder takes the chunks of a file.
func (e *exporter) adder(f *File) func(Chunk, []byte) error {
	return func(c Chunk, data []byte) error {
		if err := e.ctx.Err(); err != nil {
			return context.Cause(e.ctx)
		}
		f.Chunks = appendChunk(f.Chunks, c)
		if e.progress != nil {
			e.progress(c.Length)
		}
		if c.Zero || e.seen[c.Address] {
			return nil
		}
		e.seen[c.Address] = true
		e.result.Chunks++
		took, err := e.to.put(c.Address, data)
		if took > 0 {
			e.result.NewChunks++
			e.result.NewBytes += took
		}
		return err
	}
}

// nextData finds the first run of data at or after off, in whole pages: what lies
// before it is a hole. Without any, both are the file's size.
func nextData(f *os.File, off, size int64) (data, hole int64, err error) {
	data, err = seek(f, off, unix.SEEK_DATA)
	if errors.Is(err, unix.ENXIO) {
		return size, size, nil
	}
	if errors.Is(err, unix.EINVAL) {
		return off, size, nil // a file system without holes
	}
	if err != nil {
		return 0, 0, err
	}
	if hole, err = seek(f, data, unix.SEEK_HOLE); err != nil {
		return 0, 0, err
	}
	data = max(off, data/pageSize*pageSize)
	hole = (hole + pageSize - 1) / pageSize * pageSize
	return min(data, size), min(hole, size), nil
}

// seek moves the shared file position, which nothing here relies on.
func seek(f *os.File, off int64, whence int) (at int64, err error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return 0, err
	}
	var seekErr error
	if err := raw.Control(func(fd uintptr) { at, seekErr = unix.Seek(int(fd), off, whence) }); err != nil {
		return 0, err
	}
	return at, seekErr
}
