package virtio_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/forkvm/forkvm/devices/virtio"
	"github.com/forkvm/forkvm/devices/virtio/virtiotest"
	"github.com/forkvm/forkvm/vmm/memory"
)

func TestStatus(t *testing.T) {
	cases := []struct {
		name   string
		writes []uint32
		want   uint32
	}{
		{"in order", []uint32{1, 3, 11, 15}, 15},
		{"in one write", []uint32{15}, 15},
		{"driver before acknowledge", []uint32{2}, 0},
		{"features before driver", []uint32{1, 9}, 1},
		{"driver ok before features ok", []uint32{1, 3, 7}, 3},
		{"a bit is cleared", []uint32{1, 3, 11, 3}, 11},
		{"another bit is cleared", []uint32{1, 3, 11, 10}, 11},
		{"unknown bits", []uint32{1, 3, 3 | 0x30}, 3},
		{"upper bits", []uint32{1, 1 | 0xffffff00 | 2}, 3},
		{"only upper bits", []uint32{1, 0x100}, 1},
		{"needs reset is not the driver's", []uint32{1, 1 | 64}, 1},
		{"failed", []uint32{1, 3, 3 | 128}, 3 | 128},
		{"nothing after failed", []uint32{1, 1 | 128, 3 | 128}, 1 | 128},
		{"reset", []uint32{1, 3, 11, 15, 0}, 0},
		{"reset after failed", []uint32{1, 129, 0, 1}, 1},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			s := newSetup(t, nil)
			for _, w := range c.writes {
				// The features have to be there before FEATURES_OK.
				s.SelectFeatures(virtio.FeatureVersion1)
				if w == 15 && len(c.writes) == 1 {
					s.WriteRegister(virtio.RegStatus, 3)
					s.SelectFeatures(virtio.FeatureVersion1)
				}
				s.WriteRegister(virtio.RegStatus, w)
			}
			if got := s.ReadRegister(virtio.RegStatus); got != c.want {
				t.Errorf("status is %#x, want %#x", got, c.want)
			}
		})
	}
}

func TestFeatures(t *testing.T) {
	const offered = 0x5 | virtio.FeatureVersion1 | virtio.FeatureEventIndex | virtio.FeatureIndirectDescriptors
	for _, c := range []struct {
		name     string
		features uint64
		ok       bool
	}{
		{"all", offered, true},
		{"the least", virtio.FeatureVersion1, true},
		{"none", 0, false},
		{"legacy", 0x5, false},
		{"not offered", virtio.FeatureVersion1 | 2, false},
		{"in order", virtio.FeatureVersion1 | 1<<35, false},
		{"everything", all, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newSetup(t, nil)
			if got := s.Offered(); got != offered {
				t.Errorf("offered %#x, want %#x", got, uint64(offered))
			}
			s.AddStatus(virtio.StatusAcknowledge)
			s.AddStatus(virtio.StatusDriver)
			s.SelectFeatures(c.features)
			if got := s.AddStatus(virtio.StatusFeaturesOK)&virtio.StatusFeaturesOK != 0; got != c.ok {
				t.Fatalf("accepted: %v, want %v", got, c.ok)
			}
			// Refused features may be tried again, accepted ones are final.
			s.SelectFeatures(virtio.FeatureVersion1)
			s.AddStatus(virtio.StatusFeaturesOK)
			s.AddStatus(virtio.StatusDriverOK)
			want := `"driver_features":4294967296`
			if c.ok && c.features != virtio.FeatureVersion1 {
				want = `"driver_features":5100273669`
			}
			if state := s.save(t); !strings.Contains(string(state), want) {
				t.Errorf("no %s in %s", want, state)
			}
		})
	}
	s := newSetup(t, nil)
	for _, sel := range []uint32{2, 64, 0xffffffff} {
		s.WriteRegister(virtio.RegDeviceFeaturesSel, sel)
		if got := s.ReadRegister(virtio.RegDeviceFeatures); got != 0 {
			t.Errorf("features of selector %#x are %#x", sel, got)
		}
	}
}

// save pauses the device and returns its state.
func (s *setup) save(t *testing.T) []byte {
	t.Helper()
	if err := s.transport.Pause(); err != nil {
		t.Fatal(err)
	}
	state, err := s.transport.Save()
	if err != nil {
		t.Fatal(err)
	}
	return state
}

