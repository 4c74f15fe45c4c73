package machine

import (
	"fmt"

	"github.com/forkvm/forkvm/devices/platform"
	"github.com/forkvm/forkvm/vmm/boot/acpi"
)

// The machine's address map. It is part of every snapshot: a guest keeps the
// addresses and interrupt numbers that it found at boot, so what is here is
// never changed, only added to.
//
//	0x0000_0000  RAM, up to 3 GiB
//	0xd000_0000  virtio-mmio windows, 4 KiB each, one per slot
//	0xfec0_0000  I/O APIC        (in KVM)
//	0xfee0_0000  local APICs     (in KVM)
//	0x1_0000_0000  RAM above 3 GiB
const (
	virtioBase   = 0xd0000000
	virtioWindow = 0x1000
	virtioGSI    = 5 // of slot 0; the others follow

	generationGSI = 23 // last pin of the I/O APIC
)

// Slots of the virtio-mmio windows.
const (
	rngSlot     = 0
	vsockSlot   = 1
	balloonSlot = 2
	networkSlot = 3 // empty in a machine without a card
	diskSlot    = 4 // first disk; the others follow
)

func windowAddress(slot int) uint64 { return virtioBase + uint64(slot)*virtioWindow }
func slotGSI(slot int) uint32       { return virtioGSI + uint32(slot) }

func diskID(index int) string { return fmt.Sprintf("blk%d", index) }

// describe tells the guest's kernel, through ACPI, what the address map holds.
func describe(s Shape) acpi.Config {
	slots := []int{rngSlot, vsockSlot, balloonSlot}
	if s.NetworkMTU != 0 {
		slots = append(slots, networkSlot)
	}
	for i := range s.Disks {
		slots = append(slots, diskSlot+i)
	}
	c := acpi.Config{
		CPUs:         s.CPUs,
		Serial:       acpi.Serial{Port: platform.SerialPort, IRQ: platform.SerialIRQ},
		GenerationID: acpi.GenerationID{Address: acpi.GenerationIDAddress, GSI: generationGSI},
		Power: acpi.Power{
			SleepControl: platform.SleepControlPort,
			SleepStatus:  platform.SleepStatusPort,
			Reset:        platform.ResetPort,
			ResetValue:   platform.ResetValue,
		},
		PVPanic: platform.PanicPort,
	}
	for _, slot := range slots {
		c.Virtio = append(c.Virtio, acpi.VirtioDevice{
			Base: windowAddress(slot),
			Size: virtioWindow,
			GSI:  slotGSI(slot),
		})
	}
	return c
}
