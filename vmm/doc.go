// Package vmm runs one virtual machine: it owns the KVM virtual machine, the
// vCPU threads, and the order in which a machine is built, stopped, saved,
// restored and taken down. It knows no concrete device, no file format beyond
// the sections of package snapshot, and no guest.
//
// # Life of a machine
//
//	New          KVM virtual machine, interrupt controllers, timer, vCPUs;
//	             needs no memory, so it can be done ahead of time
//	SetMemory    guest RAM becomes KVM memory slots
//	Interrupt    a line for each device that is built now
//	Attach       devices, in the order in which they are resumed
//	Boot         the first vCPU gets a kernel's entry state; or
//	Restore      every vCPU and controller gets its saved state
//	Start        devices resume, then vCPUs run
//	Pause        vCPUs stop, then devices; the machine can be saved
//	Resume       devices, then vCPUs, as in Start
//	Reset        a paused machine goes back to a saved state
//	Close        everything ends; waits for each thread
//
// A machine ends by itself when the guest powers off, resets, panics or does
// something KVM cannot run; Done is closed then and Exit tells why.
//
// # Threads
//
// Each vCPU has a goroutine locked to an operating system thread. Inside
// KVM_RUN the thread is out of reach of channels and locks, so it is stopped
// by two means at once: the immediate_exit flag, which keeps the next KVM_RUN
// from entering the guest, and a signal, which ends the current one. Either
// alone can miss. The signal is the one that the Go runtime itself uses for
// preemption: a handler for it is always installed, so that this package
// installs none.
package vmm
