package lab

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"path"
	"strings"

	"github.com/forkvm/forkvm/guest/kernel"
)

// loadedModules are loaded before the first command runs.
var loadedModules = []string{"kvm-amd", "virtio_blk", "loop", "tun", "overlay"}

// offeredModules can be loaded by the kernel on demand or with modprobe: networks and file systems that tests use.
var offeredModules = []string{
	"vsock", "vsock_loopback", "vsock_diag", "vhost_vsock", "vhost_net",
	"veth", "bridge", "dummy", "macvtap", "ipvlan", "virtio_net", "af_packet",
	"sch_ingress", "cls_bpf", "act_bpf", "sch_tbf", "sch_fq_codel", "sch_netem",
	"nf_tables", "nft_chain_nat", "nft_masq", "nft_ct", "nft_nat", "nft_reject_inet", "nft_connlimit", "nf_conntrack_netlink", "nft_compat", "inet_diag", "tcp_diag", "unix_diag",
	"squashfs", "erofs", "fuse", "dm-mod", "nbd", "virtio_mmio", "virtio-rng", "virtio_balloon", "ptp_kvm",
}

// module is one kernel module.
type module struct {
	name    string   // with underscores, as the kernel has it
	depends []string // names of modules
	aliases []string
	object  []byte
}

// moduleName is the name by which the kernel knows a module: - and _ are the same in all that users write.
func moduleName(name string) string { return strings.ReplaceAll(name, "-", "_") }

// readModules reads all modules named above, each after those that it depends on. Of those that are only offered, a
// kernel may lack some: the list serves several kernels.
func readModules(k *kernel.Kernel) ([]module, error) {
	list, _, err := k.Modules(drivers(loadedModules), drivers(offeredModules))
	if err != nil {
		return nil, err
	}
	modules := make([]module, len(list))
	for i, m := range list {
		modules[i] = module{name: m.Name, object: withoutSignature(m.Content)}
		if modules[i].depends, modules[i].aliases, err = modinfo(m.Content); err != nil {
			return nil, fmt.Errorf("read module %s: %w", m.Name, err)
		}
	}
	return modules, nil
}

func drivers(names []string) []kernel.Driver {
	list := make([]kernel.Driver, len(names))
	for i, name := range names {
		list[i] = kernel.Driver{Module: name}
	}
	return list
}

// needed returns the modules that must be loaded for the named ones, in order.
func needed(ordered []module, names []string) []module {
	want := make(map[string]bool)
	for _, name := range names {
		want[moduleName(name)] = true
	}
	var picked []module
	// Backwards, a module's needs are met after the module itself.
	for i := len(ordered) - 1; i >= 0; i-- {
		if m := ordered[i]; want[m.name] {
			picked = append([]module{m}, picked...)
			for _, need := range m.depends {
				want[need] = true
			}
		}
	}
	return picked
}

const signatureMark = "~Module signature appended~\n"

// withoutSignature cuts a module's signature off. The lab's kernel does not insist on it, and checking it would hash
// megabytes under emulation at every boot. The mark comes after the signature and a structure of 12 bytes that ends with
// the signature's length, big endian (struct module_signature).
func withoutSignature(object []byte) []byte {
	rest, ok := bytes.CutSuffix(object, []byte(signatureMark))
	if !ok || len(rest) < 12 {
		return object
	}
	length := uint64(binary.BigEndian.Uint32(rest[len(rest)-4:])) + 12
	if length > uint64(len(rest)) {
		return object
	}
	return rest[:uint64(len(rest))-length]
}

// modinfo reads a module's needs and aliases from its .modinfo section: strings "key=value", each ended by a zero byte.
func modinfo(object []byte) (depends, aliases []string, err error) {
	file, err := elf.NewFile(bytes.NewReader(object))
	if err != nil {
		return nil, nil, err
	}
	section := file.Section(".modinfo")
	if section == nil {
		return nil, nil, fmt.Errorf("no .modinfo section")
	}
	data, err := section.Data()
	if err != nil {
		return nil, nil, err
	}
	for _, field := range strings.Split(string(data), "\x00") {
		key, value, _ := strings.Cut(field, "=")
		switch {
		case key == "depends" && value != "":
			for _, need := range strings.Split(value, ",") {
				depends = append(depends, moduleName(need))
			}
		case key == "alias":
			aliases = append(aliases, value)
		}
	}
	return depends, aliases, nil
}

// addModules puts the modules and the index files that modprobe reads into t, and the list of those to load at once.
func (t tree) addModules(release string, ordered []module) {
	const subdirectory = "kernel"
	root := path.Join("/usr/lib/modules", release)
	file := func(m module) string { return path.Join(subdirectory, m.name+".ko") }
	var dep, alias, load strings.Builder
	for _, m := range ordered {
		t.file(path.Join(root, file(m)), 0o644, m.object)
		fmt.Fprintf(&dep, "%s:", file(m))
		all := needed(ordered, m.depends)
		for i := len(all) - 1; i >= 0; i-- { // modprobe loads from the end
			fmt.Fprintf(&dep, " %s", file(all[i]))
		}
		dep.WriteByte('\n')
		for _, name := range m.aliases {
			fmt.Fprintf(&alias, "alias %s %s\n", name, m.name)
		}
	}
	for _, m := range needed(ordered, loadedModules) {
		fmt.Fprintln(&load, path.Join(root, file(m)))
	}
	t.file(path.Join(root, "modules.dep"), 0o644, []byte(dep.String()))
	t.file(path.Join(root, "modules.alias"), 0o644, []byte(alias.String()))
	t.file("/usr/lib/modules/load", 0o644, []byte(load.String()))
}
