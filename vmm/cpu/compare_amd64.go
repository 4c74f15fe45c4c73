package cpu

import (
	"fmt"
	"strings"
)

// An IncompatibleError says why this host cannot continue a saved vCPU.
type IncompatibleError struct {
	// Features are those the vCPU was told it has and the host cannot give it,
	// spelled as in /proc/cpuinfo.
	Features []string
	// Details are other differences, each a phrase.
	Details []string
}

func (e *IncompatibleError) Error() string {
	var parts []string
	if len(e.Features) > 0 {
		parts = append(parts, "host cpu lacks "+strings.Join(e.Features, ", "))
	}
	return strings.Join(append(parts, e.Details...), "; ")
}

// compare returns an [*IncompatibleError] unless a host that supports the one
// table can run a vCPU that has the other.
func compare(saved, supported cpuid) error {
	var e IncompatibleError
	if s, h := saved.vendor(), supported.vendor(); s != h {
		// A guest has chosen instructions and workarounds by this name.
		e.Details = append(e.Details, fmt.Sprintf("cpu vendor is %q, host has %q", s, h))
	}
	e.Features = missingFeatures(saved, supported)
	e.Details = append(e.Details, stateDifferences(saved, supported)...)
	const addressSizes = 0x80000008
	if s, h := saved.value(addressSizes, 0, eax)&0xff, supported.value(addressSizes, 0, eax)&0xff; s > h {
		e.Details = append(e.Details, fmt.Sprintf("physical addresses have %d bits, host has %d", s, h))
	}
	if len(e.Features) == 0 && len(e.Details) == 0 {
		return nil
	}
	return &e
}

func missingFeatures(saved, supported cpuid) []string {
	var names []string
	for _, w := range featureWords() {
		missing := saved.value(w.function, w.index, w.register) &^
			supported.value(w.function, w.index, w.register) &^ ignoredBits(w)
		for bit := range 32 {
			if missing&(1<<bit) != 0 {
				names = append(names, w.name(bit))
			}
		}
	}
	return names
}

// stateDifferences compares leaf 0xd: the components of extended state that
// exist and where they lie in it, which differs between processor families.
func stateDifferences(saved, supported cpuid) []string {
	const leaf = 0xd
	var list []string
	components := func(c cpuid) uint64 {
		return uint64(c.value(leaf, 0, edx))<<32 | uint64(c.value(leaf, 0, eax))
	}
	s, h := components(saved), components(supported)
	if missing := s &^ h; missing != 0 {
		list = append(list, fmt.Sprintf("extended state has components %#x that the host lacks", missing))
	}
	for i := uint32(2); i < 63; i++ { // 0 and 1 have fixed places, 63 is none
		if s&h>>i&1 == 0 {
			continue
		}
		for _, r := range []register{eax, ebx} { // size, offset
			if a, b := saved.value(leaf, i, r), supported.value(leaf, i, r); a != b {
				list = append(list, fmt.Sprintf("extended state component %d is laid out otherwise on the host", i))
				break
			}
		}
	}
	return list
}
