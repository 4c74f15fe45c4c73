package lab

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/linux"
)

// Limits of what a cache keeps: entries unused for keepFor go, and beyond keepBytes the least recently used. What was
// used within keepFresh stays: another lab may be about to open it.
const (
	keepFor   = 14 * 24 * time.Hour
	keepBytes = 12 << 30
	keepFresh = time.Hour
)

// cache keeps files and directories under names that contain a key of their content. Several processes may use one
// directory at the same time.
type cache struct{ dir string }

// DefaultCacheDir is where the lab keeps things between calls: below the user's cache directory, or, for a user
// without one, below the working directory.
func DefaultCacheDir() string {
	if dir, err := os.UserCacheDir(); err == nil {
		return filepath.Join(dir, "forkvm", "lab")
	}
	return filepath.Join(".cache", "lab")
}

func openCache(dir string) (cache, error) {
	if dir == "" {
		dir = DefaultCacheDir()
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return cache{}, err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return cache{}, err
	}
	return cache{dir}, nil
}

// get returns the path of the entry, which build makes when it is not there. Build is given a path in the cache's own
// file system to create, file or directory; the entry appears under its name only when build has succeeded.
func (c cache) get(name string, build func(path string) error) (string, error) {
	path := filepath.Join(c.dir, name)
	if touch(path) == nil {
		return path, nil
	}
	// One builder at a time for each entry; the others then find it.
	unlock, err := lockFile(filepath.Join(c.dir, "."+name+".lock"))
	if err != nil {
		return "", err
	}
	defer unlock()
	if touch(path) == nil {
		return path, nil
	}
	work, err := os.MkdirTemp(c.dir, ".build-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(work)
	made := filepath.Join(work, name)
	if err := build(made); err != nil {
		return "", err
	}
	if err := os.Rename(made, path); err != nil {
		return "", err
	}
	return path, touch(path)
}

// touch marks an entry as used now.
func touch(path string) error {
	now := time.Now()
	return os.Chtimes(path, now, now)
}

// lockFile takes an exclusive lock that ends with the process at the latest. The lock's file is removed with it.
func lockFile(path string) (unlock func(), err error) {
	for {
		file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
		if err != nil {
			return nil, err
		}
		if err := linux.Flock(file, unix.LOCK_EX); err != nil {
			file.Close()
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		// The holder before may have removed the file while we waited: then the lock is on a file nobody else finds.
		if sameFile(file, path) {
			return func() { os.Remove(path); file.Close() }, nil
		}
		file.Close()
	}
}

func sameFile(file *os.File, path string) bool {
	held, err := file.Stat()
	if err != nil {
		return false
	}
	named, err := os.Stat(path)
	return err == nil && os.SameFile(held, named)
}

// prune removes what the limits above do not let stay, and what builders that died left. Mistakes cost time only, so
// it goes on past errors and returns the first.
func (c cache) prune(now time.Time) error {
	entries, err := os.ReadDir(c.dir)
	if err != nil {
		return err
	}
	type item struct {
		path string
		used time.Time
		size int64
	}
	var items []item
	var total int64
	var first error
	remove := func(path string) {
		if err := os.RemoveAll(path); err != nil && first == nil {
			first = err
		}
	}
	for _, entry := range entries {
		info, err := entry.Info()
		if err != nil {
			continue
		}
		path, age := filepath.Join(c.dir, entry.Name()), now.Sub(info.ModTime())
		switch {
		case entry.Name() == runBase: // has its own way, see runDir
		case age < keepFresh:
			total += diskUsage(path)
		case strings.HasPrefix(entry.Name(), ".") || age > keepFor:
			remove(path)
		default:
			size := diskUsage(path)
			total += size
			items = append(items, item{path, info.ModTime(), size})
		}
	}
	sort.Slice(items, func(i, j int) bool { return items[i].used.Before(items[j].used) })
	for _, it := range items {
		if total <= keepBytes {
			break
		}
		remove(it.path)
		total -= it.size
	}
	return first
}

// diskUsage is what a file or tree occupies, in bytes.
func diskUsage(path string) int64 {
	var total int64
	_ = filepath.WalkDir(path, func(path string, _ fs.DirEntry, err error) error {
		var stat unix.Stat_t
		if err == nil && unix.Lstat(path, &stat) == nil {
			total += stat.Blocks * 512
		}
		return nil
	})
	return total
}

// keyOf makes a key of strings.
func keyOf(parts ...string) string {
	h := sha256.New()
	for _, part := range parts {
		fmt.Fprintf(h, "%d:%s", len(part), part)
	}
	return hex.EncodeToString(h.Sum(nil))[:24]
}

// statKey is a key of a file or tree that changes whenever anything in it does: names, sizes, modes, times and inodes,
// not contents, which may be gigabytes.
func statKey(root string) (string, error) {
	h := sha256.New()
	err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var stat unix.Stat_t
		if err := unix.Lstat(path, &stat); err != nil {
			if errors.Is(err, fs.ErrNotExist) && path != root {
				return nil
			}
			return &fs.PathError{Op: "lstat", Path: path, Err: err}
		}
		size, mtime := stat.Size, stat.Mtim
		if stat.Mode&unix.S_IFMT == unix.S_IFDIR {
			size, mtime = 0, unix.Timespec{} // its entries say it all
		}
		_, err = fmt.Fprintf(h, "%q %o %d %d %d %d.%d\n", path, stat.Mode, stat.Uid, stat.Ino, size, mtime.Sec, mtime.Nsec)
		return err
	})
	if err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil))[:24], nil
}
