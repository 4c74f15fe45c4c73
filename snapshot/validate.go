package snapshot

import (
	"crypto/sha256"
	"fmt"
	"strings"
)

// Limits of a manifest. MaxLayers bounds the stack of the memory and of each
// disk; stores flatten long before.
const (
	MaxLayers = 4096
	MaxDisks  = 64
	MaxCPUs   = 1024
	// MaxAncestors bounds how far back a snapshot knows what it grew from.
	MaxAncestors = 64

	// UnitSize is the size of a memory page and of a disk block, in bytes.
	UnitSize = 4096
	// MaxUnits bounds a layer's span: 4 PiB.
	MaxUnits = 1 << 40

	maxText        = 256
	maxCommandLine = 64 << 10
	maxFeatures    = 4096
)

// ManifestFile is the manifest's name in a snapshot's directory; no other
// file may have it.
const ManifestFile = "manifest.json"

// Validate checks every field against its limits and against the others. All
// errors are ErrInvalid, ErrTooLarge or ErrVersion and name the field.
func (m *Manifest) Validate() error {
	if m.Schema != Schema {
		return fmt.Errorf("%w: schema %.64q", ErrVersion, m.Schema)
	}
	if err := CheckName(m.Name); err != nil {
		return fmt.Errorf("name: %w", err)
	}
	if !isID(m.ID) {
		return fmt.Errorf("id: %w: not 32 lower-case hex digits", ErrInvalid)
	}
	if err := m.validateLineage(); err != nil {
		return err
	}
	if m.Journal != nil && !m.Journal.valid() {
		return fmt.Errorf("journal: %w: no line of a rollout", ErrInvalid)
	}
	if y := m.Created.UTC().Year(); m.Created.IsZero() || y < 1970 || y > 9999 {
		return fmt.Errorf("created: %w: no usable time", ErrInvalid)
	}
	if err := m.validateText(); err != nil {
		return err
	}
	if err := m.Guest.validate(); err != nil {
		return fmt.Errorf("guest: %w", err)
	}
	files := fileSet{}
	if err := m.validateState(files); err != nil {
		return fmt.Errorf("state: %w", err)
	}
	if err := m.validateMemory(files); err != nil {
		return fmt.Errorf("memory: %w", err)
	}
	return m.validateDisks(files)
}

func (m *Manifest) validateLineage() error {
	if m.Parent != "" && !isID(m.Parent) {
		return fmt.Errorf("parent: %w: not 32 lower-case hex digits", ErrInvalid)
	}
	if len(m.Ancestors) > MaxAncestors {
		return fmt.Errorf("ancestors: %w: %d", ErrTooLarge, len(m.Ancestors))
	}
	for _, id := range m.Ancestors {
		if m.Parent == "" || !isID(id) {
			return fmt.Errorf("ancestors: %w: not 32 lower-case hex digits each, or without a parent", ErrInvalid)
		}
	}
	return nil
}

func (h *JournalHead) valid() bool {
	const digits = "0123456789abcdef"
	return CheckName(h.Rollout) == nil && h.Seq > 0 && len(h.Hash) == 2*sha256.Size && strings.Trim(h.Hash, digits) == ""
}

func (m *Manifest) validateText() error {
	for _, f := range []struct {
		name, value string
		limit       int
	}{
		{"task", m.Task, maxText},
		{"image", m.Image, maxText},
		{"forkvm_version", m.ForkVMVersion, maxText},
		{"guest kernel", m.Guest.Kernel, maxText},
		{"guest command_line", m.Guest.CommandLine, maxCommandLine},
		{"host cpu_vendor", m.Host.CPUVendor, maxText},
		{"host cpu_model", m.Host.CPUModel, maxText},
	} {
		if len(f.value) > f.limit {
			return fmt.Errorf("%s: %w: %d bytes", f.name, ErrTooLarge, len(f.value))
		}
		if strings.ContainsRune(f.value, 0) {
			return fmt.Errorf("%s: %w: NUL byte", f.name, ErrInvalid)
		}
	}
	if len(m.Host.Features) > maxFeatures {
		return fmt.Errorf("host features: %w: %d", ErrTooLarge, len(m.Host.Features))
	}
	for _, feature := range m.Host.Features {
		if feature == "" || len(feature) > maxText {
			return fmt.Errorf("host features: %w: name of %d bytes", ErrInvalid, len(feature))
		}
	}
	return nil
}

func (g Guest) validate() error {
	if g.CPUs < 1 || g.CPUs > MaxCPUs {
		return fmt.Errorf("%w: %d cpus", ErrInvalid, g.CPUs)
	}
	if g.MemoryBytes == 0 || g.MemoryBytes%UnitSize != 0 || g.MemoryBytes/UnitSize > MaxUnits {
		return fmt.Errorf("%w: %d bytes of memory", ErrInvalid, g.MemoryBytes)
	}
	return nil
}

