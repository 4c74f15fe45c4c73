package vsock

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/devices"
	"github.com/forkvm/forkvm/devices/virtio"
	"github.com/forkvm/forkvm/devices/virtio/virtiotest"
	"github.com/forkvm/forkvm/vmm/memory"
)

func TestContract(t *testing.T) {
	virtiotest.Run(t, func(t testing.TB) virtiotest.Subject {
		l, err := net.Listen("unix", t.TempDir()+"/v")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		return virtiotest.Subject{
			DeviceID: virtio.DeviceVsock,
			Queue:    queueTransmit,
			New: func(mem *memory.Memory, irq devices.Interrupt, state []byte) (virtiotest.Device, error) {
				return New(Config{Memory: mem, Interrupt: irq, Listener: l, State: state})
			},
			Request: func(d *virtiotest.Driver, n int) virtiotest.Request {
				h := header{sourceCID: FirstGuestCID, destinationCID: HostCID, sourcePort: uint32(n), destinationPort: 80,
					length: 100, socketType: typeStream, operation: operation(1 + n%7)}
				var raw [headerSize]byte
				h.encode(&raw)
				address := d.Alloc(headerSize+100, 1)
				d.Fill(address, raw[:])
				return virtiotest.Request{
					Buffers: []virtiotest.Buffer{{Address: address, Length: headerSize}, {Address: address + headerSize, Length: 100}},
					Check: func(written uint32) error {
						if written != 0 {
							return fmt.Errorf("%d bytes written to a transmit buffer", written)
						}
						return nil
					},
				}
			},
		}
	})
}

func TestNewRefuses(t *testing.T) {
	mem, irq := virtiotest.NewMemory(t), virtiotest.NewInterrupt()
	for name, c := range map[string]Config{
		"no memory":     {Interrupt: irq},
		"no interrupt":  {Memory: mem},
		"host's CID":    {Memory: mem, Interrupt: irq, GuestCID: 2},
		"any CID":       {Memory: mem, Interrupt: irq, GuestCID: 0xffffffff},
		"negative":      {Memory: mem, Interrupt: irq, MaxConnections: -1},
		"broken state":  {Memory: mem, Interrupt: irq, State: []byte("{}")},
		"foreign state": {Memory: mem, Interrupt: irq, State: []byte(`{"version":1,"device_id":4}`)},
	} {
		if d, err := New(c); err == nil {
			t.Errorf("%s: accepted", name)
			d.Close()
		}
	}
}

// transfer sends the bytes in random chunks and returns their hash.
func transfer(to io.Writer, n int, seed uint64, chunk int) ([32]byte, error) {
	r := rand.New(rand.NewPCG(seed, 0))
	hash := sha256.New()
	p := make([]byte, chunk)
	for n > 0 {
		p := p[:min(n, 1+r.IntN(chunk))]
		for i := 0; i < len(p); i += 1 + i/8 {
			p[i] = byte(r.Uint32())
		}
		hash.Write(p)
		if _, err := to.Write(p); err != nil {
			return [32]byte{}, err
		}
		n -= len(p)
	}
	return [32]byte(hash.Sum(nil)), nil
}

// collect reads to the end in random chunks and returns the hash.
func collect(from io.Reader, seed uint64, chunk int, pause time.Duration) ([32]byte, int, error) {
	r := rand.New(rand.NewPCG(seed, 1))
	hash := sha256.New()
	p := make([]byte, chunk)
	total := 0
	for since := 0; ; {
		n, err := from.Read(p[:1+r.IntN(chunk)])
		hash.Write(p[:n])
		total += n
		if since += n; since > 64<<10 && pause > 0 {
			since = 0
			time.Sleep(pause)
		}
		if err == io.EOF {
			return [32]byte(hash.Sum(nil)), total, nil
		}
		if err != nil {
			return [32]byte{}, total, err
		}
	}
}

type halfCloser interface {
	io.ReadWriter
	CloseWrite() error
}

