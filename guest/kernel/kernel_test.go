package kernel

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
	"github.com/ulikunitz/xz"
)

const release = "6.1.0-test"

func write(out *bytes.Buffer, values ...any) {
	for _, v := range values {
		binary.Write(out, binary.LittleEndian, v)
	}
}

func elfHeader(kind elf.Type, machine elf.Machine) elf.Header64 {
	h := elf.Header64{Type: uint16(kind), Machine: uint16(machine), Version: 1, Ehsize: 64, Phentsize: 56, Shentsize: 64}
	copy(h.Ident[:], elf.ELFMAG)
	h.Ident[elf.EI_CLASS], h.Ident[elf.EI_DATA], h.Ident[elf.EI_VERSION] = byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), 1
	return h
}

// vmlinux makes the smallest ELF file that passes for a kernel: something to load, which holds the text given, and notes.
func vmlinux(machine elf.Machine, text string, notes ...[]byte) []byte {
	note := bytes.Join(notes, nil)
	header := elfHeader(elf.ET_EXEC, machine)
	header.Phoff, header.Phnum = 64, 2
	const at = 64 + 2*56
	var out bytes.Buffer
	write(&out, header,
		elf.Prog64{Type: uint32(elf.PT_LOAD), Off: at, Filesz: uint64(len(text)), Memsz: uint64(len(text))},
		elf.Prog64{Type: uint32(elf.PT_NOTE), Off: at + uint64(len(text)), Filesz: uint64(len(note)), Memsz: uint64(len(note))},
		[]byte(text), note)
	return out.Bytes()
}

func note(name string, kind uint32, content ...byte) []byte {
	var out bytes.Buffer
	padded := append([]byte(name), 0)
	write(&out, uint32(len(padded)), uint32(len(content)), kind)
	for _, part := range [][]byte{padded, content} {
		out.Write(part)
		out.Write(make([]byte, -len(part)&3))
	}
	return out.Bytes()
}

func pvhNote() []byte { return note("Xen", notePVH, 0, 0, 0, 1) }

// goodImage is a kernel with everything that Required asks for built in.
func goodImage() []byte {
	text := "Linux version is not this. Linux version " + release + " (someone@somewhere)\x00" + strings.Repeat("text ", 5000)
	for _, d := range Required() {
		text += d.Marker + "\x00"
	}
	return vmlinux(elf.EM_X86_64, text, note("Linux", 257, 1), note("Xen", 6, 'x', 0), pvhNote())
}

func bareImage() []byte {
	return vmlinux(elf.EM_X86_64, "Linux version "+release+" (someone@somewhere)", pvhNote())
}

// bzImage wraps a compressed kernel as the kernel's build does.
func bzImage(packed []byte, size int, appendSize bool) []byte {
	if appendSize {
		packed = binary.LittleEndian.AppendUint32(bytes.Clone(packed), uint32(size))
	}
	const sectors, offset = 3, 100
	image := make([]byte, (sectors+1)*sector+offset)
	image[setupSectors] = sectors
	copy(image[setupMagic:], "HdrS")
	le := binary.LittleEndian
	le.PutUint16(image[setupVersion:], 0x20f)
	le.PutUint16(image[setupRelease:], 0x400)
	copy(image[0x400+sector:], release+" (someone@somewhere) #1\x00")
	le.PutUint32(image[payloadOffset:], offset)
	le.PutUint32(image[payloadLength:], uint32(len(packed)))
	return append(append(image, packed...), "relocations"...)
}

type packer struct {
	name string
	open func(io.Writer) (io.WriteCloser, error)
	size bool // the build appends the size
}

var packers = []packer{
	{"gzip", func(w io.Writer) (io.WriteCloser, error) { return gzip.NewWriter(w), nil }, false},
	{"zstd", func(w io.Writer) (io.WriteCloser, error) { return zstd.NewWriter(w) }, true},
	{"xz", func(w io.Writer) (io.WriteCloser, error) { return xz.NewWriter(w) }, true},
	{"lz4", func(w io.Writer) (io.WriteCloser, error) {
		z := lz4.NewWriter(w)
		return z, z.Apply(lz4.LegacyOption(true))
	}, true},
}

