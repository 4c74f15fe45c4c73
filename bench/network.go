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
	// flowMiB is how much a row about a connection moves, flowRounds how often each row is taken.
	flowMiB, flowRounds = 16, 6
	// requestCount is how many connections a row about requests rests on, datagramCount how many datagrams one about these.
	requestCount, datagramCount = 200, 500
	// flowProgram is guestload in the guest.
	flowProgram = "/dev/shm/guestload"
)

// network measures what passes between a guest and servers of its host through its network card.
func (b *bench) network(ctx context.Context) error {
	return errors.Join(b.networkEnforced(ctx, "net", node.EnforceAuto), b.networkEnforced(ctx, "net_user", node.EnforceUser))
}

// networkEnforced measures it with these keeping the guest to its policy.
func (b *bench) networkEnforced(ctx context.Context, name string, by node.Enforcer) error {
	// The kernel knows the host's addresses from when a VM gets its policy.
	if err := addServerAddress(ctx); err != nil {
		return err
	}
	allowed := &policy.Policy{Mode: policy.Allowlist, Allow: []string{serverAddress}}
	vm, err := b.scene.node.Boot(ctx, imageName, node.Options{CPUs: 1, MemoryBytes: standardMemory, Network: allowed, Enforce: by})
	if err != nil {
		return err
	}
	return errors.Join(b.flows(ctx, name, vm.Agent()), remove(ctx, vm))
}

// networkQEMU measures the same through QEMU's own network in user space (libslirp).
func (b *bench) networkQEMU(ctx context.Context) error {
	return b.flowsThroughQEMU(ctx, "qemu_net", "user", 1500)
}

// networkPasst measures the same through passt, which is QEMU's network in a process of its own. Its guests have the largest packets
// that there are, which it tells them by DHCP: segments that go together it has not.
func (b *bench) networkPasst(ctx context.Context) error {
	if err := addServerAddress(ctx); err != nil { // passt looks for one
		return err
	}
	p, err := startPasst(ctx)
	if errors.Is(err, exec.ErrNotFound) {
		b.note("passt_net: not run: %s", err)
		return nil
	}
	if err != nil {
		return err
	}
	err = b.flowsThroughQEMU(ctx, "passt_net", "stream,server=off,addr.type=unix,addr.path="+p.socket, 65520)
	if said := p.close(); err != nil {
		return fmt.Errorf("%w; passt said: %s", err, said)
	}
	return nil
}

// flowsThroughQEMU measures it in a guest of QEMU's with this network behind its card and this size of packets.
func (b *bench) flowsThroughQEMU(ctx context.Context, name, network string, mtu int) error {
	r, err := findQEMU(b.config.Scene, "-netdev", network+",id=network", "-device", "virtio-net-device,netdev=network")
	var absent errNotRun
	if errors.As(err, &absent) {
		b.note("%s: not run: %s", name, absent.reason)
		return nil
	}
	if err != nil {
		return err
	}
	if err := addServerAddress(ctx); err != nil {
		return err
	}
	s := stable{rival: r, scene: b.config.Scene, dir: filepath.Join(b.config.Scene.Dir, name)}
	return s.with(ctx, "", func(_ string, agent *client.Client, _ int) error {
		booting, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		if _, err := agent.WaitReady(booting); err != nil {
			return err
		}
		configure := fmt.Sprintf("ip link set eth0 mtu %d up && ip addr add 10.0.2.15/24 dev eth0 && ip route add default via 10.0.2.2", mtu)
		if err := succeed(ctx, agent, client.Command{Args: []string{"sh", "-c", configure}}); err != nil {
			return err
		}
		return b.flows(ctx, name, agent)
	})
}

// addServerAddress gives the host serverAddress.
func addServerAddress(ctx context.Context) error {
	out, err := exec.CommandContext(ctx, "busybox", "ip", "addr", "replace", serverAddress+"/32", "dev", "lo").CombinedOutput()
	if err != nil {
		return fmt.Errorf("give the host an address: %w: %s", err, out)
	}
	return nil
}

// flows adds the rows name_out_mib, name_in_mib, name_request and name_datagram: what a MiB costs each way on one connection of TCP,
// and what a byte and its answer cost with a connection of their own, and in datagrams. The guest's clock is the host's. The guest
// ends each connection, when it has all that it expects: if it has said before that no more comes from it, Debian 12's passt does not
// tell it that the server has ended, too, and where servers end first, libslirp's guest cannot reach its network any more after many connections.
func (b *bench) flows(ctx context.Context, name string, agent *client.Client) error {
	servers, err := serveFlows()
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
		{"in_mib", []string{"flow", "-to", servers.source, "-receive", strconv.Itoa(flowMiB << 20)}, flowMiB},
		{"request", []string{"flow", "-to", servers.answerer, "-send", "1", "-receive", "1", "-count", strconv.Itoa(requestCount)}, requestCount},
		{"datagram", []string{"datagrams", "-to", servers.echo, "-count", strconv.Itoa(datagramCount)}, datagramCount},
	} {
		var samples []float64
		for i := range flowRounds + 1 {
			var said bytes.Buffer
			command := client.Command{Args: append([]string{flowProgram}, row.args...), Stdout: &said, Timeout: patience}
			if err := succeed(ctx, agent, command); err != nil {
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
// byte with another; each ends the connection when the guest has. The echo sends datagrams back.
type flowServers struct {
	sink, source, answerer, echo string
	sockets                      []io.Closer
}

func serveFlows() (*flowServers, error) {
	s := &flowServers{}
	for _, server := range []struct {
		at    *string
		serve func(net.Conn) error
	}{
		{&s.sink, func(net.Conn) error { return nil }},
		{&s.source, func(c net.Conn) error { _, err := c.Write(make([]byte, flowMiB<<20)); return err }},
		{&s.answerer, func(c net.Conn) error { _, err := io.CopyN(c, c, 1); return err }},
	} {
		l, err := net.Listen("tcp", net.JoinHostPort(serverAddress, "0"))
		if err != nil {
			return nil, errors.Join(err, s.close())
		}
		s.sockets = append(s.sockets, l)
		*server.at = l.Addr().String()
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return // closed
				}
				// What fails here fails in the guest.
				if server.serve(c) == nil {
					_, _ = io.Copy(io.Discard, c)
				}
				c.Close()
			}
		}()
	}
	c, err := net.ListenPacket("udp", net.JoinHostPort(serverAddress, "0"))
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	s.sockets = append(s.sockets, c)
	s.echo = c.LocalAddr().String()
	go func() {
		b := make([]byte, 1)
		for {
			n, from, err := c.ReadFrom(b)
			if err != nil {
				return // closed
			}
			_, _ = c.WriteTo(b[:n], from)
		}
	}()
	return s, nil
}

func (s *flowServers) close() error {
	var errs []error
	for _, l := range s.sockets {
		errs = append(errs, l.Close())
	}
	return errors.Join(errs...)
}
