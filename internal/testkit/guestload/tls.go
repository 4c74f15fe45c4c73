package main

import (
	"crypto/tls"
	"crypto/x509"
	"flag"
	"fmt"
	"io"
	"os"
)

// handshakes is a TLS client that has been running for long when it is used: for
// each connection to its vsock port it makes a handshake with the server at the
// other end, by the guest's clock, and sends "verified". A server whose
// certificate it does not accept gets an alert.
func handshakes(args []string) error {
	flags := flag.NewFlagSet("tls", flag.ContinueOnError)
	port := flags.Uint("port", 7100, "vsock port to listen on")
	roots := flags.String("roots", "/run/roots.pem", "certificates to trust")
	name := flags.String("name", "judge.test", "name that the server's certificate must have")
	if err := flags.Parse(args); err != nil {
		return err
	}
	pem, err := os.ReadFile(*roots)
	if err != nil {
		return err
	}
	config := &tls.Config{RootCAs: x509.NewCertPool(), ServerName: *name}
	if !config.RootCAs.AppendCertsFromPEM(pem) {
		return fmt.Errorf("no certificate in %s", *roots)
	}
	listener, err := listenVsock(uint32(*port))
	if err != nil {
		return err
	}
	fmt.Println("listening")
	for {
		fd, err := acceptVsock(listener)
		if err != nil {
			return err
		}
		conn := tls.Client(socketConn{os.NewFile(uintptr(fd), "vsock")}, config)
		// The other end learns of an error by an alert.
		_, _ = io.WriteString(conn, "verified")
		conn.Close()
	}
}
