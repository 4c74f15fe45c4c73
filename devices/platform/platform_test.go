package platform

import (
	"errors"
	"fmt"
	"testing"

	"github.com/forkvm/forkvm/devices"
	"github.com/forkvm/forkvm/devices/virtio/virtiotest"
	"github.com/forkvm/forkvm/vmm/memory"
)

// contract is what every device here does: paused at birth, calls that may be doubled, a state that can be saved again, a
// close that can be repeated.
func contract(t *testing.T, create func(state []byte) (devices.Device, error)) {
	t.Helper()
	device, err := create(nil)
	if err != nil {
		t.Fatal(err)
	}
	var state []byte
	for generation := range 3 {
		if device.ID() == "" {
			t.Error("no id")
		}
		for _, err := range []error{device.Resume(), device.Resume(), device.Pause(), device.Pause()} {
			if err != nil {
				t.Error(err)
			}
		}
		next, err := device.Save()
		if err != nil {
			t.Fatal(err)
		}
		if generation > 0 && string(next) != string(state) {
			t.Errorf("generation %d saved\n%s\nwas\n%s", generation, next, state)
		}
		state = next
		// Another life of the same device, which is put back.
		if writer, ok := device.(interface{ Renew(GUID) error }); ok {
			if err := writer.Renew(NewGUID()); err != nil {
				t.Error(err)
			}
		}
		for _, err := range []error{device.Resume(), device.Pause(), device.Restore(state)} {
			if err != nil {
				t.Error(err)
			}
		}
		if again, err := device.Save(); err != nil || string(again) != string(state) {
			t.Errorf("generation %d, put back, saved\n%s (%v)\nwas\n%s", generation, again, err, state)
		}
		for i := range state {
			if err := device.Restore(state[:i]); err == nil {
				t.Errorf("put back to a state cut to %q", state[:i])
			}
		}
		for _, err := range []error{device.Close(), device.Close()} {
			if err != nil {
				t.Error(err)
			}
		}
		if device, err = create(state); err != nil {
			t.Fatal(err)
		}
	}
	if err := device.Close(); err != nil {
		t.Error(err)
	}
	for i := range state {
		if device, err := create(state[:i]); err == nil {
			t.Errorf("state cut to %q was accepted", state[:i])
			device.Close()
		}
	}
}

func TestPowerContract(t *testing.T) {
	contract(t, func(state []byte) (devices.Device, error) {
		return NewPower(PowerConfig{OnEvent: func(Event) {}, State: state})
	})
}

func TestPower(t *testing.T) {
	for _, c := range []struct {
		name   string
		port   uint64
		writes []byte
		want   []Event
	}{
		{"soft off", SleepControlPort, []byte{5<<2 | 1<<5}, []Event{EventShutdown}},
		{"soft off again and again", SleepControlPort, []byte{5<<2 | 1<<5, 5<<2 | 1<<5, 0xff, 5<<2 | 1<<5}, []Event{EventShutdown}},
		{"sleep type without enable", SleepControlPort, []byte{5 << 2}, nil},
		{"suspend", SleepControlPort, []byte{3<<2 | 1<<5}, nil},
		{"sleep status", SleepStatusPort, []byte{0x80, 0xff}, nil},
		{"reset", ResetPort, []byte{ResetValue, ResetValue}, []Event{EventReset}},
		{"other value for reset", ResetPort, []byte{0, 2, 0xff}, nil},
		{"keyboard controller", KeyboardControllerPort, []byte{0xd1, 0xfe, 0xfe}, []Event{EventReset}},
		{"panic", PanicPort, []byte{1}, []Event{EventPanicked}},
		{"crash kernel", PanicPort, []byte{2}, []Event{EventCrashLoaded}},
		{"both", PanicPort, []byte{3, 3}, []Event{EventPanicked, EventCrashLoaded}},
		{"unknown panic", PanicPort, []byte{0xfc}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			var got []Event
			p, err := NewPower(PowerConfig{OnEvent: func(e Event) { got = append(got, e) }})
			if err != nil {
				t.Fatal(err)
			}
			bus := devices.NewBus()
			if err := p.Register(bus); err != nil {
				t.Fatal(err)
			}
			for _, value := range c.writes {
				if !bus.Write(c.port, []byte{value}) {
					t.Error("nobody there")
				}
			}
			if fmt.Sprint(got) != fmt.Sprint(c.want) {
				t.Errorf("events %v, want %v", got, c.want)
			}
		})
	}
}

func TestPowerReads(t *testing.T) {
	p, err := NewPower(PowerConfig{OnEvent: func(Event) {}})
	if err != nil {
		t.Fatal(err)
	}
	bus := devices.NewBus()
	if err := p.Register(bus); err != nil {
		t.Fatal(err)
	}
	if err := p.Register(bus); err == nil {
		t.Error("registered twice")
	}
	for port, want := range map[uint64]byte{
		PanicPort: 3, SleepStatusPort: 0, KeyboardControllerPort: 0, SleepControlPort: 0, ResetPort: 0,
		0x60: 0xff, 0x70: 0xff, 0xcf8: 0xff,
	} {
		got := []byte{0x55}
		if bus.Read(port, got); got[0] != want {
			t.Errorf("port %#x reads %#x, want %#x", port, got[0], want)
		}
	}
}

func TestPowerRefuses(t *testing.T) {
	if _, err := NewPower(PowerConfig{}); err == nil {
		t.Error("no event function")
	}
	if _, err := NewPower(PowerConfig{OnEvent: func(Event) {}, State: []byte(`{"version":2}`)}); err == nil {
		t.Error("version 2")
	}
	if got := Event(9).String(); got != "event 9" {
		t.Error(got)
	}
}

