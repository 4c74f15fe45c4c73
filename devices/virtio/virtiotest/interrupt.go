package virtiotest

import "sync/atomic"

// Interrupt is an interrupt line that counts its edges. Make it with
// NewInterrupt.
type Interrupt struct {
	edges atomic.Uint64
	edge  chan struct{}
}

// NewInterrupt returns a line without an edge yet.
func NewInterrupt() *Interrupt {
	return &Interrupt{edge: make(chan struct{}, 1)}
}

// Trigger implements devices.Interrupt.
func (i *Interrupt) Trigger() error {
	i.edges.Add(1)
	select {
	case i.edge <- struct{}{}:
	default:
	}
	return nil
}

// Count is the number of edges so far.
func (i *Interrupt) Count() uint64 { return i.edges.Load() }

// C has a value after an edge; several edges may leave one value.
func (i *Interrupt) C() <-chan struct{} { return i.edge }
