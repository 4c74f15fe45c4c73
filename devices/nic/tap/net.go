package tap

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/devices/nic"
	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/internal/linux"
)

// Config is what a network is made of.
type Config struct {
	// Tap is the device, not blocking, with linux.TapHeader before each frame. Counts and Events are maps of the programs at it, of which
	// what is there already counts for nothing. All become the network's.
	Tap, Counts, Events *os.File
	// Guest is the address of the guest's card.
	Guest nic.MAC
	// Policy is what the guest may reach. It says why something was refused, and refuses nothing.
	Policy *policy.Rules
	// Host has the addresses of the host, for the same.
	Host []netip.Addr
	// Names says that somebody answers at the address of the guest's resolver, IPv6 that there is some on the link.
	Names, IPv6 bool
}

// Net is the network of one guest. Its methods may be called from any goroutine, except for those of nic.Backend.
type Net struct {
	config  Config
	fd      int // of the TAP, whose file keeps it
	raw     syscall.RawConn
	counts  *counts
	events  *events
	refused *policy.Refusals
	rules   atomic.Pointer[policy.Rules]

	wake   func()
	armed  chan struct{} // somebody waits for a frame
	watch  sync.WaitGroup
	ending *nic.Ending
	header [nic.HeaderSize]byte
	parts  [2][]byte // of the frame that is sent
	buffer []byte
	frame  nic.Frame // in buffer
	ready  bool      // frame is the next one
	lost   atomic.Uint64

	mu     sync.Mutex // guards what follows
	flows  flows
	probes [][]byte // frames that come before the TAP's
	closed bool
}

// New returns a network that the guest's card can be attached to. When it fails the files are closed.
func New(c Config) (n *Net, err error) {
	n = &Net{
		config: c, refused: policy.NewRefusals(), wake: func() {}, armed: make(chan struct{}, 1),
		buffer: make([]byte, nic.HeaderSize+nic.MaxFrame), flows: flows{},
	}
	n.ending = nic.NewEnding(c.Guest, n.probe)
	defer func() {
		if err != nil {
			n.Close()
			n, err = nil, fmt.Errorf("create network: %w", err)
		}
	}()
	if c.Tap == nil || c.Counts == nil || c.Events == nil || c.Policy == nil || !c.Guest.Valid() {
		return n, errors.New("no device, no policy or no address of the guest")
	}
	n.rules.Store(c.Policy)
	if n.counts, err = mapCounts(c.Counts); err != nil {
		return n, err
	}
	if n.events, err = mapEvents(c.Events); err != nil {
		return n, err
	}
	n.events.take(func([]byte) {}) // of what was before
	if n.raw, err = c.Tap.SyscallConn(); err != nil {
		return n, err
	}
	if err = n.raw.Control(func(fd uintptr) { n.fd = int(fd) }); err != nil {
		return n, err
	}
	n.watch.Go(n.watchTap)
	return n, nil
}

// watchTap waits for frames when somebody wants to know of them.
func (n *Net) watchTap() {
	ready := func(fd uintptr) bool {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		count, err := unix.Poll(p, 0)
		return count > 0 || err != nil
	}
	for range n.armed {
		if n.raw.Read(ready) != nil {
			return // closed
		}
		n.wake()
	}
}

// Attach implements nic.Backend.
func (n *Net) Attach(wake func()) { n.wake = wake }

// SetOffloads implements nic.Backend.
func (n *Net) SetOffloads(o nic.Offloads) {
	var flags uint
	if o.Checksum {
		flags |= unix.TUN_F_CSUM
	}
	if o.TCP4 {
		flags |= unix.TUN_F_TSO4
	}
	if o.TCP6 {
		flags |= unix.TUN_F_TSO6
	}
	if linux.SetTapOffloads(n.fd, flags) != nil {
		n.lost.Add(1) // the device is gone, and every frame with it
	}
}