// exchange sends n bytes each way at once and compares.
func exchange(b *bench, one, other halfCloser, n, chunk int, pause time.Duration) {
	b.Helper()
	var wg sync.WaitGroup
	for i, way := range [][2]halfCloser{{one, other}, {other, one}} {
		sent := make(chan [32]byte, 1)
		wg.Go(func() {
			sum, err := transfer(way[0], n, uint64(i), chunk)
			if err != nil {
				b.Errorf("way %d: send: %v", i, err)
			}
			way[0].CloseWrite()
			sent <- sum
		})
		wg.Go(func() {
			sum, total, err := collect(way[1], uint64(i), chunk, pause)
			if err != nil || total != n || sum != <-sent {
				b.Errorf("way %d: %d of %d bytes arrived, %v", i, total, n, err)
			}
		})
	}
	wg.Wait()
}

// Data is equal in both directions at once, whatever the sizes of writes and reads, of the socket's buffer and of the
// guest's.
func TestCaseB5Exchange(t *testing.T) {
	for _, c := range []struct {
		name        string
		n, chunk    int
		socket      int
		guestBuffer uint32
		pause       time.Duration
	}{
		{name: "large", n: 16 << 20, chunk: 1 << 20, guestBuffer: usualBuffer},
		{name: "small chunks", n: 256 << 10, chunk: 64, guestBuffer: usualBuffer},
		{name: "small socket buffer", n: 2 << 20, chunk: 64 << 10, socket: 4096, guestBuffer: usualBuffer},
		{name: "small guest buffer", n: 256 << 10, chunk: 8192, guestBuffer: 4096},
		{name: "slow readers", n: 1 << 20, chunk: 64 << 10, socket: 4096, guestBuffer: 64 << 10, pause: 2 * time.Millisecond},
	} {
		t.Run(c.name, func(t *testing.T) {
			bothWithBuffer(t, c.guestBuffer, func(b *bench, s *guestSocket, conn *net.UnixConn) {
				if c.socket > 0 {
					b.must(conn.SetWriteBuffer(c.socket))
					b.must(conn.SetReadBuffer(c.socket))
				}
				exchange(b, s, conn, c.n, c.chunk, c.pause)
				s.Close()
				conn.Close()
				b.settled()
			})
		})
	}
}

func TestConnectLine(t *testing.T) {
	b := newBench(t, nil)
	b.guest.listen(1024)
	for _, line := range []string{
		"CONNECT 1025\n", // nobody listens
		"CONNECT\n", "CONNECT \n", "connect 1024\n", "CONNECT  1024\n", "CONNECT 1024 \n", "CONNECT -1\n", "CONNECT 4294967296\n",
		"CONNECT 1024\r\n", "\n", "GET / HTTP/1.0\r\n\r\n", "CONNECT " + strings.Repeat("0", 1000),
	} {
		conn, err := net.Dial("unix", b.path)
		b.must(err)
		conn.SetDeadline(time.Now().Add(patience))
		conn.Write([]byte(line))
		if p, err := io.ReadAll(conn); len(p) != 0 || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%q: answer %q, %v", line, p, err)
		}
		conn.Close()
	}
	// Clients that say nothing, half of it, or go at once.
	for _, line := range []string{"", "CONN", "CONNECT 1024\n"} {
		conn, err := net.Dial("unix", b.path)
		b.must(err)
		conn.Write([]byte(line))
		conn.Close()
	}
	accept := b.guest.listen(1026)
	s, conn := b.toGuest(1026, accept)
	s.Close()
	conn.Close()
	for s := range b.guest.drainListener(1024) {
		s.Close()
	}
	b.settled()
}

// drainListener returns what was accepted so far.
func (g *guest) drainListener(port uint32) func(func(*guestSocket) bool) {
	return func(yield func(*guestSocket) bool) {
		for {
			select {
			case s := <-g.listeners[port]:
				if !yield(s) {
					return
				}
			default:
				return
			}
		}
	}
}

// eagerPort is one at which data goes along with requests.
const eagerPort = 9000

