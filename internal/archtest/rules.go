// Package archtest holds the project's architecture as data, and the tests that compare the code with it: which package
// may import which, where unsafe code may be, and a few habits that a compiler does not see.
//
// A package that no rule covers fails the test: its place has to be decided, here, before it is used.
package archtest

import "strings"

// module is the import path of the project's root.
const module = "github.com/forkvm/forkvm"

// rule says what packages may import besides the standard library. Paths are relative to the module; "" is its root
// package. A path that ends in "/..." covers what is below it too, one that ends in "/*" only what is directly below.
type rule struct {
	packages string
	ours     []string // packages of ours
	others   []string // import path prefixes of other modules
	why      string
}

const sys = "golang.org/x/sys"

// rules are looked through in order; the first that covers a package counts.
var rules = []rule{
	// The machine.
	{"kvm/...", []string{"kvm/..."}, []string{sys},
		"one method for each ioctl and no policy: usable by anyone who speaks KVM"},
	{"vmm/memory", []string{"internal/linux"}, []string{sys},
		"guest memory is a leaf, so that devices can import it"},
	{"vmm/boot/...", []string{"vmm/memory", "vmm/boot/..."}, nil,
		"loading a kernel is arithmetic on guest memory and is tested without KVM"},
	{"vmm/cpu", []string{"kvm"}, []string{sys},
		"processor policy sits between the machine and KVM"},
	{"vmm", []string{"kvm", "vmm/*", "vmm/boot/acpi", "devices", "devices/virtio", "snapshot", "internal/linux"}, []string{sys},
		"a machine knows the device contract and no device"},

	// What the guest sees. No device knows the machine, KVM, how it is saved, or a sibling.
	{"devices", []string{"vmm/memory", "internal/linux"}, []string{sys},
		"the contract of all devices"},
	{"devices/virtio", []string{"devices", "vmm/memory", "internal/linux"}, []string{sys},
		"the transport of all virtio devices"},
	{"devices/virtio/virtiotest", []string{"devices", "devices/virtio", "vmm/memory", "internal/linux", "internal/testkit"}, []string{sys},
		"a driver for tests plays the guest against the contract"},
	{"devices/nic/policy", nil, nil,
		"what a guest may reach is decided without knowing packets or sockets; the command line reads it too"},
	{"devices/nic/usernet", []string{"devices/nic", "devices/nic/policy", "internal/linux"}, []string{sys, "gvisor.dev/gvisor"},
		"the one user of the network stack"},
	{"devices/nic/tap", []string{"devices/nic", "devices/nic/policy", "internal/linux"}, []string{sys},
		"it has a descriptor, and whatever guards that is elsewhere"},
	{"devices/nic/nictest", []string{"devices/nic", "devices/nic/policy"}, []string{"gvisor.dev/gvisor"},
		"a guest for tests holds every network to one contract"},
	{"devices/*", []string{"devices", "devices/virtio", "vmm/memory", "internal/linux"}, []string{sys},
		"a device can be read, tested and fuzzed alone"},

	// Bytes at rest.
	{"snapshot", nil, []string{sys},
		"formats outlive the code around them"},
	{"snapshot/layer", []string{"snapshot", "internal/linux"}, []string{sys},
		"layers are files, whatever is in them"},
	{"snapshot/archive", []string{"snapshot", "snapshot/layer", "snapshot/store", "internal/linux"}, []string{sys, "github.com/klauspost/compress"},
		"what travels and what is kept compressed; a store works without it"},
	{"snapshot/store", []string{"snapshot", "snapshot/layer", "internal/linux"}, []string{sys},
		"the store moves files and knows no machine"},

	// What a guest boots, and the program in it.
	{"guest/image", []string{"guest/...", "internal/linux", "snapshot", "snapshot/layer"}, []string{sys},
		"an image says what its disk is as a layer, so that nobody reads it to find out"},
	{"guest/task", nil, []string{"github.com/BurntSushi/toml"},
		"a task is a directory of files, whoever runs it"},
	{"guest/...", []string{"guest/...", "internal/linux"}, []string{sys, "github.com/klauspost/compress", "github.com/pierrec/lz4", "github.com/ulikunitz/xz"},
		"images are made on any machine, with no virtual machine in sight"},
	{"agent/proto", nil, nil,
		"the protocol frozen into snapshots depends on nothing that moves"},
	{"agent/client", []string{"agent/proto", "agent/tree"}, []string{sys},
		"the host's side needs a connection, whatever makes it"},
	{"agent/agenttest", []string{"agent/proto", "agent/client", "internal/testkit/stream"}, nil,
		"cases for any guest agent that a client reaches"},
	{"agent", []string{"agent/proto", "agent/..."}, []string{sys},
		"it is copied into every guest"},
	{"agent/*", []string{"agent/proto"}, []string{sys},
		"it is copied into every guest"},

	// Where it comes together.
	{"internal/machine/...", []string{"..."}, []string{sys},
		"the one place that names every concrete device"},
	{"internal/linux", nil, []string{sys},
		"system calls that several packages need, without policy"},
	{"internal/egress", []string{"devices/nic/policy", "internal/egress/trie", "internal/linux"}, []string{sys, "github.com/cilium/ebpf"},
		"what the kernel enforces is decided by who starts VMs, not by their processes"},
	{"internal/egress/trie", []string{"devices/nic/policy", "internal/linux"}, []string{sys, "github.com/cilium/ebpf"},
		"one way to write a policy for the kernel, wherever its programs are"},
	{"internal/tapnet", []string{"devices/nic", "devices/nic/policy", "internal/egress/trie", "internal/linux"}, []string{sys, "github.com/cilium/ebpf", "github.com/google/nftables", "github.com/vishvananda/netlink"},
		"it makes networks for processes that could not, and needs all privileges for it"},
	{"internal/egress/source", nil, nil, "tests and the compiler agree on what an object is made of"},
	{"internal/egress/cmd/compile", []string{"internal/egress/source"}, nil, "it runs a compiler"},
	{"internal/journal", []string{"agent/proto", "devices/nic/policy", "internal/linux"}, []string{sys},
		"records outlive the code around them, and whoever reads them needs no machine"},
	{"internal/failure", []string{"kvm/...", "vmm", "snapshot/...", "guest/..."}, []string{sys},
		"turns errors of all packages into codes for users"},
	{"internal/judge", []string{"agent/client", "agent/proto", "agent/tree", "guest/task", "internal/failure", "internal/linux", "vmm"}, nil,
		"it makes no machine, and knows of them how they end"},
	{"internal/process/...", []string{"internal/...", "kvm/...", "vmm/...", "devices", "devices/nic/policy", "devices/nic/tap", "snapshot/...", "agent/client", "agent/proto"}, []string{sys},
		"one machine in a process of its own"},
	{"internal/node/...", []string{"internal/...", "devices/nic/policy", "kvm/...", "vmm/...", "snapshot/...", "guest/...", "agent/client", "agent/proto"}, []string{sys},
		"the machines of a host"},
	{"network", []string{"", "devices/nic/policy", "devices/nic/usernet"}, nil,
		"embedders whose machines have no network do not pay for a stack"},
	{"", []string{"internal/...", "devices/nic/policy", "kvm/...", "vmm", "snapshot/...", "guest/...", "agent/client", "agent/proto"}, nil,
		"what an embedder imports"},
	{"cmd/forkvm-agent", []string{"agent/..."}, []string{sys},
		"a thin main, copied into every guest"},
	{"cmd/forkvm-vm", []string{"internal/process"}, nil,
		"every VM waits for all that is in it"},
	{"cmd/forkvm-net", []string{"devices/nic/policy", "devices/nic/usernet", "internal/machine", "internal/process"}, nil,
		"the one program with a network stack, which every process of it pays for"},
	{"cmd/...", []string{"", "devices/nic/policy", "cmd/...", "internal/...", "kvm/...", "vmm", "vmm/memory", "snapshot/...", "guest/...", "agent/client", "agent/proto"}, []string{sys, "golang.org/x/term", "github.com/BurntSushi/toml", "github.com/spf13"},
		"thin mains"},

	// Development.
	{"internal/lab/...", []string{"internal/lab/...", "internal/linux", "internal/testkit", "guest/..."}, []string{sys},
		"the lab must work when the machine does not"},
	{"internal/testkit/...", []string{"internal/testkit/..."}, []string{sys},
		"all tests import it, so it imports nothing"},
	{"internal/archtest", nil, nil, "it reads the code and runs none"},
	{"examples/...", []string{"", "agent/client", "guest/...", "snapshot/...", "vmm", "kvm"}, nil,
		"an example shows what a user can do, and users have no internal packages"},
	{"bench/picture", []string{"bench"}, []string{"gonum.org/v1/plot"},
		"it draws what others have measured"},
	{"bench/...", []string{"..."}, []string{sys}, "it measures all of it"},
	{"quickstart/...", []string{"..."}, []string{sys}, "it uses all of it"},
}

