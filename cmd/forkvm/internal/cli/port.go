package cli

import (
	"context"
	"errors"
	"net"
	"strconv"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"github.com/forkvm/forkvm/agent/client"
	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
	"github.com/forkvm/forkvm/internal/failure"
)

func (a *app) portVerb() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "port VM [[ADDRESS:][PORT:]]GUEST...",
		Short: "Reach ports of a VM from this host",
		Long: "Reach TCP ports and Unix sockets in a VM from this host, without any network in\n" +
			"the VM. GUEST is a port or the path of a socket. What listens here is a port of\n" +
			"127.0.0.1, a free one unless PORT is given, at another ADDRESS if that is given,\n" +
			"or a Unix socket if a path stands in their place. The addresses are printed, and\n" +
			"are there until the VM has ended or the call is interrupted.",
		Example: "  forkvm port db 5432\n  forkvm port web 8080:80 0.0.0.0:8443:443\n  forkvm port db ./pg.sock:/run/postgresql/.s.PGSQL.5432",
		Args:    needs("VM", "GUEST..."),
	}
	cmd.RunE = a.onNode(func(ctx context.Context, n Node, args []string) error {
		var doors []door
		for _, spec := range args[1:] {
			d, err := parseDoor(spec)
			if err != nil {
				return err
			}
			doors = append(doors, d)
		}
		vm, err := findRunning(ctx, n, args[0])
		if err != nil {
			return err
		}
		return a.forward(ctx, n, vm, doors)
	})
	return a.withOutput(cmd)
}

// door is a listener of the host and the socket in the guest behind it.
type door struct {
	network, address           string // of the host
	guestNetwork, guestAddress string
	guest                      string // as it was given
}

// parseDoor reads [[ADDRESS:][PORT:]]GUEST.
func parseDoor(spec string) (door, error) {
	host, guest := "", spec
	if i := strings.Index(spec, ":/"); i >= 0 {
		host, guest = spec[:i], spec[i+1:]
	} else if i := strings.LastIndexByte(spec, ':'); i >= 0 {
		host, guest = spec[:i], spec[i+1:]
	}
	d := door{network: "tcp", guest: guest}
	switch {
	case strings.HasPrefix(guest, "/"):
		d.guestNetwork, d.guestAddress = "unix", guest
	case isPort(guest):
		d.guestNetwork, d.guestAddress = "tcp", ":"+guest
	default:
		return d, usagef("%q: %q is neither a port nor an absolute path", spec, guest)
	}
	switch {
	case host == "":
		d.address = "127.0.0.1:0"
	case strings.Contains(host, "/"):
		d.network, d.address = "unix", host
	case isPort(host):
		d.address = "127.0.0.1:" + host
	case net.ParseIP(strings.Trim(host, "[]")) != nil:
		d.address = net.JoinHostPort(strings.Trim(host, "[]"), "0")
	default:
		address, port, err := net.SplitHostPort(host)
		if err != nil || !isPort(port) || net.ParseIP(address) == nil {
			return d, usagef("%q: %q is neither PORT, ADDRESS, ADDRESS:PORT nor a path", spec, host)
		}
		d.address = host
	}
	return d, nil
}

func isPort(s string) bool {
	n, err := strconv.ParseUint(s, 10, 16)
	return err == nil && n > 0
}

// doorView is a listener as the command line shows it.
type doorView struct {
	Schema string  `json:"schema"`
	VM     *vmName `json:"vm"`
	Host   string  `json:"host"`
	Guest  string  `json:"guest"`
}

// forward opens all doors, prints where they are and serves them until the VM has
// ended.
func (a *app) forward(ctx context.Context, n Node, vm VM, doors []door) error {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	l := output.List[doorView]{Name: func(d doorView) string { return d.Host }}
	var listeners []net.Listener
	defer func() {
		for _, l := range listeners {
			l.Close()
		}
	}()
	for _, d := range doors {
		listener, err := net.Listen(d.network, d.address)
		if err != nil {
			return failure.As(failure.InvalidArgument, err)
		}
		listeners = append(listeners, listener)
		l.Items = append(l.Items, doorView{Schema: "forkvm/port/v1", VM: nameOf(vm), Host: listener.Addr().String(), Guest: d.guest})
	}
	format := a.format
	if !format.Machine() {
		format = output.Name
	}
	if err := l.Write(a.Stdout, format); err != nil {
		return err
	}
	errs := make([]error, len(doors))
	var all sync.WaitGroup
	for i, d := range doors {
		all.Go(func() {
			errs[i] = a.serveDoor(ctx, n, vm, listeners[i], d)
			stop(errs[i]) // all of them, or none
		})
	}
	_, _ = vm.Wait(ctx) // whatever ended it: it is over
	stop(errEnded)
	all.Wait()
	if err := errors.Join(errs...); context.Cause(ctx) != errEnded {
		return err
	}
	return nil
}

// errEnded is why a door is closed when its VM has ended.
var errEnded = errors.New("the vm has ended")

// serveDoor relays each connection to the VM as it is then: after a reset it has
// another generation.
func (a *app) serveDoor(ctx context.Context, n Node, vm VM, l net.Listener, d door) error {
	return client.Forward(ctx, l, func(ctx context.Context, conn client.HalfConn) error {
		now, err := n.Find(vm.Record().ID)
		if err != nil {
			conn.Close()
			return err
		}
		return now.Guest().Relay(ctx, conn, d.guestNetwork, d.guestAddress)
	}, func(err error) {
		if ctx.Err() == nil {
			a.complain(err)
		}
	})
}
