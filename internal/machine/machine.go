package machine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/agent/proto"
	"github.com/forkvm/forkvm/devices"
	"github.com/forkvm/forkvm/devices/balloon"
	"github.com/forkvm/forkvm/devices/blk"
	"github.com/forkvm/forkvm/devices/nic"
	"github.com/forkvm/forkvm/devices/platform"
	"github.com/forkvm/forkvm/devices/rng"
	"github.com/forkvm/forkvm/devices/vsock"
	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/snapshot/layer"
	"github.com/forkvm/forkvm/snapshot/store"
	"github.com/forkvm/forkvm/vmm"
	"github.com/forkvm/forkvm/vmm/boot"
	"github.com/forkvm/forkvm/vmm/cpu"
	"github.com/forkvm/forkvm/vmm/memory"
)

// guestCID is the guest's address in its vsock. Every guest has the same: it is
// in the snapshot, and nobody else shares the transport.
const guestCID = 3

// Machine is a complete virtual machine. Its methods may be called from any
// goroutine.
type Machine struct {
	*vmm.Machine

	shape   Shape
	memory  *memory.Memory
	disks   []*layer.Disk
	vsock   *vsock.Device
	balloon *balloon.Device
	card    *nic.Device // nil for a machine without one, as network
	network Network
	serial  *platform.Serial
	// generationID announces a new generation to the guest's kernel.
	generationID *platform.GenerationID
	// listener is the vsock device's, which does not close it.
	listener net.Listener

	// hungUp waits for the goroutine that hangs up when the guest has ended.
	hungUp    sync.WaitGroup
	hangUpErr error

	// workingSet is the snapshot's, nil if there is none. recording waits for who
	// writes it.
	workingSet *store.WorkingSet
	recording  sync.WaitGroup

	// generation is the guest's own, nil until it has confirmed one.
	generation atomic.Pointer[string]

	quiet func() (over func())

	// timeline is of the construction and of Bring.
	timeline Timeline

	mu     sync.Mutex // held for the whole of a checkpoint and of a reset
	layers memoryLayers
	origin *snapshot.State // what the machine came from, nil if it was booted
	closed bool
}

// New builds a machine, of the prepared one, that waits to be started. It takes
// over the files of the configuration, also when it fails.
func New(c Config) (*Machine, error) {
	if err := c.validate(); err != nil {
		c.Close()
		return nil, fmt.Errorf("create machine: %w", err)
	}
	m := c.Prepared.take()
	m.shape = c.Shape
	if m.quiet = c.Quiet; m.quiet == nil {
		m.quiet = func() func() { return func() {} }
	}
	if err := m.build(&c); err != nil {
		return nil, fmt.Errorf("create machine: %w", errors.Join(err, c.Close(), m.Close()))
	}
	m.hungUp.Go(m.hangUp)
	return m, c.Close()
}

// hangUp closes the guest's sockets when its life is over, so that nobody waits
// for an answer that cannot come. What the guest had sent is still delivered.
func (m *Machine) hangUp() {
	<-m.Done()
	m.hangUpErr = m.vsock.Close()
}

// build goes from the bottom up. What it takes out of the configuration is the
// machine's from then on.
func (m *Machine) build(c *Config) error {
	m.origin = c.State
	m.layers = memoryLayers{sealed: c.Memory, origin: len(c.Memory), units: c.Shape.MemoryBytes / memory.PageSize}
	c.Memory = nil
	if c.HugePages != nil && c.HugePages.fits(m.layers.origin, m.layers.units) {
		m.layers.huge, c.HugePages = c.HugePages, nil
	}
	var err error
	m.memory, err = memory.New(memory.Config{Size: c.Shape.MemoryBytes, Layers: m.layers.mappable()})
	if err != nil {
		return err
	}
	if err := m.SetMemory(m.memory); err != nil {
		return err
	}
	m.timeline.End(PhaseMap)
	if err := m.addDevices(c); err != nil {
		return err
	}
	m.timeline.End(PhaseDevices)
	if c.State == nil {
		err = m.load(c)
		m.timeline.End(PhaseState)
		return err
	}
	err = m.Restore(c.State)
	m.timeline.End(PhaseState)
	if err == nil {
		m.workingSet, c.WorkingSet = c.WorkingSet, nil
		m.mapAhead()
		m.timeline.End(PhaseWorkingSet)
	}
	return err
}

