package policy

import "time"

// Refusal is something that the guest tried and was refused, however often.
type Refusal struct {
	// Protocol is tcp, udp, icmp or dns; of frames that are none of these arp, icmp6, ip-47, ether-8100.
	Protocol string `json:"protocol"`
	// Address is where it was to go, or whose name it was sent in.
	Address string    `json:"address,omitempty"`
	Port    uint16    `json:"port,omitempty"`
	Name    string    `json:"name,omitempty"`
	Reason  Reason    `json:"reason"`
	Count   uint64    `json:"count"`
	Last    time.Time `json:"last"`
}

// Status is what has become of what a guest tried.
type Status struct {
	Connections int `json:"connections"` // of TCP that are open
	Sessions    int `json:"sessions"`    // of UDP
	// Bytes that TCP and UDP have carried from and to the guest.
	SentBytes     uint64 `json:"sent_bytes"`
	ReceivedBytes uint64 `json:"received_bytes"`
	// Refused is how often something was refused, and Refusals what, the latest first.
	Refused  uint64    `json:"refused"`
	Refusals []Refusal `json:"refusals,omitempty"`
	// Frames counts the guest's frames by their class.
	Frames map[string]uint64 `json:"frames,omitempty"`
}
