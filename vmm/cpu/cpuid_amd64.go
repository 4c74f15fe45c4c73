package cpu

import (
	"bytes"
	"encoding/binary"
	"math/bits"
	"slices"

	"github.com/forkvm/forkvm/kvm"
)

// A cpuid is a table of CPUID leaves.
type cpuid []kvm.CPUIDEntry

// A register is one of the four that a CPUID leaf fills.
type register int

const (
	eax register = iota
	ebx
	ecx
	edx
)

func (r register) String() string { return [...]string{"eax", "ebx", "ecx", "edx"}[r] }

// of is the register's place in an entry.
func (r register) of(e *kvm.CPUIDEntry) *uint32 {
	return [...]*uint32{&e.EAX, &e.EBX, &e.ECX, &e.EDX}[r]
}

// find returns the entry of a leaf, nil if there is none.
func (c cpuid) find(function, index uint32) *kvm.CPUIDEntry {
	for i := range c {
		if c[i].Function == function && c[i].Index == index {
			return &c[i]
		}
	}
	return nil
}

// value is a register of a leaf, 0 if there is no such leaf.
func (c cpuid) value(function, index uint32, r register) uint32 {
	if e := c.find(function, index); e != nil {
		return *r.of(e)
	}
	return 0
}

// vendor is the 12-letter name in leaf 0.
func (c cpuid) vendor() string {
	e := c.find(0, 0)
	if e == nil {
		return ""
	}
	b := binary.LittleEndian.AppendUint32(nil, e.EBX)
	b = binary.LittleEndian.AppendUint32(b, e.EDX)
	b = binary.LittleEndian.AppendUint32(b, e.ECX)
	return string(bytes.TrimRight(b, "\x00"))
}

func (c cpuid) isAMD() bool {
	v := c.vendor()
	return v == "AuthenticAMD" || v == "HygonGenuine"
}

// drop removes all entries of a leaf.
func (c cpuid) drop(function uint32) cpuid {
	return slices.DeleteFunc(c, func(e kvm.CPUIDEntry) bool { return e.Function == function })
}

// Bits of leaf 1, Intel SDM volume 2, CPUID.
const (
	featureTSCDeadline = 1 << 24 // ecx
	featureOSXSAVE     = 1 << 27 // ecx, follows CR4
	featureHypervisor  = 1 << 31 // ecx
	featureAPIC        = 1 << 9  // edx, follows the APIC base
	featureHT          = 1 << 28 // edx, ebx says how many
)

// guestCPUID is the table of vCPU id, of cpus, made from what the host
// supports.
func guestCPUID(supported cpuid, id, cpus int) cpuid {
	c := slices.Clone(supported)
	c = hide(c)
	if e := c.find(1, 0); e != nil {
		// KVM has both for every guest with a local APIC in the kernel; it leaves
		// announcing them to us.
		e.ECX |= featureHypervisor | featureTSCDeadline
	}
	return topology(c, uint32(id), uint32(cpus))
}

// topology describes one package of cpus cores of one thread each, whose APIC
// ids are 0 to cpus-1, in all the places where a guest may look.
func topology(c cpuid, id, cpus uint32) cpuid {
	shift := uint32(bits.Len32(cpus - 1)) // of the core number in an APIC id
	if e := c.find(1, 0); e != nil {
		e.EBX = e.EBX&0x0000ffff | cpus<<16 | id<<24
		e.EDX &^= featureHT
		if cpus > 1 {
			e.EDX |= featureHT
		}
	}
	c = extendedTopology(c, 0xb, id, cpus, shift)
	if c.find(0x1f, 0) != nil {
		c = extendedTopology(c, 0x1f, id, cpus, shift)
	}
	if c.isAMD() {
		return amdTopology(c, id, cpus, shift)
	}
	return intelCaches(c, cpus, shift)
}

// extendedTopology fills leaf 0xb or 0x1f: a thread level, a core level, and
// the end.
func extendedTopology(c cpuid, function, id, cpus, shift uint32) cpuid {
	c = c.drop(function)
	level := func(index, eax, ebx, kind uint32) {
		c = append(c, kvm.CPUIDEntry{
			Function: function, Index: index, Flags: kvm.CPUIDFlagSignificantIndex,
			EAX: eax, EBX: ebx, ECX: kind<<8 | index, EDX: id,
		})
	}
	level(0, 0, 1, 1)
	level(1, shift, cpus, 2)
	level(2, 0, 0, 0)
	if e := c.find(0, 0); e != nil {
		e.EAX = max(e.EAX, function)
	}
	return c
}

// intelCaches corrects leaf 4: who shares a cache, and how many cores there
// may be. The last level belongs to all, the others to one core.
func intelCaches(c cpuid, cpus, shift uint32) cpuid {
	for i := range c {
		e := &c[i]
		if e.Function != 4 || e.EAX&0x1f == 0 {
			continue
		}
		sharing := uint32(0)
		if level := e.EAX >> 5 & 7; level >= 3 {
			sharing = 1<<shift - 1
		}
		cores := min(uint32(1)<<shift-1, 0x3f)
		e.EAX = e.EAX&0x3fff | sharing<<14 | cores<<26
	}
	return c
}

// amdTopology fills the AMD leaves, APM volume 3, appendix E.4.
func amdTopology(c cpuid, id, cpus, shift uint32) cpuid {
	const cmpLegacy = 1 << 1 // leaf 1 counts cores, not threads
	if e := c.find(0x80000001, 0); e != nil {
		e.ECX &^= cmpLegacy
		if cpus > 1 {
			e.ECX |= cmpLegacy
		}
	}
	if e := c.find(0x80000008, 0); e != nil {
		e.ECX = e.ECX&^0xf0ff | (cpus-1)&0xff | shift<<12
	}
	for i := range c {
		e := &c[i]
		if e.Function != 0x8000001d || e.EAX&0x1f == 0 {
			continue
		}
		sharing := uint32(0)
		if level := e.EAX >> 5 & 7; level >= 3 {
			sharing = cpus - 1
		}
		e.EAX = e.EAX&^(0xfff<<14) | sharing<<14
	}
	const topologyExtensions = 1 << 22
	if c.value(0x80000001, 0, ecx)&topologyExtensions != 0 {
		c = c.drop(0x8000001e)
		c = append(c, kvm.CPUIDEntry{Function: 0x8000001e, EAX: id, EBX: id}) // one thread a core, one node
	}
	return c
}
