package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/forkvm/forkvm/internal/node"
	"github.com/forkvm/forkvm/internal/testkit"
	"github.com/forkvm/forkvm/internal/testkit/attempt"
)

// refusalView is a refusal in network show and in the journal.
type refusalView struct {
	Protocol, Address, Name, Reason string
	Port                            int
}

// is says whether the refusal is what a try has on record: PROTOCOL [ADDRESS | ADDRESS:PORT | NAME].
func (r refusalView) is(record string) bool {
	protocol, what, _ := strings.Cut(record, " ")
	if r.Protocol != protocol && record != "" {
		return false
	}
	return what == "" || what == r.Name || what == r.Address || what == net.JoinHostPort(r.Address, fmt.Sprint(r.Port))
}

// journalOfRefusals returns what the VM's journal says was refused, behind the first so many lines of that kind.
func (h *host) journalOfRefusals(vm string, skip int) (lines int, all []refusalView) {
	h.t.Helper()
	for line := range strings.SplitSeq(h.must("log", "-o", "jsonl", vm), "\n") {
		var l struct {
			Event string
			Data  struct{ Refusals []refusalView }
		}
		if line == "" {
			continue
		}
		if err := json.Unmarshal([]byte(line), &l); err != nil {
			h.t.Fatalf("%v in %q", err, line)
		}
		if l.Event != "refused" {
			continue
		}
		if lines++; lines > skip {
			all = append(all, l.Data.Refusals...)
		}
	}
	return lines, all
}

// try has the guest try everything, and returns its answers.
func (h *host) try(vm string, all []try) (answers []string) {
	h.t.Helper()
	var orders bytes.Buffer
	for i := range all {
		if err := json.NewEncoder(&orders).Encode(all[i].Attempt); err != nil {
			h.t.Fatal(err)
		}
	}
	r := h.typing(orders.String(), "exec", "-i", vm, "--", "/guestload", "attempts")
	for line := range strings.Lines(r.stdout) {
		var answer string
		if err := json.Unmarshal([]byte(line), &answer); err != nil {
			h.t.Fatal(err)
		}
		answers = append(answers, answer)
	}
	if r.code != 0 || len(answers) != len(all) {
		h.t.Fatalf("%d of %d attempts were made: %v", len(answers), len(all), r)
	}
	return answers
}

// equip gives a VM what it needs to try everything, has services of this machine at these addresses, and returns the table.
func (h *host) equip(vm string, addresses ...string) []try {
	h.t.Helper()
	h.must("cp", filepath.Join(testkit.RequireGuest(h.t), "guestload"), vm+":/guestload")
	for _, address := range addresses {
		h.serve(net.JoinHostPort(address, "2222"))
	}
	return slices.DeleteFunc(attempts(), func(a try) bool { return testing.Short() && !a.brief })
}

// tryAll has a VM try all of the table under each of the policies: the guest has to hear what is wanted, what is refused has to
// be on record and to show, and the world, which is the judge, has to see what is allowed and nothing else.
func (h *host) tryAll(w *world, vm string, on node.Backend) {
	all := h.equip(vm, hostAddress, hostAddress6, "127.0.0.1")
	if on == node.BackendTap {
		for i := range all {
			all[i] = all[i].overTap()
		}
	}
	h.t.Logf("%d attempts under each of %d policies", len(all), len(attemptPolicies))
	lines, _ := h.journalOfRefusals(vm, 0)
	for i, p := range attemptPolicies {
		if on == node.BackendTap && p.names {
			continue
		}
		h.must(append([]string{"network", "set", vm}, p.set...)...)
		w.forget()
		answers := h.try(vm, all)
		seen := w.saw()
		var refused []refusalView
		lines, refused = h.journalOfRefusals(vm, lines)
		shown := h.network(vm).Refusals
		for _, r := range refused {
			if !slices.Contains(shown, r) {
				h.t.Errorf("%s: %v is on record and does not show", p.name, r)
			}
		}
		for j := range all {
			if problem := all[j].judge(i, answers[j], refused, seen); problem != "" {
				h.t.Errorf("%s: %s: %s", p.name, all[j].name, problem)
			}
		}
		for _, line := range seen {
			if !slices.ContainsFunc(all, func(a try) bool { return a.explains(i, line) }) && !lookup(p.name, line) && !(on == node.BackendTap && laterFragment(seen, line)) {
				h.t.Errorf("%s: reached the world: %s", p.name, line)
			}
		}
	}
}

// judge says what is wrong with what has come of an attempt.
func (a *try) judge(policy int, answer string, refused []refusalView, seen []string) string {
	want, reason := a.under(policy)
	if answer != want {
		return fmt.Sprintf("the guest gets %q, want %q", answer, want)
	}
	if reason == "" {
		for _, line := range a.sees() {
			if works[want] && !slices.Contains(seen, line) {
				return fmt.Sprintf("the world has not seen %q", line)
			}
		}
		return ""
	}
	if !slices.ContainsFunc(refused, func(r refusalView) bool {
		return r.Reason == reason && slices.ContainsFunc(a.records(), r.is)
	}) {
		return fmt.Sprintf("%s is not on record of %q", reason, a.records())
	}
	return ""
}

// works are the answers that come from the world.
var works = map[string]bool{attempt.OK: true, "synack": true, "udp": true, "icmp-0-0": true, "icmp6-129-0": true}

// records are what a refusal is on record as.
func (a *try) records() []string {
	if a.record == "" && a.Kind != attempt.Frames {
		return []string{a.destination()}
	}
	return strings.Split(a.record, ",")
}

// sees is what the world gets of it.
func (a *try) sees() []string {
	if a.seen != "" {
		return strings.Split(a.seen, ",")
	}
	if a.Kind == attempt.Frames {
		return []string{a.record}
	}
	return []string{a.destination()}
}

// destination is where a connection or datagram goes.
func (a *try) destination() string {
	protocol := string(a.Kind)
	if a.Kind == attempt.TLS {
		protocol = "tcp"
	}
	at, err := netip.ParseAddrPort(a.To)
	if err != nil {
		return protocol
	}
	return protocol + " " + netip.AddrPortFrom(at.Addr().Unmap(), at.Port()).String()
}

// explains says whether the attempt is why the world has seen something.
func (a *try) explains(policy int, line string) bool {
	_, reason := a.under(policy)
	// Who lies to a server has connected to it.
	return (reason == "" || reason == "wrong_name") && slices.Contains(a.sees(), line)
}

// laterFragment says whether a line is of a packet that is in the same list with its port: it has reached the world in pieces.
func laterFragment(seen []string, line string) bool {
	whole, ok := strings.CutSuffix(line, ":0")
	return ok && slices.ContainsFunc(seen, func(s string) bool { return s != line && strings.HasPrefix(s, whole+":") })
}

// lookup says whether a line is the guest's own resolver's doing, for names that may be asked for.
func lookup(policy, line string) bool {
	name, ok := strings.CutPrefix(line, "dns "+worldAddress+" ")
	return ok && (policy == "public" || policy == "names" && (name == "good.example" || strings.HasSuffix(name, ".good.test")))
}

// serve is a service of this machine, which no guest reaches.
func (h *host) serve(at string) {
	h.t.Helper()
	l, err := net.Listen("tcp", at)
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			h.t.Errorf("%v has connected to %s", c.RemoteAddr(), at)
			c.Close()
		}
	}()
}
