package archive

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/snapshot/store"
)

// ErrBusy: another program is receiving the same snapshot.
var ErrBusy = errors.New("the snapshot is being imported already")

// keepIncoming is how long chunks of an import that was cut off are kept.
const keepIncoming = 24 * time.Hour

// Incoming is where snapshots arrive.
type Incoming struct {
	Store *store.Store
	// Path is a directory for the chunks that have arrived, below which each
	// snapshot has a directory of its own until it is complete.
	Path string
}

// Read imports a snapshot from a stream, under a name of its own or, if name is
// empty, the one that it had.
//
// A stream that ends too early (snapshot.ErrTruncated), or a program that is killed,
// leaves the chunks that have arrived. Reading the same snapshot again, within a
// day and however often, goes on from there: chunks that are there are not stored
// again, and if r can seek, not read.
func (in Incoming) Read(ctx context.Context, r io.Reader, name string, progress func(bytes int64)) (store.Info, Result, error) {
	id, err := ReadID(r)
	if err != nil {
		return store.Info{}, Result{}, err
	}
	in.sweep()
	path := filepath.Join(in.Path, id)
	d, err := MakeDirectory(path)
	if err != nil {
		return store.Info{}, Result{}, err
	}
	defer d.Close()
	lock, err := lockReceiver(path)
	if err != nil {
		return store.Info{}, Result{}, fmt.Errorf("import snapshot %s: %w", id, err)
	}
	defer lock.Close()
	x, result, err := d.Unpack(ctx, r, id, progress)
	if err != nil {
		return store.Info{}, result, err
	}
	info, err := d.Import(ctx, in.Store, x, name, nil)
	if err == nil || errors.Is(err, store.ErrExists) {
		err = errors.Join(err, os.RemoveAll(path))
	}
	return info, result, err
}

// lockReceiver locks what a snapshot is received into until it is closed. It is
// another lock than that of the directory itself.
func lockReceiver(path string) (*os.File, error) {
	f, err := os.Open(filepath.Join(path, "chunks"))
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = ErrBusy
		}
		return nil, err
	}
	return f, nil
}

// sweep removes what was given up. What cannot be removed now will be another time.
func (in Incoming) sweep() {
	entries, err := os.ReadDir(in.Path)
	if err != nil {
		return
	}
	for _, e := range entries {
		path := filepath.Join(in.Path, e.Name())
		// Each new group of chunks changes the directory in which they are.
		st, err := os.Stat(filepath.Join(path, "chunks"))
		if errors.Is(err, fs.ErrNotExist) {
			st, err = e.Info()
		}
		if err != nil || time.Since(st.ModTime()) < keepIncoming {
			continue
		}
		if lock, err := lockReceiver(path); err == nil {
			os.RemoveAll(path)
			lock.Close()
		}
	}
}
