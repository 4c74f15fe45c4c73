package vsock

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/forkvm/forkvm/devices/virtio/virtiotest"
)

// works opens connections both ways and sends something.
func (b *bench) works() {
	b.Helper()
	begin := time.Now()
	one, other := b.toHost()
	exchange(b, one, other, 50_000, 4096, 0)
	one.Close()
	other.Close()
	one, other = b.toGuest(2048, b.guest.listen(2048))
	exchange(b, one, other, 50_000, 4096, 0)
	one.Close()
	other.Close()
	if took := time.Since(begin); took > patience/2 {
		b.Errorf("new connections took %v", took)
	}
}

// A restored guest learns that its connections are gone, and both directions connect at once, in each generation.
func TestRestore(t *testing.T) {
	both(t, func(b *bench, s *guestSocket, conn *net.UnixConn) {
		s.Write([]byte("before"))
		if _, err := io.ReadFull(conn, make([]byte, 6)); err != nil {
			b.Fatal(err)
		}
		connecting := b.connectingSocket()
		for generation := range 3 {
			events := b.guest.events
			start := b.restore(b.save())
			start()
			b.works()
			if b.guest.events != events+1 {
				b.Errorf("generation %d: %d transport resets", generation, b.guest.events-events)
			}
		}
		if _, err := s.Read(make([]byte, 1)); err != errGuestReset {
			b.Errorf("old connection: %v", err)
		}
		b.guest.mu.Lock()
		b.guest.wait(func() bool { return connecting.state == guestGone })
		b.guest.mu.Unlock()
		if p, err := io.ReadAll(conn); len(p) != 0 || err != nil {
			b.Errorf("host's end of the old connection: %q, %v", p, err)
		}
	})
}

// A device that is put back in place closes what it held of the host, keeps its listener, and tells the guest what a new
// device would.
func TestRestoreInPlace(t *testing.T) {
	both(t, func(b *bench, s *guestSocket, conn *net.UnixConn) {
		stop := func() []byte {
			b.guest.halt()
			b.must(b.device.Pause())
			state, err := b.device.Save()
			b.must(err)
			return state
		}
		state := stop()
		for life := range 3 {
			events := b.guest.events
			b.must(b.device.Restore(state))
			if p, err := io.ReadAll(conn); len(p) != 0 || err != nil {
				b.Errorf("life %d: host's end of the old connection: %q, %v", life, p, err)
			}
			conn.Close()
			if n := b.device.Connections(); n != 0 {
				b.Errorf("life %d: %d connections of the old life", life, n)
			}
			b.must(b.device.Resume())
			b.guest.run()
			b.works()
			if b.guest.events != events+1 {
				b.Errorf("life %d: %d transport resets", life, b.guest.events-events)
			}
			_, conn = b.toHost()
			state = stop()
		}
		b.must(b.device.Restore(state))
		conn.Close()
		b.must(b.device.Resume())
		b.guest.run()
		if _, err := s.Read(make([]byte, 1)); err != errGuestReset {
			b.Errorf("old connection: %v", err)
		}
	})
}

// connectingSocket returns a guest's socket that waits for a DialHost that does not return.
func (b *bench) connectingSocket() *guestSocket {
	began := make(chan struct{})
	b.device.host.dialHost = func(ctx context.Context, port uint32) (net.Conn, error) {
		if port == servedPort {
			return b.dialHost(ctx, port)
		}
		close(began)
		<-ctx.Done()
		return nil, ctx.Err()
	}
	s := b.guest.startConnect(77)
	<-began
	return s
}

// Packets that were in the ring when the device was saved are taken without a notification, whatever the event index says.
func TestCaseB1PacketsInFlight(t *testing.T) {
	for range 20 {
		b := newBench(t, nil)
		accept := b.guest.listen(1)
		stop := make(chan struct{})
		go func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if conn, err := dialListener(b.path, 1); err == nil {
					conn.Close()
				}
			}
		}()
		for range 20 {
			(<-accept).Close()
			b.guest.startConnect(closedPort)
		}
		close(stop)
		b.guest.halt()
		b.must(b.device.Pause())
		// Nobody is told of this one.
		b.guest.mu.Lock()
		q := b.guest.queues[queueTransmit]
		var raw [headerSize]byte
		(&header{sourceCID: b.guest.cid, destinationCID: HostCID, sourcePort: 5, destinationPort: 6, socketType: typeStream, operation: opReset}).encode(&raw)
		address := b.guest.d.Alloc(headerSize, 8)
		b.guest.d.Fill(address, raw[:])
		q.Add(virtiotest.Buffer{Address: address, Length: headerSize})
		b.guest.mu.Unlock()
		state, err := b.device.Save()
		b.must(err)
		b.must(b.device.Close())
		b.restore(state)()
		b.works()
		b.must(b.device.Close())
	}
}

