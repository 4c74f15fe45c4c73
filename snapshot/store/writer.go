package store

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/snapshot/layer"
)

// StateFile is the state file's name in a snapshot.
const StateFile = "state"

// Writer makes one snapshot: add the layers and the state in any order, then
// Commit. Until then nothing is listed, and a process that dies leaves only
// what Sweep removes. Methods may be called from any goroutine, and take turns.
type Writer struct {
	store *Store
	name  string

	mu      sync.Mutex
	pending *pending // nil once finished
	layers  map[string]snapshot.LayerRef
	state   snapshot.FileRef
	// others are the snapshots that may have layers to share, the most likely
	// first; nil until somebody asks.
	others []string
}

// Create begins a snapshot called name (see snapshot.CheckName). If one exists
// already that is ErrExists; so is one that appears until Commit. The caller
// must end with Commit or Abort.
func (s *Store) Create(name string) (*Writer, error) {
	if err := snapshot.CheckName(name); err != nil {
		return nil, fmt.Errorf("create snapshot (%.200q): %w", name, err)
	}
	if _, err := s.snapshots.Lstat(name); err == nil {
		return nil, fmt.Errorf("create snapshot (%s): %w", name, ErrExists)
	}
	p, err := s.begin()
	if err != nil {
		return nil, fmt.Errorf("create snapshot (%s): %w", name, err)
	}
	return &Writer{store: s, name: name, pending: p, layers: make(map[string]snapshot.LayerRef)}, nil
}

// AddLayer puts a layer into the snapshot and returns how the manifest is to
// name it. A file that is a published layer or image already (read-only, ours,
// on the same file system) gets another link, which costs nothing; so does the
// copy that another snapshot has of it. Anything else is copied, packed and
// checksummed, raw images too. role tells what the
// layer is for in the file's name: "memory", "disk-blk0".
//
// A layer added twice in the same role is there once.
func (w *Writer) AddLayer(ctx context.Context, role string, l *layer.Layer) (snapshot.LayerRef, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	ref, err := w.addLayer(ctx, role, l, func(f *os.File) error { return layer.Copy(ctx, f, l) })
	if err != nil {
		return snapshot.LayerRef{}, fmt.Errorf("add layer (%s) to snapshot (%s): %w", l.ID(), w.name, err)
	}
	return ref, nil
}

func (w *Writer) addLayer(ctx context.Context, role string, l *layer.Layer, fill func(*os.File) error) (snapshot.LayerRef, error) {
	return w.addFile(role, l.ID(), func(key string) (snapshot.LayerRef, error) {
		ref, err := w.link(ctx, key, l)
		if errors.Is(err, errNotLinkable) {
			ref, err = w.share(ctx, key, l.Kind(), l.ID())
		}
		if errors.Is(err, errNotLinkable) {
			ref, err = w.write(key+".layer", fill)
		}
		return ref, err
	})
}

// AddStack puts a stack of layers, bottom first, into the snapshot and returns
// how the manifest is to name it: fewer layers if it is a long one, see
// layer.Plan. Each layer is added as AddLayer does it; what was merged for
// another snapshot is linked.
func (w *Writer) AddStack(ctx context.Context, role string, stack []*layer.Layer) ([]snapshot.LayerRef, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	runs := layer.Plan(stack)
	if len(runs) > 0 {
		runs[0].Bottom = true
	}
	refs := make([]snapshot.LayerRef, 0, len(runs))
	for _, r := range runs {
		ref, err := w.addRun(ctx, role, r)
		if err != nil {
			return nil, fmt.Errorf("add layer (%s) to snapshot (%s): %w", r.ID(), w.name, err)
		}
		refs = append(refs, ref)
	}
	return refs, nil
}

func (w *Writer) addRun(ctx context.Context, role string, r layer.Run) (snapshot.LayerRef, error) {
	fill := func(f *os.File) error { return r.Write(ctx, f, layer.WriteOptions{Checksums: true}) }
	if !r.Merged() {
		return w.addLayer(ctx, role, r.Layers[0], fill)
	}
	return w.addFile(role, r.ID(), func(key string) (snapshot.LayerRef, error) {
		ref, err := w.share(ctx, key, r.Layers[0].Kind(), r.ID())
		if errors.Is(err, errNotLinkable) {
			ref, err = w.write(key+".layer", fill)
		}
		return ref, err
	})
}

