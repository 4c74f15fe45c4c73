package client

import (
	"context"
	"fmt"
	"io"
	"io/fs"
	"time"

	"github.com/forkvm/forkvm/agent/proto"
)

// Kind is what a name in a file system stands for.
type Kind string

// Kinds of files.
const (
	KindFile      Kind = proto.KindFile
	KindDirectory Kind = proto.KindDirectory
	KindLink      Kind = proto.KindLink
	KindOther     Kind = proto.KindOther // FIFO, socket, device
)

// File describes a file in a guest.
type File struct {
	// Path is absolute; any bytes that Linux allows.
	Path string
	// Mode are its permissions, with fs.ModeSetuid, ModeSetgid and ModeSticky.
	// Put uses 0644 if it is 0.
	Mode fs.FileMode
	// Kind is set by Get, Stat and List.
	Kind Kind
	// User owns it after Put, in the form of Command.User; empty: root.
	User string
	// UID, GID, Size and Modified are set by Get, Stat and List.
	UID, GID uint32
	Size     int64
	Modified time.Time
}

// Put writes everything from r into a file of the guest and returns how much
// that was. The file appears under its name complete and written to disk, or
// not at all; a file or symbolic link of that name is replaced.
func (c *Client) Put(ctx context.Context, f File, r io.Reader) (int64, error) {
	if f.Mode == 0 {
		f.Mode = 0o644
	}
	request := proto.PutRequest{Path: proto.Text(f.Path), Mode: toUnix(f.Mode), User: f.User}
	var result proto.FileResult
	err := c.upload(ctx, proto.OpPut, request, f.Path, r, &result)
	return result.Bytes, err
}

// Get writes the contents of a regular file of the guest to w and returns what
// the file is. Its Size is the number of bytes written.
func (c *Client) Get(ctx context.Context, path string, w io.Writer) (File, error) {
	f := File{Path: path}
	onStart := func(s proto.Started) {
		if i := s.File; i != nil {
			f.describe(*i)
		}
	}
	var result proto.FileResult
	err := c.download(ctx, proto.OpGet, proto.GetRequest{Path: proto.Text(path)}, path, w, onStart, &result)
	f.Size = result.Bytes
	return f, err
}

func (f *File) describe(i proto.FileInfo) {
	f.Kind, f.Mode, f.UID, f.GID, f.Size, f.Modified = Kind(i.Kind), fromUnix(i.Mode), i.UID, i.GID, i.Size, time.Unix(0, i.MtimeNS)
}

// upload sends everything from r as the operation's data.
func (c *Client) upload(ctx context.Context, op string, params any, path string, r io.Reader, result any, requires ...string) error {
	k, err := c.begin(ctx, op, proto.Request{Generation: c.cfg.Generation, Requires: requires}, params, nil)
	if err != nil {
		return err
	}
	window := proto.NewWindow()
	k.onCredit = func(_ uint16, n int, f proto.Flags) error { return window.Add(n) }
	sent := make(chan error, 1)
	go func() {
		err := k.send(k.observed(proto.Stdin, r), window)
		sent <- err
		if err != nil {
			k.conn.Close() // the agent takes that for an unfinished transfer
		}
	}()
	err = k.finish(result)
	window.Close()
	k.end()
	select {
	case readErr := <-sent:
		if readErr != nil {
			err = fmt.Errorf("read data for %q: %w", path, readErr)
		}
	default:
		// A refused transfer ends before its data; r may be in a Read.
	}
	return k.conclude(result, err)
}

// download writes the operation's data to w.
func (c *Client) download(ctx context.Context, op string, params any, path string, w io.Writer, onStart func(proto.Started), result any, requires ...string) error {
	q := proto.NewQueue(outputWindow)
	k, err := c.begin(ctx, op, proto.Request{Generation: c.cfg.Generation, Requires: requires}, params, map[uint16]*proto.Queue{proto.Stdout: q})
	if err != nil {
		return err
	}
	defer k.end()
	k.onStart = onStart
	written := make(chan error, 1)
	go func() { written <- receive(k, q, w) }()
	err = k.finish(result)
	if err != nil {
		q.Close()
	} else {
		q.End()
	}
	if writeErr := <-written; writeErr != nil {
		k.answered = false // the connection is closed
		err = fmt.Errorf("write data of %q: %w", path, writeErr)
	}
	return k.conclude(result, err)
}

func receive(k *call, q *proto.Queue, w io.Writer) error {
	var b []byte
	for {
		var ok bool
		if b, ok = q.Pop(b); !ok {
			return nil
		}
		if _, err := w.Write(b); err != nil {
			q.Close()
			k.conn.Close()
			return err
		}
		if n := q.Consumed(len(b)); n > 0 {
			k.wire.WriteCredit(proto.Stdout, n, 0)
		}
	}
}

var specialBits = []struct {
	mode fs.FileMode
	bit  uint32
}{{fs.ModeSetuid, 0o4000}, {fs.ModeSetgid, 0o2000}, {fs.ModeSticky, 0o1000}}

func toUnix(m fs.FileMode) uint32 {
	u := uint32(m.Perm())
	for _, s := range specialBits {
		if m&s.mode != 0 {
			u |= s.bit
		}
	}
	return u
}

func fromUnix(u uint32) fs.FileMode {
	m := fs.FileMode(u & 0o777)
	for _, s := range specialBits {
		if u&s.bit != 0 {
			m |= s.mode
		}
	}
	return m
}
