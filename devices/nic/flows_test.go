package nic

import (
	"net/netip"
	"testing"
)

// What is saved can be restored, however many connections there were.
func TestSavedFlows(t *testing.T) {
	for _, count := range []int{0, 1, MaxFlows, MaxFlows + 1, 2 * MaxFlows} {
		var list []Flow
		for i := range count {
			list = append(list, Flow{Guest: netip.AddrPortFrom(Guest4, uint16(i)), Remote: netip.AddrPortFrom(Resolver4, 53)})
		}
		data, err := EncodeFlows(list)
		if err != nil {
			t.Fatal(err)
		}
		got, err := DecodeFlows(data)
		if want := min(count, MaxFlows); err != nil || len(got) != want {
			t.Errorf("%d connections: %d are restored, want %d: %v", count, len(got), want, err)
		}
	}
}
