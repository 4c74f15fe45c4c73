package cpu

import (
	"slices"

	"github.com/forkvm/forkvm/kvm"
)

// A hidden entry takes bits away from what the host supports.
type hidden struct {
	function, index uint32
	register        register
	bits            uint32
}

// hiddenFeatures are features that a snapshot cannot carry, or that make one
// depend on the machine it was taken on, with nothing in it for a guest here.
func hiddenFeatures() []hidden {
	return []hidden{
		// Performance counters, debug store, tracing and branch records: they
		// count or write outside what is saved.
		{1, 0, ecx, 1<<2 | 1<<4 | 1<<15},                    // dtes64, ds_cpl, pdcm
		{1, 0, edx, 1 << 21},                                // dts
		{7, 0, ebx, 1<<12 | 1<<15 | 1<<25},                  // cqm, rdt_a, intel_pt
		{7, 0, edx, 1 << 19},                                // arch_lbr
		{7, 1, eax, 1 << 8},                                 // arch_perfmon_ext
		{0x80000001, 0, ecx, 1<<10 | 1<<15 | 1<<23 | 1<<24}, // ibs, lwp, perfctr_core, perfctr_nb
		{0x80000001, 0, ecx, 1<<27 | 1<<28},                 // ptsc, perfctr_llc
		{0x80000008, 0, ebx, 1<<1 | 1<<31},                  // irperf, brs
		// Enclaves and encrypted memory: not readable from outside.
		{7, 0, ebx, 1 << 2},  // sgx
		{7, 0, ecx, 1 << 30}, // sgx_lc
		{7, 0, edx, 1 << 18}, // pconfig
		// A guest's own guests: large hidden state, and a large surface.
		{1, 0, ecx, 1<<5 | 1<<6},           // vmx, smx
		{0x80000001, 0, ecx, 1<<2 | 1<<12}, // svm, skinit
		// The host's power management, and idling that keeps a host core busy.
		{1, 0, ecx, 1<<3 | 1<<7 | 1<<8},    // monitor, est, tm2
		{1, 0, edx, 1<<22 | 1<<29 | 1<<31}, // acpi, tm, pbe
		{0x80000001, 0, ecx, 1 << 29},      // mwaitx
		// Which kind of core the thread was on.
		{7, 0, edx, 1 << 15}, // hybrid_cpu
		// Work submission to host devices.
		{7, 0, ecx, 1 << 29}, // enqcmd
		// A page fault that KVM is serving while the vCPU is saved is in no saved
		// state: the task that waits for it would wait for ever in a clone.
		{kvm.ParaCPUIDFeatures, 0, eax, 1<<kvm.ParaFeatureAsyncPF | 1<<kvm.ParaFeatureAsyncPFVMExit | 1<<kvm.ParaFeatureAsyncPFInt},
		// Only for encrypted guests, and for I/O APICs outside the kernel.
		{kvm.ParaCPUIDFeatures, 0, eax, 1<<kvm.ParaFeatureMigrationControl | 1<<kvm.ParaFeatureHCMapGPARange | 1<<kvm.ParaFeatureMSIExtDestID},
	}
}

// hiddenLeaves describe what hiddenFeatures took away.
func hiddenLeaves() []uint32 {
	return []uint32{
		0xa,       // architectural performance monitoring
		0xf, 0x10, // resource monitoring and allocation
		0x12,       // enclaves
		0x14,       // processor trace
		0x1a,       // hybrid information
		0x1c,       // branch records
		0x23,       // extended performance monitoring
		0x8000000a, // SVM
		0x8000001b, // instruction-based sampling
		0x8000001f, // memory encryption
		0x80000022, // extended performance monitoring
	}
}

// hide applies both lists. Leaves that are absent, and within the highest
// leaf's number, read as zero; so do those that are nothing but zeros, which
// KVM need not search and a snapshot need not carry.
func hide(c cpuid) cpuid {
	for _, h := range hiddenFeatures() {
		if e := c.find(h.function, h.index); e != nil {
			*h.register.of(e) &^= h.bits
		}
	}
	leaves := hiddenLeaves()
	return slices.DeleteFunc(c, func(e kvm.CPUIDEntry) bool {
		return slices.Contains(leaves, e.Function) || e.EAX|e.EBX|e.ECX|e.EDX == 0
	})
}
