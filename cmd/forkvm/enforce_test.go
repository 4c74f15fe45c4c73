package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/internal/egress"
)

// enforcement is what network show says of who enforces the policy.
func (h *host) enforcement(vm string) (v struct {
	Enforcement   struct{ By, Group, Reason string }
	KernelRefused *egress.Refused `json:"kernel_refused"`
}) {
	h.t.Helper()
	if err := json.Unmarshal([]byte(h.must("network", "show", "-o", "json", vm)), &v); err != nil {
		h.t.Fatal(err)
	}
	return v
}

// inGroup runs a program in a VM's control group, as one that has taken the VM's process over.
func (h *host) inGroup(vm string, command ...string) string {
	h.t.Helper()
	group, err := os.Open(h.enforcement(vm).Enforcement.Group)
	if err != nil {
		h.t.Fatal(err)
	}
	defer group.Close()
	cmd := exec.Command("busybox", command...)
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(group.Fd())}
	out, _ := cmd.CombinedOutput() // what matters is what the world has seen
	return strings.TrimSpace(string(out))
}

// TestKernelEnforces: a VM whose process may do as it likes, because the policy that it knows allows everything, reaches only
// what the kernel lets it, and so does any other process in its place.
func TestKernelEnforces(t *testing.T) {
	w := startWorld(t)
	h := newHost(t, "")
	h.must("create", slowly, "--name", "vm", "--memory", guestMemory, "--network", "public", "--network-enforce", "kernel", h.image("disk"))
	const fetch = "wget -qO- http://%s/ 2>&1; true"
	if got := h.sh("vm", fmt.Sprintf(fetch, "good.example")); got != "hello from the world" {
		t.Fatalf("the world says %q; %+v, %+v", got, h.enforcement("vm"), h.network("vm"))
	}
	h.confined("vm")

	// The policy of the process and that of the kernel are set by the same call. Here they part.
	group := h.enforcement("vm").Enforcement.Group
	restricted := policy.Policy{Mode: policy.Allowlist, Allow: []string{worldAddress + ":80"}}
	rules, err := restricted.Compile()
	if err != nil {
		t.Fatal(err)
	}
	resolver := netip.AddrPortFrom(netip.MustParseAddr(worldAddress), 53)
	if err := egress.SetPolicy(group, rules.Regions(policy.Surroundings{Resolvers: []netip.AddrPort{resolver}})); err != nil {
		t.Fatal(err)
	}
	before := len(w.saw())
	if got := h.sh("vm", fmt.Sprintf(fetch, worldAddress)); got != "hello from the world" {
		t.Errorf("the address that is allowed says %q", got)
	}
	if got := h.inGroup("vm", "wget", "-qO-", "http://"+worldAddress+"/"); got != "hello from the world" {
		t.Errorf("the address that is allowed says %q to another process", got)
	}
	for _, address := range []string{"93.184.216.35", "8.8.8.8", "169.254.169.254", "10.1.2.3", worldAddress + ":8080"} {
		if got := h.sh("vm", fmt.Sprintf(fetch, address)); strings.Contains(got, "hello") || !strings.Contains(got, "refused") {
			t.Errorf("%s says %q", address, got)
		}
		if got := h.inGroup("vm", "wget", "-qO-", "http://"+address+"/"); !strings.Contains(got, "not permitted") {
			t.Errorf("%s says %q to another process", address, got)
		}
	}
	if got := h.inGroup("vm", "nslookup", "secret.evil.example", worldAddress); strings.Contains(got, "Name:") {
		t.Errorf("a name that was not to be asked for: %q", got)
	}
	for _, line := range w.saw()[before:] {
		if line != "tcp "+worldAddress+":80" {
			t.Errorf("reached the world: %s", line)
		}
	}
	if r := h.enforcement("vm").KernelRefused; r == nil || r.Calls < 8 {
		t.Errorf("the kernel has refused %+v", r)
	}
	h.tryBelow(w, "vm", group)
	h.enforcedInClones(t, group)
}

