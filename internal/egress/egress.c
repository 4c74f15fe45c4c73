//go:build ignore

// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//
// Programs at the control group of a VM process. They allow what the group's policy says and nothing else: a group without
// one sends nothing.

#include <stdbool.h>
#include <stddef.h>

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/in6.h>
#include <linux/ip.h>
#include <linux/ipv6.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

// The key of a policy's trie is of one of two kinds. Addresses are of IPv6, those of IPv4 mapped into it, and lead to a class.
// Classes lead to the ports that may be reached, in prefixes of port numbers. One trie for both, so that a policy is replaced
// by one pointer.
enum { ADDRESS = 0, PORTS = 1 };

struct key {
	__u32 bits; // that count, of what follows
	__u8 kind;
	union {
		__u8 address[16];
		struct {
			__u8 class[4]; // big endian
			__u8 protocol; // IPPROTO_TCP or IPPROTO_UDP
			__u8 port[2];  // big endian
		};
	};
} __attribute__((packed));

// Flags of what an address leads to, beside its class.
#define CLOSED (1u << 31) // what is not among the ports is refused to addresses that wrap this one, too
#define LOCAL (1u << 30)  // may be the host itself
// What needs no ports to be looked up.
#define ALL_TCP (1u << 29)
#define ALL_UDP (1u << 28)
#define ECHO (1u << 27)
#define CLASS (ECHO - 1)

struct policy {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1);
	__uint(key_size, sizeof(struct key));
	__uint(value_size, sizeof(__u32));
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH_OF_MAPS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, __u64); // of the control group
	__array(values, struct policy);
} policies SEC(".maps");

// Ports of the host that a group's processes may be reached at. All that they send from there is answers, which go to whoever asked.
struct door {
	__u8 address[16]; // zeros: every one
	__u16 port;       // host order
	__u8 protocol;
	__u8 zero;
};

struct doors {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1);
	__uint(key_size, sizeof(struct door));
	__uint(value_size, 1);
};

// Who has sent a datagram to one of the doors.
struct peer {
	__u8 address[16];
	__u16 port; // both in host order
	__u16 door;
};

struct peers {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1);
	__uint(key_size, sizeof(struct peer));
	__uint(value_size, 1);
};

// Both by the control group, for groups that have doors.
struct {
	__uint(type, BPF_MAP_TYPE_HASH_OF_MAPS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, __u64);
	__array(values, struct doors);
} doors SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH_OF_MAPS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, __u64);
	__array(values, struct peers);
} peers SEC(".maps");

// What was refused to a control group: connections and datagrams at their call, packets on their way out.
struct refused {
	__u64 calls;
	__u64 packets;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, __u64);
	__type(value, struct refused);
} refusals SEC(".maps");

// Somebody else's end of what is sent or received, and ours.
struct target {
	__u8 address[16];
	__u8 protocol; // IPPROTO_ICMP for that of both families
	__u16 port;    // host order, 0 for ICMP
	__u16 own_port;
	bool opens; // a connection: the first segment of it
	__u8 own[16];
};

static __always_inline void map4(__u8 *address, __u32 four)
{
	__builtin_memset(address, 0, 10);
	address[10] = address[11] = 0xff;
	__builtin_memcpy(address + 12, &four, 4);
}

// region finds what the policy says of an address: 0 if nothing.
static __always_inline __u32 region(void *policy, const __u8 *address)
{
	struct key key = {.bits = 8 + 128, .kind = ADDRESS};

	__builtin_memcpy(key.address, address, 16);
	__u32 *found = bpf_map_lookup_elem(policy, &key);
	return found ? *found : CLOSED;
}

static __always_inline bool offers(void *policy, __u32 region, const struct target *t)
{
	struct key key = {.bits = 8 + 32 + 8 + 16, .kind = PORTS};
	__u32 class = region & CLASS;

	switch (t->protocol) {
	case IPPROTO_TCP:
		if (region & ALL_TCP)
			return true;
		break;
	case IPPROTO_UDP:
		if (region & ALL_UDP)
			return true;
		break;
	case IPPROTO_ICMP:
		return region & ECHO;
	default:
		return false;
	}
	if (!class)
		return false;
	key.class[0] = class >> 24;
	key.class[1] = class >> 16;
	key.class[2] = class >> 8;
	key.class[3] = class;
	key.protocol = t->protocol;
	key.port[0] = t->port >> 8;
	key.port[1] = t->port;
	return bpf_map_lookup_elem(policy, &key) != NULL;
}

#define READINGS 5

