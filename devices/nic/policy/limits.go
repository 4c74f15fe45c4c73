package policy

import "fmt"

// Limits bound what a guest takes of its host's network. Fields that are 0 say nothing: of connections and sessions there are the
// defaults then, and the others have no bound.
type Limits struct {
	// Connections is how many connections of TCP may be open, those being made included; more are refused.
	Connections int `json:"connections,omitempty"`
	// Sessions is how many pairs of UDP addresses have a socket; for one more the one that was idle longest ends.
	Sessions int `json:"sessions,omitempty"`
	// Rate is in bytes a second, each way.
	Rate uint64 `json:"rate,omitempty"`
	// Packets is how many packets pass in a second, each way; of one that is sent in segments each counts. More are lost.
	Packets uint64 `json:"packets,omitempty"`
	// Bytes is how many bytes pass in the VM's life, both ways together. Then everything ends.
	Bytes uint64 `json:"bytes,omitempty"`
}

// Defaults and bounds of limits.
const (
	DefaultConnections = 512
	DefaultSessions    = 256
	maxConnections     = 1 << 14
	minRate            = 1 << 10
)

// compile checks limits and puts the defaults in.
func (l Limits) compile() (Limits, error) {
	if l.Connections == 0 {
		l.Connections = DefaultConnections
	}
	if l.Sessions == 0 {
		l.Sessions = DefaultSessions
	}
	switch {
	case l.Connections < 0 || l.Connections > maxConnections || l.Sessions < 0 || l.Sessions > maxConnections:
		return l, fmt.Errorf("read network policy: limits of %d connections and %d sessions: each is 1 to %d", l.Connections, l.Sessions, maxConnections)
	case l.Rate != 0 && l.Rate < minRate:
		return l, fmt.Errorf("read network policy: a limit of %d bytes a second: at least %d are needed", l.Rate, minRate)
	}
	return l, nil
}

// Limits are the policy's, with defaults.
func (r *Rules) Limits() Limits { return r.limits }
