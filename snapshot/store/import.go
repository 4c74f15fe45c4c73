package store

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/snapshot/layer"
)

// Part is a file of a snapshot that comes from elsewhere.
type Part struct {
	Name string
	// Write fills an empty file.
	Write func(f *os.File) error
	// Same reports whether a file of this name in another snapshot holds what
	// Write would write.
	Same func(f *os.File) (bool, error)
}

// Import makes a snapshot called name of a manifest and the files that it names,
// the manifest itself not among them. Layers that another snapshot has are
// linked. The snapshot is opened and verified before it is listed; if it is not
// sound, or anything else fails, nothing is left. A snapshot that the store has
// already, under whatever name, is ErrExists.
func (s *Store) Import(ctx context.Context, name string, m snapshot.Manifest, parts []Part) (Info, error) {
	if err := s.checkNew(name, m.ID); err != nil {
		return Info{}, err
	}
	p, err := s.begin()
	if err != nil {
		return Info{}, err
	}
	m.Name = name
	if err := p.receive(ctx, &m, parts); err != nil {
		return Info{}, errors.Join(err, p.abort())
	}
	if err := p.publish(s.snapshots, name); err != nil {
		return Info{}, err
	}
	return s.Inspect(name)
}

// checkNew refuses a name and an identity that the store has.
func (s *Store) checkNew(name, id string) error {
	if err := snapshot.CheckName(name); err != nil {
		return err
	}
	if _, err := s.snapshots.Lstat(name); err == nil {
		return ErrExists
	}
	all, err := s.List()
	if err != nil {
		return err
	}
	for _, have := range all {
		if have.Manifest != nil && have.Manifest.ID == id {
			return fmt.Errorf("%w: it is %s", ErrExists, have.Name)
		}
	}
	return nil
}

func (p *pending) receive(ctx context.Context, m *snapshot.Manifest, parts []Part) error {
	named := m.Files()
	for _, part := range parts {
		if !named[part.Name] {
			return fmt.Errorf("%w: file %.200q is not in the manifest", snapshot.ErrInvalid, part.Name)
		}
		if err := p.receivePart(part); err != nil {
			return err
		}
	}
	b, err := m.Encode()
	if err != nil {
		return err
	}
	if err := p.create(snapshot.ManifestFile, writeBytes(b)); err != nil {
		return err
	}
	snap, err := openSnapshot(p.Root, m.Name)
	if err != nil {
		return err
	}
	return errors.Join(snap.Verify(ctx), snap.Close())
}

// receivePart links a file that another snapshot has, and writes any other.
func (p *pending) receivePart(part Part) error {
	names, err := p.store.snapshots.names()
	if err != nil {
		return err
	}
	for _, name := range names {
		linked, err := p.linkSame(name, part)
		if err != nil || linked {
			return err
		}
	}
	return p.create(part.Name, part.Write)
}

func (p *pending) linkSame(name string, part Part) (bool, error) {
	f := p.store.openPublished(name, part.Name)
	if f == nil {
		return false, nil
	}
	defer f.Close()
	same, err := part.Same(f)
	if err != nil || !same {
		return false, err
	}
	if err := p.store.before("link", part.Name); err != nil {
		return false, err
	}
	if err := linkFile(f, p.fd(), part.Name); errors.Is(err, errNotLinkable) {
		return false, nil
	} else if err != nil {
		return false, err
	}
	return true, nil
}

// openPublished opens a file of a snapshot if there is one that can be linked.
func (s *Store) openPublished(name, file string) *os.File {
	// One call for what is mostly not there.
	if err := unix.Faccessat(s.snapshots.fd(), name+"/"+file, unix.F_OK, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return nil
	}
	dir, err := s.snapshots.OpenRoot(name)
	if err != nil {
		return nil
	}
	defer dir.Close()
	f, _, err := openFile(dir, file)
	if err != nil {
		return nil
	}
	if !unchanging(f) {
		f.Close()
		return nil
	}
	return f
}

// findLayer opens a layer file of a snapshot, nil if it has none or a damaged one.
func (s *Store) findLayer(name, file string) *layer.Layer {
	f := s.openPublished(name, file)
	if f == nil {
		return nil
	}
	l, err := layer.Open(f)
	if err != nil {
		f.Close()
		return nil
	}
	return l
}
