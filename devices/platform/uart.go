package platform

// The register model of a 16550A, without a host side: no locks, no interrupts sent, no output written. Serial wraps it.
// Names and bits are those of the National Semiconductor PC16550D data sheet.

// Register offsets. Offsets 0 and 1 are the divisor latch while LCR.DLAB is set.
const (
	uartData           = 0 // RBR when read, THR when written
	uartInterrupts     = 1 // IER
	uartIdentification = 2 // IIR when read, FCR when written
	uartLineControl    = 3
	uartModemControl   = 4
	uartLineStatus     = 5
	uartModemStatus    = 6
	uartScratch        = 7
	uartRegisters      = 8
)

const (
	ierReceive     = 1 << 0
	ierTransmit    = 1 << 1
	ierLine        = 1 << 2
	ierModem       = 1 << 3
	ierImplemented = 0x0f // a driver tells later chips by the bits above

	iirNone     = 0x01
	iirModem    = 0x00
	iirTransmit = 0x02
	iirReceive  = 0x04
	iirLine     = 0x06
	iirTimeout  = 0x0c
	iirFIFO     = 0xc0 // both bits: a working FIFO, hence 16550A and not 16550

	fcrEnable       = 1 << 0
	fcrClearReceive = 1 << 1
	fcrTrigger      = 0xc0

	lcrDivisorLatch = 1 << 7

	mcrDTR         = 1 << 0
	mcrRTS         = 1 << 1
	mcrOut1        = 1 << 2
	mcrOut2        = 1 << 3
	mcrLoopback    = 1 << 4
	mcrImplemented = 0x1f

	lsrDataReady        = 1 << 0
	lsrOverrun          = 1 << 1
	lsrTransmitterEmpty = 1<<5 | 1<<6 // THRE and TEMT: every byte leaves at once

	msrDeltaCTS  = 1 << 0
	msrDeltaDSR  = 1 << 1
	msrTrailRI   = 1 << 2
	msrDeltaDCD  = 1 << 3
	msrCTS       = 1 << 4
	msrDSR       = 1 << 5
	msrRI        = 1 << 6
	msrDCD       = 1 << 7
	msrConnected = msrCTS | msrDSR | msrDCD // a terminal is attached and ready, always
)

// fifoDepth is the receive FIFO of the chip: how much a driver can discard with FCR, and how much loopback can hold.
const fifoDepth = 16

// inputLimit bounds the bytes that wait for the guest to read them.
const inputLimit = 4096

// uart is the chip. input is the receive FIFO with the backlog behind it: the front fifoDepth bytes are the FIFO.
type uart struct {
	interruptEnable byte
	fifoControl     byte
	lineControl     byte
	modemControl    byte
	scratch         byte
	divisor         uint16
	overrun         bool
	modemDelta      byte
	// transmitPending is the THRE interrupt condition: set when the holding register becomes empty or when the interrupt is
	// enabled while it is, cleared when IIR reports it.
	transmitPending bool
	input           []byte
}

// newUART returns the chip as firmware would leave it: 9600 baud, 8N1, interrupts and FIFO off.
func newUART() uart {
	return uart{divisor: 12, lineControl: 0x03}
}

// read performs a guest read of one register.
func (u *uart) read(register uint64) byte {
	if u.lineControl&lcrDivisorLatch != 0 && register <= uartInterrupts {
		return byte(u.divisor >> (8 * register))
	}
	switch register {
	case uartData:
		return u.pop()
	case uartInterrupts:
		return u.interruptEnable
	case uartIdentification:
		return u.identify()
	case uartLineControl:
		return u.lineControl
	case uartModemControl:
		return u.modemControl
	case uartLineStatus:
		return u.lineStatus()
	case uartModemStatus:
		value := u.modemLines() | u.modemDelta
		u.modemDelta = 0
		return value
	default:
		return u.scratch
	}
}

// write performs a guest write of one register. When sent is true the byte left the chip on the line.
func (u *uart) write(register uint64, value byte) (sent bool) {
	if u.lineControl&lcrDivisorLatch != 0 && register <= uartInterrupts {
		shift := 8 * register
		u.divisor = u.divisor&^(0xff<<shift) | uint16(value)<<shift
		return false
	}
	switch register {
	case uartData:
		return u.transmit(value)
	case uartInterrupts:
		u.enableInterrupts(value)
	case uartIdentification:
		u.controlFIFO(value)
	case uartLineControl:
		u.lineControl = value
	case uartModemControl:
		before := u.modemLines()
		u.modemControl = value & mcrImplemented
		u.noteModemChange(before)
	case uartScratch:
		u.scratch = value
	}
	return false
}

