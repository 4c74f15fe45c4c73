package snapshot

import (
	"bytes"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"
)

func goldenManifest() Manifest {
	id := func(c string) string { return strings.Repeat(c, 32) }
	return Manifest{
		Schema:        Schema,
		Name:          "postgres-ready",
		ID:            id("1"),
		Created:       time.Date(2026, 9, 1, 12, 30, 0, 123456789, time.UTC),
		Parent:        id("2"),
		Task:          "fix-the-test",
		Image:         "debian-12",
		ForkVMVersion: "0.1.0",
		Guest:         Guest{CPUs: 4, MemoryBytes: 2 << 30, Kernel: "6.12.0", CommandLine: "console=ttyS0 root=/dev/vda"},
		Host:          Host{CPUVendor: "GenuineIntel", CPUModel: "a model", Features: []string{"avx2", "xsaves"}},
		Memory: []LayerRef{
			{ID: id("3"), File: "memory-3.layer", Format: FormatLayer, Bytes: 409600, Units: 524288, Stored: 98},
		},
		Disks: []Disk{{
			ID: "blk0", Size: 8 << 30,
			Layers: []LayerRef{
				{ID: id("4"), File: "disk-blk0-4.raw", Format: FormatRaw, Bytes: 4 << 30, Units: 1 << 20, Stored: 1 << 20, Checksum: "crc32c:0123abcd"},
				{ID: id("5"), File: "disk-blk0-5.layer", Format: FormatLayer, Bytes: 12288, Units: 2 << 20, Stored: 1},
			},
		}},
		State: FileRef{File: "state", Bytes: 1000, SHA256: strings.Repeat("ab", 32)},
	}
}

func TestManifestGolden(t *testing.T) {
	want := goldenManifest()
	b, err := want.Encode()
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "manifest-v1.json", b)
	got, err := DecodeManifest(b)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(*got, want) {
		t.Errorf("got %+v\nwant %+v", *got, want)
	}
}

