package cli

import (
	"context"
	"errors"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/agent/proto"
	"github.com/forkvm/forkvm/internal/failure"
)

// contentsOnly reports whether a path asks for what is in a directory: it ends
// with "/.", as for docker.
func contentsOnly(p string) bool { return p == "." || strings.HasSuffix(p, "/.") }

// putTree copies a directory of the host into a VM. Files become root's there.
func putTree(ctx context.Context, vm VM, from string, to *place) (int64, error) {
	to.path = path.Clean(to.path)
	at, err := vm.Guest().Stat(ctx, to.path)
	switch {
	case err == nil && at.Kind == client.KindFile:
		return 0, failure.New(failure.InvalidArgument, "%s is a file, and %s a directory", to, from)
	case err == nil && !contentsOnly(from):
		to.path = path.Join(to.path, baseOf(from))
	case err != nil && !errors.Is(err, &client.Error{Code: proto.CodeFileNotFound}):
		return 0, guestFailure(ctx, vm, err)
	}
	root, err := os.OpenRoot(from)
	if err != nil {
		return 0, failure.As(failure.InvalidArgument, err)
	}
	defer root.Close()
	stats, err := vm.Guest().Upload(ctx, root, to.path, false)
	return stats.Bytes, guestFailure(ctx, vm, err)
}

// baseOf is the name that a directory of the host has, also when it is ".".
func baseOf(dir string) string {
	if abs, err := filepath.Abs(dir); err == nil {
		dir = abs
	}
	return filepath.Base(dir)
}

// getTree copies a directory of a VM to the host. Everything becomes the
// caller's, and nothing is written outside of the directory.
func getTree(ctx context.Context, vm VM, from string, to *place) (int64, error) {
	info, err := os.Stat(to.path)
	switch {
	case err == nil && !info.IsDir():
		return 0, failure.New(failure.InvalidArgument, "%s is a file, and %s a directory", to, from)
	case err == nil && !contentsOnly(from):
		to.path = filepath.Join(to.path, path.Base(path.Clean(from)))
	}
	if err := os.MkdirAll(to.path, 0o755); err != nil {
		return 0, failure.As(failure.InvalidArgument, err)
	}
	root, err := os.OpenRoot(to.path)
	if err != nil {
		return 0, failure.As(failure.InvalidArgument, err)
	}
	defer root.Close()
	stats, err := vm.Guest().Download(ctx, path.Clean(from), root)
	return stats.Bytes, err
}
