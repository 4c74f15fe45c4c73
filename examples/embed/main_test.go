package main

import (
	"bytes"
	"context"
	"path/filepath"
	"regexp"
	"sync"
	"testing"
	"time"

	"github.com/forkvm/forkvm/internal/testkit"
)

// want is what the example prints: the booted guest, the clone with its own
// name and the state of the snapshot, two children of the clone, and the first
// machine, which none of them has changed.
var want = regexp.MustCompile(`^Linux 6\.\S+
clone
booted
left
cloned
right
cloned
booted
$`)

// TestEmbedExample runs the example twice at once in this process, which holds
// nothing of it afterwards.
func TestEmbedExample(t *testing.T) {
	testkit.RequireKVM(t)
	image := filepath.Join(testkit.RequireGuest(t), "disk")
	testkit.NoLeaks(t)
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	var both sync.WaitGroup
	for range 2 {
		store := t.TempDir()
		both.Go(func() {
			var out bytes.Buffer
			if err := run(ctx, image, store, &out); err != nil {
				t.Errorf("%v, after it printed:\n%s", err, out.String())
			}
			if !want.Match(out.Bytes()) {
				t.Errorf("printed\n%s\nwant\n%s", out.String(), want)
			}
		})
	}
	both.Wait()
}
