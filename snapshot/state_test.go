package snapshot

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the golden files anew")

func goldenState(t testing.TB) *State {
	t.Helper()
	s := new(State)
	for _, section := range []Section{
		{"vm", []byte(`{"version":1}`)},
		{"vcpu/0", bytes.Repeat([]byte{0xa5}, 100)},
		{"device/blk0", []byte("block device")},
		{"empty", nil},
	} {
		if err := s.Add(section.ID, section.Data); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Fatalf("%s: the format changed: a new version number is due", name)
	}
}

func encode(t testing.TB, s *State) []byte {
	t.Helper()
	b, err := s.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestStateGolden(t *testing.T) {
	b := encode(t, goldenState(t))
	golden(t, "state-v1.bin", b)
	got, err := ReadState(bytes.NewReader(b), int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range goldenState(t).Sections {
		if got.Sections[i].ID != want.ID || !bytes.Equal(got.Sections[i].Data, want.Data) {
			t.Errorf("section %d: got %v, want %v", i, got.Sections[i], want)
		}
	}
	if data, ok := got.Get("device/blk0"); !ok || string(data) != "block device" {
		t.Errorf("Get(device/blk0) = %q, %v", data, ok)
	}
	if _, ok := got.Get("device/blk1"); ok {
		t.Error("Get of a section that is not there succeeded")
	}
}

func TestStateEmpty(t *testing.T) {
	got, err := DecodeState(encode(t, &State{}))
	if err != nil || len(got.Sections) != 0 {
		t.Fatalf("got %v, %v", got, err)
	}
}

// reseal makes the checksums of an edited file right again, so that a test
// reaches the check behind them.
func reseal(b []byte) []byte {
	n := binary.LittleEndian.Uint32(b[24:])
	if end := 64 + 80*int(n); end <= len(b) {
		binary.LittleEndian.PutUint32(b[28:], crc32.Checksum(b[64:end], castagnoli))
	}
	binary.LittleEndian.PutUint32(b[12:], headerSum(b[:64]))
	return b
}

func TestStateRefusals(t *testing.T) {
	for _, c := range []struct {
		name string
		edit func(b []byte) []byte
		want error
	}{
		{"empty", func(b []byte) []byte { return nil }, ErrTruncated},
		{"half a header", func(b []byte) []byte { return b[:32] }, ErrTruncated},
		{"other file", func(b []byte) []byte { b[0] ^= 1; b[8] = 9; return b }, ErrMagic},
		{"version - 1", func(b []byte) []byte { b[8]--; return b }, ErrVersion},
		{"version + 1, other header", func(b []byte) []byte { b[8]++; b[30] = 7; return b }, ErrVersion},
		{"header bit", func(b []byte) []byte { b[24] ^= 4; return b }, ErrChecksum},
		{"table bit", func(b []byte) []byte { b[70] ^= 4; return b }, ErrChecksum},
		{"data bit", func(b []byte) []byte { b[len(b)-1] ^= 0x80; return b }, ErrChecksum},
		{"cut", func(b []byte) []byte { return b[:len(b)-1] }, ErrTruncated},
		{"grown", func(b []byte) []byte { return append(b, 0) }, ErrInvalid},
		{"reserved", func(b []byte) []byte { b[40] = 1; return reseal(b) }, ErrInvalid},
		{"entry reserved", func(b []byte) []byte { b[64+76] = 1; return reseal(b) }, ErrInvalid},
		{"huge", func(b []byte) []byte { binary.LittleEndian.PutUint64(b[16:], 1<<62); return reseal(b) }, ErrTooLarge},
		{"many sections", func(b []byte) []byte { b[26] = 1; return reseal(b) }, ErrTooLarge},
		{"sections beyond the length", func(b []byte) []byte { b[24] = 255; return reseal(b) }, ErrInvalid},
		{"section longer than the file", func(b []byte) []byte { b[64+64+7] = 0x7f; return reseal(b) }, ErrInvalid},
		{"section shorter", func(b []byte) []byte { b[64+64]--; return reseal(b) }, ErrChecksum},
		{"name used twice", func(b []byte) []byte { copy(b[64+80:], b[64:64+64]); return reseal(b) }, ErrInvalid},
		{"no name", func(b []byte) []byte { clear(b[64:128]); return reseal(b) }, ErrInvalid},
		{"name with a hole", func(b []byte) []byte { b[64+10] = 'x'; return reseal(b) }, ErrInvalid},
		{"name not text", func(b []byte) []byte { b[64] = 7; return reseal(b) }, ErrInvalid},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := c.edit(encode(t, goldenState(t)))
			if _, err := DecodeState(b); !errors.Is(err, c.want) {
				t.Errorf("DecodeState: %v, want %v", err, c.want)
			}
			if _, err := ReadState(bytes.NewReader(b), int64(len(b))); !errors.Is(err, c.want) {
				t.Errorf("ReadState: %v, want %v", err, c.want)
			}
		})
	}
}

