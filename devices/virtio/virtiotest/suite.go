package virtiotest

import (
	"bytes"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/forkvm/forkvm/devices"
	"github.com/forkvm/forkvm/devices/virtio"
	"github.com/forkvm/forkvm/vmm/memory"
)

// Subject is a kind of device with the host side that one test gives it.
type Subject struct {
	// DeviceID is the virtio device type.
	DeviceID uint32
	// Queue is the index of the queue that takes requests at any time.
	Queue int
	// New makes a device, cold if state is nil. All devices of a Subject
	// share the host side (one disk, one listener); at most one is open at a
	// time. The suite closes what New returned.
	New func(mem *memory.Memory, irq devices.Interrupt, state []byte) (Device, error)
	// Request returns the n-th legal request for a started driver. Requests
	// with different n do not depend on each other. Each has 1 to 8 buffers
	// in memory of Driver.Alloc and is answered without further events.
	Request func(d *Driver, n int) Request
}

// Factory makes a Subject with a fresh host side; what it opens it closes with
// t.Cleanup.
type Factory func(t testing.TB) Subject

// bench is a device, its memory and its driver in one test.
type bench struct {
	testing.TB
	Subject
	*Driver
}

// Run tests the devices that f makes as a guest and an owner of a machine see
// them. Each subtest has its own Subject.
func Run(t *testing.T, f Factory) {
	for _, c := range []struct {
		name string
		test func(*bench)
	}{
		{"Identity", testIdentity},
		{"Requests", testRequests},
		{"TinyBuffers", testTinyBuffers},
		{"Suppression", testSuppression},
		{"Reset", testReset},
		{"ResetDuringRequests", testResetDuringRequests},
		{"PauseIsQuiet", testPauseIsQuiet},
		{"PauseTwice", testPauseTwice},
		{"PendingAtRestore", testPendingAtRestore},
		{"InterruptAtRestore", testInterruptAtRestore},
		{"SaveDuringRequests", testSaveDuringRequests},
		{"SaveBeforeDriver", testSaveBeforeDriver},
		{"RestoreInPlace", testRestoreInPlace},
		{"RestoreInPlaceRefused", testRestoreInPlaceRefused},
		{"HostileState", testHostileState},
		{"RegisterStorm", testRegisterStorm},
		{"CloseTwice", testCloseTwice},
	} {
		t.Run(c.name, func(t *testing.T) { withBench(t, f, c.test) })
	}
	t.Run("Hostile", func(t *testing.T) { withBench(t, f, testHostile) })
}

// withBench runs a test on a running device and looks for leaks afterwards.
func withBench(t *testing.T, f Factory, test func(*bench)) {
	CheckLeaks(t)
	b := &bench{TB: t, Subject: f(t)}
	mem := NewMemory(t)
	irq := NewInterrupt()
	dev, err := b.New(mem, irq, nil)
	if err != nil {
		t.Fatal(err)
	}
	b.Driver = NewDriver(t, mem, dev, irq)
	// Tests replace the device; whichever is there at the end is closed.
	t.Cleanup(func() {
		if err := b.Device.Close(); err != nil {
			t.Error(err)
		}
	})
	b.must(dev.Resume())
	test(b)
}

