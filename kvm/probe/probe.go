// Package probe finds out whether a KVM device can run Linux.
//
// That the device opens and has the right capabilities is not enough: there
// are back ends that emulate guest code instruction by instruction, and they
// stop at what a kernel does in its first milliseconds. So this executes such
// instructions in scratch machines and looks at the results.
package probe

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/forkvm/forkvm/kvm"
)

// A Result is the outcome for one instruction or group of instructions.
type Result struct {
	Instruction string // such as "cmpxchg16b"
	Purpose     string // what a Linux kernel does with it
	Err         error  // nil: it does what the manuals say
}

// A Report is what Run found. The zero Report is not OK.
type Report struct {
	Results []Result
	// Speed is the rate of a short loop in instructions per second, 0 if it
	// did not end. Processors reach 10⁹, emulation of a whole machine 10⁸,
	// KVM back ends that interpret guest code 10⁶.
	Speed float64
}

// OK reports whether everything worked.
func (r Report) OK() bool { return len(r.Results) > 0 && len(r.Failed()) == 0 }

// Failed returns the results that did not.
func (r Report) Failed() []Result {
	var failed []Result
	for _, res := range r.Results {
		if res.Err != nil {
			failed = append(failed, res)
		}
	}
	return failed
}

// Err is nil for a report that is OK and an [*UnusableError] otherwise.
func (r Report) Err() error {
	if r.OK() {
		return nil
	}
	return &UnusableError{Report: r}
}

// An UnusableError says that a KVM device opens but cannot run Linux.
type UnusableError struct{ Report Report }

func (e *UnusableError) Error() string {
	var names []string
	for _, f := range e.Report.Failed() {
		names = append(names, f.Instruction)
	}
	if len(names) == 0 {
		return "kvm cannot run linux: nothing was executed"
	}
	return "kvm cannot run linux: guest code stops at " + strings.Join(names, ", ")
}

// Fix is what a user can do about it, one sentence.
func (e *UnusableError) Fix() string {
	return "this device interprets guest code instead of running it on the processor: " +
		"use a machine with hardware virtualization, or nested virtualization if it is a virtual machine itself"
}

// limit is for one program: a few instructions, so anything that takes this
// long hangs. Slow back ends need milliseconds to make a vCPU.
const limit = 5 * time.Second

// Run executes the programs, each in a machine of its own, within tens of
// milliseconds where KVM is sound. It does not hang: a guest that does not
// stop is kicked, and counts as failed. If even the kick does not get the
// thread back, that thread and its machine are abandoned and the rest is not
// tried.
//
// The error is for machines that could not be made, or ctx; what guest code
// did is in the report.
func Run(ctx context.Context, sys *kvm.System) (Report, error) {
	cpuid, err := sys.SupportedCPUID()
	if err != nil {
		return Report{}, fmt.Errorf("probe kvm: %w", err)
	}
	var report Report
	for _, p := range programs() {
		if err := ctx.Err(); err != nil {
			return Report{}, fmt.Errorf("probe kvm: %w", err)
		}
		m, err := newMachine(sys, cpuid, p)
		if err != nil {
			return Report{}, fmt.Errorf("probe kvm: %w", err)
		}
		took, stuck, err := m.execute(ctx)
		report.Results = append(report.Results, Result{p.instruction, p.purpose, err})
		if p.loops > 0 && err == nil {
			report.Speed = float64(2*p.loops) / took.Seconds()
		}
		if stuck {
			break
		}
		if err := m.close(); err != nil {
			return Report{}, fmt.Errorf("probe kvm: %w", err)
		}
	}
	return report, nil
}