// A client may send data together with its request. Where the guest is known to take it,
// it goes along, and the guest has it before its answer has come.
func TestDataBehindConnect(t *testing.T) {
	b := newBench(t, nil)
	for _, port := range []uint32{eagerPort, eagerPort + 1} {
		accept := b.guest.listen(port)
		conn, err := net.Dial("unix", b.path)
		b.must(err)
		fmt.Fprintf(conn, "CONNECT %d\nhello", port)
		s := <-accept
		p := make([]byte, 5)
		if _, err := io.ReadFull(s, p); err != nil || string(p) != "hello" {
			t.Errorf("guest reads %q, %v", p, err)
		}
		s.Close()
		conn.Close()
	}
	// More than goes along follows, and a client that has gone is nobody.
	accept := b.guest.listen(eagerPort)
	conn, err := net.Dial("unix", b.path)
	b.must(err)
	data := bytes.Repeat([]byte("0123456789abcdef"), 4000)
	conn.Write(append(fmt.Appendf(nil, "CONNECT %d\n", eagerPort), data...))
	conn.(*net.UnixConn).CloseWrite()
	if got, err := io.ReadAll(<-accept); err != nil || !bytes.Equal(got, data) {
		t.Errorf("guest reads %d bytes, %v", len(got), err)
	}
	conn.Close()
	if conn, err = net.Dial("unix", b.path); err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(conn, "CONNECT %d\nhello", eagerPort+2)
	if p, _ := io.ReadAll(conn); len(p) != 0 {
		t.Errorf("nobody answers %q", p)
	}
	conn.Close()
	for s := range b.guest.drainListener(eagerPort) {
		s.Close()
	}
	b.settled()
}

func TestDial(t *testing.T) {
	b := newBench(t, nil)
	accept := b.guest.listen(7)
	conn, err := b.device.Dial(context.Background(), 7)
	b.must(err)
	s := <-accept
	exchange(b, s, conn.(*net.UnixConn), 100_000, 10_000, 0)
	conn.Close()
	s.Close()

	if _, err := b.device.Dial(context.Background(), 8); !errors.Is(err, ErrRefused) {
		t.Errorf("nobody listens: %v", err)
	}
	// A guest that does not answer.
	b.guest.halt()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if _, err := b.device.Dial(ctx, 7); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("guest does not answer: %v", err)
	}
	b.guest.run()
	b.settled()

	dialed := make(chan error)
	b.must(b.device.Pause())
	go func() {
		_, err := b.device.Dial(context.Background(), 7)
		dialed <- err
	}()
	time.Sleep(5 * time.Millisecond)
	b.must(b.device.Close())
	if err := <-dialed; !errors.Is(err, ErrClosed) && !errors.Is(err, ErrRefused) && !errors.Is(err, ErrNotReady) {
		t.Errorf("device closed: %v", err)
	}
	if _, err := b.device.Dial(context.Background(), 7); err == nil {
		t.Error("a closed device dials")
	}
}

func TestDialWithoutDriver(t *testing.T) {
	virtiotest.CheckLeaks(t)
	d, err := New(Config{Memory: virtiotest.NewMemory(t), Interrupt: virtiotest.NewInterrupt()})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if err := d.Resume(); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Dial(context.Background(), 1); !errors.Is(err, ErrNotReady) {
		t.Error(err)
	}
}

func TestGuestIsRefused(t *testing.T) {
	b := newBench(t, nil)
	if _, err := b.guest.connect(53); err != errGuestReset {
		t.Errorf("nobody serves the port: %v", err)
	}
	b.settled()
	t.Run("no descriptor", func(t *testing.T) {
		b := newBench(t, func(c *Config) {
			c.DialHost = func(context.Context, uint32) (net.Conn, error) {
				one, _ := net.Pipe()
				return one, nil
			}
		})
		if _, err := b.guest.connect(servedPort); err != errGuestReset {
			t.Error(err)
		}
	})
}

// A DialHost that hangs is let go when the device is closed, and a guest that gives up meanwhile leaves nothing behind.
func TestSlowDialHost(t *testing.T) {
	began := make(chan struct{}, 10)
	b := newBench(t, func(c *Config) {
		c.DialHost = func(ctx context.Context, _ uint32) (net.Conn, error) {
			began <- struct{}{}
			<-ctx.Done()
			one, other, err := Pipe()
			if err == nil {
				other.Close()
			}
			return one, err
		}
	})
	s := b.guest.startConnect(1)
	b.guest.startConnect(2)
	<-began
	<-began
	b.guest.mu.Lock()
	s.send(opReset, 0, nil)
	b.guest.mu.Unlock()
	b.must(b.device.Close())
	if n := b.device.Connections(); n != 0 {
		t.Errorf("%d connections", n)
	}
}

