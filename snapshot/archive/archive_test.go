package archive

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/snapshot/layer"
	"github.com/forkvm/forkvm/snapshot/store"
)

var update = flag.Bool("update", false, "rewrite the golden files in testdata")

// A snapshot comes back byte for byte, through a directory and through a pipe, and
// its holes are holes.
func TestRoundTrip(t *testing.T) {
	ctx := context.Background()
	s := newSource(t, 1)
	snap := s.publish("task", []*layer.Layer{s.layer(layer.KindMemory, 900), s.layer(layer.KindMemory, 30)}, []*layer.Layer{s.raw(), s.layer(layer.KindDisk, 50)})

	d := openArchive(t)
	result, err := d.Export(ctx, snap, nil)
	if err != nil {
		t.Fatal(err)
	}
	if result.NewChunks != result.Chunks || result.NewBytes >= result.Bytes {
		t.Errorf("%+v", result)
	}
	x, err := d.Index("task")
	if err != nil {
		t.Fatal(err)
	}
	target := openStore(t, t.TempDir())
	if _, err := d.Import(ctx, target, x, "", nil); err != nil {
		t.Fatal(err)
	}
	same(t, s.st, target, "task", "task")

	r, w := io.Pipe()
	go func() {
		_, err := Write(ctx, w, snap, nil)
		w.CloseWithError(err)
	}()
	piped := openStore(t, t.TempDir())
	in := Incoming{Store: piped, Path: filepath.Join(piped.Path(), "incoming")}
	info, _, err := in.Read(ctx, r, "other", nil)
	if err != nil {
		t.Fatal(err)
	}
	same(t, s.st, piped, "task", "other")
	if info.Name != "other" || info.Manifest.ID != snap.Manifest.ID || info.Sizes.Total() > 6<<20 {
		t.Errorf("imported %+v", info)
	}
	if left, _ := os.ReadDir(in.Path); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
	// It is there.
	var b bytes.Buffer
	if _, err := Write(ctx, &b, snap, nil); err != nil {
		t.Fatal(err)
	}
	if _, _, err := in.Read(ctx, &b, "third", nil); !errors.Is(err, store.ErrExists) || !strings.Contains(err.Error(), "other") {
		t.Error(err)
	}
}

