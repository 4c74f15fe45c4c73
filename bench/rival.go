package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/guest/image"
	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/machine"
)

// rival is another monitor. It boots the same image with the same devices and the
// same guest agent, saves that guest in its own way, and restores it.
type rival interface {
	// command is the monitor's process in a directory of its own: for a boot, or
	// to restore what save left in saved. Its ExtraFiles are the caller's to close.
	command(dir, saved string) (*exec.Cmd, error)
	// start makes the process that has just been started run the guest.
	start(ctx context.Context, dir, saved string) error
	// save leaves in saved what restoring needs. The guest need not go on.
	save(ctx context.Context, dir, saved string) error
	// dial connects to the guest agent.
	dial(ctx context.Context, dir string) (net.Conn, error)
}

// errNotRun: what is to be measured is not here.
type errNotRun struct{ reason string }

func (e errNotRun) Error() string { return e.reason }

// measureRival adds the rows name_restore, name_first_command and name_private.
// A rival that is not here is noted and no error.
func (b *bench) measureRival(ctx context.Context, name string, find func(SceneConfig) (rival, error)) error {
	r, err := find(b.config.Scene)
	var absent errNotRun
	if errors.As(err, &absent) {
		b.note("%s_restore: not run: %s", name, absent.reason)
		b.extra = append(b.extra, name+"_restore")
		b.rows[name+"_restore"] = Result{Name: name + "_restore", Unit: CMS}
		return nil
	}
	if err != nil {
		return err
	}
	s := stable{rival: r, scene: b.config.Scene, dir: filepath.Join(b.config.Scene.Dir, name)}
	if err := s.prepare(ctx); err != nil {
		return err
	}
	// The first is not counted, as with ours; it is the one that is left idle.
	var private int64
	_, err = s.restore(ctx, func(_ *client.Client, pid int) error {
		time.Sleep(5 * settle)
		private = linux.WrittenBytes(pid)
		return nil
	})
	if err != nil {
		return err
	}
	var ready, command []float64
	var c course
	for range b.config.Rounds {
		m, err := s.restore(ctx, func(agent *client.Client, _ int) error { return runTrue(ctx, agent) })
		if err != nil {
			return err
		}
		c.step("monitor", ms(m.started))
		c.step("guest agent, identity", ms(m.ready-m.started))
		c.step("first command", ms(m.then-m.ready))
		ready, command = append(ready, ms(m.ready)), append(command, ms(m.then))
	}
	b.row(name+"_restore", CMS, ready)
	b.row(name+"_first_command", CMS, command)
	b.row(name+"_private", MiB, []float64{float64(private) / (1 << 20)})
	b.phases = append(b.phases, c.breakdown(name+" restore"))
	return nil
}

// stable is where a rival runs.
type stable struct {
	rival rival
	scene SceneConfig
	dir   string
}

func (s *stable) saved() string { return filepath.Join(s.dir, "saved") }

// prepare boots the guest, lets it run its first commands as ours does, and saves
// it.
func (s *stable) prepare(ctx context.Context) error {
	if err := os.MkdirAll(s.saved(), 0o700); err != nil {
		return err
	}
	return s.with(ctx, "", func(dir string, agent *client.Client, _ int) error {
		booting, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		if _, err := agent.WaitReady(booting); err != nil {
			return err
		}
		for range 3 {
			if err := runTrue(ctx, agent); err != nil {
				return err
			}
		}
		time.Sleep(settle)
		if err := s.rival.save(ctx, dir, s.saved()); err != nil {
			return err
		}
		// What the guest had written to its disk by then belongs to the state.
		return copyFile(filepath.Join(s.saved(), "disk"), filepath.Join(dir, "disk"))
	})
}

// restored is one sample: the time from the start of the process until the
// monitor says that the guest runs, until the new identity is confirmed, and until
// what came then has ended.
type restored struct{ started, ready, then time.Duration }

// restore starts a process from what was saved and does something with it. Ready is
// what it is for ours: the guest agent has answered and has confirmed a new identity.
func (s *stable) restore(ctx context.Context, then func(agent *client.Client, pid int) error) (r restored, err error) {
	var begin time.Time
	err = s.with(ctx, s.saved(), func(_ string, agent *client.Client, pid int) error {
		r.started = time.Since(begin)
		if err := renew(ctx, agent); err != nil {
			return err
		}
		r.ready = time.Since(begin)
		err := then(agent, pid)
		r.then = time.Since(begin)
		return err
	}, &begin)
	return r, err
}

func runTrue(ctx context.Context, agent *client.Client) error {
	result, err := agent.Exec(ctx, client.Command{Args: []string{"true"}})
	if err == nil && result.ExitCode != 0 {
		err = fmt.Errorf("true: exit code %d", result.ExitCode)
	}
	return err
}

