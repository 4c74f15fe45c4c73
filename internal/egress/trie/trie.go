// Package trie writes a network policy down for programs in the kernel: a map in which addresses lead to classes and classes to
// ports. policy.h is the programs' side of it.
package trie

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/devices/nic/policy"
)

// key is struct key of policy.h: how many bits count, the kind, and what is looked up.
type key [4 + 1 + 16]byte

// Kinds of keys.
const (
	kindAddress = 0
	kindPorts   = 1
)

// Flags of a region beside its class.
const (
	flagClosed = 1 << 31
	flagLocal  = 1 << 30
	flagTCP    = 1 << 29 // all ports of it
	flagUDP    = 1 << 28
	flagEcho   = 1 << 27
)

// trie is the contents of a policy's map.
type trie struct {
	keys   []key
	values []uint32
}

// newTrie writes regions down as the programs look them up.
func newTrie(regions []policy.Region) *trie {
	t := trie{keys: make([]key, 0, 2*len(regions)), values: make([]uint32, 0, 2*len(regions))}
	classes := [][]policy.Ports{nil} // class 0 offers nothing
	for i := range regions {
		r := &regions[i]
		value, some := split(r.Ports)
		class := slices.IndexFunc(classes, func(ports []policy.Ports) bool { return slices.Equal(ports, some) })
		if class < 0 {
			class = len(classes)
			classes = append(classes, some)
			t.addPorts(uint32(class), some)
		}
		value |= uint32(class)
		if r.Closed {
			value |= flagClosed
		}
		if r.Local {
			value |= flagLocal
		}
		t.add(addressKey(r.Prefix), value)
	}
	return &t
}

// split returns the flags for all of a protocol, and the ports of which only some are offered.
func split(list []policy.Ports) (flags uint32, some []policy.Ports) {
	for _, p := range list {
		switch p {
		case policy.Ports{Protocol: policy.TCP, First: 0, Last: 65535}:
			flags |= flagTCP
		case policy.Ports{Protocol: policy.UDP, First: 0, Last: 65535}:
			flags |= flagUDP
		case policy.Ports{Protocol: policy.ICMP}:
			flags |= flagEcho
		default:
			some = append(some, p)
		}
	}
	return flags, some
}

func (t *trie) add(k key, value uint32) {
	t.keys, t.values = append(t.keys, k), append(t.values, value)
}

// newKey returns a key of which so many bits of the data count.
func newKey(kind byte, data []byte, count int) (k key) {
	binary.NativeEndian.PutUint32(k[:4], uint32(8+count))
	k[4] = kind
	copy(k[5:], data)
	return k
}

// addressKey is a prefix as one of IPv6.
func addressKey(p netip.Prefix) key {
	address, count := p.Addr().As16(), p.Bits()
	if p.Addr().Is4() {
		count += 96
	}
	return newKey(kindAddress, address[:], count)
}

// Numbers are the protocols' of IP.
var Numbers = map[policy.Protocol]byte{policy.TCP: 6, policy.UDP: 17}

// addPorts adds what a class offers, in blocks of port numbers that begin with the same bits.
func (t *trie) addPorts(class uint32, list []policy.Ports) {
	for _, p := range list {
		for first, end := uint32(p.First), uint32(p.Last)+1; first < end; {
			size := min(bits.TrailingZeros32(first), bits.Len32(end-first)-1, 16)
			var data [4 + 1 + 2]byte
			binary.BigEndian.PutUint32(data[:], class)
			data[4] = Numbers[p.Protocol]
			binary.BigEndian.PutUint16(data[5:], uint16(first))
			t.add(newKey(kindPorts, data[:], 32+8+16-size), 1)
			first += 1 << size
		}
	}
}

// newMap makes a map of a policy. The caller closes it.
func newMap(regions []policy.Region) (*ebpf.Map, error) {
	t := newTrie(regions)
	m, err := ebpf.NewMap(&ebpf.MapSpec{
		Type: ebpf.LPMTrie, KeySize: uint32(len(key{})), ValueSize: 4, MaxEntries: uint32(len(t.keys)), Flags: unix.BPF_F_NO_PREALLOC,
	})
	if err != nil {
		return nil, fmt.Errorf("create policy: %w", err)
	}
	if _, err := m.BatchUpdate(t.keys, t.values, nil); err != nil {
		m.Close()
		return nil, fmt.Errorf("fill policy of %d lines: %w", len(t.keys), err)
	}
	return m, nil
}

// Set puts a policy, as a map, into the map in which programs look for it. It returns when they find it there.
func Set[K any](policies *ebpf.Map, key K, regions []policy.Region, how ebpf.MapUpdateFlags) error {
	m, err := newMap(regions)
	if err != nil {
		return err
	}
	wanted, err := mapID(m)
	var own *ebpf.Map
	if err == nil {
		own, err = policies.Clone()
	}
	if err != nil {
		m.Close()
		return fmt.Errorf("set policy: %w", err)
	}
	// The call returns when every program that may have found the policy before has come to its end. That takes the kernel some ten
	// milliseconds without work, for which nobody has to wait.
	put := make(chan error, 1)
	go func() {
		defer m.Close()
		defer own.Close()
		put <- own.Update(key, m, how)
	}()
	for pause := 10 * time.Microsecond; ; pause = min(2*pause, time.Millisecond) {
		select {
		case err := <-put:
			if err != nil {
				return fmt.Errorf("set policy: %w", err)
			}
			return nil
		default:
		}
		var there ebpf.MapID
		if policies.Lookup(key, &there) == nil && there == wanted {
			return nil
		}
		time.Sleep(pause)
	}
}
