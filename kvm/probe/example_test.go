package probe_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/forkvm/forkvm/kvm"
	"github.com/forkvm/forkvm/kvm/probe"
)

// A program that is about to start VMs finds out whether it can, and says
// what to do if not.
func ExampleRun() {
	sys, err := kvm.Open()
	if err != nil {
		fmt.Println(err)
		return
	}
	defer sys.Close()
	report, err := probe.Run(context.Background(), sys)
	if err != nil {
		fmt.Println(err)
		return
	}
	var unusable *probe.UnusableError
	if errors.As(report.Err(), &unusable) {
		fmt.Println(unusable, "-", unusable.Fix())
		for _, f := range report.Failed() {
			fmt.Printf("%s (%s): %v\n", f.Instruction, f.Purpose, f.Err)
		}
	}
}
