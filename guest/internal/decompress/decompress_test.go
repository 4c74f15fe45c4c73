package decompress

import (
	"bytes"
	"errors"
	"flag"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"
)

var update = flag.Bool("update", false, "make the files in testdata again, with the programs whose formats they are in")

// text is content of a kind that compresses well.
func text() []byte { return bytes.Repeat([]byte("the quick brown fox jumps over the lazy dog\n"), 500) }

// code looks like x86 code to the filter: calls and jumps, with targets near and far, close behind each other.
func code() []byte {
	random := rand.New(rand.NewPCG(1, 2))
	p := make([]byte, 40_000)
	for i := range p {
		switch random.IntN(6) {
		case 0:
			p[i] = 0xe8 + byte(random.IntN(2))
		case 1:
			p[i] = 0x00
		case 2:
			p[i] = 0xff
		default:
			p[i] = byte(random.IntN(16))
		}
	}
	return p
}

var golden = []struct {
	file    string
	command string
	content func() []byte
	format  Format
}{
	{"text.gz", "gzip -9n", text, Gzip},
	{"text.bz2", "bzip2", text, Bzip2},
	{"text.zst", "zstd -19", text, Zstd},
	{"text.lz4", "lz4 -9", text, LZ4},
	{"text-legacy.lz4", "lz4 -l -9", text, LZ4},
	{"text-crc32.xz", "xz --check=crc32", text, XZ},
	{"text-crc64.xz", "xz --check=crc64", text, XZ},
	{"text-sha256.xz", "xz --check=sha256", text, XZ},
	{"text-none.xz", "xz --check=none", text, XZ},
	{"text-blocks.xz", "xz --block-size=5000 -T2 --lzma2=dict=4KiB", text, XZ},
	{"code-x86.xz", "xz --check=crc32 --x86 --lzma2=dict=32MiB", code, XZ},
	{"code-x86-start.xz", "xz --x86=start=4096 --lzma2=preset=6", code, XZ},
}

func TestFilesOfOtherProgramsComeBack(t *testing.T) {
	for _, g := range golden {
		t.Run(g.file, func(t *testing.T) {
			path := filepath.Join("testdata", g.file)
			if *update {
				args := strings.Fields(g.command)
				cmd := exec.Command(args[0], append(args[1:], "-c")...)
				cmd.Stdin = bytes.NewReader(g.content())
				out, err := cmd.Output()
				if err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, out, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			packed, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			for name, in := range map[string]io.Reader{"whole": bytes.NewReader(packed), "single bytes": iotest.OneByteReader(bytes.NewReader(packed))} {
				r, format, err := NewReader(in)
				if err != nil {
					t.Fatal(err)
				}
				got, err := io.ReadAll(r)
				if err != nil || !bytes.Equal(got, g.content()) || format != g.format {
					t.Errorf("%s: %s, %d bytes, %v", name, format, len(got), err)
				}
				r.Close()
			}
		})
	}
}

func TestSmallReadsGiveTheSame(t *testing.T) {
	packed, err := os.ReadFile("testdata/code-x86.xz")
	if err != nil {
		t.Fatal(err)
	}
	r, _, err := NewReader(bytes.NewReader(packed))
	if err != nil {
		t.Fatal(err)
	}
	if err := iotest.TestReader(r, code()); err != nil {
		t.Error(err)
	}
}

func TestStreamsFollowEachOther(t *testing.T) {
	packed, err := os.ReadFile("testdata/text-crc64.xz")
	if err != nil {
		t.Fatal(err)
	}
	twice := append(append(bytes.Clone(packed), 0, 0, 0, 0), packed...)
	got, err := All(twice, 1<<20)
	if err != nil || !bytes.Equal(got, append(text(), text()...)) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}

func TestPlainContentIsReadAsItIs(t *testing.T) {
	for _, content := range []string{"", "a", "plain content"} {
		got, err := All([]byte(content), 100)
		if err != nil || string(got) != content {
			t.Errorf("%q: %q, %v", content, got, err)
		}
	}
}

func TestLimitHolds(t *testing.T) {
	packed, err := os.ReadFile("testdata/text.zst")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := All(packed, int64(len(text()))-1); !errors.Is(err, ErrTooLong) {
		t.Errorf("got %v", err)
	}
	if _, err := All(packed, int64(len(text()))); err != nil {
		t.Error(err)
	}
}

func TestUnsupportedFormsAreNamed(t *testing.T) {
	for _, head := range []string{"\x5d\x00\x00\x80\x00\xff\xff\xff\xff", "\x89LZO\x00\x0d\x0a\x1a\x0a"} {
		var unsupported *UnsupportedError
		if _, _, err := NewReader(strings.NewReader(head)); !errors.As(err, &unsupported) {
			t.Errorf("%q: %v", head, err)
		}
	}
}

// After any damage either an error comes, or (where the changed bits do not matter) still the right content.
func TestDamagedXZGivesNoWrongContent(t *testing.T) {
	packed, err := os.ReadFile("testdata/text-blocks.xz")
	if err != nil {
		t.Fatal(err)
	}
	const magic = 6 // without it this is not xz any more
	for i := magic; i < len(packed); i++ {
		changed := bytes.Clone(packed)
		changed[i] ^= 0x10
		if got, err := All(changed, 1<<20); err == nil && !bytes.Equal(got, text()) {
			t.Errorf("byte %d changed: no error, %d bytes", i, len(got))
		}
		if _, err := All(packed[:i], 1<<20); err == nil {
			t.Errorf("cut at %d: no error", i)
		}
	}
}

func FuzzAll(f *testing.F) {
	for _, g := range golden {
		if packed, err := os.ReadFile(filepath.Join("testdata", g.file)); err == nil && len(packed) < 4096 {
			f.Add(packed)
		}
	}
	f.Fuzz(func(t *testing.T, p []byte) {
		const limit = 1 << 20
		if out, err := All(p, limit); err == nil && len(out) > limit {
			t.Errorf("%d bytes", len(out))
		}
	})
}
