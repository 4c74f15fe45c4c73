package lab

import (
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// hostPrograms are taken from this machine into every lab machine, with the libraries that they need.
var hostPrograms = []string{"bash", "dash", "mke2fs", "e2fsck", "debugfs", "dumpe2fs", "tune2fs", "resize2fs"}

// programAliases are the other names under which some of them act.
var programAliases = map[string]string{
	"sh":        "dash",
	"mkfs.ext4": "mke2fs", "fsck.ext4": "e2fsck", "fsck.ext2": "e2fsck", "mkfs.ext2": "mke2fs", "e2label": "tune2fs",
}

// libraryDirs is where a library that a program names is looked for, the Debian places first.
var libraryDirs = []string{"/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib"}

// findProgram looks a program up on PATH and in the system's own directories, which users often have not on theirs.
func findProgram(name string) (string, error) {
	if path, err := exec.LookPath(name); err == nil {
		return filepath.Abs(path)
	}
	for _, dir := range []string{"/usr/sbin", "/sbin"} {
		if path, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return path, nil
		}
	}
	return "", &MissingError{Program: name}
}

// addProgram puts a program of this machine at /usr/bin, its libraries where it looks for them, and its dynamic linker.
func (t tree) addProgram(name string) error {
	path, err := findProgram(name)
	if err != nil {
		return err
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	t.file("/usr/bin/"+filepath.Base(name), 0o755, data)
	return t.addLibraries(path)
}

// addLibraries adds what an ELF file names as needed, and what those name in turn.
func (t tree) addLibraries(path string) error {
	file, err := elf.Open(path)
	var format *elf.FormatError
	if errors.As(err, &format) {
		return nil // a script
	}
	if err != nil {
		return err
	}
	defer file.Close()
	if linker := interpreter(file); linker != "" {
		if err := t.addFile(linker); err != nil {
			return err
		}
	}
	names, err := file.ImportedLibraries()
	if err != nil {
		return fmt.Errorf("read libraries of %s: %w", path, err)
	}
	for _, name := range names {
		library, err := findLibrary(name)
		if err != nil {
			return fmt.Errorf("find libraries of %s: %w", path, err)
		}
		if _, have := t[canonicalPath(library)]; have {
			continue
		}
		if err := t.addFile(library); err != nil {
			return err
		}
		if err := t.addLibraries(library); err != nil {
			return err
		}
	}
	return nil
}

func (t tree) addFile(path string) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	t.file(canonicalPath(path), 0o755, data)
	return nil
}

// canonicalPath puts /lib and /lib64 below /usr, as the machine's root has links there.
func canonicalPath(path string) string {
	if strings.HasPrefix(path, "/lib") {
		return "/usr" + path
	}
	return path
}

func interpreter(file *elf.File) string {
	for _, program := range file.Progs {
		if program.Type != elf.PT_INTERP {
			continue
		}
		data := make([]byte, program.Filesz)
		if _, err := program.ReadAt(data, 0); err != nil {
			return ""
		}
		return strings.TrimRight(string(data), "\x00")
	}
	return ""
}

func findLibrary(name string) (string, error) {
	for _, dir := range libraryDirs {
		path := filepath.Join(dir, name)
		if _, err := os.Stat(path); err == nil {
			return path, nil
		}
		if found, _ := filepath.Glob(filepath.Join(dir, "*", name)); len(found) > 0 {
			return found[0], nil
		}
	}
	return "", fmt.Errorf("find library %s: %w", name, fs.ErrNotExist)
}
