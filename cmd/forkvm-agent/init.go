package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/forkvm/forkvm/agent"
	"github.com/forkvm/forkvm/agent/initramfs"
	"github.com/forkvm/forkvm/agent/proto"
)

// stopGrace is how long processes have to end when the guest ends.
const stopGrace = 10 * time.Second

// bootGuest is PID 1. It returns only when the guest cannot go on.
func bootGuest() error {
	if err := initramfs.Early(); err != nil {
		return err
	}
	cfg, err := initramfs.Load(initramfs.ConfigPath)
	if err != nil {
		return err
	}
	if err := initramfs.Boot(cfg, log); err != nil {
		return err
	}
	if cfg.Mode == initramfs.ModeHandover {
		return initramfs.Handover(cfg)
	}
	initramfs.Settle(cfg, log)
	return serveAsInit()
}

func serveAsInit() error {
	// The last four would end another program and must not end the machine.
	// They are caught, not ignored: a command would inherit that.
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGPWR, syscall.SIGUSR2, syscall.SIGINT,
		syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGPIPE, syscall.SIGUSR1)
	conf := guestConfig()
	conf.Init = true
	i := &initProcess{}
	conf.Shutdown = i.shutdown
	a, err := agent.New(conf)
	if err != nil {
		return err
	}
	i.agent = a
	go i.obey(signals)
	l, err := agent.ListenVsock(proto.Port)
	if err != nil {
		return fmt.Errorf("%w (is the module vmw_vsock_virtio_transport in the initramfs?)", err)
	}
	log("ready")
	return a.Serve(context.Background(), l)
}

// initProcess ends the machine, once.
type initProcess struct {
	agent *agent.Agent
	once  sync.Once
}

func (i *initProcess) obey(signals <-chan os.Signal) {
	for s := range signals {
		switch s {
		case syscall.SIGTERM, syscall.SIGPWR, syscall.SIGUSR2:
			i.shutdown(proto.ShutdownPowerOff)
		case syscall.SIGINT: // Ctrl-Alt-Del
			i.shutdown(proto.ShutdownReboot)
		}
	}
}

func (i *initProcess) shutdown(action string) (string, error) {
	i.once.Do(func() { go i.end(action) })
	return "guest agent", nil
}

func (i *initProcess) end(action string) {
	initramfs.EndProcesses(stopGrace)
	// The commands that ended just now still have results to deliver.
	i.agent.WaitIdle(time.Second)
	die(initramfs.Halt(action == proto.ShutdownReboot))
}

// die ends the guest in a way that nobody takes for an orderly end: when PID 1
// exits, the kernel panics, after the reason is on the console.
func die(err error) {
	log("cannot go on: " + err.Error())
	const timeout = "/proc/sys/kernel/panic"
	if b, _ := os.ReadFile(timeout); strings.TrimSpace(string(b)) == "0" {
		// By default a panicked kernel waits for somebody to read the screen.
		os.WriteFile(timeout, []byte("-1"), 0)
	}
	os.Exit(1)
}
