//go:build ignore

// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//
// Programs at the TAP of one VM, in the VM's own network namespace. They mark what the guest may send and what is to be
// refused; netfilter answers the latter, and lets nothing pass that has no mark.

#include <stdbool.h>
#include <stddef.h>

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "../egress/trie/policy.h"

// Marks of packets on their way from the TAP into the namespace.
#define MARK_ALLOWED 0x666b0001
#define MARK_REFUSED 0x666b0002
#define MARK_PROHIBITED 0x666b0003 // what it is, and not where it goes

// What becomes of a frame of the guest: indices into counts.
enum class {
	IS_PACKET,     // allowed
	IS_NEIGHBOUR,  // who has the gateway's address?
	IS_REFUSED,    // by the policy
	IS_PROTOCOL,   // of IP, that leads nowhere
	IS_QUIET,      // what every station says now and then and nobody here hears
	IS_SHORT,      // ends within its headers, or says that it is longer than it is
	IS_ETHER_TYPE, // neither IP nor ARP
	IS_STATION,    // from another card, or to one
	IS_SOURCE,     // from an address that is not the guest's
	IS_FORGED,     // ARP, neighbour and router messages that only others may send
	IS_OPTIONS,    // IP options, extension headers beside fragments
	IS_FRAGMENT,   // of a packet whose beginning did not pass
	IS_SPENT,      // the guest has had all bytes that it may have
	IS_EXCESS,     // more packets than the guest may have in this time, either way
	IS_BYTES_FROM, // bytes of packets that the guest has sent, and that were let through to it
	IS_BYTES_TO,
	IS_STRAY,      // frames for the guest that it may not have
	IS_COUNTS,
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, IS_COUNTS);
	__type(key, __u32);
	__type(value, __u64);
} counts SEC(".maps");

// What the programs have to know of the VM.
struct settings {
	__u8 mac[6]; // of the guest's card
	__u8 open;   // the policy counts; otherwise nothing is allowed
	__u8 names;  // the guest may ask for names, and somebody answers
	__u32 generation; // of the policy
	__u32 resolver; // 1: somebody answers at the resolver's address
	__u64 space; // the number of the network namespace
	__u64 rate;  // bytes a second that may pass each way, which is queues' business; 0: any
	__u64 bytes; // that may pass in all, both ways together; 0: any
	__u64 packets; // a second that may pass each way; 0: any
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct settings);
} settings SEC(".maps");

// How many bytes of frames with packets have passed, both ways together. Unlike counts it is for the programs alone.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} passed SEC(".maps");

// A pace: when the next packet may pass.
struct pace {
	struct bpf_spin_lock lock;
	__u64 next; // ns of the monotonic clock
};

enum way { FROM_GUEST, TO_GUEST, WAYS };

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, WAYS);
	__type(key, __u32);
	__type(value, struct pace);
} paces SEC(".maps");

// How far a guest that was silent may be ahead of its pace, and how far behind it packets still pass.
#define BURST 100000000 // ns

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 1);
	__type(key, __u32);
	__array(values, struct policy);
} policies SEC(".maps");

// A packet of which the first fragment has passed, under the policy of that time.
struct fragment {
	__u8 address[16];
	__u32 id;
	__u32 protocol;
	__u32 generation;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1024);
	__type(key, struct fragment);
	__type(value, __u8);
} fragments SEC(".maps");

// What was refused, for whoever tells the user. Nobody is woken.
struct event {
	__u8 address[16];
	__u16 port;
	__u16 ether; // type of the frame
	__u8 class;
	__u8 protocol; // of IP
	__u8 unused[2];
};

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 65536);
} events SEC(".maps");

// Addresses on the link, the same for every guest. Those of usernet.
static const __u8 gateway_mac[6] = {0x52, 0x55, 0x0a, 0x00, 0x02, 0x02};

// Stations: the last byte of their addresses.
#define GATEWAY 2
#define RESOLVER 3
#define GUEST 15

#define LINK4 bpf_htonl(0x0a000200) // 10.0.2.0/24
#define GUEST4 (LINK4 | bpf_htonl(GUEST))
#define LINK6_0 bpf_htonl(0xfd666b76) // fd66:6b76:6d00::/64
#define LINK6_1 bpf_htonl(0x6d000000)

// What was read of a frame.
struct frame {
	struct target target;
	__u16 ether;
	__u8 protocol; // as it is in the packet
	bool later;    // a fragment that is not the first
	bool more;     // the first of several
	bool echo;
	__u32 id;
};

