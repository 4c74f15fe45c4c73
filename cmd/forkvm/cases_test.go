package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/forkvm/forkvm/snapshot"
)

// fingerprint covers what a guest has in memory and on its disk, read again from
// where it is kept.
const fingerprint = "echo 3 > /proc/sys/vm/drop_caches; cat /run/data /root/data | sha256sum"

// TestCaseE5 replaces and removes a snapshot under its clones, in the middle of a
// chain, and while clones are made from it.
func TestCaseE5(t *testing.T) {
	h := newHost(t, t.TempDir())
	h.boot("source")
	h.sh("source", "head -c 1000000 /dev/urandom > /run/data; head -c 1000000 /dev/urandom > /root/data; sync")
	want := h.sh("source", fingerprint)
	h.must("snapshot", "source", "s")
	clones := []string{"one", "two", "three"}
	h.must("restore", slowly, "s", "--name", "one", "--name", "two", "--name", "three")
	intact := func(when string) {
		t.Helper()
		for _, vm := range clones {
			if got := h.sh(vm, fingerprint); got != want {
				t.Errorf("%s: %s has %s, want %s", when, vm, got, want)
			}
		}
	}

	// (1) It cannot be made again in place, and one of the same name is another.
	h.sh("source", "head -c 1000000 /dev/zero > /run/data; sync")
	h.refused("snapshot_exists", "snapshot", "source", "s")
	h.must("snapshot", "rm", "s")
	h.must("snapshot", "source", "s")
	intact("made anew")

	// (2) Nothing in it can be written to.
	files, err := filepath.Glob(filepath.Join(h.data, "snapshots", "*", "*"))
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, f := range files {
		if st, err := os.Stat(f); err != nil || st.Mode().Perm() != 0o444 {
			t.Errorf("%s: %v, %v", f, st.Mode(), err)
		}
	}

	// (3) It goes; so do those that it stands on.
	h.must("snapshot", "rm", "s", "base")
	intact("removed")

	// (5) A clone of a clone of a clone, without what is in the middle.
	for i, vm := range []string{"one", "grandchild", "great"} {
		name := fmt.Sprintf("g%d", i)
		h.sh(vm, fmt.Sprintf("echo %s >> /root/line; echo %s >> /run/line; sync", name, name))
		h.must("snapshot", vm, name)
		if i < 2 {
			h.must("create", slowly, "--snapshot", name, "--name", []string{"grandchild", "great"}[i])
		}
	}
	h.must("snapshot", "rm", "g1")
	h.must("kill", "grandchild")
	h.must("create", slowly, "--snapshot", "g2", "--name", "last")
	if got := h.sh("last", "cat /root/line /run/line"); got != "g0\ng1\ng2\ng0\ng1\ng2" {
		t.Errorf("the end of the chain shows %q", got)
	}
	if got := h.sh("great", fingerprint); got != want {
		t.Errorf("the running end of the chain has %s, want %s", got, want)
	}
	h.must("snapshot", "check")

	// (4) It goes while clones are made from it.
	tries := 2
	if !testing.Short() {
		tries = 60
	}
	h.removeWhileRestoring("one", tries, want)

	// The space comes back with the last user.
	h.must("snapshot", "rm", "g0", "g2")
	h.must("rm", "-f", "source", "one", "two", "three", "grandchild", "great", "last")
	left, err := filepath.Glob(filepath.Join(h.data, "snapshots", "*"))
	if tmp, _ := filepath.Glob(filepath.Join(h.data, "tmp", "*")); err != nil || len(left)+len(tmp) > 0 {
		t.Errorf("left: %v, %v, %v", left, tmp, err)
	}
	if open := openBelow(t, h.data); len(open) > 0 {
		t.Errorf("still held: %v", open)
	}
}

// removeWhileRestoring takes a snapshot of a VM and removes it while a clone of it
// is made, again and again: each clone works, or there is none and an error says so.
func (h *host) removeWhileRestoring(vm string, tries int, want string) {
	h.t.Helper()
	worked := 0
	for i := range tries {
		name := fmt.Sprintf("try-%d", i)
		h.must("snapshot", vm, name)
		var made result
		var both sync.WaitGroup
		both.Go(func() { made = h.forkvm("create", slowly, "--snapshot", name, "--name", name) })
		time.Sleep(rand.N(30 * time.Millisecond))
		h.must("snapshot", "rm", name)
		both.Wait()
		if made.code != 0 {
			if !strings.Contains(made.stderr, "not found") {
				h.t.Errorf("try %d: %v", i, made)
			}
			continue
		}
		worked++
		if got := h.sh(name, fingerprint); got != want {
			h.t.Errorf("try %d: the clone has %s, want %s", i, got, want)
		}
		h.must("rm", "-f", name)
	}
	h.t.Logf("%d of %d clones were made before their snapshot went", worked, tries)
}

// openBelow lists files below a directory that processes hold, removed ones too.
func openBelow(t *testing.T, dir string) (open []string) {
	t.Helper()
	links, err := filepath.Glob("/proc/[0-9]*/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		if target, err := os.Readlink(link); err == nil && strings.HasPrefix(target, dir+"/") {
			open = append(open, link+" "+target)
		}
	}
	return open
}

