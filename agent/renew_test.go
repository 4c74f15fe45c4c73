package agent_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/forkvm/forkvm/agent"
	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/agent/proto"
)

const (
	generationA = "6ba7b810-9dad-41d1-80b4-00c04fd430c8"
	cardAddress = "02:00:00:00:00:07"
	generationB = "6ba7b811-9dad-41d1-80b4-00c04fd430c8"
)

// fakeIdentity records what a renewal did and fails where it is told to.
type fakeIdentity struct {
	calls []string
	fail  map[string]error
	clock time.Time
}

func (f *fakeIdentity) call(what, value string) error {
	f.calls = append(f.calls, what+"="+value)
	return f.fail[what]
}

func (f *fakeIdentity) AddEntropy(p []byte) error     { return f.call("entropy", string(p)) }
func (f *fakeIdentity) SetClock(t time.Time) error    { f.clock = t; return f.call("clock", "") }
func (f *fakeIdentity) SetHostname(name string) error { return f.call("hostname", name) }
func (f *fakeIdentity) SetMachineID(id string) error  { return f.call("machine-id", id) }
func (f *fakeIdentity) RenewBootID() (string, error)  { return "boot", f.call("boot-id", "") }
func (f *fakeIdentity) SetNetwork(n proto.Network) error {
	return f.call("network", n.MAC+" "+strings.Join(n.Addresses, ","))
}

func identity(generation string) client.Identity {
	return client.Identity{
		Generation: generation, Entropy: []byte("entropy"), WallClock: time.Now,
		Hostname: "clone-1", MachineID: strings.Repeat("0f", 16), BootID: true,
		Network: &proto.Network{MAC: cardAddress, Addresses: []string{"10.0.2.15/24"}},
	}
}

// Cases A1 to A3, the guest agent's part: everything is renewed, in an order in
// which what follows profits from what came before, and confirmed.
func TestA3Renew(t *testing.T) {
	id := &fakeIdentity{}
	state := filepath.Join(t.TempDir(), "state")
	g := start(t, agent.Config{Identity: id, StateDir: state})
	r, err := g.Renew(context.Background(), identity(generationA))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"entropy=entropy", "clock=", "hostname=clone-1", "machine-id=" + strings.Repeat("0f", 16), "boot-id=", "network=" + cardAddress + " 10.0.2.15/24"}
	if !slices.Equal(id.calls, want) {
		t.Errorf("renewed %q, want %q", id.calls, want)
	}
	if r.BootID != "boot" || time.Since(id.clock) > time.Minute || time.Since(r.Time) > time.Minute {
		t.Errorf("got %+v, clock %v", r, id.clock)
	}
	if b, _ := os.ReadFile(filepath.Join(state, "generation")); string(b) != generationA+"\n" {
		t.Errorf("generation file: %q", b)
	}
	info, err := g.Ping(context.Background())
	if err != nil || info.Generation != generationA {
		t.Errorf("ping: %+v, %v", info, err)
	}
	// Only the generation, as for a guest whose clock is frozen.
	id.calls = nil
	if _, err := g.Renew(context.Background(), client.Identity{Generation: generationB}); err != nil || len(id.calls) > 0 {
		t.Errorf("renewed %q, %v", id.calls, err)
	}
}

// What is not confirmed is an error on the host, and the guest does not take
// the new generation: commands for it are refused.
func TestA3RenewFailsClosed(t *testing.T) {
	for what, item := range map[string]string{
		"entropy": proto.ItemEntropy, "clock": proto.ItemWallClock, "hostname": proto.ItemHostname,
		"machine-id": proto.ItemMachineID, "boot-id": proto.ItemBootID, "network": proto.ItemNetwork,
	} {
		id := &fakeIdentity{fail: map[string]error{what: errors.New("no")}}
		g := start(t, agent.Config{Identity: id})
		_, err := g.Renew(context.Background(), identity(generationA))
		var open *client.UnconfirmedError
		if !errors.As(err, &open) || open.Items[item] == "" || open.Items[proto.ItemGeneration] == "" || len(open.Items) != 2 {
			t.Errorf("%s: error %v, want it and the generation unconfirmed", what, err)
		}
		c := g.with(client.Config{Generation: generationA})
		if _, err := c.Exec(context.Background(), client.Command{Args: []string{"true"}}); !errors.Is(err, &client.Error{Code: proto.CodeGenerationMismatch}) {
			t.Errorf("%s: exec: error %v, want generation_mismatch", what, err)
		}
	}
	t.Run("no machine id", func(t *testing.T) {
		g := start(t, agent.Config{Identity: &fakeIdentity{fail: map[string]error{"machine-id": fs.ErrNotExist}}})
		r, err := g.Renew(context.Background(), identity(generationA))
		if err != nil || r.Items[proto.ItemMachineID].Status != proto.RenewAbsent {
			t.Errorf("got %+v, %v", r, err)
		}
	})
	t.Run("no entropy device", func(t *testing.T) {
		g := start(t, agent.Config{Identity: &fakeIdentity{fail: map[string]error{"entropy": fs.ErrNotExist}}})
		if _, err := g.Renew(context.Background(), identity(generationA)); err == nil {
			t.Error("a guest that cannot take entropy is confirmed")
		}
	})
}