func TestBadRings(t *testing.T) {
	const end = virtiotest.MemorySize
	for _, c := range []struct {
		name  string
		place func(q *virtiotest.Queue)
		ok    bool
	}{
		{"as placed", func(*virtiotest.Queue) {}, true},
		{"at address 0", func(q *virtiotest.Queue) { q.Descriptors = 0 }, true},
		{"up to the end", func(q *virtiotest.Queue) { q.Descriptors = end - 16*uint64(q.Size) }, true},
		{"over the end", func(q *virtiotest.Queue) { q.Descriptors = end - 16*uint64(q.Size) + 16 }, false},
		{"driver ring without used_event", func(q *virtiotest.Queue) { q.Driver = end - virtio.DriverRingSize(q.Size) + 2 }, false},
		{"device ring without avail_event", func(q *virtiotest.Queue) { q.Device = end - virtio.DeviceRingSize(q.Size) + 2 }, false},
		{"in a hole", func(q *virtiotest.Queue) { q.Device = 0xd0000000 }, false},
		{"wraps", func(q *virtiotest.Queue) { q.Descriptors = 0xfffffffffffffff0 }, false},
		{"descriptors unaligned", func(q *virtiotest.Queue) { q.Descriptors += 8 }, false},
		{"driver ring unaligned", func(q *virtiotest.Queue) { q.Driver++ }, false},
		{"device ring unaligned", func(q *virtiotest.Queue) { q.Device += 2 }, false},
		{"size 3", func(q *virtiotest.Queue) { q.Size = 3 }, false},
		{"size 128", func(q *virtiotest.Queue) { q.Size = 128 }, false},
		{"size 1", func(q *virtiotest.Queue) { q.Size = 1 }, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newSetup(t, nil)
			s.Negotiate(all)
			q := s.PlaceQueue(0, 64)
			c.place(q)
			if got := s.Describe(q); got != c.ok {
				t.Fatalf("ready: %v, want %v", got, c.ok)
			}
			s.AddStatus(virtio.StatusDriverOK)
			if c.ok {
				return
			}
			// Drivers do not read QueueReady back; they hear of it here.
			if reason := s.AwaitInterrupt(); reason != virtio.InterruptConfigChange {
				t.Errorf("interrupt status is %#x", reason)
			}
			if s.ReadRegister(virtio.RegStatus)&virtio.StatusNeedsReset == 0 {
				t.Error("the device does not ask for a reset")
			}
			var protocol *virtio.ProtocolError
			if err := s.transport.Failure(); !errors.As(err, &protocol) || protocol.Queue != 0 {
				t.Errorf("failure is %v", err)
			}
			if err := <-s.reports; !strings.Contains(err.Error(), "echo0") {
				t.Errorf("reported %v", err)
			}
		})
	}
}

// TestQueueIsFixed: nothing about a queue changes while it is in use, except
// that the driver takes it back.
func TestQueueIsFixed(t *testing.T) {
	s := newSetup(t, nil)
	change := func() {
		s.WriteRegister(virtio.RegQueueSel, 0)
		s.WriteRegister(virtio.RegQueueNum, 2)
		for _, reg := range []uint64{virtio.RegQueueDescLow, virtio.RegQueueDriverLow, virtio.RegQueueDeviceLow} {
			s.WriteAddress(reg, 0xd0000000)
		}
		s.WriteRegister(virtio.RegQueueReady, 1)
	}
	s.Negotiate(all)
	q := s.SetupQueue(0, 64)
	change()
	s.Go()
	s.Do(q, echoRequest(s.Driver, 0))
	change()
	s.Do(q, echoRequest(s.Driver, 1))
	s.WriteRegister(virtio.RegQueueReady, 7) // not a value it can have
	s.Do(q, echoRequest(s.Driver, 2))

	s.WriteRegister(virtio.RegQueueReady, 0)
	if s.ReadRegister(virtio.RegQueueReady) != 0 {
		t.Fatal("the queue cannot be taken back")
	}
	q.Add(echoRequest(s.Driver, 3).Buffers...)
	q.ForceKick()
	change()
	if s.ReadRegister(virtio.RegQueueReady) != 0 {
		t.Error("a queue was opened after DRIVER_OK")
	}
	state := s.save(t)
	if q.UsedIndex() != 3 {
		t.Errorf("used index is %d, want 3", q.UsedIndex())
	}
	want := fmt.Sprintf(`{"size":64,"ready":false,"descriptors":%d,"driver":%d,"device":%d,"next_avail":0,"next_used":0}`,
		q.Descriptors, q.Driver, q.Device)
	if !strings.Contains(string(state), want) {
		t.Errorf("state is\n%s\nwant a queue\n%s", state, want)
	}
}

