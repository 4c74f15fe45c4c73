package cpu

import (
	"encoding/binary"
	"reflect"
	"strings"
	"testing"

	"github.com/forkvm/forkvm/kvm"
)

// example has a different value in every field.
func example() *State {
	n := uint64(0)
	next := func() uint64 { n += 0x0101; return n }
	s := &State{
		ID:      3,
		CPUID:   []kvm.CPUIDEntry{{Function: 1, Index: 2, Flags: 3, EAX: 4, EBX: 5, ECX: 6, EDX: 7}},
		TSCKHz:  2_000_000,
		MPState: kvm.MPStateHalted,
		XSAVE:   []byte("extended state"),
		XCRs:    []kvm.XCR{{XCR: 0, Value: 7}},
		MSRs:    []kvm.MSREntry{{Index: msrTSC, Data: 99}, {Index: msrTSCDeadline, Data: 100}},
		Nested:  []byte{1},
	}
	fill(reflect.ValueOf(&s.Regs).Elem(), next)
	fill(reflect.ValueOf(&s.Sregs).Elem(), next)
	fill(reflect.ValueOf(&s.DebugRegs).Elem(), next)
	fill(reflect.ValueOf(&s.Events).Elem(), next)
	copy(s.LAPIC.Regs[:], "local apic")
	return s
}

// fill gives every exported number in v its own value.
func fill(v reflect.Value, next func() uint64) {
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				fill(v.Field(i), next)
			}
		}
	case reflect.Array:
		for i := range v.Len() {
			fill(v.Index(i), next)
		}
	default:
		v.SetUint(next())
	}
}

func TestStateRoundTrip(t *testing.T) {
	for _, s := range []*State{{}, example()} {
		data, err := s.MarshalBinary()
		if err != nil {
			t.Fatal(err)
		}
		var got State
		if err := got.UnmarshalBinary(data); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(&got, s) {
			t.Errorf("got %+v\nwant %+v", got, s)
		}
	}
}

// Old snapshots stay readable: the form of version 1 does not change.
func TestStateGolden(t *testing.T) {
	data, err := example().MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "state-v1.bin", data)
}

func TestStateBadInput(t *testing.T) {
	good, err := example().MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	for n := range good {
		var s State
		if err := s.UnmarshalBinary(good[:n]); err == nil {
			t.Fatalf("%d of %d bytes are enough", n, len(good))
		}
		if !reflect.DeepEqual(s, State{}) {
			t.Fatalf("%d bytes: the state was changed", n)
		}
	}
	with := func(offset int, v uint32) []byte {
		data := append([]byte(nil), good...)
		binary.LittleEndian.PutUint32(data[offset:], v)
		return data
	}
	for _, tc := range []struct {
		name string
		data []byte
		want string
	}{
		{"too long", append(append([]byte(nil), good...), 0), "1 bytes too many"},
		{"next version", with(0, 2), "version 2, this program reads 1"},
		{"vcpu number", with(4, 255), "vcpu number 255"},
		{"many leaves", with(8, 4097), "4097 entries, at most 4096 are possible"},
		{"more leaves than bytes", with(8, 4096), "unexpected EOF"},
	} {
		err := new(State).UnmarshalBinary(tc.data)
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", tc.name, err, tc.want)
		}
	}
}

func FuzzState(f *testing.F) {
	data, err := example().MarshalBinary()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	f.Add(data[:100])
	f.Fuzz(func(t *testing.T, data []byte) {
		var s State
		if s.UnmarshalBinary(data) != nil {
			return
		}
		again, err := s.MarshalBinary()
		if err != nil || string(again) != string(data) {
			t.Errorf("accepted, but written otherwise: %v", err)
		}
	})
}

func TestRearmTimer(t *testing.T) {
	for _, tc := range []struct {
		name          string
		lvt           uint32
		deadline, tsc uint64
		want          uint64
	}{
		{"disarmed in deadline mode", 2<<17 | 0xec, 0, 500, 500},
		{"armed", 2<<17 | 0xec, 900, 500, 900},
		{"masked", 2<<17 | 1<<16 | 0xec, 0, 500, 0},
		{"periodic", 1<<17 | 0xec, 0, 500, 0},
	} {
		s := State{MSRs: []kvm.MSREntry{{Index: msrTSC, Data: tc.tsc}, {Index: msrTSCDeadline, Data: tc.deadline}}}
		binary.LittleEndian.PutUint32(s.LAPIC.Regs[0x320:], tc.lvt)
		s.rearmTimer()
		if got := s.MSRs[1].Data; got != tc.want {
			t.Errorf("%s: deadline %d, want %d", tc.name, got, tc.want)
		}
	}
	new(State).rearmTimer() // no such registers
}

func TestFitXSAVE(t *testing.T) {
	if got, err := fitXSAVE([]byte{1, 2}, 4); err != nil || string(got) != "\x01\x02\x00\x00" {
		t.Errorf("shorter: %v, %v", got, err)
	}
	if got, err := fitXSAVE([]byte{1, 0, 0}, 1); err != nil || string(got) != "\x01" {
		t.Errorf("longer by zeros: %v, %v", got, err)
	}
	if _, err := fitXSAVE([]byte{1, 0, 5}, 2); err == nil {
		t.Error("longer by more than zeros is no error")
	}
}
