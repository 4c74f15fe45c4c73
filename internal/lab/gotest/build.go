package gotest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
)

// binary is a test binary in the tree that the lab is given.
type binary struct {
	selection Selection
	file      string // below the tree
	dir       string // below the tree: the package's directory, with the testdata of the whole module around it
}

// buildTree builds the test binaries of the selections into tree, which is made to look like the module: each package's
// binary in its directory, and all testdata directories. What has not changed is not touched. It is for buildJobs
// packages at a time.
func buildTree(ctx context.Context, tree string, selections []Selection) ([]binary, error) {
	if err := os.MkdirAll(tree, 0o755); err != nil {
		return nil, err
	}
	keep := make(map[string]bool)
	binaries := make([]binary, len(selections))
	errs := make([]error, len(selections))
	var group sync.WaitGroup
	slots := make(chan struct{}, buildJobs)
	for i, s := range selections {
		relative, err := filepath.Rel(s.Package.Module.Dir, s.Package.Dir)
		if err != nil {
			return nil, err
		}
		file := filepath.Join(relative, filepath.Base(s.Package.ImportPath)+".test")
		binaries[i] = binary{selection: s, file: file, dir: relative}
		keep[file] = true
		group.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			errs[i] = buildTest(ctx, s.Package.ImportPath, filepath.Join(tree, file))
		})
	}
	group.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	if len(selections) > 0 {
		if err := copyTestdata(selections[0].Package.Module.Dir, tree, keep); err != nil {
			return nil, fmt.Errorf("copy test data: %w", err)
		}
	}
	return binaries, removeOthers(tree, keep)
}

// buildJobs bounds the go commands at work at once; each uses several processors by itself.
const buildJobs = 2

func buildTest(ctx context.Context, importPath, to string) error {
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	fresh := to + ".new"
	defer os.Remove(fresh)
	var said bytes.Buffer
	cmd := exec.CommandContext(ctx, "go", "test", "-c", "-trimpath", "-ldflags=-s -w", "-o", fresh, importPath)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64")
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("build tests of %s: %w\n%s", importPath, err, bytes.TrimSpace(said.Bytes()))
	}
	return replaceIfChanged(fresh, to)
}

// copyTestdata mirrors the testdata directories of the module: tests find their own, and that of a neighbour.
func copyTestdata(root, tree string, keep map[string]bool) error {
	return filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		if entry.IsDir() {
			if relative != "." && strings.HasPrefix(entry.Name(), ".") || relative == "bin" || relative == "lab" {
				return fs.SkipDir
			}
			return nil
		}
		if !entry.Type().IsRegular() || !strings.Contains("/"+relative, "/testdata/") {
			return nil
		}
		keep[relative] = true
		return copyIfChanged(path, filepath.Join(tree, relative))
	})
}

func copyIfChanged(from, to string) error {
	data, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	if old, err := os.ReadFile(to); err == nil && bytes.Equal(old, data) {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	return os.WriteFile(to, data, 0o644)
}

func replaceIfChanged(fresh, to string) error {
	data, err := os.ReadFile(fresh)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // a package without tests has no binary
	}
	if err != nil {
		return err
	}
	if old, err := os.ReadFile(to); err == nil && bytes.Equal(old, data) {
		return nil
	}
	return os.Rename(fresh, to)
}

// removeOthers removes files of earlier runs.
func removeOthers(tree string, keep map[string]bool) error {
	return filepath.WalkDir(tree, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		relative, err := filepath.Rel(tree, path)
		if err != nil || keep[relative] {
			return err
		}
		return os.Remove(path)
	})
}
