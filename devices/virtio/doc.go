// Package virtio is the common part of all virtio devices: the virtio-mmio
// register window (version 2, section 4.2 of the virtio 1.2 specification,
// which all section numbers here refer to), split queues (section 2.7) with
// indirect descriptors and event index, and the goroutine that serves them.
//
// A device package implements Device and hands it to New. What New returns is
// the whole device: a devices.Device for the owner of the machine and a
// devices.Handler for the bus.
//
// # The way of one request
//
// A guest reads a block. Its driver writes descriptors and an entry of the
// available ring to guest memory and, unless told not to, the queue's number
// to the QueueNotify register.
//
//  1. The vCPU thread gets to Transport.Write through devices.Bus.Write.
//     writeRegister calls Notify, which sets the queue's bit in pending, leaves
//     a token in wake and returns: the vCPU goes on.
//  2. The worker, Transport.run, takes the token. serve takes the work lock
//     and calls Device.HandleQueue for each pending queue, through call.
//  3. The device calls Queue.Pop. find compares the available index in guest
//     memory with nextAvail; take copies the head and walk the descriptors,
//     each once, and checks the copies. The result is a Chain: ranges that
//     are known to be RAM.
//  4. The device copies its header out with Chain.ReadAt and lets its backend
//     fill the guest's buffers in place with Chain.AccessWritable.
//  5. Queue.Push writes the used entry and then the used index. The device
//     pops on until Pop finds nothing, has asked for the next notification
//     (askForKick) and still finds nothing.
//  6. Back in call, needsInterrupt decides once for all that was pushed. If
//     the driver wants to hear of it, interrupt sets a bit in InterruptStatus
//     and triggers the line.
//
// # What a hostile driver can do
//
// Stop its own device. A violation of the queue format is a *ProtocolError:
// Transport.fail stops the handlers and sets DEVICE_NEEDS_RESET, and the next
// reset makes a new beginning. Walks are bounded, nothing that was read from
// guest memory is read again, and no lengths are trusted before Check.
//
// # Pause, save, restore
//
// A handler gives back each chain it took, so between two calls of handlers
// nothing is in flight. Pause ends the worker between two calls; Pop helps by
// holding chains back. The saved State is then registers and two indices per
// queue. Resume scans all queues: whether a notification, an interrupt or the
// decision not to send one was lost does not matter.
package virtio
