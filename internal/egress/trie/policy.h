//go:build ignore

// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
//
// A policy as programs in the kernel look it up, which the package in Go writes.

#pragma once

#include <stdbool.h>
#include <stddef.h>

#include <linux/bpf.h>
#include <linux/in.h>

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

// The verifier reads such a function once, and not anew on every way that leads there.
#define READ_ONCE_BY_VERIFIER __attribute__((noinline))

#define READINGS 5

struct readings {
	__u32 four[READINGS];
};

// wrapped finds the addresses of IPv4 that one of IPv6 stands for, as package policy does, which says why. It returns which of them there are.
READ_ONCE_BY_VERIFIER int wrapped(const struct target *t, struct readings *readings)
{
	__u32 w[4];
	__u32 which = 0;

	if (!t || !readings)
		return 0;
	__u32 *four = readings->four;
	__builtin_memcpy(w, t->address, 16);
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

// policy_allows decides. local says that the packet does not leave the host.
static __always_inline bool policy_allows(void *policy, const struct target *t, bool local)
{
	struct readings readings = {};
	__u32 which = wrapped(t, &readings);
	for (int i = 0; which && i < READINGS; i++) {
		__u8 inner[16];

		if (!(which & 1 << i))
			continue;
		map4(inner, bpf_htonl(readings.four[i]));
		__u32 within = region(policy, inner);
		if ((within & CLOSED) && !offers(policy, within, t))
			return false;
	}
	__u32 found = region(policy, t->address);
	return offers(policy, found, t) && (!local || (found & LOCAL));
}

// Types of messages (RFC 792, RFC 4443). The kernel's headers of both need a C library's.
#define ICMP_ECHO 8
#define ICMPV6_ECHO_REQUEST 128
