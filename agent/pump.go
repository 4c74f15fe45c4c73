package agent

import (
	"errors"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/agent/proto"
)

// chunkSize is how much of a stream is read at once.
const chunkSize = 32 << 10

// buffers are shared by all streams and taken only while there is something to
// put into them: a stream that waits holds no memory.
var buffers = sync.Pool{New: func() any { return new([proto.HeaderSize + chunkSize]byte) }}

// sink is where an output stream of a command goes.
type sink interface {
	// room waits until something can be taken, and returns how much: limit at
	// most, 0 if no more is wanted.
	room(limit int) int
	// take gets at most what room has said, behind room for a frame's header.
	take(frame []byte)
	// end says that this was all.
	end()
}

// wireSink sends a stream to the host as it grants credit.
type wireSink struct {
	wire   *proto.Conn
	window *proto.Window
	stream uint16
}

func (w *wireSink) room(limit int) int { return w.window.Wait(limit) }

func (w *wireSink) take(frame []byte) {
	w.window.Use(len(frame) - proto.HeaderSize)
	if w.wire.WriteData(w.stream, 0, frame) != nil {
		w.window.Close()
	}
}

func (w *wireSink) end() {
	// An error is one of the connection, whose reader finds it out.
	_ = w.wire.WriteData(w.stream, proto.FlagEnd, make([]byte, proto.HeaderSize))
}

// pump carries one output stream of a command to its sink.
//
// Its end is the delicate part. The pipe's end of file says nothing about the
// command, for a background process may hold the pipe for days. So after the
// main process has ended the pump asks the pipe how many bytes it holds: all
// that the main process wrote is among them, or has been read. It delivers
// exactly those, and what comes later goes nowhere.
type pump struct {
	file   *os.File
	raw    syscall.RawConn
	to     sink
	limit  int64 // 0: none
	drains *drains
	// terminal: the file is our end of a terminal.
	terminal bool

	finishing atomic.Bool
	done      chan struct{} // closed at the end; the counters are final then
	sent      int64
	dropped   int64
}

func newPump(f *os.File, to sink, limit int64, d *drains) *pump {
	raw, err := f.SyscallConn()
	if err != nil {
		panic(err) // only for a nil file
	}
	return &pump{file: f, raw: raw, to: to, limit: limit, drains: d, done: make(chan struct{})}
}

// finish is called when the main process has ended.
func (p *pump) finish() {
	// The deadline wakes up a read that waits. It comes before the flag: whoever
	// has seen the flag takes the deadline off again.
	p.file.SetReadDeadline(time.Unix(1, 0))
	p.finishing.Store(true)
}

// run moves the stream until its end and leaves the rest of it to drains.
func (p *pump) run() {
	defer close(p.done)
	ended := p.follow()
	if !ended {
		p.file.SetReadDeadline(time.Time{})
		ended = p.rest()
	}
	p.to.end()
	if ended {
		p.file.Close()
	} else {
		p.drains.add(p.file)
	}
}

// follow moves what comes until the end of the file (true) or until the main
// process has ended (false).
func (p *pump) follow() bool {
	for !p.finishing.Load() {
		_, err := p.step(chunkSize)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return false
		}
		if err != nil {
			return true
		}
	}
	return false
}

// rest moves what is in the pipe now, and returns true if that was the end of
// the file.
func (p *pump) rest() bool {
	if p.terminal {
		return p.restOfTerminal()
	}
	left := p.pending()
	for left > 0 {
		n, err := p.step(left)
		if err != nil {
			return true
		}
		left -= n
	}
	return false
}

// restOfTerminal reads until there is nothing. A terminal's driver passes bytes on
// in the background: only a read that finds none waits for that (n_tty_read in
// the kernel), the number of bytes to read does not tell.
func (p *pump) restOfTerminal() bool {
	for {
		_, err := p.stepWith(chunkSize, p.now)
		if errors.Is(err, syscall.EAGAIN) {
			return false
		}
		if err != nil {
			return true // EIO: the last one who had it open is gone
		}
	}
}

func (p *pump) pending() int {
	n := 0
	p.raw.Control(func(fd uintptr) {
		n, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ)
	})
	return n
}

// step moves one chunk of at most limit bytes. While the sink has no room it does
// not read: the pipe fills up and the command waits.
func (p *pump) step(limit int) (int, error) {
	return p.stepWith(limit, p.raw.Read)
}

// access calls a function with the descriptor, as often as it returns false, or
// once if it does not wait.
type access func(func(fd uintptr) bool) error

// now is an access that does not wait.
func (p *pump) now(f func(fd uintptr) bool) error {
	return p.raw.Control(func(fd uintptr) { f(fd) })
}

// stepWith is step with a way to get at the descriptor.
func (p *pump) stepWith(limit int, when access) (int, error) {
	keep := limit
	if p.limit > 0 {
		keep = int(min(int64(keep), p.limit-p.sent))
	}
	if keep > 0 {
		keep = p.to.room(min(keep, chunkSize))
	}
	if keep == 0 {
		// Over the limit, or the sink wants no more of it.
		n, err := p.read(min(limit, chunkSize), when, func([]byte) {})
		p.dropped += int64(n)
		return n, err
	}
	return p.read(keep, when, func(frame []byte) {
		p.sent += int64(len(frame) - proto.HeaderSize)
		p.to.take(frame)
	})
}

// read takes at most limit bytes and passes them on with room for a header in
// front. At the end of the file it returns an error, and EAGAIN when there is
// nothing and the access does not wait.
func (p *pump) read(limit int, when access, use func(frame []byte)) (n int, err error) {
	var buf *[proto.HeaderSize + chunkSize]byte
	waitErr := when(func(fd uintptr) bool {
		buf = buffers.Get().(*[proto.HeaderSize + chunkSize]byte)
		for {
			n, err = syscall.Read(int(fd), buf[proto.HeaderSize:proto.HeaderSize+limit])
			if err != syscall.EINTR {
				break
			}
		}
		if err != nil {
			buffers.Put(buf)
		}
		return err != syscall.EAGAIN
	})
	if waitErr != nil {
		return 0, waitErr
	}
	if err != nil {
		return 0, err
	}
	defer buffers.Put(buf)
	if n == 0 {
		return 0, io.EOF
	}
	use(buf[:proto.HeaderSize+n])
	return n, nil
}

// drains reads and drops what background processes write into pipes whose
// command has ended. Without it they would block, or die of SIGPIPE.
type drains struct {
	mu     sync.Mutex
	closed bool
	files  map[*os.File]struct{}
	wg     sync.WaitGroup
}

func (d *drains) add(f *os.File) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		f.Close()
		return
	}
	if d.files == nil {
		d.files = map[*os.File]struct{}{}
	}
	d.files[f] = struct{}{}
	d.wg.Add(1)
	go d.drain(f)
}

func (d *drains) drain(f *os.File) {
	defer d.wg.Done()
	var scrap [512]byte
	for {
		if _, err := f.Read(scrap[:]); err != nil {
			break
		}
	}
	d.mu.Lock()
	delete(d.files, f)
	d.mu.Unlock()
	f.Close()
}

func (d *drains) close() {
	d.mu.Lock()
	d.closed = true
	for f := range d.files {
		f.SetReadDeadline(time.Unix(1, 0))
	}
	d.mu.Unlock()
	d.wg.Wait()
}
