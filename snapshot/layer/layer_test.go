package layer

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/forkvm/forkvm/snapshot"
)

var update = flag.Bool("update", false, "write the golden files anew")

func readAll(t testing.TB, f *os.File) []byte {
	t.Helper()
	st := must(f.Stat())(t)
	b := make([]byte, st.Size())
	if _, err := f.ReadAt(b, 0); err != nil && !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	return b
}

func TestLayerGolden(t *testing.T) {
	f := tempFile(t)
	sealGolden(t, f, true)
	got := readAll(t, f)
	path := filepath.Join("testdata", "layer-v1.bin")
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want := must(os.ReadFile(path))(t)
	if !bytes.Equal(got, want) {
		t.Fatal("the format changed: a new version number is due")
	}
	l := must(Open(writeFile(t, want)))(t)
	if l.ID() != goldenID || l.Kind() != KindMemory || l.Units() != 256 || l.Raw() || !l.Checksummed() {
		t.Errorf("id %s, kind %v, units %d, raw %v, checksummed %v", l.ID(), l.Kind(), l.Units(), l.Raw(), l.Checksummed())
	}
	if !slices.Equal(l.Extents(), goldenExtents()) || l.Stored() != 4 {
		t.Errorf("extents %v, stored %d", l.Extents(), l.Stored())
	}
	if err := l.Verify(context.Background()); err != nil {
		t.Error(err)
	}
}

func TestSealMemfdWithoutChecksums(t *testing.T) {
	f := memfd(t)
	l := sealGolden(t, f, false)
	if l.Checksummed() {
		t.Error("checksummed")
	}
	if err := l.Verify(context.Background()); !errors.Is(err, ErrNoChecksums) {
		t.Errorf("verify: %v", err)
	}
	again := must(Open(f))(t)
	if !slices.Equal(again.Extents(), l.Extents()) {
		t.Errorf("extents %v", again.Extents())
	}
}

func TestSealEmpty(t *testing.T) {
	for _, checksums := range []bool{false, true} {
		f := tempFile(t)
		l := must(Seal(f, SealOptions{Kind: KindDisk, Units: 1, Checksums: checksums}))(t)
		if len(l.ID()) != 32 {
			t.Errorf("id %q", l.ID())
		}
		again := must(Open(f))(t)
		if len(again.Extents()) != 0 || again.ID() != l.ID() {
			t.Errorf("%v", again)
		}
		if err := again.Verify(context.Background()); checksums && err != nil {
			t.Error(err)
		}
	}
}

