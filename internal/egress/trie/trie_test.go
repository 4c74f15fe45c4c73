package trie

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/internal/testkit"
)

// matches says whether so many bits of a key are those of another.
func (k key) matches(o key) bool {
	count := int(binary.NativeEndian.Uint32(k[:4]))
	for i := range count {
		if (k[4+i/8]^o[4+i/8])>>(7-i%8)&1 != 0 {
			return false
		}
	}
	return true
}

// find looks a whole key up, as the kernel does: what has most bits in common counts.
func (t *trie) find(k key) (value uint32, ok bool) {
	longest := uint32(0)
	for i := range t.keys {
		if n := binary.NativeEndian.Uint32(t.keys[i][:4]); t.keys[i].matches(k) && n >= longest {
			longest, value, ok = n, t.values[i], true
		}
	}
	return value, ok
}

func portKey(class uint32, protocol byte, port uint16) key {
	data := append(binary.BigEndian.AppendUint32(nil, class), protocol)
	return newKey(kindPorts, binary.BigEndian.AppendUint16(data, port), 32+8+16)
}

// TestTriePorts: the blocks of a class are its ports and no others, whatever their ends.
func TestTriePorts(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	ranges := []policy.Ports{{Protocol: policy.TCP, First: 0, Last: 65535}, {Protocol: policy.UDP, First: 65535, Last: 65535},
		{Protocol: policy.TCP, First: 1, Last: 65534}, {Protocol: policy.TCP, First: 0, Last: 0}}
	for range 50 {
		a, b := uint16(random.Uint32()), uint16(random.Uint32())
		ranges = append(ranges, policy.Ports{Protocol: policy.UDP, First: min(a, b), Last: max(a, b)})
	}
	for _, p := range ranges {
		var tr trie
		tr.addPorts(0x01020304, []policy.Ports{p})
		if len(tr.keys) > 30 {
			t.Errorf("%v: %d blocks", p, len(tr.keys))
		}
		for _, port := range []uint16{0, 1, p.First - 1, p.First, p.First + 1, p.Last - 1, p.Last, p.Last + 1, 65535, p.First/2 + p.Last/2} {
			_, got := tr.find(portKey(0x01020304, Numbers[p.Protocol], port))
			if want := p.First <= port && port <= p.Last; got != want {
				t.Errorf("%v: port %d is in it: %v", p, port, got)
			}
			if _, got := tr.find(portKey(0x01020305, Numbers[p.Protocol], port)); got {
				t.Errorf("%v: port %d is another class's", p, port)
			}
		}
	}
}

// TestTrieAddresses: regions that offer the same share a class, and addresses of IPv4 are found as mapped ones.
func TestTrieAddresses(t *testing.T) {
	web := []policy.Ports{{Protocol: policy.TCP, First: 80, Last: 80}}
	tr := newTrie([]policy.Region{
		{Prefix: netip.MustParsePrefix("0.0.0.0/0")},
		{Prefix: netip.MustParsePrefix("::/0"), Closed: true},
		{Prefix: netip.MustParsePrefix("9.0.0.0/8"), Ports: web},
		{Prefix: netip.MustParsePrefix("9.9.9.9/32"), Ports: web, Closed: true, Local: true},
		{Prefix: netip.MustParsePrefix("9.9.9.8/32"), Ports: []policy.Ports{
			{Protocol: policy.TCP, First: 0, Last: 65535}, {Protocol: policy.UDP, First: 53, Last: 53}, {Protocol: policy.ICMP}}},
		{Prefix: netip.MustParsePrefix("9.9.9.7/32"), Ports: []policy.Ports{{Protocol: policy.UDP, First: 0, Last: 65535}}},
	})
	for address, want := range map[string]uint32{
		"8.8.8.8": 0, "::ffff:9.1.1.1": 1, "9.9.9.9": 1 | flagClosed | flagLocal,
		"9.9.9.8": 2 | flagTCP | flagEcho, "9.9.9.7": flagUDP, "2600::1": flagClosed, "::1": flagClosed,
	} {
		a := netip.MustParseAddr(address).As16()
		if got, ok := tr.find(newKey(kindAddress, a[:], 128)); !ok || got != want {
			t.Errorf("%s leads to %#x (%v), not %#x", address, got, ok, want)
		}
	}
	if _, ok := tr.find(portKey(1, 6, 80)); !ok || len(tr.keys) != 8 {
		t.Errorf("%d keys: %v", len(tr.keys), tr.keys)
	}
}

// TestMapID compares with what the kernel says in another place.
func TestMapID(t *testing.T) {
	testkit.RequireKVM(t) // by which the lab finds the test
	testkit.RequireRoot(t)
	m, err := newMap([]policy.Region{{Prefix: netip.MustParsePrefix("0.0.0.0/0")}})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	info, err := m.Info()
	if err != nil {
		t.Fatal(err)
	}
	want, _ := info.ID()
	if got, err := mapID(m); err != nil || got != want || want == 0 {
		t.Errorf("map %d (%v), not %d", got, err, want)
	}
}
