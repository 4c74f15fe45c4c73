package client

import (
	"context"
	"errors"
	"io"
)

// Observer is told of all operations of a client, so that somebody can keep a
// record of them.
type Observer interface {
	// Begin is told what the guest is about to be asked: an operation, one of the
	// proto.Op words, the operation's id, if it has one, and its parameters, a
	// message of package proto. Whoever it returns is told how it goes on; nil if
	// nobody wants to know. If it fails the guest is not asked, and the caller gets
	// the error.
	Begin(op, id string, params any) (Observation, error)
}

// Observation is told of one operation.
type Observation interface {
	// Moved is told of bytes of a stream: those of proto.Stdin when they have been
	// read, others when they have arrived. Each stream has a goroutine of its own;
	// that of proto.Stdin may be there after End.
	Moved(stream uint16, p []byte)
	// End is told the outcome, when everything has arrived: an error, or none and
	// for a command that has ended its result. Its own error goes to the caller.
	End(ctx context.Context, result *Result, err error) error
}

// observe tells the client's observer of the call, before its request is sent.
func (k *call) observe(o Observer, id string, params any) error {
	if o == nil {
		return nil
	}
	var err error
	k.observation, err = o.Begin(k.op, id, params)
	return err
}

// moved tells of bytes of a stream.
func (k *call) moved(stream uint16, p []byte) {
	if k.observation != nil {
		k.observation.Moved(stream, p)
	}
}

// observed is r, whose bytes are told of as they are read.
func (k *call) observed(stream uint16, r io.Reader) io.Reader {
	if k.observation == nil {
		return r
	}
	return &observedReader{r, k, stream}
}

type observedReader struct {
	io.Reader
	call   *call
	stream uint16
}

func (o *observedReader) Read(p []byte) (int, error) {
	n, err := o.Reader.Read(p)
	o.call.moved(o.stream, p[:n])
	return n, err
}

// conclude tells the outcome, once, and returns it with what the observer says.
func (k *call) conclude(result any, err error) error {
	if k.observation == nil {
		return err
	}
	k.concluded.Do(func() {
		k.complaint = k.observation.End(k.ctx, resultOf(result), err)
	})
	if k.complaint == nil {
		return err
	}
	return errors.Join(err, k.complaint)
}

// resultOf is the result of a command, if there is one in what was decoded.
func resultOf(decoded any) *Result {
	switch r := decoded.(type) {
	case *Result:
		return r
	case *commandStatus:
		return r.Result
	}
	return nil
}
