package kernel

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"

	"github.com/forkvm/forkvm/guest/internal/decompress"
)

// Where things are in a bzImage (the kernel's Documentation/arch/x86/boot.rst).
const (
	setupSectors  = 0x1f1
	setupMagic    = 0x202 // "HdrS"
	setupVersion  = 0x206
	setupRelease  = 0x20e
	payloadOffset = 0x248
	payloadLength = 0x24c
	setupEnd      = 0x250
	sector        = 512
)

// setup is what a bzImage says about itself.
type setup struct {
	release string
	payload []byte
}

func parseSetup(image []byte) (*setup, error) {
	le := binary.LittleEndian
	if len(image) < setupEnd || string(image[setupMagic:setupMagic+4]) != "HdrS" {
		return nil, &FormatError{Reason: "neither an ELF file nor a bzImage"}
	}
	if version := le.Uint16(image[setupVersion:]); version < 0x208 {
		return nil, &FormatError{Reason: fmt.Sprintf("boot protocol %d.%02d does not say where the kernel lies in it; 2.08 does", version>>8, version&0xff)}
	}
	sectors := int64(image[setupSectors])
	if sectors == 0 {
		sectors = 4
	}
	start := (sectors+1)*sector + int64(le.Uint32(image[payloadOffset:]))
	end := start + int64(le.Uint32(image[payloadLength:]))
	if end > int64(len(image)) {
		return nil, &FormatError{Reason: fmt.Sprintf("it is cut short: %d bytes of at least %d", len(image), end)}
	}
	if end-start < 8 {
		return nil, &FormatError{Reason: "there is nothing in the bzImage"}
	}
	s := &setup{payload: image[start:end]}
	if at := int(le.Uint16(image[setupRelease:])); at != 0 && at+sector < len(image) {
		text, _, _ := bytes.Cut(image[at+sector:min(at+sector+256, len(image))], []byte{0})
		s.release, _, _ = strings.Cut(string(text), " ")
	}
	return s, nil
}

// unpack gives the ELF file inside. The last four bytes of the payload are the length of that file: gzip puts it there itself, for the
// others the kernel's build appends it, where their decompressors must not see it.
func (s *setup) unpack() ([]byte, error) {
	packed := s.payload
	length := binary.LittleEndian.Uint32(packed[len(packed)-4:])
	switch format := decompress.Detect(packed); format {
	case decompress.None:
		return nil, &FormatError{Reason: "what is in the bzImage is compressed in no known way"}
	case decompress.Gzip:
	default:
		packed = packed[:len(packed)-4]
	}
	if length > maxImage {
		return nil, &FormatError{Reason: fmt.Sprintf("the bzImage says that it holds %d MiB", length>>20)}
	}
	image, err := decompress.All(packed, maxImage)
	if err != nil {
		return nil, &FormatError{Reason: fmt.Sprintf("unpack bzImage: %v", err)}
	}
	// Some builds append the relocations to the ELF file before they compress it, and their length counts too.
	if uint32(len(image)) != length {
		return nil, &FormatError{Reason: fmt.Sprintf("the bzImage holds %d bytes and says %d", len(image), length)}
	}
	if !isELF(image) {
		return nil, &FormatError{Reason: "what is in the bzImage is no ELF file"}
	}
	return image, nil
}

const notePVH = 18 // XEN_ELFNOTE_PHYS32_ENTRY

// checkImage makes sure that an ELF file is an x86-64 kernel with a PVH entry.
func checkImage(image []byte) error {
	f, err := elf.NewFile(bytes.NewReader(image))
	if err != nil {
		return &FormatError{Reason: fmt.Sprintf("read ELF file: %v", err)}
	}
	defer f.Close()
	if f.Class != elf.ELFCLASS64 || f.Machine != elf.EM_X86_64 {
		return &FormatError{Reason: fmt.Sprintf("it is for %s, not for x86-64", f.Machine)}
	}
	loads := false
	for _, p := range f.Progs {
		loads = loads || p.Type == elf.PT_LOAD
		if p.Type == elf.PT_NOTE && p.Off+p.Filesz <= uint64(len(image)) && p.Filesz <= uint64(len(image)) {
			if hasNote(image[p.Off:p.Off+p.Filesz], "Xen", notePVH) {
				return nil
			}
		}
	}
	if !loads {
		return &FormatError{Reason: "the ELF file has nothing to load: is it an object file?"}
	}
	return &MissingError{Release: releaseOf(image), Missing: []Missing{{Name: "PVH entry", Option: "CONFIG_PVH"}}}
}

// hasNote looks for an ELF note. Name and content are padded to 4 bytes.
func hasNote(p []byte, name string, kind uint32) bool {
	le := binary.LittleEndian
	for len(p) >= 12 {
		nameSize, size := uint64(le.Uint32(p)), uint64(le.Uint32(p[4:]))
		content := 12 + (nameSize+3)&^3
		next := content + (size+3)&^3
		if content > uint64(len(p)) {
			return false
		}
		if le.Uint32(p[8:]) == kind && string(bytes.TrimRight(p[12:12+nameSize], "\x00")) == name && size >= 4 {
			return true
		}
		if next > uint64(len(p)) {
			return false
		}
		p = p[next:]
	}
	return false
}

// releaseOf finds the release in the text that the kernel prints first.
func releaseOf(image []byte) string {
	const banner = "Linux version "
	for rest := image; ; {
		at := bytes.Index(rest, []byte(banner))
		if at < 0 {
			return ""
		}
		rest = rest[at+len(banner):]
		word, _, found := bytes.Cut(rest[:min(128, len(rest))], []byte{' '})
		if found && len(word) > 0 && word[0] >= '0' && word[0] <= '9' {
			return string(word)
		}
	}
}

// embeddedConfig finds the configuration that a kernel with CONFIG_IKCONFIG carries; nil if there is none.
func embeddedConfig(image []byte) map[string]string {
	_, rest, found := bytes.Cut(image, []byte("IKCFG_ST"))
	if !found {
		return nil
	}
	packed, _, found := bytes.Cut(rest, []byte("IKCFG_ED"))
	if !found {
		return nil
	}
	text, err := decompress.All(packed, maxText)
	if err != nil {
		return nil
	}
	return parseConfig(text)
}

// parseConfig reads a kernel configuration.
func parseConfig(text []byte) map[string]string {
	config := map[string]string{}
	for line := range strings.Lines(string(text)) {
		if name, value, found := strings.Cut(strings.TrimSpace(line), "="); found && strings.HasPrefix(name, "CONFIG_") {
			config[name] = value
		}
	}
	return config
}

var errNoModinfo = errors.New("no section .modinfo")

// moduleDepends reads what modules a module says it depends on.
func moduleDepends(module []byte) ([]string, error) {
	f, err := elf.NewFile(bytes.NewReader(module))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	section := f.Section(".modinfo")
	if section == nil {
		return nil, errNoModinfo
	}
	info, err := section.Data()
	if err != nil {
		return nil, err
	}
	var depends []string
	for field := range bytes.SplitSeq(info, []byte{0}) {
		if list, found := bytes.CutPrefix(field, []byte("depends=")); found {
			for name := range strings.SplitSeq(string(list), ",") {
				if name != "" {
					depends = append(depends, moduleName(name))
				}
			}
		}
	}
	return depends, nil
}
