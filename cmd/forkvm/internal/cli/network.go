package cli

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/internal/egress"
	"github.com/forkvm/forkvm/internal/journal"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/internal/node"
)

// networkFlags say what a VM may reach.
type networkFlags struct {
	mode  policy.Mode
	allow []string
	deny  []string
	limit []string
	ports []string // published
	by    node.Enforcer

	backend node.Backend
}

func modes() []policy.Mode { return []policy.Mode{policy.NoNetwork, policy.Allowlist, policy.Public} }

func (n *networkFlags) add(f *pflag.FlagSet) {
	f.Var(choice[policy.Mode]{&n.mode, modes()}, "network", "what the guest may reach through its network card, which a VM from an image has only with this")
	f.StringArrayVarP(&n.ports, "publish", "p", nil, "make a port of the guest one of this host: [ADDRESS:]PORT:GUEST[/udp]; again for more")
	n.addEntries(f)
	f.Var(choice[node.Backend]{&n.backend, []node.Backend{node.BackendUser, node.BackendTap}}, "network-backend",
		"what is behind the network card: a network stack in the VM's process (the default), or a TAP device (needs root); a fork has what its parent has")
	f.Var(choice[node.Enforcer]{&n.by, []node.Enforcer{node.EnforceAuto, node.EnforceKernel, node.EnforceUser}}, "network-enforce",
		"who keeps the VM to that: the kernel below its process (needs root), its process alone, or whatever can be had; a fork has what its parent has")
}

// published returns the ports that the flags say.
func (n *networkFlags) published() (ports []policy.Port, err error) {
	for _, text := range n.ports {
		p, err := policy.ParsePort(text)
		if err != nil {
			return nil, usagef("%w", err)
		}
		ports = append(ports, p)
	}
	if err := policy.CheckPorts(ports); err != nil {
		return nil, usagef("%w", err)
	}
	return ports, nil
}

func (n *networkFlags) addEntries(f *pflag.FlagSet) {
	f.StringArrayVar(&n.allow, "allow", nil, "let the guest reach HOST, *.HOST, an address or a prefix, with [:PORT[-PORT]][/tcp|/udp|/icmp] behind it; again for more")
	f.StringArrayVar(&n.deny, "deny", nil, "keep the guest from an address or a prefix whatever is allowed; again for more")
	f.StringSliceVar(&n.limit, "net-limit", nil, "bound the network: connections=N, sessions=N (of UDP), rate=SIZE (bytes a second each way), packets=N (a second each way), bytes=SIZE (in all)")
}

// policy returns what the flags say, nil for nothing. Entries without a mode are an allowlist.
func (n *networkFlags) policy() (*policy.Policy, error) {
	p := policy.Policy{Mode: n.mode, Allow: n.allow, Deny: n.deny}
	if err := readLimits(&p.Limits, n.limit); err != nil {
		return nil, err
	}
	switch {
	case p.Mode == "" && len(p.Allow) > 0:
		p.Mode = policy.Allowlist
	case p.Mode == "" && len(p.Deny) > 0:
		return nil, usagef("--deny needs --network or --allow")
	case p.Mode == "" && len(n.limit) > 0:
		return nil, usagef("--net-limit needs --network or --allow")
	case p.Mode == "":
		return nil, nil
	}
	if _, err := p.Compile(); err != nil {
		return nil, usagef("%w", err)
	}
	return &p, nil
}

// readLimits reads words like connections=100.
func readLimits(l *policy.Limits, words []string) error {
	for _, word := range words {
		name, value, _ := strings.Cut(word, "=")
		var err error
		switch name {
		case "connections":
			l.Connections, err = readCount(value)
		case "sessions":
			l.Sessions, err = readCount(value)
		case "rate":
			l.Rate, err = output.ParseSize(value)
		case "packets":
			var n int
			n, err = readCount(value)
			l.Packets = uint64(n)
		case "bytes":
			l.Bytes, err = output.ParseSize(value)
		default:
			return usagef("--net-limit %q: %q is none of connections, sessions, rate, packets and bytes", word, name)
		}
		if err != nil {
			return usagef("--net-limit %q: %w", word, err)
		}
	}
	return nil
}

func readCount(text string) (int, error) {
	n, err := strconv.Atoi(text)
	if err != nil || n <= 0 {
		return 0, fmt.Errorf("%q is no number above 0", text)
	}
	return n, nil
}

func (a *app) networkVerb() *cobra.Command {
	cmd := &cobra.Command{Use: "network", Short: "Say what VMs may reach, and show what they tried", RunE: groupHelp}
	cmd.AddCommand(a.networkSetVerb(), a.networkShowVerb())
	return cmd
}

func (a *app) networkSetVerb() *cobra.Command {
	var flags networkFlags
	cmd := &cobra.Command{
		Use:   "set [flags] VM no-network|allowlist|public",
		Short: "Change what a VM may reach, while it runs",
		Example: "  forkvm network set vm-1 allowlist --allow packages.example.org:80 --allow '*.example.net:443'\n" +
			"  forkvm network set vm-1 no-network",
		Args: needs("VM", "no-network|allowlist|public"),
	}
	flags.addEntries(cmd.Flags())
	cmd.RunE = a.onNode(func(ctx context.Context, n Node, args []string) error {
		flags.mode = policy.Mode(args[1])
		if !slices.Contains(modes(), flags.mode) {
			return usagef("%q is none of no-network, allowlist and public", args[1])
		}
		p, err := flags.policy()
		if err != nil {
			return err
		}
		vm, err := n.Find(args[0])
		if err != nil {
			return err
		}
		return vm.SetNetwork(ctx, *p)
	})
	return cmd
}

