package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/internal/node"
)

const (
	// serverAddress is where the host's servers are that a guest may reach.
	serverAddress = "198.18.0.1"
	// flowMiB is how much a row about a connection moves.
	flowMiB = 16
	// requestCount is how many connections a row about requests rests on.
	requestCount = 50
	// flowProgram is guestload in the guest.
	flowProgram = "/dev/shm/guestload"
)

// network measures what passes between a guest and servers of its host through its network card.
func (b *bench) network(ctx context.Context) error {
	allowed := &policy.Policy{Mode: policy.Allowlist, Allow: []string{serverAddress}}
	vm, err := b.scene.node.Boot(ctx, imageName, node.Options{CPUs: 1, MemoryBytes: standardMemory, Network: allowed})
	if err != nil {
		return err
	}
	return errors.Join(b.flows(ctx, "net", vm.Agent()), remove(ctx, vm))
}

// networkQEMU measures the same through QEMU's own network in user space (libslirp).
func (b *bench) networkQEMU(ctx context.Context) error {
	r, err := findQEMU(b.config.Scene, "-netdev", "user,id=network", "-device", "virtio-net-device,netdev=network")
	var absent errNotRun
	if errors.As(err, &absent) {
		b.note("qemu_net: not run: %s", absent.reason)
		return nil
	}
	if err != nil {
		return err
	}
	s := stable{rival: r, scene: b.config.Scene, dir: filepath.Join(b.config.Scene.Dir, "qemu-net")}
	return s.with(ctx, "", func(_ string, agent *client.Client, _ int) error {
		booting, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		if _, err := agent.WaitReady(booting); err != nil {
			return err
		}
		const configure = "ip link set eth0 up && ip addr add 10.0.2.15/24 dev eth0 && ip route add default via 10.0.2.2"
		if err := succeed(ctx, agent, client.Command{Args: []string{"sh", "-c", configure}}); err != nil {
			return err
		}
		return b.flows(ctx, "qemu_net", agent)
	})
}

// flows adds the rows name_out_mib, name_in_mib and name_request: what a MiB costs each way on one connection of TCP, and what a
// connection costs on which a byte is asked and a byte is answered. The guest's clock is the host's.
func (b *bench) flows(ctx context.Context, name string, agent *client.Client) error {
	servers, err := serveFlows(ctx)
	if err != nil {
		return err
	}
	defer servers.close()
	program, err := os.Open(b.config.Scene.Guestload)
	if err != nil {
		return err
	}
	defer program.Close()
	if _, err := agent.Put(ctx, client.File{Path: flowProgram, Mode: 0o755}, program); err != nil {
		return err
	}
	for _, row := range []struct {
		name string
		args []string
		of   float64
	}{
		{"out_mib", []string{"flow", "-to", servers.sink, "-send", strconv.Itoa(flowMiB << 20)}, flowMiB},
		{"in_mib", []string{"flow", "-to", servers.source}, flowMiB},
		{"request", []string{"flow", "-to", servers.answerer, "-send", "1", "-count", strconv.Itoa(requestCount)}, requestCount},
	} {
		var samples []float64
		for i := range transferRounds + 1 {
			var said bytes.Buffer
			if err := succeed(ctx, agent, client.Command{Args: append([]string{flowProgram}, row.args...), Stdout: &said}); err != nil {
				return fmt.Errorf("%s_%s: %w", name, row.name, err)
			}
			took, err := strconv.ParseFloat(strings.TrimSpace(said.String()), 64)
			if err != nil {
				return fmt.Errorf("%s_%s: %w", name, row.name, err)
			}
			if i > 0 { // the first is not counted
				samples = append(samples, took/row.of)
			}
		}
		b.row(name+"_"+row.name, CMS, samples)
	}
	return nil
}

// flowServers are servers of the host. The sink takes all that comes, the source sends flowMiB, and the answerer answers one
// byte with another; each ends the connection then.
type flowServers struct {
	sink, source, answerer string
	listeners              []net.Listener
}

func serveFlows(ctx context.Context) (*flowServers, error) {
	address := []string{"ip", "addr", "replace", serverAddress + "/32", "dev", "lo"}
	if out, err := exec.CommandContext(ctx, "busybox", address...).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("give the host an address: %w: %s", err, out)
	}
	s := &flowServers{}
	for _, server := range []struct {
		at    *string
		serve func(net.Conn) error
	}{
		{&s.sink, func(c net.Conn) error { _, err := io.Copy(io.Discard, c); return err }},
		{&s.source, func(c net.Conn) error { _, err := c.Write(make([]byte, flowMiB<<20)); return err }},
		{&s.answerer, func(c net.Conn) error { _, err := io.CopyN(c, c, 1); return err }},
	} {
		l, err := net.Listen("tcp", net.JoinHostPort(serverAddress, "0"))
		if err != nil {
			return nil, errors.Join(err, s.close())
		}
		s.listeners = append(s.listeners, l)
		*server.at = l.Addr().String()
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return // closed
				}
				// What fails here fails in the guest.
				_ = server.serve(c)
				c.Close()
			}
		}()
	}
	return s, nil
}

func (s *flowServers) close() error {
	var errs []error
	for _, l := range s.listeners {
		errs = append(errs, l.Close())
	}
	return errors.Join(errs...)
}