func TestAccessWidths(t *testing.T) {
	s := newSetup(t, nil)
	for _, c := range []struct {
		name   string
		offset uint64
		width  int
		want   []byte
	}{
		{"register", virtio.RegMagicValue, 4, []byte("virt")},
		{"one byte of a register", virtio.RegMagicValue, 1, []byte{0}},
		{"half a register", virtio.RegMagicValue, 2, []byte{0, 0}},
		{"two registers", virtio.RegMagicValue, 8, make([]byte, 8)},
		{"unaligned", virtio.RegMagicValue + 2, 4, make([]byte, 4)},
		{"write-only", virtio.RegQueueNotify, 4, make([]byte, 4)},
		{"no register", 0x0f8, 4, make([]byte, 4)},
		{"into the configuration space", 0x0fe, 4, make([]byte, 4)},
		{"byte of the space", virtio.RegConfig + 3, 1, []byte("3")},
		{"unaligned in the space", virtio.RegConfig + 1, 4, []byte("1234")},
		{"8 bytes of the space", virtio.RegConfig, 8, []byte("01234567")},
		{"over the end of the space", virtio.RegConfig + 8, 4, []byte{'8', '9', 0, 0}},
		{"behind the space", virtio.RegConfig + 10, 2, []byte{0, 0}},
		{"end of the window", virtio.WindowSize - 8, 8, make([]byte, 8)},
	} {
		got := bytes.Repeat([]byte{0xcc}, c.width)
		s.transport.Read(c.offset, got)
		if !bytes.Equal(got, c.want) {
			t.Errorf("%s: read % x, want % x", c.name, got, c.want)
		}
	}
	for _, w := range [][]byte{{1}, {1, 0}, {1, 0, 0, 0, 0, 0, 0, 0}} {
		s.transport.Write(virtio.RegStatus, w)
	}
	s.transport.Write(virtio.RegStatus-2, []byte{0, 0, 1, 0})
	s.transport.Write(virtio.RegConfig, []byte("x"))
	if got := s.ReadRegister(virtio.RegStatus); got != 0 {
		t.Errorf("status is %#x after writes of wrong widths", got)
	}
	var b [1]byte
	if s.transport.Read(virtio.RegConfig, b[:]); b[0] != '0' {
		t.Error("a driver changed the configuration space")
	}
}

func TestSetSpace(t *testing.T) {
	s := newSetup(t, nil)
	s.transport.SetSpace([]byte("abcdefghij"))
	if got := s.Interrupt.Count(); got != 0 {
		t.Error("interrupt without a driver")
	}
	s.Start(all)
	before := s.ReadRegister(virtio.RegConfigGeneration)
	s.transport.SetSpace([]byte("ABCDEFGHIJ"))
	if reason := s.AwaitInterrupt(); reason != virtio.InterruptConfigChange {
		t.Errorf("interrupt status is %#x", reason)
	}
	if s.ReadRegister(virtio.RegConfigGeneration) == before {
		t.Error("the generation did not change")
	}
	// While the device is paused the line is quiet; the guest hears later.
	if err := s.transport.Pause(); err != nil {
		t.Fatal(err)
	}
	edges := s.Interrupt.Count()
	s.transport.SetSpace([]byte("ABCDEFGHIJ"))
	if s.Interrupt.Count() != edges {
		t.Error("interrupt from a paused device")
	}
	if err := s.transport.Resume(); err != nil {
		t.Fatal(err)
	}
	if reason := s.AwaitInterrupt(); reason != virtio.InterruptConfigChange {
		t.Errorf("interrupt status after the pause is %#x", reason)
	}
	var b [4]byte
	if s.transport.Read(virtio.RegConfig, b[:]); string(b[:]) != "ABCD" {
		t.Errorf("space is %q", b)
	}
}