// addFile adds the file of a layer unless it is there already.
func (w *Writer) addFile(role, id string, add func(key string) (snapshot.LayerRef, error)) (snapshot.LayerRef, error) {
	if w.pending == nil {
		return snapshot.LayerRef{}, ErrFinished
	}
	if err := snapshot.CheckName(role); err != nil {
		return snapshot.LayerRef{}, err
	}
	key := role + "-" + id
	if ref, ok := w.layers[key]; ok {
		return ref, nil
	}
	ref, err := add(key)
	if err == nil {
		w.layers[key] = ref
	}
	return ref, err
}

var errNotLinkable = errors.New("file is not one that can be linked")

// link gives the layer's own file another name in the snapshot.
func (w *Writer) link(ctx context.Context, key string, l *layer.Layer) (snapshot.LayerRef, error) {
	if !published(l) {
		return snapshot.LayerRef{}, errNotLinkable
	}
	ref := snapshot.LayerRef{ID: l.ID(), File: key + ".layer", Format: snapshot.FormatLayer, Units: l.Units(), Stored: l.Stored()}
	if l.Raw() {
		ref.File, ref.Format = key+".raw", snapshot.FormatRaw
	}
	st, err := l.File().Stat()
	if err != nil {
		return ref, err
	}
	ref.Bytes = st.Size()
	if err := w.store.before("link", ref.File); err != nil {
		return ref, err
	}
	if err := linkFile(l.File(), w.pending.fd(), ref.File); err != nil {
		return ref, err
	}
	if l.Raw() {
		// Reads the image the first time, so only once the link is there.
		if ref.Checksum, err = l.RawChecksum(ctx); err != nil {
			return ref, errors.Join(err, w.pending.Remove(ref.File))
		}
	}
	return ref, nil
}

// published reports whether a layer's file can be what it is for ever: with
// checksums, read-only, and only ours to change that.
func published(l *layer.Layer) bool {
	return (l.Raw() || l.Checksummed()) && unchanging(l.File())
}

// unchanging reports whether nobody but us could change a file, and we do not.
func unchanging(f *os.File) bool {
	st, err := f.Stat()
	if err != nil || !st.Mode().IsRegular() || st.Mode().Perm()&0o222 != 0 {
		return false
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	return ok && sys.Nlink > 0 && int(sys.Uid) == os.Geteuid()
}

// linkFile links an open file. Whatever the kernel or the file system cannot
// link (another device, no more links, no name left) is errNotLinkable.
func linkFile(f *os.File, dir int, name string) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var linkErr error
	if err := raw.Control(func(fd uintptr) {
		linkErr = unix.Linkat(int(fd), "", dir, name, unix.AT_EMPTY_PATH)
		if linkErr != nil && !errors.Is(linkErr, unix.EXDEV) {
			// Without the privilege for an empty path.
			linkErr = unix.Linkat(unix.AT_FDCWD, "/proc/self/fd/"+strconv.Itoa(int(fd)), dir, name, unix.AT_SYMLINK_FOLLOW)
		}
	}); err != nil {
		return err
	}
	switch {
	case linkErr == nil:
		return nil
	case errors.Is(linkErr, unix.ENOSPC), errors.Is(linkErr, unix.EDQUOT), errors.Is(linkErr, unix.EIO), errors.Is(linkErr, unix.EROFS):
		return os.NewSyscallError("linkat", linkErr)
	}
	return errNotLinkable
}

// share links the file of a layer that another snapshot has: a running machine's
// layers are its own files, of which the store has copies since the last
// snapshot. A layer's identity stands for its content.
func (w *Writer) share(ctx context.Context, key string, kind layer.Kind, id string) (snapshot.LayerRef, error) {
	if w.others == nil {
		var err error
		if w.others, err = w.store.newestFirst(); err != nil {
			return snapshot.LayerRef{}, err
		}
	}
	for i, name := range w.others {
		l := w.store.findLayer(name, key+".layer")
		if l == nil {
			continue
		}
		ref, err := snapshot.LayerRef{}, errNotLinkable
		if l.ID() == id && l.Kind() == kind {
			ref, err = w.link(ctx, key, l)
		}
		l.Close()
		if !errors.Is(err, errNotLinkable) {
			// It is likely to have the other layers too: it is the parent.
			copy(w.others[1:i+1], w.others[:i])
			w.others[0] = name
			return ref, err
		}
	}
	return snapshot.LayerRef{}, errNotLinkable
}

