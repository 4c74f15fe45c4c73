package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/testkit/attempt"
	"github.com/forkvm/forkvm/internal/testkit/stream"
)

// hold opens connections to a server, accepts as many, and adds a line to a file for each that ends. It says when all stand.
func hold(args []string) error {
	flags := flag.NewFlagSet("hold", flag.ContinueOnError)
	to := flags.String("to", "", "address to connect to")
	at := flags.String("at", ":7000", "address to listen at")
	count := flags.Int("count", 100, "connections each way")
	file := flags.String("file", "/run/held", "file to append to")
	if err := flags.Parse(args); err != nil {
		return err
	}
	out, err := os.OpenFile(*file, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	var all sync.WaitGroup
	wait := func(way string, c net.Conn) {
		defer c.Close()
		_, err := c.Read(make([]byte, 1))
		fmt.Fprintln(out, way, err)
	}
	l, err := net.Listen("tcp", *at)
	if err != nil {
		return err
	}
	for range *count {
		c, err := net.Dial("tcp", *to)
		if err != nil {
			return err
		}
		all.Go(func() { wait("out", c) })
	}
	fmt.Println("connected")
	for range *count {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		all.Go(func() { wait("in", c) })
	}
	fmt.Println("accepted")
	all.Wait()
	return nil
}

// transfer sends a stream to a server that echoes, checks what comes back, and prints how long that took in milliseconds.
func transfer(args []string) error {
	flags := flag.NewFlagSet("transfer", flag.ContinueOnError)
	to := flags.String("to", "", "address of the server")
	size := flags.Int64("bytes", 1<<20, "how much")
	if err := flags.Parse(args); err != nil {
		return err
	}
	c, err := net.Dial("tcp", *to)
	if err != nil {
		return err
	}
	defer c.Close()
	begun := time.Now()
	sent := make(chan error, 1)
	go func() {
		_, err := stream.Send(c, stream.New(1), *size, 64<<10)
		sent <- errors.Join(err, c.(*net.TCPConn).CloseWrite())
	}()
	checker := stream.NewChecker(1)
	if err := errors.Join(stream.Receive(c, checker, *size, 0), <-sent); err != nil {
		return fmt.Errorf("after %d bytes: %w", checker.Count(), err)
	}
	if n, err := c.Read(make([]byte, 1)); n != 0 || err != io.EOF {
		return fmt.Errorf("%d bytes more than were sent: %w", n, err)
	}
	_, err = fmt.Println(time.Since(begun).Milliseconds())
	return err
}

// flow makes connections to a server, one after the other, sends so much on each, reads so much, says that no more comes, waits until
// the server ends it, and prints how many milliseconds all of it took.
func flow(args []string) error {
	flags := flag.NewFlagSet("flow", flag.ContinueOnError)
	to := flags.String("to", "", "address of the server")
	size := flags.Int("send", 0, "how many bytes to send")
	answer := flags.Int("receive", 0, "how many bytes to read")
	count := flags.Int("count", 1, "how many connections to make")
	if err := flags.Parse(args); err != nil {
		return err
	}
	buffer := make([]byte, 64<<10)
	begun := time.Now()
	for range *count {
		c, err := net.Dial("tcp", *to)
		if err != nil {
			return err
		}
		for left := *size; left > 0 && err == nil; left -= len(buffer) {
			_, err = c.Write(buffer[:min(left, len(buffer))])
		}
		for left := *answer; left > 0 && err == nil; {
			var n int
			n, err = c.Read(buffer[:min(left, len(buffer))])
			left -= n
		}
		err = errors.Join(err, c.(*net.TCPConn).CloseWrite())
		if err == nil {
			_, err = c.Read(buffer)
		}
		c.Close()
		if err != io.EOF {
			return fmt.Errorf("connection to %s: %w", *to, err)
		}
	}
	_, err := fmt.Println(float64(time.Since(begun)) / float64(time.Millisecond))
	return err
}

// datagrams sends a byte to a server and reads the answer, as often as asked, and prints how many milliseconds all of it took.
func datagrams(args []string) error {
	flags := flag.NewFlagSet("datagrams", flag.ContinueOnError)
	to := flags.String("to", "", "address of the server")
	count := flags.Int("count", 1, "how many to send")
	if err := flags.Parse(args); err != nil {
		return err
	}
	c, err := net.Dial("udp", *to)
	if err != nil {
		return err
	}
	defer c.Close()
	b := make([]byte, 1)
	begun := time.Now()
	for range *count {
		if _, err := c.Write(b); err != nil {
			return err
		}
		if _, err := c.Read(b); err != nil {
			return err
		}
	}
	_, err = fmt.Println(float64(time.Since(begun)) / float64(time.Millisecond))
	return err
}

// queries asks the resolver from as many ports, some at a time, and prints how many answers came.
func queries(args []string) error {
	flags := flag.NewFlagSet("queries", flag.ContinueOnError)
	name := flags.String("name", "", "what to ask for")
	count := flags.Int("count", 1000, "how often")
	if err := flags.Parse(args); err != nil {
		return err
	}
	var answered atomic.Int64
	var all sync.WaitGroup
	left := make(chan struct{}, *count)
	for range *count {
		left <- struct{}{}
	}
	close(left)
	for range 16 {
		all.Go(func() {
			for range left {
				a := attempt.Attempt{Kind: attempt.DNS, Name: *name, Type: 1}
				if a.Do() == attempt.OK {
					answered.Add(1)
				}
			}
		})
	}
	all.Wait()
	_, err := fmt.Println(answered.Load())
	return err
}

// sniff prints who has sent a frame to whom on the card's link, each pair once: SOURCE DESTINATION TYPE.
func sniff(args []string) error {
	all := uint16(unix.ETH_P_ALL)<<8 | uint16(unix.ETH_P_ALL)>>8
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(all))
	if err != nil {
		return fmt.Errorf("open packet socket: %w", err)
	}
	defer unix.Close(fd)
	seen, frame := map[string]bool{}, make([]byte, 1<<16)
	for {
		n, from, err := unix.Recvfrom(fd, frame, 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return fmt.Errorf("receive frame: %w", err)
		}
		if l, ok := from.(*unix.SockaddrLinklayer); !ok || l.Hatype != unix.ARPHRD_ETHER || n < 14 {
			continue
		}
		line := fmt.Sprintf("%v %v %x", net.HardwareAddr(frame[6:12]), net.HardwareAddr(frame[:6]), frame[12:14])
		if !seen[line] {
			seen[line] = true
			fmt.Println(line)
		}
	}
}

// scatter sends datagrams from as many ports to an address, and waits for no answer.
func scatter(args []string) error {
	flags := flag.NewFlagSet("scatter", flag.ContinueOnError)
	network := flags.String("network", "udp", "tcp: begin connections instead")
	to := flags.String("to", "", "address, with %d twice: each goes to another")
	count := flags.Int("count", 1000, "how many")
	if err := flags.Parse(args); err != nil {
		return err
	}
	for i := range *count {
		at := fmt.Sprintf(*to, i>>8&255, i&255)
		d := net.Dialer{Timeout: time.Second}
		c, err := d.Dial(*network, at)
		if err != nil {
			continue // refused
		}
		_, _ = c.Write([]byte("datagram"))
		c.Close()
	}
	return nil
}
