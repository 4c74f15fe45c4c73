package store

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/testkit"
	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/snapshot/layer"
)

// TestMain also is the process that TestKilledWriterG1 kills.
func TestMain(m *testing.M) {
	if root := os.Getenv("FORKVM_TEST_PUBLISH_IN"); root != "" {
		publishForever(root)
	}
	testkit.Main(m)
}

const (
	memoryPages = 256
	diskBlocks  = 512
)

func openStore(t testing.TB, root string) *Store {
	t.Helper()
	s, err := Open(root)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// newLayer is a layer as a running machine has it: a memfd without checksums.
func newLayer(kind layer.Kind, units, pages uint64) (*layer.Layer, error) {
	fd, err := unix.MemfdCreate("layer", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "memfd:layer")
	data := make([]byte, pages*layer.UnitSize)
	rand.Read(data)
	if _, err := f.WriteAt(data, layer.DataOffset); err != nil {
		f.Close()
		return nil, err
	}
	l, err := layer.Seal(f, layer.SealOptions{Kind: kind, Units: units, Extents: []layer.Extent{
		{Start: 3, Count: pages, Offset: layer.DataOffset},
	}})
	if err != nil {
		f.Close()
	}
	return l, err
}

// machine is what a test takes snapshots of.
type machine struct {
	memory, disk []*layer.Layer
}

// grow adds a layer to both stacks.
func (m *machine) grow(pages uint64) error {
	memory, err := newLayer(layer.KindMemory, memoryPages, pages)
	if err != nil {
		return err
	}
	m.memory = append(m.memory, memory)
	disk, err := newLayer(layer.KindDisk, diskBlocks, pages)
	if err != nil {
		return err
	}
	m.disk = append(m.disk, disk)
	return nil
}

func (m *machine) close() {
	closeAll(m.memory)
	closeAll(m.disk)
}

func newMachine(t testing.TB) *machine {
	t.Helper()
	m := &machine{}
	if err := m.grow(20); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.close() })
	return m
}

func testState() *snapshot.State {
	return &snapshot.State{Sections: []snapshot.Section{{ID: "vm", Data: []byte("state " + snapshot.NewID())}}}
}

// fill adds everything of m to w and returns the manifest for Commit.
func (m *machine) fill(ctx context.Context, w *Writer) (snapshot.Manifest, error) {
	manifest := snapshot.Manifest{
		ID: snapshot.NewID(), Created: time.Now(),
		Guest: snapshot.Guest{CPUs: 1, MemoryBytes: memoryPages * layer.UnitSize},
	}
	for _, l := range m.memory {
		ref, err := w.AddLayer(ctx, "memory", l)
		if err != nil {
			return manifest, err
		}
		manifest.Memory = append(manifest.Memory, ref)
	}
	disk := snapshot.Disk{ID: "blk0", Size: diskBlocks * layer.UnitSize}
	for _, l := range m.disk {
		ref, err := w.AddLayer(ctx, "disk-blk0", l)
		if err != nil {
			return manifest, err
		}
		disk.Layers = append(disk.Layers, ref)
	}
	manifest.Disks = []snapshot.Disk{disk}
	_, err := w.AddState(testState())
	return manifest, err
}

func (m *machine) publish(s *Store, name string) error {
	w, err := s.Create(name)
	if err != nil {
		return err
	}
	manifest, err := m.fill(context.Background(), w)
	if err != nil {
		return errors.Join(err, w.Abort())
	}
	return w.Commit(manifest)
}

func publish(t testing.TB, s *Store, m *machine, name string) {
	t.Helper()
	if err := m.publish(s, name); err != nil {
		t.Fatal(err)
	}
}

// checkStore is what must hold after every test: nothing half-made is left,
// and what is listed opens and verifies. It returns the names.
func checkStore(t testing.TB, s *Store) []string {
	t.Helper()
	left, err := os.ReadDir(filepath.Join(s.Path(), "tmp"))
	if err != nil || len(left) != 0 {
		t.Errorf("%d entries left in tmp, %v", len(left), err)
	}
	infos, err := s.List()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, info := range infos {
		if info.Err != nil {
			t.Errorf("listed but bad: %v", info.Err)
			continue
		}
		names = append(names, info.Name)
		snap, err := s.Open(info.Name)
		if err != nil {
			t.Error(err)
			continue
		}
		if err := errors.Join(snap.Verify(context.Background()), snap.Close()); err != nil {
			t.Error(err)
		}
	}
	return names
}