// load puts the kernel into memory for a cold boot.
func (m *Machine) load(c *Config) error {
	initrd := io.ReaderAt(nil)
	var initrdSize int64
	if c.Kernel.Initrd != nil {
		info, err := c.Kernel.Initrd.Stat()
		if err != nil {
			return err
		}
		initrd, initrdSize = c.Kernel.Initrd, info.Size()
	}
	entry, err := boot.Load(m.memory, boot.Config{
		Kernel:      c.Kernel.Image,
		Initrd:      initrd,
		InitrdSize:  initrdSize,
		CommandLine: c.Shape.CommandLine,
		ACPI:        describe(c.Shape),
	})
	if err != nil {
		return err
	}
	return m.Boot(cpu.Entry(entry))
}

// Timeline is how long the steps of the construction and of Bring took. It is
// called when those have returned.
func (m *Machine) Timeline() Timeline { return m.timeline }

// Shape is the hardware that the guest sees.
func (m *Machine) Shape() Shape { return m.shape }

// Dial connects to a vsock port on which a program in the guest listens. When
// the guest's life is over the error wraps vmm.ErrEnded and the report.
func (m *Machine) Dial(ctx context.Context, port uint32) (net.Conn, error) {
	conn, err := m.vsock.Dial(ctx, port)
	if err != nil {
		if exit := m.Exit(); exit != nil {
			return nil, fmt.Errorf("%w: %w", vmm.ErrEnded, exit)
		}
	}
	return conn, err
}

// ConsoleTail returns the last lines of the serial console.
func (m *Machine) ConsoleTail() []string {
	if m.serial == nil {
		return nil
	}
	return m.serial.Console().LastLines(tailLines)
}

// report returns more of the console than people are shown: the lines of a
// panic, which are followed by its stack, have to be among them.
func (m *Machine) report() []string {
	if m.serial == nil {
		return nil
	}
	return m.serial.Console().LastLines(reportLines)
}

// Agent returns a client of the guest agent. It does not connect before it is
// used. Once the guest has an identity of its own, requests of the client are
// refused by a guest that has another.
func (m *Machine) Agent() *client.Client {
	return client.New(client.Config{
		Dial:       func(ctx context.Context) (net.Conn, error) { return m.Dial(ctx, proto.Port) },
		Generation: m.Generation(),
	})
}

// Generation is what the guest has confirmed last, empty before.
func (m *Machine) Generation() string {
	if generation := m.generation.Load(); generation != nil {
		return *generation
	}
	return ""
}

// Bring starts the guest and returns when it is ready: when its guest agent has
// confirmed the identity, or at once if it has none. On error the machine is
// good for nothing but Close.
func (m *Machine) Bring(ctx context.Context, id Identity) error {
	if err := m.bring(ctx, id, &m.timeline); err != nil {
		return err
	}
	if m.workingSet != nil && !m.workingSet.Late {
		m.recording.Go(m.recordWorkingSet)
	}
	return nil
}

func (m *Machine) bring(ctx context.Context, id Identity, timeline *Timeline) error {
	if err := m.Start(); err != nil {
		return err
	}
	if !m.shape.GuestAgent {
		return nil
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-m.Done():
			cancel(m.Exit())
		case <-ctx.Done():
		}
	}()
	err := m.renew(ctx, id)
	timeline.End(PhaseGuestAgent)
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// Pause stops the guest until Resume, after a checkpoint or a reset that is under
// way. Pausing a paused machine does nothing.
func (m *Machine) Pause() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.Machine.Pause()
}

// Resume lets a paused guest go on, after a checkpoint or a reset that is under
// way.
func (m *Machine) Resume() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.Machine.Resume()
}

// Close ends the guest, waits for all of the machine's threads and gives
// everything back. It is idempotent.
func (m *Machine) Close() error {
	if m.Machine != nil {
		m.End(vmm.ReasonKilled, "") // what waits for the guest, holding mu, gives up
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil
	}
	m.closed = true
	var errs []error
	// vCPUs and devices first: they use memory and disks.
	if m.Machine != nil {
		errs = append(errs, m.Machine.Close())
	}
	m.hungUp.Wait()
	errs = append(errs, m.hangUpErr)
	m.recording.Wait()
	if m.workingSet != nil {
		errs = append(errs, m.workingSet.Close())
	}
	if m.network != nil {
		errs = append(errs, m.network.Close())
	}
	if m.listener != nil {
		errs = append(errs, m.listener.Close())
	}
	if m.memory != nil {
		errs = append(errs, m.memory.Close())
	}
	for _, d := range m.disks {
		errs = append(errs, d.Close())
	}
	errs = append(errs, m.layers.Close())
	return errors.Join(errs...)
}

