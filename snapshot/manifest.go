package snapshot

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"strings"
	"time"
)

// Schema names the manifest's version. A field that a reader does not know
// may change what the others mean, so unknown fields are refused; additions
// that old builds must not ignore raise the version.
const Schema = "forkvm/snapshot/v1"

// MaxManifestSize bounds the manifest file, in bytes.
const MaxManifestSize = 4 << 20

// Formats of a layer's file.
const (
	FormatLayer = "layer" // snapshot/layer's own format
	FormatRaw   = "raw"   // the plain bytes of a disk
)

// Manifest says what a snapshot is and names every file that belongs to it.
// Sizes are bytes; times are UTC.
type Manifest struct {
	Schema  string    `json:"schema"`
	Name    string    `json:"name"`
	ID      string    `json:"id"` // 16 random bytes, hex
	Created time.Time `json:"created"`
	Parent  string    `json:"parent,omitempty"` // ID of the snapshot it grew from
	// Ancestors are the parent's parent and so on, nearest first, at most
	// MaxAncestors: a tree of snapshots holds together when some of them are gone.
	Ancestors []string `json:"ancestors,omitempty"`
	// Journal is how far the record of the machine's rollout had come, nil without one.
	Journal       *JournalHead `json:"journal,omitempty"`
	Task          string       `json:"task,omitempty"`
	Image         string       `json:"image,omitempty"`
	ForkVMVersion string       `json:"forkvm_version"`

	Guest Guest `json:"guest"`
	Host  Host  `json:"host"`

	// Memory and every disk are stacks, bottom layer first.
	Memory []LayerRef `json:"memory"`
	Disks  []Disk     `json:"disks"`
	State  FileRef    `json:"state"`
}

// JournalHead is a line of a rollout's journal, the last one when a machine was frozen.
type JournalHead struct {
	Rollout string `json:"rollout"`
	Seq     uint64 `json:"seq"`
	// Hash is the line's, 64 hex digits.
	Hash string `json:"hash"`
}

// Guest is the machine that was frozen.
type Guest struct {
	CPUs        int    `json:"cpus"`
	MemoryBytes uint64 `json:"memory_bytes"`
	Kernel      string `json:"kernel,omitempty"`
	CommandLine string `json:"command_line,omitempty"`
	// GuestAgent: the guest runs the guest agent, which a clone has to hear
	// from before it counts as ready.
	GuestAgent bool `json:"guest_agent,omitempty"`
	// NetworkMTU is the size of the largest packet of the network card, 0 if there is none.
	NetworkMTU int `json:"network_mtu,omitempty"`
}

// Host is where the machine was frozen: a restore compares it with where it
// is to run.
type Host struct {
	CPUVendor string   `json:"cpu_vendor,omitempty"`
	CPUModel  string   `json:"cpu_model,omitempty"`
	Features  []string `json:"features,omitempty"`
}

// Disk is one block device and its stack of layers. Size is a multiple of 512.
type Disk struct {
	ID       string     `json:"id"`
	Size     int64      `json:"size"`
	ReadOnly bool       `json:"read_only,omitempty"`
	Layers   []LayerRef `json:"layers"`
}

// LayerRef names a layer's file and says enough about it to notice another
// file in its place.
type LayerRef struct {
	ID     string `json:"id"` // 16 bytes, hex: in the file's header, or the content tag of a raw image
	File   string `json:"file"`
	Format string `json:"format"`
	Bytes  int64  `json:"bytes"`  // length of the file
	Units  uint64 `json:"units"`  // pages or blocks of 4096 that the layer spans
	Stored uint64 `json:"stored"` // of these, with data in the file
	// Checksum of a raw image's content (see IsRawChecksum); the
	// other format carries its own.
	Checksum string `json:"checksum,omitempty"`
}

// FileRef names a plain file.
type FileRef struct {
	File   string `json:"file"`
	Bytes  int64  `json:"bytes"`
	SHA256 string `json:"sha256"`
}

// Lineage is what a snapshot that grows from this one stands on: this one's ID
// and those of the snapshots before it, nearest first.
func (m *Manifest) Lineage() []string {
	lineage := []string{m.ID}
	if m.Parent != "" {
		lineage = append(lineage, m.Parent)
		lineage = append(lineage, m.Ancestors...)
	}
	return lineage
}

// Descend makes the manifest one of a snapshot that grew from those of a lineage.
func (m *Manifest) Descend(lineage []string) {
	m.Parent, m.Ancestors = "", nil
	if len(lineage) > 0 {
		m.Parent = lineage[0]
		m.Ancestors = lineage[1:min(len(lineage), 1+MaxAncestors)]
	}
}

// Files returns the names of all files that the manifest names.
func (m *Manifest) Files() map[string]bool {
	files := map[string]bool{m.State.File: true}
	for l := range m.layers() {
		files[l.File] = true
	}
	return files
}

