// Package failure holds the errors that cross a border: from a VM process to the
// command that started it, and from a command to the program that called it.
// Their codes are stable words, so that a caller can branch on them.
package failure

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Code is a stable word for what went wrong.
type Code string

const (
	InvalidArgument     Code = "invalid_argument"
	VMNotFound          Code = "vm_not_found"
	VMExists            Code = "vm_exists"
	VMNotRunning        Code = "vm_not_running"
	VMProcessGone       Code = "vm_process_gone"
	VMReset             Code = "vm_reset" // the vm was reset before what was asked was done
	ImageNotFound       Code = "image_not_found"
	ImageExists         Code = "image_exists"
	ImageInvalid        Code = "image_invalid"
	SnapshotNotFound    Code = "snapshot_not_found"
	SnapshotExists      Code = "snapshot_exists"
	SnapshotCorrupt     Code = "snapshot_corrupt"
	SnapshotUnsupported Code = "snapshot_unsupported" // another version, or a CPU feature that this host lacks
	RolloutNotFound     Code = "rollout_not_found"
	RecordDamaged       Code = "record_damaged" // a journal, or what it speaks of, is not what was written
	KVMUnusable         Code = "kvm_unusable"
	NoPermission        Code = "no_permission"
	NoSpace             Code = "no_space"
	NoMemory            Code = "no_memory"
	MemoryLimit         Code = "memory_limit"        // the control group's could be exceeded; nothing was done
	NetworkUnenforced   Code = "network_unenforced"  // the kernel cannot enforce network policies here
	NetworkUnavailable  Code = "network_unavailable" // network cards cannot have TAP devices here
	GuestEnded          Code = "guest_ended"         // the guest ended before what was asked could be done
	GuestNotReady       Code = "guest_not_ready"
	IdentityUnconfirmed Code = "identity_unconfirmed"
	Cancelled           Code = "cancelled"
	Internal            Code = "internal"
)

// Error is an error with a code. Its JSON form is the "error" object of the
// command line and of the VM process.
type Error struct {
	Code    Code   `json:"code"`
	Message string `json:"message"`
	// Retryable: the same call may succeed later without a change by the caller.
	Retryable bool `json:"retryable"`
	// Memory says more about MemoryLimit.
	Memory *Memory `json:"memory,omitempty"`

	cause error
}

// Memory is the limit of a control group, and what was asked for.
type Memory struct {
	Group string `json:"group"`
	Limit uint64 `json:"limit_bytes"`
	Used  uint64 `json:"used_bytes"` // what the kernel cannot take back
	Need  uint64 `json:"need_bytes"` // beside it
}

func (e *Error) Error() string { return e.Message }
func (e *Error) Unwrap() error { return e.cause }

// New returns an error of this code. The format may wrap a cause with %w.
func New(code Code, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{Code: code, Message: err.Error(), Retryable: code.retryable(), cause: errors.Unwrap(err)}
}

// As gives err a code: its own if it or what it wraps has one, else one that
// follows from what the operating system said, else code.
func As(code Code, err error) *Error {
	var have *Error
	if errors.As(err, &have) {
		if have.Message == err.Error() {
			return have
		}
		return &Error{Code: have.Code, Message: err.Error(), Retryable: have.Retryable, Memory: have.Memory, cause: err}
	}
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		code = NoSpace
	case errors.Is(err, unix.ENOMEM):
		code = NoMemory
	case errors.Is(err, os.ErrPermission):
		code = NoPermission
	case errors.Is(err, context.Canceled):
		code = Cancelled
	}
	return &Error{Code: code, Message: err.Error(), Retryable: code.retryable(), cause: err}
}

// Is reports whether err, or what it wraps, has this code.
func Is(err error, code Code) bool {
	var e *Error
	return errors.As(err, &e) && e.Code == code
}

func (c Code) retryable() bool {
	switch c {
	case NoSpace, NoMemory, MemoryLimit, GuestNotReady, VMProcessGone, Cancelled:
		return true
	}
	return false
}
