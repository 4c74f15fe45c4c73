// Package gotest runs Go tests in the lab machine: it finds the tests that need KVM, builds their packages' test binaries
// on this machine, and runs them in the lab.
package gotest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
)

// Package is what the go command says of a package.
type Package struct {
	ImportPath   string
	Dir          string
	GoFiles      []string
	TestGoFiles  []string
	XTestGoFiles []string
	Module       struct{ Dir string }
	Error        *struct{ Err string } // why the package was not found
}

func (p Package) files(names []string) []string {
	paths := make([]string, len(names))
	for i, name := range names {
		paths[i] = filepath.Join(p.Dir, name)
	}
	return paths
}

// List asks the go command for the packages that the patterns name. A package that does not compile is listed too: that
// shows when its tests are built, and only if it has any for us.
func List(ctx context.Context, patterns ...string) ([]Package, error) {
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, "go", append([]string{"list", "-e", "-json=ImportPath,Dir,GoFiles,TestGoFiles,XTestGoFiles,Module,Error", "--"}, patterns...)...)
	cmd.Stderr = &stderr
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("list packages: %w\n%s", err, bytes.TrimSpace(stderr.Bytes()))
	}
	return decodePackages(bytes.NewReader(out))
}

func decodePackages(r io.Reader) ([]Package, error) {
	var packages []Package
	for decoder := json.NewDecoder(r); ; {
		var p Package
		err := decoder.Decode(&p)
		if errors.Is(err, io.EOF) {
			return packages, nil
		}
		if err != nil {
			return nil, fmt.Errorf("decode package list: %w", err)
		}
		if p.Dir == "" {
			reason := "not found"
			if p.Error != nil {
				reason = p.Error.Err
			}
			return nil, fmt.Errorf("find package %s: %s", p.ImportPath, reason)
		}
		packages = append(packages, p)
	}
}
