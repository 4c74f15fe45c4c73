package client

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/forkvm/forkvm/agent/proto"
)

// Line is for who asks one guest agent again and again how it is: a question goes over
// the connection of the one before. Where that has ended, as by a reset of the guest, the
// line connects anew, and so it does for each question to an older guest agent. Any
// number of goroutines may use it; their questions wait for each other. A snapshot that is
// taken meanwhile has the connection in it, and its clones end it first of all.
type Line struct {
	client *Client

	mu   sync.Mutex // held while a question is asked
	kept *call      // has the connection of the last question; nil: there is none
}

// Line returns a line to the guest agent. It connects with the first question; whoever
// has it closes it.
func (c *Client) Line() *Line { return &Line{client: c} }

// Ping asks the guest agent how it is.
func (l *Line) Ping(ctx context.Context) (Info, error) {
	var r proto.PingResult
	if err := l.ask(ctx, proto.OpPing, &r); err != nil {
		return Info{}, err
	}
	return infoOf(&r), nil
}

// Usage asks what the guest uses.
func (l *Line) Usage(ctx context.Context) (u Usage, err error) {
	err = l.ask(ctx, proto.OpUsage, &u)
	return u, err
}

// Close ends the connection. The line can be used again.
func (l *Line) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.kept != nil {
		l.kept.end()
		l.kept = nil
	}
	return nil
}

// ask asks over the connection that there is. One that breaks may have been there for a
// guest that is no more, and says nothing of this one.
func (l *Line) ask(ctx context.Context, op string, result any) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if last := l.kept; last != nil {
		l.kept = nil
		k, err := l.client.again(ctx, last, op, proto.Request{Again: true}, nil, nil)
		if err != nil {
			return err
		}
		var broken *ConnectionError
		if err = l.finish(k, result); ctx.Err() != nil || !errors.As(err, &broken) {
			return err
		}
	}
	k, err := l.client.begin(ctx, op, proto.Request{Again: true}, nil, nil)
	if err != nil {
		return err
	}
	return l.finish(k, result)
}

// finish ends a call, whose connection it keeps if another question may follow.
func (l *Line) finish(k *call, result any) error {
	err := k.conclude(result, k.finish(result))
	if err == nil && slices.Contains(k.features, proto.FeatureAgain) {
		k.stop()
		l.kept = k
		return nil
	}
	k.end()
	return err
}

// again begins an operation on the connection of another call, which has ended. It closes
// that if it fails.
func (c *Client) again(ctx context.Context, last *call, op string, request proto.Request, params any, queues map[uint16]*proto.Queue) (*call, error) {
	k := newCall(ctx, op, last.conn, last.wire, func() {})
	k.features, k.queues, k.kept = last.features, queues, c.keeperFor(request)
	frames, err := appendRequest(nil, op, request, params, queues)
	if err == nil {
		err = k.observe(c.cfg.Observer, request.OperationID, params)
	}
	if err != nil {
		k.end()
		return nil, err
	}
	_ = k.wire.Write(frames) // what came of it is found out by reading
	return k, nil
}
