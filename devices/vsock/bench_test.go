package vsock

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/forkvm/forkvm/devices/virtio/virtiotest"
	"github.com/forkvm/forkvm/vmm/memory"
)

// bench is a device between a guest and a host.
type bench struct {
	testing.TB
	mem    *memory.Memory
	device *Device
	guest  *guest
	path   string // of the host's listener
	config Config
	// hosted gets the host's ends of the guest's connections.
	hosted chan *net.UnixConn
}

// servedPort is a port of the host that accepts connections from the guest.
const servedPort = 52

// closedPort is one where the host accepts and closes at once.
const closedPort = 60

func newBench(t testing.TB, change func(*Config)) *bench {
	t.Helper()
	virtiotest.CheckLeaks(t)
	b := &bench{TB: t, mem: virtiotest.NewMemory(t), path: filepath.Join(t.TempDir(), "v"), hosted: make(chan *net.UnixConn, 64)}
	l, err := net.Listen("unix", b.path)
	b.must(err)
	t.Cleanup(func() { l.Close() })
	b.config = Config{Memory: b.mem, Listener: l, DialHost: b.dialHost, Eager: []uint32{eagerPort, eagerPort + 2}}
	if change != nil {
		change(&b.config)
	}
	irq := virtiotest.NewInterrupt()
	b.config.Interrupt = irq
	b.device, err = New(b.config)
	b.must(err)
	t.Cleanup(func() { b.must(b.device.Close()) })
	b.must(b.device.Resume())
	b.guest = newGuest(t, b.device, irq, virtiotest.NewDriver(t, b.mem, b.device, irq))
	b.guest.boot(allFeatures)
	b.guest.run()
	t.Cleanup(b.guest.halt)
	return b
}

func (b *bench) must(err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

func (b *bench) dialHost(_ context.Context, port uint32) (net.Conn, error) {
	if port != servedPort && port != closedPort {
		return nil, fmt.Errorf("nobody serves port %d", port)
	}
	near, far, err := Pipe()
	if err != nil {
		return nil, err
	}
	if port == closedPort {
		near.Close()
		return far, nil
	}
	b.hosted <- near.(*net.UnixConn)
	return far, nil
}

// toHost makes a connection from the guest and returns both ends.
func (b *bench) toHost() (*guestSocket, *net.UnixConn) {
	b.Helper()
	s, err := b.guest.connect(servedPort)
	b.must(err)
	return s, <-b.hosted
}

// toGuest makes a connection from the host, as a client of the listener, and returns both ends.
func (b *bench) toGuest(port uint32, accept <-chan *guestSocket) (*guestSocket, *net.UnixConn) {
	b.Helper()
	conn, err := dialListener(b.path, port)
	b.must(err)
	return <-accept, conn
}

// dialListener speaks the CONNECT protocol.
func dialListener(path string, port uint32) (*net.UnixConn, error) {
	conn, err := net.Dial("unix", path)
	if err != nil {
		return nil, err
	}
	conn.SetDeadline(time.Now().Add(patience))
	defer conn.SetDeadline(time.Time{})
	if _, err = fmt.Fprintf(conn, "CONNECT %d\n", port); err == nil {
		var line string
		// Unbuffered, because data may follow at once.
		line, err = bufio.NewReaderSize(io.LimitReader(conn, 14), 16).ReadString('\n')
		if err == nil && (!strings.HasPrefix(line, "OK ") || len(line) != len("OK 1073741824\n")) {
			err = fmt.Errorf("answer %q", line)
		}
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return conn.(*net.UnixConn), nil
}

// both runs a test for a connection from either side.
func both(t *testing.T, f func(b *bench, s *guestSocket, conn *net.UnixConn)) {
	bothWithBuffer(t, usualBuffer, f)
}

// bothWithBuffer is both with another size for the buffers of the guest's sockets. They have it from the start: what is on
// its way when a guest makes a buffer smaller may be more than the new size.
func bothWithBuffer(t *testing.T, size uint32, f func(b *bench, s *guestSocket, conn *net.UnixConn)) {
	for _, c := range []struct {
		name    string
		connect func(b *bench) (*guestSocket, *net.UnixConn)
	}{
		{"to guest", func(b *bench) (*guestSocket, *net.UnixConn) { return b.toGuest(1024, b.guest.listen(1024)) }},
		{"to host", (*bench).toHost},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t, nil)
			b.guest.mu.Lock()
			b.guest.bufferSize = size
			b.guest.mu.Unlock()
			s, conn := c.connect(b)
			defer conn.Close()
			f(b, s, conn)
		})
	}
}

// settled waits until no connection is left.
func (b *bench) settled() {
	b.Helper()
	for end := time.Now().Add(patience); b.device.Connections() > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			b.must(b.device.Pause())
			for _, c := range b.device.router.table {
				b.Logf("%+v", c)
			}
			b.guest.mu.Lock()
			for _, s := range b.guest.sockets {
				b.Logf("guest %+v, %d packets to read", s.ports, len(s.queue))
			}
			b.Logf("replies %v, run queue %v, held %v, inbox %v", b.device.router.replies, b.device.router.runQueue, b.device.router.held, b.device.router.inbox)
			b.Logf("%v %d packets to send, %v", b.guest.packets, len(b.guest.out), b.guest.queues)
			b.Fatalf("%d connections are left", b.device.Connections())
		}
	}
}

func (b *bench) eventually(what string, condition func() bool) {
	b.Helper()
	for end := time.Now().Add(patience); !condition(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			b.Fatalf("never: %s", what)
		}
	}
}

// save stops the guest, saves the device and closes it.
func (b *bench) save() []byte {
	b.Helper()
	b.guest.halt()
	b.must(b.device.Pause())
	state, err := b.device.Save()
	b.must(err)
	b.must(b.device.Close())
	return state
}

// restore replaces the device by one made from state, paused, and lets the guest use it. start runs the guest's CPU.
func (b *bench) restore(state []byte) (start func()) {
	b.Helper()
	irq := virtiotest.NewInterrupt()
	config := b.config
	config.Interrupt, config.State = irq, state
	device, err := New(config)
	if err != nil {
		b.Fatalf("%v\nstate: %s", err, state)
	}
	b.device = device
	b.guest.d.Attach(device, irq)
	return func() {
		b.must(device.Resume())
		b.guest.run()
	}
}
