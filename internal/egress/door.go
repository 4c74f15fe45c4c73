package egress

import (
	"fmt"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/internal/egress/trie"
)

// door is struct door of egress.c.
type door struct {
	Address  [16]byte
	Port     uint16
	Protocol uint8
	_        uint8
}

// peerSize is the size of struct peer of egress.c.
const peerSize = 16 + 2 + 2

// maxPeers is how many of those who have sent datagrams to a group's doors may be answered, the latest.
const maxPeers = 4096

// newDoor is where a published port listens.
func newDoor(p policy.Port) door {
	d := door{Port: p.Host.Port(), Protocol: trie.Numbers[p.Protocol]}
	if a := p.Host.Addr(); !a.IsUnspecified() {
		d.Address = a.As16()
	}
	return d
}

func forDatagrams(ports []policy.Port) bool {
	return slices.ContainsFunc(ports, func(p policy.Port) bool { return p.Protocol == policy.UDP })
}

// open makes a group's doors.
func open(id uint64, ports []policy.Port) error {
	list := &ebpf.MapSpec{Type: ebpf.Hash, KeySize: 20, ValueSize: 1, MaxEntries: uint32(len(ports))}
	for _, p := range ports {
		list.Contents = append(list.Contents, ebpf.MapKV{Key: newDoor(p), Value: uint8(1)})
	}
	if err := give(doorsMap, id, list); err != nil {
		return fmt.Errorf("open ports: %w", err)
	}
	if !forDatagrams(ports) {
		return nil
	}
	peers := &ebpf.MapSpec{Type: ebpf.LRUHash, KeySize: peerSize, ValueSize: 1, MaxEntries: maxPeers}
	if err := give(peersMap, id, peers); err != nil {
		return fmt.Errorf("open ports: %w", err)
	}
	return nil
}

// give makes a map for a group and puts it into one of maps.
func give(name string, id uint64, spec *ebpf.MapSpec) error {
	m, err := ebpf.NewMap(spec)
	if err != nil {
		return err
	}
	defer m.Close()
	all, err := pinned(name)
	if err != nil {
		return err
	}
	defer all.Close()
	return all.Put(id, m)
}
