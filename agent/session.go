package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/forkvm/forkvm/agent/proto"
)

// session is one connection: a handshake, one operation, its result. Others may follow it
// if the host has said so.
type session struct {
	agent   *Agent
	conn    net.Conn
	wire    *proto.Conn
	refused bool // the agent has as many operations as it wants

	// ctx ends when the host is gone or the agent is closed.
	ctx    context.Context
	cancel context.CancelFunc

	request proto.Request
	// What the operation takes from the host, set before listen.
	stdin *proto.Queue
	// keepInput: what has come whole is for a command that outlives the session.
	keepInput bool
	windows   map[uint16]*proto.Window
	control   func(proto.Control)
	// received is closed when no more frames are handled; nil before listen. What ended
	// that is in sequel: the next request, which is taken when the operation is over, or
	// an error.
	received chan struct{}
	sequel   incoming
	over     atomic.Bool
	// single: nothing may follow the operation, whatever the host has said.
	single bool
}

// incoming is the beginning of a frame, or why there is none.
type incoming struct {
	header proto.Header
	err    error
}

func newSession(a *Agent, conn net.Conn) *session {
	s := &session{agent: a, conn: conn, wire: proto.NewConn(conn)}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s
}

func (s *session) run() {
	defer s.end()
	// A write to a host that does not read must not outlive the session's end.
	stop := context.AfterFunc(s.ctx, func() { s.conn.Close() })
	defer stop()

	for more := s.answer(s.serve(s.first)); more; {
		more = s.answer(s.serve(s.next))
	}
}

// answer sends what an operation came to, and tells whether another may follow.
func (s *session) answer(result any, err error) (more bool) {
	switch {
	case s.ctx.Err() != nil || errors.Is(err, errHungUp):
		return false // nobody to tell
	case err != nil:
		s.wire.WriteJSON(proto.TypeError, asError(err))
		return false
	}
	more = s.request.Again && !s.single && proto.HasSequel(s.request.Op)
	s.over.Store(more) // the host asks again as soon as it has the result
	if err := s.wire.WriteJSON(proto.TypeResult, result); err != nil {
		s.agent.cfg.Log("send result of " + s.request.Op + ": " + err.Error())
		return false
	}
	return more
}

// lingerTimeout is how long a session waits for the host to close first.
const lingerTimeout = 2 * time.Second

// end closes the connection and waits for whoever reads it. While the host may
// still be sending it is given time to read the result first: closing on unread
// data could reset the connection and lose it.
func (s *session) end() {
	if s.received != nil {
		t := time.NewTimer(lingerTimeout)
		select {
		case <-s.received:
		case <-s.ctx.Done():
		case <-t.C:
		}
		t.Stop()
	}
	s.cancel()
	s.conn.Close()
	if s.received != nil {
		<-s.received
	}
}

// serve turns a panic, which is a mistake of ours, into an error of this one
// operation: the agent is the only way into its guest.
func (s *session) serve(do func() (any, error)) (result any, err error) {
	defer func() {
		if p := recover(); p != nil {
			s.agent.cfg.Log(fmt.Sprintf("panic in %s: %v\n%s", s.request.Op, p, debug.Stack()))
			err = failure(proto.CodeInternal, "panic in the guest agent: %v", p)
		}
	}()
	return do()
}

// first is the operation that the connection was made for.
func (s *session) first() (any, error) {
	s.conn.SetDeadline(time.Now().Add(handshakeTimeout))
	if err := s.handshake(); err != nil {
		return nil, err
	}
	s.conn.SetDeadline(time.Time{})
	return s.dispatch()
}

// errHungUp ends a connection on which the host might have asked again: it has hung up, or
// enough others rest already.
var errHungUp = errors.New("hung up")

// next is an operation behind another, however long after.
func (s *session) next() (any, error) {
	if !s.agent.rest() {
		return nil, errHungUp
	}
	h, err := s.await()
	s.agent.resume(s)
	var broken *proto.ProtocolError
	switch {
	case errors.As(err, &broken):
		return nil, err
	case err != nil:
		return nil, errHungUp
	}
	s.request, s.single = proto.Request{}, false
	s.over.Store(false)
	if err := s.takeRequest(h); err != nil {
		return nil, err
	}
	return s.dispatch()
}

// await waits for the next frame behind an operation, of which nothing is left then.
func (s *session) await() (proto.Header, error) {
	if s.received == nil {
		return s.wire.Next()
	}
	<-s.received
	next := s.sequel
	s.received, s.sequel = nil, incoming{}
	s.stdin, s.keepInput, s.windows, s.control = nil, false, nil, nil
	return next.header, next.err
}

