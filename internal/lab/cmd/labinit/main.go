// Labinit is the first program of the lab machine. It is process 1 and stays it, reaping orphans, while a second copy of
// it, "labinit serve", mounts the disks and runs the commands that the host sends over the machine's port.
package main

import (
	"fmt"
	"os"
	"os/exec"

	"golang.org/x/sys/unix"
)

func main() {
	var err error
	switch {
	case len(os.Args) == 2 && os.Args[1] == "serve":
		err = serve()
	case os.Getpid() != 1:
		fmt.Fprintln(os.Stderr, "labinit: runs only as the first program of the lab machine")
		os.Exit(2)
	case len(os.Args) == 2 && os.Args[1] == "moved":
		err = first()
	default:
		err = moveRoot()
	}
	if err != nil {
		// Standard error is the machine's console here; the host shows its last lines.
		fmt.Fprintf(os.Stderr, "labinit: %v\n", err)
	}
	if os.Getpid() == 1 {
		unix.Sync()
		_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	}
	os.Exit(1)
}

// first prepares the machine, starts the server and reaps until that ends, which ends the machine.
func first() error {
	if err := prepare(); err != nil {
		return err
	}
	server := exec.Command("/init", "serve")
	server.Stdin, server.Stdout, server.Stderr = os.Stdin, os.Stdout, os.Stderr
	server.Env = machineEnv()
	if err := server.Start(); err != nil {
		return fmt.Errorf("start server: %w", err)
	}
	// Every orphan of the machine comes to process 1. The server is a process of its own so that reaping whatever ends
	// here never takes an exit status that it waits for.
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return fmt.Errorf("wait for children: %w", err)
		case pid == server.Process.Pid:
			return fmt.Errorf("server ended: status %#x", uint32(status))
		}
	}
}

func machineEnv() []string {
	return []string{
		"PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOME=/root",
		"USER=root",
		"LOGNAME=root",
		"SHELL=/bin/sh",
		"TERM=dumb",
		"LANG=C.UTF-8",
		"TMPDIR=/tmp",
		"FORKVM_LAB=1",
		"FORKVM_KVM=linux",
	}
}
