// Package blk is the virtio block device (section 5.2 of virtio 1.2).
//
// It turns requests into calls of a Backend, one at a time, and moves data
// between the backend and guest memory without a copy. A flush is answered
// after Backend.Flush returned; a driver that did not negotiate flushes gets
// each write flushed before it is answered, as the specification demands.
//
// The way of a read: disk.HandleQueue pops a chain, answer and do copy and
// parse its header, locate checks the range, and read lets Backend.ReadAt fill
// the guest's buffers. answer then writes the status byte behind them and
// HandleQueue pushes the chain. Package virtio describes the way from the
// guest's kick to HandleQueue and from Push to the interrupt.
//
// Sizes: a disk has whole sectors of 512 bytes. New refuses a backend whose
// size is not a multiple of 512; who makes the backend rounds up and pads with
// zeros, so nothing of an image is ever cut off silently.
package blk

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/forkvm/forkvm/devices"
	"github.com/forkvm/forkvm/devices/virtio"
	"github.com/forkvm/forkvm/vmm/memory"
)

// Backend is where the blocks are. The device calls one method at a time, with
// ranges inside Size and, except for discards, in whole sectors; a range is
// never empty.
//
// ReadAt and WriteAt may be given guest memory: they must not keep p nor
// decide anything by what is in it, since the guest can change it meanwhile.
type Backend interface {
	// ReadAt fills p completely or returns an error.
	ReadAt(p []byte, off int64) (int, error)
	// WriteAt writes p completely or returns an error.
	WriteAt(p []byte, off int64) (int, error)
	// Flush returns when all writes that returned before are on stable
	// storage.
	Flush() error
	// Discard says that the n bytes from off are not needed any more.
	Discard(off, n int64) error
	// WriteZeroes makes the n bytes from off read as zeros.
	WriteZeroes(off, n int64) error
	// Size is the number of bytes. It does not change.
	Size() int64
}

// Config is what a block device is made of.
type Config struct {
	// ID names the device, for example "blk0".
	ID        string
	Memory    *memory.Memory
	Interrupt devices.Interrupt
	// Backend is not closed by the device.
	Backend Backend
	// ReadOnly lets the device offer itself as read-only and refuse writes.
	ReadOnly bool
	// Serial is what the guest reads as the disk's serial number: at most 20
	// bytes of printable ASCII, empty for none.
	Serial string
	// OnError, if not nil, is told of each request that failed because the
	// backend did; errors.Is(err, syscall.ENOSPC) means a full host. It is
	// called on the device's goroutine and must be quick. Requests that a
	// guest got wrong are answered and not reported.
	OnError func(error)
	// Report is told when the device stops working, see virtio.Config.
	Report func(error)
	// DrainTimeout bounds Pause, see virtio.Config.
	DrainTimeout time.Duration
	// State is what Save returned, nil for a cold device. The backend must
	// have the size that it had then.
	State []byte
}

// Device is a block device. Its life and its registers are the embedded
// transport's.
type Device struct {
	*virtio.Transport
}

// New returns a paused block device.
func New(c Config) (*Device, error) {
	if err := c.check(); err != nil {
		return nil, fmt.Errorf("create block device (%s): %w", c.ID, err)
	}
	d := &disk{
		id:       c.ID,
		backend:  c.Backend,
		sectors:  uint64(c.Backend.Size()) / SectorSize,
		readOnly: c.ReadOnly,
		onError:  c.OnError,
	}
	copy(d.serial[:], c.Serial)
	t, err := virtio.New(virtio.Config{
		ID:           c.ID,
		DeviceID:     virtio.DeviceBlock,
		Features:     features(c.ReadOnly),
		QueueSizes:   []uint16{queueSize},
		Space:        space(d.sectors),
		Memory:       c.Memory,
		Interrupt:    c.Interrupt,
		Device:       d,
		DrainTimeout: c.DrainTimeout,
		Report:       c.Report,
		State:        c.State,
	})
	if err != nil {
		return nil, err
	}
	return &Device{t}, nil
}

func (c *Config) check() error {
	if c.Backend == nil {
		return errors.New("no backend")
	}
	if size := c.Backend.Size(); size < 0 || size%SectorSize != 0 {
		return fmt.Errorf("backend of %d bytes is not a multiple of %d", size, SectorSize)
	}
	if len(c.Serial) > idSize {
		return fmt.Errorf("serial %q is longer than %d bytes", c.Serial, idSize)
	}
	for i := range len(c.Serial) {
		if c.Serial[i] < ' ' || c.Serial[i] > '~' {
			return fmt.Errorf("serial %q is not printable ASCII", c.Serial)
		}
	}
	return nil
}

func features(readOnly bool) uint64 {
	f := FeatureSizeMax | FeatureSegMax | FeatureBlockSize | FeatureTopology | FeatureFlush
	if readOnly {
		return f | FeatureReadOnly
	}
	return f | FeatureDiscard | FeatureWriteZeroes
}

// disk is the part behind the transport.
type disk struct {
	id       string
	backend  Backend
	sectors  uint64
	readOnly bool
	serial   [idSize]byte
	onError  func(error)
	saved    devices.Remembered[State]

	// From Activate to Reset.
	features uint64
	queue    *virtio.Queue
}

func (d *disk) Activate(features uint64, queues []*virtio.Queue) error {
	d.features, d.queue = features, queues[0]
	return nil
}

func (d *disk) Reset() {
	d.features, d.queue = 0, nil
}

// HandleWake has nothing to do: a disk has no events of its own.
func (d *disk) HandleWake() error { return nil }

// HandleQueue answers each request before it takes the next, so writes that
// came before a flush are in the backend before it.
func (d *disk) HandleQueue(int) error {
	for {
		c, err := d.queue.Pop()
		if c == nil || err != nil {
			return err
		}
		written, err := d.answer(c)
		if err != nil {
			return err
		}
		if err := d.queue.Push(c, written); err != nil {
			return err
		}
	}
}

// fail reports an error of the backend.
func (d *disk) fail(verb string, sector uint64, err error) {
	if d.onError != nil {
		d.onError(fmt.Errorf("%s disk (%s) at sector %d: %w", verb, d.id, sector, err))
	}
}

// Save implements virtio.Device.
func (d *disk) Save() (json.RawMessage, error) {
	return json.Marshal(d.state())
}

// Restore implements virtio.Device.
func (d *disk) Restore(data json.RawMessage) error {
	return d.checkState(data)
}
