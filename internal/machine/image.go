package machine

import (
	"errors"
	"fmt"
	"os"

	"github.com/forkvm/forkvm/guest/image"
	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/snapshot/layer"
)

// rootDisk is the name of the disk with the root file system.
const rootDisk = "root"

// Size says what an image does not: how big the machine is.
type Size struct {
	CPUs        int
	MemoryBytes uint64
	// CommandLine is added to the image's own.
	CommandLine string
	// NetworkMTU is the shape's.
	NetworkMTU int
}

// FromImage returns what a cold boot of an image starts from: the shape and the
// disks, and the kernel. The caller closes both.
func FromImage(img *image.Image, name string, size Size) (*Checkpoint, *Kernel, error) {
	manifest := img.Manifest()
	c := &Checkpoint{Shape: Shape{
		CPUs:        size.CPUs,
		MemoryBytes: size.MemoryBytes,
		CommandLine: manifest.CommandLine,
		Kernel:      manifest.KernelRelease,
		Image:       name,
		GuestAgent:  true,
		NetworkMTU:  size.NetworkMTU,
	}}
	if size.CommandLine != "" {
		c.Shape.CommandLine += " " + size.CommandLine
	}
	if err := c.addRoot(img); err != nil {
		return nil, nil, fmt.Errorf("open image (%s): %w", name, errors.Join(err, c.Close()))
	}
	k := &Kernel{}
	var err error
	if k.Image, err = img.OpenPart(image.Kernel); err == nil {
		k.Initrd, err = img.OpenPart(image.Initrd)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("open image (%s): %w", name, errors.Join(err, c.Close(), k.Close()))
	}
	return c, k, nil
}

func (c *Checkpoint) addRoot(img *image.Image) error {
	if !img.Has(image.Rootfs) {
		return nil
	}
	f, err := img.OpenPart(image.Rootfs)
	if err != nil {
		return err
	}
	// The checksum is the image's word: nobody reads the disk to snapshot it.
	l, err := layer.OpenRawWith(f, layer.RawOptions{Checksum: img.Manifest().Files[image.Rootfs].Checksum})
	if err != nil {
		return errors.Join(err, f.Close())
	}
	c.Disks = append(c.Disks, []*layer.Layer{l})
	info, err := f.Stat()
	if err != nil {
		return err
	}
	c.Shape.Disks = append(c.Shape.Disks, DiskShape{Name: rootDisk, Size: info.Size()})
	return nil
}

// NewTops makes the empty top layers for the disks of a shape: files without a
// name in dir, which are gone with their last descriptor. Read-only disks have
// nil. The caller closes what it does not hand on.
func NewTops(s Shape, dir string) ([]*os.File, error) {
	tops := make([]*os.File, len(s.Disks))
	for i, d := range s.Disks {
		if d.ReadOnly {
			continue
		}
		f, err := linux.UnnamedFile(dir, 0o600)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("create top layer (disk %s): %w", d.Name, err), linux.CloseFiles(tops...))
		}
		tops[i] = f
	}
	return tops, nil
}
