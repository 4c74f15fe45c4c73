package linux

import (
	"os"
	"testing"

	"github.com/forkvm/forkvm/internal/testkit"
)

// The process itself, which is its first thread, stays in its network whatever its goroutines do in others.
func TestNetworkOfProcess(t *testing.T) {
	testkit.RequireRoot(t)
	own := func(path string) string {
		t.Helper()
		name, err := os.Readlink(path)
		if err != nil {
			t.Fatal(err)
		}
		return name
	}
	before := own("/proc/self/ns/net")
	if space, err := NewNetwork(func() error { return nil }); err != nil {
		testkit.Require(t, "tap", "needs network namespaces: "+err.Error())
	} else {
		space.Close()
	}
	for range 100 {
		var within, again string
		space, err := NewNetwork(func() error { within = own("/proc/thread-self/ns/net"); return nil })
		if err != nil {
			t.Fatal(err)
		}
		if err := InNetwork(space, func() error { again = own("/proc/thread-self/ns/net"); return nil }); err != nil {
			t.Error(err)
		}
		space.Close()
		if within == before || again != within {
			t.Fatalf("a network beside %s is %s, and %s", before, within, again)
		}
		if now := own("/proc/self/ns/net"); now != before {
			t.Fatalf("the process was in %s and is in %s", before, now)
		}
	}
}