func features() []string {
	return []string{proto.FeatureTerminal, proto.FeatureDetach, proto.FeatureLimits, proto.FeatureSurveyor, proto.FeatureAgain, proto.FeatureSequel}
}

func (s *session) handshake() error {
	h, err := s.wire.Next()
	if err != nil {
		return err
	}
	if h.Type != proto.TypeHello {
		return &proto.ProtocolError{Reason: fmt.Sprintf("first frame is %v, want hello", h.Type)}
	}
	var peer proto.Hello
	if err := s.wire.JSON(h, &peer); err != nil {
		return err
	}
	if err := peer.Check(); err != nil {
		return err
	}
	own := proto.Hello{
		Protocol: proto.Name, Min: proto.MinVersion, Max: proto.MaxVersion,
		Software: "forkvm-agent " + s.agent.cfg.Version, Features: features(),
	}
	if peer.Speaks >= own.Min && peer.Speaks <= own.Max {
		own.Speaks = peer.Speaks
	}
	if err := s.greet(own); err != nil {
		return err
	}
	if own.Speaks == 0 {
		return failure(proto.CodeVersionUnsupported, "the guest agent speaks protocol versions %d to %d, not %d", own.Min, own.Max, peer.Speaks)
	}
	if h, err = s.wire.Next(); err != nil {
		return err
	}
	if err := s.takeRequest(h); err != nil {
		return err
	}
	if !immediate(s.request.Op) {
		return s.wire.Flush()
	}
	return nil
}

func (s *session) takeRequest(h proto.Header) error {
	if h.Type != proto.TypeRequest {
		return &proto.ProtocolError{Reason: fmt.Sprintf("%v frame where a request is wanted", h.Type)}
	}
	return s.wire.JSON(h, &s.request)
}

// greet says hello: with the answer, if the request is there already. A host that
// waits for it before it asks gets it at once.
func (s *session) greet(own proto.Hello) error {
	b, err := proto.AppendJSON(nil, proto.TypeHello, own)
	if err != nil {
		return err
	}
	s.wire.Hold(b)
	if own.Speaks == 0 || !s.wire.Received() {
		return s.wire.Flush()
	}
	return nil
}

// immediate tells whether the answer to an operation is there as soon as it is asked
// for, and takes the agent's hello along: one packet and one wake-up less on each side.
// Others may take their time, and the host hears before that that it is heard.
func immediate(op string) bool { return proto.IsQuestion(op) || op == proto.OpSignal }

func (s *session) dispatch() (any, error) {
	if s.refused {
		e := failure(proto.CodeTooManyOperations, "%d operations are running", s.agent.cfg.MaxOperations)
		e.Retryable = true
		return nil, e
	}
	for _, f := range s.request.Requires {
		if !contains(features(), f) {
			return nil, failure(proto.CodeUnsupported, "this guest agent lacks the feature %.80q", f)
		}
	}
	if len(s.request.OperationID) > 128 {
		return nil, failure(proto.CodeInvalidRequest, "operation id of %d bytes, at most 128 are allowed", len(s.request.OperationID))
	}
	switch s.request.Op {
	case proto.OpPing:
		return s.agent.ping(), nil
	case proto.OpExec:
		return serveOp(s, s.exec)
	case proto.OpPut:
		return serveOp(s, s.put)
	case proto.OpGet:
		return serveOp(s, s.get)
	case proto.OpPutTree:
		return serveOp(s, s.putTree)
	case proto.OpGetTree:
		return serveOp(s, s.getTree)
	case proto.OpStat:
		return serveOp(s, s.stat)
	case proto.OpList:
		return serveOp(s, s.list)
	case proto.OpRemove:
		return serveOp(s, s.remove)
	case proto.OpMove:
		return serveOp(s, s.move)
	case proto.OpAttach:
		return serveOp(s, s.attach)
	case proto.OpSignal:
		return serveOp(s, s.signal)
	case proto.OpCommands:
		return serveOp(s, s.commands)
	case proto.OpSurvey:
		return serveOp(s, s.survey)
	case proto.OpQuiesce:
		return serveOp(s, s.quiesce)
	case proto.OpVacate:
		return serveOp(s, s.vacate)
	case proto.OpUsage:
		return s.agent.usage(), nil
	case proto.OpScan:
		return serveOp(s, s.scan)
	case proto.OpConnect:
		return serveOp(s, s.connect)
	case proto.OpRenew:
		return serveOp(s, s.agent.renew)
	case proto.OpShutdown:
		return serveOp(s, s.agent.shutdown)
	}
	return nil, failure(proto.CodeUnsupported, "this guest agent has no operation %.40q", s.request.Op)
}

