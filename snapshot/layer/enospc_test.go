package layer

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// smallFS mounts a file system of that many bytes.
func smallFS(t *testing.T, options string) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("forkvm-test", dir, "tmpfs", 0, options); err != nil {
		t.Skipf("mount a small tmpfs: %v: run the test as root, or in `unshare -rm`", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func createIn(t *testing.T, dir, name string) *os.File {
	t.Helper()
	return must(os.OpenFile(filepath.Join(dir, name), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600))(t)
}

// C5: a full host gives the errno and an intact disk, and new writes work when
// there is space again.
func TestDiskFullC5(t *testing.T) {
	dir := smallFS(t, "size=2m")
	base := filled(4 << 20)
	m := &model{t: t, r: testRand(t), flat: bytes.Clone(base)}
	m.disk = newDisk(t, DiskConfig{Size: int64(len(base)), Layers: []*Layer{rawLayer(t, base)}, Top: createIn(t, dir, "top")})
	d := m.disk

	p := filled(len(base))
	n, err := d.WriteAt(p, 0)
	if !errors.Is(err, unix.ENOSPC) || n < 1<<20 || n >= len(p) {
		t.Fatalf("write of 4 MiB to 2: %d, %v", n, err)
	}
	copy(m.flat, p[:n])
	m.check()
	expectDisk(t, d, m.flat)

	// Full to the last page: the file system's count may lag behind.
	for n := 0; err == nil || n == 0; n++ {
		if _, err = d.WriteAt(p[:UnitSize], int64(2<<20+n*UnitSize)); err == nil {
			copy(m.flat[2<<20+n*UnitSize:], p[:UnitSize])
		}
	}
	// Blocks that the top has can be written over, others cannot.
	if _, err := d.WriteAt(p[:UnitSize], 0); err != nil {
		t.Errorf("overwriting: %v", err)
	}
	for _, off := range []int64{3<<20 + 5, 3 << 20} {
		if got, err := d.WriteAt(p[:100], off); got != 0 || !errors.Is(err, unix.ENOSPC) {
			t.Errorf("partial write at %d: %d, %v", off, got, err)
		}
	}
	if err := d.WriteZeroes(3<<20+5, 100); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("zeroes in part of a block: %v", err)
	}
	if err := d.WriteZeroes(3<<20, 64<<10); err != nil {
		t.Errorf("zeroes over whole blocks need no space: %v", err)
	}
	clear(m.flat[3<<20 : 3<<20+64<<10])
	m.check()
	expectDisk(t, d, m.flat)

	// The guest frees space.
	if err := d.Discard(0, 1<<20); err != nil {
		t.Fatal(err)
	}
	clear(m.flat[:1<<20])
	if _, err := d.WriteAt(p[:256<<10], 3<<20+5); err != nil {
		t.Errorf("write after a discard: %v", err)
	}
	copy(m.flat[3<<20+5:], p[:256<<10])

	// The host gets space.
	if err := unix.Mount("forkvm-test", dir, "tmpfs", unix.MS_REMOUNT, "size=16m"); err != nil {
		t.Fatal(err)
	}
	if _, err := d.WriteAt(p, 0); err != nil {
		t.Errorf("write with space again: %v", err)
	}
	copy(m.flat, p)
	m.check()
	expectDisk(t, d, m.flat)
	m.freeze()
	for range 50 {
		m.step()
	}
	m.base = base
	m.replay()
}

func TestCopyAndSealFull(t *testing.T) {
	dir := smallFS(t, "size=1m")
	f := memfd(t)
	if _, err := f.WriteAt(filled(2<<20), DataOffset); err != nil {
		t.Fatal(err)
	}
	src := must(Seal(f, SealOptions{Kind: KindDisk, Units: 512, Extents: []Extent{{0, 512, DataOffset}}}))(t)
	dst := createIn(t, dir, "copy")
	defer dst.Close()
	if err := Copy(context.Background(), dst, src); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("copy: %v", err)
	}
	if _, err := Open(dst); err == nil {
		t.Error("an unfinished copy opened")
	}
}

// C1: a flush covers every file with writes that no flush has covered, also
// after they were frozen.
func TestFlushCoversFormerTopsC1(t *testing.T) {
	d := newDisk(t, DiskConfig{Size: 1 << 20})
	freeze := func() {
		if err := must(d.Freeze(newTop(t)))(t).Close(); err != nil {
			t.Fatal(err)
		}
	}
	write := func() {
		if _, err := d.WriteAt([]byte{1}, 0); err != nil {
			t.Fatal(err)
		}
	}
	pending := func(want int) {
		t.Helper()
		if got := len(d.syncs.former); got != want {
			t.Errorf("%d former tops to sync, want %d", got, want)
		}
	}
	freeze()
	pending(0)
	write()
	freeze()
	pending(1)
	write()
	freeze()
	pending(2)
	if err := d.Flush(); err != nil {
		t.Fatal(err)
	}
	pending(0)
	freeze()
	pending(0)
	d.syncs.lost = unix.EIO
	if err := d.Flush(); !errors.Is(err, unix.EIO) {
		t.Errorf("flush after data was lost: %v", err)
	}
}
