// Package image makes and opens images: what a cold boot of a virtual machine needs, as a directory.
//
//	image.json    what is in the directory (Manifest)
//	vmlinux       the kernel, an ELF file with a PVH entry
//	initrd        initramfs with the guest agent and the modules
//	rootfs.ext4   disk with the root file system; absent if the initramfs is all there is
//
// An image does not change once it is made. It appears complete or not at all.
package image

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
)

// Part is a file of an image.
type Part string

// The parts, by the names of their files.
const (
	Kernel Part = "vmlinux"
	Initrd Part = "initrd"
	Rootfs Part = "rootfs.ext4"
)

const manifestName = "image.json"

// Image is an image on disk.
type Image struct {
	dir      string
	manifest Manifest
}

// NotFoundError says that a directory holds no image.
type NotFoundError struct{ Dir string }

func (e *NotFoundError) Error() string {
	return fmt.Sprintf("no image in %s: it has no %s", e.Dir, manifestName)
}

// CorruptError says what about an image is not as it was made.
type CorruptError struct{ Dir, File, Reason string }

func (e *CorruptError) Error() string {
	return fmt.Sprintf("image %s is corrupt: %s: %s", e.Dir, e.File, e.Reason)
}

// Open reads an image's manifest and checks that its parts are there and have the right sizes.
func Open(dir string) (*Image, error) {
	i := &Image{dir: dir}
	text, err := i.readManifest()
	if err != nil {
		return nil, err
	}
	if i.manifest, err = ParseManifest(text); err != nil {
		return nil, fmt.Errorf("open image (%s): %w", dir, err)
	}
	for part := range i.manifest.Files {
		f, err := i.OpenPart(part)
		if err != nil {
			return nil, err
		}
		f.Close()
	}
	return i, nil
}

func (i *Image) readManifest() ([]byte, error) {
	f, err := i.openFile(manifestName)
	if err != nil {
		if os.IsNotExist(err) {
			return nil, &NotFoundError{Dir: i.dir}
		}
		return nil, fmt.Errorf("open image (%s): %w", i.dir, err)
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxManifest+1))
	if err != nil {
		return nil, fmt.Errorf("open image (%s): %w", i.dir, err)
	}
	return text, nil
}

// openFile opens a regular file of the image; links do not count as one.
func (i *Image) openFile(name string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(i.dir, name), os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is no regular file", name)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// Dir is the image's directory.
func (i *Image) Dir() string { return i.dir }

// Manifest is what the image says about itself.
func (i *Image) Manifest() Manifest { return i.manifest }

// Has says whether the image has a part.
func (i *Image) Has(part Part) bool {
	_, found := i.manifest.Files[part]
	return found
}

// OpenPart opens a part for reading. The caller closes it.
func (i *Image) OpenPart(part Part) (*os.File, error) {
	want, found := i.manifest.Files[part]
	if !found {
		return nil, fmt.Errorf("open image (%s): it has no %s", i.dir, part)
	}
	f, err := i.openFile(string(part))
	if os.IsNotExist(err) {
		return nil, &CorruptError{Dir: i.dir, File: string(part), Reason: "it is missing"}
	}
	if err != nil {
		return nil, fmt.Errorf("open image (%s): %w", i.dir, err)
	}
	info, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("open image (%s): %w", i.dir, err)
	}
	if info.Size() != want.Size {
		f.Close()
		return nil, &CorruptError{Dir: i.dir, File: string(part), Reason: fmt.Sprintf("it has %d bytes, not %d", info.Size(), want.Size)}
	}
	return f, nil
}

// Verify reads all parts and compares them with the checksums in the manifest.
func (i *Image) Verify(ctx context.Context) error {
	for _, part := range []Part{Kernel, Initrd, Rootfs} {
		want, found := i.manifest.Files[part]
		if !found {
			continue
		}
		f, err := i.OpenPart(part)
		if err != nil {
			return err
		}
		got, err := digest(ctx, f, want.Size)
		f.Close()
		if err != nil {
			return fmt.Errorf("verify image (%s): %w", i.dir, err)
		}
		if got != want.Digest {
			return &CorruptError{Dir: i.dir, File: string(part), Reason: "its checksum differs"}
		}
	}
	return nil
}