static __always_inline bool is_mac(const __u8 *a, const __u8 *b)
{
	return a[0] == b[0] && a[1] == b[1] && a[2] == b[2] && a[3] == b[3] && a[4] == b[4] && a[5] == b[5];
}

// on_link says which station of the link an address is: -1 for none, 0 for one that there is not.
static __always_inline int on_link(const __u8 *address)
{
	__u32 w[4];

	__builtin_memcpy(w, address, 16);
	if (!w[0] && !w[1] && w[2] == bpf_htonl(0xffff) && (w[3] & bpf_htonl(0xffffff00)) == LINK4)
		return bpf_ntohl(w[3]) & 0xff;
	if (w[0] == LINK6_0 && w[1] == LINK6_1)
		return !w[2] && !(w[3] & bpf_htonl(0xffffff00)) ? bpf_ntohl(w[3]) & 0xff : 0;
	return -1;
}

static __always_inline void count(__u32 what, __u64 n)
{
	__u64 *c = bpf_map_lookup_elem(&counts, &what);

	if (c)
		__sync_fetch_and_add(c, n);
}

// keeps_pace says whether a packet may pass now, each of its segments counted.
static __always_inline bool keeps_pace(struct __sk_buff *skb, const struct settings *s, __u32 way)
{
	__u64 packets = s->packets, size = skb->gso_size, now, took;
	struct pace *p;
	bool passes;

	if (!packets)
		return true;
	p = bpf_map_lookup_elem(&paces, &way);
	if (!p)
		return false;
	took = 1000000000 / packets;
	if (size)
		took *= (skb->len + size - 1) / size;
	now = bpf_ktime_get_ns();
	bpf_spin_lock(&p->lock);
	if (p->next + BURST < now)
		p->next = now - BURST;
	passes = p->next <= now + BURST;
	if (passes)
		p->next += took;
	bpf_spin_unlock(&p->lock);
	return passes;
}

// meter counts a packet that may pass otherwise, and says what becomes of it.
static __always_inline int meter(struct __sk_buff *skb, const struct settings *s, __u32 way)
{
	__u32 zero = 0;
	__u64 *bytes = bpf_map_lookup_elem(&passed, &zero);

	if (!bytes || (s->bytes && *bytes >= s->bytes))
		return IS_SPENT;
	if (!keeps_pace(skb, s, way))
		return IS_EXCESS;
	__sync_fetch_and_add(bytes, skb->len);
	return IS_PACKET;
}

// arp looks at the address resolution protocol (RFC 826).
static __always_inline int arp(struct __sk_buff *skb, struct frame *f, const struct settings *s)
{
	struct {
		__u8 kind[6];
		__be16 operation;
		__u8 sender_mac[6];
		__u8 sender[4];
		__u8 target_mac[6];
		__u8 target[4];
	} p;
	static const __u8 ethernet[6] = {0, 1, 8, 0, 6, 4};
	__be32 sender, target;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &p, sizeof(p)))
		return IS_SHORT;
	__builtin_memcpy(&sender, p.sender, 4);
	__builtin_memcpy(&target, p.target, 4);
	map4(f->target.address, sender);
	if (!is_mac(p.kind, ethernet) || !is_mac(p.sender_mac, s->mac) || (sender && sender != GUEST4))
		return IS_FORGED;
	if (p.operation != bpf_htons(1) || (target != (LINK4 | bpf_htonl(GATEWAY)) && target != (LINK4 | bpf_htonl(RESOLVER))))
		return IS_QUIET;
	return IS_NEIGHBOUR;
}

// neighbour looks at messages of neighbour discovery (RFC 4861).
static __always_inline int neighbour(struct __sk_buff *skb, __u32 at, __u8 type, bool own)
{
	__u32 w[4];
	int station;

	if (type == 134 || type == 137) // a router's
		return IS_FORGED;
	if (!own)
		return IS_SOURCE;
	if (type == 133) // is there a router?
		return IS_QUIET;
	if (bpf_skb_load_bytes(skb, at + 8, w, sizeof(w)))
		return IS_SHORT;
	station = on_link((__u8 *)w);
	if (station != GATEWAY && station != RESOLVER)
		return IS_QUIET;
	return type == 136 ? IS_FORGED : IS_NEIGHBOUR;
}

