package store

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/snapshot/layer"
)

// Snapshot is an opened snapshot: its manifest, its state and its layers'
// files. It stays usable when the snapshot is removed from the store: the
// files live as long as somebody has them open. The layers are closed by
// Close; take a Dup for what is to live longer.
type Snapshot struct {
	Manifest *snapshot.Manifest
	State    *snapshot.State
	Memory   []*layer.Layer // bottom first, as in the manifest
	Disks    []Disk
}

// Disk is a disk's stack of layers, bottom first.
type Disk struct {
	ID       string
	Size     int64
	ReadOnly bool
	Layers   []*layer.Layer
}

// Open opens a snapshot and checks it: the manifest and the state completely,
// each layer's header, index, identity and length. A *CorruptError names the
// file that is not right. The data in the layers is checked by
// Snapshot.Verify.
func (s *Store) Open(name string) (*Snapshot, error) {
	if err := snapshot.CheckName(name); err != nil {
		return nil, fmt.Errorf("open snapshot (%.200q): %w", name, err)
	}
	dir, err := s.openDir(name)
	if err != nil {
		return nil, fmt.Errorf("open snapshot (%s): %w", name, err)
	}
	defer dir.Close()
	snap, err := openSnapshot(dir, name)
	if err != nil {
		// A removal that runs at the same time takes files away one by one:
		// that is no damage.
		if !s.still(dir, name) {
			err = ErrNotFound
		}
		return nil, fmt.Errorf("open snapshot: %w", withName(name, err))
	}
	return snap, nil
}

// withName adds the name to an error that does not have it.
func withName(name string, err error) error {
	if errors.Is(err, ErrNotFound) {
		return fmt.Errorf("snapshot (%s): %w", name, err)
	}
	return err
}

func (s *Store) openDir(name string) (*os.Root, error) {
	st, err := s.snapshots.Lstat(name)
	if err == nil && !st.IsDir() {
		return nil, &CorruptError{Snapshot: name, File: ".", Reason: fmt.Errorf("%w: not a directory", snapshot.ErrInvalid)}
	}
	var dir *os.Root
	if err == nil {
		dir, err = s.snapshots.OpenRoot(name)
	}
	if errors.Is(err, fs.ErrNotExist) {
		err = ErrNotFound
	}
	return dir, err
}

// still reports whether dir is what the store has under name.
func (s *Store) still(dir *os.Root, name string) bool {
	a, errA := dir.Stat(".")
	b, errB := s.snapshots.Stat(name)
	return errA == nil && errB == nil && os.SameFile(a, b)
}

func openSnapshot(dir *os.Root, name string) (*Snapshot, error) {
	m, err := readManifest(dir, name)
	if err != nil {
		return nil, err
	}
	snap := &Snapshot{Manifest: m}
	if err := snap.open(dir, name); err != nil {
		snap.Close()
		return nil, err
	}
	return snap, nil
}

func (p *Snapshot) open(dir *os.Root, name string) (err error) {
	if p.State, err = readState(dir, name, p.Manifest.State); err != nil {
		return err
	}
	if p.Memory, err = openStack(dir, name, layer.KindMemory, p.Manifest.Memory); err != nil {
		return err
	}
	for _, d := range p.Manifest.Disks {
		layers, err := openStack(dir, name, layer.KindDisk, d.Layers)
		if err != nil {
			return err
		}
		p.Disks = append(p.Disks, Disk{ID: d.ID, Size: d.Size, ReadOnly: d.ReadOnly, Layers: layers})
	}
	return nil
}

// openFile opens a regular file of the snapshot and returns its size.
func openFile(dir *os.Root, file string) (*os.File, int64, error) {
	// Neither follow a link nor wait for the other end of a FIFO.
	if st, err := dir.Lstat(file); err != nil {
		return nil, 0, err
	} else if !st.Mode().IsRegular() {
		return nil, 0, fmt.Errorf("%w: not a regular file", snapshot.ErrInvalid)
	}
	f, err := dir.OpenFile(file, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, 0, err
	}
	st, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, 0, err
	}
	return f, st.Size(), nil
}

// readSmall reads a whole file of at most limit bytes.
func readSmall(dir *os.Root, file string, limit int64) ([]byte, error) {
	f, size, err := openFile(dir, file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if size > limit {
		return nil, fmt.Errorf("%w: %d bytes", snapshot.ErrTooLarge, size)
	}
	b := make([]byte, size)
	if _, err := io.ReadFull(f, b); errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return nil, snapshot.ErrTruncated
	} else if err != nil {
		return nil, err
	}
	return b, nil
}

