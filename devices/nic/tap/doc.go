// Package tap is a network behind a guest's card that the kernel makes: a TAP device, whose frames go on as they are. What the
// guest may reach is decided and enforced outside of this process, by programs at the device (internal/tapnet); this package
// has the device's descriptor, tells what the programs have counted and refused, and has connections end that did not follow
// the guest into a clone.
//
// # Inside
//
// Everything runs on the device's worker, see nic.Backend, except for a goroutine that waits for the TAP when there was nothing to
// be read. Frames wait in the TAP's own queue; of each only the header is copied once more.
package tap
