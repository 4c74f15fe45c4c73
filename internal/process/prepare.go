package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/kvm"
)

// wait makes what can be made ahead and returns the start message with its files.
// A launcher hears what went wrong as the answer to its next message: it sends
// its first two without waiting.
func (s *server) wait(ctx context.Context, timeline *machine.Timeline) (*startForm, []*os.File, error) {
	req, files, err := s.expect(ctx, opPrepare)
	if err != nil {
		return nil, nil, err
	}
	failed := s.prepare(req.Prepare, files)
	timeline.End(machine.PhaseKVM)
	req, files, err = s.expect(ctx, opStart, opDetach, opRehearse)
	if err == nil && req.Op != opStart && failed == nil {
		if err = s.detach(ctx, req, files); err == nil {
			*timeline = nil // the launch that will be told of begins now
			req, files, err = s.expect(ctx, opStart)
		}
	}
	timeline.End(phaseMessage)
	if err != nil {
		return nil, nil, err
	}
	if failed == nil && req.Start == nil {
		failed = errors.New("start message is empty")
	}
	if failed != nil {
		linux.CloseFiles(files...)
		return nil, nil, errors.Join(failed, s.launcher.send(response{Error: classify(failed)}, nil))
	}
	return req.Start, files, nil
}

// expect receives the launcher's next message, which is one of these.
func (s *server) expect(ctx context.Context, ops ...string) (*request, []*os.File, error) {
	stop := context.AfterFunc(ctx, func() { s.launcher.socket.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	var req request
	files, err := s.launcher.receive(&req)
	if err != nil {
		return nil, nil, fmt.Errorf("wait for %s message: %w", ops[0], errors.Join(err, ctx.Err()))
	}
	if !slices.Contains(ops, req.Op) {
		linux.CloseFiles(files...)
		return nil, nil, fmt.Errorf("message is %q, not %q", req.Op, ops[0])
	}
	return &req, files, nil
}

// prepare takes what the VM will use whatever it runs, and makes the virtual
// machine.
func (s *server) prepare(form *prepareForm, files []*os.File) error {
	claimed := claims{files: files}
	defer claimed.close()
	if form == nil {
		return errors.New("prepare message is empty")
	}
	s.directory.file, s.console = claimed.take(form.Directory), claimed.take(form.Console)
	s.tap = claimed.takeTap(form.Tap)
	control, vsock, device := claimed.take(form.Control), claimed.take(form.Vsock), claimed.take(form.KVM)
	defer linux.CloseFiles(control, vsock, device)
	if claimed.err != nil {
		return claimed.err
	}
	if slices.Contains([]*os.File{s.directory.file, s.console, control, vsock, device}, nil) {
		return errors.New("prepare message lacks a descriptor")
	}
	var err error
	if s.control, err = fileListener(control); err != nil {
		return err
	}
	if s.vsock, err = fileListener(vsock); err != nil {
		return err
	}
	system, err := kvm.OpenFile(device)
	if err != nil {
		return err
	}
	// The virtual machine's own descriptors are enough for it.
	defer system.Close()
	s.confined = form.Confined
	s.prepared, err = machine.Prepare(system, form.CPUs)
	return err
}

// detach lets the launcher go, behind a rehearsal if it has asked for one, and returns when
// somebody has come to start the VM.
func (s *server) detach(ctx context.Context, req *request, files []*os.File) error {
	rehearseMessages()
	if req.Op == opRehearse {
		if err := s.rehearse(ctx, req, files); err != nil {
			return errors.Join(err, s.launcher.send(response{Error: s.explain(err)}, nil))
		}
	}
	// A launcher that is gone by now will never tell anybody of this process.
	if err := s.launcher.send(response{}, nil); err != nil {
		return err
	}
	s.launcher.Close()
	stop := context.AfterFunc(ctx, func() { s.control.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	socket, err := s.control.AcceptUnix()
	if err != nil {
		return fmt.Errorf("wait for a start: %w", errors.Join(err, ctx.Err()))
	}
	s.launcher = newConn(socket)
	// Whoever has come knows by this that the process did not end with its launcher meanwhile.
	return s.launcher.send(response{}, nil)
}