func readManifest(dir *os.Root, name string) (*snapshot.Manifest, error) {
	b, err := readSmall(dir, snapshot.ManifestFile, snapshot.MaxManifestSize)
	if err != nil {
		return nil, fileError(name, snapshot.ManifestFile, err)
	}
	m, err := snapshot.DecodeManifest(b)
	if err == nil && m.Name != name {
		err = fmt.Errorf("%w: it is the manifest of %s", snapshot.ErrInvalid, m.Name)
	}
	if err != nil {
		return nil, fileError(name, snapshot.ManifestFile, err)
	}
	return m, nil
}

func readState(dir *os.Root, name string, ref snapshot.FileRef) (*snapshot.State, error) {
	state, err := func() (*snapshot.State, error) {
		b, err := readSmall(dir, ref.File, snapshot.MaxStateSize)
		if err != nil {
			return nil, err
		}
		if err := checkSize(int64(len(b)), ref.Bytes); err != nil {
			return nil, err
		}
		// The state's own errors say more (another version, say) than a hash.
		state, err := snapshot.DecodeState(b)
		if err != nil {
			return nil, err
		}
		if sum := sha256.Sum256(b); hex.EncodeToString(sum[:]) != ref.SHA256 {
			return nil, fmt.Errorf("%w: not the state that the manifest names", snapshot.ErrChecksum)
		}
		return state, nil
	}()
	if err != nil {
		return nil, fileError(name, ref.File, err)
	}
	return state, nil
}

func checkSize(got, want int64) error {
	switch {
	case got < want:
		return fmt.Errorf("%w: %d bytes of %d", snapshot.ErrTruncated, got, want)
	case got > want:
		return fmt.Errorf("%w: %d bytes, want %d", snapshot.ErrInvalid, got, want)
	}
	return nil
}

// openStack opens a stack's layers; on an error none is left open.
func openStack(dir *os.Root, name string, kind layer.Kind, refs []snapshot.LayerRef) ([]*layer.Layer, error) {
	stack := make([]*layer.Layer, 0, len(refs))
	for _, ref := range refs {
		l, err := openLayer(dir, kind, ref)
		if err != nil {
			closeAll(stack)
			return nil, fileError(name, ref.File, err)
		}
		stack = append(stack, l)
	}
	return stack, nil
}

func openLayer(dir *os.Root, kind layer.Kind, ref snapshot.LayerRef) (*layer.Layer, error) {
	f, size, err := openFile(dir, ref.File)
	if err != nil {
		return nil, err
	}
	l, err := checkLayer(f, size, kind, ref)
	if err != nil {
		f.Close()
		return nil, err
	}
	return l, nil
}

func checkLayer(f *os.File, size int64, kind layer.Kind, ref snapshot.LayerRef) (*layer.Layer, error) {
	if err := checkSize(size, ref.Bytes); err != nil {
		return nil, err
	}
	if ref.Format == snapshot.FormatRaw {
		return layer.OpenRawWith(f, layer.RawOptions{ID: ref.ID, Checksum: ref.Checksum})
	}
	l, err := layer.Open(f)
	if err != nil {
		return nil, err
	}
	switch {
	case l.ID() != ref.ID:
		return nil, fmt.Errorf("%w: it is layer %s, want %s", snapshot.ErrInvalid, l.ID(), ref.ID)
	case l.Kind() != kind:
		return nil, fmt.Errorf("%w: it holds %v", snapshot.ErrInvalid, l.Kind())
	case l.Units() != ref.Units || l.Stored() != ref.Stored:
		return nil, fmt.Errorf("%w: %d units, %d stored, want %d and %d", snapshot.ErrInvalid, l.Units(), l.Stored(), ref.Units, ref.Stored)
	}
	return l, nil
}

// Close closes the layers' files. Calling it again does nothing.
func (p *Snapshot) Close() error {
	errs := []error{closeAll(p.Memory)}
	for _, d := range p.Disks {
		errs = append(errs, closeAll(d.Layers))
	}
	return errors.Join(errs...)
}

func closeAll(stack []*layer.Layer) error {
	var errs []error
	for _, l := range stack {
		errs = append(errs, l.Close())
	}
	return errors.Join(errs...)
}
