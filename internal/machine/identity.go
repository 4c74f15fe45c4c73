package machine

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"strings"
	"time"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/devices/platform"
)

// Time says what a clone's wall clock shows.
type Time string

const (
	// TimeHost: the host's time, from the first command on.
	TimeHost Time = "host"
	// TimeFrozen: time goes on from the snapshot, for rollouts that can be repeated.
	TimeFrozen Time = "frozen"
)

// Identity is what tells a VM from every other VM that shares its memory image.
type Identity struct {
	// Generation is the VM generation id and the generation that the guest agent
	// publishes, a UUID.
	Generation string `json:"generation"`
	Hostname   string `json:"hostname"`
	// MachineID is the content of /etc/machine-id: 32 hexadecimal digits.
	MachineID string `json:"machine_id"`
	// MAC is the address of the network card, of a VM that has one.
	MAC  string `json:"mac,omitempty"`
	Time Time   `json:"time"`
}

// NewIdentity returns an identity that nobody had before.
func NewIdentity(hostname string, t Time) Identity {
	return Identity{
		Generation: uuid(platform.NewGUID()),
		Hostname:   hostname,
		MachineID:  hex.EncodeToString(random(16)),
		MAC:        newMAC(),
		Time:       t,
	}
}

// Next returns the identity of the same VM after a reset: only the generation is
// another one.
func (i Identity) Next() Identity {
	i.Generation = uuid(platform.NewGUID())
	return i
}

func random(n int) []byte {
	b := make([]byte, n)
	rand.Read(b) // never fails (crypto/rand)
	return b
}

func uuid(b [16]byte) string {
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// GenerationID returns Generation as the bytes of Config.Generation.
func (i Identity) GenerationID() (id [16]byte, err error) {
	b, err := hex.DecodeString(strings.ReplaceAll(i.Generation, "-", ""))
	if err != nil || len(b) != len(id) {
		return id, fmt.Errorf("generation %q is no UUID", i.Generation)
	}
	copy(id[:], b)
	return id, nil
}

// renew gives the guest its identity through the guest agent, for which it waits,
// and returns when every part of it is confirmed. It is the first thing that is asked of a guest;
// a clone for which it fails still has its parent's identity and must not run
// user code: the caller closes the machine.
func (m *Machine) renew(ctx context.Context, id Identity) error {
	fresh := client.Identity{
		Generation: id.Generation,
		Entropy:    random(64),
		Hostname:   id.Hostname,
		MachineID:  id.MachineID,
		BootID:     true,
		Network:    m.renewedNetwork(id.MAC),
	}
	if id.Time != TimeFrozen {
		fresh.WallClock = time.Now
	}
	if _, err := m.Agent().WaitRenewed(ctx, fresh); err != nil {
		return err
	}
	m.generation.Store(&id.Generation)
	if m.network != nil {
		m.network.Renewed()
	}
	return nil
}
