package judge

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"
	"time"
)

// errTooMuch says that a rollout's artifacts are beyond the limits.
var errTooMuch = errors.New("more than may be transplanted")

// errNoArchive says that what a fork sent is no tar stream, or one that no guest agent
// makes.
var errNoArchive = errors.New("no proper archive")

// sieve lets through what of a tar stream is plain data, and not too much of it.
type sieve struct{ entries, bytes int64 } // that may still come

// maxNames bounds the names of what was left out.
const maxNames = 50

func (s *sieve) leaveOut(t *Transplanted, name string) {
	t.LeftOut++
	if len(t.Names) < maxNames {
		t.Names = append(t.Names, name)
	}
}

// sift copies a tar stream entry by entry. Names that are excluded, devices, FIFOs,
// links that lead out of the tree and whatever hangs on these stay behind; nothing
// keeps a set-user-id or set-group-id bit or an attribute.
func (s *sieve) sift(r io.Reader, w io.Writer, exclude []string, done *Transplanted) error {
	in, out := tar.NewReader(r), tar.NewWriter(w)
	links := map[string]bool{} // symbolic links that were let through
	files := map[string]bool{} // regular files that were, for hard links
	for {
		h, err := in.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return fmt.Errorf("%w: %w", errNoArchive, err)
		}
		name := path.Clean(strings.TrimPrefix(h.Name, "./"))
		if path.IsAbs(name) || name == ".." || strings.HasPrefix(name, "../") || strings.IndexByte(name, 0) >= 0 || len(name) > 4096 {
			return fmt.Errorf("%w: name %.200q", errNoArchive, h.Name)
		}
		if anyExcluded(name, exclude) {
			continue
		}
		// A proper archive has nothing behind a link.
		if behind(name, links) {
			return fmt.Errorf("%w: %.200q is behind a link", errNoArchive, name)
		}
		clean, ok := s.plain(h, name, files)
		if !ok {
			s.leaveOut(done, name)
			continue
		}
		if s.entries--; s.entries < 0 {
			return errTooMuch
		}
		if s.bytes -= clean.Size; s.bytes < 0 {
			return errTooMuch
		}
		delete(links, name)
		delete(files, name)
		switch clean.Typeflag {
		case tar.TypeSymlink:
			links[name] = true
		case tar.TypeReg:
			files[name] = true
		}
		if err := out.WriteHeader(clean); err != nil {
			return fmt.Errorf("%w: %w", errNoArchive, err)
		}
		if clean.Typeflag == tar.TypeReg {
			if _, err := io.CopyN(out, in, clean.Size); err != nil {
				return copyError(err)
			}
		}
		done.Entries++
		done.Bytes += clean.Size
	}
	// A stream may be padded.
	if _, err := io.Copy(io.Discard, r); err != nil {
		return err
	}
	return out.Close()
}

// copyError tells a stream that was cut off from a receiver that takes no more.
func copyError(err error) error {
	if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) || errors.Is(err, tar.ErrHeader) {
		return fmt.Errorf("%w: %w", errNoArchive, err)
	}
	return err
}

// plain is a header with nothing but what may pass, or false if the entry may not.
func (s *sieve) plain(h *tar.Header, name string, files map[string]bool) (*tar.Header, bool) {
	clean := &tar.Header{
		Typeflag: h.Typeflag, Name: "./" + name, Mode: h.Mode & 0o777, Uid: id(h.Uid), Gid: id(h.Gid), ModTime: moment(h.ModTime), Format: tar.FormatPAX,
	}
	switch h.Typeflag {
	case tar.TypeReg:
		clean.Size = h.Size
	case tar.TypeDir:
		clean.Name = path.Clean(clean.Name) + "/"
	case tar.TypeSymlink:
		clean.Linkname = h.Linkname
		return clean, name != "." && staysInside(name, h.Linkname)
	case tar.TypeLink:
		target := path.Clean(strings.TrimPrefix(h.Linkname, "./"))
		clean.Linkname = "./" + target
		return clean, name != "." && files[target]
	default:
		return nil, false
	}
	return clean, name != "." || h.Typeflag == tar.TypeDir
}

// id is an owner that a file can have; others become root's.
func id(n int) int {
	if n < 0 || n >= 1<<32-1 {
		return 0
	}
	return n
}

// moment is a time that every file system and archive has.
func moment(t time.Time) time.Time {
	if y := t.Year(); y < 1970 || y > 2100 {
		return time.Unix(0, 0)
	}
	return t
}

// staysInside says whether a link leads to something in its own tree, whatever other
// such links are on the way: it may go up first, as far as the tree goes, and then
// only down.
func staysInside(name, target string) bool {
	if target == "" || path.IsAbs(target) || len(target) > 4096 || strings.IndexByte(target, 0) >= 0 {
		return false
	}
	depth := strings.Count(path.Dir(name), "/") + 1
	if path.Dir(name) == "." {
		depth = 0
	}
	down := false
	for part := range strings.SplitSeq(target, "/") {
		switch part {
		case "", ".":
		case "..":
			if depth--; down || depth < 0 {
				return false
			}
		default:
			down = true
		}
	}
	return true
}

// behind says whether one of a name's parents is a link.
func behind(name string, links map[string]bool) bool {
	for dir := path.Dir(name); dir != "." && dir != "/"; dir = path.Dir(dir) {
		if links[dir] {
			return true
		}
	}
	return false
}

// anyExcluded says whether a part of a name matches a pattern.
func anyExcluded(name string, patterns []string) bool {
	if len(patterns) == 0 {
		return false
	}
	for part := range strings.SplitSeq(name, "/") {
		if excluded(part, patterns) {
			return true
		}
	}
	return false
}

func excluded(part string, patterns []string) bool {
	for _, p := range patterns {
		if ok, _ := path.Match(p, part); ok && part != "." { // the patterns were checked
			return true
		}
	}
	return false
}