func TestLimit(t *testing.T) {
	b := newBench(t, func(c *Config) { c.MaxConnections = 3 })
	accept := b.guest.listen(1)
	var conns []io.Closer
	for range 3 {
		s, conn := b.toGuest(1, accept)
		conns = append(conns, s, conn)
	}
	if _, err := b.guest.connect(servedPort); err != errGuestReset {
		t.Errorf("guest: %v", err)
	}
	if _, err := dialListener(b.path, 1); err == nil {
		t.Error("a client above the limit was let in")
	}
	if _, err := b.device.Dial(context.Background(), 1); !errors.Is(err, ErrTooMany) {
		t.Errorf("dial: %v", err)
	}
	for _, c := range conns {
		c.Close()
	}
	b.settled()
	_, conn := b.toGuest(1, accept)
	conn.Close()
}

// Half-close is half-close, and closing loses nothing that was sent.
func TestCaseB4HalfClose(t *testing.T) {
	const request, response = 1 << 20, 3 << 20
	type side interface {
		halfCloser
		io.Closer
	}
	run := func(b *bench, asks, answers side) {
		sums := make(chan [32]byte, 2)
		go func() {
			got, n, err := collect(answers, 3, 64<<10, 0)
			if err != nil || n != request {
				b.Errorf("request: %d bytes, %v", n, err)
			}
			sums <- got
			time.Sleep(50 * time.Millisecond)
			sent, err := transfer(answers, response, 4, 64<<10)
			if err != nil {
				b.Errorf("answer: %v", err)
			}
			answers.Close()
			sums <- sent
		}()
		sent, err := transfer(asks, request, 5, 64<<10)
		b.must(err)
		asks.CloseWrite()
		got, n, err := collect(asks, 6, 64<<10, 0)
		if err != nil || n != response {
			b.Errorf("answer: %d bytes, %v", n, err)
		}
		if sent != <-sums || got != <-sums {
			b.Error("data differs")
		}
		asks.Close()
		b.settled()
	}
	both(t, func(b *bench, s *guestSocket, conn *net.UnixConn) { run(b, conn, s) })
	both(t, func(b *bench, s *guestSocket, conn *net.UnixConn) { run(b, s, conn) })
}

// A sender that closes at once, and a reader that begins late.
func TestCaseB4CloseAtOnce(t *testing.T) {
	const n = 4 << 20
	run := func(b *bench, from io.WriteCloser, to io.ReadCloser) {
		sums := make(chan [32]byte, 1)
		go func() {
			sum, err := transfer(from, n, 7, 64<<10)
			if err != nil {
				b.Error(err)
			}
			from.Close()
			sums <- sum
		}()
		time.Sleep(100 * time.Millisecond)
		got, total, err := collect(to, 8, 64<<10, 0)
		if err != nil || total != n || got != <-sums {
			b.Errorf("%d of %d bytes, %v", total, n, err)
		}
		to.Close()
		b.settled()
	}
	both(t, func(b *bench, s *guestSocket, conn *net.UnixConn) { run(b, s, conn) })
	both(t, func(b *bench, s *guestSocket, conn *net.UnixConn) { run(b, conn, s) })
}

// The guest is done before the host has read a byte: its close must not wait for that, and nothing is lost.
func TestLastBytesOutliveTheGuestsSocket(t *testing.T) {
	b := newBench(t, nil)
	s, conn := b.toHost()
	defer conn.Close()
	b.must(conn.SetReadBuffer(4096))
	data := make([]byte, receiveBuffer)
	for i := range data {
		data[i] = byte(i * 7)
	}
	if _, err := s.Write(data); err != nil {
		t.Fatal(err)
	}
	s.Close()
	b.guest.mu.Lock()
	b.guest.wait(func() bool { return s.state == guestGone })
	b.guest.mu.Unlock()
	got, err := io.ReadAll(conn)
	if err != nil || !bytes.Equal(got, data) {
		t.Errorf("%d of %d bytes, %v", len(got), len(data), err)
	}
	b.settled()
}

