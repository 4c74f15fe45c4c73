package forkvm_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm"
	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/devices/vsock"
	"github.com/forkvm/forkvm/internal/testkit"
	"github.com/forkvm/forkvm/internal/testkit/stream"
)

// connectTime is how long a new connection may take in the cases, a second of
// counted time, with what is exchanged on it.
const connectTime = time.Second

// full is a number of a case, or one that stands for it: in a short run, and where the machine is emulated and a long run would take hours.
func full(number, emulated, reduced int) int {
	switch {
	case testing.Short():
		return reduced
	case testkit.InLab():
		return emulated
	}
	return number
}

// inTime checks a limit of time where that is counted.
func inTime(t *testing.T, what string, begun time.Time, most time.Duration) {
	t.Helper()
	if took := time.Since(begun); testkit.Counted() && took > most {
		t.Errorf("%s: %v, want %v at most", what, took, most)
	}
}

// storm keeps connections to a guest's echo port opening, working and closing,
// some of them without reading what is on its way, until it is stopped.
type storm struct {
	stop    context.CancelFunc
	done    sync.WaitGroup
	through atomic.Int64 // connections that carried everything
	wrong   atomic.Pointer[wrongBytes]
}

func startStorm(ctx context.Context, vm *forkvm.VM, workers int) *storm {
	s := &storm{}
	ctx, s.stop = context.WithCancel(ctx)
	for worker := range workers {
		s.done.Go(func() {
			r := rand.New(rand.NewPCG(uint64(worker), 5))
			for ctx.Err() == nil {
				s.connection(ctx, vm, r)
			}
		})
	}
	return s
}

func (s *storm) connection(ctx context.Context, vm *forkvm.VM, r *rand.Rand) {
	size := 1 + r.IntN(100<<10)
	if r.IntN(3) == 0 {
		if conn, err := vm.Dial(ctx, loadPort); err == nil {
			_, _ = conn.Write(make([]byte, min(size, 4096)))
			conn.Close() // with the echo on its way: the guest gets a reset
		}
	} else {
		// Connections break whenever their machine ends. They must never carry
		// anything else than what was sent.
		err := echo(ctx, vm, byte(size), size)
		var wrong *wrongBytes
		if errors.As(err, &wrong) {
			s.wrong.Store(wrong)
		}
		if err == nil {
			s.through.Add(1)
		}
	}
	select {
	case <-ctx.Done():
	case <-time.After(5 * time.Millisecond):
	}
}

// end stops the storm and returns what went wrong in it.
func (s *storm) end() error {
	s.stop()
	s.done.Wait()
	if wrong := s.wrong.Load(); wrong != nil {
		return wrong
	}
	return nil
}

// bothWays makes a connection in each direction and exchanges something on it.
func bothWays(t *testing.T, ctx context.Context, vm *forkvm.VM, what string, seed int) {
	t.Helper()
	begun := time.Now()
	if err := echo(ctx, vm, byte(seed), 10_000); err != nil {
		t.Errorf("%s: host to guest: %v", what, err)
	}
	inTime(t, what+": host to guest", begun, connectTime)
	begun = time.Now()
	if _, err := attempt(ctx, vm, fmt.Sprintf("guestload connect -port %d -bytes 8192", hostPort)); err != nil {
		t.Errorf("%s: guest to host: %v", what, err)
	}
	inTime(t, what+": guest to host", begun, connectTime)
}

// TestCaseB1 takes snapshots while connections open, close and break, 200 in a
// second by the guest and more by the host: in each clone both directions work at
// once.
func TestCaseB1(t *testing.T) {
	ctx := begin(t)
	st, name := parent(t, ctx, 1)
	own := openStore(t)
	host := newEchoHost(t)
	vm := restore(t, ctx, st, name, forkvm.Config{Name: "source", Connect: host.connect})
	startLoad(t, ctx, vm)
	sh(t, ctx, vm, fmt.Sprintf("setsid guestload storm -port %d >/run/storm.log 2>&1 & true", hostPort))
	load := startStorm(ctx, vm, 4)
	for round := range full(50, 50, 2) {
		time.Sleep(rand.N(100 * time.Millisecond))
		c := forkvm.Config{Name: fmt.Sprintf("clone-%d", round), Connect: host.connect}
		var clone *forkvm.VM
		if round%2 == 0 {
			clone = fork(t, ctx, vm, c)[0]
		} else {
			takeSnapshot(t, ctx, vm, own, c.Name)
			clone = restore(t, ctx, own, c.Name, c)
		}
		bothWays(t, ctx, clone, c.Name, round)
		if err := clone.Close(); err != nil {
			t.Error(err)
		}
	}
	if err := load.end(); err != nil {
		t.Error(err)
	}
	if load.through.Load() == 0 {
		t.Error("no connection to the source worked")
	}
	t.Logf("%d connections of the source carried everything", load.through.Load())
}

