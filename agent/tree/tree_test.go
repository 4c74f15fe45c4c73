package tree

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func openRoot(t testing.TB, dir string) *os.Root {
	t.Helper()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { root.Close() })
	return root
}

// listing describes all that is below a directory, with hard links by the first
// of their names.
func listing(t *testing.T, dir string) string {
	t.Helper()
	var out strings.Builder
	first := map[uint64]string{}
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		st := info.Sys().(*syscall.Stat_t)
		name, _ := filepath.Rel(dir, p)
		fmt.Fprintf(&out, "%q %v %d:%d %d", name, info.Mode(), st.Uid, st.Gid, info.ModTime().Unix())
		switch {
		case info.Mode().IsRegular():
			b, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			if _, ok := first[st.Ino]; !ok {
				first[st.Ino] = name
			}
			fmt.Fprintf(&out, " %q %s", b, first[st.Ino])
		case info.Mode()&fs.ModeSymlink != 0:
			target, _ := os.Readlink(p)
			out.WriteString(" -> " + target)
		}
		out.WriteByte('\n')
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// sample makes a tree with everything in it that has a form of its own.
func sample(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	strange := "na\xffme with\nnewline"
	must(t,
		os.Mkdir(at("sub"), 0o755),
		os.WriteFile(at("sub/program"), []byte("#!/bin/sh\n"), 0o755),
		os.WriteFile(at("empty"), nil, 0o600),
		os.WriteFile(at(strange), []byte("x"), 0o644),
		os.WriteFile(at(strings.Repeat("n", 255)), bytes.Repeat([]byte("long"), 50_000), 0o644),
		os.Symlink("sub/program", at("link")),
		os.Symlink("/etc/passwd", at("absolute")),
		os.Link(at("sub/program"), at("same")),
		syscall.Mkfifo(at("fifo"), 0o640),
		os.Chmod(at("sub/program"), 0o755|fs.ModeSetuid),
		os.Mkdir(at("sealed"), 0o755),
		os.WriteFile(at("sealed/inside"), []byte("i"), 0o444),
		os.Chmod(at("sealed"), 0o555),
		os.Chtimes(at("sealed"), time.Time{}, time.Unix(1e9, 0)),
		os.Chtimes(at("empty"), time.Time{}, time.Unix(12345, 0)),
		unix.UtimesNanoAt(unix.AT_FDCWD, at("absolute"), []unix.Timespec{{Sec: 1e9}, {Sec: 2e9}}, unix.AT_SYMLINK_NOFOLLOW),
	)
	t.Cleanup(func() { os.Chmod(at("sealed"), 0o755) })
	return dir
}

func TestThereAndBack(t *testing.T) {
	from, to := sample(t), t.TempDir()
	t.Cleanup(func() { os.Chmod(filepath.Join(to, "sealed"), 0o755) })
	l, err := net.Listen("unix", filepath.Join(from, "socket"))
	must(t, err)
	defer l.Close()
	var stream bytes.Buffer
	packed, err := Pack(&stream, openRoot(t, from))
	must(t, err)
	unpacked, err := Unpack(&stream, openRoot(t, to), Options{Owners: os.Geteuid() == 0})
	must(t, err)
	if packed.Skipped != 1 || packed.Entries != unpacked.Entries || packed.Bytes != unpacked.Bytes {
		t.Errorf("packed %+v, unpacked %+v", packed, unpacked)
	}
	l.Close()
	want, got := listing(t, from), listing(t, to)
	// The directories themselves were just written to.
	want, got = want[strings.IndexByte(want, '\n'):], got[strings.IndexByte(got, '\n'):]
	if os.Geteuid() != 0 {
		want = strings.ReplaceAll(want, "urwxr-xr-x", "-rwxr-xr-x")
	}
	if got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// Over what is there: files are replaced, directories are joined.
func TestUnpackOver(t *testing.T) {
	from, to := t.TempDir(), t.TempDir()
	outside := filepath.Join(t.TempDir(), "outside")
	must(t,
		os.WriteFile(filepath.Join(from, "a"), []byte("new"), 0o644),
		os.Mkdir(filepath.Join(from, "d"), 0o755),
		os.WriteFile(outside, []byte("kept"), 0o644),
		os.Symlink(outside, filepath.Join(to, "a")),
		os.Mkdir(filepath.Join(to, "d"), 0o700),
		os.WriteFile(filepath.Join(to, "d", "old"), nil, 0o600),
	)
	var stream bytes.Buffer
	_, err := Pack(&stream, openRoot(t, from))
	must(t, err)
	_, err = Unpack(&stream, openRoot(t, to), Options{})
	must(t, err)
	if b, _ := os.ReadFile(outside); string(b) != "kept" {
		t.Errorf("wrote through a link: %q", b)
	}
	if info, err := os.Lstat(filepath.Join(to, "a")); err != nil || !info.Mode().IsRegular() {
		t.Errorf("link not replaced: %v, %v", info, err)
	}
	if _, err := os.Stat(filepath.Join(to, "d", "old")); err != nil {
		t.Error(err)
	}
	if info, _ := os.Stat(filepath.Join(to, "d")); info.Mode().Perm() != 0o755 {
		t.Errorf("directory has mode %v", info.Mode())
	}
}

func archiveOf(t testing.TB, headers ...tar.Header) *bytes.Buffer {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range headers {
		must(t, w.WriteHeader(&h))
		_, err := io.CopyN(w, zeros{}, h.Size)
		must(t, err)
	}
	must(t, w.Close())
	return &b
}

// A stream from a guest that its owner of a moment has made.
func TestUnpackHostile(t *testing.T) {
	for name, headers := range map[string][]tar.Header{
		"parent":            {{Name: "../evil", Typeflag: tar.TypeReg}},
		"absolute":          {{Name: "/tmp/evil", Typeflag: tar.TypeReg}},
		"hidden parent":     {{Name: "a/../../evil", Typeflag: tar.TypeReg}},
		"through a link":    {{Name: "l", Typeflag: tar.TypeSymlink, Linkname: ".."}, {Name: "l/evil", Typeflag: tar.TypeReg}},
		"absolute link":     {{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "/"}, {Name: "l/tmp/evil", Typeflag: tar.TypeReg}},
		"hard link outside": {{Name: "h", Typeflag: tar.TypeLink, Linkname: "../secret"}},
		"hard link by link": {{Name: "l", Typeflag: tar.TypeSymlink, Linkname: ".."}, {Name: "h", Typeflag: tar.TypeLink, Linkname: "l/secret"}},
		"root replaced":     {{Name: ".", Typeflag: tar.TypeReg}},
		"over a directory":  {{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o755}, {Name: "d", Typeflag: tar.TypeReg}},
	} {
		t.Run(name, func(t *testing.T) {
			parent := t.TempDir()
			must(t, os.WriteFile(filepath.Join(parent, "secret"), []byte("s"), 0o600), os.Mkdir(filepath.Join(parent, "in"), 0o755))
			if _, err := Unpack(archiveOf(t, headers...), openRoot(t, filepath.Join(parent, "in")), Options{Owners: true}); err == nil {
				t.Error("no error")
			}
			entries, _ := os.ReadDir(parent)
			if len(entries) != 2 {
				t.Errorf("outside there is now %v", entries)
			}
			if _, err := os.Stat("/tmp/evil"); err == nil {
				t.Error("wrote to an absolute path")
			}
		})
	}
}

func TestUnpackKeepsNoPrivileges(t *testing.T) {
	dir := t.TempDir()
	headers := []tar.Header{
		{Name: "setuid", Typeflag: tar.TypeReg, Mode: 0o4755, Uid: 12345},
		{Name: "disk", Typeflag: tar.TypeBlock, Mode: 0o666, Devmajor: 8},
	}
	stats, err := Unpack(archiveOf(t, headers...), openRoot(t, dir), Options{})
	must(t, err)
	info, err := os.Stat(filepath.Join(dir, "setuid"))
	must(t, err)
	if info.Mode() != 0o755 || int(info.Sys().(*syscall.Stat_t).Uid) != os.Geteuid() || stats.Skipped != 1 {
		t.Errorf("mode %v, %+v", info.Mode(), stats)
	}
}

func TestUnpackCutShort(t *testing.T) {
	whole := archiveOf(t, tar.Header{Name: "f", Typeflag: tar.TypeReg, Mode: 0o644, Size: 5000}).Bytes()
	dir := t.TempDir()
	if _, err := Unpack(bytes.NewReader(whole[:2000]), openRoot(t, dir), Options{}); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("got %v", err)
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 0 {
		t.Errorf("left %v", entries)
	}
}

// A file that shrinks between its header and its contents.
func TestPackFileThatShrinks(t *testing.T) {
	p := packer{tar: tar.NewWriter(io.Discard)}
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	must(t, err)
	defer f.Close()
	must(t, f.Truncate(10), p.tar.WriteHeader(&tar.Header{Name: "f", Size: 100}), p.contents(f, 100), p.tar.Close())
	if p.stats.Changed != 1 {
		t.Errorf("%+v", p.stats)
	}
}

func FuzzUnpack(f *testing.F) {
	f.Add(archiveOf(f, tar.Header{Name: "a/b", Typeflag: tar.TypeReg, Size: 3, Mode: 0o644}).Bytes())
	f.Add(archiveOf(f, tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: ".."}, tar.Header{Name: "l/x", Typeflag: tar.TypeReg}).Bytes())
	f.Add(archiveOf(f, tar.Header{Name: "h", Typeflag: tar.TypeLink, Linkname: "../x"}).Bytes())
	f.Fuzz(func(t *testing.T, data []byte) {
		parent := t.TempDir()
		in := filepath.Join(parent, "in")
		must(t, os.Mkdir(in, 0o755))
		root, err := os.OpenRoot(in)
		must(t, err)
		defer root.Close()
		_, _ = Unpack(bytes.NewReader(data), root, Options{})
		if entries, _ := os.ReadDir(parent); len(entries) != 1 {
			t.Fatalf("outside there is now %v", entries)
		}
		_ = unix.Chmod(in, 0o755)
	})
}
