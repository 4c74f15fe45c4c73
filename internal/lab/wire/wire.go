// Package wire is what the lab's host side and the first program of the lab machine say to each other.
//
// Both ends share one byte stream, a virtio-serial port. A frame is a 12-byte header, little endian,
//
//	offset 0  type    uint8
//	offset 1  zero    3 bytes
//	offset 4  id      uint32   the command the frame belongs to; 0 is the machine itself
//	offset 8  length  uint32   of the payload that follows, at most MaxPayload
//
// and its payload: JSON for control frames, raw bytes for streams. One ordered stream for everything means that a
// command's exit can never overtake its output. Both ends are built from the same source, so there is no version.
package wire

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
)

// MaxPayload bounds the payload of one frame.
const MaxPayload = 1 << 20

const headerSize = 12

// Type says what a frame means.
type Type uint8

const (
	// Setup (to the machine, JSON Plan): mount the disks and get ready. The first frame of a session.
	Setup Type = iota + 1
	// Ready (from the machine, JSON Status): set up, or why not.
	Ready
	// Start (to the machine, JSON Command): run a command under a fresh id.
	Start
	// Stdin (to the machine, bytes): standard input of the command.
	Stdin
	// StdinEnd (to the machine, empty): no more standard input.
	StdinEnd
	// Kill (to the machine, empty): end the command and all that it started.
	Kill
	// Stdout (from the machine, bytes).
	Stdout
	// Stderr (from the machine, bytes).
	Stderr
	// Exit (from the machine, JSON Outcome): the command is over, its output complete.
	Exit
	// Collect (to the machine, JSON Tree): send a directory's contents.
	Collect
	// Tar (from the machine, bytes): a piece of the tar archive.
	Tar
	// TarEnd (from the machine, JSON Status): the archive is complete, or why not.
	TarEnd

	lastType = TarEnd
)

// Frame is one message.
type Frame struct {
	Type    Type
	ID      uint32
	Payload []byte
}

// Mount is one disk of the machine, found by its serial number, and where its contents go.
type Mount struct {
	Serial string `json:"serial"` // at most 20 bytes: the limit of a virtio block device
	Path   string `json:"path"`
	// Source is the file or directory inside the disk's file system that appears at Path; empty is its root.
	Source string `json:"source,omitempty"`
	// File says that Source is no directory.
	File bool `json:"file,omitempty"`
	// Binds are more directories of the same disk.
	Binds []Bind `json:"binds,omitempty"`
}

// Bind is a directory of a disk, created when missing, and where it appears.
type Bind struct {
	Source string `json:"source"`
	Path   string `json:"path"`
	Public bool   `json:"public,omitempty"` // anyone may write there, as in /tmp
}

// Plan is what the machine does before it is ready.
type Plan struct {
	Mounts []Mount `json:"mounts"`
}

// Command is a program to run.
type Command struct {
	Argv []string `json:"argv"`
	Env  []string `json:"env,omitempty"` // in addition to the machine's own
	Dir  string   `json:"dir,omitempty"`
	// Stdin says that Stdin frames follow; without it the command reads end of file.
	Stdin bool `json:"stdin,omitempty"`
	// KillLeft ends processes that outlive the command. They are reported either way.
	KillLeft bool `json:"kill_left,omitempty"`
}

// Outcome is how a command ended.
type Outcome struct {
	Code   int    `json:"code"`             // exit status, when it exited
	Signal int    `json:"signal,omitempty"` // the signal that ended it
	Error  string `json:"error,omitempty"`  // why it could not be started
	// Left names the processes that it started and that outlived it.
	Left []string `json:"left,omitempty"`
}

// Tree names a directory of the machine.
type Tree struct {
	Path string `json:"path"`
}

// Status is an answer without a value: Error is empty for success.
type Status struct {
	Error string `json:"error,omitempty"`
}

// Err is the status as an error.
func (s Status) Err() error {
	if s.Error == "" {
		return nil
	}
	return errors.New(s.Error)
}

// Read takes the next frame from r. It returns io.EOF only between frames.
func Read(r io.Reader) (Frame, error) {
	var header [headerSize]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		if errors.Is(err, io.ErrUnexpectedEOF) {
			return Frame{}, fmt.Errorf("read frame header: %w", err)
		}
		return Frame{}, err
	}
	frame := Frame{Type: Type(header[0]), ID: binary.LittleEndian.Uint32(header[4:])}
	length := binary.LittleEndian.Uint32(header[8:])
	switch {
	case frame.Type == 0 || frame.Type > lastType || header[1] != 0 || header[2] != 0 || header[3] != 0:
		return Frame{}, fmt.Errorf("read frame: bad header % x", header)
	case length > MaxPayload:
		return Frame{}, fmt.Errorf("read frame (type %d): payload of %d bytes, more than %d", frame.Type, length, MaxPayload)
	}
	frame.Payload = make([]byte, length)
	if _, err := io.ReadFull(r, frame.Payload); err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return Frame{}, fmt.Errorf("read frame (type %d) payload: %w", frame.Type, err)
	}
	return frame, nil
}

// JSON decodes the payload of a control frame.
func (f Frame) JSON(into any) error {
	if err := json.Unmarshal(f.Payload, into); err != nil {
		return fmt.Errorf("decode frame (type %d): %w", f.Type, err)
	}
	return nil
}

// Writer writes whole frames, from any number of goroutines.
type Writer struct {
	mu sync.Mutex
	w  io.Writer
}

// NewWriter returns a Writer on w.
func NewWriter(w io.Writer) *Writer { return &Writer{w: w} }

// Write sends one frame.
func (w *Writer) Write(t Type, id uint32, payload []byte) error {
	if len(payload) > MaxPayload {
		return fmt.Errorf("write frame (type %d): payload of %d bytes, more than %d", t, len(payload), MaxPayload)
	}
	// Header and payload leave in one write: a port of the lab machine costs an exit for each.
	buf := make([]byte, headerSize, headerSize+len(payload))
	buf[0] = byte(t)
	binary.LittleEndian.PutUint32(buf[4:], id)
	binary.LittleEndian.PutUint32(buf[8:], uint32(len(payload)))
	buf = append(buf, payload...)
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, err := w.w.Write(buf); err != nil {
		return fmt.Errorf("write frame (type %d): %w", t, err)
	}
	return nil
}

// WriteJSON sends one control frame.
func (w *Writer) WriteJSON(t Type, id uint32, value any) error {
	payload, err := json.Marshal(value)
	if err != nil {
		return fmt.Errorf("encode frame (type %d): %w", t, err)
	}
	return w.Write(t, id, payload)
}

// Stream is an io.Writer whose bytes leave as frames of one type and id.
func (w *Writer) Stream(t Type, id uint32) io.Writer { return stream{w, t, id} }

type stream struct {
	w  *Writer
	t  Type
	id uint32
}

func (s stream) Write(p []byte) (int, error) {
	const piece = 64 << 10 // small enough that two streams of one command take turns
	done := 0
	for done < len(p) {
		n := min(piece, len(p)-done)
		if err := s.w.Write(s.t, s.id, p[done:done+n]); err != nil {
			return done, err
		}
		done += n
	}
	return done, nil
}