func (b *bench) must(err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

// queue is the one that takes requests.
func (b *bench) queue() *Queue { return b.Queues[b.Subject.Queue] }

func (b *bench) request(n int) Request { return b.Subject.Request(b.Driver, n) }

// works initialises the device and does a few requests: whatever happened
// before, a polite driver is served.
func (b *bench) works() {
	b.Helper()
	b.Start(allFeatures)
	for n := range 3 {
		b.Do(b.queue(), b.request(n))
	}
}

// save pauses the device, saves it, closes it and returns the state.
func (b *bench) save() []byte {
	b.Helper()
	b.must(b.Device.Pause())
	state, err := b.Device.Save()
	b.must(err)
	b.must(b.Device.Close())
	return state
}

// restore makes a paused device from the state and attaches the driver.
func (b *bench) restore(state []byte) {
	b.Helper()
	irq := NewInterrupt()
	dev, err := b.New(b.Memory, irq, state)
	if err != nil {
		b.Fatalf("%v\nstate: %s", err, state)
	}
	b.Attach(dev, irq)
}

// settle waits until the device has taken all that is available in the queue
// or asks for a reset, at most for the limit, and then pauses it once: what is
// read afterwards does not change any more.
func (b *bench) settle(q *Queue, limit time.Duration) {
	b.Helper()
	for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(100 * time.Microsecond) {
		if q.UsedIndex() == q.avail || b.needsReset() {
			break
		}
	}
	b.must(b.Device.Pause())
	b.must(b.Device.Resume())
}

func (b *bench) needsReset() bool {
	return b.ReadRegister(virtio.RegStatus)&virtio.StatusNeedsReset != 0
}

func testIdentity(b *bench) {
	for _, r := range []struct {
		name   string
		offset uint64
		want   uint32
	}{
		{"magic", virtio.RegMagicValue, 0x74726976},
		{"version", virtio.RegVersion, 2},
		{"device", virtio.RegDeviceID, b.DeviceID},
		{"status", virtio.RegStatus, 0},
		{"interrupt status", virtio.RegInterruptStatus, 0},
		{"shared memory length", virtio.RegSHMLenLow, 0xffffffff},
		{"shared memory length, high", virtio.RegSHMLenHigh, 0xffffffff},
	} {
		if got := b.ReadRegister(r.offset); got != r.want {
			b.Errorf("%s is %#x, want %#x", r.name, got, r.want)
		}
	}
	if b.Device.ID() == "" {
		b.Error("the device has no id")
	}
	const always = virtio.FeatureVersion1 | virtio.FeatureIndirectDescriptors | virtio.FeatureEventIndex
	if offered := b.Offered(); offered&always != always {
		b.Errorf("features %#x are offered, without all of %#x", offered, uint64(always))
	}
}

// featureSets are the combinations of what changes the format of a queue.
var featureSets = []struct {
	name     string
	features uint64
}{
	{"flags", allFeatures &^ (virtio.FeatureEventIndex | virtio.FeatureIndirectDescriptors)},
	{"event index", allFeatures &^ virtio.FeatureIndirectDescriptors},
	{"indirect", allFeatures &^ virtio.FeatureEventIndex},
	{"all", allFeatures},
}

func testRequests(b *bench) {
	for _, set := range featureSets {
		b.Log(set.name)
		b.Start(set.features)
		q := b.queue()
		indirect := b.Features&virtio.FeatureIndirectDescriptors != 0
		// More than once around the ring, in bursts of different lengths.
		for n := 0; n < 2*int(q.Size); {
			var burst []Request
			for range 1 + rand.IntN(8) {
				r := b.request(n)
				n++
				if indirect && n%2 == 0 {
					q.AddIndirect(r.Buffers...)
				} else {
					q.Add(r.Buffers...)
				}
				burst = append(burst, r)
			}
			q.Kick()
			for _, r := range burst {
				b.check(r, q.Wait())
			}
			b.Recycle()
		}
	}
}

// split returns the same request in buffers of one byte as far as limit
// descriptors allow: the first and last bytes, where headers and status bytes
// are.
func split(r Request, limit int) Request {
	spare := limit - 2*len(r.Buffers)
	var out []Buffer
	for _, buf := range r.Buffers {
		for buf.Length > 1 && spare > 0 {
			out = append(out, Buffer{buf.Address, 1, buf.Writable})
			buf.Address, buf.Length = buf.Address+1, buf.Length-1
			spare--
		}
		out = append(out, buf)
	}
	return Request{Buffers: out, Check: r.Check}
}

func testTinyBuffers(b *bench) {
	b.Start(allFeatures)
	q := b.queue()
	for n, limit := range []int{16, int(q.Size) / 2, int(q.Size)} {
		b.Do(q, split(b.request(n), limit))
		r := split(b.request(n+10), limit)
		q.AddIndirect(r.Buffers...)
		q.Kick()
		b.check(r, q.Wait())
	}
}

func testSuppression(b *bench) {
	for _, set := range featureSets {
		b.Start(set.features)
		q := b.queue()
		b.Do(q, b.request(0))
		b.settle(q, patience)
		b.Acknowledge()
		before := b.Interrupt.Count()
		q.SuppressInterrupts()
		q.Add(b.request(1).Buffers...)
		// A device that asks for no notification is still looking, as it does
		// after settle has resumed it, and finds the request by itself.
		q.Kick()
		b.settle(q, patience)
		if q.UsedIndex() != 2 {
			b.Errorf("%s: used index is %d", set.name, q.UsedIndex())
		}
		if got := b.Interrupt.Count(); got != before {
			b.Errorf("%s: interrupt in spite of suppression", set.name)
		}
		q.Wait()
	}
}

func testReset(b *bench) {
	for range 3 {
		b.works()
	}
	// An interrupt that nobody has acknowledged goes away too.
	queues := uint32(len(b.Queues))
	q := b.queue()
	q.pollAndArm()
	q.Add(b.request(0).Buffers...)
	q.Kick()
	b.settle(q, patience)
	if b.ReadRegister(virtio.RegInterruptStatus) == 0 {
		b.Error("no interrupt for a request that came back")
	}
	b.Reset()
	for i := range queues {
		b.WriteRegister(virtio.RegQueueSel, i)
		if b.ReadRegister(virtio.RegQueueReady) != 0 {
			b.Errorf("queue %d is ready after reset", i)
		}
	}
	if got := b.ReadRegister(virtio.RegInterruptStatus); got != 0 {
		b.Errorf("interrupt status after reset is %#x", got)
	}
	b.works()
}

func testResetDuringRequests(b *bench) {
	for range 20 {
		b.Start(allFeatures)
		q := b.queue()
		for n := range 16 {
			q.Add(b.request(n).Buffers...)
		}
		q.ForceKick()
		time.Sleep(time.Duration(rand.IntN(300)) * time.Microsecond)
		b.Reset()
		// From here on the memory is the driver's own.
		before := q.UsedIndex()
		time.Sleep(time.Millisecond)
		if after := q.UsedIndex(); after != before {
			b.Fatalf("used index went from %d to %d after reset", before, after)
		}
	}
	b.works()
}

func testPauseIsQuiet(b *bench) {
	b.works()
	q := b.queue()
	for _, kick := range []bool{true, false} {
		b.must(b.Device.Pause())
		edges, used := b.Interrupt.Count(), q.UsedIndex()
		r := b.request(7)
		q.Add(r.Buffers...)
		if kick {
			q.ForceKick()
		}
		time.Sleep(20 * time.Millisecond)
		if q.UsedIndex() != used || b.Interrupt.Count() != edges {
			b.Error("the device works while it is paused")
		}
		// Resume looks at the queue, notified or not.
		b.must(b.Device.Resume())
		b.check(r, q.Wait())
	}
}

func testPauseTwice(b *bench) {
	b.works()
	for n := range 50 {
		b.must(b.Device.Pause())
		b.must(b.Device.Pause())
		b.must(b.Device.Resume())
		b.must(b.Device.Resume())
		b.Do(b.queue(), b.request(n))
	}
	if _, err := b.Device.Save(); err == nil {
		b.Error("a running device was saved")
	}
}

// testPendingAtRestore: a chain was made available and the notification got
// lost in the pause. The event index says that no other will come.
func testPendingAtRestore(b *bench) {
	for _, set := range featureSets {
		b.Start(set.features)
		q := b.queue()
		for n := range 4 {
			b.Do(q, b.request(n))
		}
		b.must(b.Device.Pause())
		r := b.request(5)
		q.Add(r.Buffers...)
		state := b.save()
		b.restore(state)
		b.must(b.Device.Resume())
		b.check(r, q.Wait())
	}
}

// testInterruptAtRestore: the driver has not acknowledged an interrupt when it
// is saved; the line is new after the restore and has seen no edge.
func testInterruptAtRestore(b *bench) {
	b.works()
	q := b.queue()
	q.pollAndArm()
	q.Add(b.request(9).Buffers...)
	q.Kick()
	select {
	case <-b.Interrupt.C(): // and no acknowledgement
	case <-time.After(patience):
		b.Fatal("no interrupt")
	}
	b.restore(b.save())
	if got := b.Interrupt.Count(); got != 0 {
		b.Errorf("%d interrupts from a device that was never resumed", got)
	}
	b.must(b.Device.Resume())
	if reason := b.AwaitInterrupt(); reason&virtio.InterruptUsedBuffer == 0 {
		b.Errorf("interrupt status is %#x", reason)
	}
}

func testSaveDuringRequests(b *bench) {
	b.Start(allFeatures)
	for generation := range 20 {
		q := b.queue()
		requests := map[uint32]Request{}
		for n := range 12 {
			r := b.request(n)
			head := q.Add(r.Buffers...)
			requests[uint32(head)] = r
			q.Kick()
		}
		time.Sleep(time.Duration(rand.IntN(200)) * time.Microsecond)
		state := b.save()
		b.restore(state)
		again, err := b.Device.Save()
		b.must(err)
		if string(again) != string(state) {
			b.Fatalf("generation %d: saved again as\n%s\nwas\n%s", generation, again, state)
		}
		b.must(b.Device.Resume())
		for range len(requests) {
			u := q.Wait()
			r, ok := requests[u.Head]
			if !ok {
				b.Fatalf("generation %d: %d came back twice or was never sent", generation, u.Head)
			}
			delete(requests, u.Head)
			b.check(r, u)
		}
		b.Recycle()
	}
	b.works()
}

// testSaveBeforeDriver: a guest may be saved at any point of initialisation.
func testSaveBeforeDriver(b *bench) {
	step := func() {
		b.Helper()
		b.restore(b.save())
		b.must(b.Device.Resume())
	}
	step()
	b.AddStatus(virtio.StatusAcknowledge)
	step()
	b.AddStatus(virtio.StatusDriver)
	step()
	b.Features = b.Offered()
	b.SelectFeatures(b.Features)
	step()
	b.AddStatus(virtio.StatusFeaturesOK)
	step()
	for i := range uint32(64) {
		b.WriteRegister(virtio.RegQueueSel, i)
		step()
		limit := b.ReadRegister(virtio.RegQueueNumMax)
		if limit == 0 {
			break
		}
		b.SetupQueue(i, uint16(limit))
		step()
	}
	b.Go()
	b.Do(b.queue(), b.request(0))
	b.WriteRegister(virtio.RegStatus, b.ReadRegister(virtio.RegStatus)|virtio.StatusFailed)
	step()
	b.works()
}

// lives are what a guest may do with a device before it is put back.
var lives = []struct {
	name string
	live func(*bench)
}{
	{"requests", func(b *bench) {
		for n := range 20 {
			b.queue().Add(b.request(n).Buffers...)
			b.queue().Kick()
			b.queue().Wait()
		}
	}},
	{"requests under way", func(b *bench) {
		for n := range 12 {
			b.queue().Add(b.request(n).Buffers...)
			b.queue().Kick()
		}
	}},
	{"another driver", func(b *bench) { b.works() }},
	{"no driver", func(b *bench) { b.Reset() }},
	{"a hostile driver", func(b *bench) {
		q := b.queue()
		q.Publish(q.Size) // no descriptor has this number
		q.ForceKick()
		b.settle(q, patience)
		if !b.needsReset() {
			b.Error("a head beyond the queue is no violation")
		}
	}},
}

// testRestoreInPlace: a device is put back to where it was in an earlier life, and
// guest memory with it. It is what a new device with that state would be.
func testRestoreInPlace(b *bench) {
	for i, life := range lives {
		b.Log(life.name)
		b.Start(featureSets[i%len(featureSets)].features)
		q := b.queue()
		for n := range 4 {
			b.Do(q, b.request(n))
		}
		b.must(b.Device.Pause())
		r := b.request(5)
		q.Add(r.Buffers...) // pending in the state
		state, err := b.Device.Save()
		b.must(err)
		guest := b.keep()
		for range 2 {
			b.must(b.Device.Resume())
			life.live(b)
			b.must(b.Device.Pause())
			guest.putBack(b)
			edges := b.Interrupt.Count()
			b.must(b.Device.Restore(state))
			if again, err := b.Device.Save(); err != nil || string(again) != string(state) {
				b.Fatalf("put back, it is saved as\n%s (%v)\nwas\n%s", again, err, state)
			}
			if got := b.Interrupt.Count(); got != edges {
				b.Errorf("%d interrupts from a paused device", got-edges)
			}
			b.must(b.Device.Resume())
			b.check(r, b.queue().Wait())
			b.Do(b.queue(), b.request(6))
			b.must(b.Device.Pause())
			guest.putBack(b)
			b.must(b.Device.Restore(state))
		}
		b.must(b.Device.Resume())
	}
	b.works()
}

func testRestoreInPlaceRefused(b *bench) {
	b.works()
	b.must(b.Device.Pause())
	state, err := b.Device.Save()
	b.must(err)
	b.must(b.Device.Resume())
	if err := b.Device.Restore(state); err == nil {
		b.Error("a running device was put back")
	}
	b.works()
	b.must(b.Device.Pause())
	for _, cut := range []int{0, 1, len(state) / 2, len(state) - 1} {
		if err := b.Device.Restore(state[:cut]); err == nil {
			b.Errorf("state cut to %d bytes was accepted", cut)
		}
	}
	b.must(b.Device.Close())
	if err := b.Device.Restore(state); err == nil {
		b.Error("a closed device was put back")
	}
}

// kept is a guest at one moment: its driver and its memory.
type kept struct {
	driver Driver
	queues []Queue
	memory bytes.Buffer
}

func (b *bench) keep() *kept {
	k := &kept{driver: *b.Driver}
	for _, q := range b.Queues {
		k.queues = append(k.queues, q.clone())
	}
	b.must(b.Memory.Dump(&k.memory))
	return k
}

func (k *kept) putBack(b *bench) {
	*b.Driver = k.driver
	b.Queues = nil
	for _, q := range k.queues {
		copied := q.clone()
		b.Queues = append(b.Queues, &copied)
	}
	b.Fill(0, k.memory.Bytes())
}

func (q *Queue) clone() Queue {
	c := *q
	c.free = slices.Clone(q.free)
	c.chains = maps.Clone(q.chains)
	return c
}

func testCloseTwice(b *bench) {
	b.works()
	q := b.queue()
	q.Add(b.request(0).Buffers...)
	q.ForceKick()
	b.must(b.Device.Close())
	b.must(b.Device.Close())
	if err := b.Device.Resume(); err == nil {
		b.Error("a closed device was resumed")
	}
	// A late vCPU does no harm.
	used := q.UsedIndex()
	q.ForceKick()
	b.WriteRegister(virtio.RegStatus, 0)
	b.ReadRegister(virtio.RegStatus)
	if q.UsedIndex() != used {
		b.Error("a closed device works")
	}

	// Close without a pause, a resume, or a driver.
	dev, err := b.New(b.Memory, NewInterrupt(), nil)
	b.must(err)
	b.must(dev.Close())
}
