package main

import "regexp"

// headers are what the C file includes. asm/kvm_para.h has the CPUID leaves
// and MSRs through which a guest recognises KVM.
var headers = []string{"stddef.h", "linux/kvm.h", "asm/kvm.h", "asm/kvm_para.h"}

// newer is what the oldest headers that the generator works with, those of Linux
// 6.1, lack: taken from the headers of the release that brought it. With headers
// that have it, theirs count.
const newer = `
#include <linux/types.h>
#ifndef KVM_PRE_FAULT_MEMORY // Linux 6.11
#define KVM_CAP_PRE_FAULT_MEMORY 236
#define KVM_PRE_FAULT_MEMORY _IOWR(KVMIO, 0xd5, struct kvm_pre_fault_memory)
struct kvm_pre_fault_memory {
	__u64 gpa;
	__u64 size;
	__u64 flags;
	__u64 padding[5];
};
#endif
`

// A structDef asks for one Go type. Expr is a C type, or an expression whose
// type is meant (the members of kvm_run's union have no names of their own).
type structDef struct{ name, expr string }

var structDefs = []structDef{
	{"Regs", "struct kvm_regs"},
	{"Segment", "struct kvm_segment"},
	{"DescriptorTable", "struct kvm_dtable"},
	{"Sregs", "struct kvm_sregs"},
	{"Sregs2", "struct kvm_sregs2"},
	{"FPU", "struct kvm_fpu"},
	{"LAPIC", "struct kvm_lapic_state"},
	{"MSREntry", "struct kvm_msr_entry"},
	{"CPUIDEntry", "struct kvm_cpuid_entry2"},
	{"XCR", "struct kvm_xcr"},
	{"XCRS", "struct kvm_xcrs"},
	{"DebugRegs", "struct kvm_debugregs"},
	{"ExceptionEvent", "__typeof__(((struct kvm_vcpu_events *)0)->exception)"},
	{"InterruptEvent", "__typeof__(((struct kvm_vcpu_events *)0)->interrupt)"},
	{"NMIEvent", "__typeof__(((struct kvm_vcpu_events *)0)->nmi)"},
	{"SMIEvent", "__typeof__(((struct kvm_vcpu_events *)0)->smi)"},
	{"TripleFaultEvent", "__typeof__(((struct kvm_vcpu_events *)0)->triple_fault)"},
	{"VCPUEvents", "struct kvm_vcpu_events"},
	{"PICState", "struct kvm_pic_state"},
	{"IOAPICState", "struct kvm_ioapic_state"},
	{"IRQChip", "struct kvm_irqchip"},
	{"PITChannelState", "struct kvm_pit_channel_state"},
	{"PITState", "struct kvm_pit_state2"},
	{"ClockData", "struct kvm_clock_data"},

	{"ioExit", "__typeof__(((struct kvm_run *)0)->io)"},
	{"mmioExit", "__typeof__(((struct kvm_run *)0)->mmio)"},
	{"unknownExit", "__typeof__(((struct kvm_run *)0)->hw)"},
	{"failEntryExit", "__typeof__(((struct kvm_run *)0)->fail_entry)"},
	{"internalErrorExit", "__typeof__(((struct kvm_run *)0)->internal)"},
	{"emulationFailure", "__typeof__(((struct kvm_run *)0)->emulation_failure)"},
	{"systemEventExit", "__typeof__(((struct kvm_run *)0)->system_event)"},
	{"msrExit", "__typeof__(((struct kvm_run *)0)->msr)"},
	{"runState", "struct kvm_run"},

	{"userspaceMemoryRegion", "struct kvm_userspace_memory_region"},
	{"irqLevel", "struct kvm_irq_level"},
	{"irqfd", "struct kvm_irqfd"},
	{"ioeventfd", "struct kvm_ioeventfd"},
	{"msi", "struct kvm_msi"},
	{"enableCap", "struct kvm_enable_cap"},
	{"deviceAttr", "struct kvm_device_attr"},
	{"pitConfig", "struct kvm_pit_config"},
	{"mpState", "struct kvm_mp_state"},
	{"interrupt", "struct kvm_interrupt"},
	{"msrsHeader", "struct kvm_msrs"},
	{"msrListHeader", "struct kvm_msr_list"},
	{"cpuidHeader", "struct kvm_cpuid2"},
	{"irqRoutingHeader", "struct kvm_irq_routing"},
	{"irqRoutingEntry", "struct kvm_irq_routing_entry"},
	{"nestedStateHeader", "struct kvm_nested_state"},
	{"preFaultMemory", "struct kvm_pre_fault_memory"},
}