// addDevices builds every device, in the order in which they resume: those that
// can interrupt the guest first, the generation id last, so that its interrupt
// is not overwritten by another state.
func (m *Machine) addDevices(c *Config) error {
	for _, add := range []func(*Config) error{m.addPlatform, m.addRNG, m.addVsock, m.addBalloon, m.addNetwork, m.addDisks, m.addGeneration} {
		if err := add(c); err != nil {
			return err
		}
	}
	return nil
}

// state returns the saved state of a device, nil on a cold boot.
func (c *Config) state(id string) ([]byte, error) {
	if c.State == nil {
		return nil, nil
	}
	data, ok := c.State.Get(vmm.DeviceSection(id))
	if !ok {
		return nil, fmt.Errorf("state has nothing for device %s", id)
	}
	return data, nil
}

// window is a device that the guest reaches through an address window.
type window interface {
	devices.Device
	devices.Handler
}

// place attaches a virtio device and puts it into its slot.
func (m *Machine) place(d window, slot int) error {
	if err := m.Attach(d); err != nil {
		return errors.Join(err, d.Close())
	}
	return m.MMIO.Register(windowAddress(slot), virtioWindow, d)
}

func (m *Machine) addRNG(c *Config) error {
	state, err := c.state("rng0")
	if err != nil {
		return err
	}
	irq := m.Interrupt(slotGSI(rngSlot))
	d, err := rng.New(rng.Config{ID: "rng0", Memory: m.memory, Interrupt: irq, State: state})
	if err != nil {
		return err
	}
	return m.place(d, rngSlot)
}

func (m *Machine) addVsock(c *Config) error {
	state, err := c.state("vsock0")
	if err != nil {
		return err
	}
	irq := m.Interrupt(slotGSI(vsockSlot))
	m.vsock, err = vsock.New(vsock.Config{
		ID:        "vsock0",
		Memory:    m.memory,
		Interrupt: irq,
		GuestCID:  guestCID,
		Listener:  c.Vsock.Listener,
		DialHost:  c.Vsock.Connect,
		Eager:     []uint32{proto.Port}, // the guest agent's
		State:     state,
	})
	if err != nil {
		return err
	}
	m.listener, c.Vsock.Listener = c.Vsock.Listener, nil
	return m.place(m.vsock, vsockSlot)
}

func (m *Machine) addBalloon(c *Config) error {
	state, err := c.state("balloon0")
	if err != nil {
		return err
	}
	irq := m.Interrupt(slotGSI(balloonSlot))
	m.balloon, err = balloon.New(balloon.Config{ID: "balloon0", Memory: m.memory, Interrupt: irq, State: state})
	if err != nil {
		return err
	}
	return m.place(m.balloon, balloonSlot)
}

func (m *Machine) addDisks(c *Config) error {
	for i, shape := range c.Shape.Disks {
		if err := m.addDisk(c, i, shape); err != nil {
			return fmt.Errorf("disk %s: %w", shape.Name, err)
		}
	}
	return nil
}

func (m *Machine) addDisk(c *Config, index int, shape DiskShape) error {
	disk, err := layer.NewDisk(layer.DiskConfig{
		Size:     shape.Size,
		Layers:   c.Disks[index],
		Top:      c.Tops[index],
		ReadOnly: shape.ReadOnly,
	})
	if err != nil {
		return err
	}
	c.Disks[index], c.Tops[index] = nil, nil // the disk's now
	m.disks = append(m.disks, disk)

	id := diskID(index)
	state, err := c.state(id)
	if err != nil {
		return err
	}
	irq := m.Interrupt(slotGSI(diskSlot + index))
	config := blk.Config{
		ID:        id,
		Memory:    m.memory,
		Interrupt: irq,
		Backend:   disk,
		ReadOnly:  shape.ReadOnly,
		Serial:    shape.Name,
		State:     state,
	}
	if c.OnDiskError != nil {
		report := c.OnDiskError
		config.OnError = func(err error) { report(shape.Name, err) }
	}
	d, err := blk.New(config)
	if err != nil {
		return err
	}
	return m.place(d, diskSlot+index)
}
