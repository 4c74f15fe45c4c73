package machine

import (
	"os"
	"testing"
)

func TestDemand(t *testing.T) {
	const mib = 1 << 20
	for _, c := range []struct {
		name       string
		demand     Demand
		sure, need uint64 // MiB
	}{
		{"a VM", Demand{VMs: 1, RAM: 512 * mib}, 8, 520},
		{"a fork into three", Demand{VMs: 4, RAM: 512 * mib, Freeze: true}, 56, 568},
		{"a fork into three, with room for each", Demand{VMs: 4, RAM: 512 * mib, Headroom: 100 * mib, Freeze: true}, 424, 424},
		{"VMs with room for each", Demand{VMs: 4, RAM: 512 * mib, Headroom: 100 * mib}, 400, 400},
		{"a snapshot", Demand{RAM: 512 * mib, Freeze: true}, 24, 24},
	} {
		if sure, need := c.demand.Sure(), c.demand.Need(); sure != c.sure*mib || need != c.need*mib {
			t.Errorf("%s: %d and %d MiB, want %d and %d", c.name, sure/mib, need/mib, c.sure, c.need)
		}
	}
	if err := (Demand{VMs: 1000, RAM: 1 << 50, Headroom: Unlimited}).Check(os.Getpid(), 0); err != nil {
		t.Error(err)
	}
}
