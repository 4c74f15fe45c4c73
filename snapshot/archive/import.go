package archive

import (
	"context"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/snapshot/store"
)

// Import makes a snapshot of an index in a store, under a name of its own or, if
// name is empty, the one that it had. Layers that the store has already are linked
// after they were compared with the index. What is listed in the end was verified,
// chunk by chunk and then as a snapshot.
func (d *Directory) Import(ctx context.Context, st *store.Store, x *Index, name string, progress func(bytes int64)) (store.Info, error) {
	if name == "" {
		name = x.Name
	}
	unlock, err := d.lock(unix.LOCK_SH)
	if err != nil {
		return store.Info{}, fmt.Errorf("import snapshot (%.200s): %w", name, err)
	}
	defer unlock()
	info, err := d.importAs(ctx, st, x, name, progress)
	if err != nil {
		return info, fmt.Errorf("import snapshot (%.200s): %w", name, err)
	}
	return info, nil
}

func (d *Directory) importAs(ctx context.Context, st *store.Store, x *Index, name string, progress func(bytes int64)) (store.Info, error) {
	m, err := d.manifest(x)
	if err != nil {
		return store.Info{}, err
	}
	im := importer{ctx: ctx, dir: d, progress: progress}
	var parts []store.Part
	for i := range x.Files {
		f := &x.Files[i]
		if f.Name == snapshot.ManifestFile {
			continue // written anew, under its name here
		}
		parts = append(parts, store.Part{
			Name:  f.Name,
			Write: func(to *os.File) error { return im.write(to, f) },
			Same:  func(have *os.File) (bool, error) { return im.same(have, f) },
		})
	}
	return st.Import(ctx, name, *m, parts)
}

func (d *Directory) manifest(x *Index) (*snapshot.Manifest, error) {
	f := x.file(snapshot.ManifestFile)
	if f == nil {
		return nil, fmt.Errorf("%w: it has no manifest", snapshot.ErrInvalid)
	}
	if f.Bytes > snapshot.MaxManifestSize {
		return nil, fmt.Errorf("file %s: %w: %d bytes", f.Name, snapshot.ErrTooLarge, f.Bytes)
	}
	var b []byte
	for _, c := range f.Chunks {
		data, err := d.bytes(c)
		if err != nil {
			return nil, fmt.Errorf("file %s: %w", f.Name, err)
		}
		b = append(b, data...)
	}
	m, err := snapshot.DecodeManifest(b)
	if err == nil && m.ID != x.ID {
		err = fmt.Errorf("%w: the manifest is of snapshot %s, the index of %s", snapshot.ErrInvalid, m.ID, x.ID)
	}
	return m, err
}

// bytes returns what a chunk holds.
func (d *Directory) bytes(c Chunk) ([]byte, error) {
	if c.Zero {
		return make([]byte, c.Length), nil
	}
	data, err := d.get(c.Address)
	if err == nil && int64(len(data)) != c.Length {
		err = fmt.Errorf("chunk %s: %w: %d bytes, the index says %d", c.Address, snapshot.ErrInvalid, len(data), c.Length)
	}
	return data, err
}

type importer struct {
	ctx      context.Context
	dir      *Directory
	progress func(bytes int64) // may be nil
}

func (im *importer) advance(n int64) {
	if im.progress != nil {
		im.progress(n)
	}
}

// write makes a file of its chunks. Runs of zeros become holes.
func (im *importer) write(to *os.File, f *File) error {
	at := int64(0)
	for _, c := range f.Chunks {
		if im.ctx.Err() != nil {
			return context.Cause(im.ctx)
		}
		if !c.Zero {
			data, err := im.dir.bytes(c)
			if err != nil {
				return fmt.Errorf("file %s: %w", f.Name, err)
			}
			if _, err := to.WriteAt(data, at); err != nil {
				return err
			}
		}
		at += c.Length
		im.advance(c.Length)
	}
	return to.Truncate(f.Bytes)
}

// same reports whether a file holds what the index says.
func (im *importer) same(have *os.File, f *File) (bool, error) {
	st, err := have.Stat()
	if err != nil || st.Size() != f.Bytes {
		return false, err
	}
	r := io.NewSectionReader(have, 0, f.Bytes)
	buf := make([]byte, MaxChunk)
	for _, c := range f.Chunks {
		for left := c.Length; left > 0; {
			if im.ctx.Err() != nil {
				return false, context.Cause(im.ctx)
			}
			b := buf[:min(left, MaxChunk)]
			if _, err := io.ReadFull(r, b); err != nil {
				return false, err
			}
			if got, _ := chunkOf(b); got.Zero != c.Zero || !c.Zero && got.Address != c.Address {
				return false, nil
			}
			left -= int64(len(b))
		}
	}
	im.advance(f.Bytes)
	return true, nil
}
