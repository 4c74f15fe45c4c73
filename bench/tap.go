package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/node"
)

// Both ends of the link to what is beyond the host, and the far one's name, which is the kernel's choice.
const (
	beyondNear = "203.0.113.1"
	beyondFar  = "203.0.113.2"
	beyondLink = "veth0"
)

// networkTap measures what network does with a TAP device behind the card. The servers are beyond the host, whose own are not to be
// reached so.
func (b *bench) networkTap(ctx context.Context) (err error) {
	restore, err := passOn()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, restore()) }()
	beyond, err := layBeyond(ctx)
	if err != nil {
		return err
	}
	defer beyond.Close()
	allowed := &policy.Policy{Mode: policy.Allowlist, Allow: []string{serverAddress}}
	vm, err := b.scene.node.Boot(ctx, imageName, node.Options{CPUs: 1, MemoryBytes: standardMemory, Network: allowed, Backend: node.BackendTap})
	if err != nil {
		return err
	}
	err = linux.InNetwork(beyond, func() error { return b.flows(ctx, "net_tap", vm.Agent()) })
	return errors.Join(err, remove(ctx, vm))
}

// networkTapQEMU measures it through a TAP device of QEMU's, with servers of the host: nobody looks at frames, and none is passed on.
func (b *bench) networkTapQEMU(ctx context.Context) error {
	const up = "#!/bin/sh\nbusybox ip addr add 10.0.2.2/24 dev $1 && busybox ip link set $1 up\n"
	script := filepath.Join(b.config.Scene.Dir, "tap-up")
	if err := os.WriteFile(script, []byte(up), 0o755); err != nil {
		return err
	}
	return b.flowsThroughQEMU(ctx, "qemu_tap", "tap,ifname=flowtap,script="+script+",downscript=no", 1500)
}

// passOn has the host pass packets on, as TAP devices need it, until restore is called.
func passOn() (restore func() error, err error) {
	const path = "/proc/sys/net/ipv4/ip_forward"
	before, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return func() error { return os.WriteFile(path, before, 0) }, os.WriteFile(path, []byte("1"), 0)
}

// layBeyond makes a network beyond this host, where serverAddress is.
func layBeyond(ctx context.Context) (*os.File, error) {
	_ = ip(ctx, "addr del "+serverAddress+"/32 dev lo") // where another measurement may have put it
	return linux.NewNetwork(func() error {
		thread := unix.Gettid()
		laid := make(chan error)
		go func() { // on another thread, which is the host's
			laid <- ip(ctx, "link add flows type veth", "addr add "+beyondNear+"/24 dev flows", "link set flows up",
				"link set "+beyondLink+" netns "+strconv.Itoa(thread), "route add "+serverAddress+" via "+beyondFar)
		}()
		if err := <-laid; err != nil {
			return err
		}
		return ip(ctx, "link set lo up", "addr add "+serverAddress+"/32 dev lo", "addr add "+beyondFar+"/24 dev "+beyondLink, "link set "+beyondLink+" up")
	})
}

// ip configures the calling thread's network.
func ip(ctx context.Context, all ...string) error {
	for _, one := range all {
		args := append([]string{"ip"}, strings.Fields(one)...)
		if out, err := exec.CommandContext(ctx, "busybox", args...).CombinedOutput(); err != nil {
			return fmt.Errorf("ip %s: %w: %s", one, err, out)
		}
	}
	return nil
}