// peer is a program in a guest that does as it is ordered on connections.
type peer struct {
	vm      *forkvm.VM
	process *client.Process
	lines   *io.PipeWriter
	last    atomic.Uint64
	hosted  chan net.Conn // connections that the guest has made

	mu       sync.Mutex
	outcomes map[uint64]chan outcome
}

// peerPort is where it listens, calledPort where the host takes its connections.
const (
	peerPort   = 7200
	calledPort = 7201
)

// order, step and outcome are those of guestload's peer.
type order struct {
	ID    uint64
	Call  uint32 `json:",omitempty"`
	Steps []step
}

type step struct {
	Sleep      time.Duration `json:",omitempty"`
	Send       int64         `json:",omitempty"`
	Seed       uint64        `json:",omitempty"`
	Chunk      int           `json:",omitempty"`
	CloseWrite bool          `json:",omitempty"`
	Receive    int64         `json:",omitempty"`
	From       uint64        `json:",omitempty"`
	Pause      time.Duration `json:",omitempty"`
}

type outcome struct {
	ID                      uint64
	Sent, Received          int64
	SendError, ReceiveError string
	Broken                  bool
}

func (o outcome) check(t *testing.T, what string, sent, received int64) {
	t.Helper()
	if o.SendError != "" || o.ReceiveError != "" || o.Sent != sent || o.Received != received {
		t.Errorf("%s: in the guest: %+v, want %d bytes sent and %d received", what, o, sent, received)
	}
}

// startPeer restores a guest with a peer in it, which ends with the test.
func startPeer(t *testing.T, ctx context.Context) *peer {
	t.Helper()
	st, name := parent(t, ctx, 1)
	echo := newEchoHost(t)
	p := &peer{hosted: make(chan net.Conn, 64), outcomes: map[uint64]chan outcome{0: make(chan outcome, 1)}}
	p.vm = restore(t, ctx, st, name, forkvm.Config{Name: "peer", Connect: func(ctx context.Context, port uint32) (net.Conn, error) {
		if port != calledPort {
			return echo.connect(ctx, port)
		}
		near, far, err := vsock.Pipe()
		if err == nil {
			p.hosted <- near
		}
		return far, err
	}})
	reader, writer := io.Pipe()
	p.lines = writer
	var err error
	p.process, err = p.vm.Agent().Start(ctx, client.Command{
		Args: []string{"guestload", "peer", "-port", fmt.Sprint(peerPort)}, Stdout: writer, Stderr: os.Stderr,
	})
	if err != nil {
		t.Fatal(err)
	}
	go p.read(reader)
	t.Cleanup(func() {
		_ = p.process.Signal(int(unix.SIGKILL))
		_, _ = p.process.Wait()
		writer.Close()
	})
	p.outcome(t, ctx, 0)
	return p
}

func (p *peer) read(lines io.Reader) {
	for in := bufio.NewScanner(lines); in.Scan(); {
		var o outcome
		if json.Unmarshal(in.Bytes(), &o) == nil {
			p.mu.Lock()
			if c := p.outcomes[o.ID]; c != nil {
				c <- o
			}
			p.mu.Unlock()
		}
	}
}

// open gives an order. The connection is the host's, or with call the guest's.
func (p *peer) open(ctx context.Context, call bool, steps ...step) (id uint64, conn net.Conn, err error) {
	o := order{ID: p.last.Add(1), Steps: steps}
	p.mu.Lock()
	p.outcomes[o.ID] = make(chan outcome, 1)
	p.mu.Unlock()
	conn, err = p.vm.Dial(ctx, peerPort)
	if err != nil {
		return 0, nil, err
	}
	if call {
		o.Call = calledPort
	}
	line, err := json.Marshal(o)
	if err == nil {
		_, err = conn.Write(append(line, '\n'))
	}
	if call && err == nil {
		defer conn.Close()
		select {
		case hosted := <-p.hosted:
			return o.ID, hosted, nil
		case <-ctx.Done():
			return 0, nil, ctx.Err()
		}
	}
	if err == nil {
		_, err = io.ReadFull(conn, make([]byte, 1))
	}
	if err != nil {
		conn.Close()
		return 0, nil, err
	}
	return o.ID, conn, nil
}

