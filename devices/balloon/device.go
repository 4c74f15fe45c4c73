// Package balloon is the virtio memory balloon (section 5.5 of virtio 1.2) with
// free page reporting: the guest names memory that it does not use, and the host
// has it back.
//
// Pages reach the device in two ways. A guest kernel reports large free ranges by
// itself and takes them again without asking (reporting); and it fills the balloon
// with pages, down to single ones, when the host sets a target (inflating). Either
// way the pages become zeros: what section 5.5.6.7 allows for reported pages, and
// the one content that is neither private to the machine nor stored in a snapshot.
//
// The device offers no page poisoning, so that a guest whose kernel relies on the
// contents of free pages does not report them.
package balloon

import (
	"github.com/forkvm/forkvm/devices"
	"github.com/forkvm/forkvm/devices/virtio"
	"github.com/forkvm/forkvm/vmm/memory"
)

// Queues, as drivers number them: those of features that are not offered are left
// out.
const (
	inflateQueue = iota
	deflateQueue
	reportingQueue
)

const queueSize = 128

// Feature bits (section 5.5.3).
const (
	FeatureDeflateOnOOM uint64 = 1 << 2 // VIRTIO_BALLOON_F_DEFLATE_ON_OOM
	FeatureReporting    uint64 = 1 << 5 // VIRTIO_BALLOON_F_REPORTING
)

// PageSize is the unit of the target and of what the inflate queue names, in
// bytes, whatever the guest's own page size is.
const PageSize = 4096

// Config is what a balloon is made of.
type Config struct {
	// ID names the device, for example "balloon0".
	ID        string
	Memory    *memory.Memory
	Interrupt devices.Interrupt
	// Report is told when the device stops working, see virtio.Config.
	Report func(error)
	// State is what Save returned, nil for a cold device.
	State []byte
}

// Device is a balloon. Its life and its registers are the embedded transport's.
type Device struct {
	*virtio.Transport
	balloon *balloon
}

// New returns a paused balloon, empty if it is cold.
func New(c Config) (*Device, error) {
	b := &balloon{memory: c.Memory}
	t, err := virtio.New(virtio.Config{
		ID:         c.ID,
		DeviceID:   virtio.DeviceBalloon,
		Features:   FeatureDeflateOnOOM | FeatureReporting,
		QueueSizes: []uint16{queueSize, queueSize, queueSize},
		Space:      b.Space(),
		Memory:     c.Memory,
		Interrupt:  c.Interrupt,
		Device:     b,
		Report:     c.Report,
		State:      c.State,
	})
	if err != nil {
		return nil, err
	}
	return &Device{Transport: t, balloon: b}, nil
}

// SetTarget asks the guest to put so many pages of PageSize into the balloon, or
// to take pages back until only so many are left. It does not wait for the guest,
// which does what it can.
func (d *Device) SetTarget(pages uint32) {
	d.balloon.target.Store(pages)
	d.SetSpace(d.balloon.Space())
}

// Stats says what the guest has given back so far.
type Stats struct {
	Target   uint32 // pages that the host asked for
	Inflated uint64 // pages put into the balloon, in total
	Deflated uint64 // pages taken out of it, in total
	Reported uint64 // bytes of free memory reported, in total
}

// Stats may be called at any time. The counters begin anew with each device.
func (d *Device) Stats() Stats {
	return Stats{
		Target:   d.balloon.target.Load(),
		Inflated: d.balloon.inflated.Load(),
		Deflated: d.balloon.deflated.Load(),
		Reported: d.balloon.reported.Load(),
	}
}