// wrapped finds the addresses of IPv4 that one of IPv6 stands for, as package policy does, which says why. It returns which of them there are.
static __always_inline __u32 wrapped(const __u8 *address, __u32 *four)
{
	__u32 w[4];
	__u32 which = 0;

	__builtin_memcpy(w, address, 16);
	if (!w[0] && !w[1] && w[2] == bpf_htonl(0xffff)) // mapped: it is itself
		return 0;
	for (int i = 0; i < 4; i++)
		w[i] = bpf_ntohl(w[i]);
	if ((!w[0] && !w[1] && !w[2] && w[3] > 1) || // compatible
	    (!w[0] && !w[1] && w[2] == 0xffff0000) || // translated, as once
	    (w[0] == 0x64ff9b && !w[1] && !w[2])) { // translated
		four[0] = w[3];
		which = 1;
	} else if (w[0] == 0x64ff9b && w[1] >> 16 == 1) { // translated with a prefix of a site's own, of one of four lengths
		four[0] = w[3];
		four[1] = w[2] << 8 | w[3] >> 24;
		four[2] = w[1] << 24 | (w[2] & 0xffffff);
		four[3] = w[1] << 16 | (w[2] >> 8 & 0xffff);
		for (int i = 0; i < 4; i++)
			if (four[i] >> 24)
				which |= 1 << i;
		if (!which)
			which = 1;
	} else if (w[0] >> 16 == 0x2002) { // 6to4
		four[0] = w[0] << 16 | w[1] >> 16;
		which = 1;
	} else if (w[0] == 0x20010000) { // Teredo
		four[0] = w[1];
		four[1] = ~w[3];
		which = 3;
	}
	if ((w[2] & ~0x02000000) == 0x5efe) { // ISATAP
		four[4] = w[3];
		which |= 1 << 4;
	}
	return which;
}

// allows decides. local says that the packet does not leave the host.
static __always_inline bool allows(__u64 group, const struct target *t, bool local)
{
	__u32 four[READINGS] = {};
	void *policy = bpf_map_lookup_elem(&policies, &group);

	if (!policy)
		return false;
	__u32 which = wrapped(t->address, four);
	for (int i = 0; which && i < READINGS; i++) {
		__u8 inner[16];

		if (!(which & 1 << i))
			continue;
		map4(inner, bpf_htonl(four[i]));
		__u32 within = region(policy, inner);
		if ((within & CLOSED) && !offers(policy, within, t))
			return false;
	}
	__u32 found = region(policy, t->address);
	return offers(policy, found, t) && (!local || (found & LOCAL));
}

// has_door says whether our end is one of the group's doors.
static __always_inline bool has_door(__u64 group, const struct target *t)
{
	struct door door = {.port = t->own_port, .protocol = t->protocol};
	void *list = bpf_map_lookup_elem(&doors, &group);

	if (!list)
		return false;
	if (bpf_map_lookup_elem(list, &door))
		return true;
	__builtin_memcpy(door.address, t->own, 16);
	return bpf_map_lookup_elem(list, &door) != NULL;
}

static __always_inline void name_peer(struct peer *p, const struct target *t)
{
	__builtin_memcpy(p->address, t->address, 16);
	p->port = t->port;
	p->door = t->own_port;
}

// has_come says whether the other end has sent a datagram to our port, which was a door.
static __always_inline bool has_come(__u64 group, const struct target *t)
{
	struct peer peer = {};
	void *list = t->protocol == IPPROTO_UDP ? bpf_map_lookup_elem(&peers, &group) : NULL;

	name_peer(&peer, t);
	return list && bpf_map_lookup_elem(list, &peer);
}

// answers says whether a packet is part of an answer from a door: no connection is opened from one.
static __always_inline bool answers(__u64 group, const struct target *t)
{
	if (t->protocol != IPPROTO_TCP)
		return has_come(group, t);
	return !t->opens && has_door(group, t);
}

static __always_inline void count(__u64 group, bool call)
{
	struct refused *r = bpf_map_lookup_elem(&refusals, &group);

	if (r)
		__sync_fetch_and_add(call ? &r->calls : &r->packets, 1);
}

// decide_call answers connect and sendmsg: 1 lets it go on, 0 is EPERM.
static __always_inline int decide_call(struct bpf_sock_addr *ctx, struct target *t)
{
	__u64 group = bpf_get_current_cgroup_id();

	t->protocol = ctx->protocol == IPPROTO_ICMPV6 ? IPPROTO_ICMP : ctx->protocol;
	t->port = t->protocol == IPPROTO_ICMP ? 0 : bpf_ntohs(ctx->user_port);
	if (ctx->sk)
		t->own_port = ctx->sk->src_port;
	if (allows(group, t, false) || has_come(group, t))
		return 1;
	count(group, true);
	return 0;
}

static __always_inline int decide_call4(struct bpf_sock_addr *ctx)
{
	struct target t = {};

	map4(t.address, ctx->user_ip4);
	return decide_call(ctx, &t);
}