// sources returns the conditions that hold and are enabled, as IER bits. The interrupt line is high while it is not 0.
func (u *uart) sources() byte {
	var active byte
	if len(u.input) > 0 {
		active |= ierReceive
	}
	if u.transmitPending {
		active |= ierTransmit
	}
	if u.overrun {
		active |= ierLine
	}
	if u.modemDelta != 0 {
		active |= ierModem
	}
	return active & u.interruptEnable
}

// identify answers a read of IIR: the highest-priority source. Reading acknowledges the transmit interrupt, and only when
// it is the one reported.
func (u *uart) identify() byte {
	value := u.highestSource()
	if value == iirTransmit {
		u.transmitPending = false
	}
	if u.fifoEnabled() {
		value |= iirFIFO
	}
	return value
}

func (u *uart) highestSource() byte {
	active := u.sources()
	switch {
	case active&ierLine != 0:
		return iirLine
	case active&ierReceive != 0 && len(u.input) < u.triggerLevel():
		// Below the trigger level the chip waits four character times first; here they have always passed.
		return iirTimeout
	case active&ierReceive != 0:
		return iirReceive
	case active&ierTransmit != 0:
		return iirTransmit
	case active&ierModem != 0:
		return iirModem
	}
	return iirNone
}

func (u *uart) fifoEnabled() bool { return u.fifoControl&fcrEnable != 0 }

func (u *uart) triggerLevel() int {
	if !u.fifoEnabled() {
		return 1
	}
	return [...]int{1, 4, 8, 14}[u.fifoControl>>6]
}

func (u *uart) lineStatus() byte {
	value := byte(lsrTransmitterEmpty)
	if len(u.input) > 0 {
		value |= lsrDataReady
	}
	if u.overrun {
		value |= lsrOverrun
	}
	u.overrun = false
	return value
}

// modemLines is the upper half of MSR. In loopback the outputs of MCR come back crossed as a null modem would, which is
// what Linux looks for to believe in the port.
func (u *uart) modemLines() byte {
	if u.modemControl&mcrLoopback == 0 {
		return msrConnected
	}
	var lines byte
	for _, wire := range [...]struct{ output, line byte }{
		{mcrRTS, msrCTS}, {mcrDTR, msrDSR}, {mcrOut1, msrRI}, {mcrOut2, msrDCD},
	} {
		if u.modemControl&wire.output != 0 {
			lines |= wire.line
		}
	}
	return lines
}

func (u *uart) noteModemChange(before byte) {
	after := u.modemLines()
	u.modemDelta |= (before ^ after) >> 4 & (msrDeltaCTS | msrDeltaDSR | msrDeltaDCD)
	if before&msrRI != 0 && after&msrRI == 0 {
		u.modemDelta |= msrTrailRI
	}
}

func (u *uart) enableInterrupts(value byte) {
	value &= ierImplemented
	if value&ierTransmit == 0 {
		u.transmitPending = false
	} else if u.interruptEnable&ierTransmit == 0 {
		// The holding register is always empty, and enabling the interrupt then raises it: drivers start transmitting this way.
		u.transmitPending = true
	}
	u.interruptEnable = value
}

func (u *uart) controlFIFO(value byte) {
	if (value^u.fifoControl)&fcrEnable != 0 || value&fcrClearReceive != 0 {
		// Only the chip's FIFO is lost. What waits behind it on the line has not arrived yet.
		u.discard(min(fifoDepth, len(u.input)))
	}
	u.fifoControl = value & (fcrEnable | fcrTrigger)
}

func (u *uart) transmit(value byte) (sent bool) {
	u.transmitPending = true
	if u.modemControl&mcrLoopback == 0 {
		return true
	}
	if len(u.input) >= fifoDepth {
		u.overrun = true
		return false
	}
	u.input = append(u.input, value)
	return false
}

// receive takes bytes from the line, as many as fit, and returns how many. In loopback the line is disconnected: bytes
// wait outside.
func (u *uart) receive(p []byte) int {
	if u.modemControl&mcrLoopback != 0 {
		return 0
	}
	n := min(len(p), inputLimit-len(u.input))
	if n > 0 {
		u.input = append(u.input, p[:n]...)
	}
	return max(n, 0)
}

func (u *uart) pop() byte {
	if len(u.input) == 0 {
		return 0
	}
	value := u.input[0]
	u.discard(1)
	return value
}

func (u *uart) discard(n int) {
	u.input = u.input[n:]
	if len(u.input) == 0 {
		u.input = nil
	}
}
