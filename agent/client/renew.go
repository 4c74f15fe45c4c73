package client

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/forkvm/forkvm/agent/proto"
)

// Identity is what a clone shall not share with its parent. Zero members are
// left as they are.
type Identity struct {
	// Generation is a UUID; required.
	Generation string
	// Entropy is credited to the guest's kernel, 64 bytes or more (at most 512)
	// that exist nowhere else.
	Entropy []byte
	// WallClock returns the time to set, asked when the request is sent;
	// time.Now for the host's. Nil: the guest's clock goes on from the snapshot.
	WallClock func() time.Time
	// Hostname has at most 64 bytes.
	Hostname string
	// MachineID is 32 lower-case hexadecimal digits. A guest that has no
	// /etc/machine-id has nothing to renew.
	MachineID string
	// BootID asks for a fresh boot id.
	BootID bool
	// Network is for a guest with a network card.
	Network *proto.Network
}

// Renewal is what a guest confirmed.
type Renewal struct {
	// Items maps the proto.Item words to what became of each.
	Items map[string]proto.RenewItem
	// BootID is the new one.
	BootID string
	// Time is the guest's wall clock afterwards.
	Time time.Time
}

// UnconfirmedError lists what a guest did not renew. Such a clone must not run
// anything: it may act as its parent.
type UnconfirmedError struct {
	// Items maps the proto.Item words to the guest's reason.
	Items map[string]string
}

// Error implements error.
func (e *UnconfirmedError) Error() string {
	var list []string
	for item, reason := range e.Items {
		list = append(list, item+" ("+reason+")")
	}
	slices.Sort(list)
	return "renew identity: guest did not confirm " + strings.Join(list, ", ")
}

// Renew gives the guest a new identity. It fails closed: unless the guest
// confirmed every member of id that is set, the error is not nil, and an
// *UnconfirmedError when the guest answered.
func (c *Client) Renew(ctx context.Context, id Identity) (Renewal, error) {
	request := renewRequest{clock: id.WallClock, RenewRequest: proto.RenewRequest{
		Generation: id.Generation, Entropy: id.Entropy, Hostname: id.Hostname, MachineID: id.MachineID, BootID: id.BootID,
		Network: id.Network,
	}}
	var result proto.RenewResult
	if err := c.simple(ctx, proto.OpRenew, &request, &result); err != nil {
		return Renewal{}, err
	}
	r := Renewal{Items: result.Items, BootID: result.BootID, Time: time.Unix(0, result.TimeNS)}
	return r, confirm(request.RenewRequest, result)
}

// renewRequest takes the time when it is encoded, which is once there is a
// connection: to make one can take seconds in a guest that boots.
type renewRequest struct {
	proto.RenewRequest
	clock func() time.Time
}

// MarshalJSON implements json.Marshaler.
func (r *renewRequest) MarshalJSON() ([]byte, error) {
	if r.clock != nil {
		r.WallClockNS = r.clock().UnixNano()
	}
	return json.Marshal(r.RenewRequest)
}

// WaitRenewed is Renew for a guest whose agent may not be listening yet: it is
// asked until it answers, or ctx is done. The renewal is the first thing that the
// agent hears, which spares a clone the round trip of a ping.
func (c *Client) WaitRenewed(ctx context.Context, id Identity) (r Renewal, err error) {
	err = c.untilReached(ctx, func(c *Client) error {
		r, err = c.Renew(ctx, id)
		return err
	})
	return r, err
}

func confirm(r proto.RenewRequest, result proto.RenewResult) error {
	open := map[string]string{}
	need := func(item string, wanted bool, enough ...string) {
		got, ok := result.Items[item]
		switch {
		case !wanted || slices.Contains(enough, got.Status):
		case !ok:
			open[item] = "the guest agent does not know it or did not get to it"
		default:
			open[item] = fmt.Sprintf("%s: %s", got.Status, got.Detail)
		}
	}
	need(proto.ItemGeneration, true, proto.RenewDone)
	need(proto.ItemEntropy, len(r.Entropy) > 0, proto.RenewDone)
	need(proto.ItemWallClock, r.WallClockNS != 0, proto.RenewDone)
	need(proto.ItemHostname, r.Hostname != "", proto.RenewDone)
	need(proto.ItemMachineID, r.MachineID != "", proto.RenewDone, proto.RenewAbsent)
	need(proto.ItemBootID, r.BootID, proto.RenewDone)
	need(proto.ItemNetwork, r.Network != nil, proto.RenewDone)
	_, hooks := result.Items[proto.ItemHooks]
	need(proto.ItemHooks, hooks, proto.RenewDone)
	if len(open) > 0 {
		return &UnconfirmedError{Items: open}
	}
	return nil
}