func (p *peer) mustOpen(t *testing.T, ctx context.Context, call bool, steps ...step) (uint64, net.Conn) {
	t.Helper()
	id, conn, err := p.open(ctx, call, steps...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return id, conn
}

// outcome waits for what has become of an order.
func (p *peer) outcome(t *testing.T, ctx context.Context, id uint64) outcome {
	t.Helper()
	p.mu.Lock()
	c := p.outcomes[id]
	p.mu.Unlock()
	select {
	case o := <-c:
		p.mu.Lock()
		delete(p.outcomes, id)
		p.mu.Unlock()
		return o
	case <-ctx.Done():
		t.Fatalf("order %d is not done: %v", id, ctx.Err())
		return outcome{}
	}
}

func closeWrite(conn net.Conn) { _ = conn.(interface{ CloseWrite() error }).CloseWrite() }

// receive reads to the end, which has to come after so many bytes of a stream.
func receive(t *testing.T, what string, conn net.Conn, seed uint64, size int64) {
	t.Helper()
	c := stream.NewChecker(seed)
	if err := stream.Receive(conn, c, size+1, 0); err != nil || c.Count() != size {
		t.Errorf("%s: %d of %d bytes, %v", what, c.Count(), size, err)
	}
}

// either runs a part of a case for connections that the host makes, and for those
// of the guest.
func either(t *testing.T, part func(t *testing.T, call bool)) {
	t.Run("opened by host", func(t *testing.T) { part(t, false) })
	t.Run("opened by guest", func(t *testing.T) { part(t, true) })
}

// TestCaseB3 pauses a machine in the middle of streams in both directions, again
// and again and with each call doubled: they go on without a byte lost, and new
// ones can be opened.
func TestCaseB3(t *testing.T) {
	ctx := begin(t)
	p := startPeer(t, ctx)
	startLoad(t, ctx, p.vm)
	rounds, fresh := full(100, 100, 2), full(20, 20, 2)
	const piece = 128 << 10
	all := int64(rounds * piece)
	var streams []*pacedStream
	for i, call := range []bool{false, true} {
		id, conn := p.mustOpen(t, ctx, call, step{Send: all, Seed: uint64(i), Chunk: 64 << 10, Receive: all, From: uint64(10 + i)})
		streams = append(streams, &pacedStream{id: id, conn: conn, out: stream.New(uint64(10 + i)), in: stream.NewChecker(uint64(i))})
	}
	for round := range rounds {
		var moving sync.WaitGroup
		for _, s := range streams {
			moving.Go(func() { s.move(piece) })
		}
		time.Sleep(rand.N(10 * time.Millisecond))
		for i, call := range []func() error{p.vm.Pause, p.vm.Pause, p.vm.Resume, p.vm.Resume} {
			if err := call(); err != nil {
				t.Fatal(err)
			}
			if i == 1 {
				time.Sleep(2 * time.Second)
			}
		}
		moving.Wait()
		for _, s := range streams {
			if s.err != nil {
				t.Fatalf("round %d: %v", round, s.err)
			}
		}
		for i := range fresh / 2 {
			bothWays(t, ctx, p.vm, fmt.Sprintf("connections %d of round %d", i, round), i)
		}
	}
	for _, s := range streams {
		p.outcome(t, ctx, s.id).check(t, "old stream", all, all)
	}
}

// pacedStream is a connection on which both ends send, as far as the host reads.
type pacedStream struct {
	id   uint64
	conn net.Conn
	out  *stream.Source
	in   *stream.Checker
	err  error
}

func (s *pacedStream) move(size int64) {
	sent := make(chan error, 1)
	go func() {
		_, err := stream.Send(s.conn, s.out, size, 64<<10)
		sent <- err
	}()
	err := stream.Receive(s.conn, s.in, size, 0)
	s.err = errors.Join(s.err, err, <-sent)
}

// TestCaseB4 closes connections in halves, at once and early: no byte is lost, and
// nothing is left of them.
func TestCaseB4(t *testing.T) {
	ctx := begin(t)
	p := startPeer(t, ctx)
	t.Run("halves", func(t *testing.T) {
		either(t, func(t *testing.T, call bool) { p.halves(t, ctx, call, 1<<20, 2*time.Second) })
	})
	t.Run("at once", func(t *testing.T) {
		either(t, func(t *testing.T, call bool) { p.atOnce(t, ctx, call, 8<<20, 3*time.Second) })
	})
	t.Run("early", func(t *testing.T) { either(t, func(t *testing.T, call bool) { p.early(t, ctx, call) }) })
	// Connections have descriptors here; the device's table would be full (devices/vsock
	// has a limit of 1,024) long before the end if they stayed in it.
	cycles := full(10_000, 300, 15)
	run := func(n int) {
		for i := range n {
			call := i%2 == 0
			p.halves(t, ctx, call, 1000, 0)
			p.atOnce(t, ctx, call, 3000, 0)
			p.early(t, ctx, call)
			if t.Failed() {
				t.Fatalf("cycle %d", i)
			}
		}
	}
	run(2)
	before := descriptors(t)
	run(cycles)
	for end := time.Now().Add(patience); descriptors(t) > before; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d descriptors after %d cycles, %d before", descriptors(t), cycles, before)
		}
	}
}

