package store

import (
	"context"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/snapshot"
)

// E4: whatever happens to a published file is an error that names the file.
func TestDamageE4(t *testing.T) {
	s := openStore(t, t.TempDir())
	m := newMachine(t)
	publish(t, s, m, "good")
	if err := m.grow(3); err != nil {
		t.Fatal(err)
	}
	publish(t, s, m, "other")
	good, err := s.Stat("good")
	if err != nil {
		t.Fatal(err)
	}
	other, err := s.Stat("other")
	if err != nil {
		t.Fatal(err)
	}
	dir := func(name string) string { return filepath.Join(s.Path(), "snapshots", name) }
	// The file of the other snapshot that has the same role.
	twin := map[string]string{
		snapshot.ManifestFile:        snapshot.ManifestFile,
		good.State.File:              other.State.File,
		good.Memory[0].File:          other.Memory[1].File,
		good.Disks[0].Layers[0].File: other.Disks[0].Layers[1].File,
	}

	expect := func(t *testing.T, file string) {
		t.Helper()
		snap, err := s.Open("good")
		if err == nil {
			err = errors.Join(snap.Verify(context.Background()), snap.Close())
		}
		var damage *CorruptError
		if !errors.As(err, &damage) || damage.File != file || damage.Snapshot != "good" {
			t.Fatalf("%s: got %v", file, err)
		}
		if !strings.Contains(err.Error(), file) {
			t.Errorf("error does not name the file: %v", err)
		}
	}

	for file, otherFile := range twin {
		path := filepath.Join(dir("good"), file)
		original, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		// Damage is done to a new inode: the old one is also the other
		// snapshot's.
		put := func(t *testing.T, content []byte) {
			t.Helper()
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, content, 0o444); err != nil {
				t.Fatal(err)
			}
		}
		t.Run(file, func(t *testing.T) {
			n := len(original)
			for _, cut := range []int{0, 1, 4095, n / 2, n - 4096, n - 1} {
				if cut < 0 || cut >= n {
					continue
				}
				put(t, original[:cut])
				expect(t, file)
				if _, err := s.Stat("good"); err == nil {
					t.Errorf("cut at %d and listed as sound", cut)
				}
			}
			put(t, append(original[:n:n], make([]byte, 4096)...))
			expect(t, file)
			if swap, err := os.ReadFile(filepath.Join(dir("other"), otherFile)); err != nil {
				t.Fatal(err)
			} else {
				put(t, swap)
				expect(t, file)
			}
			for range 100 {
				flipped := append([]byte(nil), original...)
				at := rand.IntN(n)
				flipped[at] ^= 1 << rand.IntN(8)
				put(t, flipped)
				expect(t, file)
			}
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
			expect(t, file)
			if err := syscall.Mkfifo(path, 0o600); err != nil {
				t.Fatal(err)
			}
			expect(t, file)
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink(filepath.Join(dir("other"), otherFile), path); err != nil {
				t.Fatal(err)
			}
			expect(t, file)
			put(t, original)
		})
	}
	// A damaged one is listed as such and can be removed; the other is whole.
	if err := os.Truncate(filepath.Join(dir("good"), "state"), 5); err != nil {
		t.Fatal(err)
	}
	infos, err := s.List()
	var damage *CorruptError
	if err != nil || len(infos) != 2 || !errors.As(infos[0].Err, &damage) || infos[1].Err != nil {
		t.Errorf("listing %+v, %v", infos, err)
	}
	if err := s.Remove("good"); err != nil {
		t.Error(err)
	}
	expectNames(t, s, "other")
}

// E4: a manifest of another version is reported as that, not as damage to
// something else.
func TestManifestOfAnotherVersionE4(t *testing.T) {
	s := openStore(t, t.TempDir())
	publish(t, s, newMachine(t), "x")
	path := filepath.Join(s.Path(), "snapshots", "x", snapshot.ManifestFile)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	later := strings.Replace(string(b), "snapshot/v1", "snapshot/v2", 1)
	if err := os.WriteFile(path, []byte(later), 0o444); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Open("x"); !errors.Is(err, snapshot.ErrVersion) {
		t.Error(err)
	}
}

func TestStrayFilesInListing(t *testing.T) {
	s := openStore(t, t.TempDir())
	if err := os.WriteFile(filepath.Join(s.Path(), "snapshots", "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(s.Path(), "snapshots", "empty"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(s.Path(), "snapshots", ".hidden"), 0o700); err != nil {
		t.Fatal(err)
	}
	infos, err := s.List()
	if err != nil || len(infos) != 2 {
		t.Fatalf("listing %+v, %v", infos, err)
	}
	for _, info := range infos {
		var damage *CorruptError
		if !errors.As(info.Err, &damage) {
			t.Errorf("%s: %v", info.Name, info.Err)
		}
		if err := s.Remove(info.Name); err != nil {
			t.Error(err)
		}
	}
	expectNames(t, s)
}

// E5 (2): not even who owns the store can write to a published file by mistake.
func TestPublishedFilesCannotBeWrittenE5(t *testing.T) {
	s := openStore(t, t.TempDir())
	publish(t, s, newMachine(t), "x")
	files, err := filepath.Glob(filepath.Join(s.Path(), "snapshots", "x", "*"))
	if err != nil || len(files) != 4 {
		t.Fatal(files, err)
	}
	defer asOwner(t, append(files, filepath.Join(s.Path(), "snapshots", "x"), filepath.Join(s.Path(), "snapshots"), s.Path(), filepath.Dir(s.Path()))...)()
	for _, path := range files {
		if f, err := os.OpenFile(path, os.O_RDWR, 0); !errors.Is(err, fs.ErrPermission) {
			f.Close()
			t.Errorf("open %s for writing: %v", path, err)
		}
		if err := os.Truncate(path, 0); !errors.Is(err, fs.ErrPermission) {
			t.Errorf("truncate %s: %v", path, err)
		}
		if _, err := os.ReadFile(path); err != nil {
			t.Error(err)
		}
	}
}

// E4: a file that cannot be read is an error that names it, and no damage.
func TestUnreadableFileE4(t *testing.T) {
	s := openStore(t, t.TempDir())
	publish(t, s, newMachine(t), "x")
	files, err := filepath.Glob(filepath.Join(s.Path(), "snapshots", "x", "*"))
	if err != nil {
		t.Fatal(err)
	}
	defer asOwner(t, append(files, filepath.Join(s.Path(), "snapshots", "x"), filepath.Join(s.Path(), "snapshots"), s.Path(), filepath.Dir(s.Path()))...)()
	for _, path := range files {
		if err := os.Chmod(path, 0); err != nil {
			t.Fatal(err)
		}
		_, err := s.Open("x")
		var damage *CorruptError
		if !errors.Is(err, fs.ErrPermission) || errors.As(err, &damage) || !strings.Contains(err.Error(), filepath.Base(path)) {
			t.Errorf("%s: %v", path, err)
		}
		if err := os.Chmod(path, 0o444); err != nil {
			t.Fatal(err)
		}
	}
}

// asOwner makes the test one without privileges, to whom the paths belong, until
// the function that it returns is called.
func asOwner(t *testing.T, paths ...string) func() {
	t.Helper()
	if os.Geteuid() != 0 {
		return func() {}
	}
	const nobody = 65534
	for _, path := range paths {
		if err := os.Chown(path, nobody, -1); err != nil {
			t.Fatal(err)
		}
	}
	// Of this thread alone.
	runtime.LockOSThread()
	if err := unix.Setfsuid(nobody); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := unix.Setfsuid(0); err != nil {
			t.Error(err)
		}
		runtime.UnlockOSThread()
	}
}
