// Package vsock is the virtio socket device (virtio 1.2, section 5.10) with its host side in user space: stream connections
// between programs in the guest, which use AF_VSOCK, and programs on the host, which use Unix sockets.
//
//   - Host to guest: a client connects to Config.Listener, writes "CONNECT <port>\n" and reads "OK <port>\n" when the guest
//     has accepted; what follows is the connection. If the guest refuses, the socket is closed without a word. In process,
//     Device.Dial does the same.
//   - Guest to host: a connection to CID 2 is what Config.DialHost returns for the port.
//
// # Inside
//
// The protocol (router, connection) runs on the transport's worker goroutine alone. Sockets are read and written there
// without blocking, straight between the kernel and guest memory; other goroutines only wait until a socket is ready and put a
// note into the router's inbox. So a connection that does not move costs a parked goroutine, and no buffer: what the host
// wrote stays in its socket until the guest has room, and what the guest wrote is taken from the ring at once, into the
// socket or, up to the credit that the guest has, into the connection's buffer.
//
// A pause stops the worker between two packets. Nothing is in flight then, and nothing has to be put back.
//
// # Restore
//
// The programs at the host's ends of saved connections are not there any more. A restored device announces a transport reset
// and holds back all packets until the driver has handled that: Linux closes every connection that it has at that moment, new
// ones too. Then the guest gets a reset packet for each of the old connections, for those that the driver left alone.
package vsock

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/forkvm/forkvm/devices"
	"github.com/forkvm/forkvm/devices/virtio"
	"github.com/forkvm/forkvm/vmm/memory"
)

const (
	queueReceive = iota // to the guest
	queueTransmit
	queueEvent
)

const (
	dataQueueSize  = 256
	eventQueueSize = 16

	// DefaultConnections is Config.MaxConnections when that is 0.
	DefaultConnections = 1024
	// defaultGuestCID is Config.GuestCID when that is 0.
	defaultGuestCID = FirstGuestCID
)

var (
	// ErrRefused is why Dial fails when nobody in the guest listens on the port, or the guest went away meanwhile.
	ErrRefused = errors.New("connection refused by guest")
	// ErrNotReady is why Dial fails when no driver in the guest runs the device.
	ErrNotReady = errors.New("guest has no vsock driver yet")
	// ErrTooMany is why Dial fails when Config.MaxConnections are open.
	ErrTooMany = errors.New("too many connections")
	// ErrClosed is why calls on a closed device fail.
	ErrClosed = errors.New("device is closed")
	// ErrNoDescriptor is why a host connection cannot be used: it has no file descriptor that can be polled. Pipe gives some
	// that have.
	ErrNoDescriptor = errors.New("no file descriptor")
)

// Config describes a socket device.
type Config struct {
	// ID names the device, "vsock0" when empty.
	ID string
	// Memory is the guest's RAM, Interrupt the device's line. Required.
	Memory    *memory.Memory
	Interrupt devices.Interrupt
	// GuestCID is the guest's address, 3 when 0. It means nothing on the host, so that all guests may have the same.
	// With State the saved address stays: programs in the guest know it.
	GuestCID uint32
	// Listener accepts clients that want to connect to the guest, nil for none. The device accepts from the first Resume
	// until Close, also while paused; clients wait then. Close ends that and leaves the listener open if it has SetDeadline,
	// as Unix and TCP listeners have; otherwise it closes it.
	Listener net.Listener
	// DialHost connects a guest's connection to whatever serves the port on the host. Nil refuses all. It is called from a
	// goroutine of its own, may block until ctx ends, and returns a connection with a descriptor (ErrNoDescriptor), which the
	// device owns then. A port comes from the guest and can have any value.
	DialHost func(ctx context.Context, port uint32) (net.Conn, error)
	// Eager are ports of the guest at which the first bytes of a client, if they are there, go along with the request for
	// the connection, before the guest has answered that: one interrupt and one wake-up less. Whoever listens there has the
	// buffer that Linux gives by default, and a guest's kernel that takes data as soon as it has made the connection, as
	// Linux does; others would lose it.
	Eager []uint32
	// MaxConnections bounds the connections in both directions; beyond it new ones are refused. Each may hold 256 KiB for a
	// host program that does not read.
	MaxConnections int
	// Report is virtio.Config.Report, may be nil.
	Report func(error)
	// State is the saved state to continue from, nil for a cold start.
	State []byte
}

