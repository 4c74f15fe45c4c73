package policy

import "testing"

func TestParsePort(t *testing.T) {
	for text, want := range map[string]string{
		"8080:80":              "127.0.0.1:8080:80/tcp",
		"8080:80/tcp":          "127.0.0.1:8080:80/tcp",
		"5353:53/udp":          "127.0.0.1:5353:53/udp",
		"0.0.0.0:8080:80":      "0.0.0.0:8080:80/tcp",
		"[::1]:8080:80/udp":    "[::1]:8080:80/udp",
		"80":                   "",
		":80":                  "",
		"0:80":                 "",
		"80:0":                 "",
		"80:65536":             "",
		"example.org:80:80":    "",
		"[fe80::1%eth0]:80:80": "",
		"80:80/icmp":           "",
		"":                     "",
	} {
		p, err := ParsePort(text)
		if (err == nil) != (want != "") || err == nil && p.String() != want {
			t.Errorf("%q is %v: %v", text, p, err)
		}
		if again, err2 := ParsePort(p.String()); err == nil && (err2 != nil || again != p) {
			t.Errorf("%q is %v, and that is %v: %v", text, p, again, err2)
		}
	}
	one, other := Port{Guest: 1}, Port{Guest: 2}
	if CheckPorts([]Port{one, other}) == nil {
		t.Error("one port of the host is published twice")
	}
}
