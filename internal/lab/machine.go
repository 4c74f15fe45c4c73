package lab

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/forkvm/forkvm/internal/lab/wire"
)

// Machine is a running lab machine. Its methods may be called from several goroutines.
type Machine struct {
	up      time.Duration
	faulty  bool
	dir     *runDir
	process *process
	port    *os.File
	out     *wire.Writer
	console *console
	serial  *os.File
	readers sync.WaitGroup

	mu      sync.Mutex
	nextID  uint32
	waiting map[uint32]*session
	closed  bool
	gone    chan struct{} // closed when nothing more will arrive; waiting is then empty for good
}

// session is one exchange with the machine: its streams, and where its last frame goes.
type session struct {
	stdout, stderr io.Writer
	last           chan wire.Frame // capacity 1
}

// Start boots a machine and returns when it can run commands. The context bounds the start only.
func Start(ctx context.Context, config Config) (*Machine, error) {
	config, err := config.complete()
	if err != nil {
		return nil, err
	}
	c, err := openCache(config.CacheDir)
	if err != nil {
		return nil, fmt.Errorf("open cache: %w", err)
	}
	e, err := findEmulator(c, config.CPUs)
	if err != nil {
		return nil, err
	}
	k, err := findKernel(ctx, c, config.Kernel)
	if err != nil {
		return nil, err
	}
	image, err := k.image()
	if err != nil {
		return nil, fmt.Errorf("unpack kernel: %w", err)
	}
	initrd, err := makeInitramfs(ctx, c, k, config.Tools)
	if err != nil {
		return nil, fmt.Errorf("make initramfs: %w", err)
	}
	dir, err := newRunDir(c)
	if err != nil {
		return nil, err
	}
	m := &Machine{dir: dir, faulty: e.faulty, waiting: make(map[uint32]*session), gone: make(chan struct{}), console: &console{log: config.Log}}
	disks, err := makeDisks(ctx, c, config, dir.path)
	if err == nil {
		e.args = append(e.args, emulatorArgs(config, image, initrd, disks)...)
		err = m.boot(ctx, config, e, disks)
	}
	if err != nil {
		m.Close()
		return nil, err
	}
	_ = c.prune(time.Now()) // a cache that stays large is no reason to refuse a machine
	return m, nil
}

// makeDisks makes the images that the machine gets: its own disk first, then programs and inputs.
func makeDisks(ctx context.Context, c cache, config Config, dir string) ([]disk, error) {
	scratch := filepath.Join(dir, "scratch.ext4")
	if err := makeScratch(ctx, scratch); err != nil {
		return nil, fmt.Errorf("make scratch disk: %w", err)
	}
	disks := []disk{{path: scratch, own: true, mount: wire.Mount{
		Serial: "scratch", Path: "/mnt",
		Binds: []wire.Bind{
			{Source: "tmp", Path: "/tmp", Public: true},
			{Source: "var-tmp", Path: "/var/tmp", Public: true},
			{Source: "forkvm", Path: "/var/lib/forkvm"},
			{Source: "out", Path: "/out"},
		},
	}}}
	if len(config.Programs) > 0 {
		path, err := filesImage(ctx, c, config.Programs)
		if err != nil {
			return nil, fmt.Errorf("make image of programs: %w", err)
		}
		disks = append(disks, disk{path: path, mount: wire.Mount{Serial: "bin", Path: "/usr/local/bin"}})
	}
	for i, input := range config.In {
		info, err := os.Stat(input)
		if err != nil {
			return nil, fmt.Errorf("read input: %w", err)
		}
		path, err := inputImage(ctx, c, input, info)
		if err != nil {
			return nil, fmt.Errorf("make image of %s: %w", input, err)
		}
		m := wire.Mount{Serial: fmt.Sprintf("in%d", i), Path: "/in/" + filepath.Base(input)}
		if !info.IsDir() {
			m.File, m.Source = true, filepath.Base(input)
		}
		disks = append(disks, disk{path: path, mount: m})
	}
	return disks, nil
}

// boot starts the emulator and waits for the machine's first word.
func (m *Machine) boot(ctx context.Context, config Config, e emulator, disks []disk) error {
	begin := time.Now()
	if err := m.launch(e); err != nil {
		return err
	}
	plan := wire.Plan{}
	for _, d := range disks {
		plan.Mounts = append(plan.Mounts, d.mount)
	}
	ctx, cancel := context.WithTimeout(ctx, config.BootTimeout)
	defer cancel()
	ready := m.open(0, nil, nil)
	if err := m.out.WriteJSON(wire.Setup, 0, plan); err != nil {
		return m.death("boot", err)
	}
	frame, err := m.wait(ctx, "boot", 0, ready)
	if err != nil {
		return err
	}
	var status wire.Status
	if err := frame.JSON(&status); err != nil {
		return err
	}
	if err := status.Err(); err != nil {
		return m.death("boot", err)
	}
	m.up = time.Since(begin)
	return nil
}

