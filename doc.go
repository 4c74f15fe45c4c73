// Package forkvm embeds virtual machines that can be snapshotted, restored and
// forked while they run, in a Go program on Linux with KVM.
//
// Boot starts a machine from an image (package guest/image). Snapshot freezes it
// into a store (package snapshot/store), Restore makes a new machine of that,
// Fork makes new machines of a running one, which goes on. A clone never runs a
// command under its parent's identity: Restore and Fork return when the guest
// has confirmed a new one.
//
// A machine lives in the calling process: its vCPUs are threads of it, its memory
// is mapped into it. Nothing happens behind the caller's back: the package has
// no global state, installs no signal handler, prints nothing, and a closed
// machine leaves no goroutine, thread or descriptor. The forkvm command runs
// each machine in a process of its own on top of the same packages.
//
// See examples/embed for a complete program.
package forkvm
