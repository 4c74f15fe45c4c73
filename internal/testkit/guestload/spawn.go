package main

import (
	"flag"
	"os"
	"os/exec"
)

// spawn starts a program for each connection to its vsock port, with the connection
// as its standard input and output, as inetd does.
func spawn(args []string) error {
	flags := flag.NewFlagSet("spawn", flag.ContinueOnError)
	port := flags.Uint("port", 0, "vsock port to listen on")
	if err := flags.Parse(args); err != nil {
		return err
	}
	listener, err := listenVsock(uint32(*port))
	if err != nil {
		return err
	}
	for {
		fd, err := acceptVsock(listener)
		if err != nil {
			return err
		}
		conn := os.NewFile(uintptr(fd), "vsock")
		program := exec.Command(flags.Arg(0), flags.Args()[1:]...)
		program.Stdin, program.Stdout = conn, conn
		err = program.Start()
		conn.Close()
		if err != nil {
			return err
		}
		go func() { _ = program.Wait() }()
	}
}
