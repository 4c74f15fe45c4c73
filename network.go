package forkvm

import (
	"fmt"

	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/internal/machine"
)

// MAC is the address of a network card.
type MAC = machine.MAC

// Network is what is behind a machine's network card. The machine closes it.
type Network = machine.Network

// NetworkMaker makes what is behind a network card. Package network has makers.
type NetworkMaker func(card MAC, mtu int) (Network, error)

// NetworkStatus is what a network has seen.
type NetworkStatus = machine.NetworkStatus

// NetworkPolicy says what a guest may reach.
type NetworkPolicy = policy.Policy

// ErrNoCard: the machine was made without a network card.
var ErrNoCard = machine.ErrNoCard

// mtu is the size of the largest packet of the card of a machine that is booted, 0 if it gets none.
func (c *Config) mtu() int {
	if c.Network == nil {
		return 0
	}
	return machine.DefaultMTU
}

// addNetwork makes the network of a machine with a card.
func (c *Config) addNetwork(config *machine.Config, id machine.Identity) (err error) {
	switch {
	case config.Shape.NetworkMTU == 0 && c.Network == nil:
		return nil
	case config.Shape.NetworkMTU == 0:
		return fmt.Errorf("make network (%s): %w", c.Name, ErrNoCard)
	case c.Network == nil:
		return fmt.Errorf("make network (%s): the machine has a network card, and Config.Network does not say what is behind it", c.Name)
	}
	if config.MAC, err = id.CardAddress(); err != nil {
		return err
	}
	config.Network, err = c.Network(config.MAC, config.Shape.NetworkMTU)
	return err
}

// SetNetwork replaces what the guest may reach, from now on: connections that are not allowed any more end.
func (vm *VM) SetNetwork(p NetworkPolicy) error {
	rules, err := p.Compile()
	if err != nil {
		return err
	}
	return vm.machine.SetPolicy(rules)
}

// Network says what the guest's network has seen, and what the guest was refused.
func (vm *VM) Network() (NetworkStatus, error) { return vm.machine.NetworkStatus() }