// hook writes a program into a directory of hooks.
func hook(t *testing.T, dir, name, script string, mode os.FileMode) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script+"\n"), mode); err != nil {
		t.Fatal(err)
	}
}

// A clone runs its hooks after the renewal of all else and before its first
// command, in the order of their names and once; a first boot does not.
func TestHooks(t *testing.T) {
	dir, state := t.TempDir(), t.TempDir()
	g := start(t, agent.Config{Identity: &fakeIdentity{}, HooksDir: dir, StateDir: state})
	ran := filepath.Join(g.dir, "ran")
	hook(t, dir, "20-second", "sleep 1.3; echo second $FORKVM_GENERATION $(cat "+state+"/generation) >>"+ran, 0o755)
	hook(t, dir, "10-first", "echo first >>"+ran, 0o755)
	hook(t, dir, "30-not-executable", "echo no >>"+ran, 0o644)
	hook(t, dir, "40-old~", "echo no >>"+ran, 0o755)
	if r, err := g.WaitRenewed(context.Background(), identity(generationA)); err != nil || len(r.Items) != 7 {
		t.Fatalf("first boot: %+v, %v", r, err)
	}
	if _, err := os.Stat(ran); err == nil {
		t.Error("hooks run at the first boot")
	}
	// They may take longer than a host waits for an agent that does not answer.
	r, err := g.WaitRenewed(context.Background(), identity(generationB))
	if err != nil || r.Items[proto.ItemHooks].Status != proto.RenewDone {
		t.Fatalf("got %+v, %v", r, err)
	}
	if _, err := g.Renew(context.Background(), identity(generationB)); err != nil {
		t.Fatal(err)
	}
	if b, _ := os.ReadFile(ran); string(b) != "first\nsecond "+generationB+" "+generationB+"\n" {
		t.Errorf("hooks did %q", b)
	}
}

// A hook that fails is a renewal that fails: the clone does not get its generation.
func TestHooksFailClosed(t *testing.T) {
	for name, tt := range map[string]struct {
		script  string
		timeout time.Duration
		want    string
	}{
		"exit code":      {"echo trying; echo no lease >&2; exit 3", time.Minute, "exit code 3: no lease"},
		"too long":       {"sleep 300", 300 * time.Millisecond, "still running after 300ms"},
		"no such loader": {"exit 0", time.Minute, "interpreter"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			g := start(t, agent.Config{Identity: &fakeIdentity{}, HooksDir: dir, HooksTimeout: tt.timeout})
			hook(t, dir, "10-fails", tt.script, 0o755)
			hook(t, dir, "20-never", "touch "+g.dir+"/ran", 0o755)
			if name == "no such loader" {
				os.WriteFile(filepath.Join(dir, "10-fails"), []byte("#!/does/not/exist\n"), 0o755)
			}
			if _, err := g.Renew(context.Background(), identity(generationA)); err != nil {
				t.Fatal(err)
			}
			_, err := g.Renew(context.Background(), identity(generationB))
			var open *client.UnconfirmedError
			if !errors.As(err, &open) || !strings.Contains(open.Items[proto.ItemHooks], tt.want) || open.Items[proto.ItemGeneration] == "" {
				t.Errorf("error %v, want %q", err, tt.want)
			}
			if _, err := os.Stat(g.dir + "/ran"); err == nil {
				t.Error("the next hook ran")
			}
			if info, err := g.Ping(context.Background()); err != nil || info.Generation != generationA {
				t.Errorf("got %+v, %v", info, err)
			}
		})
	}
}