// A reader that goes away ends the writer, soon.
func TestCaseB4ReaderCloses(t *testing.T) {
	both(t, func(b *bench, s *guestSocket, conn *net.UnixConn) {
		done := make(chan error, 1)
		go func() {
			_, err := transfer(s, 1<<30, 9, 64<<10)
			done <- err
		}()
		io.ReadFull(conn, make([]byte, 10_000))
		conn.Close()
		if err := <-done; err == nil {
			b.Error("guest wrote to nobody")
		}
		s.Close()
		b.settled()
	})
	both(t, func(b *bench, s *guestSocket, conn *net.UnixConn) {
		done := make(chan error, 1)
		go func() {
			_, err := transfer(conn, 1<<30, 9, 64<<10)
			done <- err
		}()
		io.ReadFull(s, make([]byte, 10_000))
		s.Close()
		if err := <-done; !errors.Is(err, unix.EPIPE) && !errors.Is(err, unix.ECONNRESET) {
			b.Error(err)
		}
		conn.Close()
		b.settled()
	})
	both(t, func(b *bench, s *guestSocket, conn *net.UnixConn) {
		s.shutdown(shutdownReceive)
		if _, err := transfer(conn, 1<<30, 9, 64<<10); !errors.Is(err, unix.EPIPE) {
			b.Error(err)
		}
		// The other way is open.
		s.Write([]byte("still here"))
		p := make([]byte, 10)
		if _, err := io.ReadFull(conn, p); err != nil {
			b.Error(err)
		}
		conn.Close()
		b.guest.mu.Lock()
		b.guest.wait(func() bool { return s.peerClosed == shutdownBoth })
		b.guest.mu.Unlock()
		s.Close()
		b.settled()
	})
}

// A stopped reader in the guest costs no CPU and little memory, and many tiny writes do not overrun it.
func TestCaseB5StoppedReader(t *testing.T) {
	both(t, func(b *bench, s *guestSocket, conn *net.UnixConn) {
		const writes = 50_000
		done := make(chan [32]byte, 1)
		go func() {
			hash := sha256.New()
			for i := range writes {
				hash.Write([]byte{byte(i)})
				if _, err := conn.Write([]byte{byte(i)}); err != nil {
					b.Error(err)
				}
			}
			conn.CloseWrite()
			done <- [32]byte(hash.Sum(nil))
		}()
		b.idles()
		got, n, err := collect(s, 10, 4096, 0)
		if err != nil || n != writes || got != <-done {
			b.Errorf("%d of %d bytes, %v", n, writes, err)
		}
	})
}

// The same with a host that does not read. The guest fills its credit and no more.
func TestCaseB5StoppedHost(t *testing.T) {
	b := newBench(t, nil)
	s, conn := b.toHost()
	defer conn.Close()
	go transfer(s, 1<<30, 11, 64<<10)
	var held int
	b.eventually("the guest is out of credit", func() bool {
		b.guest.mu.Lock()
		defer b.guest.mu.Unlock()
		return s.sent-s.peerTaken == receiveBuffer
	})
	b.idles()
	b.must(b.device.Pause())
	for _, c := range b.device.router.table {
		held += cap(c.pending)
	}
	if held > 2*receiveBuffer {
		t.Errorf("%d bytes held", held)
	}
	b.must(b.device.Resume())
	conn.Close()
	b.guest.mu.Lock()
	b.guest.wait(func() bool { return s.peerClosed&shutdownReceive != 0 })
	b.guest.mu.Unlock()
}

// idles waits until nothing is done, as soon as what there was to do is done.
func (b *bench) idles() {
	b.Helper()
	b.eventually("less than half of the CPU is used for nothing", func() bool {
		before := cpuTime(b)
		time.Sleep(300 * time.Millisecond)
		return cpuTime(b)-before < 150*time.Millisecond
	})
}

