package kvm

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

const devicePath = "/dev/kvm"

// A Capability is a number of KVM_CHECK_EXTENSION.
type Capability uint32

// String is the kernel's name, such as KVM_CAP_IRQCHIP.
func (c Capability) String() string { return nameOr(namesCapability, c, "KVM_CAP") }

func nameOr[K ~uint32](names map[K]string, k K, kind string) string {
	if s, ok := names[k]; ok {
		return s
	}
	return fmt.Sprintf("%s(%d)", kind, uint32(k))
}

// A System is an open KVM device. VMs made from it do not need it any more
// and may outlive it.
type System struct {
	handle
	mmapSize int
}

// Open opens /dev/kvm and checks that it offers everything the other methods
// of this package take for granted. Errors are a [*DeviceError] when the
// device cannot be opened and a [*MissingError] with the complete list when
// it offers too little.
func Open() (*System, error) {
	fd, err := unix.Open(devicePath, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, deviceError(devicePath, err)
	}
	return newSystem(fd)
}

// OpenFile is Open for a device somebody else has opened, such as the parent
// of a confined process. It duplicates the descriptor: f stays the caller's.
func OpenFile(f *os.File) (*System, error) {
	conn, err := f.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("use kvm device (%s): %w", f.Name(), err)
	}
	fd, dupErr := -1, error(nil)
	err = conn.Control(func(from uintptr) {
		fd, dupErr = unix.FcntlInt(from, unix.F_DUPFD_CLOEXEC, 0)
	})
	if err == nil {
		err = dupErr
	}
	if err != nil {
		return nil, fmt.Errorf("duplicate kvm device (%s): %w", f.Name(), err)
	}
	return newSystem(fd)
}

// newSystem owns fd, also when it fails.
func newSystem(fd int) (*System, error) {
	s := &System{handle: handle{fd: fd, kind: "kvm"}}
	if err := s.check(); err != nil {
		s.Close()
		return nil, err
	}
	size, err := s.VCPUMmapSize()
	if err != nil {
		s.Close()
		return nil, err
	}
	s.mmapSize = size
	return s, nil
}

// check compares the host with the mandatory capabilities.
func (s *System) check() error {
	version, err := s.APIVersion()
	if err != nil {
		return err
	}
	missing := MissingError{APIVersion: version}
	for _, c := range mandatory() {
		n, err := s.CheckExtension(c)
		if err != nil {
			return err
		}
		if n == 0 {
			missing.Capabilities = append(missing.Capabilities, c)
		}
	}
	if version != APIVersion || len(missing.Capabilities) > 0 {
		return &missing
	}
	return nil
}

// Close closes the device. VMs stay as they are.
func (s *System) Close() error { return s.close() }

// APIVersion is KVM_GET_API_VERSION: 12 on every kernel since 2.6.22. A
// descriptor that is no KVM device gives an ENOTTY error.
func (s *System) APIVersion() (int, error) {
	n, err := s.number(ioctlGetAPIVersion, 0)
	return n, s.wrap("get api version", err)
}

// CheckExtension is KVM_CHECK_EXTENSION: 0 for absent, otherwise 1 or a
// number with a meaning of its own. Ask [VM.CheckExtension] where the answer
// may depend on the VM.
func (s *System) CheckExtension(c Capability) (int, error) {
	n, err := s.number(ioctlCheckExtension, uintptr(c))
	return n, s.wrap("check "+c.String(), err)
}

// VCPUMmapSize is KVM_GET_VCPU_MMAP_SIZE, the bytes that a vCPU shares with
// its process.
func (s *System) VCPUMmapSize() (int, error) {
	n, err := s.number(ioctlGetVCPUMmapSize, 0)
	if err == nil && n < runStateSize {
		err = fmt.Errorf("%d bytes are less than the kvm_run structure", n)
	}
	return n, s.wrap("get vcpu mmap size", err)
}

// CreateVM is KVM_CREATE_VM: an empty machine without memory, interrupt
// controllers or processors. It can take tens of milliseconds on some hosts.
func (s *System) CreateVM() (*VM, error) {
	// The kernel takes locks here that a pending signal interrupts, before
	// anything has been made.
	fd, err := retry(func() (int, error) { return s.number(ioctlCreateVM, 0) })
	if err != nil {
		return nil, s.wrap("create vm", err)
	}
	vm := &VM{handle: handle{fd: fd, kind: "vm"}, mmapSize: s.mmapSize}
	if err := vm.readSizes(); err != nil {
		vm.Close()
		return nil, err
	}
	return vm, nil
}