// A second task that has the first one's layers and one commit more costs its
// difference, in the archive and in the store that it comes to. So does one that
// was stored without knowing of the first.
func TestSecondTaskCostsItsDifference(t *testing.T) {
	ctx := context.Background()
	s := newSource(t, 2)
	memory, disk := s.layer(layer.KindMemory, 2000), s.layer(layer.KindDisk, 1000)
	first := s.publish("first", []*layer.Layer{memory}, []*layer.Layer{disk})
	commit := []*layer.Layer{s.layer(layer.KindMemory, 60), s.layer(layer.KindDisk, 20)}
	second := s.publish("second", []*layer.Layer{memory, commit[0]}, []*layer.Layer{disk, commit[1]})

	d := openArchive(t)
	a, err := d.Export(ctx, first, nil)
	if err != nil {
		t.Fatal(err)
	}
	b, err := d.Export(ctx, second, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("first task: %d bytes in %d chunks; second: %d bytes in %d new chunks of %d (%.1f %%)",
		a.NewBytes, a.NewChunks, b.NewBytes, b.NewChunks, b.Chunks, 100*float64(b.NewBytes)/float64(a.NewBytes))
	if difference := int64(80 * layer.UnitSize); b.NewBytes > difference*5/4 {
		t.Errorf("the second task cost %d bytes for a difference of %d", b.NewBytes, difference)
	}
	if again, err := d.Export(ctx, second, nil); err != nil || again.NewBytes != 0 {
		t.Errorf("exported again: %+v, %v", again, err)
	}
	if names, err := d.Names(); err != nil || !slices.Equal(names, []string{"first", "second"}) {
		t.Error(names, err)
	}

	target := openStore(t, t.TempDir())
	for _, name := range []string{"first", "second"} {
		x, err := d.Index(name)
		if err != nil {
			t.Fatal(err)
		}
		info, err := d.Import(ctx, target, x, "", nil)
		if err != nil {
			t.Fatal(err)
		}
		same(t, s.st, target, name, name)
		if name == "second" && info.Sizes.Own > 110*layer.UnitSize {
			t.Errorf("the second task takes %d bytes of its own in the store", info.Sizes.Own)
		}
	}

	// The same content but for some units, in one layer that was written anew.
	whole := newSource(t, 2)
	l := whole.layer(layer.KindMemory, 2000)
	page := make([]byte, 3*layer.UnitSize)
	page[0] = 1
	if _, err := l.File().WriteAt(page, layer.DataOffset+700*layer.UnitSize); err != nil {
		t.Fatal(err)
	}
	c, err := d.Export(ctx, whole.publish("whole", []*layer.Layer{l}, nil), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("three pages changed in a layer of 2,000: %d bytes in %d new chunks of %d", c.NewBytes, c.NewChunks, c.Chunks)
	if c.NewBytes > a.NewBytes/4 {
		t.Errorf("three changed pages cost %d bytes", c.NewBytes)
	}
}

// Removing a snapshot from a directory takes what only it has.
func TestRemove(t *testing.T) {
	ctx := context.Background()
	s := newSource(t, 7)
	memory := s.layer(layer.KindMemory, 400)
	first := s.publish("first", []*layer.Layer{memory}, nil)
	second := s.publish("second", []*layer.Layer{memory, s.layer(layer.KindMemory, 40)}, nil)
	d := openArchive(t)
	one, err := d.Export(ctx, first, nil)
	if err != nil {
		t.Fatal(err)
	}
	two, err := d.Export(ctx, second, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Remove(ctx, "first"); err != nil {
		t.Fatal(err)
	}
	if err := d.Remove(ctx, "first"); !errors.Is(err, ErrNotFound) {
		t.Error(err)
	}
	if n := countChunks(t, d); n != two.Chunks {
		t.Errorf("%d chunks are left of %d and %d, want %d", n, one.Chunks, two.NewChunks, two.Chunks)
	}
	x, err := d.Index("second")
	if err != nil {
		t.Fatal(err)
	}
	target := openStore(t, t.TempDir())
	if _, err := d.Import(ctx, target, x, "", nil); err != nil {
		t.Fatal(err)
	}
	same(t, s.st, target, "second", "second")
	if err := d.Remove(ctx, "second"); err != nil {
		t.Fatal(err)
	}
	if n := countChunks(t, d); n != 0 {
		t.Errorf("%d chunks are left", n)
	}
}

func countChunks(t testing.TB, d *Directory) int {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(d.Path(), "chunks", "*", "*"))
	if err != nil {
		t.Fatal(err)
	}
	return len(found)
}

// An import that was cut off goes on: what came through is neither read nor stored
// again.
func TestImportGoesOn(t *testing.T) {
	ctx := context.Background()
	s := newSource(t, 3)
	snap := s.publish("task", []*layer.Layer{s.layer(layer.KindMemory, 1500)}, []*layer.Layer{s.layer(layer.KindDisk, 100)})
	path := filepath.Join(t.TempDir(), "task.forkvm")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	whole, err := Write(ctx, f, snap, nil)
	if err != nil {
		t.Fatal(err)
	}
	st, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	target := openStore(t, t.TempDir())
	in := Incoming{Store: target, Path: filepath.Join(target.Path(), "incoming")}
	cut := &counter{r: io.NewSectionReader(f, 0, st.Size()*2/3)}
	_, part, err := in.Read(ctx, struct{ io.Reader }{cut}, "", nil)
	if !errors.Is(err, snapshot.ErrTruncated) {
		t.Fatal(err)
	}
	if part.NewChunks == 0 {
		t.Error("nothing came through")
	}
	if names, _ := target.Names(); len(names) != 0 {
		t.Errorf("listed: %v", names)
	}
	seekable := &counter{r: io.NewSectionReader(f, 0, st.Size())}
	_, rest, err := in.Read(ctx, seekable, "", nil)
	if err != nil {
		t.Fatal(err)
	}
	if part.NewChunks+rest.NewChunks != whole.Chunks {
		t.Errorf("%d chunks came first, %d then, of %d", part.NewChunks, rest.NewChunks, whole.Chunks)
	}
	if limit := st.Size()/3 + int64(whole.Chunks)*(recordSize+1) + MaxChunk; seekable.n > limit {
		t.Errorf("read %d bytes of %d, %d would do", seekable.n, st.Size(), limit)
	}
	same(t, s.st, target, "task", "task")
}

type counter struct {
	r *io.SectionReader
	n int64
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	return n, err
}

func (c *counter) Seek(off int64, whence int) (int64, error) { return c.r.Seek(off, whence) }

// E4: an archive that is cut, changed or grown anywhere is an error, and nothing
// is listed. What was damaged on the way is brought again by the next attempt.
func TestDamageE4(t *testing.T) {
	ctx := context.Background()
	s := newSource(t, 4)
	snap := s.publish("task", []*layer.Layer{s.layer(layer.KindMemory, 40)}, []*layer.Layer{s.layer(layer.KindDisk, 10)})
	var b bytes.Buffer
	if _, err := Write(ctx, &b, snap, nil); err != nil {
		t.Fatal(err)
	}
	good := b.Bytes()
	target := openStore(t, t.TempDir())
	in := Incoming{Store: target, Path: filepath.Join(target.Path(), "incoming")}
	refuse := func(what string, damaged []byte) {
		t.Helper()
		if _, _, err := in.Read(ctx, bytes.NewReader(damaged), "", nil); err == nil {
			t.Fatalf("%s: imported", what)
		}
		if names, _ := target.Names(); len(names) != 0 {
			t.Fatalf("%s: listed %v", what, names)
		}
	}
	for _, n := range []int{0, 1, 63, 64, 100, len(good) / 2, len(good) - 4096, len(good) - 1} {
		refuse(fmt.Sprintf("cut at %d", n), good[:n])
	}
	refuse("grown", append(slices.Clone(good), 0))
	for range 100 {
		damaged := slices.Clone(good)
		at := rand.IntN(len(good))
		damaged[at] ^= 1 << rand.IntN(8)
		os.RemoveAll(in.Path) // otherwise chunks that are there are not looked at
		refuse(fmt.Sprintf("bit flipped at %d", at), damaged)
	}
	later := slices.Clone(good)
	later[8]++
	if _, err := ReadID(bytes.NewReader(later)); !errors.Is(err, snapshot.ErrVersion) {
		t.Errorf("later version: %v", err)
	}
	if _, _, err := in.Read(ctx, bytes.NewReader(good), "", nil); err != nil {
		t.Errorf("the undamaged one: %v", err)
	}

	// A directory whose chunk is damaged says which, and forgets it.
	d := openArchive(t)
	if _, err := d.Export(ctx, snap, nil); err != nil {
		t.Fatal(err)
	}
	damageOneChunk(t, d)
	x, err := d.Index("task")
	if err != nil {
		t.Fatal(err)
	}
	empty := openStore(t, t.TempDir())
	if _, err := d.Import(ctx, empty, x, "", nil); !errors.Is(err, snapshot.ErrChecksum) || !strings.Contains(err.Error(), "chunk ") {
		t.Errorf("damaged chunk: %v", err)
	}
	if again, err := d.Export(ctx, snap, nil); err != nil || again.NewChunks != 1 {
		t.Errorf("brought again: %+v, %v", again, err)
	}
	if _, err := d.Import(ctx, empty, x, "", nil); err != nil {
		t.Error(err)
	}
}

func damageOneChunk(t testing.TB, d *Directory) {
	t.Helper()
	err := fs.WalkDir(os.DirFS(d.Path()), "chunks", func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		path = filepath.Join(d.Path(), path)
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		b[len(b)/2] ^= 1
		if err := errors.Join(os.Remove(path), os.WriteFile(path, b, 0o400)); err != nil {
			return err
		}
		return fs.SkipAll
	})
	if err != nil {
		t.Fatal(err)
	}
}

// The reader reads what an earlier build wrote: the golden file has a snapshot with
// a sparse image, and what its files are.
func TestGolden(t *testing.T) {
	ctx := context.Background()
	const path = "testdata/stream-v1"
	if *update {
		s := newSource(t, 5)
		snap := s.publish("golden", []*layer.Layer{s.layer(layer.KindMemory, 12)}, []*layer.Layer{s.layer(layer.KindDisk, 3)})
		var b bytes.Buffer
		if _, err := Write(ctx, &b, snap, nil); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	target := openStore(t, t.TempDir())
	in := Incoming{Store: target, Path: filepath.Join(target.Path(), "incoming")}
	info, _, err := in.Read(ctx, bytes.NewReader(b), "", nil)
	if err != nil {
		t.Fatal(err)
	}
	if info.Name != "golden" || len(info.Manifest.Memory) != 1 || info.Manifest.Memory[0].Stored != 12 {
		t.Errorf("%+v", info.Manifest)
	}
}

func TestIndexRefusals(t *testing.T) {
	const good = `{"schema":"forkvm/archive/v1","name":"x","id":"00000000000000000000000000000001","files":[{"name":"state","bytes":10,"chunks":["4 zero","6 ` +
		`0000000000000000000000000000000000000000000000000000000000000000"]}]}`
	if _, err := DecodeIndex([]byte(good)); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, from, to string
		want           error
	}{
		{"no JSON", "{", "[", snapshot.ErrMagic},
		{"other schema", "forkvm/archive/v1", "forkvm/image/v1", snapshot.ErrMagic},
		{"later version", "archive/v1", "archive/v2", snapshot.ErrVersion},
		{"unknown member", `"name"`, `"later":1,"name"`, snapshot.ErrInvalid},
		{"more behind it", `]}]}`, `]}]}{}`, snapshot.ErrMagic},
		{"path as name", `"x"`, `"../x"`, snapshot.ErrInvalid},
		{"path as file", `"state"`, `"a/b"`, snapshot.ErrInvalid},
		{"id", `0001"`, `000x"`, snapshot.ErrInvalid},
		{"sum of chunks", `"bytes":10`, `"bytes":11`, snapshot.ErrInvalid},
		{"negative", `"4 zero"`, `"-4 zero"`, snapshot.ErrInvalid},
		{"huge zeros", `"4 zero"`, `"9223372036854775807 zero"`, snapshot.ErrInvalid},
		{"huge chunk", `"6 `, `"600000 `, snapshot.ErrTooLarge},
		{"short address", `000"]`, `"]`, snapshot.ErrInvalid},
		{"sign", `"4 zero"`, `"+4 zero"`, snapshot.ErrInvalid},
		{"twice", `]}]`, `]},{"name":"state","bytes":0,"chunks":[]}]`, snapshot.ErrInvalid},
	} {
		text := strings.Replace(good, c.from, c.to, 1)
		if _, err := DecodeIndex([]byte(text)); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
}

// Inserting a page moves the cuts around it only.
func TestCutsFollowContent(t *testing.T) {
	r := rand.New(rand.NewPCG(6, 0))
	data := make([]byte, 2000*pageSize)
	for i := range data {
		data[i] = byte(r.Uint32())
	}
	chunks := func(b []byte) map[Address]bool {
		seen := map[Address]bool{}
		var total int64
		if err := cut(bytes.NewReader(b), func(c Chunk, _ []byte) error {
			seen[c.Address] = true
			total += c.Length
			return nil
		}); err != nil || total != int64(len(b)) {
			t.Fatal(err, total)
		}
		return seen
	}
	before := chunks(data)
	after := chunks(slices.Insert(slices.Clone(data), 700*pageSize, data[:pageSize]...))
	fresh := 0
	for a := range after {
		if !before[a] {
			fresh++
		}
	}
	if len(before) < 2000/maxPages || fresh > 3 {
		t.Errorf("%d of %d chunks are new after one page was inserted", fresh, len(after))
	}
}

func FuzzDecodeIndex(f *testing.F) {
	f.Add([]byte(`{"schema":"forkvm/archive/v1","name":"x","id":"00000000000000000000000000000001","files":[{"name":"state","bytes":4,"chunks":["4 zero"]}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		x, err := DecodeIndex(b)
		if err != nil {
			return
		}
		again, err := x.Encode()
		if err != nil {
			t.Fatal(err)
		}
		if y, err := DecodeIndex(again); err != nil || len(y.Files) != len(x.Files) {
			t.Fatalf("accepted, and refused when written again: %v", err)
		}
	})
}

func FuzzUnpack(f *testing.F) {
	// Small, since the fuzzer makes what it finds smaller first.
	var seed bytes.Buffer
	c, err := newCodec()
	if err != nil {
		f.Fatal(err)
	}
	defer c.close()
	w := &streamWriter{w: &seed, codec: c}
	text := []byte("{}")
	chunk, _ := chunkOf(text)
	_, err = w.put(chunk.Address, text)
	if err == nil {
		err = w.putIndex(&Index{
			Schema: Schema, Name: "x", ID: "00000000000000000000000000000001",
			Files: []File{{Name: snapshot.ManifestFile, Bytes: 2, Chunks: []Chunk{chunk}}},
		})
	}
	if err != nil {
		f.Fatal(err)
	}
	f.Add(seed.Bytes())
	d, err := MakeDirectory(f.TempDir())
	if err != nil {
		f.Fatal(err)
	}
	defer d.Close()
	f.Fuzz(func(t *testing.T, b []byte) {
		// Without putIndex, which syncs the file system.
		u := unpacker{ctx: context.Background(), dir: d, r: bytes.NewReader(b)}
		x, err := u.all()
		if err != nil {
			return
		}
		if err := x.validate(); err != nil {
			t.Fatal(err)
		}
		if m, err := d.manifest(x); err == nil {
			m.Files()
		}
	})
}
