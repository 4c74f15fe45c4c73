package kvm

import (
	"bytes"
	"encoding/binary"
	"errors"
	"reflect"
	"slices"
	"testing"
)

// roundTrip reads a part of the state, changes it, writes it, and reads it
// again.
func roundTrip[T any](t *testing.T, what string, get func() (T, error), change func(*T), set func(T) error) {
	t.Helper()
	s, err := get()
	if err != nil {
		t.Errorf("%s: %v", what, err)
		return
	}
	change(&s)
	if err := set(s); err != nil {
		t.Errorf("%s: %v", what, err)
		return
	}
	got, err := get()
	if err != nil || !reflect.DeepEqual(got, s) {
		t.Errorf("%s: got %+v (%v), want %+v", what, got, err, s)
	}
}

func TestVCPUState(t *testing.T) {
	_, v := chipVM(t)
	s, err := Open()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	cpuid, err := s.SupportedCPUID()
	if err != nil {
		t.Fatal(err)
	}
	if err := v.SetCPUID(cpuid); err != nil {
		t.Fatal(err)
	}
	got, err := v.CPUID()
	if err != nil {
		t.Error(err)
	}
	for _, e := range cpuid {
		same := func(g CPUIDEntry) bool { return g.Function == e.Function && g.Index == e.Index }
		// Leaves of zeros say nothing, and some kernels do not keep them.
		if silent := e.EAX|e.EBX|e.ECX|e.EDX == 0; !silent && !slices.ContainsFunc(got, same) {
			t.Errorf("cpuid: leaf %#x/%d is missing", e.Function, e.Index)
		}
	}
	if len(got) > len(cpuid) {
		t.Errorf("cpuid: %d entries of %d", len(got), len(cpuid))
	}

	roundTrip(t, "registers", v.Regs, func(r *Regs) { r.RAX, r.R15, r.RIP = 1<<63|5, 7, 0x1234 }, v.SetRegs)
	roundTrip(t, "special registers", v.Sregs, func(s *Sregs) { s.CR2, s.DS.Base, s.GDT.Limit = 0x1000, 0x30, 0x27 }, v.SetSregs)
	if n, err := s.CheckExtension(CapSregs2); err == nil && n > 0 {
		roundTrip(t, "special registers 2", v.Sregs2, func(s *Sregs2) { s.CR2 = 0x2000 }, v.SetSregs2)
	}
	roundTrip(t, "fpu", v.FPU, func(f *FPU) { f.XMM[3][4], f.FPR[1][0] = 9, 8 }, v.SetFPU)
	roundTrip(t, "debug registers", v.DebugRegs, func(d *DebugRegs) { d.DB[1] = 0x4000 }, v.SetDebugRegs)
	roundTrip(t, "lapic", v.LAPIC, func(l *LAPIC) { binary.LittleEndian.PutUint32(l.Regs[lapicSpurious:], 0x1fe) }, v.SetLAPIC)
	roundTrip(t, "events", v.VCPUEvents, func(e *VCPUEvents) { e.NMI.Masked, e.SIPIVector = 1, 0 }, v.SetVCPUEvents)
	roundTrip(t, "mp state", v.MPState, func(s *MPState) { *s = MPStateHalted }, v.SetMPState)
	roundTrip(t, "xcrs", v.XCRS, func(*XCRS) {}, v.SetXCRS)
}

func TestXSAVE(t *testing.T) {
	_, v := chipVM(t)
	p, err := v.XSAVE()
	if err != nil {
		t.Fatal(err)
	}
	if len(p) < 4096 || len(p) != v.XSAVESize() {
		t.Errorf("%d bytes, size %d", len(p), v.XSAVESize())
	}
	// The legacy region and the bit that says SSE state is present, Intel SDM
	// volume 1, sections 13.4.1 and 13.4.2.
	copy(p[160:176], "sixteen bytes...")
	p[512] |= 2
	if err := v.SetXSAVE(p); err != nil {
		t.Fatal(err)
	}
	got, err := v.XSAVE()
	if err != nil || !bytes.Equal(got[160:176], p[160:176]) {
		t.Errorf("xmm0 %q, %v", got[160:176], err)
	}
	if err := v.SetXSAVE(p[:4095]); err == nil {
		t.Error("a short buffer is no error")
	}
}

const (
	msrSysenterESP = 0x175
	msrLSTAR       = 0xc0000082
	msrNone        = 0x12345678
)

func TestMSRs(t *testing.T) {
	_, v := chipVM(t)
	want := []MSREntry{{Index: msrLSTAR, Data: 0xffff_ffff_8100_0000}, {Index: msrSysenterESP, Data: 0x7000}}
	if err := v.SetMSRs(want); err != nil {
		t.Fatal(err)
	}
	got := []MSREntry{{Index: msrLSTAR}, {Index: msrSysenterESP}}
	if err := v.MSRs(got); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, %v", got, err)
	}

	bad := []MSREntry{{Index: msrLSTAR, Data: 5}, {Index: msrNone, Data: 3}, {Index: msrSysenterESP, Data: 9}}
	var msrErr *MSRError
	if err := v.SetMSRs(bad); !errors.As(err, &msrErr) || msrErr.Index != msrNone || msrErr.Value != 3 || !msrErr.Write {
		t.Errorf("set: %v", err)
	}
	if err := v.MSRs(bad); !errors.As(err, &msrErr) || msrErr.Index != msrNone || msrErr.Write {
		t.Errorf("get: %v", err)
	}
	if bad[0].Data != 5 {
		t.Errorf("the one before the bad one was not read: %+v", bad[0])
	}

	// More than one call's worth.
	many := make([]MSREntry, 3*maxMSRs+1)
	for i := range many {
		many[i].Index = msrLSTAR
	}
	many[len(many)-1].Index = msrNone
	if err := v.MSRs(many); !errors.As(err, &msrErr) || msrErr.Index != msrNone {
		t.Errorf("many: %v", err)
	}
	if err := v.MSRs(many[:len(many)-1]); err != nil || many[len(many)-2].Data != 5 {
		t.Errorf("many: %+v, %v", many[len(many)-2], err)
	}
	if err := v.SetMSRs(nil); err != nil {
		t.Errorf("none: %v", err)
	}
}