func expectNames(t testing.TB, s *Store, want ...string) {
	t.Helper()
	if got := checkStore(t, s); strings.Join(got, " ") != strings.Join(want, " ") {
		t.Errorf("snapshots %v, want %v", got, want)
	}
}

func inode(t testing.TB, path string) syscall.Stat_t {
	t.Helper()
	var st syscall.Stat_t
	if err := syscall.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st
}

func TestSnapshotRoundTrip(t *testing.T) {
	s := openStore(t, filepath.Join(t.TempDir(), "deep", "store"))
	expectNames(t, s)
	m := newMachine(t)
	publish(t, s, m, "first")
	snap, err := s.Open("first")
	if err != nil {
		t.Fatal(err)
	}
	defer snap.Close()
	if data, ok := snap.State.Get("vm"); !ok || !bytes.HasPrefix(data, []byte("state ")) {
		t.Errorf("state %q", data)
	}
	if snap.Manifest.Name != "first" || len(snap.Memory) != 1 || len(snap.Disks) != 1 || snap.Disks[0].ID != "blk0" {
		t.Errorf("snapshot %+v", snap)
	}
	want, got := make([]byte, 20*layer.UnitSize), make([]byte, 20*layer.UnitSize)
	m.memory[0].File().ReadAt(want, layer.DataOffset)
	snap.Memory[0].File().ReadAt(got, snap.Memory[0].Extents()[0].Offset)
	if !bytes.Equal(got, want) {
		t.Error("memory differs")
	}
	if err := m.publish(s, "first"); !errors.Is(err, ErrExists) {
		t.Errorf("second snapshot of a name: %v", err)
	}
	expectNames(t, s, "first")
	entries, err := os.ReadDir(filepath.Join(s.Path(), "snapshots", "first"))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if info, err := e.Info(); err != nil || info.Mode().Perm() != 0o444 {
			t.Errorf("%s: %v, %v", e.Name(), info.Mode(), err)
		}
	}
}

// Snapshots share the layers that they have in common as one file, ten
// generations deep, and each is whole without the others.
func TestSharedLayersAreLinks(t *testing.T) {
	s := openStore(t, t.TempDir())
	m := newMachine(t)
	for gen := range 10 {
		name := fmt.Sprintf("gen-%d", gen)
		publish(t, s, m, name)
		// The next generation runs from the snapshot, as a restored machine.
		snap, err := s.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		m.close()
		m.memory, m.disk = snap.Memory, snap.Disks[0].Layers
		if err := m.grow(5); err != nil {
			t.Fatal(err)
		}
	}
	first, err := s.Stat("gen-0")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(s.Path(), "snapshots", "gen-9", first.Memory[0].File)
	if st := inode(t, file); st.Nlink != 10 {
		t.Errorf("%d links, want 10", st.Nlink)
	}
	for gen := range 9 {
		if err := s.Remove(fmt.Sprintf("gen-%d", gen)); err != nil {
			t.Fatal(err)
		}
	}
	if st := inode(t, file); st.Nlink != 1 {
		t.Errorf("%d links after the others were removed", st.Nlink)
	}
	expectNames(t, s, "gen-9")
}