// serveOp decodes the operation's own message and runs it.
func serveOp[P, R any](s *session, op func(P) (R, error)) (any, error) {
	var params P
	if len(s.request.Params) > 0 {
		if err := json.Unmarshal(s.request.Params, &params); err != nil {
			return nil, failure(proto.CodeInvalidRequest, "params of %s: %v", s.request.Op, err)
		}
	}
	s.request.Params = nil // up to a megabyte that nobody needs while a command runs
	result, err := op(params)
	if err != nil {
		return nil, err
	}
	return result, nil
}

// begin checks the generation and takes the operation id. When it returns nil
// the caller holds the renewal lock for reading and releases it once the
// operation has its effect, so that no renewal can come between the two.
func (s *session) begin() error {
	if err := s.admit(); err != nil {
		return err
	}
	if !s.agent.ids.add(s.request.OperationID) {
		s.agent.renewal.RUnlock()
		return failure(proto.CodeOperationExists, "operation %q was started before", s.request.OperationID)
	}
	return nil
}

// admit is begin without the operation id.
func (s *session) admit() error {
	a := s.agent
	a.renewal.RLock()
	var err error
	if g := s.request.Generation; g != "" && g != a.generation {
		err = failure(proto.CodeGenerationMismatch, "the guest has generation %q, the request is for %.64q", a.generation, g)
	} else if a.isStopping() {
		err = failure(proto.CodeShuttingDown, "the guest is shutting down")
	}
	if err != nil {
		a.renewal.RUnlock()
	}
	return err
}

// enter is begin for operations that take their time: a renewal does not wait for
// their end.
func (s *session) enter() error {
	if err := s.begin(); err != nil {
		return err
	}
	s.agent.renewal.RUnlock()
	return nil
}

// listen starts to take frames from the host for the operation, until the
// connection ends or the next request comes.
func (s *session) listen() {
	s.received = make(chan struct{})
	go func() {
		defer close(s.received)
		h, err := s.receive()
		s.sequel = incoming{h, err}
		var broken *proto.ProtocolError
		if errors.As(err, &broken) {
			// Said in passing: whoever breaks the protocol may not read either.
			s.conn.SetWriteDeadline(time.Now().Add(time.Second))
			s.wire.WriteJSON(proto.TypeError, asError(err))
		}
		if err != nil {
			s.cancel()
		}
		for _, w := range s.windows {
			w.Close()
		}
		if s.stdin != nil && !(s.keepInput && s.stdin.Ended()) {
			s.stdin.Close()
		}
	}()
}

// receive handles frames until the connection ends, which is how a host says
// that it has lost interest, or until the request comes that follows the operation.
func (s *session) receive() (proto.Header, error) {
	var buf []byte
	for {
		h, err := s.wire.Next()
		if err != nil {
			return h, err
		}
		if h.Type == proto.TypeRequest && s.over.Load() {
			return h, nil
		}
		if buf, err = s.handle(h, buf); err != nil {
			return h, err
		}
	}
}

// handle handles one frame. The buffer, which it may replace, is for payloads.
func (s *session) handle(h proto.Header, buf []byte) ([]byte, error) {
	var err error
	switch h.Type {
	case proto.TypeData:
		if s.stdin == nil || h.Stream != proto.Stdin {
			return buf, &proto.ProtocolError{Reason: fmt.Sprintf("data on stream %d, which takes none", h.Stream)}
		}
		if buf, err = s.wire.Payload(h, buf); err != nil {
			return buf, err
		}
		if err := s.stdin.Push(buf); err != nil {
			return buf, err
		}
		if h.Flags&proto.FlagEnd != 0 {
			s.stdin.End()
			buf = nil // nothing more will come that needs it
		}
	case proto.TypeCredit:
		n, err := s.wire.Credit(h)
		if err != nil {
			return buf, err
		}
		// Credit for a stream that this operation does not have is no harm.
		if w := s.windows[h.Stream]; w != nil {
			if err := w.Add(n); err != nil {
				return buf, err
			}
			if h.Flags&proto.FlagEnd != 0 {
				w.Close()
			}
		}
	case proto.TypeControl:
		var c proto.Control
		if err := s.wire.JSON(h, &c); err != nil {
			return buf, err
		}
		if s.control != nil {
			s.control(c)
		}
	default:
		return buf, &proto.ProtocolError{Reason: fmt.Sprintf("%v frame while an operation runs", h.Type)}
	}
	return buf, nil
}

func contains(list []string, s string) bool {
	for _, v := range list {
		if v == s {
			return true
		}
	}
	return false
}
