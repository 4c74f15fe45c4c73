package machine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"

	"github.com/forkvm/forkvm/devices/nic"
	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/snapshot/layer"
	"github.com/forkvm/forkvm/snapshot/store"
)

// Limits of what a machine can be.
const (
	MaxDisks     = 8
	MaxDiskBytes = 64 << 40
)

// Shape is the hardware that a guest sees. A clone has the shape of its parent:
// it is part of a snapshot.
type Shape struct {
	CPUs        int         `json:"cpus"`
	MemoryBytes uint64      `json:"memory_bytes"`
	Disks       []DiskShape `json:"disks,omitempty"`
	// NetworkMTU is the size of the largest packet of the guest's network card, 0 if it has none.
	NetworkMTU int `json:"network_mtu,omitempty"`
	// Kernel is the release of the guest's kernel, if it is known.
	Kernel string `json:"kernel,omitempty"`
	// CommandLine is what the kernel was booted with.
	CommandLine string `json:"command_line"`
	// Image names what was booted, for people.
	Image string `json:"image,omitempty"`
	// GuestAgent says that the guest runs forkvm's guest agent, which a clone
	// then has to hear from before it counts as ready.
	GuestAgent bool `json:"guest_agent"`
}

// DiskShape is one disk as the guest sees it.
type DiskShape struct {
	// Name is the host's name of the disk, "root" for the first one. The guest
	// reads it as the serial number.
	Name     string `json:"name"`
	Size     int64  `json:"size"` // bytes, a multiple of 512
	ReadOnly bool   `json:"read_only"`
}

// Kernel is what a cold boot starts.
type Kernel struct {
	Image  *os.File // ELF with a PVH entry
	Initrd *os.File // nil: none
}

// Close closes the files.
func (k *Kernel) Close() error {
	err := linux.CloseFiles(k.Image, k.Initrd)
	k.Image, k.Initrd = nil, nil
	return err
}

// Vsock is the host's end of the guest's sockets.
type Vsock struct {
	// Listener, if set, is the Unix socket at which host programs ask for a
	// port of the guest ("CONNECT <port>\n").
	Listener net.Listener
	// Connect, if set, opens the host's end for a guest that connects to a port
	// of the host.
	Connect func(ctx context.Context, port uint32) (net.Conn, error)
}

// Config is everything a machine is made from. New takes over every file, layer
// and listener in it, also when it fails.
type Config struct {
	// Prepared has as many vCPUs as the shape.
	Prepared *Prepared
	Shape    Shape

	// Kernel for a cold boot, or State for a machine that goes on. Exactly one.
	Kernel *Kernel
	State  *snapshot.State

	// Memory is the stack of layers that guest RAM starts from, bottom first;
	// empty for a cold boot.
	Memory []*layer.Layer
	// WorkingSet says what to map ahead, or wants to be told; may be nil.
	WorkingSet *store.WorkingSet
	// HugePages has some of the pages of Memory once more; may be nil.
	HugePages *HugePages
	// Disks holds the stack of layers of each disk of the shape, bottom first.
	Disks [][]*layer.Layer
	// Tops has an empty writable file for each disk that is not read-only, and
	// nil for the others.
	Tops []*os.File

	Vsock Vsock
	// Network is the other end of the card that the shape says there is, nil if there is none, and MAC the card's address.
	Network Network
	MAC     nic.MAC
	// Console gets what the guest writes to its serial console. A slow writer
	// slows the guest.
	Console io.Writer
	// Generation is the new identity of the memory image for the guest's kernel
	// (VM generation id). It is required and must be unused.
	Generation [16]byte
	// OnDiskError, if set, hears of errors of the host's storage.
	OnDiskError func(disk string, err error)
	// Quiet, if set, is called shortly before the guest is stopped for a checkpoint
	// or a reset, and what it returns when it runs again: it keeps the process from
	// other work of its own, such as collecting garbage.
	Quiet func() (over func())
}

