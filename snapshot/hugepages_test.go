package snapshot

import (
	"encoding/binary"
	"errors"
	"reflect"
	"strings"
	"testing"
)

func goldenHugePages() *HugePages {
	return &HugePages{Snapshot: strings.Repeat("a5", 16), RAM: 1 << 16, Pages: []uint64{0, 8192, 1<<16 - 512}}
}

func TestHugePagesGolden(t *testing.T) {
	b, err := goldenHugePages().Encode()
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "huge-pages-v1.bin", b)
	got, err := DecodeHugePages(b)
	if err != nil || !reflect.DeepEqual(got, goldenHugePages()) {
		t.Errorf("got %+v, %v", got, err)
	}
	if size := got.Size(); size != 4*HugePageSize {
		t.Errorf("a file of %d bytes", size)
	}
}

func TestHugePagesRefusals(t *testing.T) {
	put := func(at int, v uint64) func(b []byte) []byte {
		return func(b []byte) []byte {
			binary.LittleEndian.PutUint64(b[at:], v)
			return withSum(b)
		}
	}
	for _, c := range []struct {
		name string
		edit func(b []byte) []byte
		want error
	}{
		{"empty", func([]byte) []byte { return nil }, ErrTruncated},
		{"cut", func(b []byte) []byte { return b[:len(b)-1] }, ErrTruncated},
		{"all zeros", func(b []byte) []byte { clear(b); return b }, ErrMagic},
		{"version + 1", func(b []byte) []byte { b[8]++; return b }, ErrVersion},
		{"one bit", func(b []byte) []byte { b[70] ^= 4; return b }, ErrChecksum},
		{"many pages", put(40, MaxHugePages+1), ErrTooLarge},
		{"fewer pages than there are", put(40, 2), ErrInvalid},
		{"reserved", put(48, 1), ErrInvalid},
		{"not a huge page's place", put(72, 8193), ErrInvalid},
		{"out of order", put(80, 4096), ErrInvalid},
		{"twice", put(80, 8192), ErrInvalid},
		{"outside of RAM", put(80, 1<<16), ErrInvalid},
		{"far outside of RAM", put(80, 1<<64-512), ErrInvalid},
		{"beyond RAM", put(16, 1<<16-1), ErrInvalid},
	} {
		b, err := goldenHugePages().Encode()
		if err != nil {
			t.Fatal(err)
		}
		if h, err := DecodeHugePages(c.edit(b)); !errors.Is(err, c.want) || h != nil {
			t.Errorf("%s: got %v, %v, want %v", c.name, h, err, c.want)
		}
	}
	for _, h := range []*HugePages{{Snapshot: "xyz"}, {Snapshot: strings.Repeat("a5", 16), RAM: 4, Pages: []uint64{0}}} {
		if _, err := h.Encode(); err == nil {
			t.Errorf("encoded %+v", h)
		}
	}
}

func FuzzDecodeHugePages(f *testing.F) {
	b, err := goldenHugePages().Encode()
	if err != nil {
		f.Fatal(err)
	}
	fuzzSealed(f, b, HugePagesHeaderSize, func(b []byte) ([]byte, error) {
		h, err := DecodeHugePages(b)
		if err != nil {
			return nil, nil
		}
		return h.Encode()
	})
}
