package lab

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
)

const (
	// imageSlack is the room for new files in a disk image of files given to the machine, bytes. The image is sparse.
	imageSlack = 4 << 30
	// scratchSize is the size of the disk for the machine's own files.
	scratchSize = 32 << 30
)

// inputImage returns a cached ext4 image with what is at path: a directory's contents, or a file under its base name.
func inputImage(ctx context.Context, c cache, path string, info fs.FileInfo) (string, error) {
	key, err := statKey(path)
	if err != nil {
		return "", fmt.Errorf("read input: %w", err)
	}
	return c.get("in-"+key+".ext4", func(to string) error {
		if info.IsDir() {
			return makeImage(ctx, to, path)
		}
		return makeFilesImage(ctx, to, []string{path})
	})
}

// filesImage returns a cached ext4 image whose root holds the given files, keyed by their contents: programs that were
// just built again are often the same.
func filesImage(ctx context.Context, c cache, files []string) (string, error) {
	h := sha256.New()
	for _, path := range files {
		fmt.Fprintf(h, "%q\n", filepath.Base(path))
		if err := hashFile(h, path); err != nil {
			return "", err
		}
	}
	key := hex.EncodeToString(h.Sum(nil))[:24]
	return c.get("bin-"+key+".ext4", func(to string) error { return makeFilesImage(ctx, to, files) })
}

func makeFilesImage(ctx context.Context, to string, files []string) error {
	staging := to + ".tree"
	if err := os.Mkdir(staging, 0o755); err != nil {
		return err
	}
	for _, path := range files {
		if err := stage(path, filepath.Join(staging, filepath.Base(path))); err != nil {
			return err
		}
	}
	return makeImage(ctx, to, staging)
}

// stage makes a file appear at to for the making of an image, which only reads it: as a hard link where that is possible.
func stage(path, to string) error {
	if os.Link(path, to) == nil {
		return nil
	}
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	return copySparse(path, to, info.Mode().Perm())
}

func hashFile(h io.Writer, path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	_, err = io.Copy(h, file)
	return err
}

// makeImage writes an ext4 file system with the tree's files to path, sparse, with imageSlack of free room.
func makeImage(ctx context.Context, path, tree string) error {
	size := diskUsage(tree)
	size += size/20 + imageSlack
	if err := createSparse(path, size); err != nil {
		return err
	}
	// No journal: an image that was cut off is thrown away. Few inodes, as most of the content is large files.
	_, err := output(ctx, "", "mke2fs", "-q", "-F", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-i", strconv.Itoa(32<<10),
		"-E", "lazy_itable_init=1,nodiscard,root_owner=0:0", "-d", tree, path)
	return err
}

// makeScratch formats the machine's own disk.
func makeScratch(ctx context.Context, path string) error {
	if err := createSparse(path, scratchSize); err != nil {
		return err
	}
	_, err := output(ctx, "", "mke2fs", "-q", "-F", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-i", strconv.Itoa(64<<10),
		"-E", "lazy_itable_init=1,nodiscard,root_owner=0:0", path)
	return err
}

func createSparse(path string, size int64) error {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o644)
	if err != nil {
		return err
	}
	if err := file.Truncate(size); err != nil {
		file.Close()
		return err
	}
	return file.Close()
}
