package ext4

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

var testIdentity = Identity{
	UUID:  [16]byte{0x6f, 0x1c, 0x2a, 0x11, 0x7d, 0x0e, 0x4b, 0x8f, 0x9a, 0x52, 1, 2, 3, 4, 5, 6},
	Label: "test",
	Time:  time.Unix(1735689600, 0),
}

func newWriter(t *testing.T, size int64) (*Writer, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	w, err := NewWriter(f, Config{Size: size})
	if err != nil {
		t.Fatal(err)
	}
	return w, path
}

func finish(t *testing.T, w *Writer) int64 {
	t.Helper()
	size, err := w.Finish(testIdentity)
	if err != nil {
		t.Fatal(err)
	}
	return size
}

// tool finds a program of e2fsprogs, which judges our images.
func tool(t *testing.T, name string) string {
	t.Helper()
	for _, dir := range []string{"/usr/sbin", "/sbin"} {
		if path := filepath.Join(dir, name); executable(path) {
			return path
		}
	}
	t.Skipf("%s is not installed (apt-get install e2fsprogs)", name)
	return ""
}

func executable(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode()&0o111 != 0
}

// fsck fails the test unless e2fsck finds nothing to say about the image.
func fsck(t *testing.T, image string) {
	t.Helper()
	out, err := exec.Command(tool(t, "e2fsck"), "-f", "-n", image).CombinedOutput()
	if err != nil || bytes.Contains(out, []byte("? no")) {
		t.Fatalf("e2fsck: %v\n%s", err, out)
	}
}

func debugfs(t *testing.T, image, request string) string {
	t.Helper()
	cmd := exec.Command(tool(t, "debugfs"), "-R", request, image)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil || strings.Count(stderr.String(), "\n") > 1 {
		t.Fatalf("debugfs %s: %v\n%s", request, err, stderr.String())
	}
	return string(out)
}

func must(t *testing.T) func(*Node, error) *Node {
	return func(n *Node, err error) *Node {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
}

func TestEmptyImageIsClean(t *testing.T) {
	for _, size := range []int64{0, MinSize, 128 << 20, 128<<20 + BlockSize, 1 << 30, 100 << 30} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			w, path := newWriter(t, size)
			got := finish(t, w)
			info, err := os.Stat(path)
			if err != nil {
				t.Fatal(err)
			}
			if size != 0 && got != size || info.Size() != got {
				t.Fatalf("size %d, file %d, want %d", got, info.Size(), size)
			}
			fsck(t, path)
		})
	}
}

func TestEveryKindOfEntry(t *testing.T) {
	w, path := newWriter(t, 64<<20)
	ok, when := must(t), time.Unix(5_000_000_000, 123456789)
	attr := Attributes{Mode: 0o4751, UID: 70000, GID: 100001, ModTime: when}
	dir := ok(w.Mkdir(w.Root(), "dir", Attributes{Mode: 0o1777, ModTime: when}))
	file := ok(w.Create(dir, "file", attr, 5, strings.NewReader("hello")))
	if err := w.Link(w.Root(), "second name", file); err != nil {
		t.Fatal(err)
	}
	ok(w.Symlink(dir, "short", "file", attr))
	long := strings.Repeat("x/", 300) + "end"
	ok(w.Symlink(dir, "long", long, attr))
	ok(w.Mknod(dir, "null", CharacterDevice, 1, 3, attr))
	ok(w.Mknod(dir, "loop", BlockDevice, 7, 300, attr))
	ok(w.Mknod(dir, "fifo", Fifo, 0, 0, attr))
	ok(w.Mknod(dir, "socket", Socket, 0, 0, attr))
	ok(w.Create(dir, "empty", attr, 0, strings.NewReader("")))
	finish(t, w)
	fsck(t, path)

	if got := debugfs(t, path, "cat /dir/file"); got != "hello" {
		t.Errorf("content %q", got)
	}
	for name, want := range map[string][]string{
		"/dir":         {"Type: directory", "Mode:  01777", "Links: 2"},
		"/second name": {"Type: regular", "Mode:  04751", "User: 70000", "Group: 100001", "Links: 2", "Size: 5"},
		"/dir/short":   {"Type: symlink", `Fast link dest: "file"`},
		"/dir/long":    {"Type: symlink", fmt.Sprintf("Size: %d", len(long))},
		"/dir/null":    {"Type: character special", "Device major/minor number: 01:03"},
		"/dir/loop":    {"Type: block special", "(New-style) Device major/minor number: 07:300"},
		"/dir/fifo":    {"Type: FIFO"},
		"/dir/socket":  {"Type: socket"},
		"/dir/file":    {"mtime: 0x2a05f200:1d6f3455 -- Fri Jun 11"},
	} {
		got := debugfs(t, path, fmt.Sprintf("stat %q", name))
		for _, part := range want {
			if !strings.Contains(strings.Join(strings.Fields(got), " "), strings.Join(strings.Fields(part), " ")) {
				t.Errorf("stat %s lacks %q:\n%s", name, part, got)
			}
		}
	}
}

