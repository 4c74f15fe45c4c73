package kvm

import (
	"errors"
	"os"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Guests here are a few instructions in real mode at codeAt, in 64 KiB of
// memory from address 0.
const (
	guestSize = 64 << 10
	codeAt    = 0x1000
	stackAt   = 0x8000
)

// realMode makes a vCPU of vm start code in real mode.
func realMode(t testing.TB, v *VCPU) {
	t.Helper()
	sregs, err := v.Sregs()
	if err != nil {
		t.Fatal(err)
	}
	sregs.CS.Base, sregs.CS.Selector = 0, 0
	if err := v.SetSregs(sregs); err != nil {
		t.Fatal(err)
	}
	if err := v.SetRegs(Regs{RIP: codeAt, RSP: stackAt, RFLAGS: 2}); err != nil {
		t.Fatal(err)
	}
}

// guest is a VM with one vCPU that is about to run code.
func guest(t testing.TB, code ...byte) (*VM, *VCPU, []byte) {
	t.Helper()
	vm := newVM(t)
	mem := memory(t, guestSize)
	copy(mem[codeAt:], code)
	if err := vm.SetTSSAddr(0xfffbd000); err != nil {
		t.Fatal(err)
	}
	if err := vm.SetUserMemoryRegion(MemoryRegion{Size: guestSize, HostAddress: hostAddress(mem)}); err != nil {
		t.Fatal(err)
	}
	// Registered after the memory's clean-up and before its own Close runs:
	// the VM goes first.
	t.Cleanup(func() { vm.Close() })
	v, err := vm.CreateVCPU(0)
	if err != nil {
		t.Fatal(err)
	}
	realMode(t, v)
	return vm, v, mem
}

// expect runs v, past interruptions, and checks why it stopped.
func expect(t testing.TB, v *VCPU, want ExitReason) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for time.Now().Before(deadline) {
		got, err := v.Run()
		if err != nil {
			t.Fatal(err)
		}
		if got == ExitIntr {
			continue
		}
		if got != want {
			if got == ExitInternalError {
				t.Logf("%v", v.InternalError())
			}
			t.Fatalf("exit %v, want %v", got, want)
		}
		return
	}
	t.Fatalf("no exit in 30 s, want %v", want)
}

func TestPortIO(t *testing.T) {
	_, v, _ := guest(t,
		0xba, 0xf8, 0x03, // mov dx, 0x3f8
		0xb0, 'A', // mov al, 'A'
		0xee,             // out dx, al
		0xed,             // in ax, dx
		0x83, 0xc0, 0x01, // add ax, 1
		0xef, // out dx, ax
		0xf4, // hlt
	)
	expect(t, v, ExitIO)
	if io := v.IO(); io.Port != 0x3f8 || io.Size != 1 || io.Count != 1 || !io.Out || string(io.Data) != "A" {
		t.Errorf("first out: %+v", io)
	}
	expect(t, v, ExitIO)
	io := v.IO()
	if io.Out || io.Size != 2 || len(io.Data) != 2 {
		t.Fatalf("in: %+v", io)
	}
	copy(io.Data, []byte{0xfe, 0x12})
	expect(t, v, ExitIO)
	if io := v.IO(); !io.Out || io.Size != 2 || string(io.Data) != "\xff\x12" {
		t.Errorf("second out: %+v", io)
	}
	expect(t, v, ExitHLT)
}

func TestStringIO(t *testing.T) {
	_, v, mem := guest(t,
		0xba, 0xf8, 0x03, // mov dx, 0x3f8
		0xbe, 0x00, 0x20, // mov si, 0x2000
		0xb9, 0x05, 0x00, // mov cx, 5
		0xf3, 0x6e, // rep outsb
		0xf4, // hlt
	)
	copy(mem[0x2000:], "hello")
	var got string
	for len(got) < 5 {
		expect(t, v, ExitIO)
		io := v.IO()
		if len(io.Data) != io.Size*io.Count || len(io.Data) == 0 {
			t.Fatalf("%+v", io)
		}
		got += string(io.Data)
	}
	if got != "hello" {
		t.Errorf("got %q", got)
	}
	expect(t, v, ExitHLT)
}

func TestMMIO(t *testing.T) {
	_, v, _ := guest(t,
		0xb8, 0x00, 0x20, // mov ax, 0x2000
		0x8e, 0xd8, // mov ds, ax
		0xa1, 0x10, 0x00, // mov ax, [0x10]
		0x40,             // inc ax
		0xa3, 0x20, 0x00, // mov [0x20], ax
		0xf4, // hlt
	)
	expect(t, v, ExitMMIO)
	m := v.MMIO()
	if m.Address != 0x20010 || m.Write || len(m.Data) != 2 {
		t.Fatalf("read: %+v", m)
	}
	copy(m.Data, []byte{0x33, 0x44})
	expect(t, v, ExitMMIO)
	if m := v.MMIO(); m.Address != 0x20020 || !m.Write || string(m.Data) != "\x34\x44" {
		t.Errorf("write: %+v", m)
	}
	expect(t, v, ExitHLT)
}

