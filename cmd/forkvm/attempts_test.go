package main

import (
	"strings"

	"github.com/forkvm/forkvm/internal/testkit/attempt"
)

// attemptPolicies are the policies under which everything is tried, in this order.
var attemptPolicies = []struct {
	name  string
	names bool // has entries with names
	set   []string
}{
	{"no network", false, []string{"no-network"}},
	{"names", true, []string{
		"allowlist", "--allow", "good.example:80", "--allow", "good.example:443", "--allow", "good.example:7", "--allow", "*.good.test:80",
		"--allow", "198.51.100.7:53/udp",
	}},
	{"addresses", false, []string{
		"allowlist", "--allow", "20.1.1.0/24", "--allow", "2620:1::/32", "--allow", "8.8.8.8", "--allow", "0.0.0.0/1", "--allow", "128.0.0.0/1:9",
		"--deny", "20.2.0.0/16", "--deny", "2620:2::/32",
	}},
	{"public", false, []string{"public"}},
}

// try is one attempt and what has to come of it under each of the policies: an answer and, if it was refused, behind a slash the
// reason that is on record. The last one is for the policies that follow, too.
type try struct {
	name string
	attempt.Attempt
	want string
	// record is what the refusal is on record as ("tcp ADDRESS:PORT"), seen what the world gets of it if the answer is ok. Empty:
	// as the attempt says. Both may have several, separated by commas: one of the records, all that is seen.
	record, seen string
	// byTap is what is wanted of a network with a TAP, if that is something else; see overTap.
	byTap string
	// below is whose matter it is when the process has no policy, under each of the policies, if that does not follow from want; see
	// kernelAlone.
	below string
	// brief ones belong to the short form.
	brief bool
}

// under returns what is wanted under the policy with this number.
func (a *try) under(policy int) (answer, reason string) {
	all := strings.Fields(a.want)
	answer, reason, _ = strings.Cut(all[min(policy, len(all)-1)], "/")
	return answer, reason
}

// overTap is what a network with a TAP makes of it. That knows no names: its resolver answers every question or is not to be reached.
func (a try) overTap() try {
	if a.byTap != "" {
		a.want = a.byTap
	}
	all := strings.Fields(a.want)
	for i, want := range all {
		if strings.HasPrefix(want, "REFUSED/") {
			all[i] = "refused/special_address"
		}
	}
	if want := strings.Join(all, " "); want != a.want {
		a.want, a.record = want, a.record+",udp 10.0.2.3:53,tcp 10.0.2.3:53"
	}
	return a
}

// How attempts by address end: nowhere allowed, allowed where everything is, allowed by entries for addresses.
const (
	never      = "refused/no_network refused/special_address"
	denied     = "refused/no_network refused/not_allowed refused/denied ok"
	publicly   = "refused/no_network refused/not_allowed refused/not_allowed ok"
	byAddress  = "refused/no_network refused/not_allowed ok"
	byName     = "REFUSED/no_network ok REFUSED/not_allowed ok"
	foreign    = "REFUSED/no_network REFUSED/not_allowed REFUSED/not_allowed ok"
	nameRebind = "REFUSED/no_network refused/special_address REFUSED/not_allowed refused/special_address"
	nameLie    = "REFUSED/no_network reset/wrong_name REFUSED/not_allowed ok"
)

// belowNames are whose matter, with the kernel alone, attempts are that end so and go to ports of names: see kernelAlone.
var belowNames = map[string]string{
	denied: "kernel name kernel passes", publicly: "kernel name kernel passes", byAddress: "kernel name passes", foreign: "kernel name kernel passes",
	rst: "kernel name kernel passes",
}

func get(host string) []byte { return []byte("GET / HTTP/1.1\r\nHost: " + host + "\r\n\r\n") }

// attempts is the table.
func attempts() []try {
	var all []try
	for _, rows := range [][]try{byAddresses(), toResolvers(), byNames(), asFrames()} {
		all = append(all, rows...)
	}
	return all
}

