package node

import (
	"context"
	"errors"
	"io"
	"path/filepath"

	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/snapshot/archive"
	"github.com/forkvm/forkvm/snapshot/store"
)

// ExportSnapshot writes a snapshot as one stream. progress may be nil.
func (n *Node) ExportSnapshot(ctx context.Context, name string, w io.Writer, progress func(bytes int64)) (archive.Result, error) {
	return n.export(name, func(s *store.Snapshot) (archive.Result, error) {
		return archive.Write(ctx, w, s, progress)
	})
}

// ArchiveSnapshot adds a snapshot to an archive directory, which is made if it is
// not there.
func (n *Node) ArchiveSnapshot(ctx context.Context, name, dir string, progress func(bytes int64)) (archive.Result, error) {
	return n.export(name, func(s *store.Snapshot) (archive.Result, error) {
		d, err := archive.MakeDirectory(dir)
		if err != nil {
			return archive.Result{}, err
		}
		defer d.Close()
		return d.Export(ctx, s, progress)
	})
}

func (n *Node) export(name string, do func(s *store.Snapshot) (archive.Result, error)) (archive.Result, error) {
	s, err := n.openSnapshot(name)
	if err != nil {
		return archive.Result{}, err
	}
	defer s.Close()
	result, err := do(s)
	if err != nil {
		return result, archiveFailure(err)
	}
	return result, nil
}

// ImportSnapshot makes a snapshot of a stream, under a name of its own or, if as is
// empty, the one that it had. It goes on where an earlier call was cut off.
func (n *Node) ImportSnapshot(ctx context.Context, r io.Reader, as string, progress func(bytes int64)) (store.Info, error) {
	in := archive.Incoming{Store: n.store, Path: filepath.Join(n.config.DataDir, "incoming")}
	info, _, err := in.Read(ctx, r, as, progress)
	if err != nil {
		return info, archiveFailure(err)
	}
	return info, nil
}

// UnarchiveSnapshot makes a snapshot of one in an archive directory.
func (n *Node) UnarchiveSnapshot(ctx context.Context, dir, name, as string, progress func(bytes int64)) (store.Info, error) {
	info, err := n.unarchive(ctx, dir, name, as, progress)
	if err != nil {
		return info, archiveFailure(err)
	}
	return info, nil
}

func (n *Node) unarchive(ctx context.Context, dir, name, as string, progress func(bytes int64)) (store.Info, error) {
	d, err := archive.OpenDirectory(dir)
	if err != nil {
		return store.Info{}, err
	}
	defer d.Close()
	x, err := d.Index(name)
	if err != nil {
		return store.Info{}, err
	}
	return d.Import(ctx, n.store, x, as, progress)
}

// RemoveArchived removes a snapshot from an archive directory.
func (n *Node) RemoveArchived(ctx context.Context, dir, name string) error {
	d, err := archive.OpenDirectory(dir)
	if err != nil {
		return archiveFailure(err)
	}
	defer d.Close()
	if err := d.Remove(ctx, name); err != nil {
		return archiveFailure(err)
	}
	return nil
}

// archiveFailure gives an error of an archive its code: what is wrong with one is
// wrong with the snapshot in it.
func archiveFailure(err error) *failure.Error {
	switch {
	case errors.Is(err, archive.ErrNotFound):
		return failure.As(failure.SnapshotNotFound, err)
	case errors.Is(err, archive.ErrBusy):
		return failure.As(failure.SnapshotExists, err)
	}
	return snapshotFailure(err)
}