func TestSealRefuses(t *testing.T) {
	for name, o := range map[string]SealOptions{
		"kind":         {Kind: 7, Units: 9},
		"units":        {Kind: KindDisk},
		"many units":   {Kind: KindDisk, Units: maxUnits + 1},
		"id":           {Kind: KindDisk, Units: 9, ID: "xyz"},
		"outside":      {Kind: KindDisk, Units: 9, Extents: []Extent{{9, 1, ZeroExtent}}},
		"overflow":     {Kind: KindDisk, Units: 9, Extents: []Extent{{^uint64(0), 2, ZeroExtent}}},
		"empty extent": {Kind: KindDisk, Units: 9, Extents: []Extent{{1, 0, ZeroExtent}}},
		"overlap":      {Kind: KindDisk, Units: 9, Extents: []Extent{{1, 2, ZeroExtent}, {2, 1, ZeroExtent}}},
		"order":        {Kind: KindDisk, Units: 9, Extents: []Extent{{4, 1, ZeroExtent}, {2, 1, ZeroExtent}}},
		"header page":  {Kind: KindDisk, Units: 9, Extents: []Extent{{4, 1, 0}}},
		"misaligned":   {Kind: KindDisk, Units: 9, Extents: []Extent{{4, 1, DataOffset + 1}}},
		"beyond file":  {Kind: KindDisk, Units: 9, Extents: []Extent{{4, 2, DataOffset + 4*UnitSize}}},
		"far":          {Kind: KindDisk, Units: 9, Extents: []Extent{{4, 2, 1<<63 - UnitSize}}},
		"negative":     {Kind: KindDisk, Units: 9, Extents: []Extent{{4, 2, -2}}},
	} {
		f := tempFile(t)
		if _, err := f.WriteAt(pattern(5, 1), DataOffset); err != nil {
			t.Fatal(err)
		}
		if _, err := Seal(f, o); !errors.Is(err, snapshot.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestCopyPacks(t *testing.T) {
	src := sealGolden(t, memfd(t), false)
	dst := tempFile(t)
	if err := Copy(context.Background(), dst, src); err != nil {
		t.Fatal(err)
	}
	got := must(Open(dst))(t)
	want := []Extent{
		{Start: 1, Count: 3, Offset: DataOffset},
		{Start: 10, Count: 100, Offset: ZeroExtent},
		{Start: 200, Count: 1, Offset: DataOffset + 3*UnitSize},
	}
	if !slices.Equal(got.Extents(), want) {
		t.Errorf("extents %v, want %v", got.Extents(), want)
	}
	if got.ID() != src.ID() || got.Kind() != src.Kind() || got.Units() != src.Units() {
		t.Error("copy has another identity")
	}
	if !bytes.Equal(contents(t, got), contents(t, src)) {
		t.Error("content differs")
	}
	if err := got.Verify(context.Background()); err != nil {
		t.Error(err)
	}
	if err := Copy(context.Background(), dst, src); !errors.Is(err, snapshot.ErrInvalid) {
		t.Errorf("copy over a file that is not empty: %v", err)
	}
}

// A layer at the bottom of a memory keeps short gaps as holes of its file, so that it
// takes few mappings, and is otherwise what Copy makes of it.
func TestWriteBottom(t *testing.T) {
	// At 251 begins a gap as long as a hole may be, behind the next run one that is longer.
	f := memfd(t)
	data := filled(6 * UnitSize)
	if _, err := f.WriteAt(data, DataOffset); err != nil {
		t.Fatal(err)
	}
	at := func(unit int64) int64 { return DataOffset + unit*UnitSize }
	extents := []Extent{
		{Start: 1, Count: 2, Offset: at(2)},
		{Start: 10, Count: 5, Offset: ZeroExtent},
		{Start: 250, Count: 1, Offset: at(0)},
		{Start: 251 + maxHole, Count: 2, Offset: at(4)},
		{Start: 254 + 2*maxHole, Count: 1, Offset: at(1)},
	}
	const units = 4 * maxHole
	src := must(Seal(f, SealOptions{Kind: KindMemory, Units: units, Extents: extents}))(t)
	nothing := must(Seal(memfd(t), SealOptions{Kind: KindMemory, Units: units}))(t)
	for name, layers := range map[string][]*Layer{"copy": {src}, "merge": {nothing, src}} {
		t.Run(name, func(t *testing.T) {
			dst := tempFile(t)
			if err := (Run{Layers: layers, Bottom: true, id: goldenID}).Write(context.Background(), dst, WriteOptions{Checksums: true}); err != nil {
				t.Fatal(err)
			}
			got := must(Open(dst))(t)
			if err := got.Verify(context.Background()); err != nil {
				t.Error(err)
			}
			if got.Stored() != 6 || len(got.Extents()) != len(extents) {
				t.Errorf("%d units stored in extents %v", got.Stored(), got.Extents())
			}
			if !bytes.Equal(contents(t, got), contents(t, src)) {
				t.Error("content differs")
			}
			long := int64(252 + maxHole) // units of data that end with the hole of full length
			spans := []Extent{{1, 252 + maxHole, at(0)}, {254 + 2*maxHole, 1, at(long)}}
			if !slices.Equal(got.Spans(), spans) {
				t.Errorf("spans %v, want %v", got.Spans(), spans)
			}
			if info := must(dst.Stat())(t); info.Sys().(*syscall.Stat_t).Blocks*512 > 12*UnitSize {
				t.Errorf("file takes %d blocks for 6 units", info.Sys().(*syscall.Stat_t).Blocks)
			}
			// What a span takes for a hole is read as zeros by whoever maps it.
			if _, err := dst.WriteAt([]byte{1}, at(100)); err != nil {
				t.Fatal(err)
			}
			if err := verifyHoles(dst, got.Extents()); !errors.Is(err, snapshot.ErrInvalid) {
				t.Errorf("data in a hole: %v", err)
			}
		})
	}
	if got := src.Spans(); len(got) != 4 {
		t.Errorf("a packed layer has spans %v", got)
	}
}

func TestCopyLargeAndCancelled(t *testing.T) {
	r := testRand(t)
	f := memfd(t)
	const units = 1500
	if _, err := f.WriteAt(filled(units*UnitSize), DataOffset); err != nil {
		t.Fatal(err)
	}
	order := r.Perm(units)
	var extents []Extent
	for i, slot := range order {
		extents = append(extents, Extent{Start: uint64(2 * i), Count: 1, Offset: DataOffset + int64(slot)*UnitSize})
	}
	src := must(Seal(f, SealOptions{Kind: KindMemory, Units: 2 * units, Extents: extents}))(t)
	dst := tempFile(t)
	if err := Copy(context.Background(), dst, src); err != nil {
		t.Fatal(err)
	}
	got := must(Open(dst))(t)
	if !bytes.Equal(contents(t, got), contents(t, src)) {
		t.Error("content differs")
	}
	if err := got.Verify(context.Background()); err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := Copy(ctx, tempFile(t), src); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled copy: %v", err)
	}
	if err := got.Verify(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled verify: %v", err)
	}
}

// resum makes the header's checksum right again after an edit.
func resum(b []byte) []byte {
	binary.LittleEndian.PutUint32(b[12:], headerSum(b))
	return b
}

// reindex makes the index's checksum right, too.
func reindex(b []byte) []byte {
	at := DataOffset + binary.LittleEndian.Uint64(b[48:])*UnitSize
	binary.LittleEndian.PutUint32(b[80:], crc32.Checksum(b[at:], castagnoli))
	return resum(b)
}

func TestOpenRefusals(t *testing.T) {
	f := tempFile(t)
	sealGolden(t, f, true)
	good := readAll(t, f)
	const index = DataOffset + 5*UnitSize
	le := binary.LittleEndian
	for _, c := range []struct {
		name string
		edit func(b []byte) []byte
		want error
	}{
		{"empty", func(b []byte) []byte { return nil }, snapshot.ErrTruncated},
		{"one byte", func(b []byte) []byte { return b[:1] }, snapshot.ErrTruncated},
		{"4095 bytes", func(b []byte) []byte { return b[:4095] }, snapshot.ErrTruncated},
		{"header only", func(b []byte) []byte { return b[:4096] }, snapshot.ErrTruncated},
		{"half", func(b []byte) []byte { return b[:len(b)/2] }, snapshot.ErrTruncated},
		{"len - 1", func(b []byte) []byte { return b[:len(b)-1] }, snapshot.ErrTruncated},
		{"len - 4096", func(b []byte) []byte { return b[:len(b)-4096] }, snapshot.ErrTruncated},
		{"grown by a page", func(b []byte) []byte { return append(b, make([]byte, 4096)...) }, snapshot.ErrInvalid},
		{"other file", func(b []byte) []byte { b[1] = 'x'; b[8] = 9; return b }, snapshot.ErrMagic},
		{"version - 1", func(b []byte) []byte { b[8]--; return b }, snapshot.ErrVersion},
		{"version + 1, other header", func(b []byte) []byte { b[8]++; b[99] = 1; return b }, snapshot.ErrVersion},
		{"header bit", func(b []byte) []byte { b[4000] ^= 1; return b }, snapshot.ErrChecksum},
		{"index bit", func(b []byte) []byte { b[len(b)-1] ^= 1; return b }, snapshot.ErrChecksum},
		{"reserved", func(b []byte) []byte { b[4000] = 1; return resum(b) }, snapshot.ErrInvalid},
		{"kind", func(b []byte) []byte { b[16] = 3; return resum(b) }, snapshot.ErrInvalid},
		{"flags", func(b []byte) []byte { b[20] |= 2; return resum(b) }, snapshot.ErrInvalid},
		{"no units", func(b []byte) []byte { le.PutUint64(b[40:], 0); return resum(b) }, snapshot.ErrInvalid},
		{"huge span", func(b []byte) []byte { le.PutUint64(b[40:], 1<<63); return resum(b) }, snapshot.ErrInvalid},
		{"huge data", func(b []byte) []byte { le.PutUint64(b[48:], 1<<60); return resum(b) }, snapshot.ErrInvalid},
		{"huge index", func(b []byte) []byte { le.PutUint64(b[56:], 1<<60); return resum(b) }, snapshot.ErrInvalid},
		{"chunks", func(b []byte) []byte { le.PutUint64(b[64:], 9); return resum(b) }, snapshot.ErrInvalid},
		{"unit size", func(b []byte) []byte { le.PutUint32(b[84:], 512); return resum(b) }, snapshot.ErrInvalid},
		{"overlapping extents", func(b []byte) []byte { le.PutUint64(b[index+8:], 3); return reindex(b) }, snapshot.ErrInvalid},
		{"extent outside the span", func(b []byte) []byte { le.PutUint64(b[index+72:], 256); return reindex(b) }, snapshot.ErrInvalid},
		{"extent overflows", func(b []byte) []byte { le.PutUint64(b[index+80:], ^uint64(0)); return reindex(b) }, snapshot.ErrInvalid},
		{"data in the index", func(b []byte) []byte { le.PutUint64(b[index+88:], index); return reindex(b) }, snapshot.ErrInvalid},
		{"data in the header", func(b []byte) []byte { le.PutUint64(b[index+88:], 0); return reindex(b) }, snapshot.ErrInvalid},
		{"data not aligned", func(b []byte) []byte { le.PutUint64(b[index+88:], 4097); return reindex(b) }, snapshot.ErrInvalid},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := Open(writeFile(t, c.edit(bytes.Clone(good))))
			if !errors.Is(err, c.want) {
				t.Fatalf("got %v, want %v", err, c.want)
			}
		})
	}
	t.Run("directory", func(t *testing.T) {
		d := must(os.Open(t.TempDir()))(t)
		defer d.Close()
		if _, err := Open(d); !errors.Is(err, snapshot.ErrInvalid) {
			t.Error(err)
		}
	})
}

