package proto

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"sync"
)

// Type says what a frame is. Types below 0x80 must be understood by whoever
// receives them; types from 0x80 on are skipped by a receiver that does not
// know them.
type Type uint8

// Frame types of version 1.
const (
	TypeHello   Type = 0x01 // both ways, first frame; JSON Hello
	TypeRequest Type = 0x02 // host to guest, once; JSON Request
	TypeStarted Type = 0x03 // guest to host, at most once; JSON Started
	TypeResult  Type = 0x04 // guest to host, last frame; JSON, one kind per operation
	TypeError   Type = 0x05 // guest to host, last frame; JSON Error
	TypeControl Type = 0x06 // host to guest, while an operation runs; JSON Control
	TypeData    Type = 0x10 // both ways; raw bytes of one stream
	TypeCredit  Type = 0x11 // both ways; u32 LE: bytes that the peer may send more

	firstOptional Type = 0x80
)

// String returns the name used in error messages.
func (t Type) String() string {
	switch t {
	case TypeHello:
		return "hello"
	case TypeRequest:
		return "request"
	case TypeStarted:
		return "started"
	case TypeResult:
		return "result"
	case TypeError:
		return "error"
	case TypeControl:
		return "control"
	case TypeData:
		return "data"
	case TypeCredit:
		return "credit"
	}
	return "type 0x" + strconv.FormatUint(uint64(t), 16)
}

// Flags modify a frame. The low four must be understood by the receiver, the
// high four may be ignored.
type Flags uint8

// FlagEnd on a Data frame: the stream ends after this payload. On a Credit
// frame: the receiver of the stream takes no more of it; the sender stops.
const FlagEnd Flags = 0x01

const mandatoryFlags Flags = 0x0f

// Header is the fixed start of every frame:
//
//	0  type    u8
//	1  flags   u8
//	2  stream  u16 LE, 0 except in Data and Credit frames
//	4  length  u32 LE, bytes of payload that follow
type Header struct {
	Type   Type
	Flags  Flags
	Stream uint16
	Length uint32
}

// ProtocolError is a violation of the protocol by the peer. The connection it
// happened on is of no further use.
type ProtocolError struct{ Reason string }

// Error implements error.
func (e *ProtocolError) Error() string { return "guest agent protocol: " + e.Reason }

func violation(format string, a ...any) error {
	return &ProtocolError{Reason: fmt.Sprintf(format, a...)}
}

// ParseHeader decodes and checks a header. The error is a *ProtocolError.
func ParseHeader(b [HeaderSize]byte) (Header, error) {
	h := Header{
		Type:   Type(b[0]),
		Flags:  Flags(b[1]),
		Stream: binary.LittleEndian.Uint16(b[2:]),
		Length: binary.LittleEndian.Uint32(b[4:]),
	}
	return h, h.check()
}

func (h Header) check() error {
	limit := uint32(MaxControl)
	switch h.Type {
	case TypeData:
		limit = MaxData
	case TypeCredit:
		limit = 4
	}
	if h.Length > limit {
		return violation("%v frame of %d bytes, at most %d are allowed", h.Type, h.Length, limit)
	}
	if h.Type >= firstOptional {
		return nil
	}
	if f := h.Flags & mandatoryFlags &^ FlagEnd; f != 0 {
		return violation("%v frame with unknown flags 0x%x", h.Type, uint8(f))
	}
	switch h.Type {
	case TypeHello, TypeRequest, TypeStarted, TypeResult, TypeError, TypeControl, TypeData:
	case TypeCredit:
		if h.Length != 4 {
			return violation("credit frame of %d bytes, want 4", h.Length)
		}
	default:
		return violation("unknown frame of %v", h.Type)
	}
	return nil
}

// Put encodes the header into the first HeaderSize bytes of b.
func (h Header) Put(b []byte) {
	b[0], b[1] = byte(h.Type), byte(h.Flags)
	binary.LittleEndian.PutUint16(b[2:], h.Stream)
	binary.LittleEndian.PutUint32(b[4:], h.Length)
}

// Append appends a whole frame to b, so that several can leave in one write.
func Append(b []byte, t Type, f Flags, stream uint16, payload []byte) []byte {
	var h [HeaderSize]byte
	Header{Type: t, Flags: f, Stream: stream, Length: uint32(len(payload))}.Put(h[:])
	return append(append(b, h[:]...), payload...)
}

// AppendJSON appends a control frame with v as its payload. It returns
// ErrTooLarge when v does not fit in one frame.
func AppendJSON(b []byte, t Type, v any) ([]byte, error) {
	payload, err := json.Marshal(v)
	if err != nil {
		return b, fmt.Errorf("encode %v frame: %w", t, err)
	}
	if len(payload) > MaxControl {
		return b, fmt.Errorf("encode %v frame (%d bytes, limit %d): %w", t, len(payload), MaxControl, ErrTooLarge)
	}
	return Append(b, t, 0, 0, payload), nil
}

