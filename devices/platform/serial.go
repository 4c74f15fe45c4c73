package platform

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/forkvm/forkvm/devices"
)

// Where a PC has its first serial port, and what the kernel calls ttyS0.
const (
	SerialPort     = 0x3f8 // base of the register window, an I/O port
	SerialPortSize = uartRegisters
	SerialIRQ      = 4
)

var (
	// ErrInputFull is returned by Serial.Write when the guest does not read what it was sent before.
	ErrInputFull = errors.New("console input is full")
	// ErrClosed is returned by calls on a closed device.
	ErrClosed = errors.New("device is closed")
)

// SerialConfig describes a serial console.
type SerialConfig struct {
	// ID is the key in the saved state, "serial0" when empty.
	ID string
	// Interrupt is the line of the port, IRQ 4. Required.
	Interrupt devices.Interrupt
	// Output gets what the guest prints, unchanged, from one goroutine. A slow or failing writer costs the guest nothing:
	// at most OutputBuffer bytes wait for it, the oldest are dropped beyond that (see Serial.Dropped). Nil: the ring only.
	Output io.Writer
	// State is the saved state to continue from, nil for a cold start.
	State []byte
}

// Serial is a 16550A on the guest's side and a byte stream on the host's. It implements devices.Device and, for its
// register window, devices.Handler.
//
// Output that the guest has written belongs to the host: it keeps flowing to Config.Output while the device is paused and
// is not part of the saved state, or each clone would print it again. Input that the guest has not read is part of it.
type Serial struct {
	id        string
	interrupt devices.Interrupt
	console   Console
	output    *output
	inputTurn chan struct{} // held by the WriteContext call that is filling the buffer
	inputRoom chan struct{} // has a token when the guest may have made room
	closed    chan struct{}
	closeOnce sync.Once
	closeErr  error

	mu      sync.Mutex // guards what is below; held while the interrupt is triggered, so that Pause excludes it
	saved   devices.Remembered[serialState]
	uart    uart
	running bool
}

// NewSerial returns a paused serial console.
func NewSerial(config SerialConfig) (*Serial, error) {
	if config.ID == "" {
		config.ID = "serial0"
	}
	if config.Interrupt == nil {
		return nil, fmt.Errorf("create serial port (%s): no interrupt", config.ID)
	}
	s := &Serial{
		id:        config.ID,
		interrupt: config.Interrupt,
		inputTurn: make(chan struct{}, 1),
		inputRoom: make(chan struct{}, 1),
		closed:    make(chan struct{}),
		uart:      newUART(),
	}
	if config.State != nil {
		var err error
		if s.uart, err = decodeSerialState(s.id, &s.saved, config.State); err != nil {
			return nil, err
		}
	}
	if config.Output != nil {
		s.output = newOutput(config.Output)
	}
	return s, nil
}

// ID returns the key of the saved state.
func (s *Serial) ID() string { return s.id }

// Console returns the ring that keeps the newest output.
func (s *Serial) Console() *Console { return &s.console }

// Begin forgets what was printed, and gives what is printed from now on to output, of a console that was made with none.
// It is for a paused device.
func (s *Serial) Begin(output io.Writer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.console.clear()
	if output != nil && s.output == nil {
		s.output = newOutput(output)
	}
}

// Dropped returns how many bytes of output never reached Config.Output, and the last error it returned.
func (s *Serial) Dropped() (bytes uint64, last error) {
	s.mu.Lock()
	output := s.output
	s.mu.Unlock()
	if output == nil {
		return 0, nil
	}
	return output.lost()
}

// Register puts the device on a port bus at SerialPort.
func (s *Serial) Register(bus *devices.Bus) error {
	return bus.Register(SerialPort, SerialPortSize, s)
}

// Read answers the guest. A wide access is that many single ones, as on an 8-bit bus.
func (s *Serial) Read(offset uint64, data []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.uart.sources()
	for i := range data {
		data[i] = s.uart.read((offset + uint64(i)) % uartRegisters)
	}
	s.afterAccessLocked(before)
}

