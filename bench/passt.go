package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// passt is a process of that name, with a network for one guest.
type passt struct {
	cmd    *exec.Cmd
	dir    string
	socket string // for QEMU
	said   bytes.Buffer
}

// startPasst returns passt when it has its socket. The error is exec.ErrNotFound where it is not installed.
func startPasst(ctx context.Context) (*passt, error) {
	program, err := exec.LookPath("passt")
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "passt")
	if err != nil {
		return nil, err
	}
	p := &passt{dir: dir, socket: filepath.Join(dir, "socket")}
	// It wants an interface to copy, and a link's address, which loopback has not.
	p.cmd = exec.CommandContext(ctx, program, "--foreground", "--stderr", "--ipv4-only", "--runas", "65534:65534", "--socket", p.socket,
		"--interface", "lo", "--mac-addr", "02:00:00:00:00:02", "--address", "10.0.2.15", "--netmask", "24", "--gateway", "10.0.2.2")
	p.cmd.Stdout, p.cmd.Stderr = &p.said, &p.said
	// It is nobody any more when it makes its socket.
	err = os.Chmod(dir, 0o777)
	if err == nil {
		err = p.cmd.Start()
	}
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	if err := awaitFile(ctx, p.socket); err != nil {
		return nil, fmt.Errorf("%w; passt said: %s", err, p.close())
	}
	return p, nil
}

// close ends passt and returns what it has said.
func (p *passt) close() []byte {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait() // it was killed
	_ = os.RemoveAll(p.dir)
	return p.said.Bytes()
}
