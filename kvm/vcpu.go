package kvm

import (
	"fmt"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// A VCPU is one virtual processor.
type VCPU struct {
	handle
	vm  *VM
	id  int
	run []byte // shared with the kernel, struct kvm_run first

	// kickMu makes a kick and the end of the mapping or of the thread
	// exclude each other. It is never held across Run.
	kickMu  sync.Mutex
	thread  int  // of Bind, 0 for none; guarded by kickMu
	mapped  bool // guarded by kickMu
	closing atomic.Bool
}

// newVCPU owns fd, also when it fails.
func newVCPU(vm *VM, id, fd int) (*VCPU, error) {
	v := &VCPU{handle: handle{fd: fd, kind: fmt.Sprintf("vcpu %d", id)}, vm: vm, id: id}
	run, err := unix.Mmap(fd, 0, vm.mmapSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		unix.Close(fd)
		return nil, v.wrap("map run state", err)
	}
	v.run, v.mapped = run, true
	return v, nil
}

// ID is the number CreateVCPU got.
func (v *VCPU) ID() int { return v.id }

// Close kicks the vCPU if it runs, waits for Run to return and closes it. The
// goroutine of the run loop must not touch the data of an exit afterwards:
// the memory behind it is gone.
func (v *VCPU) Close() error {
	if !v.closing.Swap(true) {
		v.Kick()
	}
	v.handle.mu.Lock()
	defer v.handle.mu.Unlock()
	if v.handle.closed {
		return nil
	}
	v.handle.closed = true
	v.kickMu.Lock()
	v.mapped = false
	err := unix.Munmap(v.run)
	v.kickMu.Unlock()
	if closeErr := unix.Close(v.fd); err == nil {
		err = closeErr
	}
	v.vm.forget(v)
	return v.wrap("close", err)
}

// Bind records the calling thread as the one that runs this vCPU, for Kick.
// The goroutine has locked itself to the thread and calls Unbind before it
// unlocks.
func (v *VCPU) Bind() {
	v.kickMu.Lock()
	defer v.kickMu.Unlock()
	v.thread = unix.Gettid()
}

// Unbind forgets the thread. Kicks after it do not signal anybody.
func (v *VCPU) Unbind() {
	v.kickMu.Lock()
	defer v.kickMu.Unlock()
	v.thread = 0
}

// Kick makes Run return ExitIntr, at once if it is in progress, otherwise when
// it is next called; this lasts until SetImmediateExit(false). It is safe at
// any time and from any goroutine.
//
// It takes both halves: the flag alone is not seen by a guest that is
// running, the signal alone is lost if it arrives just before KVM_RUN.
func (v *VCPU) Kick() error {
	v.kickMu.Lock()
	defer v.kickMu.Unlock()
	if !v.mapped {
		return nil
	}
	v.setImmediateExit(true)
	if v.thread == 0 {
		return nil
	}
	return v.wrap("kick", unix.Tgkill(unix.Getpid(), v.thread, unix.SIGURG))
}

// SetImmediateExit makes every Run from now on return ExitIntr before it
// enters the guest, having only finished the I/O of the last exit, or lets it
// enter again. A run loop clears it once it has seen why it was kicked, before
// it looks whether there is a reason to stop.
func (v *VCPU) SetImmediateExit(on bool) {
	v.kickMu.Lock()
	defer v.kickMu.Unlock()
	if v.mapped {
		v.setImmediateExit(on)
	}
}