// A raw image in the store is linked; one of the user's, which may be written
// to any time, is copied.
func TestRawImages(t *testing.T) {
	ctx := context.Background()
	s := openStore(t, t.TempDir())
	content := make([]byte, 256*layer.UnitSize+512)
	rand.Read(content)
	if err := s.PublishImage("debian", func(dir string) error {
		return os.WriteFile(filepath.Join(dir, "rootfs.ext4"), content, 0o644)
	}); err != nil {
		t.Fatal(err)
	}
	dir, err := s.Image("debian")
	if err != nil {
		t.Fatal(err)
	}
	mine := filepath.Join(t.TempDir(), "mine.ext4")
	if err := os.WriteFile(mine, content, 0o644); err != nil {
		t.Fatal(err)
	}
	for name, path := range map[string]string{"linked": filepath.Join(dir, "rootfs.ext4"), "copied": mine} {
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		raw, err := layer.OpenRaw(f)
		if err != nil {
			t.Fatal(err)
		}
		m := newMachine(t)
		m.disk = append([]*layer.Layer{raw}, m.disk...)
		publish(t, s, m, name)
		manifest, err := s.Stat(name)
		if err != nil {
			t.Fatal(err)
		}
		ref := manifest.Disks[0].Layers[0]
		file := filepath.Join(s.Path(), "snapshots", name, ref.File)
		if name == "linked" {
			if ref.Format != snapshot.FormatRaw || !os.SameFile(lstat(t, file), lstat(t, path)) {
				t.Errorf("image file was not linked: %+v", ref)
			}
			if st := inode(t, file); st.Nlink != 2 {
				t.Errorf("%d links", st.Nlink)
			}
		} else if ref.Format != snapshot.FormatLayer {
			t.Errorf("user's file was not copied: %+v", ref)
		}
	}
	if err := s.RemoveImage("debian"); err != nil {
		t.Fatal(err)
	}
	expectNames(t, s, "copied", "linked")

	for _, name := range []string{"linked", "copied"} {
		snap, err := s.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		stack := snap.Disks[0].Layers[:1]
		dup, err := stack[0].Dup()
		if err != nil {
			t.Fatal(err)
		}
		d, err := layer.NewDisk(layer.DiskConfig{Size: int64(len(content)), Layers: []*layer.Layer{dup}, ReadOnly: true})
		if err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len(content))
		if _, err := d.ReadAt(got, 0); err != nil || !bytes.Equal(got, content) {
			t.Errorf("%s: content differs, %v", name, err)
		}
		if err := errors.Join(snap.Verify(ctx), d.Close(), snap.Close()); err != nil {
			t.Error(err)
		}
	}
}

// An image whose checksum is known is not read for a snapshot, and one that has
// changed since it was computed is found by whoever checks.
func TestRawImageIsNotReadAgain(t *testing.T) {
	ctx := context.Background()
	s := openStore(t, t.TempDir())
	content := make([]byte, 2<<20)
	rand.Read(content[1<<20:])
	if err := s.PublishImage("debian", func(dir string) error {
		return os.WriteFile(filepath.Join(dir, "rootfs.ext4"), content, 0o644)
	}); err != nil {
		t.Fatal(err)
	}
	dir, err := s.Image("debian")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "rootfs.ext4")
	open := func(o layer.RawOptions) *layer.Layer {
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		l, err := layer.OpenRawWith(f, o)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		return l
	}
	sum, err := open(layer.RawOptions{}).RawChecksum(ctx)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Skip("needs to write to a read-only file: run it as root")
	}
	// Between the samples that opening reads.
	_, err = f.WriteAt([]byte("changed"), 1<<20+8192)
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	m := newMachine(t)
	m.disk = append([]*layer.Layer{open(layer.RawOptions{Checksum: sum})}, m.disk...)
	publish(t, s, m, "snap")
	snap, err := s.Open("snap")
	if err != nil {
		t.Fatal(err)
	}
	defer snap.Close()
	if got := snap.Manifest.Disks[0].Layers[0].Checksum; got != sum {
		t.Errorf("the image was read again: checksum %s, want %s", got, sum)
	}
	var corrupt *CorruptError
	if err := snap.Verify(ctx); !errors.As(err, &corrupt) || !errors.Is(err, snapshot.ErrChecksum) {
		t.Errorf("verify of a changed image: %v", err)
	}
}

func lstat(t testing.TB, path string) os.FileInfo {
	t.Helper()
	st, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	return st
}