// TestCaseG1 kills the command that takes a snapshot, and the VM that it is taken
// of, at random moments. What is listed is whole, what is not leaves nothing, and a
// VM that was not killed goes on.
func TestCaseG1(t *testing.T) {
	h := newHost(t, t.TempDir())
	h.boot("source")
	h.sh("source", "head -c 2000000 /dev/urandom > /run/data; head -c 2000000 /dev/urandom > /root/data; sync")
	begun := time.Now()
	h.must("snapshot", "source", "good")
	took := time.Since(begun)
	rounds := 2
	if !testing.Short() {
		rounds = 40
	}
	outcomes := map[string]int{}
	for i := range rounds {
		// Something new to write, so that there is something to interrupt.
		h.sh("source", "head -c 2000000 /dev/urandom > /run/data; head -c 2000000 /dev/urandom > /root/data; sync")
		want := h.sh("source", fingerprint)
		pid := h.inspect("source").PID
		name := fmt.Sprintf("new-%d", i)
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		cmd := h.command(ctx, "snapshot", "source", name)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(rand.N(took))
		victim, killed := "command", cmd.Process.Pid
		if i%4 == 1 {
			victim, killed = "vm", pid
		}
		if err := syscall.Kill(killed, syscall.SIGKILL); err != nil {
			t.Log(err) // it was faster
		}
		cmd.Wait()
		cancel()

		listed := contains(strings.Fields(h.must("snapshot", "ls", "-q")), name)
		outcomes[fmt.Sprintf("%s killed, listed %v", victim, listed)]++
		h.must("snapshot", "check")
		if left, _ := filepath.Glob(filepath.Join(h.data, "tmp", "*")); len(left) > 0 {
			t.Errorf("round %d: left: %v", i, left)
		}
		newest := "good"
		if listed {
			newest = name
		}
		h.must("create", slowly, "--snapshot", newest, "--name", "again")
		if got := h.sh("again", fingerprint); listed && got != want {
			t.Errorf("round %d: %s has %s, want %s", i, name, got, want)
		}
		if victim == "vm" {
			h.eventually("the VM is dead", func() bool { return h.inspect("source").State == "dead" })
			h.must("rm", "-f", "source", "again")
			h.must("create", slowly, "--snapshot", newest, "--name", "source")
		} else {
			if got := h.sh("source", fingerprint); got != want {
				t.Errorf("round %d: the source has %s, want %s", i, got, want)
			}
			h.must("rm", "-f", "again")
		}
		if listed {
			h.must("snapshot", "rm", name)
		}
	}
	t.Logf("a snapshot takes %v; %v", took.Round(time.Millisecond), outcomes)
}

