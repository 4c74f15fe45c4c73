package machine

import (
	"errors"
	"fmt"

	"github.com/forkvm/forkvm/agent/proto"
	"github.com/forkvm/forkvm/devices/nic"
	"github.com/forkvm/forkvm/devices/nic/policy"
)

// MAC is the address of a network card.
type MAC = nic.MAC

// Sizes of the largest packet of a card: of one of which nobody says more, and what is possible.
const (
	DefaultMTU = nic.DefaultMTU
	MinMTU     = nic.MinMTU
	MaxMTU     = nic.MaxMTU
)

// Network is the other end of a machine's card: a frame backend, and what the machine has to tell it.
type Network interface {
	nic.Backend
	// Addressing is what the guest is to be told.
	Addressing() nic.Addressing
	// SetPolicy replaces what the guest may reach.
	SetPolicy(*policy.Rules)
	// Renewed says that the guest has its own addresses now.
	Renewed()
	// Status says what has become of what the guest tried.
	Status() policy.Status
	Close() error
}

// NetworkStatus is what a network has seen.
type NetworkStatus struct {
	policy.Status
	// Card is what the card did with frames.
	Card nic.Counters `json:"card"`
}

// newMAC returns a locally administered address that nobody had before.
func newMAC() string {
	mac := nic.MAC(random(6))
	mac[0] = 0x02
	return mac.String()
}

// CardAddress returns MAC as Config.MAC has it.
func (i Identity) CardAddress() (mac nic.MAC, err error) {
	n, err := fmt.Sscanf(i.MAC, "%02x:%02x:%02x:%02x:%02x:%02x", &mac[0], &mac[1], &mac[2], &mac[3], &mac[4], &mac[5])
	if err != nil || n != len(mac) || !mac.Valid() {
		return mac, fmt.Errorf("%q is not the address of a network card", i.MAC)
	}
	return mac, nil
}

// addNetwork adds the network card, if the shape has one.
func (m *Machine) addNetwork(c *Config) error {
	if c.Shape.NetworkMTU == 0 {
		return nil
	}
	state, err := c.state("nic0")
	if err != nil {
		return err
	}
	irq := m.Interrupt(slotGSI(networkSlot))
	m.card, err = nic.New(nic.Config{
		ID: "nic0", Memory: m.memory, Interrupt: irq, Backend: c.Network, MAC: c.MAC, MTU: c.Shape.NetworkMTU, State: state,
	})
	if err != nil {
		return err
	}
	m.network, c.Network = c.Network, nil
	return m.place(m.card, networkSlot)
}

// disconnect ends the network of a paused machine that has a card, and all that the network knows of the guest's life.
func (m *Machine) disconnect() error {
	if m.network == nil {
		return nil
	}
	m.card.Disconnect()
	network := m.network
	m.network = nil
	return network.Close()
}

// connect gives a paused machine that was disconnected the role's network, before its devices are put where that begins.
func (m *Machine) connect(r *Role) error {
	if (m.card != nil) != (r.Network != nil) {
		return errors.New("a network is for a machine with a network card, which needs one")
	}
	if m.card == nil {
		return nil
	}
	err := m.card.Connect(r.Network, r.MAC)
	if err == nil {
		m.network, r.Network = r.Network, nil
	}
	return err
}

// renewedNetwork is what a guest with a card is told of its network.
func (m *Machine) renewedNetwork(mac string) *proto.Network {
	if m.network == nil {
		return nil
	}
	a := m.network.Addressing()
	n := &proto.Network{MAC: mac}
	for _, p := range a.Addresses {
		n.Addresses = append(n.Addresses, p.String())
	}
	for _, gateway := range a.Gateways {
		n.Gateways = append(n.Gateways, gateway.String())
	}
	for _, resolver := range a.Resolvers {
		n.Resolvers = append(n.Resolvers, resolver.String())
	}
	return n
}

// ErrNoCard: the machine has no network card.
var ErrNoCard = errors.New("machine was made without a network card")

// SetPolicy replaces what the guest may reach.
func (m *Machine) SetPolicy(r *policy.Rules) error {
	if m.network == nil {
		return ErrNoCard
	}
	m.network.SetPolicy(r)
	return nil
}

// NetworkStatus says what the guest's network has seen.
func (m *Machine) NetworkStatus() (NetworkStatus, error) {
	if m.network == nil {
		return NetworkStatus{}, ErrNoCard
	}
	return NetworkStatus{m.network.Status(), m.card.Counters()}, nil
}
