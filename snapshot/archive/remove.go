package archive

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/snapshot"
)

// Remove removes a snapshot from the directory, and all chunks that no other
// snapshot of it names. It waits for exports and imports that are under way, and
// they for it.
func (d *Directory) Remove(ctx context.Context, name string) error {
	if err := d.remove(ctx, name); err != nil {
		return fmt.Errorf("remove archived snapshot (%.200s): %w", name, err)
	}
	return nil
}

func (d *Directory) remove(ctx context.Context, name string) error {
	if err := snapshot.CheckName(name); err != nil {
		return err
	}
	unlock, err := d.lock(unix.LOCK_EX)
	if err != nil {
		return err
	}
	defer unlock()
	err = d.root.Remove("snapshots/" + name + indexSuffix)
	if errors.Is(err, fs.ErrNotExist) {
		return ErrNotFound
	}
	if err != nil {
		return err
	}
	named, err := d.named()
	if err != nil {
		return err
	}
	return d.prune(ctx, named)
}

// named is the addresses of all chunks that the indices name.
func (d *Directory) named() (map[Address]bool, error) {
	names, err := d.Names()
	if err != nil {
		return nil, err
	}
	named := map[Address]bool{}
	for _, name := range names {
		// One that cannot be read may name anything: then nothing goes.
		x, err := d.Index(name)
		if err != nil {
			return nil, err
		}
		for _, f := range x.Files {
			for _, c := range f.Chunks {
				named[c.Address] = true
			}
		}
	}
	return named, nil
}

// prune removes the chunks that are not named, and what writers that died left.
func (d *Directory) prune(ctx context.Context, named map[Address]bool) error {
	return fs.WalkDir(d.root.FS(), "chunks", func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if a, ok := addressOf(path); ok && named[a] {
			return nil
		}
		return ignoreMissing(d.root.Remove(path))
	})
}

// addressOf is chunkPath the other way.
func addressOf(path string) (a Address, ok bool) {
	text := path[len("chunks/"):]
	if len(text) != 2*len(a)+1 || text[2] != '/' {
		return a, false
	}
	b, err := hex.DecodeString(text[:2] + text[3:])
	if err != nil {
		return a, false
	}
	return Address(b), true
}

// lock locks the directory: shared by those who add to it or read from it, for one
// alone who takes away. It waits.
func (d *Directory) lock(how int) (unlock func(), err error) {
	f, err := d.root.Open(".")
	if err != nil {
		return nil, err
	}
	if err := linux.Flock(f, how); err != nil {
		f.Close()
		return nil, err
	}
	return func() { f.Close() }, nil
}
