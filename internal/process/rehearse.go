package process

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"runtime"

	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/machine"
)

// rehearse makes the machine ahead and has it live a life that is thrown away.
func (s *server) rehearse(ctx context.Context, req *request, files []*os.File) error {
	claimed := claims{files: files, trusted: true}
	defer claimed.close()
	if req.Start == nil || req.Start.Checkpoint == nil {
		return errors.New("rehearsal says nothing of what")
	}
	// The life to come has the same TAP device.
	device, err := s.tap.duplicate()
	if err != nil {
		return err
	}
	next := claimed.takeAll(req.Tops)
	// Nobody reads the console of that life.
	if err := s.makeMachine(req.Start, &claimed, nil, new(machine.Timeline)); err != nil {
		device.close()
		linux.CloseFiles(next...)
		return err
	}
	s.tap = device
	ctx, cancel := s.whileLaunched(ctx)
	defer cancel()
	ctx, cancel = readyIn(ctx, req.Start.ReadyTimeout)
	defer cancel()
	if err := s.machine.Rehearse(ctx, req.Start.Identity, next); err != nil {
		return err
	}
	if failed := s.diskError.Load(); failed != nil {
		return failed
	}
	runtime.GC() // and not at the start
	return nil
}

// whileLaunched ends with the launcher: nobody would hear of what it has asked for.
func (s *server) whileLaunched(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	go func(c *conn) {
		var nothing request
		c.receive(&nothing) // it has no more to say
		cancel(errors.New("the program that prepared this vm is gone"))
	}(s.launcher)
	return ctx, func() { cancel(nil) }
}

// takeRole is the receiving end of a start for a process that has rehearsed.
func (s *server) takeRole(form *startForm, files *claims, console io.Writer) (*machine.Role, error) {
	r := &machine.Role{Console: console, WorkingSet: files.takeWorkingSet(form.WorkingSet)}
	var err error
	r.Target, err = takeTarget(form.Tops, form.Checkpoint, files)
	if err == nil && form.Network != nil {
		r.Network, r.MAC, err = s.makeNetwork(form, s.machine.Shape().NetworkMTU)
	}
	if err != nil {
		return nil, errors.Join(err, r.Close())
	}
	r.Identity = form.Identity
	return r, nil
}

// rehearseMessages has encoding/json find out ahead how the start's messages are made,
// which it does once in each process.
func rehearseMessages() {
	for _, message := range []any{request{}, response{}} {
		_, _ = json.Marshal(message)
	}
}
