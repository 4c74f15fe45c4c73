package lab

import (
	"fmt"
	"io"
	"io/fs"
	"path"
	"sort"
)

// Entry modes of the archive: file type bits of stat(2).
const (
	cpioDir  = 0o040000
	cpioFile = 0o100000
	cpioLink = 0o120000
)

// tree is the content of an initramfs: absolute path → entry. Parents need not be named.
type tree map[string]treeEntry

type treeEntry struct {
	mode uint32 // type and permissions
	data []byte // file content, or the link's target
}

func (t tree) file(name string, perm fs.FileMode, data []byte) {
	t[path.Clean(name)] = treeEntry{cpioFile | uint32(perm), data}
}

func (t tree) link(name, target string) {
	t[path.Clean(name)] = treeEntry{cpioLink | 0o777, []byte(target)}
}

func (t tree) dir(name string, perm fs.FileMode) {
	t[path.Clean(name)] = treeEntry{cpioDir | uint32(perm), nil}
}

// writeTo writes the tree as an archive in the "newc" format that the kernel unpacks, sorted, all owned by root and
// without times, so that the same content gives the same bytes.
func (t tree) writeTo(w io.Writer) error {
	full := make(tree, len(t))
	for name, entry := range t {
		full[name] = entry
		for dir := path.Dir(name); dir != "/" && dir != "."; dir = path.Dir(dir) {
			if _, ok := t[dir]; !ok {
				full[dir] = treeEntry{cpioDir | 0o755, nil}
			}
		}
	}
	names := make([]string, 0, len(full))
	for name := range full {
		names = append(names, name)
	}
	sort.Strings(names) // a directory sorts before what is in it
	for i, name := range names {
		if err := writeCPIOEntry(w, i+1, name[1:], full[name]); err != nil {
			return fmt.Errorf("write archive entry %s: %w", name, err)
		}
	}
	return writeCPIOEntry(w, 0, "TRAILER!!!", treeEntry{})
}

// writeCPIOEntry writes one header, name and data, each padded to 4 bytes (the kernel's
// Documentation/driver-api/early-userspace/buffer-format.rst).
func writeCPIOEntry(w io.Writer, inode int, name string, entry treeEntry) error {
	header := fmt.Sprintf("070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X",
		inode, entry.mode, 0, 0, 1, 0, len(entry.data), 0, 0, 0, 0, len(name)+1, 0)
	if _, err := io.WriteString(w, header+name+"\x00"+zeros(len(header)+len(name)+1)); err != nil {
		return err
	}
	if _, err := w.Write(entry.data); err != nil {
		return err
	}
	_, err := io.WriteString(w, zeros(len(entry.data)))
	return err
}

// zeros pads n bytes to a multiple of 4.
func zeros(n int) string { return "\x00\x00\x00"[:(4-n%4)%4] }
