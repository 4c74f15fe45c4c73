package tree

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"slices"
)

// Entry is what a file in a tree is, as far as its times and owners do not matter.
type Entry struct {
	// Mode is the file's type and, unless it is a symbolic link, its permissions.
	Mode fs.FileMode
	// SHA256 is of a regular file's contents.
	SHA256 [sha256.Size]byte
	// Target is where a symbolic link leads.
	Target string
}

// Sum is one for all entries of a tree, by their names relative to it: the SHA-256, in
// hexadecimal digits, of a line for each, in byte order of names.
func Sum(entries map[string]Entry) string {
	sum := sha256.New()
	for _, name := range slices.Sorted(maps.Keys(entries)) {
		e := entries[name]
		fmt.Fprintf(sum, "%q %o %x %q\n", name, uint32(e.Mode), e.SHA256, e.Target)
	}
	return hex.EncodeToString(sum.Sum(nil))
}

// maxSummed bounds the entries that SumRoot keeps in memory.
const maxSummed = 10_000

// ErrTooLarge says that a tree has too many entries to be summed up.
var ErrTooLarge = errors.New("too many entries")

// SumRoot is the Sum of what is below root.
func SumRoot(root *os.Root) (string, error) {
	entries := map[string]Entry{}
	buf := make([]byte, 16<<10)
	err := fs.WalkDir(root.FS(), ".", func(name string, _ fs.DirEntry, err error) error {
		if err != nil || name == "." {
			return err
		}
		if len(entries) == maxSummed {
			return ErrTooLarge
		}
		entries[name], err = summed(root, name, buf)
		return err
	})
	if err != nil {
		return "", fmt.Errorf("sum up tree: %w", err)
	}
	return Sum(entries), nil
}

func summed(root *os.Root, name string, buf []byte) (e Entry, err error) {
	info, err := root.Lstat(name)
	if err != nil {
		return e, err
	}
	switch e.Mode = info.Mode(); {
	case e.Mode&fs.ModeSymlink != 0:
		e.Mode = fs.ModeSymlink
		e.Target, err = root.Readlink(name)
	case e.Mode.IsRegular():
		e.SHA256, err = sumFile(root, name, buf)
	}
	return e, err
}

func sumFile(root *os.Root, name string, buf []byte) (sum [sha256.Size]byte, err error) {
	f, err := root.Open(name)
	if err != nil {
		return sum, err
	}
	defer f.Close()
	hash := sha256.New()
	// Neither knows a way of its own.
	_, err = io.CopyBuffer(hash, struct{ io.Reader }{f}, buf)
	hash.Sum(sum[:0])
	return sum, err
}