func TestRenewRefusesNonsense(t *testing.T) {
	g := start(t, agent.Config{Identity: &fakeIdentity{}})
	for name, change := range map[string]func(*client.Identity){
		"no generation":        func(i *client.Identity) { i.Generation = "" },
		"generation no UUID":   func(i *client.Identity) { i.Generation = strings.Repeat("a", 36) },
		"generation with case": func(i *client.Identity) { i.Generation = strings.ToUpper(generationA) },
		"entropy":              func(i *client.Identity) { i.Entropy = make([]byte, 513) },
		"hostname":             func(i *client.Identity) { i.Hostname = strings.Repeat("h", 65) },
		"machine id":           func(i *client.Identity) { i.MachineID = "../../etc" },
		"card":                 func(i *client.Identity) { i.Network = &proto.Network{MAC: "02:00"} },
		"address": func(i *client.Identity) {
			i.Network = &proto.Network{MAC: cardAddress, Addresses: []string{"10.0.0.1"}}
		},
		"gateway": func(i *client.Identity) { i.Network = &proto.Network{MAC: cardAddress, Gateways: []string{"gw"}} },
		"resolver": func(i *client.Identity) {
			i.Network = &proto.Network{MAC: cardAddress, Resolvers: []string{"$(reboot)"}}
		},
		"resolvers":            func(i *client.Identity) { i.Network = &proto.Network{MAC: cardAddress, Resolvers: make([]string, 17)} },
		"machine id with case": func(i *client.Identity) { i.MachineID = strings.Repeat("AB", 16) },
	} {
		id := identity(generationA)
		change(&id)
		if _, err := g.Renew(context.Background(), id); !errors.Is(err, &client.Error{Code: proto.CodeInvalidRequest}) {
			t.Errorf("%s: error %v, want invalid_request", name, err)
		}
	}
}

// A guest with another generation than the host believes does nothing for it.
func TestGenerationMismatch(t *testing.T) {
	g := start(t, agent.Config{Identity: &fakeIdentity{}})
	refused := func(c *client.Client) {
		t.Helper()
		mismatch := &client.Error{Code: proto.CodeGenerationMismatch}
		path := filepath.Join(g.dir, "file")
		if _, err := c.Exec(context.Background(), client.Command{Args: []string{"touch", path}}); !errors.Is(err, mismatch) {
			t.Errorf("exec: error %v, want generation_mismatch", err)
		}
		if _, err := c.Put(context.Background(), client.File{Path: path}, strings.NewReader("x")); !errors.Is(err, mismatch) {
			t.Errorf("put: error %v, want generation_mismatch", err)
		}
		if _, err := c.Get(context.Background(), "/etc/passwd", new(strings.Builder)); !errors.Is(err, mismatch) {
			t.Errorf("get: error %v, want generation_mismatch", err)
		}
		if _, err := os.Stat(path); err == nil {
			t.Error("it happened nevertheless")
		}
	}
	a, b := g.with(client.Config{Generation: generationA}), g.with(client.Config{Generation: generationB})
	refused(a) // not renewed yet
	if _, err := g.Renew(context.Background(), client.Identity{Generation: generationA}); err != nil {
		t.Fatal(err)
	}
	if r, err := a.Exec(context.Background(), client.Command{Args: []string{"true"}}); err != nil || r.ExitCode != 0 {
		t.Errorf("after renewal: %+v, %v", r, err)
	}
	refused(b)
}

func TestShutdown(t *testing.T) {
	asked := make(chan string, 1)
	g := start(t, agent.Config{Shutdown: func(action string) (string, error) { asked <- action; return "test", nil }})
	method, err := g.Shutdown(context.Background(), true)
	if err != nil || method != "test" || <-asked != proto.ShutdownReboot {
		t.Errorf("got %q, %v", method, err)
	}
	_, err = g.Exec(context.Background(), client.Command{Args: []string{"true"}})
	if !errors.Is(err, &client.Error{Code: proto.CodeShuttingDown}) {
		t.Errorf("exec afterwards: error %v, want shutting_down", err)
	}
	plain := start(t, agent.Config{})
	if _, err := plain.Shutdown(context.Background(), false); !errors.Is(err, &client.Error{Code: proto.CodeUnsupported}) {
		t.Errorf("error %v, want unsupported", err)
	}
	if _, err := plain.Renew(context.Background(), identity(generationA)); !errors.Is(err, &client.Error{Code: proto.CodeUnsupported}) {
		t.Errorf("error %v, want unsupported", err)
	}
}
