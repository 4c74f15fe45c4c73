package image

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"
	"time"

	"github.com/forkvm/forkvm/guest/initramfs"
	"github.com/forkvm/forkvm/snapshot"
)

// Schema is the version of the manifest's form.
const Schema = "forkvm/image/v1"

const (
	maxManifest    = 1 << 20
	maxCommandLine = 2047 // what x86 kernels take
	maxPartSize    = 16 << 40
)

// Manifest is the content of image.json.
type Manifest struct {
	Schema string `json:"schema"`
	// ID is a hash over everything that decides what the guest sees: equal images have equal ids.
	ID            string    `json:"id"`
	CreatedAt     time.Time `json:"created_at"`
	KernelRelease string    `json:"kernel_release,omitempty"`
	// CommandLine is the kernel's, complete.
	CommandLine string `json:"command_line"`
	// Mode is initramfs.ModeHandover or initramfs.ModePID1.
	Mode string `json:"mode"`
	// RootDevice is where the guest looks for rootfs.ext4; empty if there is none.
	RootDevice string `json:"root_device,omitempty"`
	Hostname   string `json:"hostname,omitempty"`
	// Modules are loaded by the guest agent, in this order.
	Modules []string `json:"modules,omitempty"`
	// AbsentDrivers are optional drivers that the kernel lacks.
	AbsentDrivers []string          `json:"absent_drivers,omitempty"`
	Files         map[Part]FileInfo `json:"files"`
}

// FileInfo describes a part.
type FileInfo struct {
	Size int64 `json:"size_bytes"`
	// Digest is a SHA-256 over the parts of the file that are not zero: of each 64 KiB chunk with any other byte, its offset (64 bits,
	// little-endian) and its bytes. So a disk costs as much to check as there is on it, however large it is.
	Digest string `json:"digest"`
	// Checksum is that of the root file system as the bottom layer of a disk (see layer.Layer.RawChecksum), so that snapshots of
	// machines with this image need not read it.
	Checksum string `json:"checksum,omitempty"`
}

// VersionError says that an image is of a version that this program does not know.
type VersionError struct{ Schema string }

func (e *VersionError) Error() string {
	return fmt.Sprintf("image has schema %q, this program knows %q", e.Schema, Schema)
}

// ParseManifest reads and checks an image.json. Fields that are not known are an error: they might matter.
func ParseManifest(text []byte) (Manifest, error) {
	var m Manifest
	if len(text) > maxManifest {
		return m, fmt.Errorf("parse %s: longer than %d bytes", manifestName, maxManifest)
	}
	var version struct {
		Schema string `json:"schema"`
	}
	if err := json.Unmarshal(text, &version); err != nil {
		return m, fmt.Errorf("parse %s: %w", manifestName, err)
	}
	if version.Schema != Schema {
		return m, &VersionError{Schema: version.Schema}
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	err := decoder.Decode(&m)
	if err == nil {
		if _, more := decoder.Token(); more != io.EOF {
			err = errors.New("something follows the object")
		}
	}
	if err == nil {
		err = m.check()
	}
	if err != nil {
		return Manifest{}, fmt.Errorf("parse %s: %w", manifestName, err)
	}
	return m, nil
}

func (m *Manifest) check() error {
	switch {
	case m.Mode != initramfs.ModeHandover && m.Mode != initramfs.ModePID1:
		return fmt.Errorf("mode %q is not known", m.Mode)
	case len(m.CommandLine) > maxCommandLine || strings.ContainsFunc(m.CommandLine, func(r rune) bool { return r < ' ' }):
		return errors.New("command line is too long or has control characters")
	case len(m.Hostname) > 64:
		return errors.New("hostname is too long")
	case !isHash(m.ID):
		return errors.New("id is no hash")
	}
	for part, info := range m.Files {
		if part != Kernel && part != Initrd && part != Rootfs {
			return fmt.Errorf("file %q is not known", part)
		}
		if info.Size <= 0 || info.Size > maxPartSize || !isHash(info.Digest) {
			return fmt.Errorf("file %q has no possible size or checksum", part)
		}
		if info.Checksum != "" && (part != Rootfs || !snapshot.IsRawChecksum(info.Checksum)) {
			return fmt.Errorf("file %q has no possible checksum as a layer", part)
		}
	}
	_, kernel := m.Files[Kernel]
	_, initrd := m.Files[Initrd]
	_, rootfs := m.Files[Rootfs]
	if !kernel || !initrd {
		return errors.New("kernel or initrd is missing")
	}
	if rootfs != (m.RootDevice != "") || rootfs && (!path.IsAbs(m.RootDevice) || path.Clean(m.RootDevice) != m.RootDevice) {
		return errors.New("root device does not fit the files")
	}
	return nil
}

func isHash(text string) bool {
	raw, err := hex.DecodeString(text)
	return err == nil && len(raw) == sha256.Size
}

// seal gives the manifest its id.
func (m *Manifest) seal() error {
	plain := *m
	plain.ID, plain.CreatedAt = "", time.Time{}
	text, err := json.Marshal(plain)
	if err != nil {
		return err
	}
	sum := sha256.Sum256(text)
	m.ID = hex.EncodeToString(sum[:])
	return nil
}
