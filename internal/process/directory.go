package process

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/vmm"
)

// Names inside a VM's directory.
const (
	ControlSocket = "control.sock"
	VsockSocket   = "vsock.sock"
	ConsoleFile   = "console.log"
	// ExitFile holds the vmm.Exit of a VM that has ended.
	ExitFile = "exit.json"
	// LifeFile holds what is on record of a VM since its last reset.
	LifeFile = "life.json"
)

// directory is a VM's own directory, reached through its descriptor: the VM
// process has no path to it, nor to anything else.
type directory struct {
	file *os.File
	// root: it is all that the process sees of the file system.
	root bool
}

// confine makes the directory the process's whole file system, and leaves the process no privileges.
func (d *directory) confine() error {
	err := linux.Confine(d.file)
	d.root = err == nil
	return err
}

func (d *directory) create(name string) (*os.File, error) {
	fd, err := unix.Openat(int(d.file.Fd()), name, unix.O_WRONLY|unix.O_CREAT|unix.O_TRUNC|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("create %s: %w", name, err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// connect opens the host's end for a guest that connects to a port of the host:
// a Unix socket beside the VM's own, with the port behind its name.
func (d *directory) connect(ctx context.Context, port uint32) (net.Conn, error) {
	var dialer net.Dialer
	path := fmt.Sprintf("/proc/self/fd/%d", d.file.Fd())
	if d.root {
		path = ""
	}
	return dialer.DialContext(ctx, "unix", fmt.Sprintf("%s/%s_%d", path, VsockSocket, port))
}

// ReadLife reads what Client.Reset was given as the life of the VM in a directory,
// after its last reset. It returns an error that wraps fs.ErrNotExist for a VM that
// was not reset.
func ReadLife(directory string, life any) error {
	return readFile(filepath.Join(directory, LifeFile), life)
}

// writeExit leaves the report of the VM's end.
func (d *directory) writeExit(exit *vmm.Exit) error { return d.write(ExitFile, exit) }

// ReadExit reads a VM's exit report from its directory. It returns an error
// that wraps fs.ErrNotExist for a VM that has not ended or whose process died.
func ReadExit(directory string) (*vmm.Exit, error) {
	var exit vmm.Exit
	if err := readFile(filepath.Join(directory, ExitFile), &exit); err != nil {
		return nil, err
	}
	return &exit, nil
}

// write writes a file in the VM's directory, whole or not at all.
func (d *directory) write(name string, content any) error {
	data, err := json.Marshal(content)
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	temporary := name + ".new"
	f, err := d.create(temporary)
	if err != nil {
		return err
	}
	_, err = f.Write(append(data, '\n'))
	if err := errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	fd := int(d.file.Fd())
	if err := unix.Renameat(fd, temporary, fd, name); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}

func readFile(path string, content any) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := json.NewDecoder(io.LimitReader(f, 1<<20)).Decode(content); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return nil
}
