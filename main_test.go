package forkvm_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/forkvm/forkvm"
	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/guest/image"
	"github.com/forkvm/forkvm/internal/testkit"
	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/snapshot/layer"
	"github.com/forkvm/forkvm/snapshot/store"
	"github.com/forkvm/forkvm/vmm"
)

// Times in these tests are limits for an emulated machine whose host may be
// busy: what takes a second on hardware may take a minute there. They catch
// what never happens, not what is slow.
const (
	patience = 5 * time.Minute
	// guestMemory is what the test guests have.
	guestMemory = 192 << 20
	// loadPort is where guestload echoes.
	loadPort = 7000
)

// scratch is the directory for what lives as long as the test binary.
var scratch string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	var err error
	if scratch, err = os.MkdirTemp("", "forkvm-test-"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(scratch)
	return m.Run()
}

// begin is the first call of every test that runs guests. It returns a context
// for the test and checks at the end that nothing is left.
func begin(t *testing.T) context.Context {
	t.Helper()
	testkit.RequireKVM(t)
	testkit.RequireGuest(t)
	openParents(t) // it stays open
	testkit.NoLeaks(t)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

func openImage(t *testing.T, name string) *image.Image {
	t.Helper()
	img, err := image.Open(filepath.Join(testkit.RequireGuest(t), name))
	if err != nil {
		t.Fatal(err)
	}
	return img
}

// parents are snapshots that tests start from, each made when it is first
// needed: a guest with a disk, just booted, with guestload installed. Tests do
// not change them.
var parents struct {
	sync.Mutex
	store  *store.Store
	made   map[string]error
	booted map[string]time.Duration // how long a cold boot took
}

func openParents(t *testing.T) {
	t.Helper()
	parents.Lock()
	defer parents.Unlock()
	if parents.store != nil {
		return
	}
	st, err := store.Open(filepath.Join(scratch, "store"))
	if err != nil {
		t.Fatal(err)
	}
	parents.store, parents.made, parents.booted = st, map[string]error{}, map[string]time.Duration{}
}

// parent returns the store and the name of the snapshot of a guest with so many
// vCPUs.
func parent(t *testing.T, ctx context.Context, cpus int) (*store.Store, string) {
	t.Helper()
	parents.Lock()
	defer parents.Unlock()
	name := fmt.Sprintf("parent-%d", cpus)
	err, made := parents.made[name]
	if !made {
		err = makeParent(t, ctx, name, cpus)
		parents.made[name] = err
	}
	if err != nil {
		t.Fatalf("make %s: %v", name, err)
	}
	return parents.store, name
}

func makeParent(t *testing.T, ctx context.Context, name string, cpus int) (err error) {
	begun := time.Now()
	vm, err := forkvm.Boot(ctx, openImage(t, "disk"), config(t, forkvm.Config{Name: name, CPUs: cpus}))
	if err != nil {
		return err
	}
	defer vm.Close()
	booted := time.Since(begun)
	parents.booted[name] = booted
	putProgram(t, ctx, vm)
	if _, err := vm.Snapshot(ctx, parents.store, name); err != nil {
		return err
	}
	t.Logf("made %s: booted after %v, snapshot after %v", name, booted.Round(time.Millisecond), time.Since(begun).Round(time.Millisecond))
	return nil
}

// putProgram installs guestload.
func putProgram(t *testing.T, ctx context.Context, vm running) {
	t.Helper()
	program, err := os.Open(filepath.Join(testkit.RequireGuest(t), "guestload"))
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()
	if _, err := vm.Agent().Put(ctx, client.File{Path: "/usr/bin/guestload", Mode: 0o755}, program); err != nil {
		t.Fatal(err)
	}
}

// config fills in what all test machines have.
func config(t *testing.T, c forkvm.Config) forkvm.Config {
	if c.MemoryBytes == 0 {
		c.MemoryBytes = guestMemory
	}
	if c.TempDir == "" {
		c.TempDir = scratch
	}
	if c.Console == nil {
		c.Console = newConsole(t, c.Name)
	}
	return c
}

// console keeps the last of what a guest writes, and shows it when its test has
// failed.
type console struct {
	mu   sync.Mutex
	data []byte
}

func newConsole(t *testing.T, name string) *console {
	c := &console{}
	t.Cleanup(func() {
		if s := c.String(); t.Failed() && s != "" {
			t.Logf("console of %q:\n%s", name, s)
		}
	})
	return c
}

func (c *console) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.data = append(c.data, p...)
	c.data = c.data[max(0, len(c.data)-8<<10):]
	return len(p), nil
}

