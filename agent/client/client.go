// Package client is the host's side of the guest agent: it runs commands, moves
// files and renews the identity of a guest, over any connection to its agent.
//
//	c := client.New(client.Config{Dial: dial})
//	result, err := c.Exec(ctx, client.Command{Args: []string{"make", "test"}, Stdout: os.Stdout})
//
// An error means that the machine, the connection or the request failed. How a
// command ended, be it badly, is a Result.
package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/forkvm/forkvm/agent/proto"
)

// Error is a failure that the guest agent reported; Code is one of the words
// of package proto. Compare with errors.Is(err, &client.Error{Code: …}).
type Error = proto.Error

// Config says how to reach a guest agent.
type Config struct {
	// Dial opens a new connection to the guest agent; one is made for each
	// operation.
	Dial func(ctx context.Context) (net.Conn, error)
	// Generation, if set, is what the guest must have: operations other than
	// Ping, Renew and Shutdown are refused by a guest with another one.
	Generation string
	// Software names the calling program to the agent.
	Software string
	// Observer, if set, is told of all operations.
	Observer Observer
}

// Client talks to one guest agent. It holds no connection between operations, unless
// Keeping says so; any number of goroutines may use it.
type Client struct {
	cfg Config
	// kept has a connection between operations; nil: none is to be kept.
	kept *keeper
	// patience bounds how long a connection may take until the guest agent has
	// said hello; 0: as long as the context allows.
	patience time.Duration
}

// New returns a client. It does not connect.
func New(cfg Config) *Client { return &Client{cfg: cfg} }

// ConnectionError says that the guest agent could not be reached or that the
// connection to it broke.
type ConnectionError struct {
	// Op is the operation, one of the proto.Op words.
	Op string
	// Started: the guest agent had begun the operation, so it may have had
	// effects. A command without an OperationID is killed when its connection
	// breaks. Otherwise it is not known to have begun.
	Started bool
	// Err is the cause.
	Err error
}

// Error implements error.
func (e *ConnectionError) Error() string {
	if e.Started {
		return fmt.Sprintf("%s in guest: connection lost while it ran: %v", e.Op, e.Err)
	}
	return fmt.Sprintf("%s in guest: reach guest agent: %v", e.Op, e.Err)
}

// Unwrap returns the cause.
func (e *ConnectionError) Unwrap() error { return e.Err }

// call is one operation on its connection.
type call struct {
	ctx  context.Context
	op   string
	conn net.Conn
	wire *proto.Conn
	stop func()

	features []string // of the guest agent
	kept     *keeper  // takes the connection behind the result; nil: nobody does
	answered bool     // the result is there, and the connection has nothing else
	ended    sync.Once
	started  bool
	onStart  func(proto.Started)
	onCredit func(stream uint16, n int, f proto.Flags) error
	queues   map[uint16]*proto.Queue

	observation Observation // nil: nobody wants to know
	concluded   sync.Once
	complaint   error // of the observation
}

// begin connects and sends the request in the first write, with the credit for
// the streams that the operation is going to receive.
func (c *Client) begin(ctx context.Context, op string, request proto.Request, params any, queues map[uint16]*proto.Queue) (*call, error) {
	if c.kept != nil && proto.HasSequel(op) {
		request.Again = true
		if last := c.kept.take(); last != nil {
			return c.again(ctx, last, op, request, params, queues)
		}
	}
	ctx, answered, stop := c.hurry(ctx)
	conn, err := c.cfg.Dial(ctx)
	if err != nil {
		defer stop()
		return nil, wrap(ctx, op, false, err)
	}
	frames, err := c.opening(op, request, params, queues)
	if err != nil {
		conn.Close()
		stop()
		return nil, err
	}
	k := newCall(ctx, op, conn, proto.NewConn(conn), stop)
	k.queues, k.kept = queues, c.keeperFor(request)
	if err := k.observe(c.cfg.Observer, request.OperationID, params); err != nil {
		k.end()
		return nil, err
	}
	if err := k.open(frames); err != nil {
		k.end()
		return nil, k.conclude(nil, k.wrap(err))
	}
	answered()
	return k, nil
}

// newCall is a call on a connection, which does not outlive ctx.
func newCall(ctx context.Context, op string, conn net.Conn, wire *proto.Conn, stop func()) *call {
	unwatch := context.AfterFunc(ctx, func() { conn.Close() })
	return &call{ctx: ctx, op: op, conn: conn, wire: wire, stop: func() {
		unwatch()
		stop()
	}}
}

