package rootfs

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"

	"github.com/forkvm/forkvm/guest/internal/decompress"
	"github.com/forkvm/forkvm/guest/rootfs/ext4"
)

// xattrRecord begins the names of the records in which tar programs keep extended attributes.
const xattrRecord = "SCHILY.xattr."

// addArchive adds everything in a tar archive.
func (b *builder) addArchive(r io.Reader) error {
	plain, format, err := decompress.NewReader(r)
	if err != nil {
		return &RootError{Source: b.source, Cause: err}
	}
	defer plain.Close()
	whole := &endReader{r: plain}
	archive := tar.NewReader(whole)
	for {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return b.archiveError(err, format)
		}
		if err := b.addHeader(header, archive); err != nil {
			return err
		}
	}
	if b.entries == 0 {
		return &RootError{Source: b.source, Cause: errors.New("an archive without entries")}
	}
	if whole.ended {
		return b.archiveError(io.ErrUnexpectedEOF, format)
	}
	// What follows the archive's end is read too: a compressed file's checksum comes last.
	if _, err := io.Copy(io.Discard, plain); err != nil {
		return b.archiveError(err, format)
	}
	return nil
}

// endReader notices the end of what it reads. An archive has an end of its own, two blocks of zeros; one that stops before was cut
// short, which package tar does not tell if the cut is between two entries.
type endReader struct {
	r     io.Reader
	ended bool
}

func (e *endReader) Read(p []byte) (int, error) {
	n, err := e.r.Read(p)
	e.ended = e.ended || n == 0 && errors.Is(err, io.EOF)
	return n, err
}

// archiveError tells a file that is no archive from one that is damaged, and both from the caller's having had enough.
func (b *builder) archiveError(err error, format decompress.Format) error {
	switch {
	case b.ctx.Err() != nil:
		return b.ctx.Err()
	case b.entries == 0 && errors.Is(err, tar.ErrHeader):
		return &RootError{Source: b.source, Cause: fmt.Errorf("not a tar archive (compression: %s)", format)}
	default:
		return &RootError{Source: b.source, Cause: fmt.Errorf("read archive after %d entries: %w", b.entries, err)}
	}
}

var archiveKinds = map[byte]ext4.Kind{
	tar.TypeReg:       ext4.File,
	tar.TypeCont:      ext4.File,
	tar.TypeGNUSparse: ext4.File,
	tar.TypeDir:       ext4.Directory,
	tar.TypeSymlink:   ext4.Symlink,
	tar.TypeChar:      ext4.CharacterDevice,
	tar.TypeBlock:     ext4.BlockDevice,
	tar.TypeFifo:      ext4.Fifo,
}

func (b *builder) addHeader(h *tar.Header, content io.Reader) error {
	e := entry{name: h.Name}
	switch h.Typeflag {
	case tar.TypeXGlobalHeader:
		return nil
	case tar.TypeLink:
		e.hardLink = h.Linkname
		return b.add(e)
	}
	kind, known := archiveKinds[h.Typeflag]
	if !known {
		return &EntryError{Name: h.Name, Cause: fmt.Errorf("type %q is not supported", h.Typeflag)}
	}
	for _, number := range []int64{int64(h.Uid), int64(h.Gid), h.Devmajor, h.Devminor} {
		if number < 0 || number > math.MaxUint32-1 {
			return &EntryError{Name: h.Name, Cause: fmt.Errorf("owner or device number %d is not possible", number)}
		}
	}
	e.kind, e.content = kind, contextReader{b.ctx, content} // the holes of a sparse file do not come from the source, which is watched too
	e.attributes = ext4.Attributes{Mode: uint16(h.Mode & 0o7777), UID: uint32(h.Uid), GID: uint32(h.Gid), ModTime: h.ModTime}
	for key, value := range h.PAXRecords {
		if name, found := strings.CutPrefix(key, xattrRecord); found {
			if e.attributes.Xattrs == nil {
				e.attributes.Xattrs = map[string][]byte{}
			}
			e.attributes.Xattrs[name] = []byte(value)
		}
	}
	switch kind {
	case ext4.File:
		e.size = h.Size
	case ext4.Symlink:
		e.target = h.Linkname
	case ext4.CharacterDevice, ext4.BlockDevice:
		e.major, e.minor = uint32(h.Devmajor), uint32(h.Devminor)
	}
	return b.add(e)
}