// While the driver has not handled the reset nothing reaches it; a driver that never does is not waited for.
func TestRestoreGate(t *testing.T) {
	old := restartTimeout
	t.Cleanup(func() { restartTimeout = old })
	for _, handles := range []bool{true, false} {
		restartTimeout = patience
		if !handles {
			restartTimeout = 50 * time.Millisecond
		}
		b := newBench(t, nil)
		accept := b.guest.listen(1)
		s, conn := b.toGuest(1, accept)
		start := b.restore(b.save())
		b.guest.ignoreEvents = true
		b.guest.packets = map[operation]int{}
		start()
		dialed := make(chan error, 1)
		go func() {
			conn, err := b.device.Dial(context.Background(), 1)
			if err == nil {
				conn.Close()
			}
			dialed <- err
		}()
		if handles {
			time.Sleep(50 * time.Millisecond)
			b.guest.mu.Lock()
			if len(b.guest.packets) != 0 {
				t.Errorf("packets before the reset was handled: %v", b.guest.packets)
			}
			b.guest.ignoreEvents = false
			b.guest.handleEvents()
			b.guest.mu.Unlock()
			b.must(<-dialed)
		} else {
			b.must(<-dialed)
		}
		(<-accept).Close()
		b.guest.mu.Lock()
		if b.guest.packets[opReset] != 1 || b.guest.packets[opRequest] != 1 {
			t.Errorf("packets: %v", b.guest.packets)
		}
		b.guest.mu.Unlock()
		s.Close()
		conn.Close()
		b.settled()
	}
}

// A second snapshot before the first reset is handled: the driver has to handle both.
func TestRestoreTwiceBeforeHandled(t *testing.T) {
	b := newBench(t, nil)
	b.guest.ignoreEvents = true
	b.restore(b.save())()
	b.eventually("the event is out", func() bool { return b.guest.d.Queues[queueEvent].UsedIndex() == 1 })
	start := b.restore(b.save())
	start()
	b.eventually("the second event is out", func() bool { return b.guest.d.Queues[queueEvent].UsedIndex() == 2 })
	b.must(b.device.Pause())
	if b.device.router.restart.unhandled != 2 {
		t.Errorf("%d unhandled resets", b.device.router.restart.unhandled)
	}
	b.must(b.device.Resume())
	b.guest.mu.Lock()
	b.guest.ignoreEvents = false
	b.guest.handleEvents()
	b.guest.mu.Unlock()
	b.works()
	if b.guest.events != 2 {
		t.Errorf("%d events", b.guest.events)
	}
}

// A driver without buffers in the event queue gets resets for its connections instead.
func TestRestoreWithoutEventBuffers(t *testing.T) {
	b := newBench(t, nil)
	s, conn := b.toHost()
	defer conn.Close()
	b.guest.halt()
	b.guest.mu.Lock()
	// As if an earlier device had used them all.
	q := b.guest.queues[queueEvent]
	b.must(b.mem.WriteUint16(q.Driver+2, 0))
	b.guest.ignoreEvents = true
	b.guest.mu.Unlock()
	b.must(b.device.Pause())
	state, err := b.device.Save()
	b.must(err)
	b.must(b.device.Close())
	b.restore(state)()
	if _, err := s.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("old connection: %v", err)
	}
	b.works()
}

// A device saved before a driver came announces nothing.
func TestRestoreBeforeDriver(t *testing.T) {
	virtiotest.CheckLeaks(t)
	mem := virtiotest.NewMemory(t)
	d, err := New(Config{Memory: mem, Interrupt: virtiotest.NewInterrupt(), GuestCID: 77})
	if err != nil {
		t.Fatal(err)
	}
	state, err := d.Save()
	if err != nil {
		t.Fatal(err)
	}
	d.Close()
	irq := virtiotest.NewInterrupt()
	d, err = New(Config{Memory: mem, Interrupt: irq, GuestCID: 5, State: state})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if d.GuestCID() != 77 {
		t.Errorf("guest address %d", d.GuestCID())
	}
	if err := d.Resume(); err != nil {
		t.Fatal(err)
	}
	g := newGuest(t, d, irq, virtiotest.NewDriver(t, mem, d, irq))
	g.boot(allFeatures)
	g.run()
	defer g.halt()
	if g.cid != 77 {
		t.Errorf("guest sees address %d", g.cid)
	}
	if _, err := g.connect(1); err != errGuestReset || g.events != 0 {
		t.Errorf("connect: %v, %d events", err, g.events)
	}
}

func TestRestoreRefuses(t *testing.T) {
	for name, s := range map[string]string{
		"version":     `{"version":2,"guest_cid":3,"next_port":1073741824}`,
		"address":     `{"version":1,"guest_cid":2,"next_port":1073741824}`,
		"port":        `{"version":1,"guest_cid":3,"next_port":80}`,
		"last port":   `{"version":1,"guest_cid":3,"next_port":4294967295}`,
		"resets":      `{"version":1,"guest_cid":3,"next_port":1073741824,"unhandled_resets":17}`,
		"field":       `{"version":1,"guest_cid":3,"next_port":1073741824,"more":1}`,
		"connections": `{"version":1,"guest_cid":3,"next_port":1073741824,"connections":[` + strings.Repeat(`{"host_port":1,"guest_port":1},`, maxSavedConnections) + `{"host_port":1,"guest_port":1}]}`,
		"empty":       ``,
	} {
		if err := newRouter("vsock0", 3, newHost(Config{})).Restore(json.RawMessage(s)); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}
