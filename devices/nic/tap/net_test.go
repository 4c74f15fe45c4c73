package tap

import (
	"encoding/binary"
	"net/netip"
	"os"
	"slices"
	"testing"

	"github.com/forkvm/forkvm/devices/nic"
	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/internal/linux"
)

// segment is a frame with a segment of a flow, sent by its guest or by the other.
func segment(f nic.Flow, flags byte, sent bool) []byte {
	frame := f.Probe(nic.MAC{2})
	at := ethernetSize + ipv4Size
	if f.Guest.Addr().Is6() {
		at = ethernetSize + ipv6Size
	}
	frame[at+13] = flags
	if !sent {
		return frame
	}
	size := f.Guest.Addr().BitLen() / 8
	addresses := frame[at-2*size : at]
	swapped := append(slices.Clone(addresses[size:]), addresses[:size]...)
	copy(addresses, swapped)
	binary.BigEndian.PutUint16(frame[at:], f.Guest.Port())
	binary.BigEndian.PutUint16(frame[at+2:], f.Remote.Port())
	return frame
}

// Connections are known from the far end's first segment until both ends, or a reset, have ended them.
func TestTrack(t *testing.T) {
	to := func(remote string, guest netip.Addr) nic.Flow {
		return nic.Flow{Guest: netip.AddrPortFrom(guest, 1234), Remote: netip.MustParseAddrPort(remote)}
	}
	for _, f := range []nic.Flow{to("93.184.216.34:80", nic.Guest4), to("[2001:db8::1]:80", nic.Guest6)} {
		n := &Net{flows: flows{}}
		for _, step := range []struct {
			flags byte
			sent  bool
			open  int
		}{
			{flagACK, true, 0}, {flagSYN, false, 0}, {flagSYN, true, 0}, {flagSYN | flagACK, true, 0}, {flagSYN | flagACK, false, 1}, {flagACK, true, 1},
			{flagFIN | flagACK, true, 1}, {flagFIN | flagACK, true, 1}, {flagFIN | flagACK, false, 0},
			{flagSYN | flagACK, false, 1}, {flagRST, false, 0}, {flagSYN | flagACK, false, 1}, {flagRST | flagACK, true, 0}, {flagFIN, true, 0},
		} {
			n.track(segment(f, step.flags, step.sent), step.sent)
			if got := n.flows.list(); len(got) != step.open || step.open == 1 && got[0] != f {
				t.Errorf("%v: %v after %+v", f, got, step)
			}
		}
	}
}

// Of more connections than are saved the newest stay.
func TestTrackMany(t *testing.T) {
	f := flows{}
	var last nic.Flow
	for i := range nic.MaxFlows + 1 {
		last = nic.Flow{Guest: netip.AddrPortFrom(nic.Guest4, uint16(i)), Remote: netip.AddrPortFrom(nic.Resolver4, uint16(1+i>>16))}
		f.note(last, flagSYN|flagACK, false)
	}
	if _, ok := f[last]; !ok || len(f) > nic.MaxFlows {
		t.Errorf("%d of %d, with the last: %t", len(f), nic.MaxFlows, ok)
	}
}

func TestNewRefuses(t *testing.T) {
	rules, err := policy.Policy{}.Compile()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := New(Config{Guest: nic.MAC{2}, Policy: rules}); err == nil {
		t.Error("no device")
	}
}

// What the programs have counted and told before there was a network is none of it.
func TestNewCountsFromThenOn(t *testing.T) {
	file := func(size int, words map[int]uint64) *os.File {
		t.Helper()
		f, err := linux.MemoryFile("map")
		if err == nil {
			err = f.Truncate(int64(size))
		}
		for at, word := range words {
			if err == nil {
				_, err = f.WriteAt(binary.NativeEndian.AppendUint64(nil, word), int64(at))
			}
		}
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	page := os.Getpagesize()
	counts := file(page, map[int]uint64{8 * int(ClassStation): 7, 8 * int(bytesFrom): 1000})
	events := file(2*page+2*eventsSize, map[int]uint64{page: recordHeader + eventSize, 2 * page: eventSize})
	rules, err := policy.Policy{}.Compile()
	if err != nil {
		t.Fatal(err)
	}
	counted, err := linux.Duplicate(counts)
	if err != nil {
		t.Fatal(err)
	}
	defer counted.Close()
	n, err := New(Config{Tap: file(0, nil), Counts: counts, Events: events, Guest: nic.MAC{2}, Policy: rules})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	if s := n.Status(); len(s.Frames) != 0 || s.Refused != 0 || len(s.Refusals) != 0 || s.SentBytes != 0 {
		t.Errorf("a new network has seen %+v", s)
	}
	if _, err := counted.WriteAt(binary.NativeEndian.AppendUint64(nil, 9), 8*int64(ClassStation)); err != nil {
		t.Fatal(err)
	}
	if s := n.Status(); s.Frames["station"] != 2 || s.Refused != 2 {
		t.Errorf("of two frames it has seen %+v", s)
	}
}

// FuzzTrack: no frame, whoever sends it, makes more flows than there may be, or reads behind its end.
func FuzzTrack(f *testing.F) {
	flow := nic.Flow{Guest: netip.AddrPortFrom(nic.Guest6, 1), Remote: netip.MustParseAddrPort("[2001:db8::1]:80")}
	f.Add(segment(flow, flagSYN|flagACK, false), false)
	f.Add(segment(flow, flagRST, true), true)
	f.Add([]byte{}, true)
	f.Fuzz(func(t *testing.T, frame []byte, sent bool) {
		n := &Net{flows: flows{}}
		n.track(frame, sent)
		for _, one := range n.flows.list() {
			if a := one.Guest.Addr(); sent || a != nic.Guest4 && a != nic.Guest6 {
				t.Errorf("flow %v of %x", one, frame)
			}
		}
	})
}