// transport reads what is behind the IP header: ports, or whether it is an echo request or its answer.
READ_ONCE_BY_VERIFIER int transport(struct __sk_buff *skb, __u32 at, struct frame *f, bool to_guest)
{
	__be16 ports[2];
	__u8 type[2];

	if (!f)
		return IS_SHORT;
	f->target.protocol = f->protocol == IPPROTO_ICMPV6 ? IPPROTO_ICMP : f->protocol;
	switch (f->protocol) {
	case IPPROTO_TCP:
	case IPPROTO_UDP:
		if (f->later)
			return IS_PACKET;
		// A beginning that ends within its header is nobody's.
		if (bpf_skb_load_bytes(skb, at, ports, sizeof(ports)) ||
		    (f->more && skb->len < at + (f->protocol == IPPROTO_TCP ? 20 : 8)))
			return IS_SHORT;
		f->target.port = bpf_ntohs(to_guest ? ports[0] : ports[1]);
		return IS_PACKET;
	case IPPROTO_ICMP:
	case IPPROTO_ICMPV6:
		if ((f->protocol == IPPROTO_ICMP) != (f->ether == ETH_P_IP))
			return IS_PROTOCOL;
		if (f->later)
			return IS_PACKET;
		if (bpf_skb_load_bytes(skb, at, type, sizeof(type)))
			return IS_SHORT;
		if (f->protocol == IPPROTO_ICMP)
			f->echo = type[0] == (to_guest ? 0 : ICMP_ECHO) && !type[1];
		else
			f->echo = type[0] == (to_guest ? 129 : ICMPV6_ECHO_REQUEST) && !type[1];
		return f->echo ? IS_PACKET : IS_QUIET;
	}
	return IS_PROTOCOL;
}

READ_ONCE_BY_VERIFIER int ipv4(struct __sk_buff *skb, struct frame *f, bool group)
{
	struct iphdr ip;
	__u32 total, off;

	if (!f || bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)) || ip.version != 4 || ip.ihl < 5)
		return IS_SHORT;
	map4(f->target.address, ip.daddr);
	f->protocol = ip.protocol;
	total = bpf_ntohs(ip.tot_len);
	if (total < ip.ihl * 4 || (total > skb->len - ETH_HLEN))
		return IS_SHORT;
	if (group || ip.daddr == 0xffffffff || (ip.daddr & bpf_htonl(0xf0000000)) == bpf_htonl(0xe0000000)) {
		if (ip.ihl == 5 && ip.protocol == IPPROTO_UDP)
			transport(skb, ETH_HLEN + sizeof(ip), f, false);
		return IS_QUIET;
	}
	if (ip.saddr != GUEST4) {
		map4(f->target.address, ip.saddr);
		return IS_SOURCE;
	}
	off = bpf_ntohs(ip.frag_off);
	f->later = off & 0x1fff;
	f->more = !f->later && (off & 0x2000);
	f->id = ip.id;
	if (ip.ihl > 5) {
		transport(skb, ETH_HLEN + ip.ihl * 4, f, false); // for who is told
		return IS_OPTIONS;
	}
	return transport(skb, ETH_HLEN + sizeof(ip), f, false);
}

static __always_inline bool extension(__u8 next)
{
	switch (next) {
	case 0: case 43: case 44: case 50: case 51: case 60: case 135: case 139: case 140: case 253: case 254:
		return true;
	}
	return false;
}

READ_ONCE_BY_VERIFIER int ipv6(struct __sk_buff *skb, struct frame *f, bool group)
{
	struct ipv6hdr ip;
	__u32 at = ETH_HLEN + sizeof(ip);
	struct {
		__u8 next, unused;
		__be16 off;
		__be32 id;
	} part;
	__u8 type;
	int from, class;

	if (!f || bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)) || ip.version != 6)
		return IS_SHORT;
	__builtin_memcpy(f->target.address, &ip.daddr, 16);
	f->protocol = ip.nexthdr;
	// Segments of which there are more than 65535 bytes are none of this link.
	if (bpf_ntohs(ip.payload_len) > skb->len - at)
		return IS_SHORT;
	from = on_link((__u8 *)&ip.saddr);
	if (ip.nexthdr == IPPROTO_ICMPV6 && !bpf_skb_load_bytes(skb, at, &type, 1) && type >= 133 && type <= 137) {
		__u32 w[4];

		__builtin_memcpy(w, &ip.saddr, 16);
		bool own = from == GUEST || (w[0] & bpf_htonl(0xffc00000)) == bpf_htonl(0xfe800000) || !(w[0] | w[1] | w[2] | w[3]);

		class = neighbour(skb, at, type, own);
		if (class == IS_SOURCE || class == IS_FORGED)
			__builtin_memcpy(f->target.address, &ip.saddr, 16);
		return class;
	}
	if (group || ip.daddr.s6_addr[0] == 0xff) {
		if (ip.nexthdr == IPPROTO_UDP)
			transport(skb, at, f, false);
		return IS_QUIET;
	}
	if (from != GUEST) {
		__builtin_memcpy(f->target.address, &ip.saddr, 16);
		return IS_SOURCE;
	}
	if (ip.nexthdr == IPPROTO_FRAGMENT) {
		if (bpf_skb_load_bytes(skb, at, &part, sizeof(part)))
			return IS_SHORT;
		f->later = part.off & bpf_htons(0xfff8);
		f->more = !f->later && (part.off & bpf_htons(1));
		f->id = part.id;
		f->protocol = part.next;
		at += sizeof(part);
	}
	class = transport(skb, at, f, false);
	return class == IS_PROTOCOL && extension(f->protocol) ? IS_OPTIONS : class;
}