// E4: any flipped bit and any cut of a state file is an error.
func TestStateDamageE4(t *testing.T) {
	good := encode(t, goldenState(t))
	for bit := range len(good) * 8 {
		b := bytes.Clone(good)
		b[bit/8] ^= 1 << (bit % 8)
		if _, err := DecodeState(b); err == nil {
			t.Fatalf("bit %d flipped and not noticed", bit)
		}
	}
	for n := range len(good) {
		if _, err := DecodeState(good[:n]); err == nil {
			t.Fatalf("cut at %d and not noticed", n)
		}
	}
}

// A header that promises more than there is must not make the reader reserve
// it: the size is compared first.
func TestReadStateBounded(t *testing.T) {
	b := encode(t, goldenState(t))
	binary.LittleEndian.PutUint64(b[16:], MaxStateSize)
	reseal(b)
	allocated := testing.Benchmark(func(tb *testing.B) {
		tb.ReportAllocs()
		for range tb.N {
			if _, err := ReadState(bytes.NewReader(b), int64(len(b))); !errors.Is(err, ErrTruncated) {
				tb.Fatal(err)
			}
		}
	}).AllocedBytesPerOp()
	if allocated > 4096 {
		t.Errorf("%d bytes reserved for a short file", allocated)
	}
}

func TestStateLimits(t *testing.T) {
	s := new(State)
	for _, id := range []string{"", strings.Repeat("x", 65), "a b", "a\x00", "ü"} {
		if err := s.Add(id, nil); !errors.Is(err, ErrInvalid) {
			t.Errorf("Add(%q): %v", id, err)
		}
	}
	if err := s.Add(strings.Repeat("x", 64), nil); err != nil {
		t.Error(err)
	}
	if err := s.Add(strings.Repeat("x", 64), nil); !errors.Is(err, ErrInvalid) {
		t.Errorf("second section of a name: %v", err)
	}
	big := &State{Sections: []Section{{"a", make([]byte, MaxStateSize/2)}, {"b", make([]byte, MaxStateSize/2)}}}
	if _, err := big.Encode(); !errors.Is(err, ErrTooLarge) {
		t.Errorf("too many bytes: %v", err)
	}
	many := new(State)
	for i := range MaxSections + 1 {
		many.Sections = append(many.Sections, Section{ID: fmt.Sprint("s", i)})
	}
	if _, err := many.Encode(); !errors.Is(err, ErrTooLarge) {
		t.Errorf("too many sections: %v", err)
	}
	if _, err := (&State{Sections: []Section{{"a", nil}, {"a", nil}}}).Encode(); !errors.Is(err, ErrInvalid) {
		t.Errorf("name used twice: %v", err)
	}
}

func FuzzDecodeState(f *testing.F) {
	f.Add(encode(f, goldenState(f)))
	f.Add(encode(f, &State{}))
	f.Fuzz(func(t *testing.T, b []byte) {
		// With the checksums made right the fuzzer gets to the checks behind.
		for _, b := range [][]byte{b, fixed(b)} {
			s, err := DecodeState(b)
			if err != nil {
				continue
			}
			if again, err := s.Encode(); err != nil || !bytes.Equal(again, b) {
				t.Fatalf("accepted bytes do not encode to themselves: %v", err)
			}
		}
	})
}

// fixed returns a copy of b with right magic, version, length and checksums.
func fixed(b []byte) []byte {
	if len(b) < 64 {
		return b
	}
	b = bytes.Clone(b)
	copy(b, stateMagic)
	binary.LittleEndian.PutUint32(b[8:], stateVersion)
	binary.LittleEndian.PutUint64(b[16:], uint64(len(b)))
	n := int(binary.LittleEndian.Uint32(b[24:]))
	if n <= MaxSections && 64+80*n <= len(b) {
		rest := b[64+80*n:]
		for i := range n {
			entry := b[64+80*i:][:80]
			if l := binary.LittleEndian.Uint64(entry[64:]); l <= uint64(len(rest)) {
				binary.LittleEndian.PutUint32(entry[72:], crc32.Checksum(rest[:l], castagnoli))
				rest = rest[l:]
			}
		}
	}
	return reseal(b)
}

func BenchmarkState(b *testing.B) {
	s := new(State)
	r := rand.New(rand.NewPCG(1, 2))
	for i := range 32 {
		data := make([]byte, 20<<10)
		for j := range data {
			data[j] = byte(r.Uint32())
		}
		if err := s.Add(fmt.Sprint("vcpu/", i), data); err != nil {
			b.Fatal(err)
		}
	}
	for b.Loop() {
		enc, err := s.Encode()
		if err != nil {
			b.Fatal(err)
		}
		if _, err := DecodeState(enc); err != nil {
			b.Fatal(err)
		}
	}
}