// byAddresses are connections, datagrams and echo requests to addresses.
func byAddresses() []try {
	connect := func(name, to, want string) try {
		return try{name: name, Attempt: attempt.Attempt{Kind: attempt.TCP, To: to, Send: get("20.1.1.1")}, want: want, below: belowNames[want]}
	}
	send := func(name, to, want string) try {
		return try{name: name, Attempt: attempt.Attempt{Kind: attempt.UDP, To: to}, want: want}
	}
	brief := func(a try) try { a.brief = true; return a }
	return []try{
		brief(connect("an address that is allowed", "20.1.1.1:80", byAddress)),
		connect("a low half of everything", "20.3.1.1:80", byAddress),
		connect("a high half of everything, another port", "193.0.0.1:80", publicly),
		connect("a denied address", "20.2.1.1:80", denied),
		connect("an address of IPv6 that is allowed", "[2620:1::1]:80", byAddress),
		connect("an address of IPv6", "[2621::1]:80", publicly),
		connect("a denied address of IPv6", "[2620:2::1]:80", denied),
		brief(connect("metadata", "169.254.169.254:80", never)),
		connect("metadata of IPv6", "[fd00:ec2::254]:80", never),
		connect("other metadata", "100.100.100.200:80", never),
		connect("metadata, mapped", "[::ffff:169.254.169.254]:80", never),
		connect("metadata, translated", "[64:ff9b::a9fe:a9fe]:80", never),
		connect("metadata, translated at home", "[64:ff9b:1::a9fe:a9fe]:80", never),
		connect("metadata, 6to4", "[2002:a9fe:a9fe::1]:80", never),
		connect("metadata, compatible", "[::a9fe:a9fe]:80", never),
		connect("loopback, translated", "[64:ff9b::7f00:1]:22", never),
		connect("something public, translated", "[64:ff9b::1404:101]:80", publicly),
		connect("a tunnel of Teredo", "[2001:0:1404:101::1]:80", never),
		connect("a private network", "10.1.2.3:80", never),
		connect("another private network", "172.16.1.1:80", never),
		connect("a home network", "192.168.1.1:80", never),
		connect("a private network of IPv6", "[fd12::1]:80", never),
		connect("carrier's addresses", "100.64.0.1:80", never),
		connect("addresses for documents", "192.0.2.1:80", never),
		connect("addresses for measurements", "198.18.0.1:80", never),
		connect("addresses of class E", "240.0.0.1:80", never),
		connect("a site's addresses", "[fec0::1]:80", never),
		connect("addresses for documents of IPv6", "[2001:db8::1]:80", never),
		connect("the discard prefix", "[100::1]:80", never),
		brief(connect("a service of the host", hostAddress+":2222", never)),
		connect("a service of the host, IPv6", "["+hostAddress6+"]:2222", never),
		brief(connect("a service of the host, translated", "[64:ff9b::5db8:d801]:2222", never)),
		connect("a service of the host, 6to4", "[2002:5db8:d801::1]:2222", never),
		connect("a service of the host, ISATAP", "[2621::5efe:5db8:d801]:2222", never),
		send("all hosts of the host's network", "93.184.216.255:5000", never),
		connect("the gateway", "10.0.2.2:80", "refused/special_address"),
		connect("the gateway's shell", "10.0.2.2:22", "refused/special_address"),
		connect("the gateway, IPv6", "[fd66:6b76:6d00::2]:80", "refused/special_address"),
		connect("the resolver's other ports", "10.0.2.3:80", "refused/special_address"),
		connect("a neighbour by address", "10.0.2.16:7", "unreachable"),
		connect("a neighbour by address, IPv6", "[fd66:6b76:6d00::10]:7", "unreachable"),
		connect("a port that is none", "20.1.1.1:0", "refused/no_network refused/not_allowed refused"),
		send("a datagram that is allowed", "20.1.1.1:7", byAddress),
		send("a datagram of IPv6 that is allowed", "[2620:1::1]:7", byAddress),
		brief(send("QUIC", "20.6.0.1:443", "refused/no_network refused/not_allowed ok")),
		send("QUIC of IPv6", "[2621::1]:443", publicly),
		send("metadata by UDP", "169.254.169.254:5000", never),
		send("the host by UDP", hostAddress+":5000", never),
		send("the gateway by UDP", "10.0.2.2:5000", "refused/special_address"),
		send("multicast", "239.1.1.1:5000", "silent/no_station"),
		send("multicast of IPv6", "[ff0e::1]:5000", "silent/no_station"),
		{
			name: "HTTPS to an address", want: byAddress, below: belowNames[byAddress],
			Attempt: attempt.Attempt{Kind: attempt.TLS, To: "20.1.1.2:443", Name: "anything.example"},
		},
	}
}