// A snapshot of a VM with a record says how far that had come.
func TestManifestJournal(t *testing.T) {
	want := goldenManifest()
	want.Journal = &JournalHead{Rollout: "5e0cb27e9a31", Seq: 7, Hash: strings.Repeat("0a", 32)}
	b, err := want.Encode()
	if err != nil {
		t.Fatal(err)
	}
	got, err := DecodeManifest(b)
	if err != nil || !reflect.DeepEqual(*got, want) {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestManifestEmptyStacks(t *testing.T) {
	m := goldenManifest()
	m.Schema, m.Memory, m.Disks = "", nil, nil
	b, err := m.Encode()
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Contains(b, []byte(`"disks": []`)) {
		t.Error("no disks must be an empty list, not null")
	}
	if _, err := DecodeManifest(b); err != nil {
		t.Fatal(err)
	}
}

// E4: any flipped bit and any cut of a manifest is an error.
func TestManifestDamageE4(t *testing.T) {
	m := goldenManifest()
	good, err := m.Encode()
	if err != nil {
		t.Fatal(err)
	}
	for bit := range len(good) * 8 {
		b := bytes.Clone(good)
		b[bit/8] ^= 1 << (bit % 8)
		if _, err := DecodeManifest(b); err == nil {
			t.Fatalf("bit %d flipped and not noticed", bit)
		}
	}
	for n := range len(good) {
		if _, err := DecodeManifest(good[:n]); err == nil {
			t.Fatalf("cut at %d and not noticed", n)
		}
	}
	if _, err := DecodeManifest(append(good, '\n')); err == nil {
		t.Error("grown and not noticed")
	}
}

func TestManifestOrderOfErrors(t *testing.T) {
	m := goldenManifest()
	good, err := m.Encode()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		b    []byte
		want error
	}{
		{"empty", nil, ErrTruncated},
		{"not JSON", []byte("ELF"), ErrMagic},
		{"other JSON", []byte(`{"name":"x"}`), ErrMagic},
		{"list", []byte(`["schema","forkvm/snapshot/v1"]`), ErrMagic},
		{"other schema", []byte(`{"schema":"forkvm/image/v1"}`), ErrMagic},
		{"later version", bytes.Replace(good, []byte("snapshot/v1"), []byte("snapshot/v2"), 1), ErrVersion},
		{"edited", bytes.Replace(good, []byte(`"cpus": 4`), []byte(`"cpus": 8`), 1), ErrChecksum},
		{"huge", make([]byte, MaxManifestSize+1), ErrTooLarge},
	} {
		if _, err := DecodeManifest(c.b); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
}

// sealManifest gives a body a right checksum.
func sealManifest(body string) []byte {
	sum := sha(body)
	return []byte(body + sumPrefix + sum + sumSuffix)
}

func TestManifestUnknownField(t *testing.T) {
	m := goldenManifest()
	good, err := m.Encode()
	if err != nil {
		t.Fatal(err)
	}
	body := string(good[:len(good)-sumLength])
	if _, err := DecodeManifest(sealManifest(body)); err != nil {
		t.Fatal(err)
	}
	if _, err := DecodeManifest(sealManifest(body + `, "later": 1`)); !errors.Is(err, ErrInvalid) {
		t.Errorf("unknown field: %v", err)
	}
	if _, err := DecodeManifest(sealManifest(body + `} {"a": 1`)); !errors.Is(err, ErrInvalid) {
		t.Errorf("second object: %v", err)
	}
}

func TestManifestValidate(t *testing.T) {
	for _, c := range []struct {
		name string
		edit func(m *Manifest)
		says string
	}{
		{"name", func(m *Manifest) { m.Name = "../x" }, "name"},
		{"hidden name", func(m *Manifest) { m.Name = ".x" }, "name"},
		{"id", func(m *Manifest) { m.ID = "xyz" }, "id"},
		{"parent", func(m *Manifest) { m.Parent = "xyz" }, "parent"},
		{"ancestor", func(m *Manifest) { m.Ancestors = []string{"xyz"} }, "ancestors"},
		{"ancestors without a parent", func(m *Manifest) { m.Ancestors, m.Parent = []string{m.Parent}, "" }, "ancestors"},
		{"ancestors", func(m *Manifest) { m.Ancestors = make([]string, MaxAncestors+1) }, "ancestors"},
		{"line of a rollout", func(m *Manifest) { m.Journal = &JournalHead{Rollout: "../x", Seq: 1, Hash: strings.Repeat("0a", 32)} }, "journal"},
		{"hash of a line", func(m *Manifest) { m.Journal = &JournalHead{Rollout: "5e0cb27e9a31", Seq: 1, Hash: "0a"} }, "journal"},
		{"created", func(m *Manifest) { m.Created = time.Time{} }, "created"},
		{"task", func(m *Manifest) { m.Task = strings.Repeat("x", 257) }, "task"},
		{"command line", func(m *Manifest) { m.Guest.CommandLine = "a\x00b" }, "command_line"},
		{"features", func(m *Manifest) { m.Host.Features = []string{""} }, "features"},
		{"cpus", func(m *Manifest) { m.Guest.CPUs = 0 }, "cpus"},
		{"memory", func(m *Manifest) { m.Guest.MemoryBytes = 4097 }, "memory"},
		{"memory doubled (E4)", func(m *Manifest) { m.Guest.MemoryBytes *= 2 }, "memory"},
		{"memory from a raw file", func(m *Manifest) { m.Memory[0].Format = FormatRaw }, "format"},
		{"state size", func(m *Manifest) { m.State.Bytes = MaxStateSize + 1 }, "state"},
		{"state sum", func(m *Manifest) { m.State.SHA256 = "00" }, "sha256"},
		{"state file", func(m *Manifest) { m.State.File = "a/b" }, "state"},
		{"state is the manifest", func(m *Manifest) { m.State.File = ManifestFile }, "manifest"},
		{"state is a layer", func(m *Manifest) { m.State.File = "memory-3.layer" }, "twice"},
		{"file of two layers", func(m *Manifest) { m.Disks[0].Layers[1].File = "memory-3.layer" }, "twice"},
		{"layer id", func(m *Manifest) { m.Memory[0].ID = "A" }, "id"},
		{"layer size", func(m *Manifest) { m.Memory[0].Bytes = -1 }, "bytes"},
		{"layer format", func(m *Manifest) { m.Disks[0].Layers[1].Format = "qcow2" }, "qcow2"},
		{"layer stored", func(m *Manifest) { m.Memory[0].Stored = 1 << 30 }, "stored"},
		{"layer checksum", func(m *Manifest) { m.Memory[0].Checksum = "x" }, "checksum"},
		{"raw with half a checksum", func(m *Manifest) { m.Disks[0].Layers[0].Checksum = "crc32c:0123abcd/" }, "checksum"},
		{"raw without checksum", func(m *Manifest) { m.Disks[0].Layers[0].Checksum = "" }, "checksum"},
		{"raw larger than the disk (C4)", func(m *Manifest) { m.Disks[0].Layers[0].Bytes = 16 << 30 }, "raw"},
		{"layer larger than the disk (C4)", func(m *Manifest) { m.Disks[0].Layers[1].Units++ }, "blocks"},
		{"disk size", func(m *Manifest) { m.Disks[0].Size = 513 }, "size"},
		{"disk id", func(m *Manifest) { m.Disks[0].ID = "" }, "disk"},
		{"disk twice", func(m *Manifest) { m.Disks = append(m.Disks, m.Disks[0]) }, "twice"},
		{"disks", func(m *Manifest) { m.Disks = make([]Disk, MaxDisks+1) }, "disks"},
		{"layers", func(m *Manifest) { m.Memory = make([]LayerRef, MaxLayers+1) }, "layers"},
		{"schema", func(m *Manifest) { m.Schema = "forkvm/snapshot/v9" }, "schema"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := goldenManifest()
			c.edit(&m)
			err := m.Validate()
			if err == nil || !strings.Contains(err.Error(), c.says) {
				t.Fatalf("got %v, want an error that says %q", err, c.says)
			}
			if _, encErr := m.Encode(); encErr == nil {
				t.Error("an invalid manifest was encoded")
			}
		})
	}
}

func TestCheckName(t *testing.T) {
	for _, name := range []string{"a", "A9", "django__django-1.2_x", strings.Repeat("n", 128)} {
		if err := CheckName(name); err != nil {
			t.Errorf("%q: %v", name, err)
		}
	}
	for _, name := range []string{"", ".", "..", ".a", "-a", "_a", "a/b", "a b", "a\n", "ä", strings.Repeat("n", 129)} {
		if err := CheckName(name); !errors.Is(err, ErrInvalid) {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func FuzzDecodeManifest(f *testing.F) {
	m := goldenManifest()
	good, err := m.Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good[:len(good)-sumLength])
	f.Fuzz(func(t *testing.T, body []byte) {
		m, err := DecodeManifest(sealManifest(string(body)))
		if err != nil {
			return
		}
		again, err := m.Encode()
		if err != nil {
			t.Fatalf("accepted but cannot be written again: %v", err)
		}
		if _, err := DecodeManifest(again); err != nil {
			t.Fatal(err)
		}
	})
}
