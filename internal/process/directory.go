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
	ConsoleFile   = "console.log"
	// LogFile is what the VM process writes to its standard error.
	LogFile = "process.log"
	// ownDirectory is the only one that the VM process has in its reach. If a guest has taken that over, what lies there can be anything, links
	// and pipes included.
	ownDirectory = "own"
)

// Names inside the process's own directory.
const (
	vsockSocket = "vsock.sock"
	// exitFile holds the vmm.Exit of a VM that has ended.
	exitFile = "exit.json"
	// generationFile holds the generation that the guest confirmed at the VM's last reset.
	generationFile = "generation.json"
	// refusalsFile holds what the guest was refused and nobody had asked for when the VM ended.
	refusalsFile = "refusals.json"
)

// MakeOwn makes the process's own directory in a VM's.
func MakeOwn(directory string) error { return os.Mkdir(filepath.Join(directory, ownDirectory), 0o700) }

// own is the path of a file in the process's own directory, which is in the VM's.
func own(directory, name string) string { return filepath.Join(directory, ownDirectory, name) }

// VsockPath is where programs of the host reach the guest's ports. Those that the guest is to reach listen beside it.
func VsockPath(directory string) string { return own(directory, vsockSocket) }

// directory is the VM process's own directory, reached through its descriptor: the
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
	return dialer.DialContext(ctx, "unix", fmt.Sprintf("%s/%s_%d", path, vsockSocket, port))
}

// ReadGeneration reads the generation that the VM in a directory had confirmed at its
// last reset, as its process says. It returns an error that wraps fs.ErrNotExist for a
// VM that was not reset.
func ReadGeneration(directory string) (generation string, err error) {
	err = readOwn(directory, generationFile, &generation)
	return generation, err
}

// GenerationPath is the file that ReadGeneration reads, which is another one after each reset.
func GenerationPath(directory string) string { return own(directory, generationFile) }

// writeExit leaves the report of the VM's end.
func (d *directory) writeExit(exit *vmm.Exit) error { return d.write(exitFile, exit) }

// ReadExit reads a VM's exit report from its directory. It returns an error
// that wraps fs.ErrNotExist for a VM that has not ended or whose process died.
func ReadExit(directory string) (*vmm.Exit, error) {
	var exit vmm.Exit
	if err := readOwn(directory, exitFile, &exit); err != nil {
		return nil, err
	}
	return &exit, nil
}

// write writes a file in the directory, whole or not at all.
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

// maxOwnFile bounds what is read of a file that the process has left, in bytes.
const maxOwnFile = 1 << 20

// readOwn reads a file that the process has left in its own directory. It follows no link, and waits for nobody at the other end of a pipe.
func readOwn(directory, name string, content any) error {
	path := own(directory, name)
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return fmt.Errorf("read %s: not a regular file: %w", path, errors.Join(err, unix.EINVAL))
	}
	if err := json.NewDecoder(io.LimitReader(f, maxOwnFile)).Decode(content); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return nil
}