const guidAddress = 0x9f000

func newGeneration(t *testing.T, mem *memory.Memory, irq devices.Interrupt, state []byte) *GenerationID {
	t.Helper()
	g, err := NewGenerationID(GenerationIDConfig{Memory: mem, Interrupt: irq, Address: guidAddress, GUID: GUID{1, 2, 3}, State: state})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { g.Close() })
	return g
}

func inMemory(t *testing.T, mem *memory.Memory) (g GUID) {
	t.Helper()
	if err := mem.ReadAt(g[:], guidAddress); err != nil {
		t.Fatal(err)
	}
	return g
}

func TestGenerationContract(t *testing.T) {
	mem := virtiotest.NewMemory(t)
	contract(t, func(state []byte) (devices.Device, error) {
		return NewGenerationID(GenerationIDConfig{Memory: mem, Interrupt: virtiotest.NewInterrupt(), Address: guidAddress, State: state})
	})
}

// A1: a clone has its id in memory before it runs, and the interrupt comes when it does, once per generation.
func TestGeneration(t *testing.T) {
	mem, irq := virtiotest.NewMemory(t), virtiotest.NewInterrupt()
	g := newGeneration(t, mem, irq, nil)
	if err := g.Resume(); err != nil {
		t.Fatal(err)
	}
	if inMemory(t, mem) != (GUID{1, 2, 3}) || irq.Count() != 0 {
		t.Errorf("cold start: %x, %d edges", inMemory(t, mem), irq.Count())
	}
	g.Pause()
	state, err := g.Save()
	if err != nil {
		t.Fatal(err)
	}

	// The same machine goes on: nothing happens.
	same := virtiotest.NewInterrupt()
	g = newGeneration(t, mem, same, state)
	g.Resume()
	if same.Count() != 0 || g.Current() != (GUID{1, 2, 3}) || inMemory(t, mem) != g.Current() {
		t.Errorf("plain restore: %x, %d edges", inMemory(t, mem), same.Count())
	}

	clone := virtiotest.NewInterrupt()
	g = newGeneration(t, mem, clone, state)
	id := NewGUID()
	if err := g.Renew(id); err != nil {
		t.Fatal(err)
	}
	if inMemory(t, mem) != id || clone.Count() != 0 {
		t.Errorf("before it runs: %x, %d edges", inMemory(t, mem), clone.Count())
	}
	// A snapshot of a clone that never ran owes the interrupt.
	state, err = g.Save()
	if err != nil {
		t.Fatal(err)
	}
	g.Resume()
	g.Resume()
	if clone.Count() != 1 {
		t.Errorf("%d edges", clone.Count())
	}
	late := virtiotest.NewInterrupt()
	newGeneration(t, mem, late, state).Resume()
	if late.Count() != 1 {
		t.Errorf("%d edges", late.Count())
	}

	// While it runs.
	if err := g.Renew(NewGUID()); err != nil || clone.Count() != 2 || inMemory(t, mem) == id {
		t.Errorf("renewed while running: %d edges, %v", clone.Count(), err)
	}
	g.Close()
	if err := g.Renew(id); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
	if err := g.Resume(); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
}

type brokenLine struct{}

func (brokenLine) Trigger() error { return errors.New("gone") }

func TestGenerationKeepsWhatIsOwed(t *testing.T) {
	g := newGeneration(t, virtiotest.NewMemory(t), brokenLine{}, nil)
	if err := g.Renew(NewGUID()); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := g.Resume(); err == nil {
			t.Error("resumed without an interrupt")
		}
	}
}

func TestGenerationRefuses(t *testing.T) {
	mem, irq := virtiotest.NewMemory(t), virtiotest.NewInterrupt()
	for name, c := range map[string]GenerationIDConfig{
		"no memory":      {Interrupt: irq, Address: guidAddress},
		"no interrupt":   {Memory: mem, Address: guidAddress},
		"not aligned":    {Memory: mem, Interrupt: irq, Address: guidAddress + 4},
		"not in memory":  {Memory: mem, Interrupt: irq, Address: virtiotest.MemorySize},
		"over the end":   {Memory: mem, Interrupt: irq, Address: virtiotest.MemorySize - 8},
		"state, version": {Memory: mem, Interrupt: irq, Address: guidAddress, State: []byte(`{"version":3,"guid":"AAAAAAAAAAAAAAAAAAAAAA=="}`)},
		"state, length":  {Memory: mem, Interrupt: irq, Address: guidAddress, State: []byte(`{"version":1,"guid":"AAAA"}`)},
		"state, memory":  {Memory: mem, Interrupt: irq, Address: 1 << 40, State: []byte(`{"version":1,"guid":"AAAAAAAAAAAAAAAAAAAAAA=="}`)},
	} {
		if g, err := NewGenerationID(c); err == nil {
			t.Errorf("%s: accepted", name)
			g.Close()
		}
	}
}

func TestGUIDsDiffer(t *testing.T) {
	seen := map[GUID]bool{}
	for range 1000 {
		g := NewGUID()
		if seen[g] || g[7]>>4 != 4 || g[8]>>6 != 2 {
			t.Fatalf("%x", g)
		}
		seen[g] = true
	}
}

func FuzzGenerationState(f *testing.F) {
	f.Add([]byte(`{"version":1,"guid":"AAAAAAAAAAAAAAAAAAAAAA==","pending":true}`))
	mem := virtiotest.NewMemory(f)
	f.Fuzz(func(t *testing.T, state []byte) {
		g, err := NewGenerationID(GenerationIDConfig{Memory: mem, Interrupt: virtiotest.NewInterrupt(), Address: guidAddress, State: state})
		if err == nil {
			g.Resume()
			g.Close()
		}
	})
}