func TestContentComesBack(t *testing.T) {
	w, path := newWriter(t, 0)
	ok := must(t)
	sparse := make([]byte, 3<<20+17)
	copy(sparse[1<<20:], "in the middle")
	copy(sparse[len(sparse)-3:], "end")
	files := map[string][]byte{
		"one":    {1},
		"block":  bytes.Repeat([]byte{7}, BlockSize),
		"more":   bytes.Repeat([]byte("0123456"), 100_001),
		"sparse": sparse,
		"zeros":  make([]byte, 1<<20),
	}
	for name, content := range files {
		ok(w.Create(w.Root(), name, Attributes{Mode: 0o644}, int64(len(content)), bytes.NewReader(content)))
	}
	finish(t, w)
	fsck(t, path)
	for name, content := range files {
		if got := debugfs(t, path, "cat /"+name); got != string(content) {
			t.Errorf("%s: %d bytes came back, or other ones; want %d", name, len(got), len(content))
		}
	}
	if got := debugfs(t, path, "stat /zeros"); !strings.Contains(got, "Blockcount: 0") {
		t.Errorf("zeros take space:\n%s", got)
	}
}

func TestManyPiecesNeedExtentBlocks(t *testing.T) {
	w, path := newWriter(t, 0)
	// Every other chunk is a hole until there are enough; then zeros are stored.
	content := make([]byte, 1200*chunkSize)
	for at := 0; at < len(content); at += 2 * chunkSize {
		content[at] = 1
	}
	must(t)(w.Create(w.Root(), "pieces", Attributes{Mode: 0o644}, int64(len(content)), bytes.NewReader(content)))
	finish(t, w)
	fsck(t, path)
	if got := debugfs(t, path, "cat /pieces"); got != string(content) {
		t.Error("content differs")
	}
	if got := debugfs(t, path, "stat /pieces"); !strings.Contains(got, "ETB0") {
		t.Errorf("no extent block:\n%s", got)
	}
}

func TestLargeDirectoriesAndManyInodes(t *testing.T) {
	w, path := newWriter(t, 0)
	ok := must(t)
	dir := ok(w.Mkdir(w.Root(), "many", Attributes{Mode: 0o755}))
	for i := range 20_000 {
		ok(w.Create(dir, fmt.Sprintf("file-%0*d", 1+i%200, i), Attributes{Mode: 0o644}, 0, nil))
	}
	for i := range 3000 {
		ok(w.Mkdir(w.Root(), fmt.Sprintf("d%d", i), Attributes{Mode: 0o755}))
	}
	finish(t, w)
	fsck(t, path)
}

func TestReplacedEntriesGiveTheirSpaceBack(t *testing.T) {
	w, path := newWriter(t, 64<<20)
	ok := must(t)
	data := bytes.Repeat([]byte{1}, 1<<20)
	for range 5 {
		ok(w.Create(w.Root(), "again", Attributes{Mode: 0o644}, int64(len(data)), bytes.NewReader(data)))
	}
	ok(w.Mkdir(w.Root(), "dir", Attributes{Mode: 0o755}))
	ok(w.Symlink(w.Root(), "dir", "again", Attributes{}))
	finish(t, w)
	fsck(t, path)
}