func TestWriterRefusals(t *testing.T) {
	ctx := context.Background()
	s := openStore(t, t.TempDir())
	m := newMachine(t)
	for _, name := range []string{"", "..", "a/b", ".hidden"} {
		if _, err := s.Create(name); !errors.Is(err, snapshot.ErrInvalid) {
			t.Errorf("Create(%q): %v", name, err)
		}
	}
	for name, edit := range map[string]func(manifest *snapshot.Manifest, w *Writer){
		"layer left out":  func(m *snapshot.Manifest, w *Writer) { m.Memory = nil },
		"layer not added": func(m *snapshot.Manifest, w *Writer) { m.Memory[0].File = "memory-x.layer" },
		"layer altered":   func(m *snapshot.Manifest, w *Writer) { m.Memory[0].Bytes++ },
		"no state":        func(m *snapshot.Manifest, w *Writer) { w.state = snapshot.FileRef{} },
		"invalid":         func(m *snapshot.Manifest, w *Writer) { m.Guest.CPUs = 0 },
	} {
		w, err := s.Create("x")
		if err != nil {
			t.Fatal(err)
		}
		manifest, err := m.fill(ctx, w)
		if err != nil {
			t.Fatal(err)
		}
		edit(&manifest, w)
		if err := w.Commit(manifest); !errors.Is(err, snapshot.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
		if err := w.Commit(manifest); !errors.Is(err, ErrFinished) {
			t.Errorf("%s: second commit: %v", name, err)
		}
		if _, err := w.AddLayer(ctx, "memory", m.memory[0]); !errors.Is(err, ErrFinished) {
			t.Errorf("%s: add after commit: %v", name, err)
		}
		if _, err := w.AddState(testState()); !errors.Is(err, ErrFinished) {
			t.Errorf("%s: state after commit: %v", name, err)
		}
		if err := w.Abort(); err != nil {
			t.Errorf("%s: abort after commit: %v", name, err)
		}
	}
	expectNames(t, s)
}

func TestAbortAndRetry(t *testing.T) {
	s := openStore(t, t.TempDir())
	m := newMachine(t)
	w, err := s.Create("x")
	if err != nil {
		t.Fatal(err)
	}
	cancelled, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := w.AddLayer(cancelled, "memory", m.memory[0]); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	a, errA := w.AddLayer(context.Background(), "memory", m.memory[0])
	b, errB := w.AddLayer(context.Background(), "memory", m.memory[0])
	if errA != nil || errB != nil || a != b {
		t.Errorf("added twice: %v %v, %v %v", a, b, errA, errB)
	}
	if err := errors.Join(w.Abort(), w.Abort()); err != nil {
		t.Error(err)
	}
	expectNames(t, s)
}

// Of two writers of one name exactly one wins.
func TestTwoWriters(t *testing.T) {
	s := openStore(t, t.TempDir())
	var wg sync.WaitGroup
	results := make([]error, 8)
	machines := make([]*machine, len(results))
	for i := range machines {
		machines[i] = newMachine(t)
	}
	for i := range results {
		wg.Go(func() { results[i] = machines[i].publish(s, "same") })
	}
	wg.Wait()
	won := 0
	for _, err := range results {
		switch {
		case err == nil:
			won++
		case !errors.Is(err, ErrExists):
			t.Error(err)
		}
	}
	if won != 1 {
		t.Errorf("%d writers won", won)
	}
	expectNames(t, s, "same")
}

// A second process that opens the store must not take a living writer's
// directory for rubbish.
func TestSweepSparesTheLiving(t *testing.T) {
	root := t.TempDir()
	s := openStore(t, root)
	m := newMachine(t)
	w, err := s.Create("slow")
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := m.fill(context.Background(), w)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "tmp", "stray"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(root, "tmp", "dead", "sub"), 0o700); err != nil {
		t.Fatal(err)
	}
	other := openStore(t, root)
	if err := w.Commit(manifest); err != nil {
		t.Fatal(err)
	}
	expectNames(t, other, "slow")
}

func TestNotFound(t *testing.T) {
	s := openStore(t, t.TempDir())
	_, openErr := s.Open("x")
	_, statErr := s.Stat("x")
	_, imageErr := s.Image("x")
	for _, err := range []error{openErr, statErr, imageErr, s.Remove("x"), s.RemoveImage("x")} {
		if !errors.Is(err, ErrNotFound) {
			t.Error(err)
		}
	}
	_, openErr = s.Open("../x")
	for _, err := range []error{openErr, s.Remove("../snapshots"), s.RemoveImage("")} {
		if !errors.Is(err, snapshot.ErrInvalid) {
			t.Error(err)
		}
	}
}

