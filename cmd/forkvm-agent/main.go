// Command forkvm-agent is the guest agent. As PID 1 it is the first program of
// a guest, see package agent/initramfs; otherwise it serves the host.
//
//	forkvm-agent serve [--guest] [--listen vsock:PORT|unix:PATH]
//	forkvm-agent version
//
// With --guest it takes the guest as its own: it protects itself from the
// kernel's out-of-memory killer, keeps commands in cgroups, renews the
// machine's identity and ends the machine when asked to.
package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime/debug"
	"strconv"
	"strings"

	"github.com/forkvm/forkvm/agent"
	"github.com/forkvm/forkvm/agent/initramfs"
	"github.com/forkvm/forkvm/agent/proto"
)

// version is set by the linker.
var version = "dev"

const usage = "usage: forkvm-agent serve [--guest] [--listen vsock:PORT|unix:PATH]\n       forkvm-agent version"

func main() {
	// The agent idles in every clone: it is better to collect often than to
	// hold on to memory. The limit is a soft one.
	debug.SetGCPercent(40)
	debug.SetMemoryLimit(16 << 20)
	if os.Getpid() == 1 {
		die(bootGuest())
		return
	}
	if err := run(os.Args[1:]); err != nil {
		log(err.Error())
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 1 && args[0] == "version" {
		fmt.Println("forkvm-agent " + version)
		return nil
	}
	o, err := parse(args)
	if err != nil {
		return err
	}
	l, err := listen(o.listen)
	if err != nil {
		return err
	}
	cfg := agent.Config{Version: version, Log: log}
	if o.guest {
		cfg = guestConfig()
		cfg.Shutdown = agent.AskInit
	}
	a, err := agent.New(cfg)
	if err != nil {
		return err
	}
	defer a.Close()
	return a.Serve(context.Background(), l)
}

type options struct {
	listen string
	guest  bool
}

func parse(args []string) (options, error) {
	o := options{listen: "vsock:" + strconv.Itoa(proto.Port)}
	if len(args) == 0 || args[0] != "serve" {
		return o, errors.New(usage)
	}
	for args = args[1:]; len(args) > 0; args = args[1:] {
		switch {
		case args[0] == "--guest":
			o.guest = true
		case args[0] == "--listen" && len(args) > 1:
			args = args[1:]
			o.listen = args[0]
		default:
			return o, errors.New(usage)
		}
	}
	return o, nil
}

func listen(address string) (net.Listener, error) {
	kind, value, _ := strings.Cut(address, ":")
	switch kind {
	case "unix":
		return net.Listen("unix", value)
	case "vsock":
		port, err := strconv.ParseUint(value, 10, 32)
		if err != nil {
			return nil, fmt.Errorf("parse vsock port %q: %w", value, err)
		}
		return agent.ListenVsock(uint32(port))
	}
	return nil, fmt.Errorf("listen on %q: neither vsock:PORT nor unix:PATH", address)
}

// guestConfig is for an agent that has a guest to itself, and prepares this
// process for it.
func guestConfig() agent.Config {
	if err := agent.Protect(); err != nil {
		log("no protection when memory runs out: " + err.Error())
	}
	cfg := agent.Config{
		Version:  version,
		StateDir: initramfs.StateDir,
		HooksDir: "/etc/forkvm/resume.d",
		Identity: agent.NewIdentity(initramfs.StateDir),
		Log:      log,
	}
	dir, err := agent.FindCgroup()
	if err == nil {
		err = agent.Enclose(dir)
	}
	if err != nil {
		log("commands are held by their process group only: " + err.Error())
		return cfg
	}
	cfg.Cgroup = dir
	return cfg
}

func log(message string) { fmt.Fprintln(os.Stderr, "forkvm-agent: "+message) }
