package kvm

import (
	"errors"
	"testing"
)

// Pages can be entered ahead; where there is no memory that is an error.
func TestPreFault(t *testing.T) {
	vm, v, _ := guest(t, 0xf4) // hlt
	err := v.PreFault(0, guestSize)
	if errors.Is(err, ErrNotSupported) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := v.PreFault(0, 0); err != nil {
		t.Errorf("no pages: %v", err)
	}
	if err := v.PreFault(guestSize, 4096); err == nil || errors.Is(err, ErrNotSupported) {
		t.Errorf("outside of all memory slots: %v", err)
	}
	expect(t, v, ExitHLT)
	if err := vm.Close(); err != nil {
		t.Fatal(err)
	}
	if err := v.PreFault(0, 4096); err == nil || errors.Is(err, ErrNotSupported) {
		t.Errorf("closed: %v", err)
	}
}