func (m *Machine) launch(e emulator) error {
	port, portTheirs, err := socketPair("port")
	if err != nil {
		return err
	}
	defer portTheirs.Close()
	m.port = port
	serial, serialTheirs, err := socketPair("console")
	if err != nil {
		return err
	}
	defer serialTheirs.Close()
	m.serial = serial
	// The emulator keeps changes to shared images in temporary files, which it is to make where Close finds them.
	env := append(append(os.Environ(), "TMPDIR="+m.dir.path), e.env...)
	if m.process, err = startProcess(e.path, e.args, env, []*os.File{portTheirs, serialTheirs}); err != nil {
		return err
	}
	m.out = wire.NewWriter(port)
	m.readers.Add(2)
	go m.readConsole()
	go m.readPort()
	return nil
}

func (m *Machine) readConsole() {
	defer m.readers.Done()
	_, _ = io.Copy(m.console, m.serial) // ends with the emulator, or when Close closes it
}

// readPort hands each frame to its session until the port ends.
func (m *Machine) readPort() {
	defer m.readers.Done()
	defer close(m.gone)
	in := bufio.NewReaderSize(m.port, 256<<10)
	for {
		frame, err := wire.Read(in)
		if err != nil {
			return
		}
		m.mu.Lock()
		s := m.waiting[frame.ID]
		m.mu.Unlock()
		if s == nil {
			continue // its caller has given up
		}
		switch frame.Type {
		case wire.Stdout, wire.Tar:
			_, _ = s.stdout.Write(frame.Payload) // a reader that has gone away must not stop the command
		case wire.Stderr:
			_, _ = s.stderr.Write(frame.Payload)
		case wire.Ready, wire.Exit, wire.TarEnd:
			m.forget(frame.ID)
			s.last <- frame
		}
	}
}

// open registers a session under id.
func (m *Machine) open(id uint32, stdout, stderr io.Writer) *session {
	s := &session{stdout: orDiscard(stdout), stderr: orDiscard(stderr), last: make(chan wire.Frame, 1)}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.waiting[id] = s
	return s
}

func (m *Machine) newID() uint32 {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.nextID++
	return m.nextID
}

func (m *Machine) forget(id uint32) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.waiting, id)
}

// wait returns the session's last frame, or why there will be none.
func (m *Machine) wait(ctx context.Context, doing string, id uint32, s *session) (wire.Frame, error) {
	select {
	case frame := <-s.last:
		return frame, nil
	case <-m.gone:
		select {
		case frame := <-s.last: // it came just before the end
			return frame, nil
		default:
		}
		return wire.Frame{}, m.death(doing, nil)
	case <-ctx.Done():
		m.forget(id)
		return wire.Frame{}, m.death(doing, ctx.Err())
	}
}

// death makes the error for a machine that did not do what was asked.
func (m *Machine) death(doing string, cause error) error {
	e := &DeathError{Reason: Exited, Doing: doing, Cause: cause}
	select {
	case <-m.gone:
		// The port ends before the emulator has: let it say its last words.
		select {
		case <-m.process.done:
		case <-time.After(2 * time.Second):
		}
	default:
	}
	var panicked bool
	e.Console, panicked = m.console.last()
	e.Emulator = m.process.said()
	m.mu.Lock()
	closed := m.closed
	m.mu.Unlock()
	switch {
	case panicked:
		e.Reason = Panic
	case closed:
		e.Reason = Closed
	case errors.Is(cause, context.DeadlineExceeded):
		e.Reason = TimedOut
	case errors.Is(cause, context.Canceled):
		e.Reason = Cancelled
	}
	return e
}

// Alive says whether the machine still runs, as far as is known: it is not once it has crashed or Close was called.
func (m *Machine) Alive() bool {
	select {
	case <-m.gone:
		return false
	default:
		return true
	}
}

// Up is the time from the emulator's start until the machine was ready.
func (m *Machine) Up() time.Duration { return m.up }

// Faulty says that the emulator is of a build that the lab cannot mend: a command in this machine may hang.
func (m *Machine) Faulty() bool { return m.faulty }

// Close ends the machine and removes all that belongs to it. It is idempotent; commands that run end with a DeathError.
func (m *Machine) Close() error {
	m.mu.Lock()
	already := m.closed
	m.closed = true
	m.mu.Unlock()
	if already {
		m.readers.Wait()
		return nil
	}
	if m.process != nil {
		m.process.stop()
	}
	for _, file := range []*os.File{m.port, m.serial} {
		if file != nil {
			file.Close()
		}
	}
	m.readers.Wait()
	return m.dir.remove()
}

func orDiscard(w io.Writer) io.Writer {
	if w == nil {
		return io.Discard
	}
	return w
}