// TestSpaceIsNeverTorn reads the space with the generation around it, as a
// driver does, while it changes.
func TestSpaceIsNeverTorn(t *testing.T) {
	s := newSetup(t, nil)
	s.transport.SetSpace(bytes.Repeat([]byte{0}, 8))
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := range 5000 {
			s.transport.SetSpace(bytes.Repeat([]byte{byte(i)}, 8))
		}
	})
	for range 5000 {
		var low, high [4]byte
		before := s.ReadRegister(virtio.RegConfigGeneration)
		s.transport.Read(virtio.RegConfig, low[:])
		s.transport.Read(virtio.RegConfig+4, high[:])
		if s.ReadRegister(virtio.RegConfigGeneration) == before && low != high {
			t.Fatalf("read % x % x in one generation", low, high)
		}
	}
	wg.Wait()
}

func TestDeviceErrors(t *testing.T) {
	broken := errors.New("broken")
	check := func(t *testing.T, s *setup) {
		t.Helper()
		if reason := s.AwaitInterrupt(); reason&virtio.InterruptConfigChange == 0 {
			t.Errorf("interrupt status is %#x", reason)
		}
		if err := <-s.reports; !errors.Is(err, broken) {
			t.Errorf("reported %v", err)
		}
		if !errors.Is(s.transport.Failure(), broken) {
			t.Errorf("failure is %v", s.transport.Failure())
		}
		s.Reset()
		if s.transport.Failure() != nil {
			t.Error("failure outlives the reset")
		}
	}
	t.Run("activate", func(t *testing.T) {
		s := newSetup(t, nil)
		s.echo.activateError = broken
		s.Negotiate(all)
		s.SetupQueue(0, 64)
		s.AddStatus(virtio.StatusDriverOK)
		check(t, s)
		if s.echo.served.Load() != 0 {
			t.Error("a queue was served")
		}
	})
	t.Run("handle", func(t *testing.T) {
		s := newSetup(t, nil)
		s.echo.handleError = broken
		s.Start(all)
		check(t, s)
	})
	// An error of a queue counts even if the device passes it over.
	t.Run("swallowed", func(t *testing.T) {
		s := newSetup(t, nil)
		s.echo.handle = func(q *virtio.Queue) error {
			q.Pop()
			return nil
		}
		s.Start(all)
		s.Queues[0].Publish(9999)
		s.Queues[0].ForceKick()
		if reason := s.AwaitInterrupt(); reason != virtio.InterruptConfigChange {
			t.Errorf("interrupt status is %#x", reason)
		}
	})
	t.Run("interrupt", func(t *testing.T) {
		s := newSetup(t, func(c *virtio.Config) { c.Interrupt = brokenInterrupt{broken} })
		s.Start(all)
		q := s.Queues[0]
		q.Add(echoRequest(s.Driver, 0).Buffers...)
		q.Kick()
		if err := <-s.reports; !errors.Is(err, broken) {
			t.Errorf("reported %v", err)
		}
		if err := s.transport.Pause(); err != nil {
			t.Fatal(err)
		}
		if err := s.transport.Resume(); !errors.Is(err, broken) {
			t.Errorf("resume without an interrupt: %v", err)
		}
	})
}

type brokenInterrupt struct{ err error }

func (b brokenInterrupt) Trigger() error { return b.err }

// TestNotifyStorm: notifications for queues that are not there do not even
// wake the device, and those for an idle queue do no harm.
func TestNotifyStorm(t *testing.T) {
	s := newSetup(t, nil)
	s.Start(all)
	s.Do(s.Queues[0], echoRequest(s.Driver, 0))
	time.Sleep(5 * time.Millisecond)
	before := s.echo.served.Load()
	for _, queue := range []uint32{2, 63, 64, 65, 0xffff, 0xffffffff} {
		for range 10000 {
			s.WriteRegister(virtio.RegQueueNotify, queue)
		}
	}
	time.Sleep(5 * time.Millisecond)
	if got := s.echo.served.Load(); got != before {
		t.Errorf("the device was called %d times", got-before)
	}
	for range 100000 {
		s.Queues[0].ForceKick()
	}
	s.Do(s.Queues[0], echoRequest(s.Driver, 1))
}

