package lab

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strings"
)

// loadedModules are loaded before the first command runs.
var loadedModules = []string{"kvm-amd", "virtio_blk", "loop", "tun", "overlay"}

// offeredModules can be loaded by the kernel on demand or with modprobe: networks and file systems that tests use.
var offeredModules = []string{
	"vsock", "vsock_loopback", "vsock_diag", "vhost_vsock", "vhost_net",
	"veth", "bridge", "dummy", "macvtap", "ipvlan", "virtio_net", "af_packet",
	"sch_ingress", "cls_bpf", "act_bpf", "sch_tbf", "sch_fq_codel", "sch_netem",
	"nf_tables", "nft_chain_nat", "nft_masq", "nft_ct", "nft_compat", "inet_diag", "tcp_diag", "unix_diag",
	"squashfs", "erofs", "fuse", "dm-mod", "nbd", "virtio_mmio", "virtio-rng", "virtio_balloon", "ptp_kvm",
}

// module is one kernel module as the kernel package holds it.
type module struct {
	name    string   // normalised: with underscores
	path    string   // below lib/modules/VERSION, without compression suffix
	file    string   // on this machine
	depends []string // normalised
	aliases []string
	object  []byte // decompressed
}

// moduleName is the name by which the kernel knows a module: - and _ are the same in all that users write.
func moduleName(name string) string { return strings.ReplaceAll(name, "-", "_") }

// findModules lists the modules below dir (lib/modules/VERSION) by name.
func findModules(dir string) (map[string]string, error) {
	files := make(map[string]string)
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if base, _, ok := strings.Cut(entry.Name(), ".ko"); ok && entry.Type().IsRegular() {
			files[moduleName(base)] = path
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list modules of %s: %w", dir, err)
	}
	return files, nil
}

// readModules reads the wanted modules and all that they depend on, ordered so that a module comes after what it needs.
// A module that is built into the kernel, or that this kernel does not have, is left out when it was only wanted: the
// sets above serve several kernels.
func readModules(dir string, wanted []string) ([]module, error) {
	files, err := findModules(dir)
	if err != nil {
		return nil, err
	}
	read := make(map[string]module)
	var load func(name string) error
	load = func(name string) error {
		if _, done := read[name]; done {
			return nil
		}
		m, err := readModule(dir, files[name])
		if err != nil {
			return err
		}
		m.name = name
		read[name] = m
		for _, need := range m.depends {
			if files[need] == "" {
				return fmt.Errorf("read module %s: needs %s, which the package lacks", name, need)
			}
			if err := load(need); err != nil {
				return err
			}
		}
		return nil
	}
	for _, name := range wanted {
		if name = moduleName(name); files[name] == "" {
			continue
		}
		if err := load(name); err != nil {
			return nil, err
		}
	}
	return orderModules(read), nil
}

// orderModules puts each module after those it depends on, and is otherwise alphabetical.
func orderModules(set map[string]module) []module {
	names := make([]string, 0, len(set))
	for name := range set {
		names = append(names, name)
	}
	sort.Strings(names)
	var ordered []module
	placed := make(map[string]bool)
	var place func(name string)
	place = func(name string) {
		if placed[name] {
			return
		}
		placed[name] = true // before its needs: a cycle, which the kernel would refuse, must not hang us
		for _, need := range set[name].depends {
			place(need)
		}
		ordered = append(ordered, set[name])
	}
	for _, name := range names {
		place(name)
	}
	return ordered
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

func readModule(dir, file string) (module, error) {
	relative, err := filepath.Rel(dir, file)
	if err != nil {
		return module{}, err
	}
	base, suffix, _ := strings.Cut(relative, ".ko")
	object, err := decompress(file, suffix)
	if err != nil {
		return module{}, err
	}
	object = withoutSignature(object)
	m := module{path: base + ".ko", file: file, object: object}
	if m.depends, m.aliases, err = modinfo(object); err != nil {
		return module{}, fmt.Errorf("read module %s: %w", file, err)
	}
	return m, nil
}

func decompress(file, suffix string) ([]byte, error) {
	var program string
	switch suffix {
	case "":
		return os.ReadFile(file)
	case ".xz":
		program = "xz"
	case ".zst":
		program = "zstd"
	case ".gz":
		program = "gzip"
	default:
		return nil, fmt.Errorf("decompress %s: unknown suffix", file)
	}
	var stderr bytes.Buffer
	cmd := exec.Command(program, "-dc", file)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("decompress %s: %w %s", file, err, bytes.TrimSpace(stderr.Bytes()))
	}
	return out, nil
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
func (t tree) addModules(version string, ordered []module) {
	root := filepath.Join("/usr/lib/modules", version)
	var dep, alias, load strings.Builder
	for _, m := range ordered {
		t.file(filepath.Join(root, m.path), 0o644, m.object)
		fmt.Fprintf(&dep, "%s:", m.path)
		all := needed(ordered, m.depends)
		for i := len(all) - 1; i >= 0; i-- { // modprobe loads from the end
			fmt.Fprintf(&dep, " %s", all[i].path)
		}
		dep.WriteByte('\n')
		for _, name := range m.aliases {
			fmt.Fprintf(&alias, "alias %s %s\n", name, m.name)
		}
	}
	for _, m := range needed(ordered, loadedModules) {
		fmt.Fprintln(&load, filepath.Join(root, m.path))
	}
	t.file(filepath.Join(root, "modules.dep"), 0o644, []byte(dep.String()))
	t.file(filepath.Join(root, "modules.alias"), 0o644, []byte(alias.String()))
	t.file("/usr/lib/modules/load", 0o644, []byte(load.String()))
}
