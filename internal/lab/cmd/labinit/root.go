package main

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// moveRoot copies the initramfs into a tmpfs and goes on there. The kernel's own first root cannot be the old root of
// pivot_root, and what runs in the lab must be able to build namespaces as on any other machine.
func moveRoot() error {
	const root = "/newroot"
	if err := os.MkdirAll(root, 0o755); err != nil {
		return fmt.Errorf("create %s: %w", root, err)
	}
	if err := unix.Mount("root", root, "tmpfs", 0, "mode=0755,size=50%"); err != nil {
		return fmt.Errorf("mount %s: %w", root, err)
	}
	if err := copyTree("/", root); err != nil {
		return err
	}
	if err := os.Chdir(root); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return fmt.Errorf("change root: %w", err)
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	return fmt.Errorf("execute /init: %w", unix.Exec("/init", []string{"/init", "moved"}, os.Environ()))
}

// copyTree copies directories, files and symbolic links, and stays on the file system of from. Files are removed from
// the old place as they are copied: that place stays in memory for good.
func copyTree(from, to string) error {
	return filepath.WalkDir(from, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if path == to {
			return fs.SkipDir
		}
		target := filepath.Join(to, path)
		info, err := entry.Info()
		if err != nil {
			return err
		}
		switch {
		case entry.IsDir():
			return os.MkdirAll(target, info.Mode().Perm())
		case entry.Type() == fs.ModeSymlink:
			link, err := os.Readlink(path)
			if err != nil {
				return err
			}
			return os.Symlink(link, target)
		case entry.Type().IsRegular():
			if err := copyFile(path, target, info.Mode().Perm()); err != nil {
				return err
			}
			return os.Remove(path)
		}
		return nil // device nodes: devtmpfs has them
	})
}

func copyFile(from, to string, mode fs.FileMode) (err error) {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, mode)
	if err != nil {
		return err
	}
	defer func() {
		if e := out.Close(); err == nil {
			err = e
		}
	}()
	_, err = io.Copy(out, in)
	return err
}