// fieldNames renames what the rules of goName would spoil.
var fieldNames = map[string]string{
	"runState.padding": "Exit", // the union that IOExit and its like overlay
}

// unionMember picks one reading of a union, by the union's name or without
// one; other named unions become bytes.
var unionMember = map[string]string{
	"IOAPICState.redirtbl": "bits",
	"irqLevel.":            "irq",
}

// A constDef turns the macros that match into Go constants.
type constDef struct {
	match  *regexp.Regexp
	except *regexp.Regexp
	strip  string // prefix of the C name that is dropped …
	prefix string // … and what the Go name has instead
	typ    string // Go type, "" for an untyped constant
	names  bool   // emit a table of C names for String methods
}

const foreign = `_(S390|PPC|ARM|MIPS|SPAPR|HYPERV|XEN|RISCV|SEV|PAPR|DCR|OSI|EPR|ARM64|BOOKE|SW_TLB|LOONGARCH)(_|$)`

var constDefs = []constDef{
	{match: regexp.MustCompile(`^KVM_API_VERSION$`), strip: "KVM_", prefix: "", typ: ""},
	{match: regexp.MustCompile(`^KVM_CAP_`), except: regexp.MustCompile(foreign), strip: "KVM_CAP_", prefix: "Cap", typ: "Capability", names: true},
	{match: regexp.MustCompile(`^KVM_EXIT_`), except: regexp.MustCompile(foreign + `|^KVM_EXIT_IO_(IN|OUT)$`), strip: "KVM_EXIT_", prefix: "Exit", typ: "ExitReason", names: true},
	{match: regexp.MustCompile(`^KVM_EXIT_IO_(IN|OUT)$`), strip: "KVM_EXIT_IO_", prefix: "IODirection"},
	{match: regexp.MustCompile(`^KVM_MP_STATE_(RUNNABLE|UNINITIALIZED|INIT_RECEIVED|HALTED|SIPI_RECEIVED|STOPPED|AP_RESET_HOLD)$`), strip: "KVM_MP_STATE_", prefix: "MPState", typ: "MPState", names: true},
	{match: regexp.MustCompile(`^KVM_INTERNAL_ERROR_[A-Z_]*$`), except: regexp.MustCompile(`_FLAG_`), strip: "KVM_INTERNAL_ERROR_", prefix: "InternalError", names: true, typ: "InternalError"},
	{match: regexp.MustCompile(`^KVM_INTERNAL_ERROR_EMULATION_FLAG_`), strip: "KVM_INTERNAL_ERROR_", prefix: "internalError"},
	{match: regexp.MustCompile(`^KVM_SYSTEM_EVENT_(SHUTDOWN|RESET|CRASH)$`), strip: "KVM_SYSTEM_EVENT_", prefix: "SystemEvent"},
	{match: regexp.MustCompile(`^KVM_MEM_(LOG_DIRTY_PAGES|READONLY)$`), strip: "KVM_MEM_", prefix: "Memory"},
	{match: regexp.MustCompile(`^KVM_IRQCHIP_(PIC_MASTER|PIC_SLAVE|IOAPIC)$`), strip: "KVM_", prefix: ""},
	{match: regexp.MustCompile(`^KVM_(NR_IRQCHIPS|IOAPIC_NUM_PINS)$`), strip: "KVM_", prefix: ""},
	{match: regexp.MustCompile(`^KVM_IRQ_ROUTING_(IRQCHIP|MSI)$`), strip: "KVM_", prefix: "", typ: ""},
	{match: regexp.MustCompile(`^KVM_IRQFD_FLAG_`), strip: "KVM_", prefix: ""},
	{match: regexp.MustCompile(`^KVM_IOEVENTFD_FLAG_(DATAMATCH|PIO|DEASSIGN)$`), strip: "KVM_", prefix: ""},
	{match: regexp.MustCompile(`^KVM_PIT_(SPEAKER_DUMMY|FLAGS_.*)$`), strip: "KVM_", prefix: ""},
	{match: regexp.MustCompile(`^KVM_CLOCK_(TSC_STABLE|REALTIME|HOST_TSC)$`), strip: "KVM_", prefix: ""},
	{match: regexp.MustCompile(`^KVM_VCPUEVENT_VALID_`), strip: "KVM_VCPUEVENT_", prefix: "VCPUEvents"},
	{match: regexp.MustCompile(`^KVM_CPUID_FLAG_SIGNIFCANT_INDEX$`), strip: "KVM_", prefix: ""},
	{match: regexp.MustCompile(`^KVM_CPUID_(SIGNATURE|FEATURES)$`), strip: "KVM_", prefix: "Para"},
	{match: regexp.MustCompile(`^KVM_(FEATURE|HINTS)_[A-Z0-9_]*$`), strip: "KVM_", prefix: "Para"},
	{match: regexp.MustCompile(`^MSR_KVM_`), strip: "MSR_KVM_", prefix: "MSRKVM"},
	{match: regexp.MustCompile(`^KVM_X2APIC_API_`), strip: "KVM_", prefix: ""},
	{match: regexp.MustCompile(`^KVM_SREGS2_FLAGS_PDPTRS_VALID$`), strip: "KVM_", prefix: ""},
	{match: regexp.MustCompile(`^KVM_VCPU_TSC_(CTRL|OFFSET)$`), strip: "KVM_", prefix: "attr"},
	{match: regexp.MustCompile(`^KVM_RUN_X86_(SMM|BUS_LOCK)$`), strip: "KVM_", prefix: ""},
	{match: regexp.MustCompile(`^KVM_(` +
		`GET_API_VERSION|CREATE_VM|GET_MSR_INDEX_LIST|CHECK_EXTENSION|GET_VCPU_MMAP_SIZE|GET_SUPPORTED_CPUID|GET_MSR_FEATURE_INDEX_LIST|` +
		`CREATE_VCPU|SET_USER_MEMORY_REGION|SET_TSS_ADDR|SET_IDENTITY_MAP_ADDR|CREATE_IRQCHIP|IRQ_LINE|GET_IRQCHIP|SET_IRQCHIP|` +
		`CREATE_PIT2|GET_PIT2|SET_PIT2|SET_GSI_ROUTING|IRQFD|IOEVENTFD|SET_CLOCK|GET_CLOCK|SIGNAL_MSI|ENABLE_CAP|SET_BOOT_CPU_ID|` +
		`RUN|[GS]ET_(REGS|SREGS|SREGS2|FPU|MSRS|LAPIC|CPUID2|MP_STATE|VCPU_EVENTS|DEBUGREGS|XCRS|NESTED_STATE|TSC_KHZ|DEVICE_ATTR)|` +
		`HAS_DEVICE_ATTR|GET_XSAVE2?|SET_XSAVE|KVMCLOCK_CTRL|NMI|INTERRUPT|PRE_FAULT_MEMORY` +
		`)$`), strip: "KVM_", prefix: "ioctl"},
}

