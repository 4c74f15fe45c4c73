package snapshot

import (
	"bytes"
	"encoding/binary"
	"errors"
	"reflect"
	"strings"
	"testing"
)

func goldenWorkingSet() *WorkingSet {
	return &WorkingSet{
		Snapshot: strings.Repeat("5a", 16),
		RAM:      1 << 17,
		Written:  []PageRange{{0, 1}, {1, 2}, {4096, 100}, {1<<17 - 1, 1}},
		Read:     []uint64{512, 1024, 1<<17 - 512},
	}
}

func TestWorkingSetGolden(t *testing.T) {
	b, err := goldenWorkingSet().Encode()
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "working-set-v2.bin", b)
	got, err := DecodeWorkingSet(b)
	if err != nil || !reflect.DeepEqual(got, goldenWorkingSet()) {
		t.Errorf("got %+v, %v", got, err)
	}
}

// withSum makes the checksum of an edited file right again.
func withSum(b []byte) []byte {
	binary.LittleEndian.PutUint32(b[12:], headerSum(b))
	return b
}

func TestWorkingSetRefusals(t *testing.T) {
	entry := func(i int, start, count uint64) func(b []byte) []byte {
		return func(b []byte) []byte {
			binary.LittleEndian.PutUint64(b[64+16*i:], start)
			binary.LittleEndian.PutUint64(b[64+16*i+8:], count)
			return withSum(b)
		}
	}
	read := func(i int, page uint64) func(b []byte) []byte {
		return func(b []byte) []byte {
			binary.LittleEndian.PutUint64(b[64+16*4+8*i:], page)
			return withSum(b)
		}
	}
	for _, c := range []struct {
		name string
		edit func(b []byte) []byte
		want error
	}{
		{"empty", func([]byte) []byte { return nil }, ErrTruncated},
		{"half a header", func(b []byte) []byte { return b[:63] }, ErrTruncated},
		{"all zeros", func(b []byte) []byte { clear(b); return b }, ErrMagic},
		{"version + 1", func(b []byte) []byte { b[8]++; return b }, ErrVersion},
		{"version - 1", func(b []byte) []byte { b[8]--; return withSum(b) }, ErrInvalid},
		{"one bit", func(b []byte) []byte { b[70] ^= 4; return b }, ErrChecksum},
		{"cut", func(b []byte) []byte { return b[:len(b)-1] }, ErrChecksum},
		{"grown", func(b []byte) []byte { return append(b, 0) }, ErrChecksum},
		{"too long", func(b []byte) []byte { return append(b, make([]byte, MaxWorkingSetSize)...) }, ErrTooLarge},
		{"another count", func(b []byte) []byte { b[40]++; return withSum(b) }, ErrInvalid},
		{"a huge count", func(b []byte) []byte { b[47]++; return withSum(b) }, ErrInvalid},
		{"another count of huge pages", func(b []byte) []byte { b[48]--; return withSum(b) }, ErrInvalid},
		{"many huge pages", func(b []byte) []byte { b[55]++; return withSum(b) }, ErrInvalid},
		{"half an entry", func(b []byte) []byte { return withSum(b[:len(b)-8]) }, ErrInvalid},
		{"reserved", func(b []byte) []byte { b[56] = 1; return withSum(b) }, ErrInvalid},
		{"no page", entry(1, 1, 0), ErrInvalid},
		{"overlap", entry(1, 0, 1), ErrInvalid},
		{"outside of RAM", entry(3, 1<<17, 1), ErrInvalid},
		{"beyond RAM", entry(3, 1<<17-1, 2), ErrInvalid},
		{"wraps", entry(3, 1<<17-1, 1<<64-1), ErrInvalid},
		{"many pages", entry(2, 4096, MaxWorkingSetPages), ErrTooLarge},
		{"no place for a huge page", read(1, 1000), ErrInvalid},
		{"huge pages out of order", read(1, 512), ErrInvalid},
		{"a huge page outside of RAM", read(2, 1<<17), ErrInvalid},
	} {
		b, err := goldenWorkingSet().Encode()
		if err != nil {
			t.Fatal(err)
		}
		if w, err := DecodeWorkingSet(c.edit(b)); !errors.Is(err, c.want) || w != nil {
			t.Errorf("%s: got %v, %v, want %v", c.name, w, err, c.want)
		}
	}
	for _, id := range []string{"", "xyz", strings.Repeat("5a", 17)} {
		if _, err := (&WorkingSet{Snapshot: id}).Encode(); err == nil {
			t.Errorf("encoded with id %q", id)
		}
	}
}

func FuzzDecodeWorkingSet(f *testing.F) {
	b, err := goldenWorkingSet().Encode()
	if err != nil {
		f.Fatal(err)
	}
	fuzzSealed(f, b, workingSetHeaderSize, func(b []byte) ([]byte, error) {
		w, err := DecodeWorkingSet(b)
		if err != nil {
			return nil, nil
		}
		return w.Encode()
	})
}

// fuzzSealed holds that what is accepted of a format with a checksum encodes to itself.
// again decodes and encodes; it returns nothing for what is refused.
func fuzzSealed(f *testing.F, golden []byte, header int, again func([]byte) ([]byte, error)) {
	f.Add(golden)
	f.Fuzz(func(t *testing.T, b []byte) {
		// With the checksum made right the fuzzer gets to the checks behind.
		sealed := bytes.Clone(b)
		if len(sealed) >= header {
			sealed = withSum(sealed)
		}
		for _, b := range [][]byte{b, sealed} {
			if out, err := again(b); err != nil || out != nil && !bytes.Equal(out, b) {
				t.Fatalf("accepted bytes do not encode to themselves: %v", err)
			}
		}
	})
}