// by_policy asks the policy for a target.
READ_ONCE_BY_VERIFIER int by_policy(const struct target *t)
{
	__u32 zero = 0;
	void *policy = bpf_map_lookup_elem(&policies, &zero);

	return t && policy && policy_allows(policy, t, false);
}

// allowed asks for a target, and for what every guest may reach on the link.
static __always_inline bool allowed(const struct settings *s, const struct target *t)
{
	int station = on_link(t->address);

	if (station >= 0) {
		if (station == GATEWAY)
			return t->protocol == IPPROTO_ICMP;
		if (station != RESOLVER)
			return false;
		return t->protocol == IPPROTO_ICMP || (s->open && s->names && t->port == 53);
	}
	return s->open && by_policy(t);
}

// decide says what becomes of a packet of the guest that is well-formed.
static __always_inline int decide(struct __sk_buff *skb, struct frame *f, const struct settings *s)
{
	// Before the policy: what an old one lets pass is not to be of a new generation.
	struct fragment key = {.id = f->id, .protocol = f->protocol, .generation = *(volatile const __u32 *)&s->generation};
	__u8 one = 1;

	if (f->later || f->more)
		__builtin_memcpy(key.address, f->target.address, 16);
	if (f->later)
		return s->open && bpf_map_lookup_elem(&fragments, &key) ? IS_PACKET : IS_FRAGMENT;
	if (!allowed(s, &f->target))
		return IS_REFUSED;
	if (f->more && bpf_map_update_elem(&fragments, &key, &one, BPF_ANY))
		return IS_FRAGMENT;
	return IS_PACKET;
}

static __always_inline void tell(const struct frame *f, __u8 class)
{
	struct event *e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);

	if (!e)
		return;
	__builtin_memcpy(e->address, f->target.address, 16);
	e->port = f->target.port;
	e->ether = f->ether;
	e->class = class;
	e->protocol = f->protocol;
	__builtin_memset(e->unused, 0, sizeof(e->unused));
	bpf_ringbuf_submit(e, BPF_RB_NO_WAKEUP);
}

static __always_inline int classify(struct __sk_buff *skb, struct frame *f, const struct settings *s)
{
	struct ethhdr eth;
	bool group;
	int class;

	if (bpf_skb_load_bytes(skb, 0, &eth, sizeof(eth)))
		return IS_SHORT;
	f->ether = bpf_ntohs(eth.h_proto);
	if (skb->vlan_present) // the kernel has taken the tag off
		f->ether = bpf_ntohs(skb->vlan_proto);
	if (!is_mac(eth.h_source, s->mac))
		return IS_STATION;
	group = eth.h_dest[0] & 1;
	if (!group && !is_mac(eth.h_dest, gateway_mac))
		return IS_STATION;
	switch (f->ether) {
	case ETH_P_ARP:
		return arp(skb, f, s);
	case ETH_P_IP:
		class = ipv4(skb, f, group);
		break;
	case ETH_P_IPV6:
		class = ipv6(skb, f, group);
		break;
	default:
		return IS_ETHER_TYPE;
	}
	return class == IS_PACKET ? decide(skb, f, s) : class;
}

