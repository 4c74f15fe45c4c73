package process

import (
	"slices"
	"testing"
	"time"

	"github.com/forkvm/forkvm/devices/nic/policy"
)

// Each refusal is told once, also when the network has forgotten some and counts others anew.
func TestUnreported(t *testing.T) {
	refusal := func(name string, count uint64) policy.Refusal {
		return policy.Refusal{Protocol: "dns", Name: name, Count: count, Last: time.Unix(int64(count), 0)}
	}
	var u unreported
	for i, c := range []struct {
		total  uint64
		has    []policy.Refusal // the latest first
		told   []string         // the first first
		counts []uint64
		others uint64
	}{
		{0, nil, nil, nil, 0},
		{3, []policy.Refusal{refusal("b", 1), refusal("a", 2)}, []string{"a", "b"}, []uint64{2, 1}, 0},
		{3, []policy.Refusal{refusal("b", 1), refusal("a", 2)}, nil, nil, 0},
		{4, []policy.Refusal{refusal("a", 3), refusal("b", 1)}, []string{"a"}, []uint64{1}, 0},
		{104, []policy.Refusal{refusal("c", 7)}, []string{"c"}, []uint64{7}, 93},
		{105, []policy.Refusal{refusal("a", 1), refusal("c", 7)}, []string{"a"}, []uint64{1}, 0},
	} {
		r := u.take(&policy.Status{Refused: c.total, Refusals: c.has})
		var told []string
		var counts []uint64
		for _, one := range r.Refusals {
			told, counts = append(told, one.Name), append(counts, one.Count)
		}
		if !slices.Equal(told, c.told) || !slices.Equal(counts, c.counts) || r.Others != c.others || r.Empty() != (len(c.told) == 0) {
			t.Errorf("%d: told %v %v and %d others", i, told, counts, r.Others)
		}
	}
}
