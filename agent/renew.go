package agent

import (
	"encoding/hex"
	"errors"
	"io/fs"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"github.com/forkvm/forkvm/agent/proto"
)

// Identity is what a clone has in common with its parent until it is renewed.
// Each method confirms with nil that the guest has the new value.
type Identity interface {
	// AddEntropy credits p to the kernel's generator and makes it reseed.
	AddEntropy(p []byte) error
	SetClock(t time.Time) error
	SetHostname(name string) error
	// SetMachineID returns fs.ErrNotExist when this guest has no machine id.
	SetMachineID(id string) error
	// RenewBootID returns the new boot id.
	RenewBootID() (string, error)
	SetNetwork(n proto.Network) error
}

const (
	maxEntropy  = 512
	maxHostname = 64 // HOST_NAME_MAX
)

// renew gives the guest the identity that the host chose, and says item by
// item what became of it. No command starts meanwhile. The generation changes
// last and only when nothing failed: a command that expects the new one is
// refused by a guest that is half of another.
func (a *Agent) renew(r proto.RenewRequest) (proto.RenewResult, error) {
	if a.cfg.Identity == nil {
		return proto.RenewResult{}, failure(proto.CodeUnsupported, "this guest agent cannot renew its guest's identity")
	}
	if err := checkRenewal(r); err != nil {
		return proto.RenewResult{}, err
	}
	a.renewal.Lock()
	defer a.renewal.Unlock()
	n := renewal{items: map[string]proto.RenewItem{}}
	id := a.cfg.Identity
	// Entropy first: what follows may draw from it.
	n.do(proto.ItemEntropy, len(r.Entropy) > 0, func() error { return id.AddEntropy(r.Entropy) })
	n.do(proto.ItemWallClock, r.WallClockNS != 0, func() error { return id.SetClock(time.Unix(0, r.WallClockNS)) })
	n.do(proto.ItemHostname, r.Hostname != "", func() error { return id.SetHostname(r.Hostname) })
	n.do(proto.ItemMachineID, r.MachineID != "", func() error { return id.SetMachineID(r.MachineID) })
	n.do(proto.ItemBootID, r.BootID, func() (err error) { n.bootID, err = id.RenewBootID(); return })
	n.do(proto.ItemNetwork, r.Network != nil, func() error { return id.SetNetwork(*r.Network) })
	if !n.failed {
		a.publish(&n, r.Generation)
	}
	return proto.RenewResult{Items: n.items, BootID: n.bootID, TimeNS: time.Now().UnixNano()}, nil
}

// publish makes the generation known, first to programs in the guest through the
// state file: it is replaced whole, so that a watch on the directory sees one event
// and a reader never half a line. Then a clone runs its hooks, which a first boot
// does not, nor the same renewal when it is repeated. Requests for the new generation
// are taken last.
func (a *Agent) publish(n *renewal, generation string) {
	var err error
	a.renewedTicks = uint64(uptime() / tick)
	if a.cfg.StateDir != "" {
		err = replaceFile(filepath.Join(a.cfg.StateDir, "generation"), []byte(generation+"\n"), 0o444)
	}
	if err == nil && a.generation != "" && a.generation != generation {
		hooks := a.hooks()
		n.do(proto.ItemHooks, len(hooks) > 0, func() error { return a.runHooks(hooks, generation) })
		if n.failed {
			err = errors.New("a hook failed")
		}
	}
	n.do(proto.ItemGeneration, true, func() error { return err })
	if err == nil {
		a.generation = generation
	}
}

// renewal collects the fate of each item.
type renewal struct {
	items  map[string]proto.RenewItem
	bootID string
	failed bool
}

func (n *renewal) do(item string, wanted bool, fn func() error) {
	if !wanted {
		return
	}
	err := fn()
	switch {
	case err == nil:
		n.items[item] = proto.RenewItem{Status: proto.RenewDone}
	case item == proto.ItemMachineID && errors.Is(err, fs.ErrNotExist):
		n.items[item] = proto.RenewItem{Status: proto.RenewAbsent, Detail: err.Error()}
	default:
		n.failed = true
		n.items[item] = proto.RenewItem{Status: proto.RenewFailed, Detail: err.Error()}
	}
}

func checkRenewal(r proto.RenewRequest) error {
	switch {
	case !isUUID(r.Generation):
		return failure(proto.CodeInvalidRequest, "generation %.64q is not a UUID", r.Generation)
	case len(r.Entropy) > maxEntropy:
		return failure(proto.CodeInvalidRequest, "%d bytes of entropy, at most %d are taken", len(r.Entropy), maxEntropy)
	case r.WallClockNS < 0:
		return failure(proto.CodeInvalidRequest, "wall clock before 1970")
	case len(r.Hostname) > maxHostname:
		return failure(proto.CodeInvalidRequest, "hostname has %d bytes, at most %d are allowed", len(r.Hostname), maxHostname)
	case r.MachineID != "" && !isHex(r.MachineID, 32):
		return failure(proto.CodeInvalidRequest, "machine id %.64q is not 32 lower-case hexadecimal digits", r.MachineID)
	}
	return checkNetwork(r.Network)
}

// maxAddresses bounds each list of a network.
const maxAddresses = 16

func checkNetwork(n *proto.Network) error {
	if n == nil {
		return nil
	}
	if mac, err := net.ParseMAC(n.MAC); err != nil || len(mac) != 6 {
		return failure(proto.CodeInvalidRequest, "address of the network card %.40q is none", n.MAC)
	}
	if max(len(n.Addresses), len(n.Gateways), len(n.Resolvers)) > maxAddresses {
		return failure(proto.CodeInvalidRequest, "more than %d addresses, gateways or resolvers", maxAddresses)
	}
	for _, text := range n.Addresses {
		if _, err := netip.ParsePrefix(text); err != nil {
			return failure(proto.CodeInvalidRequest, "address %.60q is not one with the length of its prefix", text)
		}
	}
	for _, text := range append(slices.Clone(n.Gateways), n.Resolvers...) {
		if _, err := netip.ParseAddr(text); err != nil {
			return failure(proto.CodeInvalidRequest, "address %.60q is none", text)
		}
	}
	return nil
}

func isUUID(s string) bool {
	if len(s) != 36 {
		return false
	}
	for _, i := range []int{8, 13, 18, 23} {
		if s[i] != '-' {
			return false
		}
	}
	return isHex(s[:8]+s[9:13]+s[14:18]+s[19:23]+s[24:], 32)
}

func isHex(s string, n int) bool {
	b, err := hex.DecodeString(s)
	return err == nil && len(s) == n && hex.EncodeToString(b) == s
}
