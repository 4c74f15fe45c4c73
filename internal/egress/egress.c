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

#include "trie/policy.h"

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

// allows decides. local says that the packet does not leave the host.
static __always_inline bool allows(__u64 group, const struct target *t, bool local)
{
	void *policy = bpf_map_lookup_elem(&policies, &group);

	return policy && policy_allows(policy, t, local);
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
