// Package rootfs makes the disk image of a guest's root file system from a directory or a tar archive.
//
// The archive may be compressed. Nothing in it is ever unpacked on the host: names, links, owners, device nodes and extended attributes
// go from the archive straight into an ext4 image (package ext4), so that neither privileges are needed nor a hostile archive can
// reach anything. Names and links are resolved the way the guest would, with the root directory as the top.
package rootfs

import (
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/forkvm/forkvm/guest/internal/publish"
	"github.com/forkvm/forkvm/guest/rootfs/ext4"
)

// Config says what to make from what.
type Config struct {
	// Source is a directory, or a tar archive: plain or compressed with gzip, bzip2, xz, zstd or lz4.
	Source string
	// Output is the path of the image. It appears there complete or not at all, and replaces what was there.
	Output string
	// Size in bytes, rounded up to whole blocks of 4096; 0 leaves a quarter of the content free, at least 256 MiB. Free space takes
	// none on the host.
	Size int64
	// Label of the file system, at most 16 bytes.
	Label string
	// Programs must exist in the root file system as executable files, or it is not one: see RootError. Symbolic links are followed.
	Programs []string
	// Probe are programs that may exist or not; Image.Found says which do.
	Probe []string
}

// Image is what was made.
type Image struct {
	Size    int64    // bytes
	Found   []string // of Config.Probe, those that exist as executable files
	Entries int      // files, directories and other inodes that the source gave
	Digest  string   // SHA-256 of the content with all its attributes, in hexadecimal; equal content has an equal image
}

// RootError says that the source is not a root file system.
type RootError struct {
	Source  string
	Missing string // program that there is none of; empty if the source could not be read as an archive at all
	Cause   error
}

func (e *RootError) Error() string {
	if e.Missing != "" {
		return fmt.Sprintf("%s is not a root file system: no executable %s in it", e.Source, e.Missing)
	}
	return fmt.Sprintf("%s is not a root file system: %v", e.Source, e.Cause)
}

func (e *RootError) Unwrap() error { return e.Cause }

// mountPoints have to exist before anything can be mounted on them; archives of containers often lack them.
var mountPoints = []struct {
	path string
	mode uint16
}{{"dev", 0o755}, {"proc", 0o555}, {"run", 0o755}, {"sys", 0o555}, {"tmp", 0o1777}}

// Build makes the image.
func Build(ctx context.Context, c Config) (*Image, error) {
	image, err := build(ctx, c)
	if err != nil {
		return nil, fmt.Errorf("build root file system (%s): %w", c.Source, err)
	}
	return image, nil
}

func build(ctx context.Context, c Config) (*Image, error) {
	source, err := os.Open(c.Source)
	if err != nil {
		return nil, err
	}
	defer source.Close()
	info, err := source.Stat()
	if err != nil {
		return nil, err
	}
	if c.Size < 0 || c.Size > ext4.MaxSize {
		return nil, fmt.Errorf("size %d is not from 0 to %d", c.Size, int64(ext4.MaxSize))
	}
	image := &Image{}
	err = publish.File(c.Output, 0o644, func(f *os.File) error {
		b, err := newBuilder(ctx, f, c)
		if err != nil {
			return err
		}
		if err := b.fill(source, info); err != nil {
			return err
		}
		*image, err = b.finish(c)
		return err
	})
	if err != nil {
		return nil, err
	}
	return image, nil
}

func (b *builder) fill(source *os.File, info os.FileInfo) error {
	switch {
	case info.IsDir():
		return b.addDirectory(source.Name())
	case info.Mode().IsRegular():
		return b.addArchive(contextReader{b.ctx, source})
	default:
		return &RootError{Source: filepath.Base(source.Name()), Cause: fmt.Errorf("neither a directory nor a file")}
	}
}

// finish checks that the tree is a root file system and completes the image.
func (b *builder) finish(c Config) (Image, error) {
	for _, m := range mountPoints {
		if _, err := b.mkdirAll(m.path, m.mode); err != nil {
			return Image{}, err
		}
	}
	for _, program := range c.Programs {
		if !b.isProgram(program) {
			return Image{}, &RootError{Source: filepath.Base(c.Source), Missing: program}
		}
	}
	var found []string
	for _, program := range c.Probe {
		if b.isProgram(program) {
			found = append(found, program)
		}
	}
	digest := b.digest.Sum(nil)
	id := ext4.Identity{UUID: [16]byte(digest), Label: c.Label, Time: b.newest}
	id.UUID[6] = id.UUID[6]&0x0f | 0x80 // version 8: made by a rule of our own
	id.UUID[8] = id.UUID[8]&0x3f | 0x80
	size, err := b.image.Finish(id)
	return Image{Size: size, Found: found, Entries: b.entries, Digest: hex.EncodeToString(digest)}, err
}

func (b *builder) isProgram(name string) bool {
	node, err := b.resolve(name)
	return err == nil && node.Kind() == ext4.File && node.Attributes().Mode&0o111 != 0
}

// contextReader ends with the context's error.
type contextReader struct {
	ctx context.Context
	r   io.Reader
}

func (c contextReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(p)
}
