package client

import (
	"sync"

	"github.com/forkvm/forkvm/agent/proto"
)

// Keeping returns a client that keeps its connection from one operation to the next, for
// who asks one guest for several things in a row: each is spared the making of one. It has
// one connection at rest at most; operations that run at the same time have others. When
// the connection breaks while it rests, the next operation fails: nobody can tell whether
// the guest agent had begun it. Whoever has the client closes it. With an older guest
// agent it is like any other client.
func (c *Client) Keeping() *Client {
	keeping := *c
	keeping.kept = &keeper{}
	return &keeping
}

// Close ends the connection that the client keeps, if it does. The client can be used
// again.
func (c *Client) Close() error {
	if c.kept == nil {
		return nil
	}
	if last := c.kept.take(); last != nil {
		return last.conn.Close()
	}
	return nil
}

// keeper has the connection of a call that has ended.
type keeper struct {
	mu   sync.Mutex
	last *call // nil: there is none
}

// take returns the call whose connection is free, and nil if there is none.
func (k *keeper) take() *call {
	k.mu.Lock()
	defer k.mu.Unlock()
	last := k.last
	k.last = nil
	return last
}

// put takes the connection of a call that has ended, and closes it if there is one.
func (k *keeper) put(ended *call) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.last != nil {
		ended.conn.Close()
		return
	}
	k.last = ended
}

// keeperFor is who takes the connection behind a request.
func (c *Client) keeperFor(request proto.Request) *keeper {
	if !request.Again {
		return nil
	}
	return c.kept
}
