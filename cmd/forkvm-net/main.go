// Command forkvm-net is the process of a VM with a network card: what forkvm-vm is for one without, and the network stack
// behind the card. It is a program of its own because the stack costs every process whose program has it, used or not. forkvm
// starts it; people do not.
package main

import (
	"os"

	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/devices/nic/usernet"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/internal/process"
)

func main() {
	os.Exit(process.Main("forkvm-net", process.Options{Network: newNetwork}))
}

func newNetwork(card machine.MAC, mtu int, rules *policy.Rules, c process.NetworkConfig) (machine.Network, error) {
	n, err := usernet.New(usernet.Config{Guest: card, MTU: mtu, Policy: rules, Resolvers: c.Resolvers, Ports: c.Ports})
	if err != nil {
		return nil, err // not an interface that holds a nil
	}
	return n, nil
}
