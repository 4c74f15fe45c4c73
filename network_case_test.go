package forkvm_test

import (
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/forkvm/forkvm"
	"github.com/forkvm/forkvm/internal/testkit"
	"github.com/forkvm/forkvm/network"
)

// A machine in this process has a network: ports come in, and what leaves is what its policy says, also of its children.
func TestNetwork(t *testing.T) {
	testkit.Long(t)
	ctx := begin(t)
	port, err := network.ParsePort("7071:7071")
	if err != nil {
		t.Fatal(err)
	}
	user := func(ports ...network.Port) forkvm.NetworkMaker {
		return network.User(network.Config{Policy: forkvm.NetworkPolicy{Mode: "public"}, Ports: ports})
	}
	vm, err := forkvm.Boot(ctx, openImage(t, "disk"), config(t, forkvm.Config{Name: "card", Network: user(port)}))
	if err != nil {
		t.Fatal(err)
	}
	defer vm.Close()
	sh(t, ctx, vm, "nc -l -p 7071 -e echo hello >/dev/null 2>&1 & true")
	answer := ""
	for end := time.Now().Add(patience); answer == "" && time.Now().Before(end); {
		c, err := net.Dial("tcp", "127.0.0.1:7071")
		if err != nil {
			t.Fatal(err)
		}
		got, _ := io.ReadAll(c) // an error until the guest listens
		answer = strings.TrimSpace(string(got))
		c.Close()
	}
	if answer != "hello" {
		t.Errorf("the guest's port says %q", answer)
	}
	refused := func(vm *forkvm.VM, reason string) {
		t.Helper()
		sh(t, ctx, vm, "nc 169.254.169.254 80 </dev/null 2>/dev/null; true")
		s, err := vm.Network()
		if err != nil || len(s.Refusals) == 0 || string(s.Refusals[0].Reason) != reason {
			t.Errorf("status %+v: %v", s.Status, err)
		}
	}
	refused(vm, "special_address")
	if err := vm.SetNetwork(forkvm.NetworkPolicy{Mode: "no-network"}); err != nil {
		t.Fatal(err)
	}
	refused(vm, "no_network")
	child := fork(t, ctx, vm, forkvm.Config{Name: "child", Network: user()})[0]
	refused(child, "special_address")
	if one, other := sh(t, ctx, vm, "cat /sys/class/net/eth0/address"), sh(t, ctx, child, "cat /sys/class/net/eth0/address"); one == other {
		t.Errorf("both cards are %s", one)
	}
	if err := vm.SetNetwork(forkvm.NetworkPolicy{Mode: "allowlist", Allow: []string{"10.0.0.1/8"}}); err == nil {
		t.Error("a policy that is none is accepted")
	}
	st, name := parent(t, ctx, 1)
	if _, err := forkvm.Restore(ctx, st, name, config(t, forkvm.Config{Network: user()})); !errors.Is(err, forkvm.ErrNoCard) {
		t.Errorf("a network for a machine without a card: %v", err)
	}
}