// TestBusyDriver: a driver that makes more work available as fast as the
// device takes it cannot keep a pause or a reset out.
func TestBusyDriver(t *testing.T) {
	s := newSetup(t, nil)
	var refill *virtiotest.Queue
	s.echo.handle = func(q *virtio.Queue) error {
		for {
			c, err := q.Pop()
			if c == nil || err != nil {
				return err
			}
			if err := q.Push(c, 0); err != nil {
				return err
			}
			refill.Publish(0)
		}
	}
	s.Negotiate(all)
	refill = s.SetupQueue(0, 64)
	refill.WriteDescriptor(0, virtiotest.Descriptor{Address: 4096, Length: 16})
	refill.Publish(0)
	s.Go()
	for range 20 {
		if err := s.transport.Pause(); err != nil {
			t.Fatal(err)
		}
		used := refill.UsedIndex()
		if err := s.transport.Resume(); err != nil {
			t.Fatal(err)
		}
		for refill.UsedIndex() == used {
			time.Sleep(100 * time.Microsecond)
		}
	}
	s.Reset()
	if s.echo.resets != 1 {
		t.Errorf("%d resets of the device, want 1", s.echo.resets)
	}
}

func TestWake(t *testing.T) {
	s := newSetup(t, nil)
	s.transport.Wake()
	time.Sleep(5 * time.Millisecond)
	if got := s.echo.woken.Load(); got != 0 {
		t.Errorf("woken %d times without a driver", got)
	}
	s.Start(all)
	await := func(what string) {
		t.Helper()
		deadline := time.Now().Add(10 * time.Second)
		for s.echo.woken.Load() == 0 {
			if time.Now().After(deadline) {
				t.Fatalf("not woken after %s", what)
			}
			time.Sleep(100 * time.Microsecond)
		}
		s.echo.woken.Store(0)
	}
	await("DRIVER_OK")
	s.transport.Wake()
	await("Wake")
	if err := s.transport.Pause(); err != nil {
		t.Fatal(err)
	}
	s.transport.Wake()
	time.Sleep(5 * time.Millisecond)
	if s.echo.woken.Load() != 0 {
		t.Error("woken while paused")
	}
	if err := s.transport.Resume(); err != nil {
		t.Fatal(err)
	}
	await("Resume")
}

// TestCaseB1RestoreWithoutKick is the field case in numbers: the driver has made 5
// chains available, the device has taken 4 and has asked to hear of index 4,
// which the driver has done already. Nobody will notify again.
func TestCaseB1RestoreWithoutKick(t *testing.T) {
	s := newSetup(t, nil)
	s.Start(all)
	q := s.Queues[0]
	for n := range 4 {
		s.Do(q, echoRequest(s.Driver, n))
	}
	state := s.save(t)
	r := echoRequest(s.Driver, 4)
	q.Add(r.Buffers...)
	if q.AvailEvent() != 4 || !bytes.Contains(state, []byte(`"next_avail":4`)) {
		t.Fatalf("avail_event is %d, state %s", q.AvailEvent(), state)
	}
	irq := virtiotest.NewInterrupt()
	dev, err := virtio.New(echoConfig(&echo{}, s.Memory, irq, state))
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	s.Attach(dev, irq)
	if err := dev.Resume(); err != nil {
		t.Fatal(err)
	}
	if err := r.Check(q.Wait().Written); err != nil {
		t.Error(err)
	}
}

// TestIndicesWrap goes over 65535 with each way of suppression.
func TestIndicesWrap(t *testing.T) {
	for _, features := range []uint64{all, all &^ virtio.FeatureEventIndex} {
		s := newSetup(t, nil)
		s.Start(features)
		q := s.Queues[0]
		for n := range 1<<16 + 200 {
			if n%4096 == 0 || n > 65400 {
				s.Do(q, echoRequest(s.Driver, n))
				continue
			}
			// Quickly, with an empty request.
			s.Do(q, virtiotest.Request{Buffers: []virtiotest.Buffer{{Address: 4096, Length: 0}}})
		}
	}
}

