package rootfs

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/forkvm/forkvm/guest/rootfs/ext4"
)

// maxLinks is how many symbolic links one path may go through, as in Linux.
const maxLinks = 40

var (
	errNotFound     = errors.New("no such file or directory")
	errNotDirectory = errors.New("not a directory")
	errLoop         = errors.New("too many symbolic links")
	errUnsafe       = errors.New("name leads out of the root directory")
)

// EntryError says which entry of the source cannot become part of the image, and why.
type EntryError struct {
	Name  string
	Cause error
}

func (e *EntryError) Error() string { return fmt.Sprintf("entry %q: %v", e.Name, e.Cause) }
func (e *EntryError) Unwrap() error { return e.Cause }

// builder adds entries by path to an image.
type builder struct {
	ctx     context.Context
	source  string
	image   *ext4.Writer
	digest  hash.Hash
	entries int
	newest  time.Time // of all modification times
}

func newBuilder(ctx context.Context, f *os.File, c Config) (*builder, error) {
	size := (c.Size + ext4.BlockSize - 1) &^ (ext4.BlockSize - 1)
	image, err := ext4.NewWriter(f, ext4.Config{Size: size})
	if err != nil {
		return nil, err
	}
	return &builder{ctx: ctx, source: path.Base(c.Source), image: image, digest: sha256.New(), newest: time.Unix(0, 0)}, nil
}

// entry is one thing to add, from whichever source.
type entry struct {
	name         string // path from the root directory
	kind         ext4.Kind
	attributes   ext4.Attributes
	size         int64
	content      io.Reader
	target       string // of a symbolic link
	major, minor uint32
	hardLink     string // if this is another name of an entry that came before, that one's path; nothing else counts then
}

// add puts an entry into the image and its content and attributes into the digest.
func (b *builder) add(e entry) error {
	err := b.ctx.Err()
	if err == nil {
		err = b.put(e)
	}
	if err != nil {
		return &EntryError{Name: e.name, Cause: err}
	}
	b.entries++
	return nil
}

func (b *builder) put(e entry) error {
	dir, name, err := splitName(e.name)
	if err != nil {
		return err
	}
	b.record(e)
	if name == "" {
		return b.putRoot(e)
	}
	parent, err := b.mkdirAll(dir, 0o755)
	if err != nil {
		return err
	}
	if e.hardLink != "" {
		return b.putHardLink(parent, name, e.hardLink)
	}
	switch e.kind {
	case ext4.Directory:
		// A link to a directory stays: on a system with /lib -> usr/lib, an archive with lib/ means the directory behind the link.
		if old := parent.Lookup(name); old != nil && old.Kind() == ext4.Symlink {
			if node, err := b.resolve(e.name); err == nil && node.Kind() == ext4.Directory {
				return nil
			}
		}
		_, err = b.image.Mkdir(parent, name, e.attributes)
	case ext4.File:
		_, err = b.image.Create(parent, name, e.attributes, e.size, io.TeeReader(e.content, b.digest))
	case ext4.Symlink:
		_, err = b.image.Symlink(parent, name, e.target, e.attributes)
	default:
		_, err = b.image.Mknod(parent, name, e.kind, e.major, e.minor, e.attributes)
	}
	return err
}

func (b *builder) putRoot(e entry) error {
	if e.kind != ext4.Directory || e.hardLink != "" {
		return errors.New("the root directory must be a directory")
	}
	return b.image.SetRoot(e.attributes)
}

func (b *builder) putHardLink(parent *ext4.Node, name, target string) error {
	dir, base, err := splitName(target)
	if err != nil {
		return fmt.Errorf("link to %q: %w", target, err)
	}
	from, err := b.resolve(dir)
	if err != nil {
		return fmt.Errorf("link to %q: %w", target, err)
	}
	node := from.Lookup(base) // a symbolic link is linked itself
	if node == nil {
		return fmt.Errorf("link to %q: %w", target, errNotFound)
	}
	return b.image.Link(parent, name, node)
}

// record adds all but the content to the digest.
func (b *builder) record(e entry) {
	a := e.attributes
	fmt.Fprintf(b.digest, "%q %d %o %d %d %d %d %q %d:%d %q\n",
		path.Clean("/"+e.name), e.kind, a.Mode, a.UID, a.GID, a.ModTime.UnixNano(), e.size, e.target, e.major, e.minor, e.hardLink)
	for _, name := range slices.Sorted(maps.Keys(a.Xattrs)) {
		fmt.Fprintf(b.digest, "%q=%q\n", name, a.Xattrs[name])
	}
	if a.ModTime.After(b.newest) && a.ModTime.Unix() < 1<<32 {
		b.newest = a.ModTime
	}
}

// splitName takes an entry's name apart into directory and last element; both are empty for the root directory. A name with ".." is
// refused: no program makes one without bad intent.
func splitName(name string) (dir, base string, err error) {
	for part := range strings.SplitSeq(name, "/") {
		if part == ".." {
			return "", "", errUnsafe
		}
	}
	clean := strings.TrimPrefix(path.Clean("/"+name), "/")
	dir, base = path.Split(clean)
	return dir, base, nil
}

// resolve finds what a path leads to, through symbolic links.
func (b *builder) resolve(name string) (*ext4.Node, error) { return b.walk(name, nil) }

// mkdirAll is resolve for a directory that is made, with its parents, if it does not exist.
func (b *builder) mkdirAll(name string, mode uint16) (*ext4.Node, error) {
	node, err := b.walk(name, func(parent *ext4.Node, element string) (*ext4.Node, error) {
		return b.image.Mkdir(parent, element, ext4.Attributes{Mode: mode, ModTime: b.newest})
	})
	if err == nil && node.Kind() != ext4.Directory {
		err = fmt.Errorf("%q: %w", name, errNotDirectory)
	}
	return node, err
}

// walk goes along a path from the root directory, as the guest's kernel would do it; what is missing is made by the function given.
func (b *builder) walk(name string, missing func(parent *ext4.Node, element string) (*ext4.Node, error)) (*ext4.Node, error) {
	node, rest := b.image.Root(), strings.Split(name, "/")
	for links := 0; len(rest) > 0; {
		element := rest[0]
		rest = rest[1:]
		if element == "" || element == "." {
			continue
		}
		if node.Kind() != ext4.Directory {
			return nil, fmt.Errorf("%q: %w", name, errNotDirectory)
		}
		if element == ".." {
			node = node.Parent()
			continue
		}
		next := node.Lookup(element)
		switch {
		case next == nil && missing == nil:
			return nil, fmt.Errorf("%q: %w", name, errNotFound)
		case next == nil:
			made, err := missing(node, element)
			if err != nil {
				return nil, err
			}
			next = made
		case next.Kind() == ext4.Symlink:
			if links++; links > maxLinks {
				return nil, fmt.Errorf("%q: %w", name, errLoop)
			}
			if strings.HasPrefix(next.Target(), "/") {
				node = b.image.Root()
			}
			rest = append(strings.Split(next.Target(), "/"), rest...)
			continue
		}
		node = next
	}
	return node, nil
}