func (m *Manifest) validateState(files fileSet) error {
	if m.State.Bytes <= 0 || m.State.Bytes > MaxStateSize {
		return fmt.Errorf("%w: %d bytes", ErrInvalid, m.State.Bytes)
	}
	if len(m.State.SHA256) != 64 || !isHex(m.State.SHA256) {
		return fmt.Errorf("%w: sha256 is not 64 lower-case hex digits", ErrInvalid)
	}
	return files.add(m.State.File, "")
}

func (m *Manifest) validateMemory(files fileSet) error {
	pages := m.Guest.MemoryBytes / UnitSize
	return validateStack(m.Memory, files, func(l LayerRef) error {
		if l.Format != FormatLayer {
			return fmt.Errorf("%w: format %.16q", ErrInvalid, l.Format)
		}
		if l.Units != pages {
			return fmt.Errorf("%w: spans %d pages of a memory of %d", ErrInvalid, l.Units, pages)
		}
		return nil
	})
}

func (m *Manifest) validateDisks(files fileSet) error {
	if len(m.Disks) > MaxDisks {
		return fmt.Errorf("disks: %w: %d", ErrTooLarge, len(m.Disks))
	}
	seen := make(map[string]bool, len(m.Disks))
	for _, disk := range m.Disks {
		if err := CheckName(disk.ID); err != nil {
			return fmt.Errorf("disk id: %w", err)
		}
		if seen[disk.ID] {
			return fmt.Errorf("disk (%s): %w: used twice", disk.ID, ErrInvalid)
		}
		seen[disk.ID] = true
		if disk.Size <= 0 || disk.Size%512 != 0 || disk.Size/UnitSize >= MaxUnits {
			return fmt.Errorf("disk (%s): %w: size %d", disk.ID, ErrInvalid, disk.Size)
		}
		if err := validateStack(disk.Layers, files, disk.checkLayer); err != nil {
			return fmt.Errorf("disk (%s): %w", disk.ID, err)
		}
	}
	return nil
}

func (d Disk) checkLayer(l LayerRef) error {
	blocks := uint64(d.Size+UnitSize-1) / UnitSize
	switch l.Format {
	case FormatLayer:
	case FormatRaw:
		if l.Bytes > d.Size || l.Bytes%512 != 0 {
			return fmt.Errorf("%w: raw image of %d bytes on a disk of %d", ErrInvalid, l.Bytes, d.Size)
		}
		if !IsRawChecksum(l.Checksum) {
			return fmt.Errorf("%w: raw image without a checksum", ErrInvalid)
		}
	default:
		return fmt.Errorf("%w: format %.16q", ErrInvalid, l.Format)
	}
	if l.Units > blocks {
		return fmt.Errorf("%w: spans %d blocks of a disk of %d", ErrInvalid, l.Units, blocks)
	}
	return nil
}

// IsRawChecksum reports whether text has the form of a raw image's checksum:
// "crc32c:", 8 hex digits for the content and, after a slash, 8 for the samples,
// which earlier builds left out.
func IsRawChecksum(text string) bool {
	sums, ok := strings.CutPrefix(text, "crc32c:")
	content, samples, both := strings.Cut(sums, "/")
	return ok && isSum(content) && (!both || isSum(samples))
}

func isSum(text string) bool { return len(text) == 8 && isHex(text) }

func validateStack(stack []LayerRef, files fileSet, check func(LayerRef) error) error {
	if len(stack) > MaxLayers {
		return fmt.Errorf("%w: %d layers", ErrTooLarge, len(stack))
	}
	for i, l := range stack {
		if err := l.validate(); err != nil {
			return fmt.Errorf("layer %d: %w", i, err)
		}
		if err := check(l); err != nil {
			return fmt.Errorf("layer %d: %w", i, err)
		}
		if err := files.add(l.File, l.ID); err != nil {
			return fmt.Errorf("layer %d: %w", i, err)
		}
	}
	return nil
}

func (l LayerRef) validate() error {
	if !isID(l.ID) {
		return fmt.Errorf("%w: id is not 32 lower-case hex digits", ErrInvalid)
	}
	if l.Bytes <= 0 || l.Units == 0 || l.Units > MaxUnits || l.Stored > l.Units {
		return fmt.Errorf("%w: %d bytes, %d units, %d stored", ErrInvalid, l.Bytes, l.Units, l.Stored)
	}
	if l.Format == FormatLayer && l.Checksum != "" {
		return fmt.Errorf("%w: a checksum beside the file's own", ErrInvalid)
	}
	return nil
}

// fileSet maps a file's name to the layer in it. One layer may be named by
// several stacks, but a file is never two things.
type fileSet map[string]string

func (s fileSet) add(name, id string) error {
	if err := CheckName(name); err != nil {
		return fmt.Errorf("file: %w", err)
	}
	if name == ManifestFile {
		return fmt.Errorf("%w: file named like the manifest", ErrInvalid)
	}
	old, ok := s[name]
	if ok && (old != id || id == "") {
		return fmt.Errorf("%w: file %s named twice", ErrInvalid, name)
	}
	s[name] = id
	return nil
}
