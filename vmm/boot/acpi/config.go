package acpi

import "fmt"

// Where the machine keeps what ACPI describes. The memory map lists all of it
// as not usable for the kernel.
const (
	// TablesAddress and TablesEnd bound the guest-physical place for tables.
	TablesAddress = 0xe0000
	TablesEnd     = 0xf0000
	// GenerationIDAddress is the page for the generation id.
	GenerationIDAddress = 0xdf000

	// LocalAPICAddress and IOAPICAddress are where KVM has them.
	LocalAPICAddress = 0xfee00000
	IOAPICAddress    = 0xfec00000
)

// Pins is the number of inputs of the I/O APIC: interrupts (GSIs) are below it.
const Pins = 24

// MaxCPUs is how many processors the tables can describe. APIC ids are the
// processors' numbers, and 255 is not one of them in the 8-bit entries.
const MaxCPUs = 254

// Config is what the tables describe. A zero part is left out of them.
type Config struct {
	CPUs         int // 1 to MaxCPUs; processor n has APIC id n
	Virtio       []VirtioDevice
	Serial       Serial
	GenerationID GenerationID
	Power        Power
	PVPanic      uint16 // I/O port of the panic notifier
}

// VirtioDevice is the register window of a virtio-mmio device, below 4 GiB.
type VirtioDevice struct {
	Base, Size uint64
	GSI        uint32 // edge-triggered, active high
}

// Serial is a 16550A at eight consecutive I/O ports.
type Serial struct {
	Port uint16
	IRQ  uint32 // GSI, edge-triggered, active high
}

// GenerationID is the 16-byte VM generation id in guest memory. The interrupt
// says that it changed.
type GenerationID struct {
	Address uint64 // guest-physical, multiple of 8
	GSI     uint32 // edge-triggered, active high
}

// Power is the I/O ports that end or reset the machine. The guest writes the
// sleep type and the enable bit (SleepOff) to SleepControl to power off, and
// ResetValue to Reset to start over; each is one byte wide.
type Power struct {
	SleepControl, SleepStatus uint16
	Reset                     uint16
	ResetValue                uint8
}

// sleepTypeOff is the SLP_TYP value that \_S5 names for soft-off.
const sleepTypeOff = 5

// SleepOff is what a guest writes to SleepControl to power off: SLP_EN (bit 5)
// and SLP_TYP (bits 2-4), section 4.8.3.7.
const SleepOff = 1<<5 | sleepTypeOff<<2

// ConfigError says what the tables cannot describe.
type ConfigError struct{ Reason string }

func (e *ConfigError) Error() string { return "build ACPI tables: " + e.Reason }

func (c *Config) validate() error {
	if c.CPUs < 1 || c.CPUs > MaxCPUs {
		return &ConfigError{fmt.Sprintf("%d processors, 1 to %d are possible", c.CPUs, MaxCPUs)}
	}
	// Devices that share an edge-triggered interrupt would lose edges.
	owner := make(map[uint32]string)
	claim := func(gsi uint32, name string) error {
		if gsi >= Pins {
			return &ConfigError{fmt.Sprintf("interrupt %d of %s, the I/O APIC has %d", gsi, name, Pins)}
		}
		if other, taken := owner[gsi]; taken {
			return &ConfigError{fmt.Sprintf("interrupt %d of both %s and %s", gsi, other, name)}
		}
		owner[gsi] = name
		return nil
	}
	if c.Serial.Port != 0 {
		if err := claim(c.Serial.IRQ, "the serial port"); err != nil {
			return err
		}
	}
	if c.GenerationID.Address != 0 {
		if c.GenerationID.Address%8 != 0 {
			return &ConfigError{fmt.Sprintf("generation id at %#x, not a multiple of 8", c.GenerationID.Address)}
		}
		if err := claim(c.GenerationID.GSI, "the generation id"); err != nil {
			return err
		}
	}
	for i, d := range c.Virtio {
		if d.Size == 0 || d.Base >= 1<<32 || d.Size > 1<<32-d.Base {
			return &ConfigError{fmt.Sprintf("window %#x+%#x of virtio device %d", d.Base, d.Size, i)}
		}
		if err := claim(d.GSI, fmt.Sprintf("virtio device %d", i)); err != nil {
			return err
		}
	}
	return nil
}
