package cpu

import (
	"fmt"

	"github.com/forkvm/forkvm/kvm"
)

// A featureWord is a CPUID register whose bits are features, with the names
// that /proc/cpuinfo of Linux 6.12 gives them, or its source where cpuinfo
// does not show them.
type featureWord struct {
	function, index uint32
	register        register
	names           [32]string
}

// ignoredBits is what two machines may differ in: bits that follow the guest's
// own control registers, those this package sets whatever the host says,
// copies on AMD of bits of leaf 1, and two that are set where something is
// missing (leaf 7 ebx: fdp_excptn_only, zero_fcs_fds).
func ignoredBits(w featureWord) uint32 {
	switch {
	case w.function == 1 && w.register == ecx:
		return featureOSXSAVE | featureHypervisor | featureTSCDeadline
	case w.function == 1 && w.register == edx:
		return featureAPIC | featureHT
	case w.function == 7 && w.index == 0 && w.register == ebx:
		return 1<<6 | 1<<13
	case w.function == 7 && w.index == 0 && w.register == ecx:
		return 1 << 4 // ospke
	case w.function == 0x80000001 && w.register == ecx:
		return 1 << 1 // cmp_legacy
	case w.function == 0x80000001 && w.register == edx:
		return 0x0183f3ff
	}
	return 0
}

// name is how the user knows a bit.
func (w featureWord) name(bit int) string {
	if n := w.names[bit]; n != "" {
		return n
	}
	return fmt.Sprintf("cpuid:%#x:%d:%v:%d", w.function, w.index, w.register, bit)
}

