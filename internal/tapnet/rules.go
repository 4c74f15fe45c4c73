package tapnet

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/devices/nic"
	"github.com/forkvm/forkvm/devices/nic/policy"
)

// Marks of tap.c.
const (
	markAllowed = 0x666b0001
	markRefused = 0x666b0002
	markBarred  = 0x666b0003
)

// Codes of the kernel's that the library leaves to us.
const (
	rejectICMP  = 2 // NFT_REJECT_ICMPX_UNREACH
	rejectReset = 1 // NFT_REJECT_TCP_RST
	unreachable = 1 // NFT_REJECT_ICMPX_PORT_UNREACH
	prohibited  = 3 // NFT_REJECT_ICMPX_ADMIN_PROHIBITED

	tcpFlags = 13 // offset
	tcpReset = 4  // flag
)

// match is a part of a rule: all that it is about.
type match []expr.Any

func cmp(op expr.CmpOp, data []byte) expr.Any { return &expr.Cmp{Op: op, Register: 1, Data: data} }

// named is about a packet that came in, or goes out, by an interface: the name whole, or what it begins with.
func named(key expr.MetaKey, op expr.CmpOp, name string, whole bool) match {
	data := []byte(name)
	if whole {
		data = append(data, make([]byte, unix.IFNAMSIZ-len(name))...)
	}
	return match{&expr.Meta{Key: key, Register: 1}, cmp(op, data)}
}

func from(name string) match { return named(expr.MetaKeyIIFNAME, expr.CmpOpEq, name, true) }
func into(name string) match { return named(expr.MetaKeyOIFNAME, expr.CmpOpEq, name, true) }

func marked(op expr.CmpOp, mark uint32) match {
	return match{&expr.Meta{Key: expr.MetaKeyMARK, Register: 1}, cmp(op, binary.NativeEndian.AppendUint32(nil, mark))}
}

func carries(op expr.CmpOp, protocol byte) match {
	return match{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, cmp(op, []byte{protocol})}
}

// resets is about resets of TCP.
func resets() match {
	return append(carries(expr.CmpOpEq, unix.IPPROTO_TCP),
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: tcpFlags, Len: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 1, Mask: []byte{tcpReset}, Xor: []byte{0}},
		cmp(expr.CmpOpNeq, []byte{0}))
}

// port is about a destination of TCP or UDP.
func port(number uint16) match {
	return match{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		cmp(expr.CmpOpEq, binary.BigEndian.AppendUint16(nil, number)),
	}
}

// state is about what conntrack says of a packet.
func state(bits uint32) match {
	return match{
		&expr.Ct{Register: 1, Key: expr.CtKeySTATE},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binary.NativeEndian.AppendUint32(nil, bits), Xor: make([]byte, 4)},
		cmp(expr.CmpOpNeq, make([]byte, 4)),
	}
}

const known = expr.CtStateBitESTABLISHED | expr.CtStateBitRELATED

// more is about a connection beyond so many that this rule has seen and are still there.
func more(count int) match {
	return append(state(expr.CtStateBitNEW), &expr.Connlimit{Count: uint32(count), Flags: expr.NFT_CONNLIMIT_F_INV})
}

// address is about packets from, or to, addresses of a prefix whose length is of whole bytes.
func address(p netip.Prefix, source bool) match {
	family, offset := byte(unix.NFPROTO_IPV4), uint32(16)
	if p.Addr().Is6() {
		family, offset = unix.NFPROTO_IPV6, 24
	}
	size := p.Addr().BitLen() / 8
	if source {
		offset -= uint32(size)
	}
	mask := make([]byte, size)
	for i := range p.Bits() {
		mask[i/8] |= 0x80 >> (i % 8)
	}
	return match{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1}, cmp(expr.CmpOpEq, []byte{family}),
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: uint32(size)},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: uint32(size), Mask: mask, Xor: make([]byte, size)},
		cmp(expr.CmpOpEq, p.Addr().AsSlice()),
	}
}

func accept() match     { return match{&expr.Verdict{Kind: expr.VerdictAccept}} }
func drop() match       { return match{&expr.Verdict{Kind: expr.VerdictDrop}} }
func reset() match      { return match{&expr.Reject{Type: rejectReset}} }
func refuse() match     { return match{&expr.Reject{Type: rejectICMP, Code: prohibited}} }
func closed() match     { return match{&expr.Reject{Type: rejectICMP, Code: unreachable}} }
func masquerade() match { return match{&expr.Masq{}} }

func translate(to netip.AddrPort) match {
	return match{
		&expr.Immediate{Register: 1, Data: to.Addr().AsSlice()},
		&expr.Immediate{Register: 2, Data: binary.BigEndian.AppendUint16(nil, to.Port())},
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: 1, RegProtoMin: 2, Specified: true},
	}
}

// chain is one of a table's, with rules that are lists of matches.
type chain struct {
	nftables.Chain
	rules [][]match
}

func newChain(name string, kind nftables.ChainType, hook *nftables.ChainHook, at *nftables.ChainPriority, otherwise nftables.ChainPolicy, rules ...[]match) chain {
	return chain{nftables.Chain{Name: name, Type: kind, Hooknum: hook, Priority: at, Policy: &otherwise}, rules}
}

