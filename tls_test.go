package forkvm_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"testing"
	"time"

	"github.com/forkvm/forkvm/agent/client"
)

const (
	tlsPort = 7100
	tlsName = "judge.test"
	// justNow is how long the test server's certificate has been valid: a guest
	// whose clock is older than that refuses it.
	justNow = 30 * time.Second
)

// newCertificate makes a certificate that is its own authority.
func newCertificate(t *testing.T) (tls.Certificate, []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: tlsName}, DNSNames: []string{tlsName},
		NotBefore: time.Now().Add(-justNow), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key},
		pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// startTLS starts a TLS client in the guest, which trusts the returned
// certificate and waits for servers that talk to it.
func startTLS(t *testing.T, ctx context.Context, vm running) tls.Certificate {
	t.Helper()
	certificate, authority := newCertificate(t)
	file := client.File{Path: "/run/roots.pem", Mode: 0o644}
	if _, err := vm.Agent().Put(ctx, file, bytes.NewReader(authority)); err != nil {
		t.Fatal(err)
	}
	sh(t, ctx, vm, "setsid guestload tls > /run/tls.log 2>&1 & until grep -q listening /run/tls.log; do sleep 0.05; done")
	return certificate
}

// handshake is a TLS server for the guest's client. It returns the client's
// random, 32 bytes of its first message.
func handshake(ctx context.Context, vm dialer, certificate tls.Certificate) (random string, err error) {
	conn, err := vm.Dial(ctx, tlsPort)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	hello := &recorder{Conn: conn}
	server := tls.Server(hello, &tls.Config{Certificates: []tls.Certificate{certificate}})
	said, err := io.ReadAll(server)
	if err == nil && string(said) != "verified" {
		err = fmt.Errorf("client said %q", said)
	}
	if err != nil {
		return "", fmt.Errorf("handshake: %w", err)
	}
	return hello.random()
}

// dialer is what handshake needs of a machine.
type dialer interface {
	Dial(ctx context.Context, port uint32) (net.Conn, error)
}

// recorder keeps the beginning of what is read.
type recorder struct {
	net.Conn
	head []byte
}

func (r *recorder) Read(p []byte) (int, error) {
	n, err := r.Conn.Read(p)
	r.head = append(r.head, p[:min(n, max(0, 64-len(r.head)))]...)
	return n, err
}

// random takes the client's random out of the first record: 5 bytes of record
// header, 4 of handshake header, 2 of version (RFC 8446, sections 4.1.2 and 5.1).
func (r *recorder) random() (string, error) {
	if len(r.head) < 43 || r.head[0] != 22 || r.head[5] != 1 {
		return "", fmt.Errorf("no client hello: %x", r.head)
	}
	return hex.EncodeToString(r.head[11:43]), nil
}
