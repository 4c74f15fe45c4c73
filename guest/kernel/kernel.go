// Package kernel turns what distributions ship as a kernel into what a virtual machine monitor boots directly: an uncompressed ELF file
// with a PVH entry, and the modules that the guest has to load itself.
//
// A kernel comes as a Debian package, as a bzImage or ELF file, or as a directory tree with boot/ and lib/modules/. Everything is
// read on the host, with no help from tools; nothing is installed and no depmod has to have run: what a module depends on is read from
// the module.
package kernel

import (
	"debug/elf"
	"fmt"
	"os"
	"strings"
)

// Limits on what is read into memory, in bytes.
const (
	maxImage  = 1 << 30   // an uncompressed kernel; debug information makes some large
	maxModule = 256 << 20 // an uncompressed module
	maxText   = 16 << 20  // a configuration
)

// Kernel is a kernel that is ready to boot.
type Kernel struct {
	// Release is what uname -r will say, such as "6.12.117+deb12-cloud-amd64"; empty if the file does not tell.
	Release string
	// Image is the ELF file. It has a PVH note.
	Image []byte

	config  map[string]string // CONFIG_ options, if known
	builtin map[string]bool   // by module name
	modules moduleSource
}

// moduleSource finds the files of modules.
type moduleSource struct {
	paths map[string]string // by module name: where it is
	read  func(path string) ([]byte, error)
}

// Open reads a kernel from a Debian package, a bzImage or ELF file, or a directory tree. A file alone brings no modules: then what the
// guest needs must be built in.
func Open(path string) (*Kernel, error) {
	k, err := open(path)
	if err != nil {
		return nil, fmt.Errorf("open kernel (%s): %w", path, err)
	}
	return k, nil
}

func open(path string) (*Kernel, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if info.IsDir() {
		return FromTree(os.DirFS(path))
	}
	if !info.Mode().IsRegular() {
		return nil, &FormatError{Reason: "it is no file"}
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	head := make([]byte, len(arMagic))
	if _, err := f.ReadAt(head, 0); err != nil {
		return nil, &FormatError{Reason: "it is too short"}
	}
	if string(head) == arMagic {
		return FromPackage(f)
	}
	if info.Size() > maxImage {
		return nil, &FormatError{Reason: fmt.Sprintf("it is larger than %d MiB", maxImage>>20)}
	}
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return FromImage(content)
}

// FromImage takes the content of a bzImage, or of an ELF file with a PVH note.
func FromImage(content []byte) (*Kernel, error) {
	k := &Kernel{Image: content}
	if !isELF(content) {
		setup, err := parseSetup(content)
		if err != nil {
			return nil, err
		}
		k.Release = setup.release
		if k.Image, err = setup.unpack(); err != nil {
			return nil, err
		}
	}
	if err := checkImage(k.Image); err != nil {
		return nil, err
	}
	if k.Release == "" {
		k.Release = releaseOf(k.Image)
	}
	k.config = embeddedConfig(k.Image)
	return k, nil
}

func isELF(content []byte) bool {
	return strings.HasPrefix(string(content[:min(4, len(content))]), elf.ELFMAG)
}
