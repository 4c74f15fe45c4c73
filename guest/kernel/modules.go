package kernel

import (
	"bytes"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/forkvm/forkvm/guest/internal/decompress"
)

// Module is a module that a guest loads.
type Module struct {
	Name    string // with underscores, as the kernel has it
	Content []byte // the uncompressed ELF object
}

// Driver is something a guest needs its kernel for.
type Driver struct {
	Module string // name of the module
	Option string // CONFIG_ option that builds it
	// Marker is text that is in every kernel that has the driver built in; it decides when nothing else is known about a kernel.
	Marker string
}

// Required are the drivers without which a guest cannot be reached or has no disk.
func Required() []Driver {
	return []Driver{
		{Module: "virtio_mmio", Option: "CONFIG_VIRTIO_MMIO", Marker: "LNRO0005"},
		{Module: "virtio_blk", Option: "CONFIG_VIRTIO_BLK", Marker: "virtio_blk"},
		{Module: "ext4", Option: "CONFIG_EXT4_FS", Marker: "ext4_inode_cache"},
		{Module: "vmw_vsock_virtio_transport", Option: "CONFIG_VIRTIO_VSOCKETS", Marker: "vmw_vsock_virtio_transport"},
	}
}

// Optional are drivers for the other devices, and what guests commonly expect.
func Optional() []Driver {
	return []Driver{
		{Module: "virtio_rng", Option: "CONFIG_HW_RANDOM_VIRTIO", Marker: "virtio_rng"},
		{Module: "virtio_net", Option: "CONFIG_VIRTIO_NET", Marker: "virtio_net"},
		{Module: "virtio_balloon", Option: "CONFIG_VIRTIO_BALLOON", Marker: "virtio_balloon"},
		{Module: "vmgenid", Option: "CONFIG_VMGENID", Marker: "VM_Gen_Counter"},
		{Module: "pvpanic_mmio", Option: "CONFIG_PVPANIC_MMIO", Marker: "pvpanic-mmio"},
		{Module: "overlay", Option: "CONFIG_OVERLAY_FS", Marker: "overlayfs"},
	}
}

// Modules returns what has to be loaded for the drivers, each module behind those that it depends on. What is built in needs no
// loading. A required driver that the kernel lacks is a MissingError that names all that is missing; an optional one is left out and
// named in absent.
func (k *Kernel) Modules(required, optional []Driver) (list []Module, absent []string, err error) {
	r := resolver{kernel: k, seen: map[string]bool{}}
	for _, d := range required {
		if err := r.add(d, ""); err != nil {
			return nil, nil, err
		}
	}
	if len(r.missing) > 0 {
		return nil, nil, &MissingError{Release: k.Release, Missing: r.missing}
	}
	for _, d := range optional {
		before := len(r.list)
		if err := r.add(d, ""); err != nil {
			return nil, nil, err
		}
		if len(r.missing) > 0 { // without what it depends on, it cannot be loaded either
			for _, m := range r.list[before:] {
				delete(r.seen, m.Name)
			}
			r.list, r.missing = r.list[:before], nil
			absent = append(absent, d.Module)
		}
	}
	return r.list, absent, nil
}

// ReadModule returns the uncompressed module of that name; nil if there is none.
func (k *Kernel) ReadModule(name string) ([]byte, error) {
	file, found := k.modules.paths[moduleName(name)]
	if !found {
		return nil, nil
	}
	packed, err := k.modules.read(file)
	if err != nil {
		return nil, fmt.Errorf("read module (%s): %w", name, err)
	}
	content, err := decompress.All(packed, maxModule)
	if err != nil {
		return nil, fmt.Errorf("read module (%s): %w", name, err)
	}
	return content, nil
}

// BuiltIn says whether the kernel has a driver without loading anything.
func (k *Kernel) BuiltIn(d Driver) bool {
	if k.builtin[moduleName(d.Module)] || k.config[d.Option] == "y" && d.Option != "" {
		return true
	}
	known := k.builtin != nil || k.config != nil
	return !known && d.Marker != "" && bytes.Contains(k.Image, []byte(d.Marker))
}

// resolver collects modules in the order of loading.
type resolver struct {
	kernel  *Kernel
	seen    map[string]bool
	list    []Module
	missing []Missing
}

func (r *resolver) add(d Driver, neededBy string) error {
	name := moduleName(d.Module)
	if r.seen[name] || r.kernel.BuiltIn(d) {
		return nil
	}
	content, err := r.kernel.ReadModule(name)
	if err != nil {
		return err
	}
	if content == nil {
		r.missing = append(r.missing, Missing{Name: name, Option: d.Option, Needed: neededBy})
		return nil
	}
	depends, err := moduleDepends(content)
	if err != nil {
		return fmt.Errorf("read module (%s): %w", name, err)
	}
	r.seen[name] = true // before its dependencies: a circle ends here
	for _, other := range depends {
		if err := r.add(Driver{Module: other}, name); err != nil {
			return err
		}
	}
	r.list = append(r.list, Module{Name: name, Content: content})
	return nil
}

// moduleName is a module's name as the kernel has it; files may have dashes.
func moduleName(name string) string { return strings.ReplaceAll(name, "-", "_") }

var moduleSuffixes = []string{".ko", ".ko.xz", ".ko.zst", ".ko.gz"}

// add enters the file of a module, whose path below the directory of the release decides between several of one name: one in updates/ or
// extra/ goes before the kernel's own, as depmod has it.
func (s *moduleSource) add(file, below string) {
	base := path.Base(file)
	at := strings.Index(base, ".ko")
	if at <= 0 || !slices.Contains(moduleSuffixes, base[at:]) {
		return
	}
	name := moduleName(base[:at])
	if _, found := s.paths[name]; found && strings.HasPrefix(below, "kernel/") {
		return
	}
	s.paths[name] = file
}

// parseBuiltin reads modules.builtin, a list of paths.
func parseBuiltin(text []byte) map[string]bool {
	builtin := map[string]bool{}
	for line := range strings.Lines(string(text)) {
		if name, found := strings.CutSuffix(path.Base(strings.TrimSpace(line)), ".ko"); found {
			builtin[moduleName(name)] = true
		}
	}
	return builtin
}