func (p packer) pack(t testing.TB, content []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	w, err := p.open(&out)
	if err == nil {
		_, err = w.Write(content)
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// module makes an ELF object with nothing in it but what the module says about itself.
func module(depends ...string) []byte {
	info := "license=GPL\x00depends=" + strings.Join(depends, ",") + "\x00name=x\x00"
	names := "\x00.modinfo\x00.shstrtab\x00"
	header := elfHeader(elf.ET_REL, elf.EM_X86_64)
	header.Shoff, header.Shnum, header.Shstrndx = 64+uint64(len(info)+len(names)), 3, 2
	var out bytes.Buffer
	write(&out, header, []byte(info), []byte(names),
		elf.Section64{},
		elf.Section64{Name: 1, Type: uint32(elf.SHT_PROGBITS), Off: 64, Size: uint64(len(info))},
		elf.Section64{Name: 10, Type: uint32(elf.SHT_STRTAB), Off: 64 + uint64(len(info)), Size: uint64(len(names))})
	return out.Bytes()
}

// modular are the files of a kernel with modules, by path.
func modular(t testing.TB) map[string][]byte {
	image := bareImage()
	base := "lib/modules/" + release + "/"
	return map[string][]byte{
		"boot/vmlinuz-" + release:                                          bzImage(packers[1].pack(t, image), len(image), true),
		"boot/config-" + release:                                           []byte("# a comment\nCONFIG_EXT4_FS=y\nCONFIG_VIRTIO_MMIO=m\n"),
		base + "modules.builtin":                                           []byte("kernel/drivers/virtio/virtio.ko\nkernel/drivers/virt/vmgenid.ko\n"),
		base + "kernel/drivers/virtio/virtio_mmio.ko.xz":                   packers[2].pack(t, module()),
		base + "kernel/drivers/block/virtio_blk.ko.zst":                    packers[1].pack(t, module("virtio")),
		base + "kernel/net/vmw_vsock/vmw_vsock_virtio_transport.ko.gz":     packers[0].pack(t, module("vmw_vsock_virtio_transport_common", "vsock")),
		base + "kernel/net/vmw_vsock/vmw_vsock_virtio_transport_common.ko": module("vsock"),
		base + "kernel/net/vmw_vsock/vsock.ko":                             module(),
		base + "kernel/drivers/char/hw_random/virtio-rng.ko":               module("rng-core"),
		base + "kernel/drivers/char/hw_random/rng-core.ko":                 module(),
		base + "kernel/drivers/net/virtio_net.ko":                          module("net_failover"), // which is absent
		base + "kernel/drivers/net/a.ko":                                   module("b"),
		base + "kernel/drivers/net/b.ko":                                   module("a"),
		base + "updates/vsock.ko":                                          module("updated"),
		base + "updates/updated.ko":                                        module(),
		"usr/share/doc/x":                                                  []byte("text"),
	}
}

func tree(contents map[string][]byte) fstest.MapFS {
	out := fstest.MapFS{}
	for name, content := range contents {
		out[name] = &fstest.MapFile{Data: content}
	}
	return out
}

// debianPackage wraps files as dpkg-deb does.
func debianPackage(t testing.TB, contents map[string][]byte, p packer) []byte {
	t.Helper()
	var data bytes.Buffer
	w := tar.NewWriter(&data)
	for _, name := range slices.Sorted(maps.Keys(contents)) {
		w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "./" + name, Size: int64(len(contents[name]))})
		w.Write(contents[name])
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	out := []byte(arMagic)
	for _, member := range []struct {
		name    string
		content []byte
	}{{"debian-binary", []byte("2.0\n")}, {"control.tar.xz", []byte("odd")}, {"data.tar." + p.name, p.pack(t, data.Bytes())}} {
		out = fmt.Appendf(out, "%-16s%-12d%-6d%-6d%-8o%-10d`\n", member.name, 0, 0, 0, 0o644, len(member.content))
		out = append(out, member.content...)
		out = append(out, make([]byte, len(member.content)&1)...)
	}
	return out
}

func TestImageComesOutOfEveryWrapping(t *testing.T) {
	want := goodImage()
	inputs := map[string][]byte{"ELF": want}
	for _, p := range packers {
		inputs["bzImage with "+p.name] = bzImage(p.pack(t, want), len(want), p.size)
	}
	for name, input := range inputs {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "vmlinuz")
			if err := os.WriteFile(path, input, 0o644); err != nil {
				t.Fatal(err)
			}
			k, err := Open(path)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(k.Image, want) || k.Release != release {
				t.Errorf("%d bytes of %q", len(k.Image), k.Release)
			}
			modules, _, err := k.Modules(Required(), nil)
			if err != nil || len(modules) > 0 {
				t.Errorf("built in: %v, %v", modules, err)
			}
		})
	}
}

