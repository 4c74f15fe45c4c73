package kvm

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"syscall"
)

// ErrNotSupported is wrapped by errors about something this host's KVM does
// not offer.
var ErrNotSupported = errors.New("not supported by this host's KVM")

// A DeviceError says why the KVM device could not be opened and what would
// help. It wraps the errno, so that errors.Is with [fs.ErrNotExist] and
// [fs.ErrPermission] tells the cases apart.
type DeviceError struct {
	Path string
	Fix  string // what the user can do, one sentence
	Err  error
}

func (e *DeviceError) Error() string {
	return fmt.Sprintf("open %s: %v: %s", e.Path, e.Err, e.Fix)
}

func (e *DeviceError) Unwrap() error { return e.Err }

// deviceError attaches the fix that belongs to err.
func deviceError(path string, err error) error {
	fix := "check that the kernel has KVM"
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENODEV), errors.Is(err, syscall.ENXIO):
		fix = "load the module kvm_intel or kvm_amd; if that is refused, enable virtualization in the firmware, " +
			"or nested virtualization when this is itself a virtual machine"
	case errors.Is(err, fs.ErrPermission):
		fix = "add this user to the group that owns the device (usually kvm) and log in again, or run as root"
	case errors.Is(err, syscall.EBUSY):
		fix = "stop the other hypervisor that uses the processor's virtualization extensions"
	}
	return &DeviceError{Path: path, Fix: fix, Err: err}
}

// A MissingError lists everything a host's KVM lacks that cannot be done
// without. It is an [ErrNotSupported].
type MissingError struct {
	APIVersion   int          // what the host answered; wrong unless 12
	Capabilities []Capability // mandatory ones that are absent
}

func (e *MissingError) Error() string {
	var lacks []string
	if e.APIVersion != APIVersion {
		lacks = append(lacks, fmt.Sprintf("API version %d (has %d)", APIVersion, e.APIVersion))
	}
	for _, c := range e.Capabilities {
		lacks = append(lacks, c.String())
	}
	return "kvm lacks " + strings.Join(lacks, ", ") + ": a newer host kernel is needed"
}

func (e *MissingError) Is(target error) bool { return target == ErrNotSupported }

// An MSRError names the model-specific register at which reading or writing
// a list of them stopped. Those before it in the list are done.
type MSRError struct {
	Write bool
	VCPU  int
	Index uint32
	Value uint64 // what should have been written
}

func (e *MSRError) Error() string {
	if e.Write {
		return fmt.Sprintf("set msr %#x (vcpu %d): value %#x refused", e.Index, e.VCPU, e.Value)
	}
	return fmt.Sprintf("get msr %#x (vcpu %d): not readable", e.Index, e.VCPU)
}

// notSupported is the error for a method whose capability is absent.
func notSupported(verb string, c Capability) error {
	return fmt.Errorf("%s: %w (%v)", verb, ErrNotSupported, c)
}