func cpuTime(t testing.TB) time.Duration {
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &usage); err != nil {
		t.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// The 32-bit counters wrap in the middle of a transfer.
func TestCaseB5CountersWrap(t *testing.T) {
	both(t, func(b *bench, s *guestSocket, conn *net.UnixConn) {
		const start = 0xffffffff - 300_000
		b.must(b.device.Pause())
		b.guest.mu.Lock()
		for _, c := range b.device.router.table {
			c.credit.sent, c.credit.forwarded = start, start
			c.received.forwarded, c.received.announced = start, start
		}
		s.sent, s.peerTaken, s.forwarded, s.announced = start, start, start, start
		b.guest.mu.Unlock()
		b.must(b.device.Resume())
		exchange(b, s, conn, 2<<20, 64<<10, 0)
	})
}

// Plain pauses lose nothing and hold nothing up.
func TestCaseB3PauseResume(t *testing.T) {
	both(t, func(b *bench, s *guestSocket, conn *net.UnixConn) {
		stop := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				b.must(b.device.Pause())
				b.must(b.device.Pause())
				time.Sleep(time.Millisecond)
				b.must(b.device.Resume())
				b.must(b.device.Resume())
				time.Sleep(time.Millisecond)
			}
		})
		accept := b.guest.listen(99)
		wg.Go(func() {
			for range 20 {
				one, other := b.toGuest(99, accept)
				other.Write([]byte("x"))
				if _, err := one.Read(make([]byte, 1)); err != nil {
					b.Error(err)
				}
				other.Close()
				one, other = b.toHost()
				one.Write([]byte("x"))
				if _, err := other.Read(make([]byte, 1)); err != nil {
					b.Error(err)
				}
				other.Close()
			}
		})
		exchange(b, s, conn, 4<<20, 64<<10, 0)
		close(stop)
		wg.Wait()
		if b.guest.events != 0 {
			b.Errorf("%d transport resets without a restore", b.guest.events)
		}
	})
}

// A reset by the driver ends all connections on the host, and the device works again.
func TestDriverReset(t *testing.T) {
	both(t, func(b *bench, s *guestSocket, conn *net.UnixConn) {
		s.Write([]byte("last words"))
		b.eventually("the packet is taken", func() bool {
			b.guest.mu.Lock()
			defer b.guest.mu.Unlock()
			return len(b.guest.queues[queueTransmit].slots) == txSlots
		})
		b.guest.halt()
		b.guest.boot(allFeatures &^ virtio.FeatureEventIndex)
		b.guest.sockets = map[portPair]*guestSocket{}
		b.guest.run()
		if p, err := io.ReadAll(conn); err != nil || string(p) != "last words" {
			b.Errorf("host reads %q, %v", p, err)
		}
		b.settled()
		one, other := b.toHost()
		exchange(b, one, other, 100_000, 4096, 0)
		other.Close()
	})
}

// After many connections everything is back to where it began.
func TestCaseB4Cycles(t *testing.T) {
	b := newBench(t, nil)
	accept := b.guest.listen(1)
	cycles := 2000
	if testing.Short() {
		cycles = 200
	}
	run := func(n int) {
		for i := range n {
			var one *guestSocket
			var other *net.UnixConn
			if i%2 == 0 {
				one, other = b.toHost()
			} else {
				one, other = b.toGuest(1, accept)
			}
			switch i % 3 {
			case 0:
				one.Write([]byte("bye"))
				one.Close()
				io.ReadAll(other)
				other.Close()
			case 1:
				other.Write([]byte("bye"))
				other.Close()
				io.ReadAll(one)
				one.Close()
			default:
				other.Close()
				one.Close()
			}
		}
	}
	run(20)
	b.settled()
	before := openFiles(b)
	run(cycles)
	b.settled()
	b.eventually("descriptors are closed", func() bool { return openFiles(b) <= before })
	b.must(b.device.Pause())
	if n := len(b.device.router.table); n != 0 {
		t.Errorf("%d connections in the table", n)
	}
}

func openFiles(t testing.TB) int {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// Close writes what a host reads in time and does not wait for one that does not.
func TestCloseLingers(t *testing.T) {
	old := lingerTime
	t.Cleanup(func() { lingerTime = old })
	for _, reads := range []bool{true, false} {
		lingerTime = patience
		if !reads {
			lingerTime = 50 * time.Millisecond
		}
		b := newBench(t, nil)
		s, conn := b.toHost()
		b.must(conn.SetReadBuffer(4096))
		n, err := s.Write(make([]byte, receiveBuffer))
		b.must(err)
		b.eventually("all of it is taken", func() bool {
			b.guest.mu.Lock()
			defer b.guest.mu.Unlock()
			return len(b.guest.queues[queueTransmit].slots) == txSlots
		})
		closed := make(chan error, 1)
		go func() { closed <- b.device.Close() }()
		if reads {
			if p, err := io.ReadAll(conn); err != nil || len(p) != n {
				t.Errorf("%d of %d bytes, %v", len(p), n, err)
			}
		}
		b.must(<-closed)
		conn.Close()
	}
}
