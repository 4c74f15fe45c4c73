package client

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"

	"github.com/forkvm/forkvm/agent/proto"
)

// ScannedFile and ScanResult are what a scan finds.
type (
	ScannedFile = proto.ScannedFile
	ScanResult  = proto.ScanResult
)

// Scan is all that a guest has at one time.
type Scan struct {
	Files     []ScannedFile
	Processes []ProcessInfo
	ScanResult
}

// maxScanned bounds how much of a scan is held, in bytes of its stream: a guest is
// hostile.
const maxScanned = 256 << 20

// Scan looks at all files below a directory of the guest, whatever file system they
// are on, and all of its processes but the kernel's threads. It sees what a program in the guest would, the page cache included.
// What is made while it looks may be there or not.
func (c *Client) Scan(ctx context.Context, dir string) (*Scan, error) {
	s := &Scan{}
	w := &scanWriter{scan: s}
	err := c.download(ctx, proto.OpScan, proto.ScanRequest{Path: proto.Text(dir)}, dir, w, nil, &s.ScanResult)
	if err == nil && len(w.rest) > 0 {
		err = &ConnectionError{Op: proto.OpScan, Started: true, Err: &proto.ProtocolError{Reason: "a scan that ends in the middle of a line"}}
	}
	if err != nil {
		return nil, err
	}
	return s, nil
}

// scanWriter takes entries, one a line.
type scanWriter struct {
	scan *Scan
	rest []byte
	size int64
}

func (w *scanWriter) Write(p []byte) (int, error) {
	if w.size += int64(len(p)); w.size > maxScanned {
		return 0, fmt.Errorf("the guest has more than %d bytes of names", maxScanned)
	}
	w.rest = append(w.rest, p...)
	begin := 0
	for {
		length := bytes.IndexByte(w.rest[begin:], '\n')
		if length < 0 {
			w.rest = append(w.rest[:0], w.rest[begin:]...)
			return len(p), nil
		}
		if err := w.take(w.rest[begin : begin+length]); err != nil {
			return 0, err
		}
		begin += length + 1
	}
}

func (w *scanWriter) take(line []byte) error {
	var e proto.ScanEntry
	if err := json.Unmarshal(line, &e); err != nil {
		return fmt.Errorf("entry of a scan: %w", err)
	}
	if e.File != nil {
		w.scan.Files = append(w.scan.Files, *e.File)
	}
	if e.Process != nil {
		w.scan.Processes = append(w.scan.Processes, *e.Process)
	}
	return nil
}