static __always_inline int decide_call6(struct bpf_sock_addr *ctx)
{
	struct target t = {};
	__u32 words[4] = {ctx->user_ip6[0], ctx->user_ip6[1], ctx->user_ip6[2], ctx->user_ip6[3]};

	__builtin_memcpy(t.address, words, 16);
	return decide_call(ctx, &t);
}

SEC("cgroup/connect4") int connect4(struct bpf_sock_addr *ctx) { return decide_call4(ctx); }
SEC("cgroup/connect6") int connect6(struct bpf_sock_addr *ctx) { return decide_call6(ctx); }
SEC("cgroup/sendmsg4") int sendmsg4(struct bpf_sock_addr *ctx) { return decide_call4(ctx); }
SEC("cgroup/sendmsg6") int sendmsg6(struct bpf_sock_addr *ctx) { return decide_call6(ctx); }

// Types of messages (RFC 792, RFC 4443). The kernel's headers of both need a C library's.
#define ICMP_ECHO 8
#define ICMPV6_ECHO_REQUEST 128

#define TCP_FLAGS 13 // where they are in the header
#define TCP_SYN 0x02
#define TCP_ACK 0x10

// transport reads what is behind the IP header of a packet that is sent, or received, by us. Echo is the one message of ICMP that a process may
// send.
static __always_inline bool transport(struct __sk_buff *skb, __u32 at, __u8 protocol, bool received, struct target *t)
{
	__be16 ports[2];
	__u8 one;

	t->protocol = protocol;
	switch (protocol) {
	case IPPROTO_TCP:
		if (bpf_skb_load_bytes(skb, at + TCP_FLAGS, &one, 1))
			return false;
		t->opens = (one & TCP_SYN) && !(one & TCP_ACK);
		/* fallthrough */
	case IPPROTO_UDP:
		if (bpf_skb_load_bytes(skb, at, ports, sizeof(ports)))
			return false;
		t->port = bpf_ntohs(ports[!received]);
		t->own_port = bpf_ntohs(ports[received]);
		return true;
	case IPPROTO_ICMP:
		return !bpf_skb_load_bytes(skb, at, &one, 1) && one == ICMP_ECHO;
	case IPPROTO_ICMPV6:
		t->protocol = IPPROTO_ICMP;
		return !bpf_skb_load_bytes(skb, at, &one, 1) && one == ICMPV6_ECHO_REQUEST;
	}
	return false;
}

#define FRAGMENT 0x3fff // more of them, or where this one belongs

// parse reads a packet that is whole: what is sent is cut into fragments later, what is received has been put together. Options, which may
// name another destination, and extension headers are refused.
static __always_inline bool parse(struct __sk_buff *skb, bool received, struct target *t)
{
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		struct iphdr ip;

		if (bpf_skb_load_bytes(skb, 0, &ip, sizeof(ip)) || ip.version != 4 || ip.ihl != 5 || (ip.frag_off & bpf_htons(FRAGMENT)))
			return false;
		map4(t->address, received ? ip.saddr : ip.daddr);
		map4(t->own, received ? ip.daddr : ip.saddr);
		return transport(skb, sizeof(ip), ip.protocol, received, t);
	}
	if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr ip;

		if (bpf_skb_load_bytes(skb, 0, &ip, sizeof(ip)))
			return false;
		__builtin_memcpy(t->address, received ? &ip.saddr : &ip.daddr, 16);
		__builtin_memcpy(t->own, received ? &ip.daddr : &ip.saddr, 16);
		return transport(skb, sizeof(ip), ip.nexthdr, received, t);
	}
	return false;
}

#define LOOPBACK 1 // the interface of that number in every network namespace

// egress decides about every packet of the group's sockets, however they came about: 1 lets it go, 0 drops it.
SEC("cgroup_skb/egress") int egress(struct __sk_buff *skb)
{
	struct target t = {};
	__u64 group = bpf_skb_cgroup_id(skb);

	if (parse(skb, false, &t) && (allows(group, &t, skb->ifindex == LOOPBACK) || answers(group, &t)))
		return 1;
	count(group, false);
	return 0;
}

// ingress notes who comes to a door for datagrams, so that they are answered. It refuses nothing.
SEC("cgroup_skb/ingress") int ingress(struct __sk_buff *skb)
{
	struct target t = {};
	struct peer peer = {};
	__u64 group = bpf_skb_cgroup_id(skb);
	__u8 one = 1;

	if (!parse(skb, true, &t) || t.protocol != IPPROTO_UDP || !has_door(group, &t))
		return 1;
	name_peer(&peer, &t);
	void *list = bpf_map_lookup_elem(&peers, &group);
	if (list && !bpf_map_lookup_elem(list, &peer))
		bpf_map_update_elem(list, &peer, &one, BPF_ANY);
	return 1;
}

// What this was compiled from and by, so that a test can tell whether it is the tree's.
const char source[] SEC("forkvm.source") = SOURCE;

char _license[] SEC("license") = "Dual BSD/GPL";