// Close closes every file that New has not taken over.
func (c *Config) Close() error {
	var errs []error
	if c.Prepared != nil {
		errs = append(errs, c.Prepared.Close())
		c.Prepared = nil
	}
	if c.Kernel != nil {
		errs = append(errs, c.Kernel.Close())
		c.Kernel = nil
	}
	errs = append(errs, closeLayers(c.Memory...), linux.CloseFiles(c.Tops...))
	for _, stack := range c.Disks {
		errs = append(errs, closeLayers(stack...))
	}
	c.Memory, c.Disks, c.Tops = nil, nil, nil
	if c.WorkingSet != nil {
		errs = append(errs, c.WorkingSet.Close())
		c.WorkingSet = nil
	}
	if c.HugePages != nil {
		errs = append(errs, c.HugePages.Close())
		c.HugePages = nil
	}
	if c.Network != nil {
		errs = append(errs, c.Network.Close())
		c.Network = nil
	}
	if c.Vsock.Listener != nil {
		errs = append(errs, c.Vsock.Listener.Close())
		c.Vsock.Listener = nil
	}
	return errors.Join(errs...)
}

func closeLayers(layers ...*layer.Layer) error {
	var errs []error
	for _, l := range layers {
		errs = append(errs, l.Close())
	}
	return errors.Join(errs...)
}

func (c *Config) validate() error {
	if c.Prepared == nil || c.Prepared.machine == nil {
		return errors.New("need a prepared virtual machine")
	}
	if n := c.Prepared.CPUs(); n != c.Shape.CPUs {
		return fmt.Errorf("%d vCPUs, but %d are prepared", c.Shape.CPUs, n)
	}
	if (c.Kernel == nil) == (c.State == nil) {
		return errors.New("need a kernel to boot or a state to go on from, and not both")
	}
	if c.Generation == ([16]byte{}) {
		return errors.New("need a generation id")
	}
	if err := c.Shape.Validate(); err != nil {
		return err
	}
	if len(c.Disks) != len(c.Shape.Disks) || len(c.Tops) != len(c.Shape.Disks) {
		return fmt.Errorf("%d disks, but layers for %d and tops for %d", len(c.Shape.Disks), len(c.Disks), len(c.Tops))
	}
	if (c.Shape.NetworkMTU != 0) != (c.Network != nil) {
		return errors.New("a network card needs a network, and a network a card")
	}
	for i, d := range c.Shape.Disks {
		if d.ReadOnly != (c.Tops[i] == nil) {
			return fmt.Errorf("disk %s: a writable disk needs a top layer, a read-only one must have none", d.Name)
		}
	}
	return nil
}

// Validate checks a shape, which may come from a file or another process. Size
// limits of CPUs and memory are the business of those who build them.
func (s *Shape) Validate() error {
	if len(s.Disks) > MaxDisks {
		return fmt.Errorf("%d disks: at most %d are possible", len(s.Disks), MaxDisks)
	}
	if s.NetworkMTU != 0 && (s.NetworkMTU < nic.MinMTU || s.NetworkMTU > nic.MaxMTU) {
		return fmt.Errorf("network card with packets of %d bytes: %d to %d are possible", s.NetworkMTU, nic.MinMTU, nic.MaxMTU)
	}
	names := map[string]bool{}
	for _, d := range s.Disks {
		if d.Name == "" || len(d.Name) > 20 || names[d.Name] {
			return fmt.Errorf("disk %q: a name of 1 to 20 bytes, unlike the others, is needed", d.Name)
		}
		names[d.Name] = true
		if d.Size <= 0 || d.Size > MaxDiskBytes || d.Size%512 != 0 {
			return fmt.Errorf("disk %s: %d bytes: a size above 0, up to %d and in whole sectors of 512 bytes is needed", d.Name, d.Size, int64(MaxDiskBytes))
		}
	}
	return nil
}