// open sends the first frames and reads the agent's.
func (k *call) open(frames []byte) error {
	err := k.wire.Write(frames)
	if err == nil {
		return k.hello()
	}
	// The agent may have said why it closed the connection.
	if said := k.hello(); said != nil {
		return said
	}
	return err
}

// hurry returns a context that ends with the client's patience, unless answered is
// called before, and a function that frees what it takes.
func (c *Client) hurry(parent context.Context) (ctx context.Context, answered, stop func()) {
	if c.patience == 0 {
		return parent, func() {}, func() {}
	}
	ctx, cancel := context.WithCancelCause(parent)
	timer := time.AfterFunc(c.patience, func() { cancel(context.DeadlineExceeded) })
	return ctx, func() { timer.Stop() }, func() {
		timer.Stop()
		cancel(nil)
	}
}

func (c *Client) opening(op string, request proto.Request, params any, queues map[uint16]*proto.Queue) ([]byte, error) {
	b, err := proto.AppendJSON(nil, proto.TypeHello, proto.Hello{
		Protocol: proto.Name, Min: proto.MinVersion, Max: proto.MaxVersion, Speaks: proto.MaxVersion,
		Software: c.cfg.Software,
	})
	if err != nil {
		return nil, err
	}
	return appendRequest(b, op, request, params, queues)
}

// appendRequest appends a request, and the credit for what comes of it.
func appendRequest(b []byte, op string, request proto.Request, params any, queues map[uint16]*proto.Queue) ([]byte, error) {
	request.Op = op
	// Its Params would be encoded, then checked and copied.
	b, err := proto.AppendJSON(b, proto.TypeRequest, struct {
		proto.Request
		Params any `json:"params,omitempty"`
	}{request, params})
	for stream, q := range queues {
		b = proto.AppendCredit(b, stream, uint32(q.Size()), 0)
	}
	return b, err
}

// hello reads the agent's first frame, and its refusal if it is one.
func (k *call) hello() error {
	h, err := k.wire.Next()
	if err != nil {
		return err
	}
	if h.Type == proto.TypeError {
		return k.refusal(h)
	}
	if h.Type != proto.TypeHello {
		return &proto.ProtocolError{Reason: fmt.Sprintf("first frame is %v, want hello", h.Type)}
	}
	var agent proto.Hello
	if err := k.wire.JSON(h, &agent); err != nil {
		return err
	}
	if err := agent.Check(); err != nil {
		return err
	}
	k.features = agent.Features
	if _, ok := agent.Common(proto.MinVersion, proto.MaxVersion); !ok {
		return &Error{Code: proto.CodeVersionUnsupported, Message: fmt.Sprintf(
			"the guest agent speaks protocol versions %d to %d, this program %d to %d",
			agent.Min, agent.Max, proto.MinVersion, proto.MaxVersion)}
	}
	return nil
}

func (k *call) refusal(h proto.Header) error {
	var e Error
	if err := k.wire.JSON(h, &e); err != nil {
		return err
	}
	return &e
}

// finish handles frames until the result, which it decodes.
func (k *call) finish(result any) error {
	var buf []byte
	for {
		h, err := k.wire.Next()
		if err != nil {
			return k.wrap(err)
		}
		switch h.Type {
		case proto.TypeResult:
			err := k.wire.JSON(h, result)
			k.answered = err == nil
			return k.wrap(err)
		case proto.TypeError:
			return k.wrap(k.refusal(h))
		case proto.TypeData:
			buf, err = k.data(h, buf)
		case proto.TypeCredit:
			err = k.credit(h)
		case proto.TypeStarted:
			var s proto.Started
			if err = k.wire.JSON(h, &s); err == nil {
				k.started = true
				if k.onStart != nil {
					k.onStart(s)
				}
			}
		default:
			err = &proto.ProtocolError{Reason: fmt.Sprintf("%v frame from the guest agent", h.Type)}
		}
		if err != nil {
			return k.wrap(err)
		}
	}
}

func (k *call) data(h proto.Header, buf []byte) ([]byte, error) {
	q := k.queues[h.Stream]
	if q == nil {
		return buf, &proto.ProtocolError{Reason: fmt.Sprintf("data on stream %d, which nobody asked for", h.Stream)}
	}
	buf, err := k.wire.Payload(h, buf)
	if err != nil {
		return buf, err
	}
	if err := q.Push(buf); err != nil {
		return buf, err
	}
	if h.Flags&proto.FlagEnd != 0 {
		q.End()
	}
	return buf, nil
}