// from_guest decides about every frame that the guest sends.
SEC("tc") int from_guest(struct __sk_buff *skb)
{
	struct frame f = {};
	__u32 zero = 0;
	struct settings *s = bpf_map_lookup_elem(&settings, &zero);
	int class;

	if (!s)
		return TC_ACT_SHOT;
	class = classify(skb, &f, s);
	if (class == IS_PACKET)
		class = meter(skb, s, FROM_GUEST);
	count(class, 1);
	skb->mark = 0;
	switch (class) {
	case IS_PACKET:
		count(IS_BYTES_FROM, skb->len);
		skb->mark = MARK_ALLOWED;
		return TC_ACT_OK;
	case IS_NEIGHBOUR:
		skb->mark = MARK_ALLOWED;
		return TC_ACT_OK;
	case IS_QUIET:
		if (f.target.port) // what kernels say by themselves has none
			tell(&f, class);
		return TC_ACT_SHOT;
	case IS_REFUSED:
	case IS_SPENT:
	case IS_PROTOCOL:
	case IS_OPTIONS:
		tell(&f, class);
		if (f.more || f.later) // what is put together has one mark
			return TC_ACT_SHOT;
		skb->mark = class == IS_REFUSED || class == IS_SPENT ? MARK_REFUSED : MARK_PROHIBITED;
		return TC_ACT_OK;
	}
	if (class != IS_EXCESS) // there would be as many of these
		tell(&f, class);
	return TC_ACT_SHOT;
}

// for_guest says what a frame for the guest is that it may have: IS_PACKET, from where the policy lets it reach, or IS_QUIET, which tells it
// that it may not or cannot reach something, or is neighbour discovery. All else is IS_STRAY. What has no connection was dropped before.
static __always_inline int for_guest(struct __sk_buff *skb, const struct settings *s)
{
	struct frame f = {.ether = bpf_ntohs(skb->protocol)};
	__u32 at;
	__u8 flags;

	if (f.ether == ETH_P_ARP)
		return IS_QUIET;
	if (f.ether == ETH_P_IP) {
		struct iphdr ip;

		if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)) || ip.ihl != 5)
			return IS_STRAY;
		if (bpf_ntohs(ip.frag_off) & 0x1fff)
			return IS_PACKET; // worth nothing without the first
		map4(f.target.address, ip.saddr);
		f.protocol = ip.protocol;
		at = ETH_HLEN + sizeof(ip);
	} else if (f.ether == ETH_P_IPV6) {
		struct ipv6hdr ip;

		if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)))
			return IS_STRAY;
		__builtin_memcpy(f.target.address, &ip.saddr, 16);
		f.protocol = ip.nexthdr;
		at = ETH_HLEN + sizeof(ip);
		if (ip.nexthdr == IPPROTO_FRAGMENT) {
			__u8 part[8];

			if (bpf_skb_load_bytes(skb, at, part, sizeof(part)))
				return IS_STRAY;
			if (part[2] || part[3] & 0xf8)
				return IS_PACKET;
			f.protocol = part[0];
			at += sizeof(part);
		}
	} else {
		return IS_STRAY;
	}
	if (f.protocol == IPPROTO_TCP && !bpf_skb_load_bytes(skb, at + 13, &flags, 1) && flags & 4)
		return IS_QUIET; // a reset
	switch (transport(skb, at, &f, true)) {
	case IS_QUIET:
		return IS_QUIET; // ICMP that is no echo: conntrack knows what it is about
	case IS_PACKET:
		return allowed(s, &f.target) ? IS_PACKET : IS_STRAY;
	}
	return IS_STRAY;
}

// to_guest decides about every frame for the guest, and addresses it: the namespace knows the guest's card by another name.
SEC("tc") int to_guest(struct __sk_buff *skb)
{
	__u32 zero = 0;
	struct settings *s = bpf_map_lookup_elem(&settings, &zero);
	__u8 first, mac[6];
	int class;

	if (!s || bpf_skb_load_bytes(skb, 0, &first, 1))
		return TC_ACT_SHOT;
	class = for_guest(skb, s);
	if (class == IS_PACKET)
		class = meter(skb, s, TO_GUEST);
	if (class != IS_PACKET && class != IS_QUIET) {
		count(class, 1);
		return TC_ACT_SHOT;
	}
	count(IS_BYTES_TO, skb->len);
	if (first & 1)
		return TC_ACT_OK;
	__builtin_memcpy(mac, s->mac, 6);
	return bpf_skb_store_bytes(skb, 0, mac, sizeof(mac), 0) ? TC_ACT_SHOT : TC_ACT_OK;
}

// What this was compiled from and by, so that a test can tell whether it is the tree's.
const char source[] SEC("forkvm.source") = SOURCE;

char _license[] SEC("license") = "Dual BSD/GPL";
