// Package platform holds the devices of the machine that are not virtio: the serial console, the power and panic
// registers, and the VM generation id.
//
// They answer plain port accesses on the vCPU thread that made them, so each has its own mutex and does bounded work
// under it. Nothing here starts a VM, stops one or knows what an exit is: a device that has news calls a function from its
// Config.
//
// There is no clock chip, no keyboard controller and no PCI configuration port. The ACPI tables describe a
// hardware-reduced machine whose FADT says that the first two are absent, Linux then leaves them alone, and its PCI probe
// gives up when it reads all-ones, which is what an unclaimed port answers.
package platform

import (
	"fmt"

	"github.com/forkvm/forkvm/devices"
)

// decodeState parses the saved state of the device of this ID.
func decodeState[S any](id string, saved *devices.Remembered[S], data []byte) (S, error) {
	state, err := saved.Decode(data, devices.DecodeState[S])
	if err != nil {
		return state, fmt.Errorf("decode state (%s): %w", id, err)
	}
	return state, nil
}
