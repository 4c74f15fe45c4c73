package lab

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func TestArchiveGolden(t *testing.T) {
	archive := make(tree)
	archive.file("/usr/bin/true", 0o755, []byte("#!"))
	archive.link("/bin", "usr/bin")
	archive.dir("/tmp", 0o777)
	var buf bytes.Buffer
	if err := archive.writeTo(&buf); err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile("testdata/small.cpio")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(buf.Bytes(), want) {
		t.Errorf("archive is\n%q\nwant\n%q", buf.Bytes(), want)
	}
}

// The format is checked against a program that others wrote.
func TestArchiveUnpacks(t *testing.T) {
	if _, err := exec.LookPath("cpio"); err != nil {
		t.Skip("needs cpio: apt-get install cpio")
	}
	archive := make(tree)
	for _, text := range []string{"", "1", "22", "333", "4444"} {
		archive.file("/a/deep/file"+text, 0o640, []byte(text))
	}
	archive.link("/a/link", "deep/file1")
	var buf bytes.Buffer
	if err := archive.writeTo(&buf); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	cmd := exec.Command("cpio", "-id", "--quiet")
	cmd.Dir, cmd.Stdin = dir, &buf
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("cpio: %v\n%s", err, out)
	}
	for _, text := range []string{"", "1", "22", "333", "4444"} {
		if got, err := os.ReadFile(filepath.Join(dir, "a/deep/file"+text)); err != nil || string(got) != text {
			t.Errorf("file of %q holds %q, %v", text, got, err)
		}
	}
	if got, err := os.Readlink(filepath.Join(dir, "a/link")); err != nil || got != "deep/file1" {
		t.Errorf("link to %q, %v", got, err)
	}
}

func TestArchiveIsTheSameEachTime(t *testing.T) {
	var first string
	for range 5 {
		archive := make(tree)
		for _, name := range strings.Fields("/b/x /a/y /c /b/a /a") {
			archive.dir(name, 0o755)
		}
		var buf bytes.Buffer
		if err := archive.writeTo(&buf); err != nil {
			t.Fatal(err)
		}
		if first == "" {
			first = buf.String()
		}
		if buf.String() != first {
			t.Fatal("two archives of the same tree differ")
		}
	}
}
