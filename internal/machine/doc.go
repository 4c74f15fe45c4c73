// Package machine puts a complete virtual machine together: guest RAM, the
// monitor of package vmm, every device, the disks' layers and the guest agent's
// connection. It is the one place that names every concrete device.
//
// A machine begins in one of two ways, from a kernel or from a Checkpoint, and
// both go through New: devices are constructed from the same list, with or
// without saved state. Checkpoint stops a machine for a moment and returns what
// the next one begins from; a fork uses it at once, a snapshot is the same
// Checkpoint written into a store.
package machine
