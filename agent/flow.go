package agent

import (
	"io"

	"github.com/forkvm/forkvm/agent/proto"
)

// putWindow is larger than stdinWindow: a file is written as fast as it comes.
const putWindow = 256 << 10

// inflow is the Stdin stream of an operation as a Reader. It ends with io.EOF
// only if the host ended the stream.
type inflow struct {
	*session
	rest, buf []byte
}

// inflow tells the host that the operation has started and takes what it sends.
func (s *session) inflow(window int) (*inflow, error) {
	s.stdin = proto.NewQueue(window)
	b, err := proto.AppendJSON(nil, proto.TypeStarted, proto.Started{OperationID: s.request.OperationID})
	if err != nil {
		return nil, err
	}
	if err := s.wire.Write(proto.AppendCredit(b, proto.Stdin, uint32(s.stdin.Size()), 0)); err != nil {
		return nil, err
	}
	s.listen()
	return &inflow{session: s}, nil
}

func (f *inflow) Read(p []byte) (int, error) {
	if len(f.rest) == 0 {
		var ok bool
		if f.buf, ok = f.stdin.Pop(f.buf); !ok {
			if f.stdin.Ended() {
				return 0, io.EOF
			}
			return 0, failure(proto.CodeProtocol, "connection ended in the middle of the data")
		}
		f.rest = f.buf
	}
	n := copy(p, f.rest)
	f.rest = f.rest[n:]
	if credit := f.stdin.Consumed(n); credit > 0 {
		f.wire.WriteCredit(proto.Stdin, credit, 0)
	}
	return n, nil
}

// drain takes what comes behind the data, such as a tar stream's padding, up to
// the end.
func (f *inflow) drain() error {
	_, err := io.Copy(io.Discard, f)
	return err
}

// outflow is the Stdout stream of an operation as a Writer. It waits for the
// host's credit.
type outflow struct {
	*session
	window *proto.Window
}

// outflow tells the host that the operation has started.
func (s *session) outflow(started proto.Started) (*outflow, error) {
	o := &outflow{session: s, window: proto.NewWindow()}
	s.windows = map[uint16]*proto.Window{proto.Stdout: o.window}
	started.OperationID = s.request.OperationID
	if err := s.wire.WriteJSON(proto.TypeStarted, started); err != nil {
		return nil, err
	}
	s.listen()
	return o, nil
}

// ReadFrom sends everything that r has, read to where it is sent from.
func (o *outflow) ReadFrom(r io.Reader) (sent int64, err error) {
	buf := buffers.Get().(*[proto.HeaderSize + chunkSize]byte)
	defer buffers.Put(buf)
	for {
		room := o.window.Wait(chunkSize)
		if room == 0 {
			return sent, failure(proto.CodeProtocol, "host took no more of the data")
		}
		n, err := r.Read(buf[proto.HeaderSize : proto.HeaderSize+room])
		if n > 0 {
			o.window.Use(n)
			sent += int64(n)
			if err := o.wire.WriteData(proto.Stdout, 0, buf[:proto.HeaderSize+n]); err != nil {
				return sent, err
			}
		}
		if err == io.EOF {
			return sent, nil
		}
		if err != nil {
			return sent, err
		}
	}
}

func (o *outflow) Write(p []byte) (int, error) {
	n, err := o.ReadFrom(&bytesReader{p})
	return int(n), err
}

// bytesReader reads from a slice and says at once when that was all.
type bytesReader struct{ p []byte }

func (b *bytesReader) Read(p []byte) (int, error) {
	n := copy(p, b.p)
	if b.p = b.p[n:]; len(b.p) == 0 {
		return n, io.EOF
	}
	return n, nil
}

// end says that the stream is complete.
func (o *outflow) end() error {
	return o.wire.WriteData(proto.Stdout, proto.FlagEnd, make([]byte, proto.HeaderSize))
}