// Device is a socket device: a devices.Device and, for its register window, a devices.Handler.
type Device struct {
	*virtio.Transport
	router *router
	host   *host

	mu     sync.Mutex // guards the life of the host side
	closed bool
}

// New returns a paused device. It starts no goroutines.
func New(config Config) (*Device, error) {
	if config.ID == "" {
		config.ID = "vsock0"
	}
	if config.GuestCID == 0 {
		config.GuestCID = defaultGuestCID
	}
	if config.MaxConnections == 0 {
		config.MaxConnections = DefaultConnections
	}
	if !validCID(config.GuestCID) || config.MaxConnections < 0 {
		return nil, fmt.Errorf("create vsock device (%s): guest address %d, %d connections", config.ID, config.GuestCID, config.MaxConnections)
	}
	if cid, ok := savedGuestCID(config.State); ok {
		config.GuestCID = cid
	}
	h := newHost(config)
	r := newRouter(config.ID, config.GuestCID, h)
	h.router = r
	transport, err := virtio.New(virtio.Config{
		ID:         config.ID,
		DeviceID:   virtio.DeviceVsock,
		Features:   featureStream,
		QueueSizes: []uint16{dataQueueSize, dataQueueSize, eventQueueSize},
		Space:      binary.LittleEndian.AppendUint64(nil, uint64(config.GuestCID)), // struct virtio_vsock_config
		Memory:     config.Memory,
		Interrupt:  config.Interrupt,
		Device:     r,
		Report:     config.Report,
		State:      config.State,
	})
	if err != nil {
		return nil, err
	}
	r.wake = transport.Wake
	return &Device{Transport: transport, router: r, host: h}, nil
}

// validCID reports whether a guest can have the address (5.10.4).
func validCID(cid uint32) bool { return cid >= FirstGuestCID && cid != 0xffffffff }

// GuestCID returns the guest's address.
func (d *Device) GuestCID() uint32 { return uint32(d.router.guestCID) }

// Connections returns how many connections there are, those included that are being made and those whose last bytes are on
// their way to the host.
func (d *Device) Connections() int { return d.host.connections() }

// Resume implements devices.Device.
func (d *Device) Resume() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.Transport.Resume(); err != nil {
		return err
	}
	d.host.start()
	return nil
}

// Pause implements devices.Device. Clients may still connect; they wait.
func (d *Device) Pause() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.Transport.Pause(); err != nil {
		return err
	}
	d.router.stopTimers()
	return nil
}

// Close implements devices.Device. What guests sent before is still written to hosts that read it within lingerTime. It waits
// for DialHost calls, whose context it ends.
func (d *Device) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil
	}
	d.closed = true
	err := d.Transport.Close()
	d.router.close()
	d.host.close(lingerTime)
	return err
}

// Dial connects to a port in the guest and waits until the guest has accepted. Errors: ErrRefused, ErrNotReady, ErrTooMany,
// ErrClosed, and the context's. While the device is paused it waits for Resume.
func (d *Device) Dial(ctx context.Context, port uint32) (net.Conn, error) {
	conn, err := d.host.dialGuest(ctx, port)
	if err != nil {
		return nil, fmt.Errorf("dial guest (%s, port %d): %w", d.ID(), port, err)
	}
	return conn, nil
}

// lingerTime is how long Close waits for host programs to read the last bytes. A variable for tests.
var lingerTime = 2 * time.Second