func TestWhatIsNoKernel(t *testing.T) {
	good := goodImage()
	z := packers[1].pack(t, good)
	old := bzImage(z, len(good), true)
	old[setupVersion] = 7
	for name, test := range map[string]struct {
		content []byte
		message string
	}{
		"empty":           {nil, "too short"},
		"text":            {[]byte(strings.Repeat("text", 1000)), "neither an ELF file nor a bzImage"},
		"ELF rubbish":     {[]byte("\x7fELF" + strings.Repeat("\xff", 100)), "read ELF file"},
		"other machine":   {vmlinux(elf.EM_AARCH64, "x", pvhNote()), "not for x86-64"},
		"object file":     {module(), "nothing to load"},
		"no PVH":          {vmlinux(elf.EM_X86_64, "x", note("Xen", 6, 1, 2, 3, 4)), "lacks PVH entry (CONFIG_PVH)"},
		"cut":             {bzImage(z, len(good), true)[:2200], "cut short"},
		"damaged":         {bzImage(z[:len(z)/2], len(good), true), "unpack bzImage"},
		"other size":      {bzImage(z, len(good)+1, true), "holds"},
		"no compression":  {bzImage(good[100:], len(good), true), "no known way"},
		"LZO":             {bzImage([]byte("\x89LZO\x00\x0d\x0a\x1a\x0a rest"), 9, true), "lzo is not supported"},
		"something else":  {bzImage(packers[1].pack(t, []byte("no kernel")), 9, true), "no ELF file"},
		"old protocol":    {old, "boot protocol 2.07"},
		"damaged package": {[]byte(arMagic + strings.Repeat("x", 100)), "damaged"},
		"other archive":   {[]byte(arMagic), "no data.tar"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "file")
			if err := os.WriteFile(path, test.content, 0o644); err != nil {
				t.Fatal(err)
			}
			_, err := Open(path)
			var format *FormatError
			var missing *MissingError
			if !errors.As(err, &format) && !errors.As(err, &missing) || !strings.Contains(err.Error(), test.message) {
				t.Errorf("got %v", err)
			}
		})
	}
	if _, err := Open(filepath.Join(t.TempDir(), "absent")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("absent file: %v", err)
	}
}

func names(modules []Module) string {
	var list []string
	for _, m := range modules {
		list = append(list, m.Name)
	}
	return strings.Join(list, " ")
}

func TestModulesComeInTheOrderOfLoading(t *testing.T) {
	fromTree, err := FromTree(tree(modular(t)))
	if err != nil {
		t.Fatal(err)
	}
	kernels := map[string]*Kernel{"tree": fromTree}
	for _, p := range packers[:3] {
		k, err := FromPackage(bytes.NewReader(debianPackage(t, modular(t), p)))
		if err != nil {
			t.Fatal(p.name, err)
		}
		kernels["package with "+p.name] = k
	}
	for name, k := range kernels {
		t.Run(name, func(t *testing.T) {
			modules, absent, err := k.Modules(Required(), Optional())
			if err != nil {
				t.Fatal(err)
			}
			const want = "virtio_mmio virtio_blk updated vsock vmw_vsock_virtio_transport_common vmw_vsock_virtio_transport rng_core virtio_rng"
			if got := names(modules); got != want {
				t.Errorf("modules %s\nwant    %s", got, want)
			}
			if got := strings.Join(absent, " "); got != "virtio_net virtio_balloon pvpanic_mmio overlay" {
				t.Errorf("absent: %s", got)
			}
			if !bytes.Equal(modules[0].Content, module()) || k.Release != release {
				t.Errorf("content of %d bytes, release %s", len(modules[0].Content), k.Release)
			}
		})
	}
}

func TestCircleOfModulesEnds(t *testing.T) {
	k, err := FromTree(tree(modular(t)))
	if err != nil {
		t.Fatal(err)
	}
	modules, _, err := k.Modules([]Driver{{Module: "a"}}, nil)
	if err != nil || names(modules) != "b a" {
		t.Errorf("%s, %v", names(modules), err)
	}
}

func TestMissingDriversAreAllNamed(t *testing.T) {
	contents := modular(t)
	delete(contents, "lib/modules/"+release+"/kernel/drivers/virtio/virtio_mmio.ko.xz")
	delete(contents, "lib/modules/"+release+"/kernel/net/vmw_vsock/vmw_vsock_virtio_transport_common.ko")
	k, err := FromTree(tree(contents))
	if err != nil {
		t.Fatal(err)
	}
	_, _, err = k.Modules(Required(), nil)
	var missing *MissingError
	if !errors.As(err, &missing) {
		t.Fatalf("got %v", err)
	}
	const want = "kernel " + release + " lacks virtio_mmio (CONFIG_VIRTIO_MMIO); vmw_vsock_virtio_transport_common, needed by vmw_vsock_virtio_transport"
	if err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
	// A kernel file alone has only what is built in.
	k, err = FromImage(bareImage())
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err = k.Modules(Required(), nil); !errors.As(err, &missing) || len(missing.Missing) != len(Required()) {
		t.Errorf("got %v", err)
	}
}

