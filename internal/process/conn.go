package process

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"

	"github.com/forkvm/forkvm/internal/linux"
)

const (
	// maxMessage bounds one message's JSON. A packet must fit the socket's send
	// buffer, whose default is 208 KiB.
	maxMessage = 128 << 10
	// filesPerPacket is how many descriptors ride on one packet; a message with
	// more is preceded by packets that carry nothing else.
	filesPerPacket = 200
	// maxFiles bounds the descriptors of one message.
	maxFiles = 4096
)

// ahead is the body of a packet that only carries descriptors of the message
// behind it. It is no JSON document, so it cannot be mistaken for a message.
var ahead = []byte("+")

// conn sends and receives messages with descriptors over a packet socket
// (SOCK_SEQPACKET), where a message arrives whole or not at all. One goroutine
// may send while another receives.
type conn struct{ socket *net.UnixConn }

func newConn(socket *net.UnixConn) *conn { return &conn{socket: socket} }

func (c *conn) Close() error { return c.socket.Close() }

// send sends a message. The descriptors are duplicated into the socket; the
// files stay the caller's.
func (c *conn) send(message any, files []*os.File) error {
	body, err := json.Marshal(message)
	if err != nil {
		return fmt.Errorf("send message: %w", err)
	}
	if len(body) > maxMessage {
		return fmt.Errorf("send message: %d bytes: at most %d are possible", len(body), maxMessage)
	}
	for len(files) > filesPerPacket {
		if err := linux.SendFiles(c.socket, ahead, files[:filesPerPacket]...); err != nil {
			return fmt.Errorf("send message: %w", err)
		}
		files = files[filesPerPacket:]
	}
	if err := linux.SendFiles(c.socket, body, files...); err != nil {
		return fmt.Errorf("send message: %w", err)
	}
	return nil
}

// receive reads the next message into message and returns the files that came
// with it, which are the caller's to close. io.EOF: the peer is gone.
func (c *conn) receive(message any) (files []*os.File, err error) {
	defer func() {
		if err != nil {
			linux.CloseFiles(files...)
			files = nil
		}
	}()
	for {
		// Connections are many, and last for few messages, which are short: a buffer for any
		// message would be most of the garbage that a VM process makes.
		length, err := linux.NextMessage(c.socket)
		if err != nil {
			return files, err
		}
		if length > maxMessage {
			return files, fmt.Errorf("receive message: %d bytes: at most %d are possible", length, maxMessage)
		}
		buffer := make([]byte, max(length, 1))
		n, more, err := linux.ReceiveFiles(c.socket, buffer, filesPerPacket)
		if err != nil {
			return files, err
		}
		files = append(files, more...)
		if n == 0 {
			return files, io.EOF
		}
		if len(files) > maxFiles {
			return files, fmt.Errorf("receive message: more than %d descriptors", maxFiles)
		}
		if body := buffer[:n]; string(body) != string(ahead) {
			if err := json.Unmarshal(body, message); err != nil {
				return files, fmt.Errorf("receive message: %w", err)
			}
			return files, nil
		}
	}
}
