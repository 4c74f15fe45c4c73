package boot

import (
	"github.com/forkvm/forkvm/vmm/boot/acpi"
	"github.com/forkvm/forkvm/vmm/memory"
)

// Where in guest-physical memory the boot information is. All of it lies in
// RAM below 640 KiB, which the kernel leaves alone until it has read it.
const (
	startInfoAddress = 0x6000
	modulesAddress   = 0x6040
	memoryMapAddress = 0x7000
	commandLine      = 0x20000
)

const (
	lowRAMEnd     = 0x9fc00  // the extended BIOS data area of a PC begins here
	kernelMin     = 0x100000 // lowest address of a kernel segment: the first MiB is a PC's
	initrdHighEnd = 1 << 31  // highest end of an initrd that all kernels accept
)

// RangeType says what a range of guest-physical memory is for. The numbers are
// those of the PC's "E820" map, which PVH uses too.
type RangeType uint32

// Types of memory.
const (
	RAM      RangeType = 1
	Reserved RangeType = 2
	ACPI     RangeType = 3 // tables; the kernel may use the memory when it has read them
)

// Range is an entry of the map that the kernel gets.
type Range struct {
	Start, Size uint64 // bytes, guest-physical
	Type        RangeType
}

// MemoryMap returns the kernel's map of a memory with the given regions: all of
// it is RAM, except for what lies between 639 KiB and 1 MiB.
func MemoryMap(regions []memory.Region) []Range {
	ranges := []Range{
		{Start: 0, Size: lowRAMEnd, Type: RAM},
		{Start: lowRAMEnd, Size: acpi.TablesAddress - lowRAMEnd, Type: Reserved}, // has the generation id
		{Start: acpi.TablesAddress, Size: acpi.TablesEnd - acpi.TablesAddress, Type: ACPI},
		{Start: acpi.TablesEnd, Size: kernelMin - acpi.TablesEnd, Type: Reserved},
		{Start: kernelMin, Size: regions[0].Size - kernelMin, Type: RAM},
	}
	for _, r := range regions[1:] {
		ranges = append(ranges, Range{Start: r.GuestPhys, Size: r.Size, Type: RAM})
	}
	return ranges
}
