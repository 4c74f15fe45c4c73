package proto

// Hello is the first frame in either direction. Its encoding and that of the
// frame header are the same in all versions.
type Hello struct {
	// Protocol is always Name.
	Protocol string `json:"protocol"`
	// Min and Max are the versions that the sender can speak.
	Min int `json:"min"`
	Max int `json:"max"`
	// Speaks is, from the host, the version in which its request is written
	// (it follows without waiting for an answer); from the guest, the version
	// of everything that follows: the same one, or 0 together with an Error
	// frame when it is outside the guest's range.
	Speaks int `json:"speaks"`
	// Software names the sender's program and its version, for messages only.
	Software string `json:"software,omitempty"`
	// Features are the words that a request may put into Requires.
	Features []string `json:"features,omitempty"`
}

// Check tells whether the peer that sent h is one to talk to at all. The error
// is a *ProtocolError.
func (h Hello) Check() error {
	if h.Protocol != Name {
		return violation("peer speaks %.40q, want %q", h.Protocol, Name)
	}
	if h.Min < 1 || h.Max < h.Min {
		return violation("peer offers versions %d to %d", h.Min, h.Max)
	}
	return nil
}

// Common returns the highest version that both sides speak, and false when
// there is none.
func (h Hello) Common(lowest, highest int) (int, bool) {
	v := min(h.Max, highest)
	return v, v >= h.Min && v >= lowest
}
