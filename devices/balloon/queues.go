package balloon

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/forkvm/forkvm/devices"
	"github.com/forkvm/forkvm/devices/virtio"
	"github.com/forkvm/forkvm/vmm/memory"
)

// balloon is the part behind the transport.
type balloon struct {
	memory *memory.Memory
	queues []*virtio.Queue

	saved devices.Remembered[State]

	target                       atomic.Uint32
	inflated, deflated, reported atomic.Uint64
}

// Space implements virtio.SpaceDevice (section 5.5.4): num_pages, the target, and
// actual, which drivers write and which is of no use to us, since what they say is
// in the queues. free_page_hint_cmd_id and poison_val belong to features that are
// not offered.
func (b *balloon) Space() []byte {
	space := make([]byte, 16)
	binary.LittleEndian.PutUint32(space, b.target.Load())
	return space
}

func (b *balloon) Activate(_ uint64, queues []*virtio.Queue) error {
	b.queues = queues
	return nil
}

func (b *balloon) HandleWake() error { return nil }

func (b *balloon) Reset() { b.queues = nil }

func (b *balloon) HandleQueue(index int) error {
	serve := map[int]func(*virtio.Chain) error{
		inflateQueue:   b.inflate,
		deflateQueue:   b.deflate,
		reportingQueue: b.report,
	}[index]
	if serve == nil {
		return fmt.Errorf("no queue %d", index)
	}
	q := b.queues[index]
	for {
		c, err := q.Pop()
		if c == nil || err != nil {
			return err
		}
		if err := serve(c); err != nil {
			return err
		}
		if err := q.Push(c, 0); err != nil {
			return err
		}
	}
}

// maxNumbers bounds the page numbers that one request is read for. Linux sends
// 256; what a driver sends beyond the bound is left as it is, which is allowed
// for pages in the balloon.
const maxNumbers = 4096

// inflate discards pages that the driver names by number, 32 bits each (section
// 5.5.6). Neighbours go together. A number that is no page of RAM is passed over:
// it is the driver's loss.
func (b *balloon) inflate(c *virtio.Chain) error {
	numbers, err := readNumbers(c)
	if err != nil {
		return err
	}
	for len(numbers) > 0 {
		first, n := numbers[0], 1
		for n < len(numbers) && uint64(numbers[n]) == uint64(first)+uint64(n) {
			n++
		}
		if err := b.discard(uint64(first)*PageSize, uint64(n)*PageSize); err != nil {
			return err
		}
		b.inflated.Add(uint64(n))
		numbers = numbers[n:]
	}
	return nil
}

// deflate has nothing to do but count: a page that comes out of the balloon is
// zeros until the guest writes it.
func (b *balloon) deflate(c *virtio.Chain) error {
	b.deflated.Add(min(c.ReadableLen()/4, maxNumbers))
	return nil
}

// report discards the ranges that the buffers of the request are (section
// 5.5.6.7). Nothing is written to them, and the driver may use them again as soon
// as it has the request back.
func (b *balloon) report(c *virtio.Chain) error {
	return c.EachWritable(func(gpa, n uint64) error {
		b.reported.Add(n)
		return b.discard(gpa, n)
	})
}

func (b *balloon) discard(gpa, n uint64) error {
	err := b.memory.Discard(gpa, n)
	var notRAM *memory.RangeError
	if errors.As(err, &notRAM) {
		return nil
	}
	return err
}

func readNumbers(c *virtio.Chain) ([]uint32, error) {
	raw := make([]byte, min(c.ReadableLen()/4, maxNumbers)*4)
	if err := c.ReadAt(raw, 0); err != nil {
		return nil, err
	}
	numbers := make([]uint32, len(raw)/4)
	for i := range numbers {
		numbers[i] = binary.LittleEndian.Uint32(raw[4*i:])
	}
	return numbers, nil
}