// AppendCredit appends a Credit frame.
func AppendCredit(b []byte, stream uint16, n uint32, f Flags) []byte {
	var p [4]byte
	binary.LittleEndian.PutUint32(p[:], n)
	return Append(b, TypeCredit, f, stream, p[:])
}

// ErrTooLarge is returned for a message that exceeds MaxControl.
var ErrTooLarge = errors.New("message too large")

// Conn reads and writes frames on a byte stream. One goroutine may read while
// any number write; a frame is written whole.
type Conn struct {
	r *bufio.Reader

	mu   sync.Mutex // held for one write to w
	w    io.Writer
	held []byte // goes with the next write
}

// NewConn returns a Conn on rw. Closing rw is the caller's business.
func NewConn(rw io.ReadWriter) *Conn {
	// A small buffer is enough: it joins the header with a short payload, and
	// large payloads are read past it.
	return &Conn{r: bufio.NewReaderSize(rw, 512), w: rw}
}

// Next returns the header of the next frame that this version understands and
// skips those that may be skipped. Payload must be called before the next Next.
// At the end of the stream, between two frames, the error is io.EOF.
func (c *Conn) Next() (Header, error) {
	for {
		var b [HeaderSize]byte
		if _, err := io.ReadFull(c.r, b[:]); err != nil {
			return Header{}, err
		}
		h, err := ParseHeader(b)
		if err != nil || h.Type < firstOptional {
			return h, err
		}
		if _, err := c.r.Discard(int(h.Length)); err != nil {
			return Header{}, noEOF(err)
		}
	}
}

// Payload reads the payload of the frame that Next announced into buf, which
// it replaces when it is too small.
func (c *Conn) Payload(h Header, buf []byte) ([]byte, error) {
	n := int(h.Length)
	if cap(buf) < n {
		buf = make([]byte, n)
	}
	buf = buf[:n]
	if _, err := io.ReadFull(c.r, buf); err != nil {
		return nil, noEOF(err)
	}
	return buf, nil
}

// JSON reads the payload of the frame that Next announced and decodes it.
// Unknown members are ignored, see the rules for extensions.
func (c *Conn) JSON(h Header, v any) error {
	p, err := c.Payload(h, nil)
	if err != nil {
		return err
	}
	return decode(h.Type, p, v)
}

func decode(t Type, p []byte, v any) error {
	if err := json.Unmarshal(p, v); err != nil {
		return violation("%v frame: %v", t, err)
	}
	return nil
}

// Credit reads the payload of a Credit frame.
func (c *Conn) Credit(h Header) (int, error) {
	var b [4]byte
	p, err := c.Payload(h, b[:])
	if err != nil {
		return 0, err
	}
	n := binary.LittleEndian.Uint32(p)
	if n > MaxCredit {
		return 0, violation("credit of %d bytes, at most %d is allowed", n, MaxCredit)
	}
	return int(n), nil
}

// Write sends frames that were built with the Append functions.
func (c *Conn) Write(frames []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.held != nil {
		frames = append(c.held, frames...)
		c.held = nil
	}
	if len(frames) == 0 {
		return nil
	}
	_, err := c.w.Write(frames)
	return err
}

// Hold keeps frames back until the next write, with which they leave as one.
func (c *Conn) Hold(frames []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.held = append(c.held, frames...)
}

// Flush sends what Hold has kept back.
func (c *Conn) Flush() error { return c.Write(nil) }

// Received says whether more has come than was read.
func (c *Conn) Received() bool { return c.r.Buffered() > 0 }

// WriteJSON sends a control frame.
func (c *Conn) WriteJSON(t Type, v any) error {
	b, err := AppendJSON(nil, t, v)
	if err != nil {
		return err
	}
	return c.Write(b)
}

// WriteCredit lets the peer send n more bytes of the stream.
func (c *Conn) WriteCredit(stream uint16, n int, f Flags) error {
	return c.Write(AppendCredit(nil, stream, uint32(n), f))
}

// WriteData sends buf[HeaderSize:] as one Data frame. The room in front is for
// the header, so that the frame leaves in one write without a copy.
func (c *Conn) WriteData(stream uint16, f Flags, buf []byte) error {
	Header{Type: TypeData, Flags: f, Stream: stream, Length: uint32(len(buf) - HeaderSize)}.Put(buf)
	return c.Write(buf)
}

// A stream that ends inside a frame was cut, which is not a clean end.
func noEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}
