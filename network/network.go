// Package network makes what is behind the network cards of machines that package forkvm embeds. It is apart because a network
// stack costs every program that has one.
package network

import (
	"net/netip"

	"github.com/forkvm/forkvm"
	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/devices/nic/usernet"
)

// Port is a port of this host behind which is one of a guest's; ParsePort reads "[ADDRESS:]PORT:GUEST[/udp]".
type Port = policy.Port

// ParsePort reads a Port.
func ParsePort(text string) (Port, error) { return policy.ParsePort(text) }

// Config says what a guest's network is.
type Config struct {
	// Policy is what the guest may reach; the zero value is nothing.
	Policy forkvm.NetworkPolicy
	// Resolvers are asked for the names that the guest may ask for. Without one no name resolves.
	Resolvers []netip.AddrPort
	// Ports are published. Two machines cannot have the same.
	Ports []Port
}

// User makes networks in user space: gVisor's stack as the guest's gateway, and this process's sockets behind that. It needs no
// privilege. The connections of a machine are those of the process that it lives in: the policy is all that there is between a
// guest and what the process can reach.
func User(c Config) forkvm.NetworkMaker {
	return func(card forkvm.MAC, mtu int) (forkvm.Network, error) {
		rules, err := c.Policy.Compile()
		if err != nil {
			return nil, err
		}
		if err := policy.CheckPorts(c.Ports); err != nil {
			return nil, err
		}
		n, err := usernet.New(usernet.Config{Guest: card, MTU: mtu, Policy: rules, Resolvers: c.Resolvers, Ports: c.Ports})
		if err != nil {
			return nil, err // not an interface that holds a nil
		}
		return n, nil
	}
}
