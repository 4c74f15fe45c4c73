package vsock

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/forkvm/forkvm/devices"
	"github.com/forkvm/forkvm/devices/virtio"
)

const stateVersion = 1

// maxSavedConnections bounds what a state may name. It is far above any sensible Config.MaxConnections.
const maxSavedConnections = 1 << 16

// state is the saved form of the device, besides the transport's. Connections do not survive: they are named so that a restored
// device can tell the guest.
type state struct {
	Version  int    `json:"version"`
	GuestCID uint32 `json:"guest_cid"`
	// Active: a driver ran the device.
	Active bool `json:"active"`
	// NextPort is the next port of the host for a connection to the guest. It goes on, so that new connections cannot be
	// mistaken for old ones.
	NextPort    uint32            `json:"next_port"`
	Unhandled   int               `json:"unhandled_resets,omitempty"`
	Connections []savedConnection `json:"connections,omitempty"`
}

type savedConnection struct {
	HostPort  uint32 `json:"host_port"`
	GuestPort uint32 `json:"guest_port"`
}

// Save implements virtio.Device.
func (r *router) Save() (json.RawMessage, error) {
	r.work.Lock()
	defer r.work.Unlock()
	s := state{
		Version:   stateVersion,
		GuestCID:  uint32(r.guestCID),
		Active:    r.queues != nil,
		NextPort:  r.nextPort,
		Unhandled: r.restart.unhandled,
	}
	for p, c := range r.table {
		if c.phase != phaseRequesting || c.requested {
			s.Connections = append(s.Connections, savedConnection{HostPort: p.host, GuestPort: p.guest})
		}
	}
	for _, p := range r.restart.connections {
		s.Connections = append(s.Connections, savedConnection{HostPort: p.host, GuestPort: p.guest})
	}
	// Resets that the guest has not had a buffer for.
	for _, h := range r.replies {
		if h.sourceCID == HostCID && h.socketType == typeStream {
			s.Connections = append(s.Connections, savedConnection{HostPort: h.sourcePort, GuestPort: h.destinationPort})
		}
	}
	slices.SortFunc(s.Connections, func(a, b savedConnection) int {
		return cmp.Or(cmp.Compare(a.HostPort, b.HostPort), cmp.Compare(a.GuestPort, b.GuestPort))
	})
	s.Connections = slices.Compact(s.Connections)
	return json.Marshal(s)
}

// Restore implements virtio.Device.
func (r *router) Restore(raw json.RawMessage) error {
	s, err := r.saved.Decode(raw, devices.DecodeState[state])
	if err != nil {
		return fmt.Errorf("decode vsock state: %w", err)
	}
	switch {
	case s.Version != stateVersion:
		return fmt.Errorf("vsock state has version %d, need %d", s.Version, stateVersion)
	case !validCID(s.GuestCID) || uint64(s.GuestCID) != r.guestCID:
		return fmt.Errorf("vsock state has guest address %d", s.GuestCID)
	case s.NextPort < firstPort || s.NextPort == 0xffffffff:
		return fmt.Errorf("vsock state has next port %d", s.NextPort)
	case s.Unhandled < 0 || s.Unhandled > eventQueueSize:
		return fmt.Errorf("vsock state has %d unhandled resets", s.Unhandled)
	case len(s.Connections) > maxSavedConnections:
		return fmt.Errorf("vsock state has %d connections", len(s.Connections))
	}
	r.nextPort = s.NextPort
	r.restart = restart{}
	if !s.Active {
		return nil
	}
	r.restart = restart{stage: restartSaved, unhandled: s.Unhandled}
	for _, c := range s.Connections {
		r.restart.connections = append(r.restart.connections, portPair{host: c.HostPort, guest: c.GuestPort})
	}
	return nil
}

// savedGuestCID looks for the guest's address in a transport's state. The address is part of the configuration that the
// transport is made of, and so is needed before Restore, which checks it.
func savedGuestCID(raw []byte) (uint32, bool) {
	var outer virtio.State
	var s state
	if json.Unmarshal(raw, &outer) != nil || json.Unmarshal(outer.Device, &s) != nil {
		return 0, false
	}
	return s.GuestCID, validCID(s.GuestCID)
}