// featureWords is in the order of leaves, which is the order of errors.
func featureWords() []featureWord {
	return []featureWord{
		{0x1, 0, ecx, [32]string{
			0: "pni", 1: "pclmulqdq", 2: "dtes64", 3: "monitor", 4: "ds_cpl", 5: "vmx", 6: "smx", 7: "est",
			8: "tm2", 9: "ssse3", 10: "cid", 11: "sdbg", 12: "fma", 13: "cx16", 14: "xtpr", 15: "pdcm", 17: "pcid",
			18: "dca", 19: "sse4_1", 20: "sse4_2", 21: "x2apic", 22: "movbe", 23: "popcnt",
			24: "tsc_deadline_timer", 25: "aes", 26: "xsave", 27: "osxsave", 28: "avx", 29: "f16c", 30: "rdrand",
			31: "hypervisor",
		}},
		{0x1, 0, edx, [32]string{
			0: "fpu", 1: "vme", 2: "de", 3: "pse", 4: "tsc", 5: "msr", 6: "pae", 7: "mce", 8: "cx8", 9: "apic",
			11: "sep", 12: "mtrr", 13: "pge", 14: "mca", 15: "cmov", 16: "pat", 17: "pse36", 18: "pn",
			19: "clflush", 21: "dts", 22: "acpi", 23: "mmx", 24: "fxsr", 25: "sse", 26: "sse2", 27: "ss", 28: "ht",
			29: "tm", 30: "ia64", 31: "pbe",
		}},
		{0x6, 0, eax, [32]string{
			0: "dtherm", 1: "ida", 2: "arat", 4: "pln", 6: "pts", 7: "hwp", 8: "hwp_notify", 9: "hwp_act_window",
			10: "hwp_epp", 11: "hwp_pkg_req", 15: "hwp_highest_perf_change", 19: "hfi",
		}},
		{0x7, 0, ebx, [32]string{
			0: "fsgsbase", 1: "tsc_adjust", 2: "sgx", 3: "bmi1", 4: "hle", 5: "avx2",
			7: "smep", 8: "bmi2", 9: "erms", 10: "invpcid", 11: "rtm", 12: "cqm", 14: "mpx",
			15: "rdt_a", 16: "avx512f", 17: "avx512dq", 18: "rdseed", 19: "adx", 20: "smap", 21: "avx512ifma",
			23: "clflushopt", 24: "clwb", 25: "intel_pt", 26: "avx512pf", 27: "avx512er", 28: "avx512cd",
			29: "sha_ni", 30: "avx512bw", 31: "avx512vl",
		}},
		{0x7, 0, ecx, [32]string{
			1: "avx512vbmi", 2: "umip", 3: "pku", 4: "ospke", 5: "waitpkg", 6: "avx512_vbmi2", 7: "shstk",
			8: "gfni", 9: "vaes", 10: "vpclmulqdq", 11: "avx512_vnni", 12: "avx512_bitalg", 13: "tme",
			14: "avx512_vpopcntdq", 16: "la57", 22: "rdpid", 24: "bus_lock_detect", 25: "cldemote", 27: "movdiri",
			28: "movdir64b", 29: "enqcmd", 30: "sgx_lc",
		}},
		{0x7, 0, edx, [32]string{
			2: "avx512_4vnniw", 3: "avx512_4fmaps", 4: "fsrm", 8: "avx512_vp2intersect", 9: "srbds_ctrl",
			10: "md_clear", 11: "rtm_always_abort", 13: "tsx_force_abort", 14: "serialize", 15: "hybrid_cpu",
			16: "tsxldtrk", 18: "pconfig", 19: "arch_lbr", 20: "ibt", 22: "amx_bf16", 23: "avx512_fp16",
			24: "amx_tile", 25: "amx_int8", 26: "spec_ctrl", 27: "intel_stibp", 28: "flush_l1d",
			29: "arch_capabilities", 30: "core_capabilities", 31: "spec_ctrl_ssbd",
		}},
		{0x7, 1, eax, [32]string{
			4: "avx_vnni", 5: "avx512_bf16", 7: "cmpccxadd", 8: "arch_perfmon_ext", 10: "fzrm", 11: "fsrs",
			12: "fsrc", 17: "fred", 18: "lkgs", 19: "wrmsrns", 21: "amx_fp16", 23: "avx_ifma", 26: "lam",
		}},
		{0xd, 1, eax, [32]string{
			0: "xsaveopt", 1: "xsavec", 2: "xgetbv1", 3: "xsaves", 4: "xfd",
		}},
		{0x80000001, 0, ecx, [32]string{
			0: "lahf_lm", 1: "cmp_legacy", 2: "svm", 3: "extapic", 4: "cr8_legacy", 5: "abm", 6: "sse4a",
			7: "misalignsse", 8: "3dnowprefetch", 9: "osvw", 10: "ibs", 11: "xop", 12: "skinit", 13: "wdt",
			15: "lwp", 16: "fma4", 17: "tce", 19: "nodeid_msr", 21: "tbm", 22: "topoext", 23: "perfctr_core",
			24: "perfctr_nb", 26: "bpext", 27: "ptsc", 28: "perfctr_llc", 29: "mwaitx",
		}},
		{0x80000001, 0, edx, [32]string{
			11: "syscall", 19: "mp", 20: "nx", 22: "mmxext", 25: "fxsr_opt", 26: "pdpe1gb", 27: "rdtscp", 29: "lm",
			30: "3dnowext", 31: "3dnow",
		}},
		{0x80000007, 0, ebx, [32]string{
			0: "overflow_recov", 1: "succor", 3: "smca",
		}},
		{0x80000008, 0, ebx, [32]string{
			0: "clzero", 1: "irperf", 2: "xsaveerptr", 4: "rdpru", 9: "wbnoinvd", 12: "amd_ibpb", 14: "amd_ibrs",
			15: "amd_stibp", 17: "amd_stibp_always_on", 23: "amd_ppin", 24: "amd_ssbd", 25: "virt_ssbd",
			26: "amd_ssb_no", 27: "cppc", 28: "amd_psfd", 29: "btc_no", 30: "amd_ibpb_ret", 31: "brs",
		}},
		{0x8000000a, 0, edx, [32]string{
			0: "npt", 1: "lbrv", 2: "svm_lock", 3: "nrip_save", 4: "tsc_scale", 5: "vmcb_clean", 6: "flushbyasid",
			7: "decodeassists", 10: "pausefilter", 12: "pfthreshold", 13: "avic", 15: "v_vmsave_vmload", 16: "vgif",
			18: "x2avic", 20: "v_spec_ctrl", 25: "vnmi", 28: "svme_addr_chk",
		}},
		{0x8000001f, 0, eax, [32]string{
			0: "sme", 1: "sev", 2: "vm_page_flush", 3: "sev_es", 4: "sev_snp", 9: "v_tsc_aux", 10: "sme_coherent",
			14: "debug_swap", 28: "svsm", 30: "hv_inuse_wr_allowed",
		}},
		{0x80000021, 0, eax, [32]string{
			0: "no_nested_data_bp", 1: "wrmsr_xx_base_ns", 2: "lfence_rdtsc", 5: "verw_clear",
			6: "null_sel_clr_base", 8: "autoibrs", 9: "no_smm_ctl_msr", 27: "sbpb", 28: "ibpb_brtype",
			29: "srso_no", 30: "srso_user_kernel_no", 31: "srso_bp_spec_reduce",
		}},
		{kvm.ParaCPUIDFeatures, 0, eax, [32]string{
			0: "kvmclock_old", 1: "kvm_nopiodelay", 2: "kvm_mmu", 3: "kvmclock", 4: "kvm_asyncpf", 5: "kvm_steal_time",
			6: "kvm_pv_eoi", 7: "kvm_pv_unhalt", 9: "kvm_pv_tlb_flush", 10: "kvm_asyncpf_vmexit", 11: "kvm_pv_ipi",
			12: "kvm_poll_control", 13: "kvm_pv_sched_yield", 14: "kvm_asyncpf_int", 15: "kvm_msi_ext_dest_id",
			16: "kvm_hc_map_gpa_range", 17: "kvm_migration_control", 24: "kvmclock_stable_bit",
		}},
	}
}