// flat makes a vCPU start code in 32-bit protected mode without paging.
func flat(t testing.TB, v *VCPU) {
	t.Helper()
	sregs, err := v.Sregs()
	if err != nil {
		t.Fatal(err)
	}
	code := Segment{Limit: 0xffffffff, Selector: 8, Type: 11, Present: 1, DB: 1, S: 1, G: 1}
	data := code
	data.Selector, data.Type = 16, 3
	sregs.CS, sregs.DS, sregs.ES, sregs.SS = code, data, data, data
	sregs.FS, sregs.GS = data, data
	sregs.IDT = DescriptorTable{}
	sregs.CR0 |= 1
	if err := v.SetSregs(sregs); err != nil {
		t.Fatal(err)
	}
}

// A fault without a handler, whose own fault has none either, ends a guest.
func TestShutdown(t *testing.T) {
	_, v, _ := guest(t, 0x0f, 0x0b) // ud2
	flat(t, v)
	expect(t, v, ExitShutdown)
}

func TestFlatMode(t *testing.T) {
	_, v, mem := guest(t,
		0xc7, 0x05, 0x00, 0x30, 0x00, 0x00, 0x78, 0x56, 0x34, 0x12, // mov dword [0x3000], 0x12345678
		0xf4, // hlt
	)
	flat(t, v)
	expect(t, v, ExitHLT)
	if got := string(mem[0x3000:0x3004]); got != "\x78\x56\x34\x12" {
		t.Errorf("guest wrote % x", got)
	}
}

func TestMemorySlots(t *testing.T) {
	vm, v, _ := guest(t,
		0xb8, 0x00, 0x20, // mov ax, 0x2000
		0x8e, 0xd8, // mov ds, ax
		0xa1, 0x00, 0x00, // mov ax, [0]
		0xa3, 0x02, 0x00, // mov [2], ax
		0xa1, 0x00, 0x00, // mov ax, [0]
		0xf4, // hlt
	)
	rom := memory(t, 4096)
	t.Cleanup(func() { vm.Close() })
	copy(rom, "xy")
	slot := MemoryRegion{Slot: 1, Flags: MemoryReadonly, GuestPhys: 0x20000, Size: 4096, HostAddress: hostAddress(rom)}
	if err := vm.SetUserMemoryRegion(slot); err != nil {
		t.Fatal(err)
	}
	expect(t, v, ExitMMIO)
	if m := v.MMIO(); !m.Write || m.Address != 0x20002 || string(m.Data) != "xy" {
		t.Errorf("write to read-only memory: %+v", m)
	}
	if rom[2] != 0 {
		t.Error("read-only memory changed")
	}
	slot.Size = 0
	if err := vm.SetUserMemoryRegion(slot); err != nil {
		t.Fatalf("delete slot: %v", err)
	}
	expect(t, v, ExitMMIO)
	if m := v.MMIO(); m.Write || m.Address != 0x20000 {
		t.Errorf("read where the slot was: %+v", m)
	}
	slot.Size, slot.Slot, slot.GuestPhys = 4096, 2, 0x1000
	if err := vm.SetUserMemoryRegion(slot); !errors.Is(err, unix.EEXIST) {
		t.Errorf("overlapping slot: %v", err)
	}
}