// TestCaseE4 makes VMs of images that are not what they should be. Each is an error
// that names the file and the reason, and there is no VM. What can be done to
// files without a guest is done a hundred times over in packages snapshot,
// snapshot/layer and snapshot/store.
func TestCaseE4(t *testing.T) {
	h := newHost(t, t.TempDir())
	h.boot("source")
	h.sh("source", "head -c 1000000 /dev/urandom > /run/data; sync")
	h.must("snapshot", "source", "s")
	h.must("restore", slowly, "s", "--name", "a", "--name", "b", "--name", "c")
	h.must("rm", "-f", "source")
	dir := filepath.Join(h.data, "snapshots", "s")
	layer := newestLayer(t, dir, filepath.Join(h.data, "snapshots", "base"))
	other := filepath.Base(oneOf(t, filepath.Join(h.data, "snapshots", "base", "memory-*")))

	read := func(file string) []byte {
		b, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	n := len(read(layer))
	cutAt := func(n int) func([]byte) []byte { return func(b []byte) []byte { return b[:n] } }
	edit := func(from, to string) func([]byte) []byte {
		return func(b []byte) []byte { return sealed(bytes.Replace(b, []byte(from), []byte(to), 1)) }
	}
	section := func(from, to string) func([]byte) []byte {
		return func(b []byte) []byte { return editState(t, b, from, to) }
	}
	swapped := read(other)
	memory := fmt.Sprint(192 << 20)
	for _, c := range []struct {
		name, file string
		change     func([]byte) []byte
		code       string
	}{
		{"layer of no bytes", layer, cutAt(0), "snapshot_corrupt"},
		{"layer of 4095 bytes", layer, cutAt(4095), "snapshot_corrupt"},
		{"half a layer", layer, cutAt(n / 2), "snapshot_corrupt"},
		{"layer without its last page", layer, cutAt(n - 4096), "snapshot_corrupt"},
		{"layer grown by a page", layer, func(b []byte) []byte { return append(b, make([]byte, 4096)...) }, "snapshot_corrupt"},
		{"layer of an earlier version", layer, func(b []byte) []byte { b[8]--; return b }, "snapshot_unsupported"},
		{"layer of a later version", layer, func(b []byte) []byte { b[8]++; return b }, "snapshot_unsupported"},
		{"another layer in its place", layer, func([]byte) []byte { return swapped }, "snapshot_corrupt"},
		{"state of no bytes", "state", cutAt(0), "snapshot_corrupt"},
		{"state of a later version", "state", func(b []byte) []byte { b[8]++; return b }, "snapshot_unsupported"},
		{"twice the memory", "manifest.json", edit(`"memory_bytes": `+memory, `"memory_bytes": `+fmt.Sprint(384<<20)), "snapshot_corrupt"},
		{"queue of 65535", "state", section(`"size":256`, `"size":65535`), ""},
		{"ring far outside", "state", section(`"descriptors":`, `"descriptors":9`), ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := &host{t: t, data: h.data, run: h.run}
			undo := damageCopy(t, dir, c.file, c.change)
			defer undo()
			r := h.forkvm("create", "--snapshot", "s", "--name", "bad", "-o", "json")
			var e struct {
				Error struct{ Code, Message string }
			}
			if err := json.Unmarshal([]byte(r.stderr), &e); err != nil || r.code != 1 || e.Error.Message == "" {
				t.Fatalf("%v: %v", err, r)
			}
			if c.code != "" && (e.Error.Code != c.code || !strings.Contains(e.Error.Message, c.file)) {
				t.Errorf("want %s and the file's name: %v", c.code, r)
			}
			if r.took > promptly || strings.Contains(r.stderr, "panic") {
				t.Errorf("%v", r)
			}
			t.Log(e.Error.Message)
		})
	}
	if got := len(strings.Fields(h.must("ls", "-aq"))); got != 3 {
		t.Errorf("%d VMs are listed, want the three clones", got)
	}

	// Under running clones the file goes: they end, and say why.
	if err := os.Truncate(filepath.Join(dir, layer), 4096); err != nil {
		t.Fatal(err)
	}
	for _, vm := range []string{"a", "b", "c"} {
		h.forkvm("exec", "--timeout", "20s", vm, "--", "sh", "-c", "cat /run/data > /dev/null; echo 3 > /proc/sys/vm/drop_caches; find / -xdev > /dev/null")
		h.eventually("the VM has ended", func() bool { return h.inspect(vm).State == "ended" })
		if out := h.must("wait", vm, "-o", "json"); !strings.Contains(out, "host_error") || !strings.Contains(out, "backing store lost") {
			t.Errorf("%s ended with %s", vm, out)
		}
	}
}

func oneOf(t *testing.T, pattern string) string {
	t.Helper()
	found, err := filepath.Glob(pattern)
	if err != nil || len(found) == 0 {
		t.Fatalf("%s: %v, %v", pattern, found, err)
	}
	return found[0]
}

// damageCopy puts a changed copy of a file in its place, so that other links of it,
// and who has it open, see nothing. The function that it returns puts the file
// back.
func damageCopy(t *testing.T, dir, file string, change func([]byte) []byte) func() {
	t.Helper()
	path := filepath.Join(dir, file)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path, path+".whole"); err != nil {
		t.Fatal(err)
	}
	b = change(b)
	if err := os.WriteFile(path, b, 0o444); err != nil {
		t.Fatal(err)
	}
	undo := func() {
		if err := os.Rename(path+".whole", path); err != nil {
			t.Fatal(err)
		}
	}
	if file != "state" || len(b) == 0 {
		return undo
	}
	// The manifest must go with the state, or nothing behind it is reached.
	if _, err := snapshot.DecodeState(b); err != nil {
		return undo
	}
	sum := sha256.Sum256(b)
	manifest := damageCopy(t, dir, snapshot.ManifestFile, func(m []byte) []byte {
		decoded, err := snapshot.DecodeManifest(m)
		if err != nil {
			t.Fatal(err)
		}
		decoded.State.Bytes, decoded.State.SHA256 = int64(len(b)), fmt.Sprintf("%x", sum)
		encoded, err := decoded.Encode()
		if err != nil {
			t.Fatal(err)
		}
		return encoded
	})
	return func() { manifest(); undo() }
}

// sealed gives an edited manifest the checksum of its bytes.
func sealed(b []byte) []byte {
	const before, after = ",\n  \"checksum\": \"sha256:", "\"\n}\n"
	body, _, _ := bytes.Cut(b, []byte(before))
	return fmt.Appendf(nil, "%s%s%x%s", body, before, sha256.Sum256(body), after)
}

// editState replaces text in every section of a state that has it.
func editState(t *testing.T, b []byte, from, to string) []byte {
	t.Helper()
	st, err := snapshot.DecodeState(b)
	if err != nil {
		t.Fatal(err)
	}
	found := false
	for i := range st.Sections {
		data := bytes.Replace(st.Sections[i].Data, []byte(from), []byte(to), 1)
		found = found || !bytes.Equal(data, st.Sections[i].Data)
		st.Sections[i].Data = data
	}
	if !found {
		t.Fatalf("no section has %s", from)
	}
	b, err = st.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return b
}