func (c *console) String() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return string(c.data)
}

// restore makes a machine that lives until the end of the test.
func restore(t *testing.T, ctx context.Context, st *store.Store, name string, c forkvm.Config) *forkvm.VM {
	t.Helper()
	begun := time.Now()
	vm, err := forkvm.Restore(ctx, st, name, config(t, c))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("restored %s as %s in %v", name, c.Name, time.Since(begun).Round(time.Millisecond))
	closeAtEnd(t, vm)
	return vm
}

func closeAtEnd(t *testing.T, vm *forkvm.VM) {
	t.Cleanup(func() {
		if err := vm.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
}

// fork makes children that live until the end of the test.
func fork(t *testing.T, ctx context.Context, vm *forkvm.VM, configs ...forkvm.Config) []*forkvm.VM {
	t.Helper()
	for i := range configs {
		configs[i] = config(t, configs[i])
	}
	begun := time.Now()
	children, err := vm.Fork(ctx, configs...)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("forked %d times in %v", len(configs), time.Since(begun).Round(time.Millisecond))
	for _, child := range children {
		closeAtEnd(t, child)
	}
	return children
}

func takeSnapshot(t *testing.T, ctx context.Context, vm *forkvm.VM, st *store.Store, name string) *snapshot.Manifest {
	t.Helper()
	m, err := vm.Snapshot(ctx, st, name)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// openStore returns a store for the snapshots of one test.
func openStore(t *testing.T) *store.Store {
	t.Helper()
	st, err := store.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := st.Close(); err != nil {
			t.Errorf("close store: %v", err)
		}
	})
	return st
}

// running is a machine, with or without the embedding API around it.
type running interface {
	Agent() *client.Client
	Exit() *vmm.Exit
}

// attempt runs a shell script in a guest and returns its output.
func attempt(ctx context.Context, vm running, script string) (string, error) {
	var out, errs bytes.Buffer
	result, err := vm.Agent().Exec(ctx, client.Command{Args: []string{"/bin/sh", "-c", script}, Stdout: &out, Stderr: &errs})
	if err == nil && result.ExitCode != 0 {
		err = fmt.Errorf("exit code %d: %s", result.ExitCode, errs.String())
	}
	if err != nil {
		return out.String(), fmt.Errorf("in guest: %s: %w", script, err)
	}
	return strings.TrimRight(out.String(), "\n"), nil
}

// sh runs a shell script in a guest, which must succeed, and returns its output.
func sh(t *testing.T, ctx context.Context, vm running, script string) string {
	t.Helper()
	out, err := attempt(ctx, vm, script)
	if err != nil {
		if exit := vm.Exit(); exit != nil {
			t.Fatalf("%v\n%v\n%s", err, exit, exit.Registers)
		}
		t.Fatal(err)
	}
	return out
}

// startLoad starts guestload, which goes on in the background.
func startLoad(t *testing.T, ctx context.Context, vm *forkvm.VM) {
	t.Helper()
	sh(t, ctx, vm, "mkdir -p /var/tmp; setsid guestload -dir /var/tmp/guestload -memory 8 >/run/guestload.log 2>&1 & true")
	if err := loadGoesOn(ctx, vm); err != nil {
		t.Fatalf("guestload does not start: %v", err)
	}
}

// status is what guestload reports of itself.
type status struct {
	CPU, Memory, Disk, Vsock uint64
	Ticks                    []uint64
}

func loadStatus(ctx context.Context, vm *forkvm.VM) (s status, err error) {
	// The log is empty unless guestload has found something wrong and ended.
	out, err := attempt(ctx, vm, "cat /run/guestload.log; cat /run/guestload.json 2>/dev/null || echo '{}'")
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal([]byte(out), &s); err != nil {
		return s, fmt.Errorf("guestload: %s", out)
	}
	return s, nil
}

// beyond says whether everything has gone on since before.
func (s status) beyond(before status) bool {
	if s.CPU <= before.CPU || s.Memory <= before.Memory || s.Disk <= before.Disk || len(s.Ticks) == 0 {
		return false
	}
	for i := range s.Ticks {
		if i < len(before.Ticks) && s.Ticks[i] <= before.Ticks[i] {
			return false
		}
	}
	return true
}

// loadGoesOn waits until each worker of guestload, and the timer of each vCPU,
// has gone on, and none of them has failed.
func loadGoesOn(ctx context.Context, vm *forkvm.VM) error {
	first, err := loadStatus(ctx, vm)
	if err != nil {
		return err
	}
	deadline := time.Now().Add(time.Minute)
	for {
		next, err := loadStatus(ctx, vm)
		if err != nil {
			return err
		}
		if next.beyond(first) {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("guestload stands still: %+v, then %+v", first, next)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// echo sends so many bytes to the guest's echo port and reads them back.
func echo(ctx context.Context, vm *forkvm.VM, seed byte, size int) error {
	conn, err := vm.Dial(ctx, loadPort)
	if err != nil {
		return fmt.Errorf("dial guest: %w", err)
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	return exchange(conn, seed, size)
}

// wrongBytes says that a stream did not carry what was sent.
type wrongBytes struct{ at int }

func (e *wrongBytes) Error() string { return fmt.Sprintf("wrong byte at %d of the stream", e.at) }

// exchange sends bytes over a connection whose other end echoes.
func exchange(conn net.Conn, seed byte, size int) error {
	data := make([]byte, size)
	for i := range data {
		data[i] = byte(i>>8) ^ byte(i)*31 ^ seed
	}
	sent := make(chan error, 1)
	go func() {
		_, err := conn.Write(data)
		sent <- err
	}()
	got := make([]byte, size)
	n, err := io.ReadFull(conn, got)
	for i := range n {
		if got[i] != data[i] {
			conn.Close()
			<-sent
			return &wrongBytes{at: i}
		}
	}
	if err != nil {
		conn.Close()
		<-sent
		return fmt.Errorf("read after %d bytes: %w", n, err)
	}
	return <-sent
}

// exportDisk writes the root disk of a snapshot into a flat file.
func exportDisk(t *testing.T, st *store.Store, name string) string {
	t.Helper()
	s, err := st.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	disk, err := layer.NewDisk(layer.DiskConfig{Size: s.Manifest.Disks[0].Size, Layers: s.Disks[0].Layers, ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	s.Disks[0].Layers = nil // the disk's now
	defer disk.Close()
	path := filepath.Join(t.TempDir(), "disk")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := io.Copy(f, io.NewSectionReader(disk, 0, disk.Size())); err != nil {
		t.Fatal(err)
	}
	return path
}

// checkFilesystem replays the journal of a copied disk, as the next mount would,
// and has e2fsck find nothing wrong afterwards.
func checkFilesystem(t *testing.T, path string) {
	t.Helper()
	if out, err := exec.Command("e2fsck", "-y", "-E", "journal_only", path).CombinedOutput(); err != nil {
		// Exit status 1 says that the journal was replayed.
		if exit, ok := err.(*exec.ExitError); !ok || exit.ExitCode() != 1 {
			t.Fatalf("replay journal: %v\n%s", err, out)
		}
	}
	if out, err := exec.Command("e2fsck", "-fn", path).CombinedOutput(); err != nil {
		t.Fatalf("e2fsck -fn: %v\n%s", err, out)
	}
}