// setTable makes a table of the calling thread's namespace, in place of one of the same name, at once.
func setTable(name string, chains []chain) error {
	c, err := nftables.New()
	if err != nil {
		return fmt.Errorf("open netfilter: %w", err)
	}
	table := &nftables.Table{Name: name, Family: nftables.TableFamilyINet}
	c.AddTable(table)
	c.DelTable(table)
	c.AddTable(table)
	for i := range chains {
		one := &chains[i]
		one.Table = table
		c.AddChain(&one.Chain)
		for _, rule := range one.rules {
			var all []expr.Any
			for _, m := range rule {
				all = append(all, m...)
			}
			c.AddRule(&nftables.Rule{Table: table, Chain: &one.Chain, Exprs: all})
		}
	}
	if err := c.Flush(); err != nil {
		return explain(fmt.Errorf("set rules of netfilter (%s): %w", name, err))
	}
	return nil
}

const tcp, udp = unix.IPPROTO_TCP, unix.IPPROTO_UDP

// maxSessions is how many there may be of UDP and ICMP: those of queries last as long as sessionIdle, too.
const maxSessions = 4 * policy.DefaultSessions

// guestChains are the rules in a VM's own namespace: what has no mark of the programs leads nowhere, nobody but conntrack's
// acquaintances comes in, and the namespace itself says nothing but that something cannot be.
func guestChains(resolver netip.AddrPort) []chain {
	eq, neq := expr.CmpOpEq, expr.CmpOpNeq
	chains := []chain{
		newChain("marks", nftables.ChainTypeFilter, nftables.ChainHookPrerouting, nftables.ChainPriorityRaw, nftables.ChainPolicyAccept,
			[]match{from(tapName), marked(eq, markRefused), carries(eq, tcp), reset()},
			[]match{from(tapName), marked(eq, markRefused), carries(eq, udp), closed()},
			[]match{from(tapName), marked(eq, markRefused), refuse()},
			[]match{from(tapName), marked(eq, markBarred), refuse()},
			[]match{from(tapName), marked(neq, markAllowed), drop()}),
		newChain("forward", nftables.ChainTypeFilter, nftables.ChainHookForward, nftables.ChainPriorityFilter, nftables.ChainPolicyDrop,
			// A segment of a connection that is not known is one of another life.
			[]match{from(tapName), into(uplinkName), state(expr.CtStateBitINVALID), carries(eq, tcp), reset()},
			[]match{from(tapName), into(uplinkName), carries(eq, tcp), more(policy.DefaultConnections), reset()},
			[]match{from(tapName), into(uplinkName), carries(neq, tcp), more(maxSessions), refuse()},
			[]match{from(tapName), into(uplinkName), state(known | expr.CtStateBitNEW), accept()},
			[]match{from(uplinkName), into(tapName), state(known), accept()}),
		newChain("input", nftables.ChainTypeFilter, nftables.ChainHookInput, nftables.ChainPriorityFilter, nftables.ChainPolicyDrop,
			[]match{from(tapName), carries(eq, unix.IPPROTO_ICMP), accept()},
			[]match{from(tapName), carries(eq, unix.IPPROTO_ICMPV6), accept()},
			[]match{from(uplinkName), carries(eq, tcp), reset()}),
		newChain("output", nftables.ChainTypeFilter, nftables.ChainHookOutput, nftables.ChainPriorityFilter, nftables.ChainPolicyDrop,
			[]match{resets(), accept()},
			[]match{carries(eq, unix.IPPROTO_ICMP), accept()},
			[]match{carries(eq, unix.IPPROTO_ICMPV6), accept()}),
		newChain("source", nftables.ChainTypeNAT, nftables.ChainHookPostrouting, nftables.ChainPriorityNATSource, nftables.ChainPolicyAccept,
			[]match{into(uplinkName), masquerade()}),
	}
	if resolver.IsValid() {
		var rules [][]match
		at := netip.PrefixFrom(nic.Resolver4, 32)
		for _, protocol := range []byte{tcp, udp} {
			rules = append(rules, []match{from(tapName), address(at, false), carries(eq, protocol), port(resolverPort), translate(resolver)})
		}
		chains = append(chains, newChain("names", nftables.ChainTypeNAT, nftables.ChainHookPrerouting, nftables.ChainPriorityNATDest, nftables.ChainPolicyAccept, rules...))
	}
	return chains
}

// hostChains are the rules of the host, the same for all VMs: they reach neither the host nor each other, and nobody begins
// to talk to them.
func hostChains() []chain {
	eq, neq := expr.CmpOpEq, expr.CmpOpNeq
	in := named(expr.MetaKeyIIFNAME, eq, hostPrefix, false)
	out := named(expr.MetaKeyOIFNAME, eq, hostPrefix, false)
	outside := named(expr.MetaKeyOIFNAME, neq, hostPrefix, false)
	return []chain{
		newChain("input", nftables.ChainTypeFilter, nftables.ChainHookInput, nftables.ChainPriorityFilter, nftables.ChainPolicyAccept,
			[]match{in, carries(eq, tcp), reset()}, []match{in, refuse()}),
		newChain("forward", nftables.ChainTypeFilter, nftables.ChainHookForward, nftables.ChainPriorityFilter, nftables.ChainPolicyAccept,
			[]match{in, out, carries(eq, tcp), reset()}, []match{in, out, refuse()},
			[]match{out, state(known), accept()}, []match{out, drop()}),
		newChain("source", nftables.ChainTypeNAT, nftables.ChainHookPostrouting, nftables.ChainPriorityNATSource, nftables.ChainPolicyAccept,
			[]match{outside, address(uplinks4, true), masquerade()}, []match{outside, address(uplinks6, true), masquerade()}),
	}
}