func (k *call) credit(h proto.Header) error {
	n, err := k.wire.Credit(h)
	if err != nil || k.onCredit == nil {
		return err
	}
	return k.onCredit(h.Stream, n, h.Flags)
}

// end closes the connection, or hands it to who keeps it for the next operation.
func (k *call) end() {
	k.ended.Do(func() {
		k.stop()
		if k.kept != nil && k.answered && k.ctx.Err() == nil && slices.Contains(k.features, proto.FeatureSequel) {
			k.kept.put(k)
			return
		}
		k.conn.Close()
	})
}

func (k *call) wrap(err error) error { return wrap(k.ctx, k.op, k.started, err) }

// wrap tells failures of the connection from answers. When the context is the
// reason that the connection ended, its error is the cause.
func wrap(ctx context.Context, op string, started bool, err error) error {
	var answered *Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &answered):
		return fmt.Errorf("%s in guest: %w", op, err)
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	case overdue(ctx):
		err = context.DeadlineExceeded
	}
	return &ConnectionError{Op: op, Started: started, Err: err}
}

// overdue tells whether a context's deadline has passed, which a connection may
// notice before the context does.
func overdue(ctx context.Context) bool {
	deadline, ok := ctx.Deadline()
	return ok && !time.Now().Before(deadline)
}

// simple is an operation without streams, whatever generation the guest has.
func (c *Client) simple(ctx context.Context, op string, params, result any) error {
	return c.ask(ctx, op, proto.Request{}, params, result)
}

func (c *Client) ask(ctx context.Context, op string, request proto.Request, params, result any) error {
	k, err := c.begin(ctx, op, request, params, nil)
	if err != nil {
		return err
	}
	defer k.end()
	return k.conclude(result, k.finish(result))
}

// Info is the state of a guest agent.
type Info struct {
	// Version is the agent's.
	Version string
	// Generation is empty until the guest was renewed for the first time.
	Generation string
	// Uptime is the time since the guest's boot.
	Uptime time.Duration
	// Time is the guest's wall clock.
	Time time.Time
	// Operations that the agent is running.
	Operations int
}

// Ping asks the guest agent how it is.
func (c *Client) Ping(ctx context.Context) (Info, error) {
	var r proto.PingResult
	if err := c.simple(ctx, proto.OpPing, nil, &r); err != nil {
		return Info{}, err
	}
	return infoOf(&r), nil
}

func infoOf(r *proto.PingResult) Info {
	return Info{
		Version: r.Version, Generation: r.Generation, Operations: r.Operations,
		Uptime: time.Duration(r.UptimeMS) * time.Millisecond, Time: time.Unix(0, r.TimeNS),
	}
}

// Usage is what a guest uses, and how its guest agent is.
type Usage = proto.UsageResult

// Usage asks what the guest uses.
func (c *Client) Usage(ctx context.Context) (u Usage, err error) {
	err = c.simple(ctx, proto.OpUsage, nil, &u)
	return u, err
}

// WaitReady pings until the guest agent answers. It gives up when ctx is done,
// with the last failure, or at once when the agent answers with a refusal.
func (c *Client) WaitReady(ctx context.Context) (info Info, err error) {
	err = c.untilReached(ctx, func(c *Client) error {
		info, err = c.Ping(ctx)
		return err
	})
	return info, err
}

// untilReached repeats a request until the guest agent answers it. A connection made
// while the guest's agent was not listening yet may never be answered, so it is given
// up after a while; one that is answered may take its time.
func (c *Client) untilReached(ctx context.Context, request func(*Client) error) error {
	pause := time.Millisecond
	for hurried := (&Client{cfg: c.cfg, patience: time.Second}); ; {
		err := request(hurried)
		var unreached *ConnectionError
		var answered *Error
		switch {
		case errors.As(err, &answered):
			if !answered.Retryable {
				return err
			}
		case !errors.As(err, &unreached):
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for guest agent: %w (last attempt: %v)", context.Cause(ctx), err)
		case <-time.After(pause):
		}
		pause = min(2*pause, 50*time.Millisecond)
		hurried.patience = min(2*hurried.patience, 30*time.Second)
	}
}

// Shutdown begins the orderly end of the guest and returns who brings it about.
// The guest is still running then.
func (c *Client) Shutdown(ctx context.Context, reboot bool) (method string, err error) {
	r := proto.ShutdownRequest{Action: proto.ShutdownPowerOff}
	if reboot {
		r.Action = proto.ShutdownReboot
	}
	var result proto.ShutdownResult
	err = c.simple(ctx, proto.OpShutdown, r, &result)
	return result.Method, err
}