func TestVMState(t *testing.T) {
	vm, _ := chipVM(t)
	if err := vm.CreatePIT2(PITSpeakerDummy); err != nil {
		t.Fatal(err)
	}
	roundTrip(t, "pic", func() (IRQChip, error) { return vm.IRQChip(IRQChipPICMaster) },
		func(c *IRQChip) { c.Chip[2] = 0xfe }, vm.SetIRQChip)
	pit, err := vm.PIT()
	if err != nil {
		t.Fatal(err)
	}
	pit.Channels[1].Count = 1000
	if err := vm.SetPIT(pit); err != nil {
		t.Fatal(err)
	}
	if got, err := vm.PIT(); err != nil || got.Channels[1].Count != 1000 {
		t.Errorf("pit: %+v, %v", got, err)
	}
}

func TestClock(t *testing.T) {
	vm, _ := chipVM(t)
	c, err := vm.Clock()
	if err != nil {
		t.Fatal(err)
	}
	c.Clock += 1e15 // 11 days
	if err := vm.SetClock(c.Frozen()); err != nil {
		t.Fatal(err)
	}
	if got, err := vm.Clock(); err != nil || got.Clock < c.Clock || got.Clock > c.Clock+600e9 {
		t.Errorf("frozen: got %d, %v, want just after %d", got.Clock, err, c.Clock)
	}
	following, ok := c.Following()
	if flags, err := vm.CheckExtension(CapAdjustClock); err != nil || flags&ClockRealtime == 0 || !ok {
		t.Skip("host records no real time with the clock: needs Linux 5.16")
	}
	following.Realtime -= 3600e9 // as if saved an hour ago
	if err := vm.SetClock(following); err != nil {
		t.Fatal(err)
	}
	if got, err := vm.Clock(); err != nil || got.Clock < c.Clock+3600e9 || got.Clock > c.Clock+4200e9 {
		t.Errorf("following: got %d, %v, want just after %d", got.Clock, err, c.Clock+3600e9)
	}
}

func TestClockCleaning(t *testing.T) {
	saved := ClockData{Clock: 7, Flags: ClockHostTSC | ClockTSCStable | ClockRealtime, Realtime: 8, HostTSC: 9}
	if got := saved.Frozen(); got != (ClockData{Clock: 7}) {
		t.Errorf("frozen: %+v", got)
	}
	if got, ok := saved.Following(); !ok || got != (ClockData{Clock: 7, Flags: ClockRealtime, Realtime: 8}) {
		t.Errorf("following: %+v, %v", got, ok)
	}
	saved.Flags = ClockHostTSC
	if got, ok := saved.Following(); ok || got != (ClockData{Clock: 7}) {
		t.Errorf("following without real time: %+v, %v", got, ok)
	}
}

func TestTSC(t *testing.T) {
	_, v := chipVM(t)
	khz, err := v.TSCKHz()
	if err != nil || khz <= 0 {
		t.Fatalf("%d kHz, %v", khz, err)
	}
	if err := v.SetTSCKHz(khz); err != nil {
		t.Errorf("its own rate: %v", err)
	}
	offset, err := v.TSCOffset()
	if errors.Is(err, ErrNotSupported) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := v.SetTSCOffset(offset - 1000); err != nil {
		t.Fatal(err)
	}
	got, err := v.TSCOffset()
	if err == nil && got == offset {
		t.Skip("this KVM accepts a TSC offset and ignores it: needs one that runs guest code on the processor")
	}
	if err != nil || got != offset-1000 {
		t.Errorf("offset %d, %v, want %d", got, err, offset-1000)
	}
}

func TestNestedState(t *testing.T) {
	_, v := chipVM(t)
	p, err := v.NestedState()
	if errors.Is(err, ErrNotSupported) {
		if err := v.SetNestedState(make([]byte, 128)); !errors.Is(err, ErrNotSupported) {
			t.Errorf("set: %v", err)
		}
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	if len(p) < nestedHeaderSize {
		t.Fatalf("%d bytes", len(p))
	}
	if err := v.SetNestedState(p); err != nil {
		t.Logf("set: %v (the vcpu has no CPUID that shows nesting)", err)
	}
	binary.LittleEndian.PutUint32(p[nestedSizeOffset:], uint32(len(p))+1)
	if err := v.SetNestedState(p); err == nil {
		t.Error("a size beyond the buffer is no error")
	}
}

func TestKVMClockCtrl(t *testing.T) {
	_, v := chipVM(t)
	if told, err := v.KVMClockCtrl(); told || err != nil {
		t.Errorf("%v, %v: the guest has no clock yet", told, err)
	}
	if err := v.NMI(); err != nil {
		t.Error(err)
	}
}
