// Package devices is what every emulated device and the virtual machine
// monitor agree on: how a device's register window is reached (Handler, Bus),
// how it interrupts the guest (Interrupt) and how its life goes (Device).
//
// # Life of a device
//
// A constructor takes configuration and, optionally, saved state, and returns
// a paused device: cold boot and restore are the same path. Host handles
// (backends, sockets, interrupt lines) always come from the configuration and
// never from the state. The state is hostile input: the constructor passes it
// through the checks that a guest's own register writes pass through.
//
//	New ──> paused ──Resume──> running
//	          ^  │               │
//	          │  ├─Save          │
//	          │  └─Restore       │
//	          └──────Pause───────┘
//
// Close works in either state.
//
// The owner of the machine stops its vCPUs before it pauses devices and
// resumes devices before it lets vCPUs run; a device has to stand register
// accesses in any state all the same.
package devices
