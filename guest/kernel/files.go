package kernel

import (
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
)

// files are the parts of a kernel as distributions lay them out: boot/vmlinuz-RELEASE, boot/config-RELEASE, lib/modules/RELEASE/….
type files struct {
	paths []string
	read  func(path string) ([]byte, error)
}

// FromTree takes a tree with boot/vmlinuz-RELEASE (or boot/vmlinux-RELEASE) and lib/modules/RELEASE. It must hold one kernel. Modules
// are read when they are asked for, so the tree has to stay.
func FromTree(tree fs.FS) (*Kernel, error) {
	f := files{read: func(name string) ([]byte, error) { return fs.ReadFile(tree, name) }}
	for _, top := range []string{"boot", "lib/modules", "usr/lib/modules"} {
		if _, err := fs.Stat(tree, top); err != nil {
			continue
		}
		err := fs.WalkDir(tree, top, func(name string, entry fs.DirEntry, err error) error {
			if err == nil && !entry.IsDir() && wanted(name) {
				f.paths = append(f.paths, name)
			}
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	return fromFiles(f)
}

// wanted says whether a file's path is one that fromFiles looks at.
func wanted(name string) bool {
	if dir, base := path.Split(name); dir == "boot/" {
		return strings.HasPrefix(base, "vmlinu") || strings.HasPrefix(base, "config-")
	}
	rest := strings.TrimPrefix(name, "usr/")
	return strings.HasPrefix(rest, "lib/modules/") && (path.Base(rest) == "modules.builtin" || strings.Contains(path.Base(rest), ".ko"))
}

func fromFiles(f files) (*Kernel, error) {
	slices.Sort(f.paths)
	name, release, err := f.image()
	if err != nil {
		return nil, err
	}
	content, err := f.read(name)
	if err != nil {
		return nil, err
	}
	k, err := FromImage(content)
	if err != nil {
		return nil, err
	}
	k.Release = release
	if slices.Contains(f.paths, "boot/config-"+release) {
		text, err := f.read("boot/config-" + release)
		if err != nil {
			return nil, err
		}
		k.config = parseConfig(text)
	}
	return k, k.addModules(f)
}

// image finds the one kernel.
func (f files) image() (name, release string, err error) {
	for _, prefix := range []string{"boot/vmlinux-", "boot/vmlinuz-"} {
		var found []string
		for _, name := range f.paths {
			if strings.HasPrefix(name, prefix) {
				found = append(found, name)
			}
		}
		if len(found) > 1 {
			return "", "", &FormatError{Reason: fmt.Sprintf("there are several kernels (%s); name the file", strings.Join(found, ", "))}
		}
		if len(found) == 1 {
			return found[0], strings.TrimPrefix(found[0], prefix), nil
		}
	}
	return "", "", &FormatError{Reason: "there is no boot/vmlinuz-* and no boot/vmlinux-*", absent: true}
}

// addModules lists the modules of the kernel's release, and what is built in.
func (k *Kernel) addModules(f files) error {
	k.modules = moduleSource{paths: map[string]string{}, read: f.read}
	for _, name := range f.paths {
		rest, found := strings.CutPrefix(strings.TrimPrefix(name, "usr/"), "lib/modules/"+k.Release+"/")
		if !found {
			continue
		}
		if rest != "modules.builtin" {
			k.modules.add(name, rest)
			continue
		}
		text, err := f.read(name)
		if err != nil {
			return err
		}
		k.builtin = parseBuiltin(text)
	}
	return nil
}