// write makes a layer file that fill fills.
func (w *Writer) write(file string, fill func(*os.File) error) (snapshot.LayerRef, error) {
	ref := snapshot.LayerRef{File: file, Format: snapshot.FormatLayer}
	err := w.pending.create(file, func(f *os.File) error {
		if err := fill(f); err != nil {
			return err
		}
		// Not closed: the file is the caller's.
		l, err := layer.Open(f)
		if err != nil {
			return err
		}
		st, err := f.Stat()
		if err != nil {
			return err
		}
		ref.ID, ref.Units, ref.Stored, ref.Bytes = l.ID(), l.Units(), l.Stored(), st.Size()
		return nil
	})
	return ref, err
}

// AddState writes the state file. It can be done once.
func (w *Writer) AddState(state *snapshot.State) (snapshot.FileRef, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	ref, err := w.addState(state)
	if err != nil {
		return snapshot.FileRef{}, fmt.Errorf("add state to snapshot (%s): %w", w.name, err)
	}
	w.state = ref
	return ref, nil
}

func (w *Writer) addState(state *snapshot.State) (snapshot.FileRef, error) {
	if w.pending == nil {
		return snapshot.FileRef{}, ErrFinished
	}
	b, err := state.Encode()
	if err != nil {
		return snapshot.FileRef{}, err
	}
	if err := w.pending.create(StateFile, writeBytes(b)); err != nil {
		return snapshot.FileRef{}, err
	}
	sum := sha256.Sum256(b)
	return snapshot.FileRef{File: StateFile, Bytes: int64(len(b)), SHA256: hex.EncodeToString(sum[:])}, nil
}

func writeBytes(b []byte) func(*os.File) error {
	return func(f *os.File) error {
		_, err := f.Write(b)
		return err
	}
}

// Commit writes the manifest and publishes the snapshot: when it returns nil
// the snapshot is complete, durable and listed. On an error nothing is listed
// and nothing is left. Name and State are filled in; the manifest must name
// every layer that was added, and no other.
func (w *Writer) Commit(m snapshot.Manifest) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.pending == nil {
		return fmt.Errorf("commit snapshot (%s): %w", w.name, ErrFinished)
	}
	if err := w.writeManifest(m); err != nil {
		return errors.Join(fmt.Errorf("commit snapshot (%s): %w", w.name, err), w.abortLocked())
	}
	p := w.pending
	w.pending = nil
	if err := p.publish(w.store.snapshots, w.name); err != nil {
		return fmt.Errorf("commit snapshot (%s): %w", w.name, err)
	}
	return nil
}

func (w *Writer) writeManifest(m snapshot.Manifest) error {
	m.Name, m.State = w.name, w.state
	if err := w.checkComplete(m); err != nil {
		return err
	}
	b, err := m.Encode()
	if err != nil {
		return err
	}
	return w.pending.create(snapshot.ManifestFile, writeBytes(b))
}

// checkComplete holds the manifest against what was added.
func (w *Writer) checkComplete(m snapshot.Manifest) error {
	if w.state == (snapshot.FileRef{}) {
		return fmt.Errorf("%w: no state was added", snapshot.ErrInvalid)
	}
	missing := make(map[string]snapshot.LayerRef, len(w.layers))
	for _, ref := range w.layers {
		missing[ref.File] = ref
	}
	added := make(map[string]snapshot.LayerRef, len(missing))
	for file, ref := range missing {
		added[file] = ref
	}
	stacks := [][]snapshot.LayerRef{m.Memory}
	for _, disk := range m.Disks {
		stacks = append(stacks, disk.Layers)
	}
	for _, stack := range stacks {
		for _, ref := range stack {
			if added[ref.File] != ref {
				return fmt.Errorf("%w: the manifest names layer %s, which was not added like that", snapshot.ErrInvalid, ref.File)
			}
			delete(missing, ref.File)
		}
	}
	for file := range missing {
		return fmt.Errorf("%w: the manifest leaves out layer %s", snapshot.ErrInvalid, file)
	}
	return nil
}

// Abort gives the snapshot up and removes what was written. After Commit, or
// again, it does nothing, so it can be deferred.
func (w *Writer) Abort() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.abortLocked(); err != nil {
		return fmt.Errorf("abort snapshot (%s): %w", w.name, err)
	}
	return nil
}

func (w *Writer) abortLocked() error {
	if w.pending == nil {
		return nil
	}
	p := w.pending
	w.pending = nil
	return p.abort()
}