const networkSchema = "forkvm/network/v1"

// networkView is the document of network show.
type networkView struct {
	Schema string         `json:"schema"`
	VM     string         `json:"vm"`
	Policy *policy.Policy `json:"policy"`
	// Enforcement says who enforces the policy, KernelRefused what the kernel has refused to the VM's process.
	Enforcement   *node.Enforcement `json:"enforcement"`
	KernelRefused *egress.Refused   `json:"kernel_refused,omitempty"`
	machine.NetworkStatus
}

func (a *app) networkShowVerb() *cobra.Command {
	cmd := &cobra.Command{Use: "show VM", Short: "Show what a VM may reach, and what it was refused", Args: needs("VM")}
	cmd.RunE = a.onNode(func(ctx context.Context, n Node, args []string) error {
		vm, err := n.Find(args[0])
		if err != nil {
			return err
		}
		status, err := vm.NetworkStatus(ctx)
		if err != nil {
			return err
		}
		r := vm.Record()
		v := networkView{Schema: networkSchema, VM: r.ID, Policy: r.Network, Enforcement: r.Enforcement, NetworkStatus: *status}
		if v.KernelRefused, err = vm.KernelRefused(); err != nil {
			return err
		}
		if a.format.Machine() {
			return output.WriteObject(a.Stdout, a.format, v)
		}
		return a.showNetwork(&v)
	})
	return a.withOutput(cmd)
}

// showNetwork prints the policy and, below it, what was refused.
func (a *app) showNetwork(v *networkView) error {
	fmt.Fprintf(a.Stdout, "policy: %s\n", strings.Join(policyWords(v.Policy), "\n  "))
	if err := a.showEnforcement(v); err != nil {
		return err
	}
	fmt.Fprintf(a.Stdout, "open: %d connections, %d UDP sessions\n", v.Connections, v.Sessions)
	fmt.Fprintf(a.Stdout, "sent: %s, received: %s\nrefused: %d\n", output.Size(int64(v.SentBytes)), output.Size(int64(v.ReceivedBytes)), v.Refused)
	for _, r := range v.Refusals {
		if _, err := fmt.Fprintf(a.Stdout, "  %s\n", describeRefusal(r)); err != nil {
			return err
		}
	}
	return nil
}

// policyWords are a policy for people, its mode first.
func policyWords(p *policy.Policy) []string {
	words := []string{string(p.Mode)}
	for _, entry := range p.Allow {
		words = append(words, "allow "+entry)
	}
	for _, entry := range p.Deny {
		words = append(words, "deny "+entry)
	}
	return append(words, limitWords(p.Limits)...)
}

func limitWords(l policy.Limits) (words []string) {
	if l.Bytes != 0 {
		words = append(words, fmt.Sprintf("limit bytes=%s", output.Size(int64(l.Bytes))))
	}
	if l.Connections != 0 {
		words = append(words, fmt.Sprintf("limit connections=%d", l.Connections))
	}
	if l.Packets != 0 {
		words = append(words, fmt.Sprintf("limit packets=%d", l.Packets))
	}
	if l.Rate != 0 {
		words = append(words, fmt.Sprintf("limit rate=%s", output.Size(int64(l.Rate))))
	}
	if l.Sessions != 0 {
		words = append(words, fmt.Sprintf("limit sessions=%d", l.Sessions))
	}
	return words
}

// describeRefusal is a refusal for people.
func describeRefusal(r policy.Refusal) string {
	what := r.Name
	if r.Address != "" {
		what = r.Address
		if r.Port != 0 {
			what += " port " + strconv.Itoa(int(r.Port))
		}
		if r.Name != "" {
			what += " (" + r.Name + ")"
		}
	}
	return strings.TrimSpace(fmt.Sprintf("%s %s", r.Protocol, output.Visible(what))) + fmt.Sprintf(": %s, %d times", r.Reason, r.Count)
}

// describeRefused is what a line of a journal says of refusals.
func describeRefused(r journal.Refused) string {
	var words []string
	for _, one := range r.Refusals {
		words = append(words, describeRefusal(one))
	}
	if r.Others > 0 {
		words = append(words, fmt.Sprintf("%d others", r.Others))
	}
	return strings.Join(words, "; ")
}

// showEnforcement says who enforces the policy.
func (a *app) showEnforcement(v *networkView) (err error) {
	switch {
	case v.KernelRefused != nil:
		_, err = fmt.Fprintf(a.Stdout, "enforced by: the kernel, below the vm's process; refused to that: %d calls, %d packets\n", v.KernelRefused.Calls, v.KernelRefused.Packets)
	case v.Enforcement != nil && v.Enforcement.By == node.EnforceKernel:
		_, err = fmt.Fprintln(a.Stdout, "enforced by: the kernel, at the vm's TAP device")
	case v.Enforcement != nil && v.Enforcement.Reason != "":
		_, err = fmt.Fprintf(a.Stdout, "enforced by: the vm's process alone; %s\n", v.Enforcement.Reason)
	default:
		_, err = fmt.Fprintln(a.Stdout, "enforced by: the vm's process alone")
	}
	return err
}
