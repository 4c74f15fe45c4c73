package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/agent/proto"
	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
	"github.com/forkvm/forkvm/internal/failure"
)

// place is one side of cp: a file of a VM, or one of the host if VM is empty.
type place struct{ vm, path string }

// parsePlace reads "VM:path". As with docker, what begins with . or / is a file
// of the host whatever it contains.
func parsePlace(s string) place {
	vm, p, found := strings.Cut(s, ":")
	if !found || vm == "" || strings.ContainsAny(s[:1], "./") || strings.Contains(vm, "/") {
		return place{path: s}
	}
	if !path.IsAbs(p) {
		p = "/" + p
	}
	return place{vm: vm, path: p}
}

// copyView is the JSON result of cp.
type copyView struct {
	Schema string `json:"schema"`
	From   string `json:"from"`
	To     string `json:"to"`
	Bytes  int64  `json:"bytes"`
}

const copySchema = "forkvm/copy/v1"

func (a *app) copyVerb() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "cp FROM TO",
		Short:   "Copy files and directories between the host and a VM",
		Long:    "Copy a file or a directory between the host and a VM. The VM's side is VM:path. A\nfile appears complete or not at all. A directory gets its name behind a directory\nthat is there already; with /. at its end, its contents go into that.",
		Example: "  forkvm cp fix.patch vm-1:/root/\n  forkvm cp vm-1:/var/log/syslog ./syslog\n  forkvm cp ./project vm-1:/srv\n  forkvm cp vm-1:/srv/project/. ./result",
		Args:    needs("FROM", "TO"),
	}
	cmd.RunE = a.onNode(func(ctx context.Context, n Node, args []string) error {
		from, to := parsePlace(args[0]), parsePlace(args[1])
		var bytes int64
		var err error
		switch {
		case from.vm == "" && to.vm == "", from.vm != "" && to.vm != "":
			return usagef("one of FROM and TO must be VM:path, and the other a file of the host")
		case to.vm != "":
			bytes, err = put(ctx, n, from.path, &to)
		default:
			bytes, err = get(ctx, n, from, &to)
		}
		if err != nil {
			return err
		}
		if !a.format.Machine() {
			return nil
		}
		return output.WriteObject(a.Stdout, a.format, copyView{Schema: copySchema, From: from.String(), To: to.String(), Bytes: bytes})
	})
	return a.withOutput(cmd)
}

func (p place) String() string {
	if p.vm == "" {
		return p.path
	}
	return p.vm + ":" + p.path
}

// put copies a file of the host into a VM. A path that is a directory there gets
// the file's name behind it.
func put(ctx context.Context, n Node, from string, to *place) (int64, error) {
	f, err := os.Open(from)
	if err != nil {
		return 0, failure.As(failure.InvalidArgument, err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	vm, err := findRunning(ctx, n, to.vm)
	if err != nil {
		return 0, err
	}
	if info.IsDir() {
		return putTree(ctx, vm, from, to)
	}
	if strings.HasSuffix(to.path, "/") {
		to.path = path.Join(to.path, filepath.Base(from))
	}
	target := client.File{Path: to.path, Mode: info.Mode().Perm()}
	bytes, err := vm.Guest().Put(ctx, target, f)
	if !errors.Is(err, &client.Error{Code: proto.CodeIsADirectory}) {
		return bytes, guestFailure(ctx, vm, err)
	}
	// Nothing of the file was taken, but some of it may have been read.
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return 0, fmt.Errorf("read %s again: %w", from, err)
	}
	to.path = path.Join(to.path, filepath.Base(from))
	target.Path = to.path
	bytes, err = vm.Guest().Put(ctx, target, f)
	return bytes, guestFailure(ctx, vm, err)
}

func guestFailure(ctx context.Context, vm VM, err error) error {
	if err == nil {
		return nil
	}
	return execFailure(ctx, vm, err)
}

// get copies a file or directory of a VM to the host.
func get(ctx context.Context, n Node, from place, to *place) (int64, error) {
	vm, err := findRunning(ctx, n, from.vm)
	if err != nil {
		return 0, err
	}
	at, err := vm.Guest().Stat(ctx, path.Clean(from.path))
	var bytes int64
	if err == nil && at.Kind == client.KindDirectory {
		bytes, err = getTree(ctx, vm, from.path, to)
	} else if err == nil {
		bytes, err = getOne(ctx, vm, from, to)
		if errors.Is(err, &client.Error{Code: proto.CodeIsADirectory}) { // a link to one
			bytes, err = getTree(ctx, vm, from.path, to)
		}
	}
	return bytes, guestFailure(ctx, vm, err)
}

func getOne(ctx context.Context, vm VM, from place, file *place) (int64, error) {
	to := *file
	info, err := os.Stat(to.path)
	switch {
	case err == nil && info.IsDir(), strings.HasSuffix(to.path, "/"):
		to.path = filepath.Join(to.path, path.Base(from.path))
		if info, err = os.Stat(to.path); err == nil && info.IsDir() {
			return 0, failure.New(failure.InvalidArgument, "%s is a directory", to.path)
		}
	}
	fetch := getFile
	if info, err := os.Stat(to.path); err == nil && !info.Mode().IsRegular() {
		fetch = getInto // a pipe or a device
	}
	bytes, err := fetch(ctx, vm, from.path, to.path)
	if err == nil {
		*file = to
	}
	return bytes, err
}

// getFile makes the file under another name first, so that it is there complete
// or not at all.
func getFile(ctx context.Context, vm VM, from, to string) (bytes int64, err error) {
	f, err := os.CreateTemp(filepath.Dir(to), ".forkvm-*")
	if err != nil {
		return 0, failure.As(failure.InvalidArgument, err)
	}
	defer func() {
		f.Close()
		if err != nil {
			os.Remove(f.Name())
		}
	}()
	got, err := vm.Guest().Get(ctx, from, f)
	if err != nil {
		return 0, err
	}
	// No more than permissions: a guest must not make a setuid program of ours.
	if err := f.Chmod(got.Mode & fs.ModePerm); err != nil {
		return 0, err
	}
	if err := f.Close(); err != nil {
		return 0, err
	}
	return got.Size, os.Rename(f.Name(), to)
}

func getInto(ctx context.Context, vm VM, from, to string) (int64, error) {
	f, err := os.OpenFile(to, os.O_WRONLY, 0)
	if err != nil {
		return 0, failure.As(failure.InvalidArgument, err)
	}
	got, err := vm.Guest().Get(ctx, from, f)
	err = errors.Join(err, f.Close())
	if err != nil {
		return 0, err
	}
	return got.Size, nil
}
