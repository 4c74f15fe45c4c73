package machine

import (
	"context"
	"os"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/forkvm/forkvm/internal/testkit"
	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/snapshot/store"
	"github.com/forkvm/forkvm/vmm/memory"
)

// The first clone of a snapshot records what it wrote until it was ready. Clones
// find these pages ready, children those of them that they do not get as copies,
// and nothing that a file says can keep them from starting.
func TestWorkingSet(t *testing.T) {
	testkit.RequireKVM(t)
	ctx, cancel := context.WithTimeout(t.Context(), resetPatience)
	defer cancel()
	st, name := storedGuest(t, ctx)
	first := restoreStored(t, ctx, st, name, nil)
	first.recording.Wait()
	if first.workingSet == nil {
		t.Fatal("the first clone has no working set to record")
	}
	set, err := first.workingSet.Read()
	if err != nil {
		t.Fatal(err)
	}
	pages := countRanges(set.Written)
	t.Logf("%d pages in %d ranges", pages, len(set.Written))
	if pages < 50 || pages > 1000 {
		t.Errorf("%d pages are not what a guest writes until it is ready", pages)
	}
	run(t, ctx, first, "true")

	second := restoreStored(t, ctx, st, name, func(m *Machine) {
		if own := ownPages(t, m); !covers(own, set.Written) {
			t.Errorf("before it runs a clone has %d pages of its own, and not those of the working set", countRanges(own))
		}
	})
	run(t, ctx, second, "true")
	checkpoint := take(t, second)
	// Of what its parent has written a child has most as copies, which do not count
	// as written by the child.
	id := NewIdentity("child", TimeHost)
	child := clone(t, checkpoint, id)
	if own := ownPages(t, child); countRanges(own) == 0 || countRanges(own) > pages {
		t.Errorf("a child has %d pages of its own, of a working set of %d", countRanges(own), pages)
	}
	bring(t, ctx, child, id)
	run(t, ctx, child, "true")

	clonesInHugePages(t, ctx, st, name, set)
	clonesThatJudge(t, ctx, st, name, pages)

	for what, set := range map[string]snapshot.WorkingSet{
		"of another size of RAM": {RAM: 1 << 30, Written: []snapshot.PageRange{{Start: 1 << 29, Count: 9}}},
		"of pages never written": {RAM: second.pages(), Written: []snapshot.PageRange{{Start: second.pages() - 2048, Count: 2048}}},
		"of nothing":             {RAM: second.pages()},
		"of huge pages nowhere":  {RAM: second.pages(), Read: []uint64{second.pages() - 512}},
	} {
		hostile := restoreWith(t, ctx, st, name, set)
		if out := run(t, ctx, hostile, "hostname"); out != "clone" {
			t.Errorf("working set %s: the clone is %q", what, out)
		}
	}
}

// clonesThatJudge notes what a clone has used in the end, and has another find it ready.
func clonesThatJudge(t *testing.T, ctx context.Context, st *store.Store, name string, untilReady uint64) {
	t.Helper()
	var judging *store.WorkingSet
	restore := func(look func(*Machine)) *Machine {
		checkpoint, manifest, err := FromStore(ctx, st, name, false)
		if err != nil {
			t.Fatal(err)
		}
		checkpoint.WorkingSet = st.JudgingSet(manifest, true)
		judging = checkpoint.WorkingSet
		return startClone(t, ctx, checkpoint, look)
	}
	first := restore(nil)
	if _, err := judging.Read(); err == nil {
		t.Error("a working set of all that a clone does was recorded when it was ready")
	}
	run(t, ctx, first, "head -c 24M /dev/zero | tail -c 20M | wc -c")
	first.NoteUse()
	set, err := judging.Read()
	if err != nil {
		t.Fatal(err)
	}
	pages := countRanges(set.Written)
	t.Logf("%d pages in the end, in %d ranges", pages, len(set.Written))
	if pages <= untilReady/2 || pages == snapshot.MaxWorkingSetPages {
		t.Errorf("%d pages are not those of the snapshot that a guest uses for a command, of %d until it is ready", pages, untilReady)
	}
	run(t, ctx, restore(func(m *Machine) {
		if own := ownPages(t, m); !covers(own, set.Written) {
			t.Error("a clone that judges does not have the pages that those before it used")
		}
	}), "true")

	// One that rehearses has them behind it, whatever of it begins.
	checkpoint, manifest, err := FromStore(ctx, st, name, false)
	if err != nil {
		t.Fatal(err)
	}
	checkpoint.UseJudgingSet(st, manifest, false)
	m := rehearsed(t, ctx, checkpoint)
	if own := ownPages(t, m); !covers(own, set.Written) {
		t.Error("a clone that has rehearsed does not have the pages that those use in which is judged")
	}
	role := Role{Target: Target{Identity: NewIdentity("clone", TimeHost)}, WorkingSet: st.JudgingSet(manifest, false)}
	if err := m.Perform(ctx, role); err != nil {
		t.Fatal(err)
	}
	run(t, ctx, m, "true")
}

// storedGuest is a store with a snapshot of a guest that has run a command.
func storedGuest(t *testing.T, ctx context.Context) (*store.Store, string) {
	t.Helper()
	st, err := store.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.Close() })
	m := bootDisk(t, ctx, judgeMemory)
	run(t, ctx, m, "true")
	time.Sleep(3 * time.Second) // counted: until what its boot has left to do is done
	if _, err := take(t, m).Store(ctx, st, Label{Name: "base"}); err != nil {
		t.Fatal(err)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	return st, "base"
}