// Send implements nic.Backend.
func (n *Net) Send(f nic.Frame) {
	n.track(f.Data, true)
	f.WriteHeader(&n.header)
	n.parts = [2][]byte{n.header[:], f.Data}
	for {
		_, err := unix.Writev(n.fd, n.parts[:])
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			n.lost.Add(1)
		}
		return
	}
}

// Next implements nic.Backend.
func (n *Net) Next() (nic.Frame, bool) {
	if n.ready {
		return n.frame, true
	}
	if probe := n.nextProbe(); probe != nil {
		n.frame, n.ready = nic.Frame{Data: probe}, true
		return n.frame, true
	}
	for {
		k, err := unix.Read(n.fd, n.buffer)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			if err == unix.EAGAIN {
				n.arm()
			} else {
				n.lost.Add(1) // the device is gone
			}
			return nic.Frame{}, false
		}
		f, ok := nic.ReadFrame(n.buffer[:k])
		if !ok {
			n.lost.Add(1)
			continue
		}
		n.track(f.Data, false)
		n.frame, n.ready = f, true
		return f, true
	}
}

// arm has the device woken when there is a frame.
func (n *Net) arm() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return
	}
	select {
	case n.armed <- struct{}{}:
	default:
	}
}

// Taken implements nic.Backend.
func (n *Net) Taken() { n.ready = false }

// Save implements nic.Backend.
func (n *Net) Save() (json.RawMessage, error) {
	stale := n.ending.Flows()
	n.mu.Lock()
	defer n.mu.Unlock()
	return nic.EncodeFlows(append(n.flows.list(), stale...))
}

// Restore implements nic.Backend. What waits in the TAP was for the guest in another life.
func (n *Net) Restore(data json.RawMessage) error {
	list, err := nic.DecodeFlows(data)
	if err != nil {
		return err
	}
	n.ready = false
	for {
		if _, err := unix.Read(n.fd, n.buffer); err != nil && err != unix.EINTR {
			break
		}
	}
	n.ending.Set(list)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.flows, n.probes = flows{}, nil
	return nil
}

// Renewed is called when the guest has its own addresses: what it had open before can be ended.
func (n *Net) Renewed() { n.ending.Begin() }

// probe has the device take these frames first.
func (n *Net) probe(frames [][]byte) {
	n.mu.Lock()
	n.probes = append(n.probes, frames...)
	n.mu.Unlock()
	n.wake()
}

func (n *Net) nextProbe() []byte {
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.probes) == 0 {
		return nil
	}
	probe := n.probes[0]
	n.probes = n.probes[1:]
	return probe
}

// Addressing is what the guest is to be told.
func (n *Net) Addressing() nic.Addressing {
	a := nic.Addressing{Addresses: []netip.Prefix{netip.PrefixFrom(nic.Guest4, nic.Bits4)}, Gateways: []netip.Addr{nic.Gateway4}}
	if n.config.IPv6 {
		a.Addresses = append(a.Addresses, netip.PrefixFrom(nic.Guest6, nic.Bits6))
		a.Gateways = append(a.Gateways, nic.Gateway6)
	}
	if n.config.Names {
		a.Resolvers = []netip.Addr{nic.Resolver4}
	}
	return a
}

// SetPolicy says what the guest may reach from now on, which others enforce.
func (n *Net) SetPolicy(r *policy.Rules) {
	n.noteEvents() // of the policy before
	n.rules.Store(r)
}

// Close waits for all goroutines of the network, and gives the device back, which ends with that. It is idempotent.
func (n *Net) Close() error {
	n.mu.Lock()
	closed := n.closed
	n.closed = true
	n.mu.Unlock()
	if closed {
		return nil
	}
	n.ending.Set(nil)
	close(n.armed)
	linux.CloseFiles(n.config.Tap)
	n.watch.Wait()
	n.events.close()
	n.counts.close()
	linux.CloseFiles(n.config.Counts, n.config.Events)
	return nil
}