func descriptors(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// halves has one side send, say that this was all, and get three times as much as
// an answer: the host asks, then the guest.
func (p *peer) halves(t *testing.T, ctx context.Context, call bool, size int64, late time.Duration) {
	t.Helper()
	id, conn := p.mustOpen(t, ctx, call,
		step{Receive: size + 1, From: 1},
		step{Sleep: late, Send: 3 * size, Seed: 2, Chunk: 64 << 10})
	if _, err := stream.Send(conn, stream.New(1), size, 64<<10); err != nil {
		t.Error(err)
	}
	closeWrite(conn)
	receive(t, "the guest's answer", conn, 2, 3*size)
	conn.Close()
	p.outcome(t, ctx, id).check(t, "the guest answers", 3*size, size)

	id, conn = p.mustOpen(t, ctx, call,
		step{Send: size, Seed: 3, Chunk: 64 << 10, CloseWrite: true},
		step{Receive: 3*size + 1, From: 4})
	receive(t, "the guest's question", conn, 3, size)
	time.Sleep(late)
	if _, err := stream.Send(conn, stream.New(4), 3*size, 64<<10); err != nil {
		t.Error(err)
	}
	conn.Close()
	p.outcome(t, ctx, id).check(t, "the guest asks", size, 3*size)
}

// atOnce has one side send and close while the other does not read yet.
func (p *peer) atOnce(t *testing.T, ctx context.Context, call bool, size int64, late time.Duration) {
	t.Helper()
	id, conn := p.mustOpen(t, ctx, call, step{Send: size, Seed: 5, Chunk: 64 << 10})
	time.Sleep(late)
	receive(t, "from the guest", conn, 5, size)
	conn.Close()
	p.outcome(t, ctx, id).check(t, "the guest sends", size, 0)

	id, conn = p.mustOpen(t, ctx, call, step{Sleep: late, Receive: size + 1, From: 6})
	if _, err := stream.Send(conn, stream.New(6), size, 64<<10); err != nil {
		t.Error(err)
	}
	conn.Close()
	p.outcome(t, ctx, id).check(t, "the guest receives", 0, size)
}

// early has the reader go while the other side writes.
func (p *peer) early(t *testing.T, ctx context.Context, call bool) {
	t.Helper()
	const endless = 1 << 40
	id, conn := p.mustOpen(t, ctx, call, step{Send: endless, Chunk: 64 << 10})
	if _, err := io.ReadFull(conn, make([]byte, 10_000)); err != nil {
		t.Error(err)
	}
	begun := time.Now()
	conn.Close()
	o := p.outcome(t, ctx, id)
	inTime(t, "the guest's writer hears of it", begun, time.Second)
	if !o.Broken {
		t.Errorf("the guest writes to nobody: %+v", o)
	}

	id, conn = p.mustOpen(t, ctx, call, step{Receive: 10_000, From: 7})
	sent := make(chan error, 1)
	go func() {
		_, err := stream.Send(conn, stream.New(7), endless, 64<<10)
		sent <- err
	}()
	p.outcome(t, ctx, id).check(t, "the guest leaves", 0, 10_000)
	begun = time.Now()
	if err := <-sent; !errors.Is(err, unix.EPIPE) && !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the host writes to nobody: %v", err)
	}
	inTime(t, "the host's writer hears of it", begun, time.Second)
	conn.Close()
}

// TestCaseB5 has streams that are long, whose reader is slow, and whose reader has
// stopped.
func TestCaseB5(t *testing.T) {
	ctx := begin(t)
	if !testing.Short() {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(t.Context(), 8*patience)
		defer cancel()
	}
	p := startPeer(t, ctx)
	t.Run("slow readers", func(t *testing.T) {
		either(t, func(t *testing.T, call bool) {
			size := int64(full(1<<30, 64<<20, 1<<20))
			p.exchange(t, ctx, call, size, size, 10*time.Millisecond)
		})
	})
	t.Run("counters wrap", func(t *testing.T) {
		testkit.Long(t) // package devices/vsock has it for both directions, with counters that begin just below
		const size = 4<<30 + 1<<20
		p.exchange(t, ctx, false, size, int64(full(size, 1<<20, 0)), 0)
	})
	t.Run("stopped guest", func(t *testing.T) { p.stoppedGuest(t, ctx, full(200_000, 200_000, 5_000)) })
	t.Run("stopped host", func(t *testing.T) { p.stoppedHost(t, ctx) })
}