func TestEmbeddedConfigurationCounts(t *testing.T) {
	config := "CONFIG_VIRTIO_MMIO=y\nCONFIG_VIRTIO_BLK=y\nCONFIG_EXT4_FS=y\n# CONFIG_VIRTIO_VSOCKETS is not set\n"
	text := "Linux version " + release + " IKCFG_ST" + string(packers[0].pack(t, []byte(config))) + "IKCFG_ED"
	k, err := FromImage(vmlinux(elf.EM_X86_64, text, pvhNote()))
	if err != nil {
		t.Fatal(err)
	}
	_, _, err = k.Modules(Required(), nil)
	if err == nil || !strings.HasSuffix(err.Error(), " lacks vmw_vsock_virtio_transport (CONFIG_VIRTIO_VSOCKETS)") {
		t.Errorf("got %v", err)
	}
}

func TestTreesThatHoldNoOneKernel(t *testing.T) {
	contents := modular(t)
	contents["boot/vmlinuz-6.2.0"] = contents["boot/vmlinuz-"+release]
	if _, err := FromTree(tree(contents)); err == nil || !strings.Contains(err.Error(), "several kernels") {
		t.Errorf("two kernels: %v", err)
	}
	if _, err := FromTree(tree(nil)); err == nil || !strings.Contains(err.Error(), "no boot/vmlinuz") {
		t.Errorf("no kernel: %v", err)
	}
	if _, err := FromPackage(bytes.NewReader(debianPackage(t, map[string][]byte{"usr/share/doc/x": nil}, packers[2]))); err == nil || !strings.Contains(err.Error(), "the package holds no kernel") {
		t.Errorf("package without a kernel: %v", err)
	}
}

// The kernel that distributions ship, if the environment names one.
func TestDebianPackage(t *testing.T) {
	path := os.Getenv("FORKVM_TEST_KERNEL_DEB")
	if path == "" {
		t.Skip("FORKVM_TEST_KERNEL_DEB is not set to the path of a linux-image package (apt-get download linux-image-6.12…-cloud-amd64)")
	}
	k, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	modules, _, err := k.Modules(Required(), Optional())
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s: %d bytes, modules %s", k.Release, len(k.Image), names(modules))
	if !strings.HasPrefix(k.Release, "6.") || len(modules) < 4 {
		t.Errorf("release %q, modules %s", k.Release, names(modules))
	}
}

func FuzzImage(f *testing.F) {
	good := goodImage()
	f.Add(good)
	for _, p := range packers {
		f.Add(bzImage(p.pack(f, good), len(good), p.size))
	}
	f.Fuzz(func(t *testing.T, content []byte) {
		if k, err := FromImage(content); err == nil {
			k.Modules(Required(), Optional())
		}
	})
}

func FuzzPackage(f *testing.F) {
	f.Add(debianPackage(f, modular(f), packers[0]))
	f.Fuzz(func(t *testing.T, content []byte) {
		if k, err := FromPackage(bytes.NewReader(content)); err == nil {
			k.Modules(Required(), Optional())
		}
	})
}

func FuzzModule(f *testing.F) {
	f.Add(module("a", "b-c"))
	f.Fuzz(func(t *testing.T, content []byte) {
		if list, err := moduleDepends(content); err == nil && slices.Contains(list, "") {
			t.Error("a module without a name")
		}
	})
}

func TestCacheGivesTheSameKernel(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kernel.deb")
	if err := os.WriteFile(path, debianPackage(t, modular(t), packers[0]), 0o644); err != nil {
		t.Fatal(err)
	}
	cache := filepath.Join(t.TempDir(), "cache")
	var before []Module
	for round := range 3 {
		k, err := OpenCached(path, cache)
		if err != nil {
			t.Fatal(err)
		}
		modules, _, err := k.Modules(Required(), Optional())
		if err != nil {
			t.Fatal(err)
		}
		if round > 0 && names(modules) != names(before) {
			t.Errorf("modules %s, before %s", names(modules), names(before))
		}
		before = modules
	}
	kept, err := os.ReadDir(cache)
	if err != nil || len(kept) != 1 {
		t.Errorf("cache holds %v, %v", kept, err)
	}
}
