package judge

import (
	"crypto/sha256"
	"encoding/hex"
	"hash"
	"strings"
	"sync"
	"time"
)

const (
	// outputLimit is how much of each stream a guest may send.
	outputLimit = 64 << 20
	// tailLimit is how much of it is kept.
	tailLimit = 64 << 10
)

// capture hashes a stream and keeps its end.
type capture struct {
	mu    sync.Mutex
	sum   hash.Hash
	bytes int64
	tail  []byte
	last  time.Time
}

func newCapture() *capture { return &capture{sum: sha256.New()} }

// Write implements io.Writer.
func (c *capture) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sum.Write(p)
	c.bytes += int64(len(p))
	c.last = time.Now()
	c.tail = append(c.tail, p[max(0, len(p)-tailLimit):]...)
	// Not moved for each line of a long output.
	if len(c.tail) > 2*tailLimit {
		c.tail = append(c.tail[:0], c.tail[len(c.tail)-tailLimit:]...)
	}
	return len(p), nil
}

func (c *capture) output(dropped int64) Output {
	c.mu.Lock()
	defer c.mu.Unlock()
	tail := c.tail[max(0, len(c.tail)-tailLimit):]
	return Output{
		Bytes: c.bytes, Dropped: dropped, SHA256: hex.EncodeToString(c.sum.Sum(nil)),
		Tail:      strings.ToValidUTF8(string(tail), "\uFFFD"),
		Truncated: int64(len(tail)) < c.bytes+dropped,
	}
}

// since is when something was last written, in ms after start, -1 if nothing was.
func (c *capture) since(start time.Time) int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.last.IsZero() {
		return -1
	}
	return c.last.Sub(start).Milliseconds()
}
