package memory

import "golang.org/x/sys/cpu"

// sameAVX2 compares two pages in half the instructions that bytes.Equal takes. Pages
// are compared by the thousand while a guest stands still.
//
//go:noescape
func sameAVX2(a, b *[PageSize]byte) bool

func samePage(a, b []byte) bool {
	p, q := (*[PageSize]byte)(a), (*[PageSize]byte)(b)
	if cpu.X86.HasAVX2 {
		return sameAVX2(p, q)
	}
	return *p == *q
}