// LayerBytes is the length of all files of layers together.
func (m *Manifest) LayerBytes() (total int64) {
	for l := range m.layers() {
		total += l.Bytes
	}
	return total
}

func (m *Manifest) layers() iter.Seq[LayerRef] {
	return func(yield func(LayerRef) bool) {
		for _, l := range m.Memory {
			if !yield(l) {
				return
			}
		}
		for _, d := range m.Disks {
			for _, l := range d.Layers {
				if !yield(l) {
					return
				}
			}
		}
	}
}

// NewID returns a fresh identity for a snapshot or a layer.
func NewID() string {
	var id [16]byte
	rand.Read(id[:]) // never fails
	return hex.EncodeToString(id[:])
}

// The last member of the file is a checksum of all bytes before it, so that a
// flipped bit in a name or a size is found like one in any other file.
const (
	sumPrefix = ",\n  \"checksum\": \"sha256:"
	sumSuffix = "\"\n}\n"
	sumLength = len(sumPrefix) + 2*sha256.Size + len(sumSuffix)
)

// Encode validates the manifest and returns the bytes of its file. Schema is
// filled in when empty.
func (m Manifest) Encode() ([]byte, error) {
	if m.Schema == "" {
		m.Schema = Schema
	}
	m.Created = m.Created.UTC()
	if m.Memory == nil {
		m.Memory = []LayerRef{}
	}
	if m.Disks == nil {
		m.Disks = []Disk{}
	}
	if err := m.Validate(); err != nil {
		return nil, fmt.Errorf("encode manifest (%s): %w", m.Name, err)
	}
	b, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("encode manifest (%s): %w", m.Name, err)
	}
	body := bytes.TrimSuffix(b, []byte("\n}"))
	sum := sha256.Sum256(body)
	body = append(body, sumPrefix...)
	body = hex.AppendEncode(body, sum[:])
	body = append(body, sumSuffix...)
	if len(body) > MaxManifestSize {
		return nil, fmt.Errorf("encode manifest (%s): %d bytes: %w", m.Name, len(body), ErrTooLarge)
	}
	return body, nil
}

// DecodeManifest reads a manifest file. In order: the size limit
// (ErrTooLarge), that it is JSON with a schema (ErrMagic), the schema's
// version (ErrVersion), the checksum (ErrChecksum), then every field
// (ErrInvalid).
func DecodeManifest(b []byte) (*Manifest, error) {
	if len(b) > MaxManifestSize {
		return nil, fmt.Errorf("decode manifest: %d bytes: %w", len(b), ErrTooLarge)
	}
	if err := checkSchema(b); err != nil {
		return nil, fmt.Errorf("decode manifest: %w", err)
	}
	body, err := checkManifestSum(b)
	if err != nil {
		return nil, fmt.Errorf("decode manifest: %w", err)
	}
	dec := json.NewDecoder(io.MultiReader(bytes.NewReader(body), bytes.NewReader([]byte("\n}"))))
	dec.DisallowUnknownFields()
	m := new(Manifest)
	if err := dec.Decode(m); err != nil {
		return nil, fmt.Errorf("decode manifest: %w: %v", ErrInvalid, err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return nil, fmt.Errorf("decode manifest: %w: bytes after the object", ErrInvalid)
	}
	if err := m.Validate(); err != nil {
		return nil, fmt.Errorf("decode manifest: %w", err)
	}
	return m, nil
}

// checkSchema looks at the schema alone: it must be readable in files whose
// other fields are not.
func checkSchema(b []byte) error {
	const family = "forkvm/snapshot/"
	// Read as tokens: the schema comes first, and a file that is cut short
	// later still shows it.
	dec := json.NewDecoder(bytes.NewReader(b))
	var tokens [3]json.Token
	for i := range tokens {
		tok, err := dec.Token()
		if err == io.EOF || err == io.ErrUnexpectedEOF {
			return ErrTruncated
		}
		if err != nil {
			return ErrMagic
		}
		tokens[i] = tok
	}
	schema, _ := tokens[2].(string)
	switch {
	case tokens[0] != json.Delim('{') || tokens[1] != "schema":
		return ErrMagic
	case schema == Schema:
		return nil
	case strings.HasPrefix(schema, family):
		return fmt.Errorf("%w: %.64q, this build reads %q", ErrVersion, schema, Schema)
	}
	return ErrMagic
}

// checkManifestSum returns the part of b that its checksum covers.
func checkManifestSum(b []byte) ([]byte, error) {
	if len(b) < sumLength {
		return nil, ErrTruncated
	}
	body, tail := b[:len(b)-sumLength], b[len(b)-sumLength:]
	want := sha256.Sum256(body)
	expect := sumPrefix + hex.EncodeToString(want[:]) + sumSuffix
	if string(tail) != expect {
		return nil, ErrChecksum
	}
	return body, nil
}