// restoreStored makes a clone as the packages above do. Before it runs, look may
// look at it.
func restoreStored(t *testing.T, ctx context.Context, st *store.Store, name string, look func(*Machine)) *Machine {
	t.Helper()
	checkpoint, manifest, err := FromStore(ctx, st, name, false)
	if err != nil {
		t.Fatal(err)
	}
	checkpoint.WorkingSet = st.WorkingSet(manifest)
	return startClone(t, ctx, checkpoint, look)
}

func startClone(t *testing.T, ctx context.Context, checkpoint *Checkpoint, look func(*Machine)) *Machine {
	t.Helper()
	var config Config
	checkpoint.Configure(&config)
	id := NewIdentity("clone", TimeHost)
	m := build(t, config, id)
	if look != nil {
		look(m)
	}
	bring(t, ctx, m, id)
	return m
}

// restoreWith makes a clone with another working set than the snapshot's.
func restoreWith(t *testing.T, ctx context.Context, st *store.Store, name string, set snapshot.WorkingSet) *Machine {
	t.Helper()
	checkpoint, manifest, err := FromStore(ctx, st, name, false)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	checkpoint.WorkingSet = &store.WorkingSet{File: f, Snapshot: manifest.ID}
	if err := checkpoint.WorkingSet.Record(set); err != nil {
		t.Fatal(err)
	}
	return startClone(t, ctx, checkpoint, nil)
}

func ownPages(t *testing.T, m *Machine) []snapshot.PageRange {
	t.Helper()
	own, err := m.memory.Own()
	if err != nil {
		t.Fatal(err)
	}
	ranges := make([]snapshot.PageRange, len(own))
	for i, r := range own {
		ranges[i] = snapshot.PageRange(r)
	}
	return ranges
}

// covers reports whether each of ranges lies in one of all.
func covers(all, ranges []snapshot.PageRange) bool {
	return !slices.ContainsFunc(ranges, func(r snapshot.PageRange) bool {
		return !slices.ContainsFunc(all, func(a snapshot.PageRange) bool {
			return a.Start <= r.Start && r.Start+r.Count <= a.Start+a.Count
		})
	})
}

func countRanges(ranges []snapshot.PageRange) (pages uint64) {
	for _, r := range ranges {
		pages += r.Count
	}
	return pages
}

func TestJoined(t *testing.T) {
	for _, c := range []struct{ have, want []memory.PageRange }{
		{nil, nil},
		{[]memory.PageRange{{Start: 9, Count: 2}, {Start: 1, Count: 3}, {Start: 4, Count: 1}, {Start: 2, Count: 1}},
			[]memory.PageRange{{Start: 1, Count: 4}, {Start: 9, Count: 2}}},
		{[]memory.PageRange{{Start: 1, Count: 9}, {Start: 3, Count: 2}, {Start: 8, Count: 4}}, []memory.PageRange{{Start: 1, Count: 11}}},
	} {
		if got := joined(c.have); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%v joined: %v", c.have, got)
		}
	}
}

func TestFirstPages(t *testing.T) {
	const most = snapshot.MaxWorkingSetPages
	for _, c := range []struct {
		have []memory.PageRange
		want []snapshot.PageRange
	}{
		{nil, nil},
		{[]memory.PageRange{{Start: 5, Count: most}}, []snapshot.PageRange{{Start: 5, Count: most}}},
		{[]memory.PageRange{{Start: 5, Count: 6}, {Start: 20, Count: most}, {Start: 9000, Count: 1}},
			[]snapshot.PageRange{{Start: 5, Count: 6}, {Start: 20, Count: most - 6}}},
	} {
		if got := firstPages(c.have); !reflect.DeepEqual(got, c.want) {
			t.Errorf("first of %v: %v", c.have, got)
		}
	}
}

// TestWorkingSetCosts prints what mapping ahead costs and spares: until a clone is
// ready, with nothing done ahead, and with the pages that it will write populated.
func TestWorkingSetCosts(t *testing.T) {
	testkit.RequireKVM(t)
	testkit.RequireCounted(t)
	ctx, cancel := context.WithTimeout(t.Context(), resetPatience)
	defer cancel()
	st, name := storedGuest(t, ctx)
	first := restoreStored(t, ctx, st, name, nil)
	first.recording.Wait()
	set, err := first.workingSet.Read()
	if err != nil {
		t.Fatal(err)
	}
	written := make([]memory.PageRange, len(set.Written))
	for i, r := range set.Written {
		written[i] = memory.PageRange(r)
	}
	for _, c := range []struct {
		name  string
		ahead func(*Machine) error
	}{
		{"nothing", func(*Machine) error { return nil }},
		{"populate", func(m *Machine) error { return m.memory.Populate(written) }},
	} {
		const rounds = 5
		var ahead, bring time.Duration
		for range rounds {
			a, b := timeClone(t, ctx, st, name, c.ahead)
			ahead, bring = ahead+a/rounds, bring+b/rounds
		}
		t.Logf("%-20s %8v ahead for %d pages, then %8v until ready", c.name, ahead, countRanges(set.Written), bring)
	}
}

// timeClone makes a clone without working set, for which do is done ahead.
func timeClone(t *testing.T, ctx context.Context, st *store.Store, name string, do func(*Machine) error) (ahead, untilReady time.Duration) {
	t.Helper()
	checkpoint, _, err := FromStore(ctx, st, name, false)
	if err != nil {
		t.Fatal(err)
	}
	var built time.Time
	m := startClone(t, ctx, checkpoint, func(m *Machine) {
		begun := time.Now()
		if err := do(m); err != nil {
			t.Error(err)
		}
		built = time.Now()
		ahead = built.Sub(begun)
	})
	untilReady = time.Since(built)
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	return ahead, untilReady
}
