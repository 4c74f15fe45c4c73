package virtio

import "fmt"

// ProtocolError says how a driver broke the rules of a queue or of the
// transport. The device stops and asks for a reset; the machine goes on.
type ProtocolError struct {
	// Queue is the index of the queue, or -1 for the transport itself.
	Queue int
	// Reason says what was wrong, with the offending values.
	Reason string
}

func (e *ProtocolError) Error() string {
	if e.Queue < 0 {
		return "follow driver: " + e.Reason
	}
	return fmt.Sprintf("follow driver (queue %d): %s", e.Queue, e.Reason)
}