// TestHeldChain: a device that keeps a chain cannot be saved.
func TestHeldChain(t *testing.T) {
	s := newSetup(t, nil)
	popped := make(chan struct{})
	s.echo.handle = func(q *virtio.Queue) error {
		if c, err := q.Pop(); err != nil || c == nil {
			return err
		}
		close(popped)
		return nil
	}
	s.Start(all)
	s.Queues[0].Add(echoRequest(s.Driver, 0).Buffers...)
	s.Queues[0].ForceKick()
	<-popped
	if err := s.transport.Pause(); err != nil {
		t.Fatal(err)
	}
	if _, err := s.transport.Save(); err == nil || !strings.Contains(err.Error(), "in flight") {
		t.Errorf("save: %v", err)
	}
}

// TestUndo: a chain that was put back comes again.
func TestUndo(t *testing.T) {
	s := newSetup(t, nil)
	var heads []uint16
	done := make(chan struct{})
	s.echo.handle = func(q *virtio.Queue) error {
		for {
			c, err := q.Pop()
			if c == nil || err != nil {
				return err
			}
			heads = append(heads, c.Head())
			if len(heads) < 3 {
				q.Undo(c)
				continue
			}
			if err := q.Push(c, 0); err != nil {
				return err
			}
			close(done)
		}
	}
	s.Start(all)
	head := s.Queues[0].Add(echoRequest(s.Driver, 0).Buffers...)
	s.Queues[0].ForceKick()
	<-done
	s.save(t)
	if len(heads) != 3 || heads[0] != head || heads[1] != head || heads[2] != head {
		t.Errorf("popped %v, want %d three times", heads, head)
	}
}

// TestGoldenState: the format of a saved device does not change by accident.
func TestGoldenState(t *testing.T) {
	s := newSetup(t, nil)
	s.Start(all)
	for n := range 3 {
		s.Do(s.Queues[0], echoRequest(s.Driver, n))
	}
	if err := s.transport.Pause(); err != nil {
		t.Fatal(err)
	}
	s.Acknowledge() // the last request may have been seen before its interrupt
	got := s.save(t)
	path := filepath.Join("testdata", "state.json")
	if os.Getenv("UPDATE_GOLDEN") != "" {
		if err := os.WriteFile(path, append(got, '\n'), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if want = bytes.TrimSpace(want); !bytes.Equal(got, want) {
		t.Errorf("state is\n%s\nwant (UPDATE_GOLDEN=1 rewrites it)\n%s", got, want)
	}
	dev, err := virtio.New(echoConfig(&echo{}, s.Memory, s.Interrupt, want))
	if err != nil {
		t.Fatal(err)
	}
	if err := dev.Close(); err != nil {
		t.Error(err)
	}
}

func TestBadConfig(t *testing.T) {
	mem, irq := virtiotest.NewMemory(t), virtiotest.NewInterrupt()
	for _, c := range []struct {
		name   string
		change func(*virtio.Config)
	}{
		{"no memory", func(c *virtio.Config) { c.Memory = nil }},
		{"no interrupt", func(c *virtio.Config) { c.Interrupt = nil }},
		{"no device", func(c *virtio.Config) { c.Device = nil }},
		{"transport feature", func(c *virtio.Config) { c.Features = virtio.FeatureVersion1 }},
		{"no queue", func(c *virtio.Config) { c.QueueSizes = nil }},
		{"queue of 0", func(c *virtio.Config) { c.QueueSizes = []uint16{0} }},
		{"queue of 3", func(c *virtio.Config) { c.QueueSizes = []uint16{3} }},
		{"65 queues", func(c *virtio.Config) { c.QueueSizes = make([]uint16, 65) }},
		{"large space", func(c *virtio.Config) { c.Space = make([]byte, virtio.WindowSize) }},
	} {
		config := echoConfig(&echo{}, mem, irq, nil)
		c.change(&config)
		if _, err := virtio.New(config); err == nil || !strings.Contains(err.Error(), "echo0") {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// TestClosedMemory: if the memory goes first, which it should not, the device
// fails and does not crash.
func TestClosedMemory(t *testing.T) {
	mem, err := memory.New(memory.Config{Size: virtiotest.MemorySize})
	if err != nil {
		t.Fatal(err)
	}
	s := newSetup(t, func(c *virtio.Config) { c.Memory = mem })
	s.Start(all)
	if err := mem.Close(); err != nil {
		t.Fatal(err)
	}
	s.WriteRegister(virtio.RegQueueNotify, 0)
	if reason := s.AwaitInterrupt(); reason != virtio.InterruptConfigChange {
		t.Errorf("interrupt status is %#x", reason)
	}
}
