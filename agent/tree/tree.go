// Package tree turns directory trees into tar streams and back (PAX format), on
// both sides of a guest's border. Neither direction trusts the other: Unpack
// writes below its directory and nowhere else, whatever names, links and order a
// stream has, and what it does not keep it counts.
package tree

import (
	"archive/tar"
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"syscall"
)

// Stats says what was packed or unpacked.
type Stats struct {
	// Entries are files, directories and everything else with a name.
	Entries int64 `json:"entries"`
	// Bytes are the contents of regular files.
	Bytes int64 `json:"bytes"`
	// Skipped are entries that cannot be in an archive (sockets) or that the
	// receiver is not to make (devices, where owners are not kept).
	Skipped int64 `json:"skipped,omitempty"`
	// Changed are files that became shorter while they were read; the archive has
	// zeros in the place of what is missing.
	Changed int64 `json:"changed,omitempty"`
	// Sum is that of the directory afterwards, if it was asked for; empty if that has
	// too many entries.
	Sum string `json:"sum,omitempty"`
}

// Pack writes the tree below root as a tar stream whose names are relative to
// it; the root itself is the entry "./". Symbolic links are links, hard links
// within the tree stay hard links, owners are numbers.
func Pack(w io.Writer, root *os.Root) (Stats, error) {
	p := packer{root: root, seen: map[inode]string{}}
	buffered := bufio.NewWriterSize(w, 64<<10)
	p.tar = tar.NewWriter(buffered)
	err := fs.WalkDir(root.FS(), ".", p.visit)
	if err == nil {
		err = p.tar.Close()
	}
	if err == nil {
		err = buffered.Flush()
	}
	if err != nil {
		err = fmt.Errorf("pack tree: %w", err)
	}
	return p.stats, err
}

// inode identifies a file of one host.
type inode struct{ dev, ino uint64 }

type packer struct {
	root  *os.Root
	tar   *tar.Writer
	seen  map[inode]string // names of files with more than one link
	stats Stats
}

func (p *packer) visit(name string, _ fs.DirEntry, err error) error {
	if errors.Is(err, fs.ErrNotExist) && name != "." {
		return nil // it went away meanwhile
	}
	if err != nil {
		return err
	}
	info, err := p.root.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode()&fs.ModeSocket != 0 {
		p.stats.Skipped++
		return nil
	}
	return p.add(name, info)
}

func (p *packer) add(name string, info fs.FileInfo) error {
	header, err := p.header(name, info)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if header.Typeflag != tar.TypeReg {
		p.stats.Entries++
		return p.tar.WriteHeader(header)
	}
	// Not waiting for the other end if it has become a FIFO.
	f, err := p.root.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOFOLLOW, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	p.stats.Entries++
	if err := p.tar.WriteHeader(header); err != nil {
		return err
	}
	return p.contents(f, header.Size)
}

// contents writes exactly size bytes: a file that grows is cut there, one that
// shrinks is filled up.
func (p *packer) contents(f *os.File, size int64) error {
	n, err := io.CopyN(p.tar, f, size)
	p.stats.Bytes += n
	if err != io.EOF {
		return err
	}
	p.stats.Changed++
	_, err = io.CopyN(p.tar, zeros{}, size-n)
	return err
}

func (p *packer) header(name string, info fs.FileInfo) (*tar.Header, error) {
	target := ""
	if info.Mode()&fs.ModeSymlink != 0 {
		var err error
		if target, err = p.root.Readlink(name); err != nil {
			return nil, err
		}
	}
	h, err := tar.FileInfoHeader(info, target)
	if err != nil {
		return nil, err
	}
	h.Format = tar.FormatPAX
	h.Name = "./" + name
	if info.IsDir() {
		h.Name = path.Clean(h.Name) + "/"
	}
	h.Uname, h.Gname = "", "" // numbers mean the same on both sides
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return h, nil
	}
	if st.Nlink > 1 && info.Mode().IsRegular() {
		id := inode{st.Dev, st.Ino}
		if first, ok := p.seen[id]; ok {
			h.Typeflag, h.Linkname, h.Size = tar.TypeLink, first, 0
		} else {
			p.seen[id] = h.Name
		}
	}
	return h, nil
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}
