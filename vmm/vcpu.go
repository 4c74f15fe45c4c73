package vmm

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/kvm"
	"github.com/forkvm/forkvm/vmm/memory"
)

// vcpuState is where a vCPU's thread is.
type vcpuState int

const (
	vcpuParked  vcpuState = iota // outside KVM_RUN, waiting; its state may be read and set
	vcpuRunning                  // in KVM_RUN or handling an exit
	vcpuEnded                    // the thread has returned
)

// vcpu is one vCPU and the thread that runs it.
//
// A vCPU is only ever parked right after KVM_RUN was interrupted: KVM completes
// the register side of a port or MMIO access at the next KVM_RUN, so a state
// taken between an exit and that KVM_RUN would lose the access
// (Documentation/virt/kvm/api.rst, KVM_EXIT_IO).
type vcpu struct {
	index int
	fd    *kvm.VCPU
	m     *Machine
	tid   atomic.Int64 // of the thread, 0 while there is none

	mu    sync.Mutex
	cond  sync.Cond // state or want changed
	want  vcpuState // what the machine asks for
	state vcpuState
}

func newVCPU(m *Machine, index int) (*vcpu, error) {
	fd, err := m.vm.CreateVCPU(index)
	if err != nil {
		return nil, fmt.Errorf("create vcpu (%d): %w", index, err)
	}
	v := &vcpu{index: index, fd: fd, m: m, want: vcpuParked, state: vcpuEnded}
	v.cond.L = &v.mu
	return v, nil
}

// start begins the thread; it parks until resume. The caller holds the
// machine's lock.
func (v *vcpu) start() {
	v.mu.Lock()
	v.state = vcpuParked
	v.mu.Unlock()
	go v.thread()
}

// thread is the body of the vCPU's own operating system thread.
func (v *vcpu) thread() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	v.tid.Store(int64(unix.Gettid()))
	defer v.tid.Store(0)
	v.fd.Bind()
	defer v.fd.Unbind()

	for v.park() {
		if end := v.run(); end != nil {
			v.m.end(end)
			break
		}
	}

	v.mu.Lock()
	v.state = vcpuEnded
	v.cond.Broadcast()
	v.mu.Unlock()
}

// park waits until the vCPU shall run. It returns false when it shall end.
func (v *vcpu) park() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.state = vcpuParked
	v.cond.Broadcast()
	for v.want == vcpuParked {
		v.cond.Wait()
	}
	if v.want == vcpuEnded {
		return false
	}
	// Cleared under the lock that ask holds while it sets it, so that a stop
	// that comes after this is never lost.
	v.fd.SetImmediateExit(false)
	v.state = vcpuRunning
	return true
}

// run enters the guest until the vCPU shall stop (nil) or the machine ends.
func (v *vcpu) run() *Exit {
	for {
		reason, err := v.fd.Run()
		if errors.Is(err, unix.EFAULT) {
			return v.exit(ReasonHostError, fmt.Sprintf("%v: %v", memory.ErrBackingLost, err))
		}
		if err != nil {
			return v.exit(ReasonHostError, err.Error())
		}
		if reason == kvm.ExitIntr {
			// Our own stop, the Go runtime's preemption of this thread, or the
			// start-up interrupt of a vCPU that waited for it.
			if !v.carryOn() {
				return nil
			}
			continue
		}
		if end := v.handle(reason); end != nil {
			return end
		}
	}
}

// carryOn reports whether an interrupted vCPU enters the guest again. A stop
// that was taken back before the thread saw it leaves the flag set, and the
// thread would spin on it.
func (v *vcpu) carryOn() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.want != vcpuRunning {
		return false
	}
	v.fd.SetImmediateExit(false)
	return true
}

// ask tells the vCPU what to do next and, when it is to stop, gets it out of
// the guest. It does not wait.
func (v *vcpu) ask(want vcpuState) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.want == vcpuEnded {
		return
	}
	v.want = want
	v.cond.Broadcast()
	if want != vcpuRunning && v.state == vcpuRunning {
		// The thread is ours and has not ended, so there is no error to expect.
		_ = v.fd.Kick()
	}
}

// wait returns when the vCPU is no longer running.
func (v *vcpu) wait() {
	v.mu.Lock()
	defer v.mu.Unlock()
	for v.state == vcpuRunning {
		v.cond.Wait()
	}
}

// join returns when the thread has ended.
func (v *vcpu) join() {
	v.mu.Lock()
	defer v.mu.Unlock()
	for v.state != vcpuEnded {
		v.cond.Wait()
	}
}
