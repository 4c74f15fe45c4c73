package rootfs

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/guest/rootfs/ext4"
)

var old = time.Unix(1_600_000_000, 5000)

func dir(name string, mode int64) tar.Header {
	return tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: mode, ModTime: old}
}

func file(name string, mode int64) tar.Header {
	return tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode, ModTime: old, Size: int64(len("content of " + name))}
}

func symlink(name, target string) tar.Header {
	return tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, Mode: 0o777, ModTime: old}
}

func hardLink(name, target string) tar.Header {
	return tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: target, ModTime: old}
}

// archive makes a tar; each file's content names it.
func archive(t testing.TB, headers ...tar.Header) []byte {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, h := range headers {
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if h.Size > 0 {
			io.WriteString(w, "content of "+h.Name)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func buildArchive(t testing.TB, source []byte, c Config) (string, *Image, error) {
	t.Helper()
	c.Source = filepath.Join(t.TempDir(), "source.tar")
	if err := os.WriteFile(c.Source, source, 0o644); err != nil {
		t.Fatal(err)
	}
	return buildConfig(t, c)
}

func buildConfig(t testing.TB, c Config) (string, *Image, error) {
	c.Output = filepath.Join(t.TempDir(), "rootfs.ext4")
	image, err := Build(context.Background(), c)
	return c.Output, image, err
}

// debugfs asks e2fsprogs about an image.
func debugfs(t testing.TB, image, request string) string {
	t.Helper()
	const path = "/usr/sbin/debugfs"
	if _, err := os.Stat(path); err != nil {
		t.Skip("debugfs is not installed (apt-get install e2fsprogs)")
	}
	out, err := exec.Command(path, "-R", request, image).Output()
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

func fsck(t testing.TB, image string) {
	t.Helper()
	const path = "/usr/sbin/e2fsck"
	if _, err := os.Stat(path); err != nil {
		t.Skip("e2fsck is not installed (apt-get install e2fsprogs)")
	}
	if out, err := exec.Command(path, "-fn", image).CombinedOutput(); err != nil || bytes.Contains(out, []byte("? no")) {
		t.Fatalf("e2fsck: %v\n%s", err, out)
	}
}

func wantStat(t testing.TB, image, name string, want ...string) {
	t.Helper()
	got := strings.Join(strings.Fields(debugfs(t, image, fmt.Sprintf("stat %q", name))), " ")
	for _, part := range want {
		if !strings.Contains(got, part) {
			t.Errorf("%s lacks %q: %s", name, part, got)
		}
	}
}

func TestArchiveKeepsWhatItHolds(t *testing.T) {
	owned := file("srv/owned", 0o6750)
	owned.Uid, owned.Gid = 33, 70000
	owned.PAXRecords = map[string]string{
		"SCHILY.xattr.security.capability": "\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00",
		"SCHILY.xattr.user.comment":        "hello",
	}
	owned.Format = tar.FormatPAX
	path, image, err := buildArchive(t, archive(t,
		dir("./", 0o755), dir("./sbin/", 0o755), file("./sbin/init", 0o755), owned,
		hardLink("./srv/again", "./srv/owned"), symlink("./link", "/srv/owned"),
		tar.Header{Typeflag: tar.TypeChar, Name: "./dev/null", Mode: 0o666, Devmajor: 1, Devminor: 3, ModTime: old},
		tar.Header{Typeflag: tar.TypeBlock, Name: "./dev/vda", Mode: 0o660, Devmajor: 254, Devminor: 0, ModTime: old},
		tar.Header{Typeflag: tar.TypeFifo, Name: "./dev/initctl", Mode: 0o600, ModTime: old},
	), Config{Label: "root", Programs: []string{"/sbin/init"}})
	if err != nil {
		t.Fatal(err)
	}
	if image.Entries != 9 || image.Size%ext4.BlockSize != 0 {
		t.Errorf("%+v", image)
	}
	fsck(t, path)
	wantStat(t, path, "/srv/again", "Mode: 06750", "User: 33", "Group: 70000", "Links: 2", "security.capability (20)", `user.comment (5) = "hello"`, "mtime: 0x5f5e1000:00004e20")
	wantStat(t, path, "/link", `Fast link dest: "/srv/owned"`)
	wantStat(t, path, "/dev/null", "character special", "01:03")
	wantStat(t, path, "/dev/vda", "block special", "254:00")
	wantStat(t, path, "/dev/initctl", "FIFO")
	wantStat(t, path, "/proc", "directory", "Mode: 0555")
	wantStat(t, path, "/tmp", "directory", "Mode: 01777")
	if got := debugfs(t, path, "cat /sbin/init"); got != "content of ./sbin/init" {
		t.Errorf("content %q", got)
	}
}

func TestCompressedArchives(t *testing.T) {
	plain := archive(t, file("etc/hostname", 0o644))
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	z.Write(plain)
	z.Close()
	_, want, err := buildArchive(t, plain, Config{})
	if err != nil {
		t.Fatal(err)
	}
	_, got, err := buildArchive(t, packed.Bytes(), Config{})
	if err != nil {
		t.Fatal(err)
	}
	if got.Digest != want.Digest || got.Size != want.Size || got.Entries != want.Entries {
		t.Errorf("compressed %+v, plain %+v", got, want)
	}
	if _, _, err := buildArchive(t, packed.Bytes()[:packed.Len()-4], Config{}); err == nil {
		t.Error("archive cut short: no error")
	}
}

func TestEqualContentGivesAnEqualImage(t *testing.T) {
	source := archive(t, dir("a", 0o755), file("a/b", 0o644))
	first, _, err := buildArchive(t, source, Config{Size: ext4.MinSize})
	if err != nil {
		t.Fatal(err)
	}
	second, _, err := buildArchive(t, source, Config{Size: ext4.MinSize - 1})
	if err != nil {
		t.Fatal(err)
	}
	a, _ := os.ReadFile(first)
	b, _ := os.ReadFile(second)
	if !bytes.Equal(a, b) || int64(len(a)) != ext4.MinSize {
		t.Errorf("images of %d and %d bytes differ", len(a), len(b))
	}
}

func TestLinksAreResolvedInsideTheRoot(t *testing.T) {
	path, image, err := buildArchive(t, archive(t,
		dir("usr/lib", 0o755), symlink("lib", "usr/lib"), file("lib/one", 0o644), dir("lib", 0o700), file("lib/two", 0o644),
		symlink("up", "../../../etc"), dir("etc", 0o755), file("up/three", 0o644),
		symlink("absolute", "/etc"), hardLink("absolute/four", "lib/two"),
		symlink("sbin", "usr/lib"), symlink("usr/lib/init", "/lib/systemd"), file("usr/lib/systemd", 0o755),
	), Config{Programs: []string{"/sbin/init"}, Probe: []string{"/lib/one", "/bin/sh", "/usr/lib/init"}})
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(image.Found, " "); got != "/usr/lib/init" {
		t.Errorf("found %s", got)
	}
	fsck(t, path)
	for _, name := range []string{"/usr/lib/one", "/usr/lib/two", "/etc/three", "/etc/four"} {
		wantStat(t, path, name, "Type: regular")
	}
	wantStat(t, path, "/lib", "Type: symlink")
}

func TestHostileArchivesAreRefused(t *testing.T) {
	for name, headers := range map[string][]tar.Header{
		"dot dot":               {file("../../etc/passwd", 0o644)},
		"dot dot inside":        {file("a/../../b", 0o644)},
		"hard link out":         {hardLink("a", "../../../etc/passwd")},
		"hard link to nothing":  {hardLink("a", "b")},
		"hard link to dir":      {dir("a", 0o755), hardLink("b", "a")},
		"link to itself":        {symlink("a", "a"), file("a/b", 0o644)},
		"links in a circle":     {symlink("a", "b"), symlink("b", "a"), file("a/c", 0o644)},
		"below a file":          {file("a", 0o644), file("a/b", 0o644)},
		"file over a directory": {file("a/b", 0o644), file("a", 0o644)},
		"root is a file":        {symlink(".", "a")},
		"long name":             {file(strings.Repeat("n", 300), 0o644)},
		"dangling parent":       {symlink("a", "/nowhere/b"), file("c", 0o644), hardLink("d", "a/c")},
	} {
		t.Run(name, func(t *testing.T) {
			path, _, err := buildArchive(t, archive(t, headers...), Config{})
			var entry *EntryError
			if !errors.As(err, &entry) {
				t.Errorf("got %v", err)
			}
			if left, _ := os.ReadDir(filepath.Dir(path)); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}

func TestWhatIsNoRootFileSystem(t *testing.T) {
	good := archive(t, file("bin/sh", 0o755))
	for name, test := range map[string]struct {
		source   []byte
		programs []string
		message  string
	}{
		"empty file":         {nil, nil, "without entries"},
		"text":               {bytes.Repeat([]byte("no archive "), 100), nil, "not a tar archive"},
		"cut after an entry": {good[:1024], nil, "read archive"},
		"compressed rubbish": {[]byte("\x28\xb5\x2f\xfd rubbish rubbish rubbish"), nil, "not a root file system"},
		"no init":            {good, []string{"/bin/sh", "/sbin/init"}, "no executable /sbin/init"},
		"not executable":     {archive(t, file("sbin/init", 0o644)), []string{"/sbin/init"}, "no executable /sbin/init"},
		"init is a dir":      {archive(t, dir("sbin/init", 0o755)), []string{"/sbin/init"}, "no executable /sbin/init"},
		"dangling init":      {archive(t, symlink("sbin/init", "/lib/systemd/systemd")), []string{"/sbin/init"}, "no executable /sbin/init"},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := buildArchive(t, test.source, Config{Programs: test.programs})
			var root *RootError
			if !errors.As(err, &root) || !strings.Contains(err.Error(), test.message) {
				t.Errorf("got %v", err)
			}
		})
	}
	if _, _, err := buildArchive(t, good[:520], Config{}); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("cut entry: %v", err)
	}
	if _, _, err := buildConfig(t, Config{Source: "/dev/null"}); err == nil {
		t.Error("a device was taken")
	}
	if _, _, err := buildConfig(t, Config{Source: filepath.Join(t.TempDir(), "absent")}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("absent source: %v", err)
	}
}

func TestContentThatDoesNotFit(t *testing.T) {
	big := tar.Header{Typeflag: tar.TypeReg, Name: "big", Mode: 0o644, Size: 20 << 20}
	var source bytes.Buffer
	w := tar.NewWriter(&source)
	w.WriteHeader(&big)
	w.Write(bytes.Repeat([]byte{1}, 20<<20))
	w.Close()
	_, _, err := buildArchive(t, source.Bytes(), Config{Size: 16 << 20})
	var large *ext4.TooLargeError
	if !errors.As(err, &large) {
		t.Errorf("got %v", err)
	}
}

func TestCancelledBuildLeavesNothing(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	source := t.TempDir()
	output := filepath.Join(t.TempDir(), "image")
	if _, err := Build(ctx, Config{Source: source, Output: output}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if left, _ := os.ReadDir(filepath.Dir(output)); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestDirectoryKeepsWhatItHolds(t *testing.T) {
	source := t.TempDir()
	path := func(name string) string { return filepath.Join(source, name) }
	for _, err := range []error{
		os.MkdirAll(path("bin"), 0o755),
		os.WriteFile(path("bin/sh"), []byte("#!"), 0o755),
		os.Chmod(path("bin/sh"), 0o755|os.ModeSetuid),
		os.Link(path("bin/sh"), path("bin/bash")),
		os.Symlink("sh", path("bin/dash")),
		unix.Mkfifo(path("fifo"), 0o600),
		os.Chtimes(path("bin/sh"), old, old),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	labelled := unix.Setxattr(path("bin/sh"), "user.comment", []byte("hello"), 0) == nil
	image, _, err := buildConfig(t, Config{Source: source, Programs: []string{"/bin/dash"}})
	if err != nil {
		t.Fatal(err)
	}
	fsck(t, image)
	wantStat(t, image, "/bin/bash", "Mode: 04755", "Links: 2", fmt.Sprintf("User: %d", os.Getuid()), "mtime: 0x5f5e1000:00004e20")
	wantStat(t, image, "/bin/dash", `Fast link dest: "sh"`)
	wantStat(t, image, "/fifo", "FIFO")
	if labelled {
		wantStat(t, image, "/bin/sh", `user.comment (5) = "hello"`)
	}
}

func FuzzArchive(f *testing.F) {
	f.Add(archive(f, dir("./", 0o755), file("a/b", 0o755), symlink("c", "a"), hardLink("d", "c/b")))
	f.Add(archive(f, symlink("a", "../b"), symlink("b", "a"), file("a/x", 0o644)))
	f.Add(archive(f, tar.Header{Typeflag: tar.TypeChar, Name: "n", Devmajor: 1, Devminor: 3}))
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, source []byte) {
		image, err := os.CreateTemp(dir, "image-*")
		if err != nil {
			t.Fatal(err)
		}
		defer os.Remove(image.Name())
		defer image.Close()
		b, err := newBuilder(context.Background(), image, Config{Source: "fuzz", Size: 16 << 20})
		if err != nil {
			t.Fatal(err)
		}
		if b.addArchive(bytes.NewReader(source)) != nil {
			return
		}
		if _, err := b.finish(Config{}); err != nil {
			return
		}
		fsck(t, image.Name())
	})
}
