package network_test

import (
	"context"
	"fmt"
	"net/netip"
	"os"

	"github.com/forkvm/forkvm"
	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/guest/image"
	"github.com/forkvm/forkvm/network"
)

// A guest that may fetch packages and nothing else, and may not even do that while it is judged.
func Example() {
	ctx := context.Background()
	img, err := image.Open("debian")
	if err != nil {
		fmt.Println(err)
		return
	}
	vm, err := forkvm.Boot(ctx, img, forkvm.Config{Network: network.User(network.Config{
		Policy: forkvm.NetworkPolicy{
			Mode:  "allowlist",
			Allow: []string{"packages.example.org:80", "*.example.net:443"},
		},
		Resolvers: []netip.AddrPort{netip.MustParseAddrPort("9.9.9.9:53")},
	})})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer vm.Close()
	if _, err := vm.Agent().Exec(ctx, client.Command{Args: []string{"apt-get", "update"}, Stdout: os.Stdout}); err != nil {
		fmt.Println(err)
		return
	}
	if err := vm.SetNetwork(forkvm.NetworkPolicy{Mode: "no-network"}); err != nil {
		fmt.Println(err)
		return
	}
	status, err := vm.Network()
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, r := range status.Refusals {
		fmt.Println(r.Protocol, r.Address, r.Port, r.Reason)
	}
}
