// Package virtiotest tests virtio devices from the guest's side: a mock driver
// that sets up queues in guest memory and drives the register window, and a
// suite (Run) that every device passes: initialisation, reset, save and
// restore in the middle of requests, hostile drivers, register storms.
//
// The driver waits for interrupts and never polls on a timer, so that a lost
// notification or interrupt shows as a failed test.
package virtiotest
