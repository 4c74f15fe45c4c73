package layer

import (
	"bytes"
	"crypto/rand"
	mathrand "math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// tempFile returns an empty read-write file that closes with the test.
func tempFile(t testing.TB) *os.File {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "layer")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func memfd(t testing.TB) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate("layer", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "memfd:layer")
	t.Cleanup(func() { f.Close() })
	return f
}

func must[T any](v T, err error) func(t testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// filled returns n random bytes.
func filled(n int) []byte {
	b := make([]byte, n)
	rand.Read(b)
	return b
}

func pattern(units int, seed byte) []byte {
	var b []byte
	for i := range units {
		b = append(b, bytes.Repeat([]byte{seed + byte(i)}, UnitSize)...)
	}
	return b
}

// goldenExtents with pattern(5) as data, in an order that Copy changes.
func goldenExtents() []Extent {
	return []Extent{
		{Start: 1, Count: 2, Offset: DataOffset + 2*UnitSize},
		{Start: 3, Count: 1, Offset: DataOffset},
		{Start: 10, Count: 100, Offset: ZeroExtent},
		{Start: 200, Count: 1, Offset: DataOffset + 4*UnitSize},
	}
}

const goldenID = "000102030405060708090a0b0c0d0e0f"

func sealGolden(t testing.TB, f *os.File, checksums bool) *Layer {
	t.Helper()
	if _, err := f.WriteAt(pattern(5, 1), DataOffset); err != nil {
		t.Fatal(err)
	}
	return must(Seal(f, SealOptions{
		Kind: KindMemory, Units: 256, Extents: goldenExtents(), ID: goldenID, Checksums: checksums,
	}))(t)
}

// contents reads a whole layer as if it were alone on a disk.
func contents(t testing.TB, l *Layer) []byte {
	t.Helper()
	out := make([]byte, l.Units()*UnitSize)
	for _, e := range l.Extents() {
		if e.Offset == ZeroExtent {
			continue
		}
		if err := l.readData(out[e.Start*UnitSize:][:e.Count*UnitSize], e.Offset); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

func testRand(t testing.TB) *mathrand.Rand {
	seed := uint64(mathrand.Uint32())
	t.Logf("seed %d", seed)
	return mathrand.New(mathrand.NewPCG(seed, 0))
}

func writeFile(t testing.TB, b []byte) *os.File {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	f := must(os.OpenFile(path, os.O_RDWR, 0))(t)
	t.Cleanup(func() { f.Close() })
	return f
}
