package kvm

import (
	"sync/atomic"
	"unsafe"
)

// runStateSize is what must be mapped for the accessors below.
const runStateSize = int(unsafe.Sizeof(runState{}))

// state is the start of the shared mapping, which lives until Close and has
// at least runStateSize bytes.
func (v *VCPU) state() *runState { return (*runState)(unsafe.Pointer(unsafe.SliceData(v.run))) }

// exitData reads the union of the last exit as one of its members.
func exitData[T any](v *VCPU) *T { return (*T)(unsafe.Pointer(&v.state().Exit)) }

// setImmediateExit sets the byte immediate_exit with an atomic operation on
// the word around it: another goroutine may be setting it too, and Go has no
// atomic bytes. The mapping is page-aligned and so is the word, the first of
// it. The word's other bytes are inputs that only the run loop changes.
func (v *VCPU) setImmediateExit(on bool) {
	word := (*uint32)(unsafe.Pointer(unsafe.SliceData(v.run)))
	const bit = uint32(1) << (8 * unsafe.Offsetof(runState{}.ImmediateExit))
	if on {
		atomic.OrUint32(word, bit)
	} else {
		atomic.AndUint32(word, ^bit)
	}
}

// setRequestInterruptWindow is the same for the first byte.
func (v *VCPU) setRequestInterruptWindow(on bool) {
	word := (*uint32)(unsafe.Pointer(unsafe.SliceData(v.run)))
	const bit = uint32(1) << (8 * unsafe.Offsetof(runState{}.RequestInterruptWindow))
	if on {
		atomic.OrUint32(word, bit)
	} else {
		atomic.AndUint32(word, ^bit)
	}
}