// exchange moves so many bytes to the guest, and at once to the host, in pieces of all sizes, with a
// small buffer in the host and readers that pause.
func (p *peer) exchange(t *testing.T, ctx context.Context, call bool, toGuest, toHost int64, pause time.Duration) {
	id, conn := p.mustOpen(t, ctx, call, step{Send: toHost, Seed: 8, Chunk: 1 << 20, CloseWrite: true, Receive: toGuest + 1, From: 9, Pause: pause})
	if err := conn.(*net.UnixConn).SetWriteBuffer(4096); err != nil {
		t.Fatal(err)
	}
	sent := make(chan error, 1)
	go func() {
		_, err := stream.Send(conn, stream.New(9), toGuest, 1<<20)
		closeWrite(conn)
		sent <- err
	}()
	begun := time.Now()
	c := stream.NewChecker(8)
	if err := stream.Receive(conn, c, toHost+1, pause); err != nil || c.Count() != toHost {
		t.Errorf("%d of %d bytes, %v", c.Count(), toHost, err)
	}
	if err := <-sent; err != nil {
		t.Error(err)
	}
	p.outcome(t, ctx, id).check(t, "both ways", toHost, toGuest)
	t.Logf("%d MiB to the guest, %d to the host in %v", toGuest>>20, toHost>>20, time.Since(begun).Round(time.Millisecond))
}

// stopTime is how long a reader stands still.
func stopTime() time.Duration { return time.Duration(full(60, 60, 10)) * time.Second }

// stoppedGuest writes single bytes to a guest that does not read.
func (p *peer) stoppedGuest(t *testing.T, ctx context.Context, writes int) {
	// More behind them than anybody may hold, so that the writer is blocked in the end.
	size := int64(writes) + 1<<20
	held := heap()
	id, conn := p.mustOpen(t, ctx, false, step{Sleep: stopTime(), Receive: size + 1, From: 11})
	begun := time.Now()
	sent := make(chan error, 1)
	go func() {
		out, err := stream.New(11), error(nil)
		one := make([]byte, 1)
		for i := 0; i < writes && err == nil; i++ {
			_, _ = out.Read(one)
			_, err = conn.Write(one)
		}
		if err == nil {
			_, err = stream.Send(conn, out, 1<<20, 64<<10)
		}
		closeWrite(conn)
		sent <- err
	}()
	restful(t, held, stopTime()/2)
	if err := <-sent; err != nil {
		t.Error(err)
	}
	inTime(t, "the stream goes on", begun, stopTime()+2*time.Second)
	p.outcome(t, ctx, id).check(t, "a reader that stood still", 0, size)
}

// stoppedHost lets a guest write to a host that does not read.
func (p *peer) stoppedHost(t *testing.T, ctx context.Context) {
	const size = 8 << 20
	held := heap()
	id, conn := p.mustOpen(t, ctx, false, step{Send: size, Seed: 12, Chunk: 64 << 10})
	time.Sleep(time.Second)
	restful(t, held, stopTime()/2)
	begun := time.Now()
	c := stream.NewChecker(12)
	if err := stream.Receive(conn, c, size/2, 0); err != nil {
		t.Error(err)
	}
	inTime(t, "the stream goes on", begun, time.Second)
	if err := stream.Receive(conn, c, size, 0); err != nil || c.Count() != size {
		t.Errorf("%d of %d bytes, %v", c.Count(), size, err)
	}
	p.outcome(t, ctx, id).check(t, "a writer that stood still", size, 0)
}

// heap is what this process, which is the machine, holds beside the guest's memory.
func heap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// restful checks that the machine does next to nothing for a while, and has at its
// end at most a MiB more than it held before.
func restful(t *testing.T, held int64, while time.Duration) {
	t.Helper()
	processor := func() time.Duration {
		var u unix.Rusage
		if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
			t.Fatal(err)
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	used := processor()
	time.Sleep(while)
	if used = processor() - used; testkit.Counted() && used > while/20 {
		t.Errorf("%v of processor time in %v for a reader that does not read", used, while)
	}
	if grown := heap() - held; grown > 1<<20 {
		t.Errorf("%d KiB more for a reader that does not read", grown>>10)
	}
}
