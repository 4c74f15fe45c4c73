package memory

import (
	"math/rand/v2"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/linux"
)

// TestSamePage: a difference in any one byte is seen, and nothing beside the pages is looked at.
func TestSamePage(t *testing.T) {
	m, err := linux.Reserve(4 * PageSize)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Unmap()
	// The page behind each of the two cannot be read.
	for _, at := range []uint64{PageSize, 3 * PageSize} {
		if err := unix.Mprotect(m.Bytes()[at:at+PageSize], unix.PROT_NONE); err != nil {
			t.Fatal(err)
		}
	}
	a, b := m.Bytes()[:PageSize], m.Bytes()[2*PageSize:3*PageSize]
	for i := range a {
		a[i] = byte(rand.Uint32())
	}
	copy(b, a)
	if !samePage(a, b) || !samePage(a, a) {
		t.Error("equal pages differ")
	}
	for i := range a {
		b[i] ^= 1 << (i % 8)
		if samePage(a, b) || samePage(b, a) {
			t.Fatalf("byte %d makes no difference", i)
		}
		b[i] = a[i]
	}
	if !isZero(zeroPage[:]) || isZero(a) {
		t.Error("zeros are not told from others")
	}
}

func BenchmarkSamePage(b *testing.B) {
	p, q := make([]byte, PageSize), make([]byte, PageSize)
	b.SetBytes(PageSize)
	for b.Loop() {
		samePage(p, q)
	}
}
