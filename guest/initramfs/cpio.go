package initramfs

import (
	"fmt"
	"io"
	"path"
	"strings"
)

// The newc format (the kernel's Documentation/driver-api/early-userspace/buffer-format.rst): a header of hexadecimal fields, the name
// and the content, each padded to 4 bytes.
const (
	cpioMagic   = "070701"
	cpioHeader  = 110
	cpioTrailer = "TRAILER!!!"
	cpioMaxSize = 1<<32 - 1 // a file's size has 32 bits
	cpioMaxName = 4095      // PATH_MAX without the zero byte
)

// File type bits of a mode.
const (
	typeDirectory = 0o040000
	typeCharacter = 0o020000
	typeRegular   = 0o100000
	typeSymlink   = 0o120000
)

// archive writes entries one after another. Equal entries give equal bytes: times are 0 and inode numbers count up.
type archive struct {
	w       io.Writer
	inode   uint32
	parents map[string]bool // directories that are there
}

type cpioEntry struct {
	name         string // without a leading slash
	mode         uint32
	size         int64
	content      io.Reader
	major, minor uint32
}

func newArchive(w io.Writer) *archive { return &archive{w: w, parents: map[string]bool{".": true}} }

// add writes an entry, and before it the directories that it lies in, as the kernel does not make them.
func (a *archive) add(e cpioEntry) error {
	if err := a.addParents(path.Dir(e.name)); err != nil {
		return err
	}
	if e.mode&0o170000 == typeDirectory {
		if a.parents[e.name] {
			return nil
		}
		a.parents[e.name] = true
	}
	return a.write(e)
}

func (a *archive) addParents(dir string) error {
	if a.parents[dir] {
		return nil
	}
	return a.add(cpioEntry{name: dir, mode: typeDirectory | 0o755})
}

func (a *archive) write(e cpioEntry) error {
	if e.size > cpioMaxSize {
		return fmt.Errorf("file %s: %d bytes are too many for an initramfs", e.name, e.size)
	}
	if e.name == "" || len(e.name) > cpioMaxName || strings.ContainsRune(e.name, 0) {
		return fmt.Errorf("file name %q is not possible", e.name)
	}
	a.inode++
	links := 1
	if e.mode&0o170000 == typeDirectory {
		links = 2
	}
	header := fmt.Appendf(nil, "%s%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%s\x00",
		cpioMagic, a.inode, e.mode, 0, 0, links, 0, e.size, 0, 0, e.major, e.minor, len(e.name)+1, 0, e.name)
	if _, err := a.w.Write(pad(header)); err != nil {
		return err
	}
	if e.size == 0 {
		return nil
	}
	if n, err := io.CopyN(a.w, e.content, e.size); err != nil {
		return fmt.Errorf("file %s: after %d of %d bytes: %w", e.name, n, e.size, err)
	}
	_, err := a.w.Write(make([]byte, -e.size&3))
	return err
}

func (a *archive) close() error {
	a.inode = 0
	return a.write(cpioEntry{name: cpioTrailer})
}

func pad(p []byte) []byte { return append(p, make([]byte, -len(p)&3)...) }
