package usernet

import (
	"testing"

	"github.com/forkvm/forkvm/devices/nic"
	"github.com/forkvm/forkvm/devices/nic/nictest"
	"github.com/forkvm/forkvm/devices/nic/policy"
)

// A network has a stack from the first packet on that is for the gateway; what everybody says and nobody hears needs none. A closed one makes none.
func TestGatewayIsMadeForAPacket(t *testing.T) {
	nictest.CheckLeaks(t)
	rules, err := policy.Policy{}.Compile()
	if err != nil {
		t.Fatal(err)
	}
	n := newNet(t, Config{Policy: rules})
	asks := func(target byte) nic.Frame {
		frame := append([]byte{255, 255, 255, 255, 255, 255}, guestMAC[:]...)
		frame = append(frame, 8, 6, 0, 1, 8, 0, 6, 4, 0, 1)
		frame = append(append(frame, guestMAC[:]...), 10, 0, 2, 15, 0, 0, 0, 0, 0, 0, 10, 0, 2, target)
		return nic.Frame{Data: frame}
	}
	if err := n.Restore(nil); err != nil {
		t.Fatal(err)
	}
	n.Send(asks(15)) // whether somebody else has its address
	if n.gateway.stack.Load() != nil {
		t.Error("there is a stack that nobody has asked for")
	}
	n.Send(asks(2))
	if n.gateway.stack.Load() == nil || n.Frames()["neighbour"] != 1 {
		t.Errorf("no stack has been asked who the gateway is: %v", n.Frames())
	}
	other := newNet(t, Config{Policy: rules})
	other.Close()
	if other.Send(asks(2)); other.gateway.stack.Load() != nil {
		t.Error("a closed network has made a stack")
	}
}