// A sparse file may claim any number of extents; the claim alone must not cost
// memory.
func TestOpenSparseClaim(t *testing.T) {
	f := tempFile(t)
	h := header{kind: KindDisk, units: 1 << 40, extents: 1 << 32, indexSum: 1}
	h.fileSize = DataOffset + h.extents*extentSize
	if _, err := f.WriteAt(h.encode(), 0); err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(int64(h.fileSize)); err != nil {
		t.Skip("file system has no files of 96 GiB:", err)
	}
	if _, err := Open(f); !errors.Is(err, snapshot.ErrInvalid) {
		t.Fatal(err)
	}
}

// E4: with verification, every flipped bit in header, data and index is found.
func TestVerifyFlippedBitsE4(t *testing.T) {
	f := tempFile(t)
	l := sealGolden(t, f, true)
	size := len(readAll(t, f))
	r := testRand(t)
	offsets := []int{0, 8, 12, 96, 4095, DataOffset, size - 1}
	for range 100 {
		offsets = append(offsets, r.IntN(size))
	}
	for _, off := range offsets {
		var b [1]byte
		if _, err := f.ReadAt(b[:], int64(off)); err != nil {
			t.Fatal(err)
		}
		flip := byte(1) << r.IntN(8)
		if _, err := f.WriteAt([]byte{b[0] ^ flip}, int64(off)); err != nil {
			t.Fatal(err)
		}
		if err := l.Verify(context.Background()); err == nil {
			t.Errorf("bit flipped at %d and not found", off)
		}
		if again, err := Open(f); err == nil {
			if err := again.Verify(context.Background()); err == nil {
				t.Errorf("bit flipped at %d and not found after opening", off)
			}
		}
		if _, err := f.WriteAt(b[:], int64(off)); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.Verify(context.Background()); err != nil {
		t.Error(err)
	}
	// A sound file of another layer in the same place.
	other := must(Seal(tempFile(t), SealOptions{Kind: KindMemory, Units: 256, Checksums: true}))(t)
	if err := f.Truncate(0); err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt(readAll(t, other.File()), 0); err != nil {
		t.Fatal(err)
	}
	if err := l.Verify(context.Background()); !errors.Is(err, snapshot.ErrChecksum) {
		t.Errorf("other layer in place: %v", err)
	}
}

func TestDupAndClose(t *testing.T) {
	l := must(Open(writeFile(t, must(os.ReadFile("testdata/layer-v1.bin"))(t))))(t)
	d := must(l.Dup())(t)
	if err := errors.Join(l.Close(), l.Close()); err != nil {
		t.Error(err)
	}
	if err := d.Verify(context.Background()); err != nil {
		t.Errorf("duplicate after the first is closed: %v", err)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	if _, err := d.Dup(); err == nil {
		t.Error("closed layer duplicated")
	}
}

// C6: images that are no whole number of sectors are refused, never cut.
func TestOpenRawSizesC6(t *testing.T) {
	for size, good := range map[int64]bool{
		0: false, 1: false, 511: false, 512: true, 513: false, 4096: true, 4608: true,
		123_456_789: false, 2<<40 + 512: true,
	} {
		f := tempFile(t)
		if err := f.Truncate(size); err != nil {
			t.Logf("size %d: %v", size, err)
			continue
		}
		l, err := OpenRaw(f)
		if good != (err == nil) {
			t.Errorf("size %d: %v", size, err)
		}
		if err != nil {
			if !errors.Is(err, snapshot.ErrInvalid) || !strings.Contains(err.Error(), "512") {
				t.Errorf("size %d: %v", size, err)
			}
			continue
		}
		if want := uint64(size+4095) / 4096; l.Units() != want || l.Kind() != KindDisk || !l.Raw() {
			t.Errorf("size %d: %d units, want %d", size, l.Units(), want)
		}
	}
}

// C4: another image of the same size in the place of the one that is expected.
func TestOpenRawTagC4(t *testing.T) {
	a, b := filled(1<<20), filled(1<<20)
	l := must(OpenRaw(writeFile(t, a)))(t)
	if same := must(OpenRaw(writeFile(t, a)))(t); same.ID() != l.ID() {
		t.Error("the same content has two tags")
	}
	if _, err := OpenRawWith(writeFile(t, b), RawOptions{ID: l.ID()}); !errors.Is(err, snapshot.ErrChecksum) {
		t.Errorf("other image accepted: %v", err)
	}
	if _, err := OpenRawWith(writeFile(t, a), RawOptions{ID: l.ID()}); err != nil {
		t.Error(err)
	}
	// With the checksum known the tag is not computed.
	known := RawOptions{ID: l.ID(), Checksum: must(l.RawChecksum(context.Background()))(t)}
	if again, err := OpenRawWith(writeFile(t, a), known); err != nil || again.ID() != l.ID() {
		t.Errorf("the image itself: %v", err)
	}
	for _, other := range [][]byte{b, a[:len(a)-UnitSize], append(filled(1), a[1:]...)} {
		if _, err := OpenRawWith(writeFile(t, other), known); !errors.Is(err, snapshot.ErrChecksum) {
			t.Errorf("other image accepted: %v", err)
		}
	}
	// Earlier builds knew the checksum of the content only.
	known.Checksum, _, _ = strings.Cut(known.Checksum, "/")
	if old, err := OpenRawWith(writeFile(t, a), known); err != nil || old.Verify(context.Background()) != nil {
		t.Errorf("checksum in the old form: %v", err)
	}
	if _, err := OpenRawWith(writeFile(t, b), known); !errors.Is(err, snapshot.ErrChecksum) {
		t.Errorf("other image accepted: %v", err)
	}
	if _, err := OpenRawWith(writeFile(t, a), RawOptions{ID: "x", Checked: true}); err == nil {
		t.Error("an image that was checked against nothing was accepted")
	}
}

func TestRawChecksum(t *testing.T) {
	ctx := context.Background()
	data := make([]byte, 5<<20+512)
	copy(data[2<<20+100:], filled(1<<20))
	copy(data[5<<20:], filled(512))
	dense := must(OpenRaw(writeFile(t, data)))(t)
	sparseFile := tempFile(t)
	if err := sparseFile.Truncate(int64(len(data))); err != nil {
		t.Fatal(err)
	}
	for _, at := range []int{2 << 20, 3 << 20, 5 << 20} {
		if _, err := sparseFile.WriteAt(data[at:min(at+1<<20, len(data))], int64(at)); err != nil {
			t.Fatal(err)
		}
	}
	sparse := must(OpenRaw(sparseFile))(t)
	if err := dense.Verify(ctx); !errors.Is(err, ErrNoChecksums) {
		t.Errorf("verify with no checksum known: %v", err)
	}
	sum := must(dense.RawChecksum(ctx))(t)
	if got := must(sparse.RawChecksum(ctx))(t); got != sum {
		t.Errorf("holes count differently from zeros: %s, %s", got, sum)
	}
	known := must(OpenRawWith(sparseFile, RawOptions{Checksum: sum}))(t)
	if err := known.Verify(ctx); err != nil {
		t.Error(err)
	}
	if _, err := sparseFile.WriteAt([]byte{1}, 4<<20+77); err != nil {
		t.Fatal(err)
	}
	if err := known.Verify(ctx); !errors.Is(err, snapshot.ErrChecksum) {
		t.Errorf("changed image: %v", err)
	}
}

func TestCopyRaw(t *testing.T) {
	ctx := context.Background()
	f := tempFile(t)
	const size = 8<<20 + 1536
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	for _, at := range []int64{0, 3<<20 + 512, size - 512} {
		if _, err := f.WriteAt(filled(512), at); err != nil {
			t.Fatal(err)
		}
	}
	raw := must(OpenRaw(f))(t)
	dst := tempFile(t)
	if err := Copy(ctx, dst, raw); err != nil {
		t.Fatal(err)
	}
	got := must(Open(dst))(t)
	if got.ID() != raw.ID() || got.Units() != raw.Units() {
		t.Error("copy has another identity")
	}
	if !bytes.Equal(contents(t, got), contents(t, raw)) {
		t.Error("content differs")
	}
	if got.Stored() > 1024 {
		t.Errorf("%d units stored: holes were copied", got.Stored())
	}
	if err := got.Verify(ctx); err != nil {
		t.Error(err)
	}
}

func FuzzOpen(f *testing.F) {
	good := must(os.ReadFile("testdata/layer-v1.bin"))(f)
	f.Add(good[:headerUsed], good[len(good)-4*extentSize-4:], uint16(5))
	f.Fuzz(func(t *testing.T, head, index []byte, dataUnits uint16) {
		if len(head) > DataOffset || dataUnits > 64 {
			return
		}
		b := make([]byte, DataOffset+int(dataUnits)*UnitSize, DataOffset+int(dataUnits)*UnitSize+len(index))
		copy(b, head)
		b = append(b, index...)
		// Once as they are, once with what a fuzzer cannot guess made right.
		for _, fix := range []bool{false, true} {
			if fix {
				copy(b, magic)
				binary.LittleEndian.PutUint32(b[8:], version)
				binary.LittleEndian.PutUint64(b[48:], uint64(dataUnits))
				binary.LittleEndian.PutUint64(b[72:], uint64(len(b)))
				binary.LittleEndian.PutUint32(b[84:], UnitSize)
				binary.LittleEndian.PutUint32(b[88:], ChunkSize)
				reindex(b)
			}
			file := newTop(t)
			if _, err := file.WriteAt(b, 0); err != nil {
				t.Fatal(err)
			}
			l, err := Open(file)
			if err == nil {
				// Whatever was accepted can be read in full inside the file.
				for _, e := range l.Extents() {
					if e.Offset != ZeroExtent && e.Offset+int64(e.Count)*UnitSize > int64(len(b)) {
						t.Fatalf("extent %v outside the file", e)
					}
				}
				_ = l.Verify(context.Background())
			}
			file.Close()
		}
	})
}

func FuzzReadIndex(f *testing.F) {
	f.Add(encodeIndex(goldenExtents(), []uint32{1}), uint64(256), uint64(5), uint64(4))
	f.Fuzz(func(t *testing.T, b []byte, units, data, extents uint64) {
		h := header{kind: KindDisk, units: units, data: data, extents: extents, indexSum: crc32.Checksum(b, castagnoli)}
		h.fileSize = DataOffset + h.data*UnitSize + h.extents*extentSize
		if h.check() != nil || extents*extentSize != uint64(len(b)) {
			return
		}
		got, _, err := readIndex(bytes.NewReader(b), h)
		if err != nil {
			return
		}
		if !bytes.Equal(encodeIndex(got, nil), b) {
			t.Fatal("accepted index does not encode to itself")
		}
		if f := flatten([]*Layer{{core: &core{extents: got}}}); len(f) > len(got) {
			t.Fatal("flattened index grew")
		}
	})
}

// BenchmarkCopy is what putting a layer into a store costs: packing and
// checksums, of pages that lie together and of single ones.
func BenchmarkCopy(b *testing.B) {
	const units = 16 << 10
	f := memfd(b)
	if _, err := f.WriteAt(filled(units*UnitSize), DataOffset); err != nil {
		b.Fatal(err)
	}
	single := make([]Extent, units)
	for i := range single {
		// Every second page, in reverse: no two can be read at once.
		single[i] = Extent{Start: uint64(2 * i), Count: 1, Offset: DataOffset + int64(units-1-i)*UnitSize}
	}
	for name, extents := range map[string][]Extent{"one": {{0, units, DataOffset}}, "single": single} {
		b.Run("extents="+name, func(b *testing.B) {
			src := must(Seal(f, SealOptions{Kind: KindMemory, Units: 2 * units, Extents: extents}))(b)
			b.SetBytes(units * UnitSize)
			for b.Loop() {
				dst := newTop(b)
				if err := errors.Join(Copy(context.Background(), dst, src), dst.Close()); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