// toResolvers are questions, to the guest's own resolver and to others.
func toResolvers() []try {
	ask := func(name, about string, kind uint16, want string) try {
		return try{
			name: name, Attempt: attempt.Attempt{Kind: attempt.DNS, Name: about, Type: kind}, want: want,
			record: "dns " + strings.ToLower(about), seen: "dns " + worldAddress + " " + about, below: belowNames[want],
		}
	}
	// Answers to questions elsewhere come from there.
	elsewhere := func(name string, kind attempt.Kind, to, want, record, seen string) try {
		return try{
			name: name, Attempt: attempt.Attempt{Kind: kind, To: to, Name: "leak.evil.example", Type: recordA}, want: want, record: record, seen: seen,
		}
	}
	const resolvers = "refused/no_network refused/not_allowed refused/another_resolver ok"
	long := strings.Repeat("a", 63)
	full := ask("a name full of data", long+"."+long+"."+long+".evil.example", recordA, foreign)
	full.record = "dns"
	foreignName := ask("a foreign name", "secret.evil.example", recordA, foreign)
	foreignName.brief = true
	stream := ask("a foreign name by TCP", "tcp.evil.example", recordA, foreign)
	stream.Kind, stream.seen = attempt.DNSTCP, "tcp "+worldAddress+":53"
	keys := ask("an allowed name's keys", "good.example", recordHTTPS, "REFUSED/no_network empty REFUSED/not_allowed ok")
	keys.below = belowNames[foreign] // that there is no answer is for the sake of names
	encrypted := elsewhere("a resolver with HTTPS", attempt.TLS, "[2606:4700::1111]:443", publicly, "tcp [2606:4700::1111]:443", "tcp [2606:4700::1111]:443")
	encrypted.below = belowNames[publicly]
	transfer := ask("a whole zone", "zone.good.test", recordAXFR, "REFUSED/protocol")
	transfer.byTap = foreign
	return []try{
		ask("an allowed name", "good.example", recordA, byName),
		ask("an allowed name's text", "good.example", recordTXT, byName),
		keys,
		foreignName,
		ask("a foreign name's text", "text.evil.example", recordTXT, foreign),
		ask("a foreign name's nothing", "null.evil.example", recordNULL, foreign),
		ask("everything of a foreign name", "all.evil.example", 255, foreign),
		full,
		ask("a name that only ends like an allowed one", "notgood.example", recordA, foreign),
		ask("a name below one that is allowed by itself", "sub.good.example", recordA, foreign),
		stream, transfer,
		elsewhere("another resolver", attempt.DNS, "8.8.8.8:53", resolvers, "udp 8.8.8.8:53", "dns 8.8.8.8 leak.evil.example"),
		elsewhere("another resolver by TCP", attempt.DNSTCP, "8.8.8.8:53", resolvers, "tcp 8.8.8.8:53", "tcp 8.8.8.8:53"),
		elsewhere("another resolver of IPv6", attempt.DNS, "[2001:4860::8888]:53", publicly, "udp [2001:4860::8888]:53", "dns 2001:4860::8888 leak.evil.example"),
		elsewhere("a resolver with TLS", attempt.DNSTCP, "8.8.8.8:853", strings.Replace(resolvers, "ok", "silent", 1), "tcp 8.8.8.8:853", "tcp 8.8.8.8:853"),
		encrypted,
		{
			name:    "a resolver that is allowed",
			Attempt: attempt.Attempt{Kind: attempt.DNS, To: "198.51.100.7:53", Name: "through.example", Type: recordA},
			want:    "refused/no_network ok refused/special_address", record: "udp 198.51.100.7:53", seen: "dns 198.51.100.7 through.example",
		},
	}
}

