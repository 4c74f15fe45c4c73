package micro

import (
	"testing"
	"time"

	"github.com/forkvm/forkvm/kvm"
	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/vmm"
	"github.com/forkvm/forkvm/vmm/cpu"
	"github.com/forkvm/forkvm/vmm/memory"
)

// The guest's memory. It writes pages from arenaAt on, as many as it is told.
const (
	codeAt     = 0x100000
	mailboxAt  = 0x200000
	arenaAt    = 0x400000
	ram        = 128 << 20
	answerPort = 0x80
)

// program waits for a number in the mailbox, writes to so many pages, clears the
// mailbox and says so at a port, again and again. 32-bit code.
var program = []byte{
	0x8b, 0x0d, 0x00, 0x00, 0x20, 0x00, // loop: mov ecx, [mailboxAt]
	0x85, 0xc9, // test ecx, ecx
	0x74, 0xf6, // jz loop
	0xbf, 0x00, 0x00, 0x40, 0x00, // mov edi, arenaAt
	0x89, 0x0f, // next: mov [edi], ecx
	0x81, 0xc7, 0x00, 0x10, 0x00, 0x00, // add edi, 4096
	0x49,       // dec ecx
	0x75, 0xf5, // jnz next
	0xc7, 0x05, 0x00, 0x00, 0x20, 0x00, 0x00, 0x00, 0x00, 0x00, // mov dword [mailboxAt], 0
	0xe6, answerPort, // out answerPort, al
	0xeb, 0xd8, // jmp loop
}

// guest is a machine with nothing but a processor and memory.
type guest struct {
	*vmm.Machine
	memory   *memory.Memory
	answered chan struct{}
}

// frozen is what a clone begins from.
type frozen struct {
	state  *snapshot.State
	layers []memory.Layer
}

// port is the host's end of answerPort.
type port chan struct{}

func (p port) Read(_ uint64, data []byte) { clear(data) }
func (p port) Write(uint64, []byte)       { p <- struct{}{} }

// openKVM skips the benchmark where there is no KVM at all.
func openKVM(b *testing.B) *kvm.System {
	b.Helper()
	system, err := kvm.Open()
	if err != nil {
		b.Skipf("needs /dev/kvm, of whatever kind: %v", err)
	}
	b.Cleanup(func() { system.Close() })
	return system
}

// build makes a machine over layers, none for a new one. On error nothing is left.
func build(system *kvm.System, layers []memory.Layer) (*guest, error) {
	m, err := vmm.New(vmm.Config{KVM: system, CPUs: 1})
	if err != nil {
		return nil, err
	}
	g := &guest{Machine: m, answered: make(chan struct{}, 1)}
	if g.memory, err = memory.New(memory.Config{Size: ram, Layers: layers}); err != nil {
		g.close()
		return nil, err
	}
	if err = m.SetMemory(g.memory); err == nil {
		err = m.PIO.Register(answerPort, 1, port(g.answered))
	}
	if err != nil {
		g.close()
		return nil, err
	}
	return g, nil
}

func (g *guest) close() {
	g.Machine.Close()
	if g.memory != nil {
		g.memory.Close()
	}
}

// boot starts a new guest, which ends with the benchmark.
func boot(b *testing.B, system *kvm.System) *guest {
	b.Helper()
	g, err := build(system, nil)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(g.close)
	if err := g.memory.WriteAt(program, codeAt); err != nil {
		b.Fatal(err)
	}
	if err := g.Boot(cpu.Entry{Address: codeAt}); err != nil {
		b.Fatal(err)
	}
	if err := g.Start(); err != nil {
		b.Fatal(err)
	}
	g.write(b, 1)
	return g
}

// clone starts a guest that goes on where another was frozen, and returns when
// it has answered. It is paused then: this guest does not know how to be idle.
func clone(b *testing.B, system *kvm.System, f frozen) *guest {
	g, err := build(system, f.layers)
	if err != nil {
		b.Fatal(err)
	}
	if err := g.Restore(f.state); err != nil {
		b.Fatal(err)
	}
	if err := g.Start(); err != nil {
		b.Fatal(err)
	}
	g.write(b, 1)
	if err := g.Pause(); err != nil {
		b.Fatal(err)
	}
	return g
}

// write lets the guest write to so many pages and waits until it has.
func (g *guest) write(b *testing.B, pages uint32) {
	if err := g.memory.WriteUint32(mailboxAt, pages); err != nil {
		b.Fatal(err)
	}
	select {
	case <-g.answered:
	case <-g.Done():
		b.Fatal(g.Exit())
	case <-time.After(time.Minute):
		b.Fatal("the guest does not answer")
	}
}

// freeze is the pause of a fork. It returns how long the guest stood still and
// the layer that was cut; the state only where it is wanted.
func (g *guest) freeze(b *testing.B) (state *snapshot.State, cut memory.Layer, pause time.Duration) {
	begin := time.Now()
	if err := g.Pause(); err != nil {
		b.Fatal(err)
	}
	state, err := g.Save()
	if err != nil {
		b.Fatal(err)
	}
	if cut, err = g.memory.Freeze(); err != nil {
		b.Fatal(err)
	}
	if err := g.Resume(); err != nil {
		b.Fatal(err)
	}
	return state, cut, time.Since(begin)
}
