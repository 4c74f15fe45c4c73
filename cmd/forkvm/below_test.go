package main

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/internal/egress"
	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/testkit/attempt"
)

// everything opens to a guest what no policy of a mode does.
func everything() []string {
	set := []string{"public", "--allow", hostAddress, "--allow", hostAddress6, "--allow", "93.184.216.255", "--allow", "127.0.0.1"}
	for _, special := range []string{
		"10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.2.0/24", "192.168.0.0/16", "198.18.0.0/15",
		"198.51.100.0/24", "240.0.0.0/4",
		"64:ff9b:1::/48", "100::/64", "2001:db8::/32", "fc00::/7", "fe80::/10", "fec0::/10", "2001::/32",
	} {
		set = append(set, "--allow", special)
	}
	return set
}

// matter says whose matter an attempt is that a process without a policy makes for its guest.
type matter string

const (
	passes   matter = "passes"  // it is allowed
	byKernel matter = "kernel"  // the kernel's programs refuse it
	aName    matter = "name"    // a name decides, which the kernel does not know: it passes
	noPolicy matter = "network" // it leaves no network, whatever the policy: the frame or what it asks for is none that leads anywhere
)

// matters says whose matter it is what the whole network refuses for a reason.
var matters = map[policy.Reason]matter{
	policy.ReasonNoNetwork:  byKernel,
	policy.ReasonNotAllowed: byKernel,
	policy.ReasonDenied:     byKernel,
	policy.ReasonSpecial:    byKernel,
	policy.ReasonResolver:   byKernel,
	policy.ReasonWrongName:  aName,
	policy.ReasonNobody:     noPolicy,
	policy.ReasonForged:     noPolicy,
	policy.ReasonProtocol:   noPolicy,
	policy.ReasonOptions:    noPolicy,
	policy.ReasonFragment:   noPolicy,
	policy.ReasonMalformed:  noPolicy,
}

// kernelAlone says whose matter the attempt is under the policy with this number, and what the guest hears if it passes.
func (a *try) kernelAlone(number int) (matter, string) {
	answer, reason := a.under(number)
	if all := strings.Fields(a.below); len(all) > 0 {
		return matter(all[min(number, len(all)-1)]), answer
	}
	_, first := a.under(0)
	switch {
	case first == string(policy.ReasonSpecial): // with no network, too: the gateway's own addresses
		return noPolicy, answer
	case reason != "":
		return matters[policy.Reason(reason)], attempt.OK
	case first == "":
		return noPolicy, answer
	}
	return passes, answer
}

// tryBelow has a VM whose process refuses nothing try everything, under each of the policies for the kernel alone.
func (h *host) tryBelow(w *world, vm, group string) {
	all := h.equip(vm, hostAddress, hostAddress6)
	h.must(append([]string{"network", "set", vm}, everything()...)...)
	lines, _ := h.journalOfRefusals(vm, 0)
	for i, p := range attemptPolicies {
		h.setBelow(group, p.set)
		w.forget()
		before := h.enforcement(vm).KernelRefused
		answers := h.try(vm, all)
		after, seen := h.enforcement(vm).KernelRefused, w.saw()
		var byProcess []refusalView
		lines, byProcess = h.journalOfRefusals(vm, lines)
		count := map[matter]int{}
		for j, answer := range answers {
			whose, wanted := all[j].kernelAlone(i)
			count[whose]++
			if problem := all[j].judgeBelow(whose, answer, wanted, seen); problem != "" {
				h.t.Errorf("the kernel alone, %s: %s: %s", p.name, all[j].name, problem)
			}
			for _, r := range byProcess {
				if whose == byKernel && matters[policy.Reason(r.Reason)] == byKernel && slices.ContainsFunc(all[j].records(), r.is) {
					h.t.Errorf("the kernel alone, %s: %s: the process refuses it: %+v", p.name, all[j].name, r)
				}
			}
		}
		for _, line := range seen {
			if !slices.ContainsFunc(all, func(a try) bool { return a.explainsBelow(i, line) }) {
				h.t.Errorf("the kernel alone, %s: reached the world: %s", p.name, line)
			}
		}
		refused := after.Calls + after.Packets - before.Calls - before.Packets
		if refused < uint64(count[byKernel]) {
			h.t.Errorf("the kernel alone, %s: it has refused %d times what it has to refuse in %d attempts", p.name, refused, count[byKernel])
		}
		h.t.Logf("the kernel alone, %s: of %d attempts %v", p.name, len(all), count)
	}
}

// setBelow sets the policy for the kernel alone, as network set does for a VM's process and the kernel.
func (h *host) setBelow(group string, set []string) {
	h.t.Helper()
	rules, err := policyOf(set).Compile()
	if err != nil {
		h.t.Fatal(err)
	}
	around := policy.Surroundings{Resolvers: []netip.AddrPort{netip.AddrPortFrom(netip.MustParseAddr(worldAddress), 53)}}
	if around.Host, err = linux.HostAddresses(); err == nil {
		err = egress.SetPolicy(group, rules.Regions(around))
	}
	if err != nil {
		h.t.Fatal(err)
	}
}

// policyOf reads what network set is told.
func policyOf(set []string) policy.Policy {
	p := policy.Policy{Mode: policy.Mode(set[0])}
	for i := 1; i+1 < len(set); i += 2 {
		if set[i] == "--deny" {
			p.Deny = append(p.Deny, set[i+1])
		} else {
			p.Allow = append(p.Allow, set[i+1])
		}
	}
	return p
}

// judgeBelow says what is wrong with what has come of an attempt.
func (a *try) judgeBelow(whose matter, answer, wanted string, seen []string) string {
	switch whose {
	case passes:
		if answer != wanted {
			return fmt.Sprintf("the guest gets %q, want %q", answer, wanted)
		}
	case aName:
		if !works[answer] {
			return fmt.Sprintf("the guest gets %q: the kernel refuses what it cannot know", answer)
		}
	default:
		if works[answer] {
			return fmt.Sprintf("the guest gets %q, and the world %q", answer, seen)
		}
	}
	return ""
}

// explainsBelow says whether the attempt is why the world has seen something.
func (a *try) explainsBelow(number int, line string) bool {
	whose, _ := a.kernelAlone(number)
	if whose == passes || whose == aName {
		return slices.Contains(a.sees(), line)
	}
	// Names are asked for before it is known where they lead, where any may be asked for.
	p := attemptPolicies[number]
	return (p.names || p.set[0] == string(policy.Public)) && strings.HasPrefix(line, "dns "+worldAddress+" ")
}