// Guest memory that maps a file privately is the way clones share pages: what
// a guest writes is its own.
func TestCopyOnWrite(t *testing.T) {
	code := []byte{
		0xa1, 0x00, 0x20, // mov ax, [0x2000]
		0x40,             // inc ax
		0xa3, 0x00, 0x20, // mov [0x2000], ax
		0xf4, // hlt
	}
	fd, err := unix.MemfdCreate("base", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	base := make([]byte, guestSize)
	copy(base[codeAt:], code)
	base[0x2000] = 41
	if _, err := unix.Pwrite(fd, base, 0); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		mem, err := unix.Mmap(fd, 0, guestSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Munmap(mem)
		vm := newVM(t)
		defer vm.Close()
		vm.SetTSSAddr(0xfffbd000)
		if err := vm.SetUserMemoryRegion(MemoryRegion{Size: guestSize, HostAddress: hostAddress(mem)}); err != nil {
			t.Fatal(err)
		}
		v, err := vm.CreateVCPU(0)
		if err != nil {
			t.Fatal(err)
		}
		realMode(t, v)
		expect(t, v, ExitHLT)
		if mem[0x2000] != 42 {
			t.Errorf("guest sees %d, want 42", mem[0x2000])
		}
		// The host may take the page back under the running VM.
		if err := unix.Madvise(mem[0x2000:0x3000], unix.MADV_DONTNEED); err != nil {
			t.Fatal(err)
		}
		realMode(t, v)
		expect(t, v, ExitHLT)
		if mem[0x2000] != 42 {
			t.Errorf("after the page went back: guest sees %d, want 42", mem[0x2000])
		}
	}
	var after [1]byte
	unix.Pread(fd, after[:], 0x2000)
	if after[0] != 41 {
		t.Errorf("base has %d, want 41", after[0])
	}
}

var endless = []byte{0xeb, 0xfe} // jmp $

// runLoop runs v on its own thread until stop is set and reports each return.
func runLoop(t *testing.T, v *VCPU, stop *atomic.Bool) (returns <-chan error, done <-chan struct{}) {
	r, d := make(chan error, 1), make(chan struct{})
	go func() {
		defer close(d)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		v.Bind()
		defer v.Unbind()
		for !stop.Load() {
			reason, err := v.Run()
			if err == nil && reason != ExitIntr {
				err = errors.New(reason.String())
			}
			if err != nil {
				r <- err
				return
			}
			v.SetImmediateExit(false)
		}
		r <- nil
	}()
	return r, d
}

func TestKickRunningGuest(t *testing.T) {
	_, v, _ := guest(t, endless...)
	for i := range 100 {
		v.SetImmediateExit(false)
		var stop atomic.Bool
		returns, done := runLoop(t, v, &stop)
		time.Sleep(time.Duration(i%7) * 200 * time.Microsecond) // before, during and after the entry
		stop.Store(true)
		if err := v.Kick(); err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-returns:
			if err != nil {
				t.Fatal(err)
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("round %d: guest still runs 10 s after the kick", i)
		}
		<-done
	}
}

func TestImmediateExit(t *testing.T) {
	_, v, _ := guest(t, 0xf4) // hlt
	v.SetImmediateExit(true)
	for range 3 {
		if reason, err := v.Run(); reason != ExitIntr || err != nil {
			t.Fatalf("%v, %v", reason, err)
		}
	}
	if regs, err := v.Regs(); err != nil || regs.RIP != codeAt {
		t.Errorf("rip %#x, %v", regs.RIP, err)
	}
	v.SetImmediateExit(false)
	expect(t, v, ExitHLT)
}

// A read from a port is not in the register before the next Run; with
// immediate exit set that Run does only this.
func TestImmediateExitSettlesIO(t *testing.T) {
	_, v, _ := guest(t, 0xe4, 0x80, 0xf4) // in al, 0x80; hlt
	expect(t, v, ExitIO)
	v.IO().Data[0] = 0x5a
	v.SetImmediateExit(true)
	if reason, err := v.Run(); reason != ExitIntr || err != nil {
		t.Fatalf("%v, %v", reason, err)
	}
	if regs, err := v.Regs(); err != nil || regs.RAX&0xff != 0x5a || regs.RIP != codeAt+2 {
		t.Errorf("rax %#x, rip %#x, %v", regs.RAX, regs.RIP, err)
	}
}

func TestCloseStopsRunningGuest(t *testing.T) {
	vm, v, _ := guest(t, endless...)
	var stop atomic.Bool
	returns, done := runLoop(t, v, &stop)
	time.Sleep(5 * time.Millisecond)
	closed := make(chan error)
	go func() { closed <- vm.Close() }()
	for range 2 {
		select {
		case err := <-returns:
			if !errors.Is(err, os.ErrClosed) {
				t.Errorf("run: %v, want %v", err, os.ErrClosed)
			}
		case err := <-closed:
			if err != nil {
				t.Errorf("close: %v", err)
			}
		case <-time.After(10 * time.Second):
			t.Fatal("close did not stop the guest in 10 s")
		}
	}
	<-done
	for what, err := range map[string]error{
		"close vcpu": v.Close(),
		"close vm":   vm.Close(),
		"kick":       v.Kick(),
	} {
		if err != nil {
			t.Errorf("%s again: %v", what, err)
		}
	}
	v.SetImmediateExit(true)
	if _, err := v.Regs(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("registers after close: %v", err)
	}
	if _, err := vm.CreateVCPU(1); !errors.Is(err, os.ErrClosed) {
		t.Errorf("create vcpu after close: %v", err)
	}
}

func TestRunDoesNotAllocate(t *testing.T) {
	_, v, _ := guest(t, 0xe6, 0x80, 0xeb, 0xfc) // out 0x80, al; jmp $-2
	n := testing.AllocsPerRun(50, func() {
		if reason, err := v.Run(); err != nil || reason == ExitIO && v.IO().Port != 0x80 {
			t.Fatal(reason, err)
		}
	})
	if n != 0 {
		t.Errorf("%v allocations per exit", n)
	}
}