func TestExtendedAttributes(t *testing.T) {
	acl := []byte{
		2, 0, 0, 0,
		1, 0, 7, 0, 255, 255, 255, 255,
		2, 0, 5, 0, 0xe8, 3, 0, 0,
		4, 0, 5, 0, 255, 255, 255, 255,
		16, 0, 5, 0, 255, 255, 255, 255,
		32, 0, 5, 0, 255, 255, 255, 255,
	}
	capability := []byte{1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
	w, path := newWriter(t, 64<<20)
	ok := must(t)
	ok(w.Create(w.Root(), "small", Attributes{Mode: 0o755, Xattrs: map[string][]byte{"security.capability": capability}}, 0, nil))
	ok(w.Create(w.Root(), "large", Attributes{Mode: 0o755, Xattrs: map[string][]byte{
		"security.capability":     capability,
		"user.comment":            bytes.Repeat([]byte("c"), 999),
		"user.empty":              {},
		"trusted.overlay.opaque":  []byte("y"),
		"system.posix_acl_access": acl,
	}}, 0, nil))
	ok(w.Mkdir(w.Root(), "dir", Attributes{Mode: 0o755, Xattrs: map[string][]byte{"system.posix_acl_default": acl}}))
	finish(t, w)
	fsck(t, path)
	if got := debugfs(t, path, "ea_get -x /small security.capability"); !strings.Contains(got, "01 00 00 02 00 04") {
		t.Errorf("small: %s", got)
	}
	got := debugfs(t, path, "ea_list /large")
	for _, want := range []string{"security.capability (20)", "user.comment (999)", "user.empty (0)", "trusted.overlay.opaque (1)", "system.posix_acl_access (28)"} {
		if !strings.Contains(got, want) {
			t.Errorf("large lacks %s:\n%s", want, got)
		}
	}
}

func TestRefusals(t *testing.T) {
	w, _ := newWriter(t, MinSize)
	ok := must(t)
	dir := ok(w.Mkdir(w.Root(), "dir", Attributes{}))
	file := ok(w.Create(dir, "file", Attributes{}, 0, nil))
	var conflict *ConflictError
	var limit *LimitError
	var large *TooLargeError
	as := func(err error, target any) bool { return errors.As(err, target) }
	for name, test := range map[string]struct {
		do   func() error
		want func(error) bool
	}{
		"name with slash":   {func() error { _, err := w.Mkdir(dir, "a/b", Attributes{}); return err }, func(err error) bool { return errors.Is(err, ErrName) }},
		"dot dot":           {func() error { _, err := w.Mkdir(dir, "..", Attributes{}); return err }, func(err error) bool { return errors.Is(err, ErrName) }},
		"long name":         {func() error { _, err := w.Mkdir(dir, strings.Repeat("n", 256), Attributes{}); return err }, func(err error) bool { return errors.Is(err, ErrName) }},
		"parent is a file":  {func() error { _, err := w.Mkdir(file, "a", Attributes{}); return err }, func(err error) bool { return as(err, &conflict) }},
		"over a full dir":   {func() error { _, err := w.Symlink(w.Root(), "dir", "x", Attributes{}); return err }, func(err error) bool { return as(err, &conflict) }},
		"link to directory": {func() error { return w.Link(w.Root(), "x", dir) }, func(err error) bool { return as(err, &conflict) }},
		"no target":         {func() error { _, err := w.Symlink(dir, "x", "", Attributes{}); return err }, func(err error) bool { return as(err, &limit) }},
		"device number":     {func() error { _, err := w.Mknod(dir, "x", BlockDevice, 1<<12, 0, Attributes{}); return err }, func(err error) bool { return as(err, &limit) }},
		"attribute name": {func() error {
			_, err := w.Mkdir(dir, "x", Attributes{Xattrs: map[string][]byte{"odd": nil}})
			return err
		}, func(err error) bool { return as(err, &limit) }},
		"attribute size": {func() error {
			_, err := w.Mkdir(dir, "x", Attributes{Xattrs: map[string][]byte{"user.x": make([]byte, 5000)}})
			return err
		}, func(err error) bool { return as(err, &limit) }},
		"negative size": {func() error { _, err := w.Create(dir, "x", Attributes{}, -1, nil); return err }, func(err error) bool { return as(err, &limit) }},
		"absurd size":   {func() error { _, err := w.Create(dir, "x", Attributes{}, 1<<62, nil); return err }, func(err error) bool { return as(err, &limit) }},
		"cut content": {func() error { _, err := w.Create(dir, "x", Attributes{}, 10, strings.NewReader("short")); return err }, func(err error) bool {
			return errors.Is(err, io.ErrUnexpectedEOF)
		}},
		"does not fit": {func() error {
			_, err := w.Create(dir, "x", Attributes{}, 9<<20, io.LimitReader(ones{}, 9<<20))
			return err
		}, func(err error) bool { return as(err, &large) }},
	} {
		if err := test.do(); err == nil || !test.want(err) {
			t.Errorf("%s: got %v", name, err)
		}
	}
	for _, size := range []int64{1, BlockSize, MinSize + 1, -BlockSize, MaxSize + BlockSize} {
		if _, err := NewWriter(nil, Config{Size: size}); err == nil {
			t.Errorf("size %d: no error", size)
		}
	}
}

type ones struct{}

func (ones) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = 1
	}
	return len(p), nil
}

func TestEqualInputGivesEqualImage(t *testing.T) {
	var images [2][]byte
	for i := range images {
		w, path := newWriter(t, MinSize)
		for _, name := range []string{"b", "a", "c"} {
			must(t)(w.Create(w.Root(), name, Attributes{Xattrs: map[string][]byte{"user.a": {1}, "user.b": {2}}}, 1, strings.NewReader(name)))
		}
		finish(t, w)
		images[i], _ = os.ReadFile(path)
	}
	if !bytes.Equal(images[0], images[1]) {
		t.Error("images differ")
	}
}

func TestFreeSpaceIsNotStored(t *testing.T) {
	w, path := newWriter(t, 100<<30)
	finish(t, w)
	out, err := exec.Command("du", "-k", path).Output()
	if err != nil {
		t.Fatal(err)
	}
	var kib int
	fmt.Sscan(string(out), &kib)
	if kib > 8<<10 {
		t.Errorf("an empty image of 100 GiB takes %d KiB", kib)
	}
}
