package platform

import (
	"encoding/json"
	"fmt"

	"github.com/forkvm/forkvm/devices"
)

// serialState is the saved form of a Serial, version 1.
type serialState struct {
	Version         int    `json:"version"`
	InterruptEnable byte   `json:"interrupt_enable"`
	FIFOControl     byte   `json:"fifo_control"`
	LineControl     byte   `json:"line_control"`
	ModemControl    byte   `json:"modem_control"`
	Scratch         byte   `json:"scratch"`
	Divisor         uint16 `json:"divisor"`
	Overrun         bool   `json:"overrun"`
	ModemDelta      byte   `json:"modem_delta"`
	TransmitPending bool   `json:"transmit_pending"`
	Input           []byte `json:"input,omitempty"`
}

// Save returns the registers and the unread input.
func (s *Serial) Save() ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return json.Marshal(serialState{
		Version:         1,
		InterruptEnable: s.uart.interruptEnable,
		FIFOControl:     s.uart.fifoControl,
		LineControl:     s.uart.lineControl,
		ModemControl:    s.uart.modemControl,
		Scratch:         s.uart.scratch,
		Divisor:         s.uart.divisor,
		Overrun:         s.uart.overrun,
		ModemDelta:      s.uart.modemDelta,
		TransmitPending: s.uart.transmitPending,
		Input:           s.uart.input,
	})
}

// Restore implements devices.Device. Output goes on where it is.
func (s *Serial) Restore(state []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	chip, err := decodeSerialState(s.id, &s.saved, state)
	if err != nil {
		return err
	}
	if s.running {
		return fmt.Errorf("restore serial port (%s): not paused", s.id)
	}
	s.uart = chip
	s.makeRoomLocked()
	return nil
}

// decodeSerialState builds a chip through the same register writes that a guest has, so that no state can be reached here
// that a guest could not reach.
func decodeSerialState(id string, saved *devices.Remembered[serialState], raw []byte) (uart, error) {
	state, err := decodeState(id, saved, raw)
	if err != nil {
		return uart{}, err
	}
	if state.Version != 1 {
		return uart{}, fmt.Errorf("restore serial port (%s): state version %d, want 1", id, state.Version)
	}
	if len(state.Input) > inputLimit+fifoDepth {
		return uart{}, fmt.Errorf("restore serial port (%s): %d bytes of input, at most %d", id, len(state.Input), inputLimit+fifoDepth)
	}
	u := newUART()
	u.write(uartLineControl, lcrDivisorLatch)
	u.write(0, byte(state.Divisor))
	u.write(1, byte(state.Divisor>>8))
	u.write(uartLineControl, state.LineControl&^lcrDivisorLatch)
	u.write(uartInterrupts, state.InterruptEnable)
	u.write(uartIdentification, state.FIFOControl)
	u.write(uartModemControl, state.ModemControl)
	u.write(uartScratch, state.Scratch)
	u.write(uartLineControl, state.LineControl)
	u.overrun = state.Overrun
	u.modemDelta = state.ModemDelta & (msrDeltaCTS | msrDeltaDSR | msrTrailRI | msrDeltaDCD)
	u.transmitPending = state.TransmitPending
	if len(state.Input) > 0 {
		u.input = append([]byte(nil), state.Input...)
	}
	return u, nil
}
