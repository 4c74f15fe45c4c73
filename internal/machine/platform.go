package machine

import (
	"errors"
	"io"
	"os"

	"github.com/forkvm/forkvm/devices/platform"
	"github.com/forkvm/forkvm/vmm"
	"github.com/forkvm/forkvm/vmm/boot/acpi"
)

// ConsoleLogLimit is the size that a console log never exceeds, in bytes; the
// newest output is kept.
const ConsoleLogLimit = 1 << 20

// NewConsoleLog makes a file of its own a machine's console log, for
// Config.Console. The file stays the caller's.
func NewConsoleLog(f *os.File) (io.Writer, error) {
	return platform.NewLogFile(f, ConsoleLogLimit)
}

// tailLines is how many lines of the console are shown, reportLines how many are
// searched for the reason of a machine's end.
const (
	tailLines   = 20
	reportLines = 500
)

// addPlatform adds the serial console and the registers for power and panic.
func (m *Machine) addPlatform(c *Config) error {
	state, err := c.state("serial0")
	if err != nil {
		return err
	}
	irq := m.Interrupt(platform.SerialIRQ)
	m.serial, err = platform.NewSerial(platform.SerialConfig{Interrupt: irq, Output: c.Console, State: state})
	if err != nil {
		return err
	}
	if err := m.Attach(m.serial); err != nil {
		return errors.Join(err, m.serial.Close())
	}
	if err := m.serial.Register(m.PIO); err != nil {
		return err
	}
	if state, err = c.state("power0"); err != nil {
		return err
	}
	power, err := platform.NewPower(platform.PowerConfig{OnEvent: m.onPower, State: state})
	if err != nil {
		return err
	}
	if err := m.Attach(power); err != nil {
		return err
	}
	return power.Register(m.PIO)
}

// onPower ends the machine as the guest asked. It runs on a vCPU thread.
func (m *Machine) onPower(e platform.Event) {
	switch e {
	case platform.EventShutdown:
		m.End(vmm.ReasonShutdown, "")
	case platform.EventReset:
		m.End(vmm.ReasonReset, "")
	case platform.EventPanicked, platform.EventCrashLoaded:
		m.End(vmm.ReasonGuestPanic, "reported by the guest's pvpanic driver")
	}
}

// addGeneration adds the device that tells the guest's kernel that its memory
// image has another life now. A clone's new id is announced as soon as the
// machine runs.
func (m *Machine) addGeneration(c *Config) error {
	state, err := c.state("vmgenid0")
	if err != nil {
		return err
	}
	irq := m.Interrupt(generationGSI)
	m.generationID, err = platform.NewGenerationID(platform.GenerationIDConfig{
		Memory:    m.memory,
		Interrupt: irq,
		Address:   acpi.GenerationIDAddress,
		GUID:      c.Generation,
		State:     state,
	})
	if err != nil {
		return err
	}
	if err := m.Attach(m.generationID); err != nil {
		return errors.Join(err, m.generationID.Close())
	}
	if c.State == nil {
		return nil
	}
	return m.generationID.Renew(c.Generation)
}
