package layer

import (
	"bytes"
	"errors"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/snapshot"
)

// scatter is a disk whose every block lies in another of four layers than its
// neighbours, read so often that the files are mapped.
func scatter(t *testing.T) (d *Disk, want []byte) {
	t.Helper()
	p := pile{size: 1 << 20, depth: 4, run: 1}
	grown := p.grow(t)
	d = reopen(t, grown)
	want = readWhole(t, flat(t, grown))
	if err := grown.Close(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if !bytes.Equal(readWhole(t, d), want) {
			t.Fatal("content differs")
		}
	}
	if n := windows(d); n != 4 {
		t.Fatalf("%d of 4 files are mapped", n)
	}
	return d, want
}

func readWhole(t *testing.T, d *Disk) []byte {
	t.Helper()
	p := make([]byte, d.Size())
	if _, err := d.ReadAt(p, 0); err != nil {
		t.Fatal(err)
	}
	return p
}

func windows(d *Disk) (n int) {
	for _, s := range d.files.sources {
		if s.window != nil && s.window.mapped.Load() != nil {
			n++
		}
	}
	return n
}

func TestWindows(t *testing.T) {
	d, want := scatter(t)
	// Parts of blocks, and writes since, also into the file that is the top.
	for _, at := range []int64{0, 1, 4095, 4097, 300_001} {
		p := make([]byte, 70_000)
		if _, err := d.ReadAt(p, at); err != nil || !bytes.Equal(p, want[at:at+int64(len(p))]) {
			t.Errorf("read from %d: %v", at, err)
		}
	}
	for i := range int64(100) {
		at := (i*37*UnitSize + i*100) % (1<<20 - 600)
		part := bytes.Repeat([]byte{byte(i)}, 600)
		copy(want[at:], part)
		if _, err := d.WriteAt(part, at); err != nil {
			t.Fatal(err)
		}
		if i == 50 {
			must(d.Freeze(newTop(t)))(t).Close()
		}
		if i%10 == 0 && !bytes.Equal(readWhole(t, d), want) {
			t.Fatalf("content differs after %d writes", i)
		}
	}
	buf := make([]byte, 64<<10)
	if n := testing.AllocsPerRun(100, func() { d.ReadAt(buf, 0) }); n != 0 {
		t.Errorf("a read of many pieces allocates %v times", n)
	}
	if err := d.Reset(newTop(t)); err != nil {
		t.Fatal(err)
	}
	d.gone.Wait()
	if n := mappedFiles(t); n != 0 {
		t.Errorf("%d files are mapped after a reset", n)
	}
	readWhole(t, d)
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if n := mappedFiles(t); n != 0 {
		t.Errorf("%d files are mapped after the end", n)
	}
}

// mappedFiles counts this process's mappings of files without a name.
func mappedFiles(t *testing.T) int {
	t.Helper()
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(maps), "(deleted)")
}

// A layer that shrinks under a disk is an error of the request that meets it.
func TestWindowOfAFileThatShrinks(t *testing.T) {
	d, _ := scatter(t)
	if err := d.files.sources[1].file.Truncate(DataOffset + UnitSize); err != nil {
		t.Fatal(err)
	}
	if _, err := d.ReadAt(make([]byte, d.Size()), 0); !errors.Is(err, snapshot.ErrTruncated) {
		t.Errorf("got %v", err)
	}
}

// So is memory of the caller's that cannot be written.
func TestReadIntoMemoryThatIsNone(t *testing.T) {
	d, _ := scatter(t)
	p, err := unix.Mmap(-1, 0, 64<<10, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(p)
	if _, err := d.ReadAt(p, 0); !errors.Is(err, unix.EFAULT) {
		t.Errorf("got %v", err)
	}
}
