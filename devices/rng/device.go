// Package rng is the virtio entropy device (section 5.4 of virtio 1.2): it
// fills the guest's buffers from the host's random number generator.
//
// The device has no state of its own, so a clone of a machine never gets the
// bytes that its parent got.
package rng

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/forkvm/forkvm/devices"
	"github.com/forkvm/forkvm/devices/virtio"
	"github.com/forkvm/forkvm/vmm/memory"
)

const (
	queueSize = 64
	// maxFill bounds what one request gets. A device may return less than
	// the buffer holds (section 5.4.6.2), and drivers ask for far less.
	maxFill = 64 << 10
)

// Config is what an entropy device is made of.
type Config struct {
	// ID names the device, for example "rng0".
	ID        string
	Memory    *memory.Memory
	Interrupt devices.Interrupt
	// Source is where bytes come from; nil means crypto/rand.
	Source io.Reader
	// Report is told when the device stops working, see virtio.Config.
	Report func(error)
	// State is what Save returned, nil for a cold device.
	State []byte
}

// Device is an entropy device. Its life and its registers are the embedded
// transport's.
type Device struct {
	*virtio.Transport
}

// New returns a paused entropy device.
func New(c Config) (*Device, error) {
	if c.Source == nil {
		c.Source = rand.Reader
	}
	t, err := virtio.New(virtio.Config{
		ID:         c.ID,
		DeviceID:   virtio.DeviceEntropy,
		QueueSizes: []uint16{queueSize},
		Memory:     c.Memory,
		Interrupt:  c.Interrupt,
		Device:     &source{reader: c.Source},
		Report:     c.Report,
		State:      c.State,
	})
	if err != nil {
		return nil, err
	}
	return &Device{t}, nil
}

// source is the part behind the transport.
type source struct {
	reader io.Reader
	queue  *virtio.Queue
}

func (s *source) Activate(_ uint64, queues []*virtio.Queue) error {
	s.queue = queues[0]
	return nil
}

func (s *source) HandleQueue(int) error {
	for {
		c, err := s.queue.Pop()
		if c == nil || err != nil {
			return err
		}
		n := min(c.WritableLen(), maxFill)
		err = c.AccessWritable(0, n, func(p []byte) error {
			_, err := io.ReadFull(s.reader, p)
			return err
		})
		if err != nil {
			// There is no way to answer "no": a shorter answer would be
			// taken as random, so the device stops.
			return fmt.Errorf("read random bytes: %w", err)
		}
		if err := s.queue.Push(c, uint32(n)); err != nil {
			return err
		}
	}
}

func (s *source) HandleWake() error { return nil }

func (s *source) Reset() { s.queue = nil }

func (s *source) Save() (json.RawMessage, error) { return nil, nil }

func (s *source) Restore(state json.RawMessage) error {
	if len(state) != 0 {
		return errors.New("state of an entropy device has data of its own")
	}
	return nil
}