// words are the parts of C names that Go spells in capitals, or otherwise
// than with one capital letter.
var words = map[string]string{
	"api": "API", "apic": "APIC", "lapic": "LAPIC", "x2apic": "X2APIC", "apicbase": "APICBase",
	"vm": "VM", "vcpu": "VCPU", "vcpus": "VCPUs", "cpu": "CPU", "cpuid": "CPUID", "cpuid2": "CPUID2",
	"irqchip": "IRQChip", "irqchips": "IRQChips", "irq": "IRQ", "irqfd": "IRQFD", "ioeventfd": "IOEventFD",
	"ioapic": "IOAPIC", "io": "IO", "mmio": "MMIO", "mmu": "MMU", "msr": "MSR", "msrs": "MSRs", "msi": "MSI",
	"gsi": "GSI", "nmi": "NMI", "smi": "SMI", "smm": "SMM", "tsc": "TSC", "tss": "TSS", "tpr": "TPR",
	"eoi": "EOI", "id": "ID", "fd": "FD", "pit": "PIT", "pit2": "PIT2", "pic": "PIC", "pio": "PIO", "pv": "PV",
	"mp": "MP", "xsave": "XSAVE", "xsave2": "XSAVE2", "xcrs": "XCRS", "xcr": "XCR", "fpu": "FPU", "mce": "MCE",
	"cs": "CS", "ds": "DS", "es": "ES", "fs": "FS", "gs": "GS", "ss": "SS", "tr": "TR", "ldt": "LDT",
	"gdt": "GDT", "idt": "IDT", "cr0": "CR0", "cr2": "CR2", "cr3": "CR3", "cr4": "CR4", "cr8": "CR8",
	"efer": "EFER", "rax": "RAX", "rbx": "RBX", "rcx": "RCX", "rdx": "RDX", "rsi": "RSI", "rdi": "RDI",
	"rsp": "RSP", "rbp": "RBP", "rip": "RIP", "rflags": "RFLAGS", "eax": "EAX", "ebx": "EBX", "ecx": "ECX",
	"edx": "EDX", "dpl": "DPL", "db": "DB", "avl": "AVL", "dr6": "DR6", "dr7": "DR7", "pdptrs": "PDPTRs",
	"fcw": "FCW", "fsw": "FSW", "ftwx": "FTWX", "fpr": "FPR", "xmm": "XMM", "mxcsr": "MXCSR", "ip": "IP", "dp": "DP",
	"irr": "IRR", "imr": "IMR", "isr": "ISR", "elcr": "ELCR", "bcd": "BCD", "ioregsel": "IORegSel", "redirtbl": "RedirTable",
	"nr": "NR", "hw": "HW", "ipi": "IPI", "tlb": "TLB", "khz": "KHz", "kvmclock": "KVMClock", "debugregs": "DebugRegs",
	"sipi": "SIPI", "memslots": "MemSlots", "hlt": "HLT", "rdmsr": "RDMSR", "wrmsr": "WRMSR", "ndata": "NData",
	"longmode": "LongMode", "ctrl": "Ctrl", "sregs2": "Sregs2", "hc": "HC", "gpa": "GPA", "sgx": "SGX", "pmu": "PMU",
	"signifcant": "Significant", "vmexit": "VMExit", "vcpuevent": "VCPUEvents", "datamatch": "DataMatch",
	"pae": "PAE", "init4": "Init4", "phys": "Phys", "insn": "Insn", "memslot": "MemSlot", "unhalt": "Unhalt",
	"ap": "AP", "pf": "PF", "rw": "RW", "nmsrs": "NMSRs", "nent": "NEnt", "hpet": "HPET", "kvm": "KVM", "devid": "DevID", "nop": "NOP",
	"ids": "IDs", "32bit": "32Bit", "resamplefd": "ResampleFD", "intr": "Intr", "ext": "Ext", "dev": "Dev", "uc": "UC", "vapic": "VAPIC",
}