// owned says that only some packages import something, wherever the rules above would allow it.
type owned struct {
	path string // as the users import it; prefix for other modules, pattern for ours
	by   []string
	why  string
}

var owners = []owned{
	{"gvisor.dev/gvisor", []string{"devices/nic/usernet", "devices/nic/nictest"}, "a network stack is too heavy for anyone else"},
	{"github.com/cilium/ebpf", []string{"internal/egress", "internal/egress/trie", "internal/tapnet"}, "eBPF stays where its privileges are"},
	{"github.com/google/nftables", []string{"internal/tapnet"}, "rules of netfilter are made in one place"},
	{"github.com/vishvananda/netlink", []string{"internal/tapnet"}, "interfaces are made in one place"},
	{"github.com/klauspost/compress", []string{"snapshot/archive", "guest/..."}, "compression hangs off leaves"},
	{"github.com/pierrec/lz4", []string{"guest/..."}, "compression hangs off leaves"},
	{"gonum.org/v1/plot", []string{"bench/picture"}, "nothing that is measured or shipped draws"},
	{"github.com/ulikunitz/xz", []string{"guest/..."}, "compression hangs off leaves"},
}

// covers says whether a pattern covers a package path relative to the module.
func covers(pattern, path string) bool {
	if pattern == "..." {
		return true
	}
	if base, ok := strings.CutSuffix(pattern, "/..."); ok {
		return path == base || strings.HasPrefix(path, base+"/")
	}
	if base, ok := strings.CutSuffix(pattern, "/*"); ok {
		rest, below := strings.CutPrefix(path, base+"/")
		return below && !strings.Contains(rest, "/")
	}
	return pattern == path
}

func coversAny(patterns []string, path string) bool {
	for _, pattern := range patterns {
		if covers(pattern, path) {
			return true
		}
	}
	return false
}

// ruleFor returns the rule of a package.
func ruleFor(path string) (rule, bool) {
	for _, r := range rules {
		if covers(r.packages, path) {
			return r, true
		}
	}
	return rule{}, false
}

// allows says whether the rule lets a package import something that is not of the standard library.
func (r rule) allows(target string) bool {
	if path, ok := relative(target); ok {
		return coversAny(r.ours, path)
	}
	for _, prefix := range r.others {
		if hasPathPrefix(target, prefix) {
			return true
		}
	}
	return false
}

// relative makes an import path of ours relative to the module.
func relative(importPath string) (string, bool) {
	if importPath == module {
		return "", true
	}
	return strings.CutPrefix(importPath, module+"/")
}

func hasPathPrefix(path, prefix string) bool {
	return path == prefix || strings.HasPrefix(path, prefix+"/")
}

// standard says whether an import path is of the standard library: its first element has no dot.
func standard(importPath string) bool {
	first, _, _ := strings.Cut(importPath, "/")
	return !strings.Contains(first, ".")
}
