package node

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/machine"
)

func TestHostResolvers(t *testing.T) {
	path := filepath.Join(t.TempDir(), "resolv.conf")
	text := "# by hand\nsearch example.org\nnameserver 192.0.2.1\nnameserver fe80::1%eth0\nnameserver x\nnameserver\n nameserver 2001:db8::1\nnameserver 192.0.2.2\n"
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, want := fmt.Sprint(hostResolvers(path)), "[192.0.2.1:53 [fe80::1%eth0]:53 [2001:db8::1]:53]"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if got := hostResolvers(path + ".none"); got != nil {
		t.Errorf("got %v of nothing", got)
	}
}

func TestNetworkOfOptions(t *testing.T) {
	card := machine.Shape{NetworkMTU: 1500}
	public := policy.Policy{Mode: policy.Public}
	for _, tt := range []struct {
		name  string
		o     Options
		shape machine.Shape
		want  policy.Mode // "" none
		code  failure.Code
	}{
		{"no card", Options{}, machine.Shape{}, "", ""},
		{"a card", Options{}, card, policy.NoNetwork, ""},
		{"a card and a policy", Options{Network: &public}, card, policy.Public, ""},
		{"a policy without a card", Options{Network: &public}, machine.Shape{}, "", failure.InvalidArgument},
		{"a policy that is none", Options{Network: &policy.Policy{Mode: "open"}}, card, "", failure.InvalidArgument},
	} {
		c, _, err := tt.o.network(tt.shape)
		if failure.Is(err, tt.code) != (tt.code != "") || (c == nil) != (tt.want == "") || c != nil && c.Policy.Mode != tt.want {
			t.Errorf("%s: %+v, %v", tt.name, c, err)
		}
	}
	if (&Options{}).cardMTU() != 0 || (&Options{Network: &public}).cardMTU() != 1500 || (&Options{Network: &public, NetworkMTU: 9000}).cardMTU() != 9000 {
		t.Error("card of a booted vm")
	}
}
