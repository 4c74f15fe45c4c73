package virtiotest

import (
	"bytes"
	"encoding/json"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/forkvm/forkvm/devices/virtio"
)

// stormOperations is how many random accesses each of the vCPUs does.
const stormOperations = 20000

// testRegisterStorm does every access there is and then random ones from four
// vCPUs at once, and expects that a polite driver is served afterwards.
func testRegisterStorm(b *bench) {
	b.works()
	for offset := uint64(0); offset < virtio.WindowSize; offset++ {
		for _, width := range []uint64{1, 2, 4, 8} {
			if offset+width > virtio.WindowSize {
				continue
			}
			data := make([]byte, width)
			b.Device.Read(offset, data)
			for _, fill := range []byte{0, 1, 0xff} {
				b.Device.Write(offset, bytes.Repeat([]byte{fill}, int(width)))
			}
		}
	}
	b.works()
	b.wrongQueues()

	var wg sync.WaitGroup
	for vcpu := range uint64(4) {
		wg.Go(func() { storm(b.Device, rand.New(rand.NewPCG(vcpu, 1))) })
	}
	wg.Wait()
	// Whatever they have set up, a pause ends.
	begin := time.Now()
	b.must(b.Device.Pause())
	if took := time.Since(begin); took > 5*time.Second {
		b.Errorf("pause took %v", took)
	}
	// And whatever it is, it can be saved and restored.
	b.restore(b.save())
	b.must(b.Device.Resume())
	b.works()
}

// wrongQueues touches queues that are not there and gives sizes that are none.
func (b *bench) wrongQueues() {
	b.Negotiate(allFeatures)
	b.WriteRegister(virtio.RegQueueSel, 0xffff)
	for offset := uint64(virtio.RegQueueNumMax); offset <= virtio.RegQueueDeviceHigh; offset += 4 {
		if offset == virtio.RegStatus {
			continue
		}
		b.WriteRegister(offset, 1)
		if got := b.ReadRegister(offset); got != 0 {
			b.Errorf("register %#x of a queue that is not there is %#x", offset, got)
		}
	}
	for range 100000 {
		b.WriteRegister(virtio.RegQueueNotify, 0xffff)
	}
	for _, size := range []uint32{0, 3, 32768, 65535, 65536, 0x80000000} {
		b.Negotiate(allFeatures)
		q := b.PlaceQueue(0, 4)
		b.WriteRegister(virtio.RegQueueSel, 0)
		b.WriteRegister(virtio.RegQueueNum, size)
		b.WriteAddress(virtio.RegQueueDescLow, q.Descriptors)
		b.WriteAddress(virtio.RegQueueDriverLow, q.Driver)
		b.WriteAddress(virtio.RegQueueDeviceLow, q.Device)
		b.WriteRegister(virtio.RegQueueReady, 1)
		if b.ReadRegister(virtio.RegQueueReady) != 0 {
			b.Errorf("queue of size %d is ready", size)
		}
		if b.ReadRegister(virtio.RegStatus)&virtio.StatusNeedsReset == 0 {
			b.Errorf("queue of size %d: the device does not ask for a reset", size)
		}
	}
	// DRIVER_OK without a queue, and then notifications.
	b.Negotiate(allFeatures)
	b.Go()
	for i := range uint32(4) {
		b.WriteRegister(virtio.RegQueueNotify, i)
	}
	time.Sleep(time.Millisecond)
	b.must(b.Device.Pause())
	b.must(b.Device.Resume())
}

// storm does random accesses, half of them where a driver would write.
func storm(dev Device, r *rand.Rand) {
	steps := []uint32{0, 1, 3, 11, 15, 11, 15, 64, 128, 0xffffffff}
	sizes := []uint32{0, 1, 3, 64, 256, 32768, 65535}
	for range stormOperations {
		width := 1 << r.IntN(4)
		data := make([]byte, width)
		for i := range data {
			data[i] = byte(r.Uint32())
		}
		offset := r.Uint64N(virtio.WindowSize - 8)
		switch r.IntN(6) {
		case 0:
			dev.Read(offset, data)
			continue
		case 1:
			offset &^= 3
			data = make([]byte, 4)
		case 2:
			offset, data = virtio.RegStatus, word(steps[r.IntN(len(steps))])
		case 3:
			offset, data = virtio.RegQueueNum, word(sizes[r.IntN(len(sizes))])
		case 4:
			// Mostly aligned places in RAM, so that some queues open.
			low := []uint64{virtio.RegQueueDescLow, virtio.RegQueueDriverLow, virtio.RegQueueDeviceLow}
			offset, data = low[r.IntN(3)], word(r.Uint32N(MemorySize)&^15)
		case 5:
			small := []uint64{virtio.RegQueueSel, virtio.RegQueueReady, virtio.RegQueueNotify,
				virtio.RegDriverFeaturesSel, virtio.RegDriverFeatures, virtio.RegInterruptACK}
			offset, data = small[r.IntN(len(small))], word(r.Uint32N(3))
		}
		dev.Write(offset, data)
	}
}

func word(v uint32) []byte {
	return []byte{byte(v), byte(v >> 8), byte(v >> 16), byte(v >> 24)}
}

// testHostileState spoils one field of a saved state at a time. The device is
// refused or it can be run, paused and closed.
func testHostileState(b *bench) {
	b.works()
	state := b.save()
	for _, bad := range spoilState(b, state) {
		dev, err := b.New(b.Memory, NewInterrupt(), bad)
		if err != nil {
			continue
		}
		b.must(dev.Resume())
		b.must(dev.Pause())
		b.must(dev.Close())
	}
	for _, bad := range []string{"", "x", "null", "[]", "{}", "1", string(state[:len(state)/2]), string(state) + "{}"} {
		if dev, err := b.New(b.Memory, NewInterrupt(), []byte(bad)); err == nil {
			b.Errorf("state %q was accepted", bad)
			b.must(dev.Close())
		}
	}
	b.restore(state)
	b.must(b.Device.Resume())
	b.works()
}

// spoilState returns copies of the state with one value replaced.
func spoilState(b *bench, state []byte) [][]byte {
	values := []any{nil, -1, 0, 1, 3, 255, 65535, 1 << 32, ^uint64(0), 1.5, true, "x", []any{}, map[string]any{}}
	var out [][]byte
	var root any
	b.must(json.Unmarshal(state, &root))
	emit := func() {
		text, err := json.Marshal(root)
		b.must(err)
		out = append(out, text)
	}
	var visit func(node any)
	visit = func(node any) {
		switch n := node.(type) {
		case map[string]any:
			for key, old := range n {
				for _, v := range values {
					n[key] = v
					emit()
				}
				n[key] = old
				visit(old)
			}
		case []any:
			for i, old := range n {
				for _, v := range values {
					n[i] = v
					emit()
				}
				n[i] = old
				visit(old)
			}
		}
	}
	visit(root)
	return out
}
