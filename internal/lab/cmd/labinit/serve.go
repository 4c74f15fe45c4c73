package main

import (
	"archive/tar"
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/forkvm/forkvm/internal/lab/wire"
	"golang.org/x/sys/unix"
)

const (
	portName  = "forkvm.lab"
	chunkSize = 64 << 10
)

// serve answers the host until the port closes, which only the end of the machine does.
func serve() error {
	port, err := openPort("/sys/class/virtio-ports")
	if err != nil {
		return err
	}
	s := &server{out: wire.NewWriter(port), running: make(map[uint32]*command)}
	in := bufio.NewReaderSize(port, chunkSize)
	for {
		frame, err := wire.Read(in)
		if err != nil {
			return err
		}
		if err := s.handle(frame); err != nil {
			return err
		}
	}
}

// openPort opens the virtio-serial port that is the host's.
func openPort(class string) (*os.File, error) {
	entries, err := os.ReadDir(class)
	if err != nil {
		return nil, err
	}
	for _, entry := range entries {
		name, err := os.ReadFile(filepath.Join(class, entry.Name(), "name"))
		if err != nil || strings.TrimSpace(string(name)) != portName {
			continue
		}
		path := "/dev/" + entry.Name()
		// Blocking, past Go's poller: the port is held open for the machine's life by its one reader and its writers.
		fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, fmt.Errorf("open %s: %w", path, err)
		}
		return os.NewFile(uintptr(fd), path), nil
	}
	return nil, fmt.Errorf("open port: no virtio-serial port named %s", portName)
}

type server struct {
	out     *wire.Writer
	running map[uint32]*command // touched by the reading goroutine only
}

func (s *server) handle(frame wire.Frame) error {
	switch frame.Type {
	case wire.Setup:
		var plan wire.Plan
		if err := frame.JSON(&plan); err != nil {
			return err
		}
		return s.out.WriteJSON(wire.Ready, 0, status(mountAll(plan)))
	case wire.Start:
		var spec wire.Command
		if err := frame.JSON(&spec); err != nil {
			return err
		}
		s.running[frame.ID] = start(frame.ID, spec, s.out)
	case wire.Stdin:
		if c := s.running[frame.ID]; c != nil {
			c.input(frame.Payload)
		}
	case wire.StdinEnd:
		if c := s.running[frame.ID]; c != nil {
			c.inputEnd()
		}
	case wire.Kill:
		if c := s.running[frame.ID]; c != nil {
			c.kill()
		}
	case wire.Collect:
		var tree wire.Tree
		if err := frame.JSON(&tree); err != nil {
			return err
		}
		go s.collect(frame.ID, tree.Path)
	default:
		return fmt.Errorf("serve: unexpected frame of type %d", frame.Type)
	}
	return nil
}

// collect sends a directory as a tar archive.
func (s *server) collect(id uint32, dir string) {
	buffered := bufio.NewWriterSize(s.out.Stream(wire.Tar, id), chunkSize)
	err := writeTar(buffered, dir)
	if err == nil {
		err = buffered.Flush()
	}
	if err := s.out.WriteJSON(wire.TarEnd, id, status(err)); err != nil {
		fmt.Fprintf(os.Stderr, "labinit: %v\n", err)
	}
}

// writeTar archives what is in dir. Sockets, which no archive holds, are left out; so is what vanishes meanwhile.
func writeTar(w io.Writer, dir string) error {
	archive := tar.NewWriter(w)
	err := filepath.Walk(dir, func(path string, info os.FileInfo, err error) error {
		if errors.Is(err, os.ErrNotExist) && path != dir {
			return nil
		}
		if err != nil || path == dir {
			return err
		}
		if info.Mode()&os.ModeSocket != 0 {
			return nil
		}
		return addToTar(archive, dir, path, info)
	})
	if err != nil {
		return err
	}
	return archive.Close()
}

func addToTar(archive *tar.Writer, dir, path string, info os.FileInfo) error {
	link := ""
	if info.Mode()&os.ModeSymlink != 0 {
		var err error
		if link, err = os.Readlink(path); err != nil {
			return err
		}
	}
	header, err := tar.FileInfoHeader(info, link)
	if err != nil {
		return err
	}
	if header.Name, err = filepath.Rel(dir, path); err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return archive.WriteHeader(header)
	}
	file, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer file.Close()
	if err := archive.WriteHeader(header); err != nil {
		return err
	}
	if _, err := io.CopyN(archive, file, header.Size); err != nil {
		return fmt.Errorf("archive %s: %w", path, err)
	}
	return nil
}

func status(err error) wire.Status {
	if err == nil {
		return wire.Status{}
	}
	return wire.Status{Error: err.Error()}
}
