// Package kvm is the Linux KVM interface for x86-64 guests: one method per
// ioctl, on the type that owns the descriptor, and no policy.
//
// A [System] is an open /dev/kvm, a [VM] a guest's memory slots and interrupt
// controllers, a [VCPU] one virtual processor. Structures and numbers are
// generated from the kernel's headers; see internal/gen.
//
// # Threads
//
// Methods may be called from any goroutine unless they say otherwise, with
// one rule from the kernel: a vCPU belongs to the thread that runs it, and an
// ioctl on it from another thread waits until [VCPU.Run] returns. So the
// goroutine that runs a vCPU locks itself to its thread, calls [VCPU.Bind]
// once, and does everything else to that vCPU itself or while it is known not
// to run. [VCPU.Kick] and [VCPU.SetImmediateExit] are the exceptions: they are
// made for other goroutines.
//
// # Signals
//
// A kick needs a signal that has a handler. The Go runtime always has one for
// SIGURG, which it uses to preempt goroutines, so nothing has to be installed
// and an embedding program keeps its own signals. The other side of this is
// that the runtime's own SIGURG may make Run return at any time: [ExitIntr] is
// an ordinary answer, to be followed by another Run.
//
// # Lifetime
//
// Close is idempotent and waits for calls in progress. The kernel keeps a VM
// as long as any descriptor of it is open, so VM.Close closes its vCPUs first.
// After Close, methods return an error that is [os.ErrClosed].
//
// # Errors
//
// Errors read "verb object (id): cause" and wrap the [syscall.Errno] of the
// kernel. What this host cannot do is an error that is [ErrNotSupported].
package kvm

//go:generate go run ./internal/gen -o zabi_amd64.go