// with runs the rival's process around do. Begin, if given, is set just before
// the process is started.
func (s *stable) with(ctx context.Context, saved string, do func(dir string, agent *client.Client, pid int) error, begin ...*time.Time) (err error) {
	dir := filepath.Join(s.dir, "run")
	if err := errors.Join(os.RemoveAll(dir), os.MkdirAll(dir, 0o700)); err != nil {
		return err
	}
	disk := filepath.Join(s.scene.Image, string(image.Rootfs))
	if saved != "" {
		disk = filepath.Join(saved, "disk")
	}
	if err := copyFile(filepath.Join(dir, "disk"), disk); err != nil {
		return err
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		return err
	}
	defer log.Close()
	time.Sleep(settle)
	for _, b := range begin {
		*b = time.Now()
	}
	cmd, err := s.rival.command(dir, saved)
	if err != nil {
		return err
	}
	defer linux.CloseFiles(cmd.ExtraFiles...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return err
	}
	defer func() {
		cmd.Process.Kill()
		cmd.Wait() // it was killed
		if err != nil {
			err = fmt.Errorf("%w; it said: %s", err, lastBytes(log.Name(), filepath.Join(dir, consoleLog)))
		}
	}()
	if err := s.rival.start(ctx, dir, saved); err != nil {
		return err
	}
	agent := client.New(client.Config{Dial: func(ctx context.Context) (net.Conn, error) { return s.rival.dial(ctx, dir) }})
	return do(dir, agent, cmd.Process.Pid)
}

// lastBytes is the end of each of some logs, as far as they exist.
func lastBytes(paths ...string) string {
	var said []byte
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err == nil {
			said = append(said, data[max(0, len(data)-2048):]...)
		}
	}
	return string(said)
}

// consoleLog is where a rival whose output is not its guest's console puts that.
const consoleLog = "console.log"

// patience bounds the wait for a rival's guest.
const patience = 5 * time.Minute

// awaitFile waits until a process has made its socket.
func awaitFile(ctx context.Context, path string) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		if _, err := os.Stat(path); err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s was not made: %w", filepath.Base(path), ctx.Err())
		case <-time.After(time.Millisecond):
		}
	}
}

// attempts is how many times a guest agent may be asked at once, interval the
// time between one and the next, and firstLimit how long the first ones wait for
// an answer.
const (
	attempts   = 16
	interval   = 5 * time.Millisecond
	firstLimit = attempts * interval
)

// renew gives the guest a new identity as machine.Renew does, in the first request
// that its guest agent gets. A connection that is made before the guest has reset
// its old ones may never be answered. So that a restore does not look longer than
// it is, asking again does not wait for such a one to fail, and the first ones fail
// soon; and so that questions do not cost the guest much, there is time between
// them.
func renew(ctx context.Context, agent *client.Client) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel() // ends what is still open when one has answered
	id := machine.NewIdentity("clone", machine.TimeHost)
	ask := func(limit time.Duration) error {
		try, done := context.WithTimeout(ctx, limit)
		defer done()
		_, err := agent.Renew(try, client.Identity{
			Generation: id.Generation,
			Entropy:    make([]byte, 64),
			Hostname:   id.Hostname,
			MachineID:  id.MachineID,
			BootID:     true,
			WallClock:  time.Now,
		})
		return err
	}
	last := errors.New("not asked")
	answers, open, asked := make(chan error, attempts), 0, 0
	for {
		if open < attempts {
			limit := firstLimit << min(asked/attempts, 4)
			open, asked = open+1, asked+1
			go func() { answers <- ask(limit) }()
		}
		select {
		case err := <-answers:
			if open--; err == nil {
				return nil
			}
			last = err
			time.Sleep(time.Millisecond)
		case <-time.After(interval):
		case <-ctx.Done():
			return fmt.Errorf("guest agent does not answer: %w", last)
		}
	}
}

// connectPort asks for a guest's port at a Unix socket and reads the answer's
// line, byte by byte.
func connectPort(ctx context.Context, path string, port uint32) (net.Conn, error) {
	var dialer net.Dialer
	c, err := dialer.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	_, err = fmt.Fprintf(c, "CONNECT %d\n", port)
	for b := make([]byte, 1); err == nil && b[0] != '\n'; {
		_, err = io.ReadFull(c, b)
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

func copyFile(to, from string) error {
	r, err := os.Open(from)
	if err != nil {
		return err
	}
	defer r.Close()
	w, err := os.Create(to)
	if err != nil {
		return err
	}
	_, err = io.Copy(w, r)
	return errors.Join(err, w.Close())
}
