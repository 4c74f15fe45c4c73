package nic

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
)

// Flow is a connection of TCP of the guest. The far ends of a guest's connections do not follow it into a clone, nor over a
// reset: backends save which there are, and have them ended when the guest has its new addresses.
type Flow struct {
	Guest  netip.AddrPort `json:"guest"`
	Remote netip.AddrPort `json:"remote"`
}

// Compare orders flows.
func (f Flow) Compare(o Flow) int {
	return cmp.Or(f.Guest.Compare(o.Guest), f.Remote.Compare(o.Remote))
}

// flows is what backends save: the guest's ends of its connections, and their far ends.
type flows struct {
	Version int    `json:"version"`
	Flows   []Flow `json:"flows,omitempty"`
}

const (
	flowsVersion = 1
	// MaxFlows is how many connections of a guest are saved.
	MaxFlows = 1 << 14
)

// EncodeFlows returns what Backend.Save does. Without a connection there is nothing to say. Of too many some
// are left out.
func EncodeFlows(list []Flow) (json.RawMessage, error) {
	if len(list) == 0 {
		return nil, nil
	}
	slices.SortFunc(list, Flow.Compare)
	list = slices.Compact(list)
	return json.Marshal(flows{Version: flowsVersion, Flows: list[:min(len(list), MaxFlows)]})
}

// DecodeFlows reads what EncodeFlows has made, whichever backend saved it.
func DecodeFlows(data json.RawMessage) ([]Flow, error) {
	var s flows
	if len(data) > 0 {
		if err := json.Unmarshal(data, &s); err != nil {
			return nil, fmt.Errorf("decode network state: %w", err)
		}
		if s.Version != flowsVersion || len(s.Flows) > MaxFlows {
			return nil, fmt.Errorf("network state has version %d and %d connections, need version %d and at most %d", s.Version, len(s.Flows), flowsVersion, MaxFlows)
		}
	}
	for _, f := range s.Flows {
		if a := f.Guest.Addr(); a != Guest4 && a != Guest6 || a.Is4() != f.Remote.Addr().Is4() || f.Remote.Addr().Zone() != "" {
			return nil, fmt.Errorf("network state has a connection from %v to %v", f.Guest, f.Remote)
		}
	}
	return s.Flows, nil
}

const (
	segmentSize = 20 // of TCP, without options and data
	protocolTCP = 6
	tcpSYN      = 0x02
)

// Probe makes a frame for a guest's card with a segment that no connection can take for its own: a SYN. An open connection
// answers it with what it expects (RFC 5961, section 4.2), and who answers that has a reset that fits.
func (f Flow) Probe(card MAC) []byte {
	be := binary.BigEndian
	from, to := f.Remote.Addr(), f.Guest.Addr()
	frame := append(card[:], GatewayMAC[:]...)
	sum := uint32(protocolTCP + segmentSize)
	if to.Is4() {
		frame = be.AppendUint16(frame, 0x0800)
		packet := []byte{0x45, 0, 0, 20 + segmentSize, 0, 0, 0, 0, 64, protocolTCP, 0, 0}
		packet = append(append(packet, from.AsSlice()...), to.AsSlice()...)
		be.PutUint16(packet[10:], ^folded(added(0, packet)))
		frame = append(frame, packet...)
	} else {
		frame = be.AppendUint16(frame, 0x86dd)
		frame = append(frame, 0x60, 0, 0, 0, 0, segmentSize, protocolTCP, 64)
		frame = append(append(frame, from.AsSlice()...), to.AsSlice()...)
	}
	segment := be.AppendUint16(nil, f.Remote.Port())
	segment = be.AppendUint16(segment, f.Guest.Port())
	segment = append(segment, 0, 0, 0, 0, 0, 0, 0, 0, segmentSize/4<<4, tcpSYN, 4, 0, 0, 0, 0, 0)
	sum = added(added(added(sum, from.AsSlice()), to.AsSlice()), segment)
	be.PutUint16(segment[16:], ^folded(sum))
	return append(frame, segment...)
}

// added adds an even number of bytes to a checksum of the internet (RFC 1071).
func added(sum uint32, data []byte) uint32 {
	for i := 0; i < len(data); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(data[i:]))
	}
	return sum
}

func folded(sum uint32) uint16 {
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return uint16(sum)
}