// Write takes a register write of the guest.
func (s *Serial) Write(offset uint64, data []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.uart.sources()
	for i, value := range data {
		if s.uart.write((offset+uint64(i))%uartRegisters, value) {
			s.console.put(value)
			if s.output != nil {
				s.output.put(value)
			}
		}
	}
	s.afterAccessLocked(before)
}

// afterAccessLocked sends an edge for each source that became active, and tells a waiting writer about room. An edge per
// source and not per rise of the line: a driver that leaves its handler with one source unserved must still hear of another.
func (s *Serial) afterAccessLocked(before byte) {
	if s.uart.sources()&^before != 0 {
		s.triggerLocked()
	}
	s.makeRoomLocked()
}

// makeRoomLocked tells a waiting writer about room, if there is any.
func (s *Serial) makeRoomLocked() {
	if len(s.uart.input) >= inputLimit {
		return
	}
	select {
	case s.inputRoom <- struct{}{}:
	default:
	}
}

// triggerLocked makes an edge if the device runs; while it does not, Resume makes up for it. The error says that the line
// is gone, and then there is no guest to miss it.
func (s *Serial) triggerLocked() {
	if s.running {
		_ = s.interrupt.Trigger()
	}
}

// Input types p into the guest's console as far as there is room and returns how much it took; the error is ErrInputFull
// if that is not all. It never blocks. It works while paused: the guest finds the bytes after Resume.
func (s *Serial) Input(p []byte) (int, error) {
	select {
	case <-s.closed:
		return 0, fmt.Errorf("write input (%s): %w", s.id, ErrClosed)
	default:
	}
	n := s.receive(p)
	if n < len(p) {
		return n, fmt.Errorf("write input (%s): %w", s.id, ErrInputFull)
	}
	return n, nil
}

// InputContext is Input that waits for the guest to make room. It returns early when ctx ends or the device is closed.
func (s *Serial) InputContext(ctx context.Context, p []byte) (int, error) {
	select {
	case s.inputTurn <- struct{}{}:
		defer func() { <-s.inputTurn }()
	case <-ctx.Done():
		return 0, fmt.Errorf("write input (%s): %w", s.id, context.Cause(ctx))
	case <-s.closed:
		return 0, fmt.Errorf("write input (%s): %w", s.id, ErrClosed)
	}
	written := 0
	for {
		written += s.receive(p[written:])
		if written == len(p) {
			return written, nil
		}
		select {
		case <-s.inputRoom:
		case <-ctx.Done():
			return written, fmt.Errorf("write input (%s): %w", s.id, context.Cause(ctx))
		case <-s.closed:
			return written, fmt.Errorf("write input (%s): %w", s.id, ErrClosed)
		}
	}
}

func (s *Serial) receive(p []byte) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.uart.receive(p)
	// New input is news even when older input is still unread: a driver may have given up on it with the source active.
	if n > 0 && s.uart.sources()&ierReceive != 0 {
		s.triggerLocked()
	}
	return n
}

// Resume lets interrupts out, and repeats one the guest may have missed.
func (s *Serial) Resume() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.running {
		return nil
	}
	if s.uart.sources() != 0 {
		if err := s.interrupt.Trigger(); err != nil {
			return fmt.Errorf("resume serial port (%s): %w", s.id, err)
		}
	}
	s.running = true
	return nil
}

// Pause stops interrupts.
func (s *Serial) Pause() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.running = false
	return nil
}

// Close pauses the device and writes out the rest of the output. If Config.Output blocks it is waited for only
// closeTimeout long; the error then says how much was lost.
func (s *Serial) Close() error {
	s.closeOnce.Do(func() {
		_ = s.Pause()
		close(s.closed)
		if s.output != nil {
			if err := s.output.close(); err != nil {
				s.closeErr = fmt.Errorf("close serial port (%s): %w", s.id, err)
			}
		}
	})
	return s.closeErr
}
