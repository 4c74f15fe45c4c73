package lab

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"reflect"
	"strings"
	"testing"
)

func names(modules []module) []string {
	list := []string{}
	for _, m := range modules {
		list = append(list, m.name)
	}
	return list
}

// modulesOf makes modules of lines "name: needs".
func modulesOf(lines ...string) []module {
	var modules []module
	for _, line := range lines {
		name, needs, _ := strings.Cut(line, ":")
		modules = append(modules, module{name: name, depends: strings.Fields(needs)})
	}
	return modules
}

func TestNeeded(t *testing.T) {
	ordered := modulesOf("irqbypass", "kvm: irqbypass", "kvm_amd: kvm", "tun", "veth")
	for _, test := range []struct{ ask, want string }{
		{"kvm-amd tun", "irqbypass kvm kvm_amd tun"},
		{"veth", "veth"},
		{"absent", ""},
	} {
		if got := strings.Join(names(needed(ordered, strings.Fields(test.ask))), " "); got != test.want {
			t.Errorf("%q needs %q, want %q", test.ask, got, test.want)
		}
	}
}

func TestModuleIndexFiles(t *testing.T) {
	archive := make(tree)
	archive.addModules("6.1", modulesOf("irqbypass", "kvm: irqbypass", "kvm_amd: kvm"))
	if got, want := string(archive["/usr/lib/modules/6.1/modules.dep"].Content),
		"kernel/irqbypass.ko:\nkernel/kvm.ko: kernel/irqbypass.ko\nkernel/kvm_amd.ko: kernel/kvm.ko kernel/irqbypass.ko\n"; got != want {
		t.Errorf("modules.dep is %q, want %q", got, want)
	}
	if got, want := string(archive["/usr/lib/modules/load"].Content),
		"/usr/lib/modules/6.1/kernel/irqbypass.ko\n/usr/lib/modules/6.1/kernel/kvm.ko\n/usr/lib/modules/6.1/kernel/kvm_amd.ko\n"; got != want {
		t.Errorf("list of modules to load is %q, want %q", got, want)
	}
}

// object makes an ELF file with one section, .modinfo.
func object(t *testing.T, info string) []byte {
	t.Helper()
	const names = "\x00.modinfo\x00.shstrtab\x00"
	const headerSize, sectionSize = 64, 64
	header := elf.Header64{
		Ident: [elf.EI_NIDENT]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)},
		Type:  uint16(elf.ET_REL), Machine: uint16(elf.EM_X86_64), Version: uint32(elf.EV_CURRENT),
		Shoff: headerSize, Ehsize: headerSize, Shentsize: sectionSize, Shnum: 3, Shstrndx: 2,
	}
	data := uint64(headerSize + 3*sectionSize)
	sections := []elf.Section64{
		{},
		{Name: 1, Type: uint32(elf.SHT_PROGBITS), Off: data, Size: uint64(len(info))},
		{Name: 10, Type: uint32(elf.SHT_STRTAB), Off: data + uint64(len(info)), Size: uint64(len(names))},
	}
	var buf bytes.Buffer
	for _, part := range []any{header, sections, []byte(info), []byte(names)} {
		if err := binary.Write(&buf, binary.LittleEndian, part); err != nil {
			t.Fatal(err)
		}
	}
	return buf.Bytes()
}

func TestModinfo(t *testing.T) {
	depends, aliases, err := modinfo(object(t, "license=GPL\x00alias=net-pf-40\x00depends=vsock,virtio-ring\x00alias=x\x00"))
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"vsock", "virtio_ring"}; !reflect.DeepEqual(depends, want) {
		t.Errorf("needs %q, want %q", depends, want)
	}
	if want := []string{"net-pf-40", "x"}; !reflect.DeepEqual(aliases, want) {
		t.Errorf("aliases %q, want %q", aliases, want)
	}
	if _, _, err := modinfo([]byte("no ELF file")); err == nil {
		t.Error("garbage was taken for a module")
	}
}

func TestWithoutSignature(t *testing.T) {
	signed := func(length uint32) []byte {
		data := append([]byte("module"), "sig!"...)
		data = append(data, make([]byte, 8)...)
		data = binary.BigEndian.AppendUint32(data, length)
		return append(data, signatureMark...)
	}
	for _, test := range []struct {
		name     string
		in, want []byte
	}{
		{"signed", signed(4), []byte("module")},
		{"unsigned", []byte("module"), []byte("module")},
		{"absurd length", signed(1 << 31), signed(1 << 31)},
		{"only the mark", []byte(signatureMark), []byte(signatureMark)},
	} {
		if got := withoutSignature(test.in); !bytes.Equal(got, test.want) {
			t.Errorf("%s: %q left, want %q", test.name, got, test.want)
		}
	}
}
