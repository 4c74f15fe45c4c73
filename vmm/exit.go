package vmm

import (
	"fmt"
	"slices"
	"strings"
)

// Reason says why a machine ended. The values are stable words: they appear in
// reports and in the command line's JSON.
type Reason string

const (
	// ReasonShutdown: the guest powered itself off.
	ReasonShutdown Reason = "shutdown"
	// ReasonReset: the guest asked for a reset; forkvm does not reboot in place.
	ReasonReset Reason = "reset"
	// ReasonGuestPanic: the guest kernel panicked.
	ReasonGuestPanic Reason = "guest_panic"
	// ReasonTripleFault: a vCPU shut down because it could not deliver an exception.
	ReasonTripleFault Reason = "triple_fault"
	// ReasonUnknownExit: KVM returned an exit that this program does not handle.
	ReasonUnknownExit Reason = "unknown_exit"
	// ReasonInternalError: KVM could not go on (KVM_EXIT_INTERNAL_ERROR), for
	// example because it could not emulate an instruction.
	ReasonInternalError Reason = "kvm_internal_error"
	// ReasonEntryFailed: the processor refused the guest's state.
	ReasonEntryFailed Reason = "entry_failed"
	// ReasonHostError: a system call or a device of the host failed.
	ReasonHostError Reason = "host_error"
	// ReasonResetFailed: the machine was being put back to a snapshot, and what
	// is left of it is neither the one nor the other.
	ReasonResetFailed Reason = "reset_failed"
	// ReasonKilled: the owner ended the machine.
	ReasonKilled Reason = "killed"
)

// Orderly reports whether the guest, or the owner, ended the machine on purpose.
func (r Reason) Orderly() bool {
	return r == ReasonShutdown || r == ReasonReset || r == ReasonKilled
}

// Exit is the report of a machine's end.
type Exit struct {
	Reason Reason `json:"reason"`
	// VCPU is the index of the vCPU on which the end was noticed, -1 if none.
	VCPU int `json:"vcpu"`
	// Detail says what was seen, in words: an exit number, a suberror, an errno.
	Detail string `json:"detail,omitempty"`
	// Registers is a dump of VCPU's registers, for ends that are not orderly.
	Registers string `json:"registers,omitempty"`
	// Console holds the last lines of the serial console.
	Console []string `json:"console,omitempty"`
}

// Error makes an Exit that is not orderly usable as an error.
func (e *Exit) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "vm ended: %s", e.Reason)
	if e.Detail != "" {
		fmt.Fprintf(&b, " (%s)", e.Detail)
	}
	if n := len(e.Console); n > 0 {
		fmt.Fprintf(&b, "; last console line: %q", e.Console[n-1])
	}
	return b.String()
}

// panicLine is how every Linux kernel begins the report of a panic
// (kernel/panic.c).
const panicLine = "Kernel panic - not syncing"

// reportLines is how many lines of the console a report has at most.
const reportLines = 20

// refine turns a reset or a triple fault into a guest panic when the console
// says that the kernel panicked. A kernel that panics before its pvpanic driver
// is there has no other way to tell us. It also cuts the console to what a
// report should show: the last lines, or those from the panic on.
func (e *Exit) refine() {
	panicked := slices.IndexFunc(e.Console, func(line string) bool { return strings.Contains(line, panicLine) })
	start := max(0, len(e.Console)-reportLines)
	switch {
	case panicked < 0:
	case e.Reason == ReasonReset, e.Reason == ReasonTripleFault, e.Reason == ReasonGuestPanic:
		e.Reason = ReasonGuestPanic
		line := e.Console[panicked]
		e.Detail = line[strings.Index(line, panicLine):]
		start = min(start, panicked)
	}
	e.Console = e.Console[start:min(start+reportLines, len(e.Console))]
}