// byNames are connections to names.
func byNames() []try {
	to := func(name, host, port, says, want string) try {
		return try{
			name: name, Attempt: attempt.Attempt{Kind: attempt.TCP, To: host + ":" + port, Send: []byte(says)}, want: want,
			record: "dns " + host + ",tcp " + worldAddress + ":" + port, seen: "tcp " + worldAddress + ":" + port + ",dns " + worldAddress + " " + host,
			below: belowNames[want],
		}
	}
	web := func(name, host, want string) try { return to(name, host, "80", string(get(host)), want) }
	secure := func(name, server, want string) try {
		a := to(name, "good.example", "443", "", want)
		a.Kind, a.Name = attempt.TLS, server
		return a
	}
	rebind := func(name, host, address string) try {
		a := web(name, host, nameRebind)
		a.record = "dns " + host + ",tcp " + address + ":80"
		return a
	}
	again := rebind("a name that changes its address between two questions", "flips.good.test", "169.254.169.254")
	again.Again = true
	wanders := web("a name that wanders", "wanders.good.test", byName)
	wanders.Again, wanders.seen = true, "tcp 20.5.0.2:80"
	redirect := func(name, target, want, record, seen string) try {
		a := to(name, "good.example", "80", "GET /to/"+target+" HTTP/1.1\r\nHost: good.example\r\n\r\n", want)
		a.Kind, a.record = attempt.Follow, a.record+","+record
		a.seen += "," + seen
		if want != nameRebind {
			a.below = belowNames[foreign]
		}
		return a
	}
	good := web("an allowed name", "good.example", byName)
	lie := secure("a TLS client that wants another server", "evil.example", nameLie)
	rebound := rebind("a name bound to the metadata", "rebound.good.test", "169.254.169.254")
	good.brief, lie.brief, rebound.brief = true, true, true
	return []try{
		good, lie, rebound, again, wanders,
		rebind("a name bound to a private network", "private.good.test", "10.1.2.3"),
		rebind("a name bound to the host", "ourhost.good.test", hostAddress),
		web("an alias of a foreign name", "alias.good.test", byName),
		rebind("an alias of the metadata", "aliasmeta.good.test", "169.254.169.254"),
		web("a foreign name", "evil.example", foreign),
		to("another port of an allowed name", "good.example", "22", "SSH-2.0-x\r\n", "REFUSED/no_network refused/not_allowed REFUSED/not_allowed silent"),
		secure("a TLS client of an allowed server", "good.example", byName),
		secure("a TLS client that names nobody", "", nameLie),
		to("a request for another host", "good.example", "80", string(get("evil.example")), nameLie),
		to("a request for no host", "good.example", "80", "GET / HTTP/1.0\r\n\r\n", nameLie),
		to("a request for two hosts", "good.example", "80", "GET / HTTP/1.1\r\nHost: good.example\r\nHost: evil.example\r\n\r\n", nameLie),
		to("a request for another host in its target", "good.example", "80", "GET http://evil.example/ HTTP/1.1\r\nHost: good.example\r\n\r\n", nameLie),
		to("a request for a tunnel", "good.example", "80", "CONNECT evil.example:443 HTTP/1.1\r\nHost: good.example\r\n\r\n", nameLie),
		redirect("a redirect to a foreign address", "http://20.7.0.1/", "REFUSED/no_network refused/not_allowed REFUSED/not_allowed ok", "tcp 20.7.0.1:80", "tcp 20.7.0.1:80"),
		redirect("a redirect to a foreign name", "http://redirect.evil.example/", foreign, "dns redirect.evil.example", "dns "+worldAddress+" redirect.evil.example"),
		redirect("a redirect to the metadata", "http://169.254.169.254/", nameRebind, "tcp 169.254.169.254:80", ""),
	}
}