// E5: a snapshot that is removed under those who use it does not harm them,
// and space comes back with the last of them.
func TestRemoveInUseE5(t *testing.T) {
	s := openStore(t, t.TempDir())
	m := newMachine(t)
	publish(t, s, m, "base")
	snap, err := s.Open("base")
	if err != nil {
		t.Fatal(err)
	}
	defer snap.Close()
	if err := s.Remove("base"); err != nil {
		t.Fatal(err)
	}
	if err := snap.Verify(context.Background()); err != nil {
		t.Errorf("open snapshot after its removal: %v", err)
	}
	// A machine that runs from it can still be frozen: its layers have no
	// name to link any more, so they are copied.
	m.close()
	m.memory, m.disk = nil, nil
	clone := &machine{memory: snap.Memory, disk: snap.Disks[0].Layers}
	publish(t, s, clone, "again")
	expectNames(t, s, "again")
	// The name can be used anew, for another file.
	publish(t, s, clone, "base")
	expectNames(t, s, "again", "base")
}

// E5: opening while somebody removes and makes it anew gives a whole snapshot
// or a clear "not found", never damage.
func TestRemoveWhileOpeningE5(t *testing.T) {
	s := openStore(t, t.TempDir())
	m := newMachine(t)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			if err := m.publish(s, "s"); err != nil {
				t.Error(err)
				return
			}
			time.Sleep(mathrand.N(time.Millisecond))
			if err := s.Remove("s"); err != nil {
				t.Error(err)
				return
			}
		}
	})
	opened := 0
	for deadline := time.Now().Add(20 * time.Second); opened < 50 && time.Now().Before(deadline); {
		snap, err := s.Open("s")
		if errors.Is(err, ErrNotFound) {
			continue
		}
		if err != nil {
			t.Error(err)
			break
		}
		opened++
		if err := snap.Close(); err != nil {
			t.Error(err)
		}
		infos, err := s.List()
		if err != nil {
			t.Error(err)
		}
		for _, info := range infos {
			if info.Err != nil {
				t.Error(info.Err)
			}
		}
	}
	close(stop)
	wg.Wait()
	if opened == 0 {
		t.Error("never opened")
	}
	expectNames(t, s)
}

func TestImages(t *testing.T) {
	s := openStore(t, t.TempDir())
	fill := func(dir string) error {
		if err := os.MkdirAll(filepath.Join(dir, "modules", "a"), 0o755); err != nil {
			return err
		}
		return errors.Join(
			os.WriteFile(filepath.Join(dir, "image.json"), []byte("{}"), 0o644),
			os.WriteFile(filepath.Join(dir, "modules", "a", "x.ko"), []byte("x"), 0o600),
		)
	}
	if err := s.PublishImage("debian", fill); err != nil {
		t.Fatal(err)
	}
	called := false
	if err := s.PublishImage("debian", func(string) error { called = true; return nil }); !errors.Is(err, ErrExists) || called {
		t.Errorf("name taken: %v, called %v", err, called)
	}
	broken := errors.New("mke2fs failed")
	for name, c := range map[string]struct {
		fill func(string) error
		want error
	}{
		"fails":   {func(string) error { return broken }, broken},
		"empty":   {func(string) error { return nil }, snapshot.ErrInvalid},
		"symlink": {func(dir string) error { return os.Symlink("/etc/passwd", filepath.Join(dir, "a")) }, snapshot.ErrInvalid},
		"fifo":    {func(dir string) error { return syscall.Mkfifo(filepath.Join(dir, "a"), 0o600) }, snapshot.ErrInvalid},
		"..":      {fill, snapshot.ErrInvalid},
	} {
		if err := s.PublishImage(name, c.fill); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	dir, err := s.Image("debian")
	if err != nil {
		t.Fatal(err)
	}
	if mode := lstat(t, filepath.Join(dir, "modules", "a", "x.ko")).Mode(); mode != 0o444 {
		t.Errorf("mode %v", mode)
	}
	if names, err := s.Images(); err != nil || len(names) != 1 || names[0] != "debian" {
		t.Errorf("images %v, %v", names, err)
	}
	if err := s.RemoveImage("debian"); err != nil {
		t.Error(err)
	}
	expectNames(t, s)
}
