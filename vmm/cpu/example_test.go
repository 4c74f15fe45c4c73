package cpu_test

import (
	"errors"
	"fmt"

	"github.com/forkvm/forkvm/kvm"
	"github.com/forkvm/forkvm/vmm/cpu"
)

// One vCPU's state goes from its file into a new VM. The machine's memory and
// interrupt chips are there already.
func ExamplePolicy_Restore() {
	restore := func(policy *cpu.Policy, vcpu *kvm.VCPU, data []byte) error {
		var state cpu.State
		if err := state.UnmarshalBinary(data); err != nil {
			return err
		}
		if err := policy.Prepare(vcpu, vcpu.ID()); err != nil {
			return err
		}
		err := policy.Restore(vcpu, &state)
		var incompatible *cpu.IncompatibleError
		if errors.As(err, &incompatible) {
			fmt.Println("take a machine that has", incompatible.Features)
		}
		return err
	}
	_ = restore
}