// confined looks at what a VM's process has of the host.
func (h *host) confined(vm string) {
	h.t.Helper()
	v := h.inspect(vm)
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", v.PID))
	if err != nil {
		h.t.Fatal(err)
	}
	for _, want := range []string{"CapPrm:\t0000000000000000\n", "CapEff:\t0000000000000000\n", "NoNewPrivs:\t1\n"} {
		if !strings.Contains(string(status), want) {
			h.t.Errorf("the process of %s is not what %q says:\n%s", vm, want, status)
		}
	}
	if root, err := os.Readlink(fmt.Sprintf("/proc/%d/root", v.PID)); err != nil || filepath.Base(root) != "own" || filepath.Base(filepath.Dir(root)) != v.ID {
		h.t.Errorf("the process of %s sees the files of %s (%v)", vm, root, err)
	}
	if _, err := os.Stat(fmt.Sprintf("/proc/%d/root/vm.json", v.PID)); !errors.Is(err, fs.ErrNotExist) {
		h.t.Errorf("the process of %s sees its record (%v)", vm, err)
	}
	procs, err := os.ReadFile(filepath.Join(h.enforcement(vm).Enforcement.Group, "cgroup.procs"))
	if err != nil || strings.TrimSpace(string(procs)) != fmt.Sprint(v.PID) {
		h.t.Errorf("in the group of %s are %q (%v), not %d", vm, procs, err, v.PID)
	}
}

// enforcedInClones: a policy that is set is the kernel's at once, a child has its parent's enforcement, and of a VM that is
// removed nothing is left.
func (h *host) enforcedInClones(t *testing.T, group string) {
	h.must("network", "set", "vm", "allowlist", "--allow", "good.example:80")
	if got := h.inGroup("vm", "wget", "-qO-", "http://8.8.8.8/"); !strings.Contains(got, "hello") {
		t.Errorf("a public address at an allowed name's port says %q", got)
	}
	h.must("network", "set", "vm", "no-network")
	if got := h.inGroup("vm", "wget", "-qO-", "http://"+worldAddress+"/"); !strings.Contains(got, "not permitted") {
		t.Errorf("without a network: %q", got)
	}
	h.must("fork", slowly, "--name", "child", "vm")
	h.confined("child")
	if got := h.inGroup("child", "wget", "-qO-", "http://"+worldAddress+"/"); !strings.Contains(got, "not permitted") {
		t.Errorf("the child's process: %q", got)
	}
	h.must("reset", "child")
	if got := h.sh("child", "echo here"); got != "here" {
		t.Errorf("after a reset: %q", got)
	}
	h.must("snapshot", "vm", "enforced")
	h.must("restore", slowly, "--name", "user", "--network-enforce", "user", "enforced")
	if e := h.enforcement("user"); e.Enforcement.By != "user" || e.Enforcement.Group != "" || e.KernelRefused != nil {
		t.Errorf("by its process alone: %+v", e)
	}
	childGroup := h.enforcement("child").Enforcement.Group
	if err := unix.Kill(h.inspect("child").PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for _, vm := range []string{"child", "vm", "user"} {
		h.must("rm", "-f", vm)
	}
	for _, path := range []string{group, childGroup} {
		if _, err := os.Stat(path); !os.IsNotExist(err) {
			t.Errorf("%s is left (%v)", path, err)
		}
	}
	// Where the kernel cannot be had, a VM says so or is not made.
	if err := unix.Unmount("/sys/fs/bpf", 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Mount("bpf", "/sys/fs/bpf", "bpf", 0, ""); err != nil {
			t.Error(err)
		}
	})
	h.refused("network_unenforced", "restore", slowly, "--network-enforce", "kernel", "enforced")
	h.must("restore", slowly, "--name", "auto", "enforced")
	if e := h.enforcement("auto").Enforcement; e.By != "user" || !strings.Contains(e.Reason, "mount -t bpf") {
		t.Errorf("without the kernel: %+v", e)
	}
}
